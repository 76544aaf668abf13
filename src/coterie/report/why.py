"""Why groups differ, in words and as a picture. How it is found: `running/why.py`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from coterie.core import wire
from coterie.core.errors import ConfigError, unknown
from coterie.report.page import COLOURS, SOFT
from coterie.report.table import Table
from coterie.report.words import join_words, list_names

KEPT = {
    "columns": "means of columns",
    "labels": "label counts",
    "predictions": "what models say of its rows",
    "images": "mean images",
}
ROWS = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True, repr=False)
class Why:
    """In what groups and odd clients differ from the others. Made by `fit` and `advise`.

    Parameters
    ----------
    groups
        A dict for each group and odd client: "name", "clients", "odd" and "statements", the most
        telling first. A statement has the figures "here" and "elsewhere" in their own unit, "low"
        and "high" (95 % interval of the difference), and "effect", by which it is ranked.
    sent
        What each client sent for this: "part", "numbers" (how many) and "text".
    kept
        What clients were not asked for.
    split
        The rows that were compared: "test", "validation" or "train".
    compared
        Number of comparisons. All intervals hold together with a probability of 95 %.
    notes
        What could not be compared.
    cross
        For each group's model and each group: rows by label and by what the model says. None if
        there are no classes, or predictions were not sent.
    images
        Mean image of each class, by group; empty unless clients were asked for them.
    """

    groups: list[dict[str, Any]]
    sent: list[dict[str, Any]]
    kept: list[str]
    split: str
    compared: int
    notes: list[str]
    cross: dict[str, Any] | None = None
    images: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: bytes | Mapping[str, Any], images: bytes | None = None) -> "Why":
        """From what was found, or from the files it was written to."""
        content = found if isinstance(found, Mapping) else json.loads(found)
        names = cls.__dataclass_fields__
        plain = {name: value for name, value in content.items() if name in names}
        return cls(**plain, images={} if images is None else wire.load(images))

    def to_json(self) -> dict[str, Any]:
        """Everything but the images as plain data, with each statement in words."""
        groups = [
            {
                **line,
                "statements": [
                    {**one, "text": describe(one, line["name"])} for one in line["statements"]
                ],
            }
            for line in self.groups
        ]
        return {
            "groups": groups,
            "sent": self.sent,
            "kept": self.kept,
            "split": self.split,
            "compared": self.compared,
            "notes": self.notes,
            "cross": self.cross,
            "text": str(self),
        }

    @property
    def statements(self) -> Table:
        """A row per statement: the group, the words, and the effect with its interval."""
        columns = ["group", "statement", "effect", "low", "high"]
        rows = [
            [
                line["name"],
                describe(one, line["name"]),
                one["effect"],
                one["effect_low"],
                one["effect_high"],
            ]
            for line in self.groups
            for one in line["statements"]
        ]
        return Table(columns, rows, {"effect": ".2f", "low": ".2f", "high": ".2f"})

    def table(self, model: int, group: int) -> Table:
        """What the model of one group says of the rows of another: a row per label."""
        if self.cross is None:
            raise ConfigError(
                "why.table: clients must count what models say of their rows. They did not. Fit "
                'again with settings={"why": "predictions"} on data with classes.'
            )
        counts, labels = self.cross["counts"], self.cross["labels"]
        for name, number, n in (("model", model, len(counts)), ("group", group, len(self.groups))):
            if number not in range(n):
                raise ConfigError(f"why.table: {unknown(name, str(number), map(str, range(n)))}")
        rows = [[label, *counts[model][group][y]] for y, label in enumerate(labels)]
        columns = ["label", *(f"says {label}" for label in labels)]
        return Table(columns, rows, dict.fromkeys(columns[1:], ".0f"))

    def picture(self, out: str | Path) -> Path:
        """Draw the statements with their intervals, and mean images if there are any."""
        return why_picture(self, out)

    def __repr__(self) -> str:
        n = sum(len(line["statements"]) for line in self.groups)
        return f"Why({len(self.groups)} groups and odd clients, {n} statements)"

    def __str__(self) -> str:
        return "\n\n".join([*self._told(), *self._small_print()])

    def _repr_html_(self) -> str:
        parts = []
        for line in self.groups if self.compared else ():
            items = "".join(
                f"<li>{escape(describe(one, line['name']))}</li>" for one in line["statements"]
            )
            parts.append(f"<p><b>{escape(_title(line))}</b></p>")
            parts.append(f"<ul>{items}</ul>" if items else f"<p>{_nothing(self)}</p>")
        # A list keeps a line for each of its points.
        look = ' style="white-space: pre-line"'
        parts += [f"<p{look}>{escape(text)}</p>" for text in self._small_print()]
        return "".join(parts if self.compared else [f"<p>{escape(str(self))}</p>"])

    def _told(self) -> list[str]:
        """A paragraph for each group and odd client."""
        if not self.compared:
            return []
        paragraphs = []
        for line in self.groups:
            told = [f"  - {describe(one, line['name'])}" for one in line["statements"]]
            if told or self._has_elsewhere(line):
                told = told or [f"  {_nothing(self)}"]
                paragraphs.append("\n".join([f"{_title(line)}:", *told]))
        return paragraphs

    def _has_elsewhere(self, line: Mapping[str, Any]) -> bool:
        """Whether there are groups that it was compared with."""
        return any(not other["odd"] for other in self.groups if other is not line)

    def _small_print(self) -> list[str]:
        if not self.sent:
            if sum(not line["odd"] for line in self.groups) < 2 and len(self.groups) < 2:
                return ["There is one group and no odd client, so there is nothing to compare."]
            return ["Clients were asked nothing about what differs, so nothing can be said."]
        parts = [
            f"{self.compared:,} comparisons on the clients' {ROWS[self.split]} rows. All intervals "
            "hold together with a probability of 95 %."
        ]
        sent = [f"  - {line['part']}: {line['text']}" for line in self.sent]
        parts.append("\n".join(["Each client sent:", *sent]))
        kept = [KEPT[part] for part in self.kept]
        if kept:
            parts.append(f"Not asked for: {join_words(kept)}.")
        return parts + list(self.notes)


def _title(line: Mapping[str, Any]) -> str:
    if line["odd"]:
        return f"{line['name']} (odd client)"
    name = line["name"][0].upper() + line["name"][1:] if line["name"].startswith("group") else ""
    n = len(line["clients"])
    if not name:
        return str(line["name"])
    return f"{name} ({list_names(line['clients']) if n <= 3 else f'{n} clients'})"


def _nothing(why: Why) -> str:
    return f"no difference beyond chance in what was compared ({why.compared:,} comparisons)."


def describe(one: Mapping[str, Any], name: str = "") -> str:
    """A statement in words.

    >>> radius = {"kind": "number", "name": "radius", "here": 141.0, "elsewhere": 14.1}
    >>> describe({**radius, "low": 120.0, "high": 134.0, "effect": 9.0})
    'radius is 10 times as large as elsewhere: 141 on average, 14.1 elsewhere (120 to 134 more)'
    """
    here, elsewhere, kind = one["here"], one["elsewhere"], one["kind"]
    if kind in ("number", "target"):
        return f"{one['name']} is {_size(one)} ({_range(one['low'], one['high'])})"
    if kind in ("true", "category", "missing", "label"):
        what = {
            "true": f"{one['name']} is true",
            "category": f"{one['name']} is {one.get('value')}",
            "missing": f"{one['name']} is missing",
            "label": f"the label is {one['name']}",
        }[kind]
        points = _range(100 * one["low"], 100 * one["high"], " points")
        return (
            f"{what} in {_percent(here)} of rows, {_percent(elsewhere)} elsewhere"
            f"{_times(here, elsewhere)} ({points})"
        )
    if kind in ("text", "hashed"):
        missing = "which words" if kind == "text" else "which values"
        return (
            f"{one['name']} differs from elsewhere by {abs(one['effect']):.1f} standard deviations "
            f"in its strongest feature ({_effects(one)}); {missing}, hashes do not tell"
        )
    if kind == "class":
        return (
            f"rows with the label {one['name']} are unlike those elsewhere: {one['effect']:.1f} "
            f"standard deviations of a row's losses ({_effects(one)})"
        )
    if kind == "error":
        text = (
            f"the model of {one['model']} errs by {_number(here)} (root mean square) here and by "
            f"{_number(elsewhere)} on its own rows (here {_number(one['low'])} to "
            f"{_number(one['high'])})"
        )
        bias = one.get("bias")
        if bias is None:
            return text
        return f"{text}; it predicts {_number(abs(bias))} too {'high' if bias > 0 else 'low'}"
    return _prediction(one)


def _prediction(one: Mapping[str, Any]) -> str:
    """What another group's model says of the rows here."""
    points = _range(100 * one["low"], 100 * one["high"], " points")
    wrong = text = ""
    if one["lead"] == "wrong":
        wrong = (
            f"is wrong on {_percent(one['here'])} of rows here and on "
            f"{_percent(one['elsewhere'])} of its own ({points})"
        )
        text = f"the model of {one['model']} {wrong}"
    if one["inverted"]:
        inverted = f"compared with {one['model']}, the labels are inverted"
        return f"{inverted}: its model {wrong}" if wrong else inverted
    said = [
        f"{line['label']} for {line['says']} here ({_percent(line['here'])} of such rows, "
        f"{_percent(line['elsewhere'])} of its own)"
        for line in one["called"]
    ]
    if not said:
        return text
    more = f", and {one['more']} more" if one["more"] else ""
    calls = f"mistakes {join_words(said)}{more}"
    return f"{text}; it {calls}" if text else f"the model of {one['model']} {calls} ({points})"


