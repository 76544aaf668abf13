"""Assign the rows of a data set to groups, and the rows of a group to its clients."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError, unknown
from coterie.core.random import fold, seed_key, shuffled
from coterie.core.tree import Tree
from coterie.data.arrays import unit_scale
from coterie.data.cutting import dirichlet_shares, whole
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.partitions import Turn
from coterie_lab import sources
from coterie_lab.sources import Pool

SPLITS = ("train", "test")
TEST_SHARES = ("same", "own")
Groups = dict[str, list[Tensor]]
"""The rows of each group, by split."""


# groups


def overlapping_sets(
    n_classes: int, n_sets: int, size: int, shared: int, key: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Draw sets of classes, any two of which share exactly `shared` classes.

    >>> sets = overlapping_sets(10, 5, 4, 2, seed_key(0))
    >>> {len(set(a) & set(b)) for a, b in itertools.combinations(sets, 2)}
    {2}
    """
    every = list(itertools.combinations(range(n_classes), size))
    for attempt in range(1000):  # a few attempts are usually enough; a dead end needs a new start
        left = [every[i] for i in shuffled(fold(key, attempt), len(every)).tolist()]
        chosen: list[tuple[int, ...]] = []
        while left and len(chosen) < n_sets:
            chosen.append(left[0])
            left = [s for s in left[1:] if len(set(s) & set(chosen[-1])) == shared]
        if len(chosen) == n_sets:
            return tuple(chosen)
    raise ConfigError(
        f"overlapping_sets: found no {n_sets} sets of {size} out of {n_classes} classes, any two "
        f"of which share {shared}. Ask for fewer sets."
    )


def swap_labels(pairs: Sequence[tuple[int, int]], n_classes: int) -> Tensor:
    """The label of each class after pairs of labels have been swapped.

    >>> swap_labels([(0, 2)], 4)
    tensor([2, 1, 0, 3])
    """
    order = torch.arange(n_classes)
    for a, b in pairs:
        order[a], order[b] = b, a
    return order


def ten_classes(source: str, data_dir: str | None, shuffle: bool = False, seed: int = 0) -> Pool:
    """Load a data set with ten classes; `shuffle` numbers the classes in a random order."""
    pool = sources.load(source, data_dir)
    if len(pool.classes) != 10:
        raise ConfigError(
            f"This partition needs a data set with ten classes. {source} has {len(pool.classes)}."
        )
    if not shuffle:
        return pool
    order = shuffled(fold(seed_key(seed), "class order"), 10)  # new number of each class
    names = tuple(pool.classes[i] for i in order.argsort().tolist())
    return pool._replace(y=order[pool.y.long()].to(pool.y.dtype), classes=names)


def of_class(pool: Pool, split: str, c: int, key: Tensor) -> Tensor:
    """The rows of a class, in random order."""
    rows = pool.rows(split)
    own = rows[pool.y[rows] == c]
    return own[shuffled(fold(key, split, c), len(own))]


def take_classes(pool: Pool, sets: Sequence[Sequence[int]]) -> Groups:
    """Give each group all rows of its classes."""
    out: Groups = {}
    for split in SPLITS:
        rows = pool.rows(split)
        y = pool.y[rows].long()
        out[split] = [rows[torch.isin(y, torch.tensor(own))] for own in sets]
    return out


def divide_classes(
    pool: Pool,
    sets: Sequence[Sequence[int]],
    least: dict[str, int],
    key: Tensor,
    test_shares: str = "same",
) -> Groups:
    """Divide each class among its groups: a reserve evenly, the rest in Dirichlet shares.

    Test rows are divided in the "same" shares as training rows, or in shares of their "own". If a
    group gets too few rows, the reserve is raised by five percentage points and the shares are
    drawn again. At 100 % all groups of a class get the same number of rows.
    """
    if test_shares not in TEST_SHARES:
        raise ConfigError(unknown("kind of test_shares", test_shares, TEST_SHARES))
    if test_shares == "same":
        return _divide(pool, sets, least, key)
    train = _divide(pool, sets, {"train": least["train"]}, key)
    return train | _divide(pool, sets, {"test": least["test"]}, fold(key, "test"))


