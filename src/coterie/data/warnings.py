"""What may be wrong with the data of a federation: each warning in one line.

A warning has the column, the figure and what to do. They are in `data.warnings`, and in the data
card of a run (`final/data.json`). The limits are chosen so that ordinary tables are silent: a
warning that is often wrong is not read.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from coterie.data.cells import Cells, RawTable

COPY = 0.9
"""Correlation from which a column is a near copy of a number to predict."""
COPY_OF_CLASS = 0.97
"""Share of the errors of guessing that a near copy of a label avoids."""
ORDER = 0.5
"""Correlation of neighbouring rows from which rows are in an order."""
FACTOR = 5.0
"""Least factor between the units of two clients."""
FEW = 20
"""Rows below which nothing is said of a client."""
MOST = 20_000
"""Rows that are looked at, evenly spaced, where all would take long."""


class DataWarning(NamedTuple):
    """Something that may spoil a project.

    >>> print(DataWarning("identifier", "id", "Column 'id' counts rows. Leave it out."))
    Column 'id' counts rows. Leave it out.
    """

    kind: str  # "copy", "identifier", "constant", "order", "repeats", "units", "classes", "loss"
    column: str | None  # None: not about one column
    text: str  # column, figure and what to do, in one line

    def __str__(self) -> str:
        return self.text


def warn_of_columns(
    tables: Sequence[RawTable],
    names: Sequence[str],
    columns: Sequence[str],
    label: str | None,
    task: str,
    ordered: bool,
) -> list[DataWarning]:
    """Warnings about the columns of a table per client.

    Parameters
    ----------
    columns
        The columns that are inputs.
    ordered
        Whether the split respects an order or units, so that neighbouring rows do no harm.
    """
    found: list[DataWarning] = []
    named = set()
    for name in columns:
        cells = [table.cells[name] for table in tables]
        for warn in (warn_of_constant, warn_of_identifier, warn_of_units):
            warning = warn(name, cells, names)
            if warning is not None:
                found.append(warning)
                named.add(name)
                break
    if label is None or task == "reconstruction":
        return found
    targets = [table.cells[label] for table in tables]
    if targets[0].values.ndim > 1:
        return found
    for name in columns:
        cells = [table.cells[name] for table in tables]
        if name not in named:
            found += _some(warn_of_copy(name, cells, targets, label, task))
    if not ordered:
        found += _some(warn_of_order(targets, label, task))
    if task == "classification":
        found += _some(warn_of_classes(targets, names, label))
    return found


def _some(warning: DataWarning | None) -> list[DataWarning]:
    return [] if warning is None else [warning]


def warn_of_constant(name: str, cells: Sequence[Cells], names: Sequence[str]) -> DataWarning | None:
    """A column with one value in each client, and another one in other clients."""
    if len(cells) < 2 or min(len(one.values) for one in cells) < 2:
        return None
    values = set()
    for one in cells:
        if one.values.dtype.kind == "f":
            present = one.values[~np.isnan(one.values)]
            if not len(present) or present.min() < present.max():
                return None
            values.add(str(present[0]))
        else:
            words = [word for word in one.code()[0] if word is not None]
            if len(words) != 1:
                return None
            values.add(words[0])
    if len(values) < 2:
        return None
    return DataWarning(
        "constant",
        name,
        f"Column '{name}' has one value in each client ({len(values)} values in {len(cells)} "
        f"clients): it tells who the client is, not what its rows are. Leave it out: "
        f"drop=['{name}'].",
    )


def warn_of_identifier(
    name: str, cells: Sequence[Cells], names: Sequence[str]
) -> DataWarning | None:
    """A column that counts the rows, or that has another value in almost every row."""
    n = sum(len(one.values) for one in cells)
    if not _mostly_different(cells):
        return None
    remedy = f"Leave it out: drop=['{name}']."
    if all(one.values.dtype.kind == "f" for one in cells):
        if any(one.kind == "boolean" for one in cells):
            return None
        long = [one.values for one in cells if len(one.values) >= FEW]
        if long and all(_counts(values) for values in long):
            low, high = min(v.min() for v in long), max(v.max() for v in long)
            return DataWarning(
                "identifier",
                name,
                f"Column '{name}' counts the rows ({low:,.0f} to {high:,.0f}): a model learns "
                f"their order. Leave it out (drop=['{name}']), or split by it (time='{name}').",
            )
        values = np.concatenate([one.values for one in cells])
        whole = bool((values == np.round(values)).all())  # not if one is missing
        different = len(np.unique(values)) if whole and n >= 10 * FEW else 0
    else:
        words = [word for one in cells for word in one.code()[0] if word is not None]
        spaced = 2 * sum(" " in word for word in words) > len(words)  # a text
        different = 0 if spaced or n < 2 * FEW else len(set(words))
    if different < 0.95 * n:
        return None
    return DataWarning(
        "identifier",
        name,
        f"Column '{name}' has {different:,} different values in {n:,} rows: it identifies rows, "
        f"and new rows will have other values. {remedy}",
    )


def _mostly_different(cells: Sequence[Cells]) -> bool:
    """Whether values may be different from row to row, by evenly spaced rows of each client."""
    own = MOST // len(cells)
    for one in cells:
        some = one.values[:: max(1, len(one.values) // max(own, FEW))]
        if len(some) >= FEW and some.dtype.kind == "f" and len(np.unique(some)) < len(some) / 2:
            return False
    return True


def _counts(values: np.ndarray) -> bool:
    """Whether numbers rise or fall by one step from row to row, but for rows left out."""
    steps = np.diff(values)
    if np.isnan(steps).any() or not ((steps > 0).all() or (steps < 0).all()):
        return False
    step = np.median(np.abs(steps))
    return bool((np.abs(steps) == step).mean() > 0.8)


def warn_of_units(name: str, cells: Sequence[Cells], names: Sequence[str]) -> DataWarning | None:
    """A column of positive numbers that some clients write in another unit.

    Then all of its quantiles differ by the same factor, and the factor is larger than the spread.
    """
    quantiles, who = [], []
    for one, client in zip(cells, names, strict=True):
        if one.kind != "number" or one.values.ndim > 1:
            return None
        present = one.values[~np.isnan(one.values)]
        if len(present) < FEW:
            continue
        some = present[:: -(-len(present) // 5000)]  # enough for quantiles
        marks = np.quantile(some, [0.1, 0.25, 0.5, 0.75, 0.9])
        if marks[0] <= 0:
            return None
        quantiles.append(np.log(marks))
        who.append(client)
    if len(quantiles) < 2:
        return None
    marks = np.stack(quantiles)
    usual = np.median(marks, 0)
    shift = marks - usual  # [clients, quantiles]
    middle = np.median(shift, 1)
    far = np.abs(middle) > np.log(FACTOR)
    if len(quantiles) == 2:  # nobody is usual
        shift = marks[1:] - marks[:1]
        middle = np.array([0.0, float(np.median(shift))])
        shift = np.concatenate([np.zeros_like(shift), shift])
        far = np.abs(middle) > np.log(FACTOR)
    spread = marks[:, 3] - marks[:, 1]
    even = np.abs(shift - middle[:, None]).max(1) < 0.35 * np.abs(middle)
    apart = np.abs(middle) > 2 * np.maximum(spread, np.median(spread))
    odd = far & even & apart & (spread > 0)
    if not odd.any() or (far & ~odd).any():
        return None
    first = int(np.argmax(odd))
    factor = float(np.exp(np.abs(middle[first])))
    more = f" and {int(odd.sum()) - 1} more" if odd.sum() > 1 else ""
    way = "larger" if middle[first] > 0 else "smaller"
    return DataWarning(
        "units",
        name,
        f"Column '{name}' is {factor:.3g} times {way} in client '{who[first]}'{more} than in the "
        f"others: another unit? Convert it there, or leave it out: drop=['{name}'].",
    )


def warn_of_copy(
    name: str, cells: Sequence[Cells], targets: Sequence[Cells], label: str, task: str
) -> DataWarning | None:
    """A column that says what there is to predict."""
    remedy = f"If it is known only together with '{label}', leave it out: drop=['{name}']."
    if task == "regression":
        if any(one.values.dtype.kind != "f" for one in cells):
            return None
        pairs = [(one.values, target.values) for one, target in zip(cells, targets, strict=True)]
        alike = max(_correlation(pairs, own=False), _correlation(pairs, own=True))
        if alike < COPY:
            return None
        text = f"Column '{name}' is almost the target '{label}' (correlation {alike:.2f}). {remedy}"
        return DataWarning("copy", name, text)
    x, y = _codes(cells), _codes(targets)
    step = -(-len(x) // MOST)
    x, y = x[::step], y[::step]
    if len(x) < 2 * FEW:
        return None
    # Half of the rows tell the most frequent label of each value, the others test it.
    half = np.random.default_rng(0).permutation(len(x))
    learn, test = half[::2], half[1::2]
    counts = np.zeros((x.max() + 1, y.max() + 1))
    np.add.at(counts, (x[learn], y[learn]), 1)
    usual = counts.sum(0).argmax()
    guess = np.where(counts.sum(1) > 0, counts.argmax(1), usual)
    wrong, blind = (guess[x[test]] != y[test]).mean(), (y[test] != usual).mean()
    if blind == 0 or wrong > (1 - COPY_OF_CLASS) * blind:
        return None
    text = f"Column '{name}' alone predicts '{label}' in {1 - wrong:.1%} of rows. {remedy}"
    return DataWarning("copy", name, text.replace("%", " %"))


def _correlation(pairs: Sequence[tuple[np.ndarray, np.ndarray]], own: bool) -> float:
    """Absolute correlation of two columns, over all rows or around the means of each client."""
    parts = []
    step = -(-sum(len(x) for x, _ in pairs) // MOST)
    for x, y in pairs:
        x, y = x[::step], y[::step]
        both = ~(np.isnan(x) | np.isnan(y))
        x, y = x[both], y[both]
        if own and len(x):
            x, y = x - x.mean(), y - y.mean()
        parts.append((x, y))
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    if len(x) < 2 * FEW or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(abs(np.corrcoef(x, y)[0, 1]))


def _codes(cells: Sequence[Cells]) -> np.ndarray:
    """The values of a column as numbers 0, 1, ...: at most 20 ranges of numbers, or the words."""
    if all(one.values.dtype.kind == "f" for one in cells):
        values = np.concatenate([one.values for one in cells])
        found = np.unique(values[~np.isnan(values)])
        if len(found) > 20:
            marks = np.nanquantile(values, np.linspace(0, 1, 21)[1:-1])
            return np.where(np.isnan(values), 20, np.searchsorted(marks, values))
        return np.where(np.isnan(values), len(found), np.searchsorted(found, values))
    places: dict[str | None, int] = {}
    parts = []
    for one in cells:
        words, codes = one.code()
        own = [places.setdefault(word, len(places)) for word in words]
        parts.append(np.array(own, dtype=np.int64)[codes])
    return np.concatenate(parts)


def warn_of_order(targets: Sequence[Cells], label: str, task: str) -> DataWarning | None:
    """Neighbouring rows with similar targets, though rows are split at random.

    Rows that are sorted by the target are no reason to warn: their order tells nothing else.
    """
    alike, n = 0.0, 0
    for target in targets:
        if task == "regression":
            y = target.values
            rises = np.diff(y)
            tidy = (rises >= 0).all() or (rises <= 0).all()
        else:
            y = target.code()[1].astype(np.float64)
            tidy = (np.diff(y) != 0).sum() + 1 <= 2 * len(np.unique(y))
        if len(y) < FEW or y.std() == 0:
            continue
        if tidy:
            return None
        if task == "regression":
            own = float(np.corrcoef(y[:-1], y[1:])[0, 1])
        else:
            chance = float(((np.bincount(y.astype(np.int64)) / len(y)) ** 2).sum())
            own = (float((y[:-1] == y[1:]).mean()) - chance) / (1 - chance)
        alike, n = alike + len(y) * own, n + len(y)
    if not n or alike / n < ORDER:
        return None
    return DataWarning(
        "order",
        label,
        f"Neighbouring rows have almost the same '{label}' (correlation {alike / n:.2f}), but test "
        "rows are drawn at random: test results look too good. Name the order (time=COLUMN) or "
        "what belongs together (unit=COLUMN).",
    )


def warn_of_classes(
    targets: Sequence[Cells], names: Sequence[str], label: str
) -> DataWarning | None:
    """Classes that one client has alone."""
    owners: dict[str, list[str]] = {}
    for target, name in zip(targets, names, strict=True):
        for word in target.code()[0]:
            owners.setdefault(str(word), []).append(name)
    lone = {word: who[0] for word, who in owners.items() if len(who) == 1}
    if not lone or len(targets) < 2:
        return None
    first = ", ".join(f"'{word}' (client '{who}')" for word, who in list(lone.items())[:3])
    more = f" and {len(lone) - 3} more" if len(lone) > 3 else ""
    what, them = ("class", "it") if len(lone) == 1 else ("classes", "them")
    occur = "occurs" if len(lone) == 1 else "occur"
    return DataWarning(
        "classes",
        label,
        f"{len(lone)} {what} of '{label}' {occur} in one client only: {first}{more}. No other "
        f"client can learn or test {them}: merge classes, or leave these rows out.",
    )


def warn_of_loss(losses: Mapping[int, float], way: str = "") -> DataWarning | None:
    """Loss on held-out rows that rises while training goes on.

    Parameters
    ----------
    losses
        Mean loss by round.
    way
        Whose loss it is.

    >>> print(warn_of_loss({1: 0.9, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7}, "training alone"))
    The held-out loss of training alone rises from 0.4 in round 2 to 0.7 in round 5: ...
    >>> warn_of_loss({1: 0.9, 2: 0.4, 3: 0.39})
    """
    known = {r: loss for r, loss in losses.items() if loss is not None and np.isfinite(loss)}
    if len(known) < 3:
        return None
    rounds = sorted(known)
    best = min(rounds, key=lambda r: known[r])
    last = rounds[-1]
    # One bad evaluation is no trend: the last three must all be worse.
    worse = min(known[r] for r in rounds[-3:])
    if best >= rounds[-3] or worse <= known[best] + 0.1 * abs(known[best]):
        return None
    whose = f" of {way}" if way else ""
    return DataWarning(
        "loss",
        None,
        f"The held-out loss{whose} rises from {known[best]:.3g} in round {best} to "
        f"{known[last]:.3g} in round {last}: train for fewer rounds (rounds={best}), or let it "
        f"stop by itself (settings={{'stop': 'validation', 'validation': 0.2}}).",
    )
