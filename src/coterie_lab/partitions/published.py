"""The partitions of the published studies, made from public data sets.

Each group first gets a pool of rows, separately for training and testing. The pool is shuffled and
split into equal parts, one per client, of which at most `n` rows are kept (test rows, too). No row
is used twice within a group. `partition_seed` decides the rows of a group, and `seed` the rows of
its clients. The studies draw the first once and repeat the second.

References: Bhatia et al.: CLoVE, 2025, arXiv:2506.22427 (the names `published_...`), and the
released code of its authors, which is followed where the text is silent; Ghosh et al., NeurIPS
2020, arXiv:2006.04088 (`rotated_clients`).
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import fold, seed_key, shuffled
from coterie.data.arrays import unit_scale
from coterie.data.cutting import turns
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.partitions import Turn
from coterie.data.synthetic import problem
from coterie_lab import sources
from coterie_lab.partitions.pools import (
    SPLITS,
    Groups,
    add_facts,
    as_float,
    as_tokens,
    assign_rows,
    divide_classes,
    keep_used,
    mix_dominant,
    of_class,
    overlapping_sets,
    pick_transform,
    swap_labels,
    take_classes,
    ten_classes,
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

    Kind 1: five groups with two classes each. Kind 2: five groups with four classes each; any two
    groups share exactly two. Kind 3: five groups; each lacks one class or none. Kind 4: ten groups,
    each with two thirds of its rows from one class.

    Parameters
    ----------
    source
        Name of a data set with ten classes.
    kind
        Kind of label skew, 1 to 4.
    clients_per_group
        Number of clients in each group.
    n
        Largest number of rows of a client.
    seed
        Seed for the rows of the clients.
    partition_seed
        Seed for the rows of the groups.
    test_shares
        How the test rows of a class are divided among the groups that share it (kinds 2 and 3):
        in the "same" shares as the training rows, or in shares of their "own", as in the code of
        CLoVE's authors. With "own", the test rows of a client have different class frequencies
        than its training rows.
    shuffle_classes
        Number the classes in a random order first, as CLoVE's code does for CIFAR-10.
    raw
        Use floats from 0 to 255 as inputs instead of floats in [0, 1].
    data_dir
        Folder of the data sets; None for the usual folders.
    """
    pool = ten_classes(source, data_dir, shuffle_classes, partition_seed)
    key = fold(seed_key(partition_seed), "label skew", kind)
    if kind == 1:
        groups = take_classes(pool, [(2 * g, 2 * g + 1) for g in range(5)])
    elif kind == 2:
        sets = overlapping_sets(10, 5, 4, 2, fold(key, "sets"))
        least = {"train": 5100, "test": 510}
        groups = divide_classes(pool, sets, least, fold(key, "rows"), test_shares)
    elif kind == 3:
        least = {"train": 6000, "test": 750}
        groups = divide_classes(pool, LABEL_SKEW_3, least, fold(key, "rows"), test_shares)
    elif kind == 4:
        groups = {split: mix_dominant(pool, split, fold(key, "rows", split)) for split in SPLITS}
    else:
        raise ConfigError(f"published_label_skew: kind must be 1, 2, 3 or 4, got {kind}.")
    key = fold(seed_key(seed), "clients")
    return assign_rows(pool, groups, clients_per_group, n, key, pick_transform(raw))


