"""Rows that occur more than once: they look like information and are not.

Each client counts them on its own rows and tells three numbers (`count_repeats`). In tables of a
few categories rows agree by chance; the warning is given only if many more agree than that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from coterie.core.tree import Tree, leaves
from coterie.data.warnings import DataWarning

SHARE = 0.01
"""Share of repeats from which they are worth a warning."""
SURPRISE = 10.0
"""How many times more pairs of equal rows than by chance."""


class Repeats(NamedTuple):
    """What a client tells of its rows."""

    rows: int
    repeated: int  # rows that repeat another one
    chance: float  # pairs of equal rows, if columns were independent
    pairs: int  # pairs of equal rows


def count_repeats(x: Tree, y: Tensor) -> Repeats:
    """Count the rows of one client that agree with another one in all inputs and in the target.

    >>> import torch
    >>> x = torch.tensor([[0.5, 1.25], [0.75, 2.5], [0.5, 1.25]])
    >>> count_repeats(x, torch.tensor([1, 0, 1]))
    Repeats(rows=3, repeated=1, chance=..., pairs=1)
    """
    n = len(y)
    parts = [*leaves(x), y[:, None]]
    if len(np.unique(sum(_hash(leaf, i) for i, leaf in enumerate(parts)))) == n:
        return Repeats(n, 0, 0.0, 0)  # equal rows have equal hashes
    columns = np.concatenate([_plain(leaf) for leaf in parts], 1)
    # The bytes of a row, because sorting rows takes long where they are images.
    seen = columns.view(f"V{columns.shape[1] * 8}").ravel().tolist()
    repeated = n - len(set(seen))
    if not repeated:
        return Repeats(n, 0, 0.0, 0)
    pairs = sum(count * (count - 1) for count in Counter(seen).values()) // 2
    return Repeats(n, repeated, n * (n - 1) / 2 * _agreement(columns[:: -(-n // 1000)]), pairs)


def warn_of_repeats(told: Sequence[Repeats]) -> list[DataWarning]:
    """Warn of repeats in a federation whose units are not named.

    >>> print(*warn_of_repeats([Repeats(100, 50, 0.1, 50), Repeats(100, 0, 0.0, 0)]))
    50 of 200 rows (25 %) repeat another row of their client exactly, ...
    >>> warn_of_repeats([Repeats(100, 50, 40.0, 50)])
    []
    """
    rows, repeated = sum(part.rows for part in told), sum(part.repeated for part in told)
    chance, pairs = sum(part.chance for part in told), sum(part.pairs for part in told)
    if repeated < SHARE * rows or pairs < SURPRISE * chance:
        return []
    text = (
        f"{repeated:,} of {rows:,} rows ({repeated / rows:.0%}) repeat another row of their client "
        "exactly, which makes test results look too good: remove them, or name the rows that "
        "belong together (unit=COLUMN)."
    ).replace("%)", " %)")
    return [DataWarning("repeats", None, text)]


def _hash(leaf: Tensor, seed: int) -> np.ndarray:
    """A number for each row, from the bits of all its columns: [n]."""
    values = leaf.flatten(1).numpy()
    wide: Any = np.uint64 if values.dtype.itemsize == 8 else np.uint32
    bits: Any = (values + 0.0 if values.dtype.kind == "f" else values.astype(wide)).view(wide)
    factors = np.random.default_rng(seed).integers(2**31, size=bits.shape[1], dtype=np.int64)
    bits = (bits ^ (bits >> 15)) * (2 * factors.astype(wide) + 1)
    bits ^= bits >> 16
    more = np.random.default_rng(seed + 1).integers(2**63, size=bits.shape[1], dtype=np.uint64)
    return bits.astype(np.uint64) @ (2 * more + np.uint64(1))


def _plain(leaf: Tensor) -> np.ndarray:
    """A column as 64 bits a number, equal for equal numbers: [n, columns]."""
    return leaf.flatten(1).double().numpy() + 0.0  # -0.0 becomes 0.0


def _agreement(columns: np.ndarray) -> float:
    """Probability that two rows agree, if their columns were independent of one another."""
    n = len(columns)
    values = np.sort(columns, axis=0)
    place = np.arange(n)[:, None]
    new = np.ones(values.shape, dtype=bool)
    new[1:] = values[1:] != values[:-1]
    start = np.maximum.accumulate(np.where(new, place, 0), axis=0)
    pairs = (place - start).sum(0)
    return float(np.prod(pairs / max(n * (n - 1) / 2, 1)))
