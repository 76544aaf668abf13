"""Runs side by side: accuracy or loss, and agreement with the true groups, by round."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.report.page import (
    COLOURS,
    DASHES,
    DPI,
    MARKERS,
    add_heading,
    axes_at,
    draw,
    new_page,
    text_width,
)
from coterie.report.record import Record, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def compare_picture(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draw accuracy (loss, where there are no classes) and ARI by round, one line per run."""
    return draw(lambda: compare_figure(read(folders)), out)


def compare_figure(records: Sequence[Record]) -> "Figure":
    """Accuracy or loss by round and, where a run has it, ARI beside it."""
    page = new_page(12, 5)
    panels = [metric(records)]
    if any(record.series("ari")[0] for record in records):
        title = ("Agreement with the true groups", "adjusted Rand index: 1 exact, 0 chance")
        panels.append(("ari", title, "{:.2f}"))
    looks = [
        {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i in range(len(records))
    ]
    room = 12 / len(panels)
    for place, (name, title, shape) in enumerate(panels):
        margin = 0.3 + labels_width(page, records, name, shape)
        ax = axes_at(page, place * room + 0.75, 0.7, room - 0.75 - margin, 3.55)
        lines(ax, records, name, shape, looks)
        add_heading(ax, title)
    return page


def metric(records: Sequence[Record]) -> tuple[str, tuple[str, str], str]:
    """What is drawn of all runs: its name, its title, and how its values are written."""
    if all(record.series("accuracy")[0] for record in records):
        return "accuracy", ("Accuracy", "on test data, mean over clients"), "{:.1%}"
    return "loss", ("Loss", "on test data, mean over clients"), "{:.3g}"


def _end_label(record: Record, name: str, shape: str) -> str:
    return f"{record.label}  {shape.format(record.series(name)[1][-1])}"


def labels_width(page: "Figure", records: Sequence[Record], name: str, shape: str) -> float:
    """Room that the labels at the line ends need."""
    texts = [_end_label(record, name, shape) for record in records if record.series(name)[0]]
    return 0.3 + max((text_width(page, text, fontweight="bold") for text in texts), default=0)


def lines(
    ax: "Axes", records: Sequence[Record], name: str, shape: str, looks: list[dict[str, Any]]
) -> None:
    """A line per run that has the figure, each with its name and last value at its end."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = [(r, look) for r, look in zip(records, looks, strict=True) if r.series(name)[0]]
    first = min(record.series(name)[0][0] for record, _ in drawn)
    last = max(record.series(name)[0][-1] for record, _ in drawn)
    step = max(1, math.ceil((last - first) / 8))
    for place, (record, look) in enumerate(drawn):
        x, y = record.series(name)
        start = place * step // len(drawn) if len(x) > step else 0  # marks beside each other
        width = 1.9 + 1.4 * (len(drawn) - 1 - place) / len(drawn)  # one under another still shows
        ax.plot(
            x, y, color=look["color"], linestyle=look["linestyle"], linewidth=width,
            label=record.label, zorder=3,
        )  # fmt: skip
        ax.scatter(
            x[start::step], y[start::step], s=52, color=look["color"], marker=look["marker"],
            edgecolors="white", linewidths=0.8, zorder=4,
        )  # fmt: skip
    pad = max(0.4, 0.03 * (last - first))
    ax.set_xlim(first - pad, last + pad)
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    ax.set_xticks([int(tick) for tick in ticks.tick_values(first, last) if first <= tick <= last])
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("round")
    if name == "ari":
        ax.set_ylim(min(-0.05, ax.get_ylim()[0]), 1.05)
    elif name in ("accuracy", "worst_decile"):
        low, high = ax.get_ylim()
        ax.set_ylim(max(-0.02, min(low, high - 0.1)), 1.02 if high > 0.8 else high)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    ax.spines["left"].set_visible(False)
    _label_ends(ax, drawn, name, shape)


def _label_ends(
    ax: "Axes", drawn: list[tuple[Record, dict[str, Any]]], name: str, shape: str
) -> None:
    """Write names at line ends, moved apart where they would overlap, with a thread to the end."""
    low, high = ax.get_ylim()
    width, height = (side / DPI for side in ax.get_window_extent().size)
    size = min(11.0, 72 * height / len(drawn) / 1.5)
    gap = 1.5 * size / 72 / height
    ends = [(record.series(name)[1][-1] - low) / (high - low) for record, _ in drawn]
    left, right = ax.get_xlim()
    per_inch = (right - left) / width
    for (record, look), place in zip(drawn, apart(ends, gap), strict=True):
        x, y = record.series(name)
        ax.annotate(
            _end_label(record, name, shape),
            xy=(x[-1], y[-1]),
            xytext=(right + 0.16 * per_inch, low + place * (high - low)),
            textcoords="data",
            va="center",
            fontsize=size,
            fontweight="bold",
            color=look["color"],
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": look["color"],
                "lw": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 2,
            },
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Places moved as little as need be to lie a gap apart, inside 0 to 1 where that is possible.

    >>> apart([0.5, 0.5, 0.9], 0.1)
    [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[tuple[float, list[int]]] = []  # centre, members from low to high
    for i in order:
        centre, members = min(max(places[i], 0.0), 1.0), [i]
        while blocks and centre - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            before, others = blocks.pop()
            total = len(others) + len(members)
            centre = (before * len(others) + centre * len(members)) / total
            members = others + members
            half = gap * (total - 1) / 2
            centre = min(max(centre, half), max(1 - half, half))
        blocks.append((centre, members))
    out = [0.0] * len(places)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            out[i] = round(centre + gap * (rank - (len(members) - 1) / 2), 9)
    return out
