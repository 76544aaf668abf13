"""A verdict for people: a sentence, a table of who gains and who loses, a picture.

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
    "one": "one model for all",
    "groups": "groups",
    "local": "every client alone",
    "undecided": "undecided",
}

Choice = Literal["one", "groups", "local", "undecided"]


class Interval(NamedTuple):
    """A mean gain in held-out loss with its 95 % interval; above zero: the first is better."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Verdict:
    """What to use after a number of rounds, and who gains by it.

    Parameters
    ----------
    choice
        "one", "groups", "local" or "undecided".
    intervals
        "groups over one", "local over groups" and "local over one": mean gain in held-out loss.
    better_off
        Share of the clients that have a say whose loss is lower with groups than with one model.
    provisional
        One model still improves: groups converge in fewer rounds, so early verdicts favour them.
    round
        Rounds of training judged.
    clients
        A row per client: held-out loss by each way, the gain of groups over one model, the best.
    why
        The reason, where there is no decision.
    """

    choice: Choice
    intervals: dict[str, Interval]
    better_off: float | None
    provisional: bool
    round: int
    clients: list[dict[str, Any]] = field(repr=False)
    why: str = ""
    fall: float | None = None  # of one model's held-out loss, per round, at the end
    split: str = "test"  # rows it rests on
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
        said = [
            f"Held-out loss over {sum(line['gain'] is not None for line in self.clients)} clients:"
        ]
        gain = self.intervals["groups over one"]
        said.append(f"groups gain {gain} over one model,")
        alone = "local over groups" if gain.low > 0 else "local over one"
        against = "groups" if gain.low > 0 else "one model"
        said.append(f"training alone {self.intervals[alone]} over {against}.")
        if self.better_off is not None:
            said.append(f"{self.better_off:.0%} are better off with groups than with one model")
            worst = self.losing[:3]
            said[-1] += f"; worse off, most first: {', '.join(worst)}." if worst else "."
        if self.provisional:
            falls = "" if self.fall is None else f" by {self.fall:.1%} a round"
            said.append(
                f"Provisional: the loss of one model still falls{falls}. Train longer, ask again."
                if self.fall is not None
                else "Provisional: whether one model still improves is not known."
            )
        return " ".join([head, *said])

    def __str__(self) -> str:
        rows = {"test": "test rows", "validation": "rows held out of training"}[self.split]
        cost = f"Judged on each client's {rows}, which trained none of the three."
        if self.cost:
            more, held = self.cost["rounds"], self.cost["held"]
            cost += f" Cost: {more} more rounds, and {held:.0%} of the data."
        return f"{self.sentence}\n{cost}\n\n{self.table}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.sentence)}</p>{self.table._repr_html_()}"


def verdict_picture(verdict: Verdict, out: str | Path) -> Path:
    """Mean gains with their intervals, and every client's gain from groups over one model."""
    if not verdict.intervals:
        raise ConfigError(f"Picture: there is no verdict to draw. {verdict.why}")
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
