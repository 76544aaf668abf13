"""The partitions of the published studies, cut from public data sets.

First a pool of rows for each group, train and test apart; then each group's pool, in random order,
is cut into equal chunks, one per client, of which at most `n` rows are kept (for tests, too).
Within a group no row is used twice. `partition_seed` decides which rows a group owns, `seed` how
they are dealt to clients: the studies draw the first once and repeat the second.

References: Bhatia et al.: CLoVE, 2025, arXiv:2506.22427 (what is named `published_...`), and the
code its authors released, which decides where the text is silent; Ghosh et al., NeurIPS 2020,
arXiv:2006.04088 (`rotated_clients`); FedGMI (`component_mixture`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError, unknown
from coterie.core.random import fold, seed_key, shuffled, uniform
from coterie.core.tree import Tree
from coterie.data import sources
from coterie.data.arrays import unit_scale
from coterie.data.cutting import dirichlet_shares, turns, whole
from coterie.data.federated import FederatedData, Rows
from coterie.data.partitions import Turn
from coterie.data.sources import Pool
from coterie.data.synthetic import problem

SPLITS = ("train", "test")
Groups = dict[str, list[Tensor]]  # split -> rows of each group

CONCEPT_SWAPS = (
    ((0, 3), (8, 9)),
    ((1, 4), (6, 9)),
    ((1, 2), (3, 6)),
    ((3, 5), (4, 7)),
)
LABEL_SKEW_3 = tuple(tuple(c for c in range(10) if c != out) for out in (9, 0, 1, 2, 10))


@problem
def published_label_skew(
    source: str = "mnist",
    kind: int = 1,
    clients_per_group: int = 5,
    n: int = 500,
    seed: int = 0,
    partition_seed: int = 0,
    shuffle_classes: bool = False,
    raw: bool = False,
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's label skews 1 to 4: groups differ in the classes they have.

    1: five groups of two classes each. 2: five groups of four classes, any two share exactly two.
    3: five groups that lack one class each, or none. 4: ten groups, two thirds of one class.

    Parameters
    ----------
    source
        A data set of ten classes.
    n
        Rows of a client, at most.
    shuffle_classes
        Number the classes in a random order first, as CLoVE's code does for CIFAR-10.
    raw
        Hand bytes over as they are, 0 to 255, instead of scaled to [0, 1].
    """
    pool = _ten(source, data_dir, shuffle_classes, partition_seed)
    key = fold(seed_key(partition_seed), "label skew", kind)
    if kind == 1:
        groups = _owned(pool, [(2 * g, 2 * g + 1) for g in range(5)])
    elif kind == 2:
        sets = overlapping_sets(10, 5, 4, 2, fold(key, "sets"))
        groups = _skewed(pool, sets, {"train": 5100, "test": 510}, fold(key, "rows"))
    elif kind == 3:
        groups = _skewed(pool, LABEL_SKEW_3, {"train": 6000, "test": 750}, fold(key, "rows"))
    elif kind == 4:
        groups = {split: _dominated(pool, split, fold(key, "rows", split)) for split in SPLITS}
    else:
        raise ConfigError(f"published_label_skew: kind must be 1, 2, 3 or 4, got {kind}.")
    key = fold(seed_key(seed), "clients")
    return _federation(pool, groups, clients_per_group, n, key, _scaled(raw))


