"""The clients' way into their groups: a dot for each, a column for some of the rounds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.report.lines import labels_width, lines, metric
from coterie.report.page import (
    COLOURS,
    DASHES,
    INK,
    MARKERS,
    SOFT,
    UNKNOWN,
    add_heading,
    axes_at,
    draw,
    new_page,
)
from coterie.report.record import Record, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_ROUNDS = 6
MOST_BANDS = 12  # beyond it the small groups share a band
KEYS = 16  # colours that the key explains
NOWHERE, OTHERS = -1, -2  # bands of clients without a group, and of small groups


def journey_picture(folder: str | Path | Sequence[str | Path], out: str | Path) -> Path:
    """Draw the clients as dots that find their groups over the rounds, accuracy beside them.

    Several folders give a panel for each method that forms groups, and accuracy for all.
    """
    folders = [folder] if isinstance(folder, str | Path) else folder
    return draw(lambda: journey_figure(read(folders)), out)


@dataclass(frozen=True)
class Journey:
    """Where each client is at each round shown."""

    record: Record
    rounds: list[int]
    bands: list[int]  # groups from top to bottom
    columns: list[list[int]]  # for each round, the band of each client
    colours: list[int]  # for each client, its true group; its last one if nobody knows; -1 neither

    @property
    def most(self) -> int:
        """Clients in the fullest cell."""
        return max(max(Counter(column).values()) for column in self.columns)


def journey(record: Record, truth_known: bool) -> Journey:
    """Choose rounds and bands; bands follow the order of the colours they end with."""
    steps = record.assignments()
    rounds = spaced(sorted(steps), SHOWN_ROUNDS)
    final = steps[rounds[-1]]
    colours = list(final)
    if truth_known:
        colours = (record.truth or [NOWHERE] * len(final))[: len(final)]
    held: Counter[int] = Counter()
    for number in rounds:
        held.update(Counter(group for group in steps[number] if group >= 0))
    kept = {group for group, _ in held.most_common(MOST_BANDS)}

    def rank(group: int) -> tuple[int, float, int]:
        inside = [colour for colour, at in zip(colours, final, strict=True) if at == group]
        common = Counter(inside).most_common(1)
        return (0 if common else 1, common[0][0] if common else 0, group)

    bands = sorted(kept, key=rank)
    columns = []
    for number in rounds:
        late = [NOWHERE] * (len(final) - len(steps[number]))
        columns.append([g if g in kept or g < 0 else OTHERS for g in steps[number] + late])
    used = {band for column in columns for band in column}
    bands += [band for band in (OTHERS, NOWHERE) if band in used]
    return Journey(record, rounds, bands, columns, colours)


def spaced(rounds: Sequence[int], most: int) -> list[int]:
    """The first round, the last, and some between, closer together where more happens: early.

    >>> spaced(range(1, 21), 6)
    [1, 2, 3, 6, 11, 20]
    """
    if len(rounds) <= most:
        return list(rounds)
    places: list[int] = []
    for step in range(most):
        place = round(len(rounds) ** (step / (most - 1))) - 1
        places.append(max(place, places[-1] + 1 if places else 0))
    return [rounds[place] for place in places]


def journey_figure(records: Sequence[Record]) -> "Figure":
    """A panel of dots for each method that forms groups; accuracy of all methods beside them."""
    known = any(record.truth for record in records)
    journeys = [journey(record, known) for record in records if record.assignments()]
    across = 0 if not journeys else 1 if len(journeys) < 3 else 2
    down = math.ceil(len(journeys) / across) if across else 1
    bands = max((len(j.bands) for j in journeys), default=4)
    band = min(0.75, max(0.5, 3 / bands))
    cell = 4.8 / max((len(j.rounds) for j in journeys), default=1)
    wide, high = 1.1 + 4.8 + 1.1, max(bands * band, 3)
    top, between, bottom = (2.0, 1.45, 1.05) if journeys else (0.85, 0, 0.75)
    panels = [metric(records)]
    if down > 1 and all(record.series("worst_decile")[0] for record in records):
        title = ("Accuracy of the worst off", "on test data, mean over the worst tenth of clients")
        panels.append(("worst_decile", title, "{:.1%}"))
    labels = max(labels_width(new_page(1, 1), records, name, shape) for name, _, shape in panels)
    left, lines_wide = 0.25 + across * wide, 2.5 if journeys else 5.0
    page = new_page(
        left + 0.75 + lines_wide + max(labels, 1.4) + 0.2,
        top + down * high + (down - 1) * between + bottom,
    )
    most = max((j.most for j in journeys), default=0)
    for place, one in enumerate(journeys):
        x = 0.25 + (place % across) * wide + 1.1
        y = bottom + (down - 1 - place // across) * (high + between)
        ax = axes_at(page, x, y, cell * len(one.rounds), high)
        _dots(ax, one, cell, high / len(one.bands), most)
        add_heading(ax, _headline(one))
    for place, (name, title, shape) in enumerate(panels):
        y = bottom + (down - 1 - place) * (high + between)
        ax = axes_at(page, left + 0.75, y, lines_wide, high)
        lines(ax, records, name, shape, _quiet_looks(records))
        add_heading(ax, title)
    if journeys:
        _words(page, journeys, known)
    return page


def _quiet_looks(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Lines without colour, which stands for groups here: black with groups, grey without."""
    looks, count = [], Counter[bool]()
    for record in records:
        grouped = bool(record.assignments())
        dash = DASHES[count[grouped] % len(DASHES)]
        marker = MARKERS[(count[grouped] + 4 * (not grouped)) % len(MARKERS)]
        looks.append({"color": INK if grouped else "#8A8A8A", "linestyle": dash, "marker": marker})
        count[grouped] += 1
    return looks