@problem
def published_feature_skew(
    source: str = "mnist",
    clients_per_group: int = 10,
    n: int = 500,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """CLoVE's feature skew: four groups have the images rotated by 0, 90, 180 and 270 degrees.

    The same image may occur in several groups, but never twice in a group. The options are those
    of `published_label_skew`.
    """
    pool = sources.load(source, data_dir)
    groups = {split: [pool.rows(split)] * 4 for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = assign_rows(pool, groups, clients_per_group, n, key)
    assert data.truth is not None
    return add_facts(
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
    """CLoVE's concept shift: four groups with different images and two pairs of swapped labels.

    A group has 1,250 training and 200 test images of every class. No single model can be right
    about more than 60 % of the labels. The options are those of `published_label_skew`.
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
                    f"published_concept_shift: four groups need {4 * per_class} {split} rows of "
                    f"each class. {source} has {len(own)} of class {c}. Use another data set."
                )
            for part, rows in zip(parts, own.split(per_class)[:4], strict=True):
                part.append(rows)
        groups[split] = [torch.cat(part) for part in parts]
        for rows, swaps in zip(groups[split], CONCEPT_SWAPS, strict=True):
            y[rows] = swap_labels(swaps, 10)[y[rows].long()].to(y.dtype)
    pool = pool._replace(y=y)
    key = fold(seed_key(seed), "clients")
    return assign_rows(pool, groups, clients_per_group, n, key, pick_transform(raw))


@problem
def rotated_clients(
    source: str = "mnist",
    n_clients: int = 1200,
    n_groups: int = 4,
    keep: int | None = None,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """IFCA's rotated images: each rotation has all images, divided among its clients.

    Every client also has an equal part of the test images of its rotation, so the mean accuracy
    over clients is the accuracy over all test images.

    Parameters
    ----------
    source
        Name of the data set.
    n_clients
        Number of clients.
    n_groups
        Number of rotations, 2 or 4.
    keep
        Number of clients per rotation to keep, for a quick check; None for all.
    seed
        Seed for the rows of the clients.
    data_dir
        Folder of the data sets; None for the usual folders.
    """
    pool = sources.load(source, data_dir)
    if n_groups not in (2, 4) or n_clients % n_groups:
        raise ConfigError(
            f"rotated_clients: n_groups must be 2 or 4 and divide n_clients. Got {n_groups} groups "
            f"and {n_clients} clients."
        )
    groups = {split: [pool.rows(split)] * n_groups for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = assign_rows(pool, groups, n_clients // n_groups, None, key)
    assert data.truth is not None
    table = turns("rotated_clients", pool.x.shape, n_groups)
    data = add_facts(data, {"turn": data.truth.clone()}, Turn(table))
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
    """What CLoVE's code calls feature skew for CIFAR-10: the images are not rotated.

    Each of four groups has the whole data set and numbers the classes in a different order (unless
    `shuffle_classes` is off). The other options are those of `published_label_skew`.
    """
    pool = ten_classes(source, data_dir)
    groups = {split: [pool.rows(split)] * 4 for split in SPLITS}
    key = fold(seed_key(seed), "clients")
    data = keep_used(assign_rows(pool, groups, clients_per_group, n, key, pick_transform(raw)))
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
    """CLoVE's unsupervised studies: one group per class; the task is to reconstruct the images.

    The options are those of `published_label_skew`.
    """
    pool = ten_classes(source, data_dir)
    groups = take_classes(pool, [(c,) for c in range(10)])
    data = assign_rows(pool, groups, clients_per_group, n, fold(seed_key(seed), "clients"))
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
    """CLoVE's Amazon study: one group per product category; a tenth of the reviews is for testing.

    The options not listed are those of `published_label_skew`.

    Parameters
    ----------
    whole
        Use all reviews instead of the numbers stated in the paper.
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
    return keep_used(assign_rows(pool, groups, clients_per_group, n, clients, as_float))


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

    The options are those of `published_label_skew`.
    """
    pool = sources.load(source, data_dir)
    pairs = list(itertools.combinations(range(len(pool.classes)), 2))
    key = fold(seed_key(partition_seed), "news")
    groups = divide_classes(pool, pairs, {"train": 300, "test": 300}, key, test_shares)
    clients = fold(seed_key(seed), "clients")
    return keep_used(assign_rows(pool, groups, clients_per_group, n, clients, as_tokens))


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
    """FEMNIST: one client per writer, with all its characters; a tenth of them is for testing.

    Parameters
    ----------
    n_clients
        Number of writers to draw; None for all that remain.
    share
        Share of the writers to draw first.
    most_data
        Draw from the tenth of the writers with the most data (at least `n_clients` writers), as
        CLoVE does.
    least
        Smallest number of characters of a writer; IFCA's study asks for 100.
    seed
        Seed of the draws.
    source
        Name of the data set.
    data_dir
        Folder of the data sets; None for the usual folders.
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
            f"published_writers: n_clients must be at most {len(drawn)}, the number of writers "
            f"with at least {least} characters. Got {wanted}."
        )
    if most_data:
        order = count[drawn].argsort(descending=True, stable=True)
        drawn = drawn[order[: max(wanted, len(drawn) // 10)]]
    drawn = drawn[shuffled(fold(key, "clients"), len(drawn))[:wanted]].sort().values
    start = torch.cat([torch.zeros(1).long(), count.cumsum(0)])
    lists = [torch.arange(int(start[w]), int(start[w + 1])) for w in drawn.tolist()]
    names = tuple(pool.owners[w] for w in drawn.tolist())
    train, test = RowIndex.of(lists).divide(names, 0.1, fold(key, "test"))
    data = FederatedData(
        pool.x,
        pool.y,
        {"train": train, "test": test},
        names=names,
        task="classification",
        n_outputs=len(pool.classes),
        transform=unit_scale,
        classes=pool.classes,
        notes=(*pool.notes, "The true groups are not known."),
    )
    return keep_used(data)