@problem
def published_feature_skew(
    source: str = "mnist",
    clients_per_group: int = 10,
    n: int = 500,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's feature skew: four groups see the whole data set turned by 0, 90, 180, 270 degrees.

    The same image may occur under several turns, never twice in a group.
    """
    pool = sources.load(source, data_dir)
    groups = {split: [pool.rows(split)] * 4 for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = _federation(pool, groups, clients_per_group, n, key)
    assert data.truth is not None
    return _with(data, {"turn": data.truth.clone()}, Turn(turns("feature_skew", pool.x.shape, 4)))


@problem
def published_concept_shift(
    source: str = "mnist",
    clients_per_group: int = 5,
    n: int = 1000,
    seed: int = 0,
    partition_seed: int = 0,
    shuffle_classes: bool = False,
    raw: bool = False,
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's concept shift: four groups with images of their own, two pairs of labels swapped.

    A group has 1,250 training and 200 test images of every class. No single model can be right
    about more than 60 % of the labels. Options are those of `published_label_skew`.
    """
    pool = _ten(source, data_dir, shuffle_classes, partition_seed)
    key = fold(seed_key(partition_seed), "concept shift")
    groups: Groups = {}
    y = pool.y.clone()
    for split, per_class in (("train", 1250), ("test", 200)):
        parts: list[list[Tensor]] = [[] for _ in CONCEPT_SWAPS]
        for c in range(10):
            own = _of_class(pool, split, c, key)
            if len(own) < 4 * per_class:
                raise DataError(
                    f"published_concept_shift: four groups need {4 * per_class} {split} rows of a "
                    f"class. {source} has {len(own)} of class {c}."
                )
            for part, rows in zip(parts, own.split(per_class)[:4], strict=True):
                part.append(rows)
        groups[split] = [torch.cat(part) for part in parts]
        for rows, swaps in zip(groups[split], CONCEPT_SWAPS, strict=True):
            y[rows] = swapped(swaps, 10)[y[rows].long()].to(y.dtype)
    pool = pool._replace(y=y)
    key = fold(seed_key(seed), "clients")
    return _federation(pool, groups, clients_per_group, n, key, _scaled(raw))


@problem
def rotated_clients(
    source: str = "mnist",
    n_clients: int = 1200,
    n_groups: int = 4,
    keep: int | None = None,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """IFCA's rotated images: every turn has a whole copy of the data set, cut among its clients.

    Every client also has an equal part of its turn's test images, so that the mean over clients is
    the share of all test images that are right.

    Parameters
    ----------
    keep
        Use so many clients of each turn, for a quick look; all if None.
    """
    pool = sources.load(source, data_dir)
    if n_groups not in (2, 4) or n_clients % n_groups:
        raise ConfigError(
            f"rotated_clients: n_groups must be 2 or 4 and divide n_clients. Got {n_groups} groups "
            f"and {n_clients} clients."
        )
    groups = {split: [pool.rows(split)] * n_groups for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = _federation(pool, groups, n_clients // n_groups, None, key)
    assert data.truth is not None
    table = turns("rotated_clients", pool.x.shape, n_groups)
    data = _with(data, {"turn": data.truth.clone()}, Turn(table))
    if keep is None:
        return data
    place = torch.arange(n_clients) % (n_clients // n_groups)
    return data.subset((place < keep).nonzero().flatten())


@problem
def published_relabelled(
    source: str = "cifar10",
    clients_per_group: int = 5,
    n: int = 500,
    seed: int = 0,
    partition_seed: int = 0,
    shuffle_classes: bool = True,
    raw: bool = True,
    data_dir: str | None = None,
) -> FederatedData:
    """What CLoVE's code does to CIFAR-10 under the name of feature skew: nothing is turned.

    Each of four groups has the whole data set and numbers its classes in an order of its own
    (unless `shuffle_classes` is off). Rows in use are stored once for each group.
    """
    pool = _ten(source, data_dir)
    groups = {split: [pool.rows(split)] * 4 for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = _only_used(_federation(pool, groups, clients_per_group, n, key, _scaled(raw)))
    if not shuffle_classes:
        return data
    assert data.truth is not None
    y = data.y.clone()
    for g in range(4):
        order = shuffled(fold(seed_key(partition_seed), "class order", g), 10)
        own = (data.truth == g).nonzero().flatten()
        for split in SPLITS:
            rows = data.rows[split].of_clients(own).index
            y[rows] = order[data.y[rows].long()].to(y.dtype)
    return replace(data, y=y, classes=None)


@problem
def published_one_class(
    source: str = "mnist",
    clients_per_group: int = 5,
    n: int = 1000,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's unsupervised studies: a group per class; images are to be reconstructed."""
    pool = _ten(source, data_dir)
    groups = _owned(pool, [(c,) for c in range(10)])
    data = _federation(pool, groups, clients_per_group, n, fold(seed_key(seed), "clients"))
    size = pool.x[0].numel()
    nothing = torch.zeros(len(pool.y))
    return replace(data, y=nothing, task="reconstruction", n_outputs=size, classes=None)


REVIEWS = {"books": 2834, "dvd": 1199, "electronics": 1883, "kitchen": 1755}


@problem
def published_reviews(
    clients_per_group: int = 5,
    n: int = 1000,
    seed: int = 0,
    partition_seed: int = 0,
    whole: bool = False,
    source: str = "amazon",
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's Amazon study: a group per kind of goods, a tenth of its reviews for testing.

    Parameters
    ----------
    whole
        All reviews there are, instead of the numbers the paper states.
    """
    pool = sources.load(source, data_dir)
    assert pool.owner is not None
    key = fold(seed_key(partition_seed), "reviews")
    groups: Groups = {split: [] for split in SPLITS}
    for g, name in enumerate(pool.owners):
        rows = (pool.owner == g).nonzero().flatten()
        count = len(rows) if whole else REVIEWS[name]
        own = rows[shuffled(fold(key, g), len(rows))[:count]]
        tested = round(0.1 * len(own))
        groups["test"].append(own[:tested])
        groups["train"].append(own[tested:])
    clients = fold(seed_key(seed), "clients")
    return _only_used(_federation(pool, groups, clients_per_group, n, clients, as_float))


@problem
def published_news(
    clients_per_group: int = 5,
    n: int = 100,
    seed: int = 0,
    partition_seed: int = 0,
    source: str = "ag_news",
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's AG News study: six groups, one for each pair of the four classes."""
    pool = sources.load(source, data_dir)
    pairs = list(itertools.combinations(range(len(pool.classes)), 2))
    key = fold(seed_key(partition_seed), "news")
    groups = _skewed(pool, pairs, {"train": 300, "test": 300}, key)
    clients = fold(seed_key(seed), "clients")
    return _only_used(_federation(pool, groups, clients_per_group, n, clients, as_tokens))


@problem
def published_writers(
    n_clients: int | None = 100,
    share: float = 1.0,
    most_data: bool = True,
    least: int = 1,
    seed: int = 0,
    source: str = "femnist",
    data_dir: str | None = None,
) -> FederatedData:
    """FEMNIST: a client per writer with all its characters, a tenth of them for testing.

    Parameters
    ----------
    n_clients
        Writers that are drawn; all that are left if None.
    share
        Draw this share of the writers first.
    most_data
        Draw from the tenth of them that wrote most (from `n_clients` at least), as CLoVE does.
    least
        Leave out writers of fewer characters; IFCA's study asks for 100.
    """
    pool = sources.load(source, data_dir)
    assert pool.owner is not None
    key = fold(seed_key(seed), "writers")
    count = torch.bincount(pool.owner, minlength=len(pool.owners))
    drawn = shuffled(fold(key, "share"), len(count))[: max(1, round(share * len(count)))]
    drawn = drawn[count[drawn] >= least]
    wanted = len(drawn) if n_clients is None else n_clients
    if wanted > len(drawn):
        raise DataError(
            f"published_writers: {wanted} writers were asked for, {len(drawn)} are there with "
            f"{least} characters or more."
        )
    if most_data:
        order = count[drawn].argsort(descending=True, stable=True)
        drawn = drawn[order[: max(wanted, len(drawn) // 10)]]
    drawn = drawn[shuffled(fold(key, "clients"), len(drawn))[:wanted]].sort().values
    start = torch.cat([torch.zeros(1).long(), count.cumsum(0)])
    lists = [torch.arange(int(start[w]), int(start[w + 1])) for w in drawn.tolist()]
    names = tuple(pool.owners[w] for w in drawn.tolist())
    train, test = Rows.of(lists).divide(names, 0.1, fold(key, "test"))
    data = FederatedData(
        pool.x,
        pool.y,
        {"train": train, "test": test},
        names=names,
        task="classification",
        n_outputs=len(pool.classes),
        transform=unit_scale,
        classes=pool.classes,
        notes=(*pool.notes, "True groups are not known."),
    )
    return _only_used(data)


@problem
def component_mixture(
    source: str = "mnist",
    n_clients: int = 50,
    n_components: int = 2,
    shares: str = "random",
    sizes: tuple[int, int] = (100, 200),
    test: int = 100,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """FedGMI's mixtures: every client's rows come from several components in shares of its own.

    Components are turns by 0, 90 and 180 degrees; of EMNIST, upper-case and lower-case letters
    that share 26 labels. Classes are equally likely on every client, rows are drawn with
    replacement. `extra` has "shares" [clients, components] as they came out, and "component" of
    every row of the pool.

    Parameters
    ----------
    shares
        "linear": client i has share (i + 0.5) / clients of component 0; "random": drawn uniformly.
    sizes
        Least and largest number of a client's training rows.
    test
        Test rows of a client, in the same shares.
    """
    pool = sources.load(source, data_dir)
    letters = len(pool.classes) == 62
    most = 2 if letters else 3
    if not 2 <= n_components <= most:
        raise ConfigError(f"component_mixture: n_components must lie in 2..{most}.")
    if shares not in ("linear", "random"):
        raise ConfigError(unknown("kind of shares", shares, ("linear", "random")))
    if shares == "linear" and n_components != 2:
        raise ConfigError("component_mixture: linear shares are for two components.")
    key = fold(seed_key(seed), "mixture")
    if shares == "linear":
        first = (torch.arange(n_clients, dtype=torch.float64) + 0.5) / n_clients
        wanted = torch.stack([first, 1 - first], 1)  # [m, k]
    else:  # uniform over the simplex; for two components the first share is uniform
        wanted = dirichlet_shares(1.0, (n_clients, n_components), fold(key, "shares"))
    low, high = sizes
    draw = uniform(fold(key, "sizes"), (n_clients,), torch.float64)
    n = (low + (draw * (high - low + 1)).floor()).long()  # [m]
    names, supply = _supply(pool, letters, n_components, key)
    parts: dict[str, list[Tensor]] = {"rows": [], "component": []}
    blocks: list[int] = []
    for split in SPLITS:
        for i in range(n_clients):
            count = whole(wanted[i], int(n[i]) if split == "train" else test)  # [k]
            component = torch.arange(n_components).repeat_interleave(count)
            own = fold(key, split, i)
            label = (uniform(fold(own, "label"), component.shape) * len(names)).long()
            place = uniform(fold(own, "row"), component.shape, torch.float64)
            choice = supply[split]
            picked = [
                choice[int(j)][int(c)][int(p * len(choice[int(j)][int(c)]))]
                for j, c, p in zip(component, label, place, strict=True)
            ]
            parts["rows"].append(torch.tensor(picked, dtype=torch.int64))
            parts["component"].append(component)
            blocks.append(len(component))
    rows, component = torch.cat(parts["rows"]), torch.cat(parts["component"])
    x, y = pool.x[rows], pool.y[rows].long()
    if letters:
        y = torch.where(component == 0, y - 10, y - 36)
    else:
        for j in range(1, n_components):
            x[component == j] = torch.rot90(x[component == j], j, (-2, -1))
    ends = sum(blocks[:n_clients])
    got = torch.stack(
        [torch.bincount(part, minlength=n_components) for part in parts["component"][:n_clients]]
    )
    return FederatedData(
        x,
        y.to(torch.uint8),
        {
            "train": Rows.blocks(blocks[:n_clients]),
            "test": Rows.blocks(blocks[n_clients:], start=ends),
        },
        names=tuple(f"client-{i}" for i in range(n_clients)),
        task="classification",
        n_outputs=len(names),
        transform=unit_scale,
        truth=got.argmax(1),
        extra={"shares": (got / got.sum(1, keepdim=True)).float(), "component": component},
        classes=names,
        notes=pool.notes,
    )


def _supply(
    pool: Pool, letters: bool, n_components: int, key: Tensor
) -> tuple[tuple[str, ...], dict[str, list[list[Tensor]]]]:
    """Labels, and for each split, component and label the rows to draw from."""
    rows = {split: pool.rows(split) for split in SPLITS}
    if not len(rows["train"]):  # a copy of one split only: a sixth of every class is for testing
        own = [_of_class(pool, "test", c, key) for c in range(len(pool.classes))]
        cut = [(len(part) + 5) // 6 for part in own]
        rows["test"] = torch.cat([part[:n] for part, n in zip(own, cut, strict=True)])
        rows["train"] = torch.cat([part[n:] for part, n in zip(own, cut, strict=True)])
    offsets = (10, 36) if letters else (0,) * n_components
    names = pool.classes[10:36] if letters else pool.classes
    supply = {
        split: [[own[pool.y[own] == offset + c] for c in range(len(names))] for offset in offsets]
        for split, own in rows.items()
    }
    return names, supply


# groups


def overlapping_sets(
    n_classes: int, n_sets: int, size: int, shared: int, key: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Sets of classes, any two of which share exactly so many.

    >>> sets = overlapping_sets(10, 5, 4, 2, seed_key(0))
    >>> {len(set(a) & set(b)) for a, b in itertools.combinations(sets, 2)}
    {2}
    """
    every = list(itertools.combinations(range(n_classes), size))
    for attempt in range(1000):  # one in a few succeeds; drawing on a dead end would never stop
        left = [every[i] for i in shuffled(fold(key, attempt), len(every)).tolist()]
        chosen: list[tuple[int, ...]] = []
        while left and len(chosen) < n_sets:
            chosen.append(left[0])
            left = [s for s in left[1:] if len(set(s) & set(chosen[-1])) == shared]
        if len(chosen) == n_sets:
            return tuple(chosen)
    raise ConfigError(
        f"overlapping_sets: no {n_sets} sets of {size} out of {n_classes} classes were found of "
        f"which any two share {shared}. Ask for fewer sets."
    )


def swapped(pairs: Sequence[tuple[int, int]], n_classes: int) -> Tensor:
    """What each class is called after pairs have been swapped.

    >>> swapped([(0, 2)], 4)
    tensor([2, 1, 0, 3])
    """
    order = torch.arange(n_classes)
    for a, b in pairs:
        order[a], order[b] = b, a
    return order


def _ten(source: str, data_dir: str | None, shuffle: bool = False, seed: int = 0) -> Pool:
    pool = sources.load(source, data_dir)
    if len(pool.classes) != 10:
        raise ConfigError(
            f"This partition needs a data set of ten classes. {source} has {len(pool.classes)}."
        )
    if not shuffle:
        return pool
    order = shuffled(fold(seed_key(seed), "class order"), 10)  # new number of each class
    names = tuple(pool.classes[i] for i in order.argsort().tolist())
    return pool._replace(y=order[pool.y.long()].to(pool.y.dtype), classes=names)


def _of_class(pool: Pool, split: str, c: int, key: Tensor) -> Tensor:
    """The rows of a class in random order."""
    rows = pool.rows(split)
    own = rows[pool.y[rows] == c]
    return own[shuffled(fold(key, split, c), len(own))]


def _owned(pool: Pool, sets: Sequence[Sequence[int]]) -> Groups:
    """All rows of a group's classes."""
    out: Groups = {}
    for split in SPLITS:
        rows = pool.rows(split)
        y = pool.y[rows].long()
        out[split] = [rows[torch.isin(y, torch.tensor(own))] for own in sets]
    return out


def _skewed(
    pool: Pool,
    sets: Sequence[Sequence[int]],
    least: dict[str, int],
    key: Tensor,
    alpha: float = 0.5,
) -> Groups:
    """Each class divided among its owners: a reserve evenly, the rest in Dirichlet shares.

    Shares are those of training rows for test rows, too. If a group gets too few rows, the reserve
    is raised by five points and shares are drawn again; at 100 % all owners have the same.
    """
    owners = [[g for g, own in enumerate(sets) if c in own] for c in range(len(pool.classes))]
    for attempt in range(19):
        reserve = min(0.1 + 0.05 * attempt, 1.0)
        groups: Groups = {split: [] for split in SPLITS}
        parts: dict[str, list[list[Tensor]]] = {s: [[] for _ in sets] for s in SPLITS}
        for c, own in enumerate(owners):
            if not own:
                continue
            drawn = dirichlet_shares(alpha, (len(own),), fold(key, "shares", attempt, c))
            shares = reserve / len(own) + (1 - reserve) * drawn
            for split in SPLITS:
                rows = _of_class(pool, split, c, key)
                cut = rows.split(whole(shares, len(rows)).tolist())
                for g, mine in zip(own, cut, strict=True):
                    parts[split][g].append(mine)
        groups = {split: [torch.cat(part) for part in parts[split]] for split in SPLITS}
        if all(len(rows) >= least[split] for split in SPLITS for rows in groups[split]):
            return groups
    raise DataError(
        f"Label skew: every group needs {least['train']} training and {least['test']} test rows. "
        "There are too few."
    )


def _dominated(pool: Pool, split: str, key: Tensor, share: float = 0.666) -> list[Tensor]:
    """A group per class: a share of its rows from that class, the rest evenly from the others."""
    n_classes = len(pool.classes)
    rows = [_of_class(pool, split, c, key) for c in range(n_classes)]
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
    """Counts or bytes as floats, unscaled."""
    return x.to(torch.get_default_dtype())


def as_tokens(x: Tensor, facts: Tree) -> Tensor:
    """Numbers of words as embeddings want them."""
    return x.long()


as_float.batched = as_tokens.batched = True  # type: ignore[attr-defined]
Transform = Callable[[Tensor, Tree], Tensor]


def _scaled(raw: bool) -> Transform:
    return as_float if raw else unit_scale


def _federation(
    pool: Pool,
    groups: Groups,
    clients_per_group: int,
    n: int | None,
    key: Tensor,
    transform: Transform = unit_scale,
) -> FederatedData:
    """The pools of the groups dealt to their clients."""
    if clients_per_group < 1 or (n is not None and n < 1):
        raise ConfigError("Partition: clients_per_group and n must be at least 1.")
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
        {split: Rows.of(parts) for split, parts in lists.items()},
        names=tuple(f"client-{i}" for i in range(k * clients_per_group)),
        task="classification",
        n_outputs=len(pool.classes),
        transform=transform,
        truth=torch.arange(k).repeat_interleave(clients_per_group),
        classes=pool.classes,
        notes=pool.notes,
    )


def _with(data: FederatedData, facts: dict[str, Tensor], transform: Turn) -> FederatedData:
    return replace(data, client_facts=facts, transform=transform)


def _only_used(data: FederatedData) -> FederatedData:
    """The same clients on a pool of the rows they have, one for each use."""
    lists = [data.rows[split].index for split in SPLITS]
    used = torch.cat(lists)
    rows = {
        split: Rows.blocks(data.rows[split].sizes, start=start)
        for split, start in zip(SPLITS, (0, len(lists[0])), strict=True)
    }
    return replace(data, x=data.x[used], y=data.y[used], rows=rows)
