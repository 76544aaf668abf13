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


class Plain:
    """A line per round, for logs and pipes."""

    def start(self, title: str, rounds: int, done: int) -> None:
        self.rounds, self.first, self.began = rounds, done, time.monotonic()
        some = (
            f"rounds {done + 1} to {rounds}" if done < rounds else f"all {rounds} rounds are done"
        )
        print(f"{title}: {some}", flush=True)

    def round(self, line: dict[str, Any]) -> None:
        pairs = zip(COLUMNS, cells(line, self.rounds, self.left(line)), strict=True)
        print("  ".join(f"{name} {cell}" for name, cell in pairs if cell), flush=True)

    def left(self, line: dict[str, Any]) -> float:
        """Seconds left at the pace so far."""
        done = line["round"] - self.first
        return (time.monotonic() - self.began) / max(done, 1) * (self.rounds - line["round"])

    def say(self, text: str) -> None:
        print(text, flush=True)

    def end(self) -> None: ...


class Live(Plain):
    """A table that grows, with the newest rounds in view."""

    SHOWN = 12

    def start(self, title: str, rounds: int, done: int) -> None:
        from rich.live import Live as Screen

        self.rounds, self.first, self.began = rounds, done, time.monotonic()
        self.title = title
        self.rows: list[tuple[str, ...]] = []
        self.screen = Screen(self.table(), refresh_per_second=4)
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
        self.rows.append(cells(line, self.rounds, self.left(line)))
        self.screen.update(self.table())

    def say(self, text: str) -> None:
        self.screen.console.print(text)

    def end(self) -> None:
        self.screen.stop()


def choose_progress(progress: "bool | Progress") -> Progress:
    """A live table on a terminal, lines elsewhere, nothing if not wanted."""
    if not isinstance(progress, bool):
        return progress
    if not progress:
        return Silent()
    return Live() if sys.stdout.isatty() else Plain()


def cells(line: dict[str, Any], rounds: int, left: float) -> tuple[str, ...]:
    """The columns of a round as text; empty where nothing is known."""
    sizes = line.get("sizes")
    return (
        f"{line['round']}/{rounds}",
        _number(line.get("loss"), "{:.4f}"),
        _number(line.get("accuracy"), "{:.1%}"),
        _number(line.get("ari"), "{:.2f}"),
        "abandoned" if "abandoned" in line else "/".join(map(str, sizes)) if sizes else "",
        _number(line.get("churn"), "{:.0%}"),
        _name_faulty(line.get("faults", [])),
        megabytes(line["bytes"]),
        duration(left),
    )


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
