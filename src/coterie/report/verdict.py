"""The verdict in words, as a table of the clients that gain or lose, and as a picture.

How it is found: `running/verdict.py`.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from coterie.core.errors import ConfigError
from coterie.report import page as paper
from coterie.report.page import COLOURS, INK, SOFT
from coterie.report.table import Table
from coterie.report.words import (
    NAMES,
    describe_recommendation,
    join_words,
    list_names,
    name_way,
    way_instead,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = ("one", "groups", "alone")
BETTER, WORSE = COLOURS[2], COLOURS[4]
INTERVALS = ("per_client", "per_row", "without")
FORMATS = {"one": ".4f", "groups": ".4f", "alone": ".4f"}
WAYS = {"loss per client": ".4f", "loss per row": ".4f"}


class Interval(NamedTuple):
    """A mean gain in held-out loss, 95% interval; above zero, the first strategy is better."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True, repr=False)
class Verdict:
    """Which strategy to use, how sure that is, and which clients should use another.

    Parameters
    ----------
    recommendation
        "one" (one model for all), "groups" (a model per group), "alone" (every client trains
        alone), "mixed" (one of these for most clients and another for some) or "undecided".
    most
        What is recommended to most clients: "one", "groups" or "alone"; None if undecided.
    exceptions
        Clients that are clearly better off with another strategy: "client", "instead" and "gain",
        the difference in loss.
    per_client
        "groups over one", "alone over one" and "alone over groups": mean gain in held-out loss
        with its interval, if every client counts the same.
    per_row
        The same, if every held-out row (or unit) counts the same.
    apart
        Clients whose gains are so large that they hid the answer for the others.
    without
        As `per_client`, without these clients; empty if there are none.
    n_groups
        Number of groups that were found. With one there is nothing to compare with one model.
    method
        What takes the place of groups in the words, if something does: a model of each client's
        own, or one model with odd clients apart; else empty.
    learnt
        Whether a trained model beats every prediction without a network; None: unknown.
    matters
        The smallest gain in loss that matters: 5 % of what was learnt.
    ways
        Mean held-out loss of each strategy, rivals without a network included: per client, per row.
    rounds
        Best round of each strategy.
    falls
        Strategies whose loss still falls by more than 2 % per round at the end. With any,
        the verdict is provisional.
    rises
        Strategies whose last loss is clearly larger than their smallest.
    replicates
        Number of trainings of each strategy.
    split
        The rows that losses are measured on: "test" or "validation".
    cost
        What the comparison cost: further rounds, bytes, and held-out rows.
    why
        The reason if the verdict is undecided for want of data.
    clients
        A row per client: held-out rows, loss with each strategy, its gains over one model with
        intervals over its own rows, and the strategy that is clearly better than the recommended
        one.
    odd
        With one group: clients that were kept apart from it and trained alone.
    """

    recommendation: Literal["one", "groups", "alone", "mixed", "undecided"]
    most: Literal["one", "groups", "alone"] | None
    exceptions: list[dict[str, Any]]
    per_client: dict[str, Interval]
    per_row: dict[str, Interval]
    apart: list[str]
    without: dict[str, Interval]
    n_groups: int
    method: str
    learnt: bool | None
    matters: float | None
    ways: dict[str, list[float | None]]
    rounds: dict[str, int]
    falls: dict[str, float]
    rises: list[str]
    replicates: int
    split: str
    cost: dict[str, Any] = field(repr=False)
    why: str
    clients: list[dict[str, Any]] = field(repr=False)
    odd: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, found: bytes | dict[str, Any]) -> "Verdict":
        """From what was found, or from the file it was written to."""
        content = found if isinstance(found, dict) else json.loads(found)
        pairs = {
            name: {pair: Interval(*_finite(values)) for pair, values in content[name].items()}
            for name in INTERVALS
        }
        return cls(**{**content, **pairs})

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        plain = {
            name: {pair: list(gain) for pair, gain in getattr(self, name).items()}
            for name in INTERVALS
        }
        return asdict(self) | plain

    @property
    def provisional(self) -> bool:
        """Whether a strategy still improves, so that the verdict may change."""
        return bool(self.falls)

    @property
    def table(self) -> Table:
        """A row per client."""
        columns = ["client", "rows", *ARMS, "better"]
        rows = [[line[name] for name in columns] for line in self.clients]
        return Table([*columns[:-1], "better off with"], rows, FORMATS)

    @property
    def compared(self) -> Table:
        """A row per strategy: mean held-out loss per client and per row, and the best round."""
        rows = [
            [self._name(way), *self.ways[way], self.rounds.get(way)]
            for way in NAMES
            if way in self.ways and not (way == "groups" and self._one_group)
        ]
        return Table(["strategy", "loss per client", "loss per row", "best round"], rows, WAYS)

    @property
    def headline(self) -> str:
        """The recommendation as one sentence."""
        parts = self.recommendation, self.most, self.exceptions, self.method, self.odd
        return describe_recommendation(*parts)

    @property
    def sentence(self) -> str:
        """The recommendation and its reasons."""
        return f"{self.headline} {self.reasons}"

    @property
    def reasons(self) -> str:
        """What the recommendation rests on, in a few sentences."""
        return " ".join(self.points)

    @property
    def points(self) -> list[str]:
        """What the recommendation rests on, point by point."""
        if not self.per_client:
            return [self.why]
        said = [self._losses()]
        if self._one_group:
            said.append("There is one group, so a model per group would be the same as one model.")
        if self.learnt is False:
            said.append(self._nothing_learnt())
        else:
            said += self._differences()
            said.append(self._undecided() if self.most is None else self._otherwise())
        said += [self._linear(), self._coverage(), self._rising(), self.caution]
        return [text for text in said if text]

    @property
    def caution(self) -> str:
        """Why the verdict is provisional; empty if it is not."""
        if not self.falls:
            return ""
        parts = [f"{self._name(arm)} by {fall:.1%}" for arm, fall in self.falls.items()]
        return (
            f"Provisional: the loss still falls per round ({', '.join(parts)}). Train for more "
            "rounds and ask again."
        )

    @property
    def _one_group(self) -> bool:
        return self.n_groups < 2 and not self.method

    def _name(self, way: str) -> str:
        return name_way(way, self.method)

    def _losses(self) -> str:
        """The mean held-out losses that were compared."""
        arms = [arm for arm in ARMS if not (arm == "groups" and self._one_group)]
        parts = [
            f"{_number(self.ways[arm][0])} with {self._name(arm)} (best round {self.rounds[arm]})"
            for arm in arms
        ]
        n = sum(line["rows"] > 0 for line in self.clients)
        return (
            f"The mean loss of {n} clients on held-out rows is {', '.join(parts[:-1])} and "
            f"{parts[-1]}.{self._apart()}"
        )

    def _apart(self) -> str:
        """What "odd clients apart" means."""
        if not self.odd:
            return ""
        does = "train" if len(self.odd) > 1 else "trains"
        return (
            f" Keeping odd clients apart means: {list_names(self.odd)} {does} alone, all others "
            "share one model."
        )

    def _rival(self) -> tuple[str, float] | None:
        """The best prediction without a network, and its loss."""
        rivals = {
            way: values[0]
            for way, values in self.ways.items()
            if way not in (*ARMS, "linear") and values[0] is not None
        }
        return min(rivals.items(), key=lambda pair: pair[1]) if rivals else None

    def _nothing_learnt(self) -> str:
        rival = self._rival()
        beside = "" if rival is None else f" ({NAMES[rival[0]]} has a loss of {rival[1]:.3f})"
        return (
            "Nothing was learnt yet: no trained model is clearly better than a prediction "
            f"without a network{beside}. So nothing can be said about groups. "
            + (
                "The loss rises already, so more rounds will not help. Give other columns or more "
                "rows."
                if self.rises and not self.falls
                else "Train for more rounds, or give other columns."
            )
        )

    def _differences(self) -> list[str]:
        """Groups against one model, and training alone against the better of these."""
        shown = self.without or self.per_client
        groups = shown.get("groups over one")
        pairs = ["alone over one"]
        if groups is not None:
            rival = "groups" if groups.mean > 0 else "one"
            pairs = ["groups over one", f"alone over {rival}"]
        said = []
        if self.without:
            does = "is" if len(self.apart) == 1 else "are"
            said.append(
                f"{list_names(self.apart)} {does} clearly better off with another strategy. For "
                "the other clients:"
            )
        for pair in pairs:
            one, other = pair.split(" over ")
            said.append(_difference(self._name(one), self._name(other), shown[pair]))
            row = self.per_row[pair]
            if not self.without and (row.mean > 0) != (shown[pair].mean > 0):
                said.append(f"If every row counts the same, {_between(row)}.")
        return said

    def _undecided(self) -> str:
        if self.why:
            return self.why
        groups = self.per_client.get("groups over one")
        known = "groups" if groups is not None and groups.low > 0 else "one"
        parts = [
            self._name(pair.split(" over ")[0])
            for pair, gain in self.per_client.items()
            if pair.endswith(f" over {known}") and gain.high > (self.matters or 0)
        ]
        return (
            f"It is undecided because {' or '.join(parts)} may be better than {self._name(known)} "
            f"by more than {self.matters:.3f}, the smallest gain that matters here. More clients "
            "or more held-out rows would decide."
        )

    def _otherwise(self) -> str:
        """Clients that are better off with another strategy."""
        if not self.exceptions:
            return "No client is clearly better off with another strategy."
        by_way: dict[str, list[str]] = {}
        for one in sorted(self.exceptions, key=lambda one: -one["gain"]):
            text = f"{one['client']} (loss lower by {one['gain']:.3f})"
            by_way.setdefault(way_instead(one, self.odd), []).append(text)
        return " ".join(
            f"Better off with {self._name(way)}: {list_names(who)}." for way, who in by_way.items()
        )

    def _linear(self) -> str:
        """A hint if a linear model does better than all networks."""
        linear = self.ways.get("linear", [None])[0]
        losses = [loss for arm in ARMS if (loss := self.ways[arm][0]) is not None]
        if linear is None or not losses or self.matters is None:
            return ""
        if linear > min(losses) - self.matters:
            return ""
        return f"A linear model for all has a smaller loss ({linear:.3f}): try model='linear'."

    def _coverage(self) -> str:
        """What the intervals cover."""
        if self.replicates > 1:
            return (
                "The intervals cover which clients take part, which rows are held out, and the "
                "randomness of training."
            )
        return (
            "The intervals leave out the randomness of training. To include it, for three times "
            "the cost: settings={'replicates': 3}."
        )

    def _rising(self) -> str:
        """Whether training was too long."""
        if not self.rises:
            return ""
        ways = join_words([self._name(arm) for arm in self.rises])
        return (
            f"After its best round, the loss of {ways} rises again: the models of the last round "
            "are worse than those compared here. To keep the best: "
            "settings={'stop': 'validation', 'validation': 0.2}."
        )

    def __repr__(self) -> str:
        return f"Verdict({self.recommendation!r})"

    def __str__(self) -> str:
        cost = f"Losses are measured on each client's {self.split} rows."
        if self.cost:
            more, held = self.cost["rounds"], self.cost["held"]
            cost += f" The comparison took {more} more rounds; {held} rows were held out."
        return f"{self.sentence}\n{cost}\n\n{self.compared}\n\n{self.table}"

    def _repr_html_(self) -> str:
        from html import escape

        tables = self.compared._repr_html_() + self.table._repr_html_()
        return f"<p><b>{escape(self.headline)}</b></p>{self.list_points()}{tables}"

    def list_points(self) -> str:
        """What the recommendation rests on, as an HTML list."""
        from html import escape

        return f"<ul>{''.join(f'<li>{escape(point)}</li>' for point in self.points)}</ul>"