def _size(one: Mapping[str, Any]) -> str:
    """A mean here and elsewhere, as a ratio if it is large."""
    here, elsewhere = one["here"], one["elsewhere"]
    both = f"{_number(here)} on average, {_number(elsewhere)} elsewhere"
    ratio = here / elsewhere if elsewhere else 0.0
    if here > 0 and elsewhere > 0 and ratio > 0.01 and not 0.5 < ratio < 2:
        return f"{_ratio(ratio)} times as large as elsewhere: {both}"
    more = "higher" if here > elsewhere else "lower"
    return f"{more} than elsewhere: {both}, {abs(one['effect']):.1f} standard deviations apart"


def _times(here: float, elsewhere: float) -> str:
    """
    >>> _times(0.6, 0.2), _times(0.2, 0.6)
    (', 3 times as often', '')
    """
    if min(here, elsewhere) < 0.005 or here / elsewhere < 2:
        return ""
    return f", {_ratio(here / elsewhere)} times as often"


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _range(low: float, high: float, unit: str = "") -> str:
    """An interval of a difference.

    >>> _range(2, 5), _range(-5, -2, " points")
    ('2 to 5 more', '2 to 5 points less')
    """
    if high <= 0:
        return f"{_number(-high)} to {_number(-low)}{unit} less"
    return f"{_number(low)} to {_number(high)}{unit} more"


