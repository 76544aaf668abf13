"""The verdict in words, as a table of the clients that gain or lose, and as a picture.

How it is found: `running/verdict.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coterie.core.errors import ConfigError
from coterie.report.mixture_pictures import _page
from coterie.report.page import COLOURS, SOFT
from coterie.report.table import Table

FORMATS = {"one": ".4f", "groups": ".4f", "local": ".4f", "gain": "+.4f"}
WORDS = {
    "one": "use one model for all clients",
    "groups": "use a model per group",
    "local": "let every client train alone",
    "undecided": "undecided",
}
NAMES = {"one": "one model for all", "groups": "a model per group", "local": "training alone"}

Way = Literal["one", "groups", "local", "undecided"]


class Interval(NamedTuple):
    """A mean gain in held-out loss with its 95% interval; the first way is better above zero."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Verdict:
    """Which way of training to use after a number of rounds, and which clients gain by it.

    Parameters
    ----------
    choice
        "one", "groups", "local" or "undecided".
    intervals
        "groups over one", "local over groups" and "local over one": mean gain in held-out loss.
    better_off
        Fraction of the clients with enough samples whose loss is lower with groups than with one
        model.
    provisional
        Whether one model still improves. Groups converge in fewer rounds, so an early verdict
        favours them.
    round
        Number of rounds of training.
    clients
        A row per client: its held-out loss for each way of training, its gain of groups over one
        model, and its best way.
    why
        The reason if the verdict is undecided.
    fall
        By what fraction the held-out loss of one model fell per round at the end.
    split
        The rows that losses are measured on: "test" or "validation".
    cost
        What the comparison cost: further rounds, bytes, and the fraction of data held out.
    """

    choice: Way
    intervals: dict[str, Interval]
    better_off: float | None
    provisional: bool
    round: int
    clients: list[dict[str, Any]] = field(repr=False)
    why: str = ""
    fall: float | None = None
    split: str = "test"
    cost: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, found: bytes | dict[str, Any]) -> "Verdict":
        """From what was found, or from the file it was written to."""
        content = found if isinstance(found, dict) else json.loads(found)
        pairs = {name: Interval(*values) for name, values in content["intervals"].items()}
        return cls(**{**content, "intervals": pairs})

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self) | {"intervals": {k: list(v) for k, v in self.intervals.items()}}

    @property
    def table(self) -> Table:
        """A row per client."""
        columns = ["client", "one", "groups", "local", "gain", "best"]
        rows = [[line[name] for name in columns] for line in self.clients]
        return Table(columns, rows, FORMATS)

    @property
    def gaining(self) -> list[str]:
        """Clients whose loss is lower with groups than with one model."""
        return [line["client"] for line in self.clients if (line["gain"] or 0) > 0]

    @property
    def losing(self) -> list[str]:
        """Clients whose loss is higher with groups than with one model, the most first."""
        lines = [line for line in self.clients if (line["gain"] or 0) < 0]
        return [line["client"] for line in sorted(lines, key=lambda line: line["gain"])]

    @property
    def sentence(self) -> str:
        """The verdict in a few sentences."""
        head = f"Verdict after {self.round} rounds: {WORDS[self.choice]}."
        if self.choice == "undecided":
            return f"{head} {self.why}"
        groups = self.intervals["groups over one"]
        rival = "groups" if groups.low > 0 else "one"
        said = [
            head,
            self._losses(),
            _difference(NAMES["groups"], NAMES["one"], groups),
            _difference(NAMES["local"], NAMES[rival], self.intervals[f"local over {rival}"]),
            self._clients(),
        ]
        if self.provisional:
            said.append(_provisional(self.fall))
        return " ".join(said)

    def _losses(self) -> str:
        """The mean held-out losses that were compared."""
        rows = [line for line in self.clients if line["gain"] is not None]
        mean = {arm: sum(line[arm] for line in rows) / len(rows) for arm in NAMES}
        return (
            f"The mean loss of {len(rows)} clients on held-out data is {mean['one']:.3f} with one "
            f"model for all, {mean['groups']:.3f} with a model per group, and {mean['local']:.3f} "
            "if every client trains alone."
        )

    def _clients(self) -> str:
        """How many clients gain by groups, and which lose most."""
        judged = sum(line["gain"] is not None for line in self.clients)
        text = f"{len(self.gaining)} of {judged} clients have a lower loss with groups than with "
        text += "one model"
        worst = self.losing[:3]
        return f"{text}; worst off with groups: {', '.join(worst)}." if worst else f"{text}."

    def __str__(self) -> str:
        rows = {"test": "test rows", "validation": "validation rows"}[self.split]
        cost = f"Losses are measured on each client's {rows}, which were not used for training."
        if self.cost:
            more, held = self.cost["rounds"], self.cost["held"]
            cost += f" The comparison took {more} more rounds and holds out {held:.0%} of the data."
        return f"{self.sentence}\n{cost}\n\n{self.table}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.sentence)}</p>{self.table._repr_html_()}"