def _divide(
    pool: Pool, sets: Sequence[Sequence[int]], least: dict[str, int], key: Tensor
) -> Groups:
    """Divide the rows of some splits, all in the same shares."""
    owners = [[g for g, own in enumerate(sets) if c in own] for c in range(len(pool.classes))]
    for attempt in range(19):
        reserve = min(0.1 + 0.05 * attempt, 1.0)
        parts: dict[str, list[list[Tensor]]] = {split: [[] for _ in sets] for split in least}
        for c, own in enumerate(owners):
            if not own:
                continue
            drawn = dirichlet_shares(0.5, (len(own),), fold(key, "shares", attempt, c))
            shares = reserve / len(own) + (1 - reserve) * drawn
            for split in least:
                rows = of_class(pool, split, c, key)
                cut = rows.split(whole(shares, len(rows)).tolist())
                for g, mine in zip(own, cut, strict=True):
                    parts[split][g].append(mine)
        groups = {split: [torch.cat(part) for part in parts[split]] for split in least}
        if all(len(rows) >= least[split] for split in least for rows in groups[split]):
            return groups
    wanted = " and ".join(f"{count} {split} rows" for split, count in least.items())
    raise DataError(
        f"Label skew: every group needs {wanted}. The data set has too few. Use another data set."
    )


def mix_dominant(pool: Pool, split: str, key: Tensor, share: float = 0.666) -> list[Tensor]:
    """One group per class: a share of its rows is from this class, the rest from all others."""
    n_classes = len(pool.classes)
    rows = [of_class(pool, split, c, key) for c in range(n_classes)]
    size = int(0.9 * min(len(own) for own in rows))
    major, minor = int(share * size), int((1 - share) * size) // (n_classes - 1)
    taken = [0] * n_classes
    groups = []
    for g in range(n_classes):
        parts = []
        for c in range(n_classes):
            count = major if c == g else minor
            parts.append(rows[c][taken[c] : taken[c] + count])
            taken[c] += count
        groups.append(torch.cat(parts))
    return groups


# clients


def as_float(x: Tensor, facts: Tree) -> Tensor:
    """Convert counts or bytes to floats without scaling."""
    return x.to(torch.get_default_dtype())


def as_tokens(x: Tensor, facts: Tree) -> Tensor:
    """Convert word numbers to integers for an embedding."""
    return x.long()


as_float.batched = as_tokens.batched = True  # type: ignore[attr-defined]
Transform = Callable[[Tensor, Tree], Tensor]


def pick_transform(raw: bool) -> Transform:
    """The transform of images: floats from 0 to 255, or scaled to [0, 1]."""
    return as_float if raw else unit_scale


def assign_rows(
    pool: Pool,
    groups: Groups,
    clients_per_group: int,
    n: int | None,
    key: Tensor,
    transform: Transform = unit_scale,
) -> FederatedData:
    """Assign the rows of each group to its clients."""
    if clients_per_group < 1 or (n is not None and n < 1):
        raise ConfigError(
            f"Partition: clients_per_group and n must be at least 1. Got {clients_per_group} and "
            f"{n}."
        )
    lists: dict[str, list[Tensor]] = {}
    for split, parts in groups.items():
        lists[split] = []
        for g, rows in enumerate(parts):
            size = len(rows) // clients_per_group
            if not size and split == "train":
                raise DataError(
                    f"Partition: group {g} has {len(rows)} training rows for {clients_per_group} "
                    "clients. Use fewer clients."
                )
            mixed = rows[shuffled(fold(key, split, g), len(rows))]
            chunks = mixed[: size * clients_per_group].reshape(clients_per_group, size)
            lists[split] += list(chunks[:, :n])
    k = len(groups["train"])
    return FederatedData(
        pool.x,
        pool.y,
        {split: RowIndex.of(parts) for split, parts in lists.items()},
        names=tuple(f"client-{i}" for i in range(k * clients_per_group)),
        task="classification",
        n_outputs=len(pool.classes),
        transform=transform,
        truth=torch.arange(k).repeat_interleave(clients_per_group),
        classes=pool.classes,
        notes=pool.notes,
    )


def add_facts(data: FederatedData, facts: dict[str, Tensor], transform: Turn) -> FederatedData:
    """Add facts to the clients, and a transform that uses them."""
    return replace(data, client_facts=facts, transform=transform)


def keep_used(data: FederatedData) -> FederatedData:
    """Keep only the rows that clients use, one copy for each use."""
    lists = [data.rows[split].index for split in SPLITS]
    used = torch.cat(lists)
    rows = {
        split: RowIndex.blocks(data.rows[split].sizes, start=start)
        for split, start in zip(SPLITS, (0, len(lists[0])), strict=True)
    }
    return replace(data, x=data.x[used], y=data.y[used], rows=rows)
