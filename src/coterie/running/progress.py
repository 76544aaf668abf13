"""What is shown while a run goes on: a live table, or a line per round."""

import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Receives the result of every round."""

    def start(self, title: str, rounds: int, done: int) -> None: ...

    def round(self, line: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Shows nothing."""

    def start(self, title: str, rounds: int, done: int) -> None: ...

    def round(self, line: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


COLUMNS = ("round", "loss", "accuracy", "ARI", "groups", "switched", "faults", "sent", "time left")


class Clock:
    """Estimates the time left for everything that will run, not for one training of several."""

    def __init__(self) -> None:
        self.ahead: int | None = None  # rounds that have not been run, of all trainings
        self.done = 0  # rounds of this process
        self.began = 0.0
        self.rounds = self.last = 0  # of the training under way

    def expect(self, rounds: int) -> None:
        """Say how many rounds all trainings together have."""
        self.ahead = rounds

    def begin(self, rounds: int, done: int) -> None:
        """A training begins, or goes on after some rounds."""
        self.began = self.began or time.monotonic()
        self.rounds, self.last = rounds, done
        self.ahead = (rounds if self.ahead is None else self.ahead) - done

    def pass_round(self, number: int) -> float:
        """A round is over: seconds left at the pace so far."""
        assert self.ahead is not None
        self.done, self.last, self.ahead = self.done + 1, number, self.ahead - 1
        return (time.monotonic() - self.began) / self.done * max(self.ahead, 0)

    def finish(self) -> None:
        """A training is over, perhaps early."""
        assert self.ahead is not None
        rest = self.ahead - (self.rounds - self.last)
        self.ahead = rest if rest > 0 else None


class Plain(Clock):
    """A line per round, for logs and pipes."""

    def start(self, title: str, rounds: int, done: int) -> None:
        self.begin(rounds, done)
        some = (
            f"rounds {done + 1} to {rounds}" if done < rounds else f"all {rounds} rounds are done"
        )
        print(f"{title}: {some}", flush=True)

    def round(self, line: dict[str, Any]) -> None:
        left = self.pass_round(line["round"])
        pairs = zip(COLUMNS, cells(line, self.rounds, left), strict=True)
        print("  ".join(f"{name} {cell}" for name, cell in pairs if cell), flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def end(self) -> None:
        self.finish()


class Live(Plain):
    """A table that grows, with the newest rounds in view."""

    SHOWN = 12

    def start(self, title: str, rounds: int, done: int) -> None:
        from rich.console import Console
        from rich.live import Live as Screen

        self.begin(rounds, done)
        self.title = title
        self.rows: list[tuple[str, ...]] = []
        # The command line's output shows control characters as escapes; the table needs them.
        console = Console(file=getattr(sys.stdout, "stream", None), markup=False)
        self.screen = Screen(self.table(), console=console, refresh_per_second=4)
        self.screen.start()

    def table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(title=self.title, box=box.SIMPLE_HEAD, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in self.rows[-self.SHOWN :]:
            table.add_row(*row)
        return table

    def round(self, line: dict[str, Any]) -> None:
        self.rows.append(cells(line, self.rounds, self.pass_round(line["round"])))
        self.screen.update(self.table())

    def say(self, text: str) -> None:
        self.screen.console.print(text)

    def end(self) -> None:
        self.finish()
        self.screen.stop()


class Line(Clock):
    """One line that changes, on stderr: for Python, where results are printed by the user.

    Where lines cannot change, in logs and pipes, there is one per training.
    """

    def start(self, title: str, rounds: int, done: int) -> None:
        self.begin(rounds, done)
        self.title, self.since, self.left = title, time.monotonic(), 0.0
        self.moves = sys.stderr.isatty() or "ipykernel" in sys.modules

    def round(self, line: dict[str, Any]) -> None:
        self.left = self.pass_round(line["round"])
        if self.moves:
            score = _number(line.get("accuracy"), "accuracy {:.1%}, ")
            text = f"{self.title}: round {line['round']} of {self.rounds}, {score}"
            self._write(f"\r{text}{duration(self.left)} left for everything   ")

    def say(self, text: str) -> None:
        self._write(f"{text}\n")

    def end(self) -> None:
        self.finish()
        took = duration(time.monotonic() - self.since)
        left = f", {duration(self.left)} left" if self.left else ""
        text = f"{self.title}: {self.last} rounds in {took}{left}"
        self._write(f"\r{text:<78}\n" if self.moves else f"{text}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def choose_progress(progress: "bool | Progress") -> Progress:
    """A live table on a terminal, lines elsewhere, nothing if not wanted."""
    if not isinstance(progress, bool):
        return progress
    if not progress:
        return Silent()
    return Live() if sys.stdout.isatty() else Plain()


def expect(progress: Progress, rounds: int) -> None:
    """Tell a progress that estimates the time left how many rounds will run."""
    if isinstance(progress, Clock):
        progress.expect(rounds)


def cells(line: dict[str, Any], rounds: int, left: float) -> tuple[str, ...]:
    """The columns of a round as text; empty where nothing is known."""
    sizes = line.get("sizes")
    return (
        f"{line['round']}/{rounds}",
        _number(line.get("loss"), "{:.4f}"),
        _number(line.get("accuracy"), "{:.1%}"),
        _number(line.get("ari"), "{:.2f}"),
        "abandoned" if "abandoned" in line else list_sizes(sizes) if sizes else "",
        _number(line.get("churn"), "{:.0%}"),
        _name_faulty(line.get("faults", [])),
        megabytes(line["bytes"]),
        duration(left),
    )


def list_sizes(sizes: list[int]) -> str:
    """The sizes of the groups that have members.

    >>> list_sizes([7, 0, 3, 0, 0])
    '7/3'
    """
    return "/".join(str(size) for size in sizes if size)


def _name_faulty(faults: list[dict[str, str]]) -> str:
    """The clients whose replies were left out; the first two by name."""
    names = list(dict.fromkeys(fault["client"] for fault in faults))
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _number(value: float | None, shape: str) -> str:
    return "" if value is None or value != value else shape.format(value)


def megabytes(amount: float) -> str:
    """Bytes in a readable unit.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> duration(75), duration(7300)
    ('1 min 15 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
