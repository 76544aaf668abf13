"""Why this number of groups: the criterion for each number, the choice, and close alternatives.

A curve is plain data (`core.algorithm.Curve` as a dict), as `summary.json` keeps it under
"evidence".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.errors import ConfigError
from coterie.report import page as paper
from coterie.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Mapping[str, Any]

TITLES = {
    "conditional": "Losses within each class",
    "joint": "Losses of all rows",
    "shares": "Shares of the labels",
    "losses": "Losses on trained models",
    "components": "Components",
}


CRITERIA = {
    "unexplained share": "share of what differs between clients that is left unexplained",
    "noise ratio": "spread within groups, in units of what chance alone makes (1: chance only)",
    "silhouette": "how much nearer clients are to their own group than to the next (1: clear)",
}
"""Criteria, as the line under a title explains them."""
SHARES = ("unexplained share",)


def table(curves: Sequence[Line]) -> Table:
    """A row per number of groups, a column per curve, and which number each curve chose."""
    ks = sorted({k for line in curves for k in line["ks"]})
    columns, rows, formats = ["groups"], [[k] for k in ks], {}
    for line in curves:
        values = dict(zip(line["ks"], line["values"], strict=True))
        name = f"{line['name']} {line['criterion']}"
        columns += [name, f"{line['name']} choice"]
        formats[name] = ".4g"
        for row in rows:
            row += [values.get(row[0]), _mark(line, row[0])]
    return Table(columns, rows, formats)


def _mark(line: Line, k: int) -> str:
    if k == line["chosen"]:
        return "chosen"
    if k in line["close"]:
        return "not distinguishable"
    return "runner-up" if k == line["runner_up"] else ""


def words(curves: Sequence[Line]) -> str:
    """What was chosen, by how much, and what cannot be told apart, in a few sentences.

    >>> line = {"name": "joint", "criterion": "noise ratio", "ks": [1, 2, 3],
    ...         "values": [40.0, 1.1, 1.0], "chosen": 2, "runner_up": 3, "close": [],
    ...         "threshold": [1.3, 1.3, 1.3], "note": ""}
    >>> words([line])
    'Number of groups: 2. The noise ratio (joint) is 1.1 with 2 and 40 with 1. The next best is 3.'
    """
    line = curves[0]
    values = dict(zip(line["ks"], line["values"], strict=True))
    chosen, criterion = line["chosen"], f"{line['criterion']} ({line['name']})"
    if chosen is None:
        least = min(value for value in values.values() if value is not None)
        most = line["ks"][-1]
        tried = f"no number up to {most} fits" if most > 1 else "one group does not fit"
        best = " at best" if most > 1 else ""
        text = f"Number of groups: {tried}. The {criterion} is {least:.3g}{best}"
        noise = max(line["threshold"], default=None)
        text += "." if noise is None or least <= noise else f"; chance alone reaches {noise:.2g}."
    else:
        fewer = values.get(chosen - 1)
        beside = "" if fewer is None else f" and {fewer:.4g} with {chosen - 1}"
        text = f"Number of groups: {chosen}. The {criterion} is {values[chosen]:.4g} with {chosen}"
        text += f"{beside}."
        if line["runner_up"] is not None:
            text += f" The next best is {line['runner_up']}."
        if line["close"]:
            numbers = " or ".join(str(k) for k in line["close"])
            text += f" With this number of samples, {chosen} cannot be told from {numbers}."
    note = "" if chosen is None and len(values) == 1 else line["note"]  # it would say it again
    return text + (f" {note[0].upper()}{note[1:]}." if note else "")


def picture(curves: Sequence[Line], out: str | Path, odd: int = 0) -> Path:
    """Draw each curve with its threshold, the number chosen and the runner-up.

    Parameters
    ----------
    odd
        Number of odd clients, each of which the curves count as a set of its own.
    """
    if not curves:
        raise ConfigError(
            "Picture: there is no evidence to draw, because the number of groups was given. Leave "
            "n_groups out, so that the method finds it."
        )
    return paper.draw(lambda: figure(curves, odd), out)


WIDE, TALL = 7.6, 4.9  # inches: of a panel


def figure(curves: Sequence[Line], odd: int = 0) -> "Figure":
    """A panel per curve, side by side."""
    page = paper.new_page(0.4 + WIDE * len(curves), TALL)
    for place, line in enumerate(curves):
        ax = paper.axes_at(page, 0.85 + WIDE * place, 0.8, WIDE - 1.0, TALL - 1.75)
        _curve(ax, line, odd)
        name = TITLES.get(line["name"], line["name"])
        about = CRITERIA.get(str(line["criterion"]), str(line["criterion"]))
        paper.add_heading(ax, (f"{name}: {_found(line['chosen'], odd)}", about))
    return page


def _found(sets: int | None, odd: int) -> str:
    """What was found, in a title.

    >>> _found(3, 1), _found(1, 0)
    ('2 groups and 1 odd client', 'no groups')
    """
    if sets is None:
        return "no number of groups fits"
    k = sets - odd
    groups = "no groups" if k < 2 else f"{k} groups"
    return groups + (f" and {odd} odd client{'s' if odd > 1 else ''}" if odd else "")


def _curve(ax: "Axes", line: Line, odd: int) -> None:
    from matplotlib.ticker import (
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        PercentFormatter,
    )

    points = [(k, v) for k, v in zip(line["ks"], line["values"], strict=True) if v is not None]
    ks, values = [k for k, _ in points], [v for _, v in points]
    most = list(line["threshold"])
    low, high = min([*values, *most]), max([*values, *most])
    ax.plot(ks, values, color=paper.COLOURS[0], linewidth=1.8, marker="o", markersize=5, zorder=3)
    if most:
        edge = [ks[0] - 0.5, *line["ks"], line["ks"][-1] + 0.5]
        ax.plot(
            edge, [most[0], *most, most[-1]], color=paper.COLOURS[4], linewidth=1.3,
            linestyle="--", zorder=2, label="noise up to here",
        )  # fmt: skip
    if line["criterion"] in SHARES:
        ax.set_ylim(min(0.0, low) - 0.03, 1.06)
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    if most and low > 0:  # ratios: the eye must see what lies around 1
        ax.set_yscale("log")
        ax.set_ylim(0.8 * low, 1.3 * max(high, 2.0))
        ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    found = dict(points)
    marks = [("chosen", paper.COLOURS[2], "o", 12), ("runner_up", paper.SOFT, "s", 8)]
    for key, shade, marker, size in marks if line["chosen"] is not None else ():
        k = line[key]
        if k not in found:
            continue
        alike = " (not distinguishable)" if key == "runner_up" and k in line["close"] else ""
        ax.plot(
            k, found[k], marker=marker, markersize=size, color=shade, linestyle="", zorder=4,
            clip_on=False, label=f"{key.replace('_', '-')}: {k}{alike}",
        )  # fmt: skip
    ax.set_xlim(ks[0] - 0.5, ks[-1] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("number of sets: groups and odd clients" if odd else "number of groups")
    ax.legend(loc="upper right", frameon=False, fontsize=10, labelcolor=paper.INK)