def _finite(values: list[float | None]) -> list[float]:
    """A file has no infinity: an interval without an end is written without it."""
    mean, low, high = values
    return [
        float("nan") if mean is None else mean,
        -float("inf") if low is None else low,
        float("inf") if high is None else high,
    ]


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f}"


def _difference(one: str, other: str, gain: Interval) -> str:
    """Whether one strategy is better than another, and how sure that is.

    >>> _difference("training alone", "a model per group", Interval(-0.2, -0.3, -0.1))
    'Training alone is worse than a model per group: the loss is higher by 0.200 (95% interval: \
0.100 to 0.300).'
    """
    one = one[0].upper() + one[1:]
    if gain.low == gain.high == 0:
        return f"{one} has the same loss as {other}."
    if gain.low > 0:
        interval = f"{gain.low:.3f} to {gain.high:.3f}"
        better = f"{one} is better than {other}: the loss is lower by {gain.mean:.3f}"
        return f"{better} (95% interval: {interval})."
    if gain.high < 0:
        interval = f"{-gain.high:.3f} to {-gain.low:.3f}"
        worse = f"{one} is worse than {other}: the loss is higher by {-gain.mean:.3f}"
        return f"{worse} (95% interval: {interval})."
    return (
        f"{one} is neither clearly better nor worse than {other}: {_between(gain)} (95% interval)."
    )


