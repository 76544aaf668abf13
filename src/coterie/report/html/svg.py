"""Small pieces of SVG. All text and all values are escaped, so a client may have any name."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """An element. `class_` stands for class, and `_` in a name for a hyphen.

    >>> tag("text", "<b>", x=1.26, class_="soft")
    Markup('<text x="1.3" class="soft">&lt;b&gt;</text>')
    """
    said = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _number(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{}{}>{}</{}>").format(name, said, join(*inside), name)


def join(*parts: Any) -> Markup:
    """Pieces one after the other; text is escaped."""
    return Markup("").join(
        escape(printable(part) if isinstance(part, str) else part) for part in parts
    )


def printable(text: str) -> str:
    """Text without characters that steer a display, such as a reversal of the direction."""
    if isinstance(text, Markup):
        return text
    return "".join(c if c.isprintable() or c == "\u00a0" else " " for c in text)


def _number(value: Any) -> Any:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def drawing(about: str, width: float, height: float, *inside: Any, class_: str = "") -> Markup:
    """A picture with its alternative text."""
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=printable(about),
        class_=f"drawing {class_}".strip(),
    )


def text(x: float, y: float, said: str, class_: str = "", anchor: str = "start") -> Markup:
    """A line of text; `y` is its base line."""
    return tag("text", said, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x0: float, y0: float, x1: float, y1: float, class_: str = "axis") -> Markup:
    """A straight line."""
    return tag("line", x1=x0, y1=y0, x2=x1, y2=y1, class_=class_)


def path(points: list[tuple[float, float]], class_: str) -> Markup:
    """A line through points."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=d, class_=class_)


def shorten(said: str, most: int) -> str:
    """A long text cut, with three dots.

    >>> shorten("Nongzhanguan", 8)
    'Nongzha…'
    """
    said = printable(said)
    return said if len(said) <= most else f"{said[: most - 1]}…"


def tell_apart(names: Sequence[str], most: int) -> list[str]:
    """Long names without the beginning and end that all of them share, cut.

    >>> tell_apart(["Data_Dongsi_2013", "Data_Gucheng_2013"], 12)
    ['…Dongsi…', '…Gucheng…']
    >>> tell_apart(["ann", "anna"], 12)
    ['ann', 'anna']
    """
    if len(names) < 2 or max(map(len, names)) <= most:
        return [shorten(name, most) for name in names]
    start = _shared(names)
    end = _shared([name[start:][::-1] for name in names])
    start, end = (start if start > 3 else 0), (end if end > 3 else 0)
    parts = [name[start : len(name) - end] for name in names]
    return [shorten("…" * (start > 0) + part + "…" * (end > 0), most) for part in parts]


def _shared(names: Sequence[str]) -> int:
    """Number of letters with which all names begin."""
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    return [*same, False].index(False)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high.

    >>> ticks(0.0, 0.83)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    >>> ticks(1.07, 1.9, 4)
    [1.2, 1.4, 1.6, 1.8]
    """
    if not high > low:
        return [low]
    found = _ticks(low, high, most)
    return found if len(found) > 2 else _ticks(low, high, 2 * most)


def _ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
