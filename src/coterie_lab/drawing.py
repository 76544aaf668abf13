"""Draw reproduced tables: published figures and ours side by side, or curves over the rounds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.report.page import COLOURS, DPI, INK, SOFT, use_style
from coterie_lab.recipe import Entry, Recipe
from coterie_lab.reproduce import Plan
from coterie_lab.tables import OURS as OWN
from coterie_lab.tables import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, THEIRS = COLOURS[0], COLOURS[1]
SMALL: dict[str, Any] = {"marker": "D", "color": COLOURS[2], "markersize": 5, "alpha": 0.85}
PRINTED, WHOLE, SHORT = "published ± 2 sd", "ours, each seed", "ours, fewer rounds"
REDUCED = "ours, reduced scale"
WORDS = {
    "accuracy": "test accuracy, %",
    "ari": "adjusted Rand index",
    "ari_seen": "adjusted Rand index, clients seen so far",
    "identity": "share of clients in the right group",
    "loss": "test loss",
}


def picture(recipe: Recipe, plan: Plan, path: Path) -> None:
    """Draw a table or a figure."""
    with use_style():
        draw = {None: _table, "matrix": _matrices}.get(recipe.curves, _curves)
        page = draw(recipe, plan)
        page.savefig(path)


def _page(width: float, height: float, title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(page)
    page.suptitle(title, color=INK, fontsize=13)
    return page


def _table(recipe: Recipe, plan: Plan) -> "Figure":
    """One panel per block and column, with one line per method: a bar for theirs, dots for ours."""
    parts = list(dict.fromkeys(entry.part for entry in recipe.entries))
    columns = list(dict.fromkeys(entry.column for entry in recipe.entries))
    rows = [list(dict.fromkeys(e.row for e in recipe.entries if e.part == p)) for p in parts]
    heights = [1.1 + 0.27 * len(own) for own in rows]
    page = _page(2.2 + 3.4 * len(columns), 0.9 + sum(heights), f"{recipe.paper}, {recipe.title}")
    grid = page.subplots(len(parts), len(columns), squeeze=False, height_ratios=heights)
    marks: set[str] = set()
    for i, part in enumerate(parts):
        for j, column in enumerate(columns):
            own = {e.row: e for e in recipe.entries if (e.part, e.column) == (part, column)}
            axes = grid[i][j]
            marks |= _panel(axes, own, rows[i], recipe, plan)
            # The name of a block is too long for one panel, so it is above the first.
            title = f"{part if not j else ''}\n{column}" if column and part else part or column
            axes.set_title(title, fontsize=10, color=INK, loc="left")
            if j:
                axes.set_yticklabels([])
    page.legend(handles=_key(marks), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return page


def _panel(
    axes: "Axes", own: dict[str, Entry], rows: Sequence[str], recipe: Recipe, plan: Plan
) -> set[str]:
    """Draw one line per row; return the kinds of marks that were used."""
    marks = set()
    for y, row in enumerate(rows):
        entry = own.get(row)
        if entry is None:
            continue
        printed = entry.published
        if printed is not None and printed.mean is not None:
            wide = 2 * (printed.std or 0.0)
            marks.add(PRINTED)
            axes.errorbar(
                printed.mean, y, xerr=wide, color=THEIRS, marker="|", markersize=11, linewidth=4
            )
        if plan.scale == "paper":
            small = figures(entry, recipe, replace(plan, scale="reduced"))[0].mean
            if small is not None:
                marks.add(REDUCED)
                axes.plot([small], [y], linestyle="", **SMALL)
        ours, found = figures(entry, recipe, plan)
        numbers = [v for v in ours.values if v is not None]
        whole = all(one["rounds"] >= one["published_rounds"] for one in found)
        if numbers:
            marks.add(WHOLE if whole else SHORT)
        axes.plot(
            numbers,
            [y] * len(numbers),
            linestyle="",
            marker="o",
            markersize=6,
            color=OURS,
            markerfacecolor=OURS if whole else "white",
            alpha=0.85,
        )
    axes.set_yticks(range(len(rows)), rows)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().split(",")[0] in OWN else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.locator_params(axis="x", nbins=5)  # long decimals would overlap
    return marks


def _key(marks: set[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    def dot(**look: Any) -> Line2D:
        return Line2D([], [], linestyle="", **look)

    line: dict[str, Any] = {"color": THEIRS, "marker": "|", "markersize": 11, "linewidth": 4}
    kinds = [
        Line2D([], [], **line, label=PRINTED),
        dot(marker="o", color=OURS, label=WHOLE),
        dot(marker="o", color=OURS, markerfacecolor="white", label=SHORT),
        dot(**SMALL, label=REDUCED),
    ]
    return [kind for kind in kinds if kind.get_label() in marks]


def _curves(recipe: Recipe, plan: Plan) -> "Figure":
    """One panel per block: the mean over seeds by round, with a band from minimum to maximum."""
    assert recipe.curves is not None
    parts = list(dict.fromkeys(entry.part for entry in recipe.entries))
    wide = min(len(parts), 3)
    tall = -(-len(parts) // wide)
    title = f"{recipe.paper}, {recipe.title}"
    page = _page(max(8.0, 4.6 * wide), 0.9 + 3.4 * tall, title)
    grid = page.subplots(tall, wide, squeeze=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for i, part in enumerate(parts):
        axes = grid.flat[i]
        entries = [entry for entry in recipe.entries if entry.part == part]
        # one curve per row, even if the table shows several of its figures
        own = list({(e.row, e.study and e.study.name): e for e in entries}.values())
        for j, entry in enumerate(own):
            _curve(axes, entry, recipe, plan, COLOURS[j % len(COLOURS)], len(own) > 1)
        axes.set_title(part, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("round")
        axes.set_ylabel(WORDS.get(recipe.curves, recipe.curves))
        if not axes.lines:
            axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color=SOFT)
        elif len(own) > 1:
            axes.legend(frameon=False, fontsize=9)
    return page


def either(entry: Entry, recipe: Recipe, plan: Plan) -> list[dict[str, Any]]:
    """The runs of an entry at paper scale, or at reduced scale if there are none."""
    found = figures(entry, recipe, plan)[1]
    if found or plan.scale != "paper":
        return found
    return figures(entry, recipe, replace(plan, scale="reduced"))[1]


def _curve(
    axes: "Axes", entry: Entry, recipe: Recipe, plan: Plan, colour: str, named: bool
) -> None:
    found = either(entry, recipe, plan)
    series = [one.get("by_round", {}).get(recipe.curves) for one in found]
    kept = [[float("nan") if v is None else v for v in one] for one in series if one]
    if not kept:
        return
    length = min(map(len, kept))
    rounds = range(1, length + 1)
    means = [sum(one[t] for one in kept) / len(kept) for t in range(length)]
    axes.plot(rounds, means, color=colour, marker="o", markersize=3, label=entry.row)
    if len(kept) > 1:
        low = [min(one[t] for one in kept) for t in range(length)]
        high = [max(one[t] for one in kept) for t in range(length)]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)


def _matrices(recipe: Recipe, plan: Plan) -> "Figure":
    """One square per method: the loss of each group's model (rows) on each group (columns)."""
    page = _page(3.6 * len(recipe.entries) + 0.8, 4.2, f"{recipe.paper}, {recipe.title}")
    grid = page.subplots(1, len(recipe.entries), squeeze=False)[0]
    drawn = [either(entry, recipe, plan) for entry in recipe.entries]
    matrices = [found[0]["matrix"] if found else None for found in drawn]
    values = [v for matrix in matrices if matrix for row in matrix for v in row]
    for axes, entry, matrix in zip(grid, recipe.entries, matrices, strict=True):
        axes.set_title(entry.row, fontsize=10, color=INK, loc="left")
        axes.grid(False)
        if matrix is None:
            axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color=SOFT)
            axes.set_xticks([])
            axes.set_yticks([])
            continue
        image = axes.imshow(matrix, cmap="viridis", vmin=min(values), vmax=max(values))
        axes.set_xlabel("data of true group")
        axes.set_ylabel("model of true group")
    if values:
        page.colorbar(image, ax=list(grid), shrink=0.7, label="test loss")
    return page