def _effects(one: Mapping[str, Any]) -> str:
    return f"{one['effect_low']:.1f} to {one['effect_high']:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: float) -> str:
    """
    >>> _number(12345.6), _number(141.33), _number(0.01234)
    ('12,346', '141', '0.0123')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# picture


WIDE, TEXT = 10.4, 6.6  # inches: of the page, and of the words on the left
LINEAR = 8.0  # standard deviations up to which the axis is not logarithmic


def why_picture(why: Why, out: str | Path) -> Path:
    """Statements with their effects and intervals; mean images below, if there are any."""
    from coterie.report.page import axes_at, draw, new_page

    lines = [(line, one) for line in why.groups for one in line["statements"]]
    if not lines and not why.images:
        raise ConfigError(
            "Picture: there must be a difference to draw. Nothing differs beyond chance, or "
            "clients were asked nothing."
        )
    names = [line["name"] for line in why.groups if line["statements"]]
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    tall = 0.34 * len(lines) + 0.38 * len(names)
    c = max((len(part) for part in why.images.values()), default=0)
    side = min(0.9, 7.6 / max(c, 1))
    below = (side + 0.05) * len(why.images) + 0.7 if why.images else 0.0
    height = tall + 1.3 + below

    def figure() -> Any:
        page = new_page(WIDE, height)
        if lines:
            _draw_effects(axes_at(page, TEXT, 0.8 + below, WIDE - TEXT - 0.3, tall), lines, colour)
        for number, (name, part) in enumerate(why.images.items()):
            bottom = below - 0.35 - (side + 0.05) * (number + 1)
            label = next(g["name"] for g in why.groups if str(g["set"]) == name)
            page.text(0.1 / WIDE, (bottom + side / 2) / height, label, va="center", fontsize=10)
            for y in range(len(part)):
                ax = axes_at(page, 1.4 + (side + 0.05) * y, bottom, side, side)
                ax.axis("off")
                pixels = part[y].movedim(0, -1) if part[y].ndim == 3 else part[y]
                pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
                ax.imshow(pixels.nan_to_num(0.5).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        return page

    return draw(figure, out)


def _draw_effects(ax: Any, lines: list[Any], colour: Mapping[str, str]) -> None:
    """A row per statement, under the name of its group."""
    place, before = 0.0, ""
    for line, one in lines:
        if line["name"] != before:
            place -= 0.9
            before = line["name"]
            ax.annotate(
                _title(line), (0, place), (-72 * TEXT + 8, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontweight="bold", color=colour[before],
            )  # fmt: skip
        place -= 0.8
        low, high = one["effect_low"], one["effect_high"]
        ax.plot([low, high], [place, place], color=colour[before], linewidth=3)
        ax.plot([one["effect"]], [place], "o", color=colour[before], markersize=7)
        ax.annotate(
            _short(one), (0, place), (-72 * TEXT + 18, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9.5, color="#222222",
        )  # fmt: skip
    ax.axvline(0, color=SOFT, linewidth=1)
    ax.set_ylim(place - 0.6, -0.3)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ends = [0.0, *(one[end] for _, one in lines for end in ("effect_low", "effect_high"))]
    if max(map(abs, ends)) > LINEAR:
        ax.set_xscale("symlog", linthresh=1)
        ticks = [t for t in (-30, -10, -3, -1, 0, 1, 3, 10, 30) if min(ends) <= t <= max(ends)]
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
    ax.set_xlabel("difference, in standard deviations")
    ax.set_title("Difference from elsewhere, with intervals", fontsize=10, color=SOFT)


def _short(one: Mapping[str, Any]) -> str:
    """A statement in a line of a picture."""
    here, elsewhere, kind = one["here"], one["elsewhere"], one["kind"]
    if kind in ("number", "target"):
        text = f"{one['name']}: {_number(here)}, elsewhere {_number(elsewhere)}"
    elif kind in ("true", "category", "missing", "label"):
        value = {"category": f" = {one.get('value')}", "missing": " missing"}.get(kind, "")
        name = f"label {one['name']}" if kind == "label" else f"{one['name']}{value}"
        text = f"{name}: {_percent(here)}, elsewhere {_percent(elsewhere)}"
    elif kind == "error":
        own = _number(elsewhere)
        text = f"model of {one['model']}: error {_number(here)}, {own} on its own rows"
    elif kind == "prediction":
        own = f"{_percent(here)} here, {_percent(elsewhere)} of its own rows"
        first = one["called"][0] if one["called"] else None
        if one["inverted"]:
            text = f"labels inverted: model of {one['model']} wrong on {own}"
        elif one["lead"] == "wrong":
            calls = f", calls {first['label']} {first['says']}" if first else ""
            text = f"model of {one['model']} wrong on {own}{calls}"
        else:
            calls = f"{one['called'][0]['label']} {one['called'][0]['says']}"
            text = f"model of {one['model']} calls {calls}: {own}"
    elif kind == "class":
        text = f"rows with the label {one['name']} are unlike those elsewhere"
    else:
        text = f"{one['name']}: strongest feature"
    return text if len(text) <= 88 else text[:87] + "…"
