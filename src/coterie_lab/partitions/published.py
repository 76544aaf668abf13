"""The partitions of the published studies, cut from public data sets.

First a pool of rows for each group, train and test apart; then each group's pool, in random order,
is cut into equal chunks, one per client, of which at most `n` rows are kept (for tests, too).
Within a group no row is used twice. `partition_seed` decides which rows a group owns, `seed` how
they are dealt to clients: the studies draw the first once and repeat the second.

References: Bhatia et al.: CLoVE, 2025, arXiv:2506.22427 (what is named `published_...`), and the
code its authors released, which decides where the text is silent; Ghosh et al., NeurIPS 2020,
arXiv:2006.04088 (`rotated_clients`).
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import fold, seed_key, shuffled
from coterie.data.arrays import unit_scale
from coterie.data.cutting import turns
from coterie.data.federated import FederatedData, Rows
from coterie.data.partitions import Turn
from coterie.data.synthetic import problem
from coterie_lab import sources
from coterie_lab.partitions.pools import (
    SPLITS,
    Groups,
    as_float,
    as_tokens,
    dealt,
    dominated,
    of_class,
    only_used,
    overlapping_sets,
    owned,
    scaled,
    skewed,
    swapped,
    ten_classes,
    with_facts,
)

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
    test_shares: str = "same",
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
    test_shares
        Of a class that several groups have (2, 3), test rows are divided in the "same" shares as
        training rows, or in shares of their "own", as in the code of CLoVE's authors: a client's
        test rows then follow other class frequencies than its training rows.
    shuffle_classes
        Number the classes in a random order first, as CLoVE's code does for CIFAR-10.
    raw
        Hand bytes over as they are, 0 to 255, instead of scaled to [0, 1].
    """
    pool = ten_classes(source, data_dir, shuffle_classes, partition_seed)
    key = fold(seed_key(partition_seed), "label skew", kind)
    if kind == 1:
        groups = owned(pool, [(2 * g, 2 * g + 1) for g in range(5)])
    elif kind == 2:
        sets = overlapping_sets(10, 5, 4, 2, fold(key, "sets"))
        least = {"train": 5100, "test": 510}
        groups = skewed(pool, sets, least, fold(key, "rows"), test_shares)
    elif kind == 3:
        least = {"train": 6000, "test": 750}
        groups = skewed(pool, LABEL_SKEW_3, least, fold(key, "rows"), test_shares)
    elif kind == 4:
        groups = {split: dominated(pool, split, fold(key, "rows", split)) for split in SPLITS}
    else:
        raise ConfigError(f"published_label_skew: kind must be 1, 2, 3 or 4, got {kind}.")
    key = fold(seed_key(seed), "clients")
    return dealt(pool, groups, clients_per_group, n, key, scaled(raw))


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
    data = dealt(pool, groups, clients_per_group, n, key)
    assert data.truth is not None
    return with_facts(
        data, {"turn": data.truth.clone()}, Turn(turns("feature_skew", pool.x.shape, 4))
    )


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
    pool = ten_classes(source, data_dir, shuffle_classes, partition_seed)
    key = fold(seed_key(partition_seed), "concept shift")
    groups: Groups = {}
    y = pool.y.clone()
    for split, per_class in (("train", 1250), ("test", 200)):
        parts: list[list[Tensor]] = [[] for _ in CONCEPT_SWAPS]
        for c in range(10):
            own = of_class(pool, split, c, key)
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
    return dealt(pool, groups, clients_per_group, n, key, scaled(raw))


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
    data = dealt(pool, groups, n_clients // n_groups, None, key)
    assert data.truth is not None
    table = turns("rotated_clients", pool.x.shape, n_groups)
    data = with_facts(data, {"turn": data.truth.clone()}, Turn(table))
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
    pool = ten_classes(source, data_dir)
    groups = {split: [pool.rows(split)] * 4 for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = only_used(dealt(pool, groups, clients_per_group, n, key, scaled(raw)))
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
    pool = ten_classes(source, data_dir)
    groups = owned(pool, [(c,) for c in range(10)])
    data = dealt(pool, groups, clients_per_group, n, fold(seed_key(seed), "clients"))
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
    return only_used(dealt(pool, groups, clients_per_group, n, clients, as_float))


@problem
def published_news(
    clients_per_group: int = 5,
    n: int = 100,
    seed: int = 0,
    partition_seed: int = 0,
    test_shares: str = "same",
    source: str = "ag_news",
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's AG News study: six groups, one for each pair of the four classes.

    Test rows of a class are divided in the "same" shares as training rows, or in their "own".
    """
    pool = sources.load(source, data_dir)
    pairs = list(itertools.combinations(range(len(pool.classes)), 2))
    key = fold(seed_key(partition_seed), "news")
    groups = skewed(pool, pairs, {"train": 300, "test": 300}, key, test_shares)
    clients = fold(seed_key(seed), "clients")
    return only_used(dealt(pool, groups, clients_per_group, n, clients, as_tokens))


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
    return only_used(data)
