"""Pictures of runs: accuracy side by side, and the clients' way into their groups.

Drawn on figures of their own, without pyplot, so that nothing outside is touched and no display
is needed. Sizes are in inches.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.errors import ConfigError
from coterie.report.record import Record, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of colour vision; yellow, too pale on white, and black
# are replaced by wine (Tol's "muted") and grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
INK, SOFT, FAINT, UNKNOWN = "#222222", "#666666", "#E3E3E3", "#B5B5B5"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # a folder may have a dollar sign in its name
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
ENDINGS = (".png", ".svg", ".pdf")
DPI = 100
SHOWN_ROUNDS = 6
MOST_BANDS = 12  # beyond it the small groups share a band
KEYS = 16  # colours that the key explains
NOWHERE, OTHERS = -1, -2  # bands of clients without a group, and of small groups


def compare_picture(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draw accuracy (loss, where there are no classes) and ARI by round, one line per run."""
    return draw(lambda: compare_figure(read(folders)), out)


def journey_picture(folder: str | Path | Sequence[str | Path], out: str | Path) -> Path:
    """Draw the clients as dots that find their groups over the rounds, accuracy beside them.

    Several folders give a panel for each method that forms groups, and accuracy for all.
    """
    folders = [folder] if isinstance(folder, str | Path) else folder
    return draw(lambda: journey_figure(read(folders)), out)


@contextmanager
def styled() -> Iterator[None]:
    """The style of all pictures; says what to install where it cannot be drawn."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "Picture: matplotlib is needed and not installed. "
            "Install it with: pip install 'coterie[plot]'"
        ) from error
    with rc_context(STYLE):
        yield


def draw(figure: "Callable[[], Figure]", out: str | Path) -> Path:
    """Draw a figure in the style of all pictures, to a file."""
    out = Path(out)
    if out.suffix.lower() not in ENDINGS:
        raise ConfigError(f"Picture: the file must end in {', '.join(ENDINGS)}. Got {out.name!r}.")
    with styled():
        out.parent.mkdir(parents=True, exist_ok=True)
        figure().savefig(out)
    return out


def new_page(width: float, height: float) -> "Figure":
    """An empty figure of some inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(page)
    return page


def axes_at(page: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Axes at a place given in inches."""
    w, h = page.get_size_inches()
    return page.add_axes((left / w, bottom / h, width / w, height / h))


def _text_width(page: "Figure", text: str, **look: Any) -> float:
    artist = page.text(0, 0, text, **look)
    width = artist.get_window_extent().width / page.dpi
    artist.remove()
    return float(width)


# lines by round


def compare_figure(records: Sequence[Record]) -> "Figure":
    """Accuracy or loss by round and, where a run has it, ARI beside it."""
    page = new_page(12, 5)
    panels = [_metric(records)]
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
        margin = 0.3 + _labels_width(page, records, name, shape)
        ax = axes_at(page, place * room + 0.75, 0.7, room - 0.75 - margin, 3.55)
        _lines(ax, records, name, shape, looks)
        headed(ax, title)
    return page


def headed(ax: "Axes", title: tuple[str, str]) -> None:
    """A bold line, and a quiet one under it."""
    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    ax.annotate(title[0], (0, 1), (0, 27), fontsize=13, fontweight="bold", **above)
    ax.annotate(title[1], (0, 1), (0, 11), color=SOFT, **above)


def _metric(records: Sequence[Record]) -> tuple[str, tuple[str, str], str]:
    if all(record.series("accuracy")[0] for record in records):
        return "accuracy", ("Accuracy", "on test data, mean over clients"), "{:.1%}"
    return "loss", ("Loss", "on test data, mean over clients"), "{:.3g}"


def _end_label(record: Record, name: str, shape: str) -> str:
    return f"{record.label}  {shape.format(record.series(name)[1][-1])}"


def _labels_width(page: "Figure", records: Sequence[Record], name: str, shape: str) -> float:
    """Room that the labels at the line ends need."""
    texts = [_end_label(record, name, shape) for record in records if record.series(name)[0]]
    return 0.3 + max((_text_width(page, text, fontweight="bold") for text in texts), default=0)


def _lines(
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


# the journey


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
    panels = [_metric(records)]
    if down > 1 and all(record.series("worst_decile")[0] for record in records):
        title = ("Accuracy of the worst off", "on test data, mean over the worst tenth of clients")
        panels.append(("worst_decile", title, "{:.1%}"))
    labels = max(_labels_width(new_page(1, 1), records, name, shape) for name, _, shape in panels)
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
        headed(ax, _headline(one))
    for place, (name, title, shape) in enumerate(panels):
        y = bottom + (down - 1 - place) * (high + between)
        ax = axes_at(page, left + 0.75, y, lines_wide, high)
        _lines(ax, records, name, shape, _quiet_looks(records))
        headed(ax, title)
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
        title = f"{_counted(clients, 'client')}, {hidden}: who learns with whom, round by round"
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