def _difference(one: str, other: str, gain: Interval) -> str:
    """Whether one way of training is better than another, and how sure that is.

    >>> _difference("training alone", "a model per group", Interval(-0.2, -0.3, -0.1))
    'Training alone is worse than a model per group: the loss is higher by 0.200 (95% interval: \
0.100 to 0.300).'
    """
    one = one[0].upper() + one[1:]
    if gain.low > 0:
        interval = f"{gain.low:.3f} to {gain.high:.3f}"
        better = f"{one} is better than {other}: the loss is lower by {gain.mean:.3f}"
        return f"{better} (95% interval: {interval})."
    if gain.high < 0:
        interval = f"{-gain.high:.3f} to {-gain.low:.3f}"
        worse = f"{one} is worse than {other}: the loss is higher by {-gain.mean:.3f}"
        return f"{worse} (95% interval: {interval})."
    interval = f"{gain.low:+.3f} to {gain.high:+.3f}"
    return f"{one} is neither clearly better nor worse than {other} (95% interval: {interval})."


def _provisional(fall: float | None) -> str:
    if fall is None:
        return (
            "Provisional: it is not known whether one model for all still improves. Evaluate in "
            "more rounds and ask again."
        )
    return (
        f"Provisional: one model for all still improves (its loss falls by {fall:.1%} per round), "
        "so the verdict may change. Train for more rounds and ask again."
    )


def verdict_picture(verdict: Verdict, out: str | Path) -> Path:
    """Mean gains with their intervals, and every client's gain from groups over one model."""
    if not verdict.intervals:
        raise ConfigError(f"Picture: there is no verdict to draw yet. {verdict.why}")
    lines = sorted((line for line in verdict.clients if line["gain"] is not None), key=_gain)
    height = max(3.2, 1.6 + 0.16 * len(lines))
    with _page(8.4, min(height, 14), out) as page:
        top, bottom = page.subplots(2, 1, height_ratios=[1.1, max(2.0, height - 1.9)])
        names = list(verdict.intervals)
        for place, name in enumerate(reversed(names)):
            gain = verdict.intervals[name]
            colour = COLOURS[2] if gain.low > 0 else COLOURS[4] if gain.high < 0 else SOFT
            top.plot([gain.low, gain.high], [place, place], color=colour, linewidth=3)
            top.plot([gain.mean], [place], "o", color=colour, markersize=7)
        top.set_yticks(range(len(names)), list(reversed(names)))
        top.set_ylim(-0.6, len(names) - 0.4)
        top.axvline(0, color=SOFT, linewidth=1)
        top.set_xlabel("mean gain in held-out loss, 95 % interval")
        provisional = ", provisional" if verdict.provisional else ""
        title = f"Verdict after {verdict.round} rounds: {WORDS[verdict.choice]}{provisional}"
        top.set_title(title, fontsize=12, loc="left")
        gains = [line["gain"] for line in lines]
        colours = [COLOURS[2] if gain > 0 else COLOURS[4] for gain in gains]
        bottom.barh(range(len(lines)), gains, color=colours, height=0.7)
        if len(lines) <= 60:
            bottom.set_yticks(range(len(lines)), [line["client"] for line in lines], fontsize=8)
        else:
            bottom.set_yticks([])
            bottom.set_ylabel(f"{len(lines)} clients")
        bottom.axvline(0, color=SOFT, linewidth=1)
        bottom.set_ylim(-0.7, len(lines) - 0.3)
        bottom.set_xlabel("gain of each client: loss with one model less loss with groups")
    return Path(out)


def _gain(line: Mapping[str, Any]) -> float:
    return float(line["gain"])
