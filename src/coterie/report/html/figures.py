"""The pictures of a page, as SVG that follows its colours, light or dark.

Each is narrow, so that a telephone shows it without shrinking the text. Colours are CSS classes:
g0 to g7 for groups and components, w-one, w-groups and w-alone for ways of training.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from coterie.report.evidence import TITLES
from coterie.report.html.svg import drawing, join, line, path, shorten, tag, tell_apart, text, ticks
from coterie.report.journey import NOWHERE, OTHERS, journey
from coterie.report.lines import apart
from coterie.report.record import Record
from coterie.report.verdict import ARMS, Verdict
from coterie.report.words import NAMES, name_way

WIDE = 480.0
NARROW = 440.0  # so that a telephone shows the names at the end of a journey
LETTER = 8.2  # mean width of a letter
MOST_NAMES = 32  # clients whose names fit beside a journey
MOST_BARS = 60  # clients whose shares are drawn with their names
Rounds = Sequence[Mapping[str, Any]]


def ways_figure(verdict: Verdict) -> Markup:
    """Mean held-out loss of each way to predict, as bars; the shortest is the best."""
    ways = [
        (name_way(way, verdict.method), way, verdict.ways[way][0])
        for way in NAMES
        if way in verdict.ways and not (way == "groups" and verdict._one_group)
    ]
    known = [(name, way, loss) for name, way, loss in ways if loss is not None]
    if not known or min(loss for _, _, loss in known) < 0:  # bars need losses from zero
        return Markup("")
    most = max(loss for _, _, loss in known) or 1.0
    parts, y = [], 16.0
    for name, way, loss in known:
        look = f"fill-{way}" if way in ARMS else "fill-other"
        parts += [
            text(0, y, shorten(name[0].upper() + name[1:], 52)),
            text(WIDE, y, f"{loss:.3f}", "number", "end"),
            tag("rect", x=0, y=y + 6, width=WIDE, height=9, rx=2, class_="track"),
            tag("rect", x=0, y=y + 6, width=WIDE * loss / most, height=9, rx=2, class_=look),
        ]
        y += 40
    said = "; ".join(f"{name}: {loss:.3f}" for name, _, loss in known)
    return drawing(f"Mean loss on held-out rows. {said}.", WIDE, y - 18, *parts, class_="bars")


def gains_figure(verdict: Verdict) -> Markup:
    """Mean gain of one way over another, with its interval."""
    shown = verdict.without or verdict.per_client
    if not shown:
        return Markup("")
    ends = [end for gain in shown.values() for end in gain if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = (high - low) * 0.04 or 0.1
    x = _scale(low - room, high + room, 0, WIDE)
    parts: list[Markup] = []
    y = 16.0
    bottom = 44.0 * len(shown) + 2
    shown_ticks = ticks(low - room, high + room)
    for tick in shown_ticks:
        said = f"{tick:+g}" if tick else "0"
        parts.append(text(x(tick), bottom + 16, said, "soft", "middle"))
    for pair, gain in shown.items():
        better, worse = (name_way(way, verdict.method) for way in pair.split(" over "))
        look = "good" if gain.low > 0 else "bad" if gain.high < 0 else "open"
        title = shorten(f"{better[0].upper()}{better[1:]} over {worse}", 60)
        parts += [
            text(0, y, title),
            *(line(x(t), y + 6, x(t), y + 23, "grid" if t else "zero") for t in shown_ticks),
            tag(
                "line",
                x1=x(max(gain.low, low - room)),
                y1=y + 14,
                x2=x(min(gain.high, high + room)),
                y2=y + 14,
                class_=f"interval {look}",
            ),
            tag("circle", cx=x(gain.mean), cy=y + 14, r=5, class_=f"dot {look}"),
        ]
        y += 44
    parts.append(text(WIDE, bottom + 34, "gain in held-out loss, 95 % interval", "soft", "end"))
    said = "; ".join(f"{pair}: {gain}" for pair, gain in shown.items())
    about = f"Mean gains with 95% intervals. {said}."
    return drawing(about, WIDE, bottom + 40, *parts, class_="bars")


class ClientGains:
    """Small pictures of each client's own gain, all on one scale."""

    wide = 170.0

    def __init__(self, gains: Sequence[Sequence[float | None]]) -> None:
        ends = [e for gain in gains for e in gain if e is not None and math.isfinite(e)]
        ends = sorted(ends)
        # A few clients with very wide intervals must not flatten all others.
        inner = [*ends[len(ends) // 20 : len(ends) - len(ends) // 20], 0.0]
        self.low, self.high = min(inner), max(inner)
        room = (self.high - self.low) * 0.05 or 0.1
        self.low, self.high = self.low - room, self.high + room
        self.x = _scale(self.low, self.high, 0, self.wide)

    def draw(self, gain: Sequence[float | None]) -> Markup:
        """One client's gain: a dot with its interval; an arrow where the interval goes on."""
        mean = gain[0]
        if mean is None or not math.isfinite(mean):
            return Markup("")
        low, high = (
            self.low if gain[1] is None else gain[1],
            self.high if gain[2] is None else gain[2],
        )
        look = "good" if low > 0 else "bad" if high < 0 else "open"
        left, right = self.x(max(low, self.low)), self.x(min(high, self.high))
        parts = [
            line(self.x(0), 0, self.x(0), 20, "zero"),
            line(left, 10, right, 10, f"interval {look}"),
        ]
        if low < self.low:
            parts.append(tag("path", d="M6 5L1 10L6 15", class_=f"arrow {look}"))
        if high > self.high:
            w = self.wide
            parts.append(tag("path", d=f"M{w - 6} 5L{w - 1} 10L{w - 6} 15", class_=f"arrow {look}"))
        if self.low <= mean <= self.high:
            parts.append(tag("circle", cx=self.x(mean), cy=10, r=4, class_=f"dot {look}"))
        said = f"gain {mean:+.3f}, interval {low:+.3f} to {high:+.3f}"
        return drawing(said, self.wide, 20, *parts, class_="small")


def journey_figure(record: Record, names: Sequence[str], labels: Mapping[int, str]) -> Markup:
    """The clients' way into their groups: a line per client, a column for some of the rounds.

    `labels` names groups by their row in the state.
    """
    if not record.assignments():
        return Markup("")
    found = journey(record, truth_known=False)
    n, columns = len(found.colours), found.columns
    named = n <= MOST_NAMES and len(names) >= n
    titles = {band: shorten(_name_band(band, labels), 12) for band in found.bands}
    ends = tell_apart(names[:n], 14) if named else [f"{n} clients"]
    left = 24 + LETTER * max(map(len, ["round", *titles.values()]))
    right = NARROW - 18 - LETTER * max(map(len, ends))
    slots = {band: max(Counter(column)[band] for column in columns) for band in found.bands}
    height = min(20.0 if named else 14.0, max(0.6, 460 / max(sum(slots.values()), 1)))
    height = max(height, 14.0) if named else height
    tops, y = {}, 8.0
    for band in found.bands:
        tops[band] = y
        y += max(slots[band] * height, 14) + 10
    bottom = y - 4
    step = (right - left) / max(len(columns) - 1, 1)
    at = [left + step * i for i in range(len(columns))] if len(columns) > 1 else [right]
    spots = _spots(columns, tops, slots, height)
    parts = [
        tag(
            "rect",
            x=left - 14,
            y=tops[band] - 3,
            width=right - left + 28,
            height=max(slots[band] * height, 14) + 6,
            rx=5,
            class_="band",
        )
        for band in found.bands
    ]
    thick = max(0.8, min(4.0, 0.5 * height))
    for client in range(n):
        way = f"M{at[0] - 8:.0f} {spots[0][client]:.1f}H{at[0]:.0f}"
        for i in range(1, len(at)):
            half = (at[i - 1] + at[i]) / 2
            a, b = spots[i - 1][client], spots[i][client]
            way += f"C{half:.0f} {a:.1f} {half:.0f} {b:.1f} {at[i]:.0f} {b:.1f}"
        colour = found.colours[client]
        look = "flow gx" if colour < 0 else f"flow g{colour % 8}"
        parts.append(tag("path", d=way + "h8", class_=look, stroke_width=round(thick, 1)))
    if n <= 60:
        for x, spot in zip(at, spots, strict=True):
            parts += [
                tag(
                    "circle",
                    cx=x,
                    cy=spot[c],
                    r=min(4.5, 0.36 * height),
                    class_=f"client g{found.colours[c] % 8}"
                    if found.colours[c] >= 0
                    else "client gx",
                )
                for c in range(n)
            ]
    for band in found.bands:
        middle = tops[band] + max(slots[band] * height, 14) / 2 + 4
        parts.append(text(left - 20, middle, titles[band], "", "end"))
        if not named:
            count = Counter(columns[-1])[band]
            said = f"{count} client" + ("" if count == 1 else "s")
            parts.append(text(right + 18, middle, said, "soft"))
    if named:
        for client, name in enumerate(ends):
            parts.append(text(right + 14, spots[-1][client] + 4, name))
    for x, number in zip(at, found.rounds, strict=True):
        parts.append(text(x, bottom + 16, str(number), "soft", "middle"))
    parts.append(text(left - 20, bottom + 16, "round", "soft", "end"))
    moved = sum(len({column[c] for column in columns}) > 1 for c in range(n))
    sizes = ", ".join(
        f"{labels.get(band, f'group {band}') if band >= 0 else 'no group'}: {count}"
        for band, count in sorted(Counter(columns[-1]).items())
    )
    about = (
        f"{n} clients over rounds {found.rounds[0]} to {found.rounds[-1]}. Clients at the end: "
        f"{sizes}. {moved} of them changed groups between the rounds shown."
    )
    return drawing(about, NARROW, bottom + 24, *parts, class_="journey")


def _name_band(band: int, labels: Mapping[int, str]) -> str:
    """What stands beside the clients of a group; one that nobody is in at the end has no number.

    >>> _name_band(3, {1: "group 0"}), _name_band(3, {})
    ('former group', 'group 3')
    """
    of_end = labels.get(band, "former group" if labels else f"group {band}")
    return {NOWHERE: "no group", OTHERS: "other"}.get(band, of_end)


def _spots(
    columns: Sequence[Sequence[int]],
    tops: Mapping[int, float],
    slots: Mapping[int, int],
    height: float,
) -> list[list[float]]:
    """Height of each client in each column; clients of a band keep the order they had before."""
    out: list[list[float]] = []
    for place, column in enumerate(columns):
        spot = [0.0] * len(column)
        for band, top in tops.items():
            inside = [client for client, at in enumerate(column) if at == band]
            if place:
                before = out[-1]
                inside.sort(key=lambda client: (before[client], client))
            else:
                inside.sort(key=lambda client: ([tops[c[client]] for c in columns], client))
            start = top + (max(slots[band] * height, 14) - len(inside) * height) / 2
            for rank, client in enumerate(inside):
                spot[client] = start + (rank + 0.5) * height
        out.append(spot)
    return out


def curves_figure(
    series: Mapping[str, Rounds], name: str, method: str = "", best: Mapping[str, int] | None = None
) -> Markup:
    """A figure by round, a line for each way of training: "groups" is the run itself."""
    drawn = {}
    for way, lines in series.items():
        points = [(int(one["round"]), float(one[name])) for one in lines if _known(one.get(name))]
        if points:
            drawn[way] = points
    if not drawn:
        return Markup("")
    values = [value for points in drawn.values() for _, value in points]
    first = min(points[0][0] for points in drawn.values())
    last = max(points[-1][0] for points in drawn.values())
    low, high = min(values), max(values)
    if name == "accuracy":
        low, high = max(0.0, low - 0.03), min(1.0, high + 0.03)
    else:
        low, high = (0.0 if 0 <= low < 0.5 * high else low), high
    room = (high - low) * 0.04 or 0.05
    low, high = low - room if name != "accuracy" and low else low, high + room
    wide, tall, left, top = 400.0, 230.0, 46.0, 10.0
    right, bottom = wide - 116, tall - 36
    x = _scale(first, max(last, first + 1), left, right)
    y = _scale(low, high, bottom, top)
    shape = "{:.0%}" if name == "accuracy" else "{:g}"
    parts: list[Markup] = []
    for tick in ticks(low, high, 4):
        parts += [
            line(left, y(tick), right, y(tick), "grid"),
            text(left - 7, y(tick) + 4, shape.format(tick), "soft", "end"),
        ]
    for tick in sorted({round(t) for t in ticks(first, last, 5)} | {first}):
        parts.append(text(x(tick), bottom + 18, str(tick), "soft", "middle"))
    parts.append(text(right, bottom + 33, "round", "soft", "end"))
    ends = apart([1 - (y(points[-1][1]) - top) / (bottom - top) for points in drawn.values()], 0.1)
    for (way, points), end in zip(drawn.items(), ends, strict=True):
        parts.append(path([(x(a), y(b)) for a, b in points], f"curve w-{way}"))
        if len(points) == 1:
            parts.append(
                tag("circle", cx=x(points[0][0]), cy=y(points[0][1]), r=3, class_=f"mark w-{way}")
            )
        mark = (best or {}).get(way)
        for a, b in points:
            if a == mark:
                parts.append(tag("circle", cx=x(a), cy=y(b), r=4.5, class_=f"mark w-{way}"))
        height = top + (1 - end) * (bottom - top)
        label = shorten(method if way == "groups" and method else SHORT[way], 12)
        value = f"{points[-1][1]:.1%}" if name == "accuracy" else f"{points[-1][1]:.3g}"
        parts += [
            line(x(points[-1][0]) + 3, y(points[-1][1]), right + 10, height, f"thread w-{way}"),
            tag("rect", x=right + 11, y=height - 4, width=8, height=8, rx=2, class_=f"key w-{way}"),
            text(right + 23, height + 4, f"{label} {value}"),
        ]
    said = "; ".join(
        f"{method if way == 'groups' and method else NAMES[way]}: from {points[0][1]:.3g} in round "
        f"{points[0][0]} to {points[-1][1]:.3g} in round {points[-1][0]}"
        for way, points in drawn.items()
    )
    return drawing(f"{name.capitalize()} by round. {said}.", wide, tall, *parts)


SHORT = {"groups": "groups", "one": "one", "alone": "alone"}


def evidence_figure(curve: Mapping[str, Any]) -> Markup:
    """The criterion for each number of groups, the limit of noise, and the number chosen."""
    points = [(k, v) for k, v in zip(curve["ks"], curve["values"], strict=True) if _known(v)]
    if len(points) < 2:  # the words say it
        return Markup("")
    limit = list(curve["threshold"])
    values = [v for _, v in points]
    logs = bool(limit) and min([*values, *limit]) > 0 and max(values) / min(values) > 8
    level = math.log10 if logs else float
    heights = [level(v) for v in [*values, *limit]]
    low, high = min(heights), max(heights)
    room = (high - low) * 0.08 or 0.1
    wide, tall, left, top = 400.0, 220.0, 46.0, 12.0
    right, bottom = wide - 12, tall - 40
    ks = [k for k, _ in points]
    x = _scale(min(ks) - 0.4, max(ks) + 0.4, left, right)
    y = _scale(low - room, high + room, bottom, top)
    parts: list[Markup] = []
    if logs:
        marks = [m * 10.0**p for p in range(-6, 9) for m in (1, 2, 5)]
        shown = [m for m in marks if low - room <= math.log10(m) <= high + room]
        shown = [m for m in shown if len(shown) <= 6 or math.log10(m).is_integer()]
    else:
        shown = ticks(low - room, high + room, 4)
    for tick in shown:
        at = y(level(tick))
        parts += [
            line(left, at, right, at, "grid"),
            text(left - 7, at + 4, f"{tick:g}", "soft", "end"),
        ]
    for k in ks:
        if len(ks) <= 14 or k % 2 == 0:
            parts.append(text(x(k), bottom + 18, str(k), "soft", "middle"))
    parts.append(text(right, bottom + 35, "number of groups", "soft", "end"))
    if limit:
        said = "chance reaches up to here"
        ends = [(x(k), y(level(v))) for k, v in zip(curve["ks"], limit, strict=True)]
        parts += [
            path(ends, "limit"),
            # Where the curve does not cross it.
            text(right - 4, ends[-1][1] - 6, said, "soft halo", "end")
            if points[-1][1] < limit[-1]
            else text(left + 4, ends[0][1] - 6, said, "soft halo"),
        ]
    parts.append(path([(x(k), y(level(v))) for k, v in points], "curve w-groups"))
    for k, v in points:
        chosen = k == curve["chosen"]
        parts.append(
            tag(
                "circle",
                cx=x(k),
                cy=y(level(v)),
                r=7 if chosen else 3.5,
                class_="mark w-groups" if not chosen else "chosen",
            )
        )
    title = TITLES.get(curve["name"], curve["name"])
    told = "; ".join(f"{k}: {v:.3g}" for k, v in points)
    picked = "no number" if curve["chosen"] is None else curve["chosen"]
    about = f"{title}: {curve['criterion']} by number of groups. {told}. Chosen: {picked}."
    return drawing(about, wide, tall, *parts)


def shares_figure(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Each client's shares of the components, as bars."""
    k = sum(name.startswith("share ") for name in rows[0]) if rows else 0
    known = [row for row in rows if k and row.get("share 0") is not None]
    if not known:
        return Markup("")
    known = sorted(known, key=lambda row: -float(row["share 0"]))
    named = len(known) <= MOST_BARS
    left = 120.0 if named else 0.0
    height = 18.0 if named else max(1.0, 420 / len(known))
    x = _scale(0, 1, left, WIDE)
    parts: list[Markup] = []
    for place, row in enumerate(known):
        y, start = place * height, 0.0
        if named:
            parts.append(text(left - 8, y + 13, shorten(row["client"], 17), "", "end"))
        for j in range(k):
            share = max(float(row[f"share {j}"] or 0), 0.0)
            parts.append(
                tag(
                    "rect",
                    x=x(start),
                    y=y + (2 if named else 0),
                    width=max(x(start + share) - x(start), 0),
                    height=height - (4 if named else 0),
                    class_=f"fill g{j % 8}",
                )
            )
            start += share
        error = row.get("error 0")
        if named and error:
            middle, share = y + height / 2, float(row["share 0"])
            parts.append(
                line(x(max(share - error, 0)), middle, x(min(share + error, 1)), middle, "error")
            )
    bottom = len(known) * height
    for tick, side in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(text(x(tick), bottom + 16, f"{tick:.0%}", "soft", side))
    told = "; ".join(f"{row['client']}: {row['share 0']:.2f}" for row in known[:20])
    about = f"Shares of {k} components in {len(known)} clients. Share of component 0: {told}."
    return drawing(about, WIDE, bottom + 22, *parts)


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _scale(low: float, high: float, start: float, end: float) -> Any:
    """A function from values to places."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def bar(share: float, colour: int) -> Markup:
    """A share as a short bar; the number stands beside it."""
    return tag(
        "svg",
        tag("rect", width=100, height=8, class_="track"),
        tag("rect", width=100 * min(max(share, 0.0), 1.0), height=8, class_=f"fill g{colour}"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        aria_hidden="true",
        class_="bar",
    )


def key(labels: Sequence[str]) -> Markup:
    """The key to the colours of groups or components."""
    parts = [
        tag("li", tag("span", "", class_=f"swatch g{i % 8}"), " ", label)
        for i, label in enumerate(labels)
    ]
    return tag("ul", join(*parts), class_="key")