def _between(gain: Interval) -> str:
    """Where a difference of losses may lie, without signs.

    >>> _between(Interval(0.1, -0.2, 0.5))
    'the loss may be higher by up to 0.200 or lower by up to 0.500'
    """
    if not (math.isfinite(gain.low) and math.isfinite(gain.high)):
        return "the loss may be higher or lower by any amount"
    if gain.low >= 0 or gain.high <= 0:
        way, ends = ("lower", gain[1:]) if gain.low >= 0 else ("higher", (-gain[2], -gain[1]))
        return f"the loss is {way} by {ends[0]:.3f} to {ends[1]:.3f}"
    return f"the loss may be higher by up to {-gain.low:.3f} or lower by up to {gain.high:.3f}"


WIDE, LEFT = 9.2, 3.1  # inches: of the page, and of names on the left
MOST_BARS = 60  # clients whose names are written


def verdict_picture(verdict: Verdict, out: str | Path) -> Path:
    """Mean gains with their intervals, and every client's gain in the first comparison."""
    if not verdict.per_client:
        raise ConfigError(f"Picture: there is no verdict to draw yet. {verdict.why}")
    if all(line["groups"] is None for line in verdict.clients):
        raise ConfigError("Picture: a run with min_group has no figures of single clients.")
    return paper.draw(lambda: _figure(verdict), out)


