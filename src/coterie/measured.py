"""Which methods did best in our measurements, by kind of difference between clients.

The figures are in `measured.json`, which the laboratory generates from the summaries of its runs.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")
CLOSE = 1.0
"""Points of accuracy up to which a method counts as one of the best."""


@cache
def measurements() -> dict[str, Any]:
    """The figures by kind of difference."""
    return dict(json.loads(FILE.read_text()))


def best_methods(kind: str, most: int = 3) -> list[tuple[str, float]]:
    """The methods with the highest accuracy for a kind of difference, in percent, best first.

    Only those within a point of the best; an empty list if the kind was not measured.
    """
    rows = measurements().get(kind, {}).get("accuracy", [])
    return [(name, value) for name, value in rows[:most] if value >= rows[0][1] - CLOSE]


def say_best(kind: str) -> str:
    """A sentence on the methods that did best for a kind of difference; empty if unknown."""
    best = [f"{name} ({value:.0f} %)" for name, value in best_methods(kind)]
    if not best:
        return ""
    return (
        f"For differences of this kind ({kind}), these methods had the highest accuracy in our "
        f"measurements: {', '.join(best)}."
    )


def say_where(method: str) -> str:
    """A sentence on the kinds of difference for which a method was among the best, or how far off.

    Empty if the method was not measured.
    """
    gaps = {}
    for kind, entry in measurements().items():
        rows = dict(map(tuple, entry["accuracy"]))
        if method in rows:
            gaps[kind] = entry["accuracy"][0][1] - rows[method]
    if not gaps:
        return ""
    good = [kind for kind, gap in gaps.items() if gap <= CLOSE]
    bad = [f"{kind} ({gap:.0f})" for kind, gap in gaps.items() if gap > CLOSE]
    text = []
    if good:
        text.append(f"it was within {CLOSE:.0f} point of the best accuracy for: {', '.join(good)}")
    if bad:
        text.append(f"it was this many points behind the best for: {', '.join(bad)}")
    return f"In our measurements, {'; '.join(text)}."