def _dots(ax: "Axes", journey: Journey, cell: float, band: float, most: int) -> None:
    """Clients stacked in the cells of rounds and bands, in inches from the upper left corner."""
    ax.set_xlim(0, cell * len(journey.rounds))
    ax.set_ylim(band * len(journey.bands), 0)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    for place in range(0, len(journey.bands), 2):
        ax.axhspan(place * band, (place + 1) * band, color="#F5F5F5", linewidth=0, zorder=0)
    spacing, across = _grid(most, cell, band)
    spots = [
        _spots(journey, number, cell, band, spacing, across)
        for number in range(len(journey.rounds))
    ]
    _moves(ax, journey, spots)
    size = spacing * 72 * 0.86  # diameter in points
    for colour in sorted(set(journey.colours)):
        places = [c[i] for c in spots for i, own in enumerate(journey.colours) if own == colour]
        ax.scatter(
            [x for x, _ in places], [y for _, y in places],
            s=size**2, c=_colour(colour), marker=_marker(colour), linewidths=0, zorder=2,
        )  # fmt: skip
    ax.set_xticks([cell * (i + 0.5) for i in range(len(journey.rounds))], map(str, journey.rounds))
    ax.set_xlabel("after round")
    names = {NOWHERE: "no group yet", OTHERS: "other groups"}
    ax.set_yticks(
        [band * (i + 0.5) for i in range(len(journey.bands))],
        [names.get(group, f"group {group}") for group in journey.bands],
    )
    sizes = Counter(journey.columns[-1])
    for place, group in enumerate(journey.bands):
        text = f"{sizes[group]} client" + ("" if sizes[group] == 1 else "s")
        x, y = cell * len(journey.rounds) + 0.08, band * (place + 0.5)
        ax.text(x, y, text, va="center", fontsize=10, color=SOFT)