def _figure(verdict: Verdict) -> "Figure":
    pair = next(iter(verdict.per_client))
    better, worse = pair.split(" over ")
    lines = [line for line in verdict.clients if line["rows"]]
    lines.sort(key=lambda line: float(line[worse] - line[better]))
    tall = 0.2 * len(lines) + 0.2 if len(lines) <= MOST_BARS else 6.0
    pairs = 0.42 * len(verdict.per_client) + 0.2
    page = paper.new_page(WIDE, tall + pairs + 2.85)
    wide = WIDE - LEFT - 0.35
    top = paper.axes_at(page, LEFT, tall + 2.0, wide, pairs)
    _draw_pairs(top, verdict)
    clients = paper.axes_at(page, LEFT, 0.75, wide, tall)
    _draw_clients(clients, lines, better, worse)
    said = verdict.headline.removeprefix("Recommendation: ").rstrip(".")
    more = " (provisional)" if verdict.provisional else ""
    chosen = textwrap.shorten(said, 90 - len(more), placeholder=" …") + more
    heading = "mean gain over clients in held-out loss, with its 95 % interval"
    _title(page, top, chosen[0].upper() + chosen[1:], heading)
    one, other = verdict._name(better), verdict._name(worse)
    about = f"its held-out loss with {other} less that with {one}"
    _title(page, clients, "Gain of each client", about)
    return page


def _title(page: "Figure", ax: "Axes", title: str, about: str) -> None:
    """A heading at the left edge of the page, above axes."""
    w, h = page.get_size_inches()
    top = ax.get_position().y1
    page.text(0.25 / w, top + 0.42 / h, title, fontsize=13, fontweight="bold")
    page.text(0.25 / w, top + 0.17 / h, about, color=SOFT)


def _draw_pairs(ax: "Axes", verdict: Verdict) -> None:
    """A line per comparison."""
    names = []
    for place, (pair, gain) in enumerate(reversed(verdict.per_client.items())):
        colour = BETTER if gain.low > 0 else WORSE if gain.high < 0 else SOFT
        ax.plot([gain.low, gain.high], [place, place], color=colour, linewidth=3)
        ax.plot([gain.mean], [place], "o", color=colour, markersize=7)
        one, other = (verdict._name(way) for way in pair.split(" over "))
        names.append(f"{one}\nover {other}")
    ax.set_yticks(range(len(names)), names, fontsize=9, color=INK, linespacing=1.1)
    ax.set_ylim(-0.6, len(names) - 0.4)
    _finish(ax)


def _draw_clients(ax: "Axes", lines: Sequence[dict[str, Any]], better: str, worse: str) -> None:
    """A bar per client."""
    gains = [line[worse] - line[better] for line in lines]
    colours = [BETTER if gain > 0 else WORSE for gain in gains]
    ax.barh(range(len(lines)), gains, color=colours, height=0.7)
    ax.set_yticks([])
    if len(lines) <= MOST_BARS:
        names = [textwrap.shorten(line["client"], 34, placeholder="…") for line in lines]
        ax.set_yticks(range(len(lines)), names, fontsize=9, color=INK)
    else:
        ax.set_ylabel(f"{len(lines)} clients")
    ax.set_ylim(-0.7, len(lines) - 0.3)
    ax.set_xlabel("gain: above zero, the loss is lower")
    _finish(ax)


def _finish(ax: "Axes") -> None:
    ax.axvline(0, color=SOFT, linewidth=1)
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False, axis="y")