def _moves(ax: "Axes", journey: Journey, spots: list[list[tuple[float, float]]]) -> None:
    """A thin curve for each client that changes its group from one round shown to the next."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Curve

    curves, colours = [], []
    for before in range(len(spots) - 1):
        for client, colour in enumerate(journey.colours):
            if journey.columns[before][client] == journey.columns[before + 1][client]:
                continue
            (x0, y0), (x1, y1) = spots[before][client], spots[before + 1][client]
            half = (x1 - x0) / 2
            points = [(x0, y0), (x0 + half, y0), (x1 - half, y1), (x1, y1)]
            curves.append(Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3]))
            colours.append(_colour(colour))
    alpha = 0.5 * min(1, max(0.25, 100 / max(len(curves), 1)))  # many lines, each fainter
    moves = PathCollection(curves, facecolors="none", edgecolors=colours, alpha=alpha, zorder=1)
    moves.set_linewidth(0.8)
    ax.add_collection(moves, autolim=False)


def _grid(most: int, cell: float, band: float) -> tuple[float, int]:
    """Distance of neighbouring dots and dots in a row, such that the fullest cell holds its own."""
    spacing, wide = 0.14, min(0.72 * cell, 0.7)
    while math.floor(wide / spacing) * math.floor(0.8 * band / spacing) < most:
        spacing *= 0.98
    return spacing, math.floor(wide / spacing)


def _spots(
    journey: Journey, number: int, cell: float, band: float, spacing: float, across: int
) -> list[tuple[float, float]]:
    """Where each client's dot goes at a round: rows in the middle of its cell, sorted by colour."""
    column = journey.columns[number]
    out = [(0.0, 0.0)] * len(column)
    for place, group in enumerate(journey.bands):
        inside = [client for client, at in enumerate(column) if at == group]
        inside.sort(key=lambda client: (journey.colours[client], client))
        rows = math.ceil(len(inside) / across)
        for rank, client in enumerate(inside):
            x = cell * (number + 0.5) + spacing * (rank % across - (across - 1) / 2)
            y = band * (place + 0.5) + spacing * (rank // across - (rows - 1) / 2)
            out[client] = (x, y)
    return out


def _colour(group: int) -> str:
    return UNKNOWN if group < 0 else COLOURS[group % len(COLOURS)]


def _marker(group: int) -> str:
    return "o" if group < 0 else MARKERS[group // len(COLOURS) % len(MARKERS)]


def _headline(journey: Journey) -> tuple[str, str]:
    """The method, and what became of its groups."""
    label = journey.record.label
    rounds, ari = journey.record.series("ari")
    if not ari:
        sizes = [size for _, size in Counter(journey.columns[-1]).most_common()]
        return label, "ends with " + _counted(len(sizes), "group")
    wrong = [number for number, value in zip(rounds, ari, strict=True) if value < 1 - 1e-9]
    if wrong and wrong[-1] == rounds[-1]:
        return label, f"agreement with the true groups at the end: {ari[-1]:.2f} of 1"
    first = next(number for number in rounds if not wrong or number > wrong[-1])
    return label, f"finds the true groups exactly after {_counted(first, 'round')}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _words(page: "Figure", journeys: list[Journey], known: bool) -> None:
    """The sentence on top, what dots mean, and the key to the colours."""
    from matplotlib.lines import Line2D

    width, height = page.get_size_inches()
    clients = max(len(j.colours) for j in journeys)
    groups = sorted({c for j in journeys for c in j.colours if c >= 0})
    title = f"{_counted(clients, 'client')} on the way to their groups, round by round"
    colour = "the group it ends in."
    if known:
        hidden = _counted(len(groups), "hidden group")
        title = f"{_counted(clients, 'client')}, {hidden}: how the groups form, round by round"
        colour = "the group it truly belongs to, which no method is told."
    lines = (
        "Each dot is a client, each row a group the method has made; "
        "a thin line is a client that changes groups.",
        f"The colour of a client is {colour}",
    )
    x = 0.25 / width
    page.text(x, 1 - 0.42 / height, title, fontsize=17, fontweight="bold", va="center")
    for place, line in enumerate(lines):
        y = 1 - (0.8 + 0.24 * place) / height
        page.text(x, y, line, fontsize=11.5, color=SOFT, va="center")
    keys = [Line2D([], [], linestyle="", label="true group" if known else "last group")]
    for group in groups[:KEYS]:
        look: dict[str, Any] = {"color": _colour(group), "marker": _marker(group), "markersize": 9}
        name = _letter(group) if known else str(group)
        keys.append(Line2D([], [], linestyle="", label=name, **look))
    page.legend(
        handles=keys, ncols=len(keys), loc="lower left", bbox_to_anchor=(0, 0.08 / height),
        frameon=False, handletextpad=0, columnspacing=1.2, borderaxespad=0,
    )  # fmt: skip


def _letter(group: int) -> str:
    """True groups go by letters, since their numbers are not those a method gives."""
    return chr(ord("A") + group) if group < 26 else str(group)
