"""Pools cut among clients by a recipe, for experiments: the truth about each client is kept.

`x` has a row per sample, `y` its label (any integers or text). Unless a recipe says otherwise no
row is used twice. Every recipe ends after a fixed number of operations, with a federation or an
error.

References
----------
Rotation: Ghosh et al., NeurIPS 2020, arXiv:2006.04088. Label swaps: Sattler, Müller, Samek, IEEE
TNNLS 2021, arXiv:1910.01991. Dirichlet: Hsu, Qi, Brown, 2019, arXiv:1909.06335, with a share of
each class drawn over clients as in Li, Diao, Chen, He, ICDE 2022, arXiv:2102.02079. Mixtures: Ruan,
Joe-Wong, AAAI 2022, arXiv:2112.06053.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError, unknown
from coterie.core.random import fold, seed_key, shuffled
from coterie.core.tree import Tree, take
from coterie.data.arrays import from_arrays, unit_scale
from coterie.data.cutting import (
    cut,
    dealt,
    dirichlet_shares,
    label_swaps,
    proportions,
    topped_up,
    turns,
    whole,
)
from coterie.data.federated import FederatedData, RowIndex


@dataclass(frozen=True, eq=False)
class Turn:
    """Images as a client sees them, turned by a multiple of 90 degrees; bytes scaled to [0, 1]."""

    table: Tensor  # [turns, h * w]  where each pixel comes from

    def __call__(self, x: Tensor, facts: Tree) -> Tensor:
        seen = x.flatten(-2).index_select(-1, take(self.table, facts["turn"])).reshape(x.shape)
        return unit_scale(seen, facts) if seen.dtype == torch.uint8 else seen


def rotation(
    x: Any,
    y: Any,
    n_clients: int = 40,
    n_groups: int = 4,
    *,
    reuse: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Square images [n, h, w] or [n, c, h, w]; each group sees them turned by another angle.

    The pool is stored once. Four groups turn by 0, 90, 180 and 270 degrees, two by 0 and 180.

    Parameters
    ----------
    reuse
        Whether every group has all the images, as in IFCA's study, or no image is used twice.

    >>> x, y = torch.arange(16).reshape(4, 1, 2, 2) / 16, [0, 1, 0, 1]
    >>> data = rotation(x, y, n_clients=2, n_groups=2, test_fraction=0.0)
    >>> data.truth, data.sizes("train")
    (tensor([0, 1]), tensor([2, 2]))
    """
    pool = _pool("rotation", x, y, n_clients, n_groups)
    table = turns("rotation", pool.x.shape, n_groups)
    key = fold(seed_key(seed), "rotation")
    truth = _groups(n_clients, n_groups)
    order = shuffled(fold(key, "order"), len(pool.y))
    if reuse:
        members = torch.bincount(truth).tolist()
        lists = [
            part
            for group, m in enumerate(members)
            for part in order[shuffled(fold(key, "order", group), len(order))].tensor_split(m)
        ]
    else:
        lists = list(order.tensor_split(n_clients))
    return _federation(
        pool,
        lists,
        fold(key, "test"),
        test_fraction,
        truth=truth,
        client_facts={"turn": truth.clone()},
        transform=Turn(table),
        notes=("Every group has all images.",) if reuse else (),
    )


def label_skew(
    x: Any,
    y: Any,
    n_clients: int = 40,
    classes_per_client: int = 2,
    n_groups: int | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Each group has some of the classes only, and its clients have all of these.

    Parameters
    ----------
    n_groups
        If None, as many as there are disjoint sets of `classes_per_client` classes. With more, sets
        overlap, and the samples of a class are divided among the groups that have it. Samples of
        classes that no group has are not used.

    >>> data = label_skew(torch.zeros(8, 1), [0, 1, 2, 3] * 2, n_clients=2, test_fraction=0.0)
    >>> data.extra["classes"].sum(1)  # [k, c]  which group has which class
    tensor([2, 2])
    """
    pool = _labelled("label_skew", x, y, n_clients, n_groups or 1)
    c = pool.n_outputs
    if not 1 <= classes_per_client <= c:
        raise ConfigError(
            f"label_skew: classes_per_client must lie in 1..{c}, got {classes_per_client}."
        )
    n_groups = n_groups or min(c // classes_per_client, n_clients)
    if n_groups > c or (classes_per_client == c and n_groups > 1):
        raise ConfigError(
            f"label_skew: groups must differ in their classes. {n_groups} sets of "
            f"{classes_per_client} out of {c} classes do not. Use fewer of either."
        )
    key = fold(seed_key(seed), "label_skew")
    order = shuffled(fold(key, "classes"), c)
    has = torch.zeros(n_groups, c, dtype=torch.int64)
    for group in range(n_groups):  # windows on a circle: disjoint if there is room, else distinct
        has[group, order[(group * c // n_groups + torch.arange(classes_per_client)) % c]] = 1
    truth = _groups(n_clients, n_groups)
    parts = cut(pool.y, has.double() / has.sum(0).clamp(min=1), fold(key, "rows"))
    return _federation(
        pool,
        dealt(parts, truth, fold(key, "deal")),
        fold(key, "test"),
        test_fraction,
        truth=truth,
        extra={"classes": has},
    )


def concept_shift(
    x: Any,
    y: Any,
    n_clients: int = 40,
    n_groups: int = 4,
    *,
    swaps: int = 1,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """The same inputs for all; each group but the first has pairs of labels swapped.

    Parameters
    ----------
    swaps
        Pairs of labels that a group swaps. No two groups have the same labels.

    >>> data = concept_shift(torch.zeros(8, 1), [0, 1, 2, 3] * 2, n_clients=2, n_groups=2)
    >>> data.extra["mapping"].shape, (data.extra["mapping"][1] != torch.arange(4)).sum()
    (torch.Size([2, 4]), tensor(2))
    """
    pool = _labelled("concept_shift", x, y, n_clients, n_groups)
    key = fold(seed_key(seed), "concept_shift")
    mapping = label_swaps("concept_shift", pool.n_outputs, n_groups, swaps, fold(key, "swaps"))
    truth = _groups(n_clients, n_groups)
    lists = list(shuffled(fold(key, "order"), len(pool.y)).tensor_split(n_clients))
    named = pool.y.clone()
    for group, rows in zip(truth, lists, strict=True):
        named[rows] = mapping[group, pool.y[rows].long()]
    return _federation(
        replace(pool, y=named),
        lists,
        fold(key, "test"),
        test_fraction,
        truth=truth,
        extra={"mapping": mapping},
    )


def dirichlet(
    x: Any,
    y: Any,
    n_clients: int = 40,
    alpha: float = 0.5,
    n_groups: int | None = None,
    *,
    least: int = 2,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Every class is divided among the clients in shares drawn from a Dirichlet distribution.

    Clients left with fewer than `least` rows are given rows of the largest ones, which is noted.

    Parameters
    ----------
    alpha
        Concentration: small values give each client few classes and unequal sizes.
    n_groups
        Draw shares for groups instead, and deal the rows of a group to its clients evenly. Without
        groups there is no `truth`.

    >>> data = dirichlet(torch.zeros(90, 1), [0, 1, 2] * 30, n_clients=9, alpha=0.1)
    >>> data.extra["shares"].shape, int(data.sizes("train").sum() + data.sizes("test").sum())
    (torch.Size([9, 3]), 90)
    """
    pool = _labelled("dirichlet", x, y, n_clients, n_groups or 1)
    _check_cut("dirichlet", len(pool.y), n_clients, alpha, least)
    key = fold(seed_key(seed), "dirichlet")
    owners = n_clients if n_groups is None else n_groups
    shares = dirichlet_shares(alpha, (pool.n_outputs, owners), fold(key, "shares")).T  # [owners, c]
    parts = cut(pool.y, shares, fold(key, "rows"))
    truth = None if n_groups is None else _groups(n_clients, n_groups)
    if truth is not None:
        needed = torch.bincount(truth, minlength=owners) * least
        parts, moved = topped_up(parts, needed, fold(key, "moves"))
        parts = dealt(parts, truth, fold(key, "deal"))
    else:
        parts, moved = topped_up(parts, torch.full((owners,), least), fold(key, "moves"))
    mixes = [torch.bincount(pool.y[rows].long(), minlength=pool.n_outputs) for rows in parts]
    return _federation(
        pool,
        parts,
        fold(key, "test"),
        test_fraction,
        truth=truth,
        extra={"shares": proportions(torch.stack(mixes))},
        notes=(f"{moved} rows were moved so that every client has {least}.",) if moved else (),
    )


def quantity_skew(
    x: Any,
    y: Any,
    n_clients: int = 40,
    alpha: float = 0.5,
    *,
    least: int = 2,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Clients of one distribution and unequal size, in shares drawn from a Dirichlet distribution.

    The truth is one group. Every client has `least` rows before the rest is divided.

    >>> data = quantity_skew(torch.zeros(90, 1), [0, 1, 2] * 30, n_clients=9)
    >>> data.truth.unique(), int(data.sizes("train").sum() + data.sizes("test").sum())
    (tensor([0]), 90)
    """
    pool = _pool("quantity_skew", x, y, n_clients, 1)
    _check_cut("quantity_skew", len(pool.y), n_clients, alpha, least)
    key = fold(seed_key(seed), "quantity_skew")
    share = dirichlet_shares(alpha, (n_clients,), fold(key, "shares"))
    sizes = least + whole(share, len(pool.y) - least * n_clients)
    order = shuffled(fold(key, "order"), len(pool.y))
    return _federation(
        pool,
        list(order.split(sizes.tolist())),
        fold(key, "test"),
        test_fraction,
        truth=torch.zeros(n_clients, dtype=torch.int64),
    )


def mixtures(
    x: Any,
    y: Any,
    n_clients: int = 40,
    n_components: int = 2,
    *,
    by: str = "swaps",
    alpha: float = 1.0,
    shares: Any = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Each client's rows come from several distributions, in shares of its own.

    `extra["shares"]` [clients, components] has the shares that came out, `extra["component"]` the
    component of each row of the pool (-1: not used). `truth` is the largest component of a client.

    Parameters
    ----------
    by
        How components differ: "swaps" (a pair of labels swapped), "rotation" (square images turned)
        or "labels" (each has classes of its own).
    alpha, shares
        Shares are drawn from a Dirichlet distribution of this concentration, unless they are given,
        a row per client.

    >>> data = mixtures(torch.zeros(40, 1), [0, 1] * 20, n_clients=2, shares=[[0.5, 0.5], [1, 0]])
    >>> data.extra["shares"]
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000]])
    """
    pool = _labelled("mixtures", x, y, n_clients, 1)
    if by not in ("swaps", "rotation", "labels"):
        raise ConfigError(unknown("kind of mixtures", by, ("swaps", "rotation", "labels")))
    if n_components < 1:
        raise ConfigError(f"mixtures: n_components must be at least 1, got {n_components}.")
    key = fold(seed_key(seed), "mixtures")
    wanted = _shares(shares, alpha, n_clients, n_components, fold(key, "shares"))  # [m, k]
    order = shuffled(fold(key, "order"), len(pool.y))
    if by == "labels":
        if n_components > pool.n_outputs:
            raise ConfigError(
                f"mixtures: n_components must be at most the number of classes, "
                f"{pool.n_outputs}, got {n_components}."
            )
        component_of = shuffled(fold(key, "classes"), pool.n_outputs) % n_components  # [c]
        kind = component_of[pool.y.long()[order]]
        supply = [order[kind == j] for j in range(n_components)]
        # Rounding may ask for one row more per client than its share.
        room = torch.tensor([len(rows) for rows in supply]) - (wanted > 0).sum(0)
        size = min(len(order) // n_clients, int((room / wanted.sum(0).clamp(min=1e-12)).min()))
        if size < 2:
            raise DataError(
                "mixtures: there must be rows enough of every component for the shares asked for. "
                "There are not. Use fewer clients, fewer components or a larger alpha."
            )
    else:
        size = len(order) // n_clients
    counts = torch.stack([whole(share, size) for share in wanted])  # [m, k]
    component = torch.full((len(order),), -1)
    if by != "labels":  # rows are alike until a component is laid on them
        ends = counts.sum(0).cumsum(0)
        supply = list(order[: int(ends[-1])].tensor_split(ends[:-1]))
    for j, rows in enumerate(supply):
        component[rows[: int(counts[:, j].sum())]] = j
    cuts = [
        rows[: int(own.sum())].split(own.tolist())
        for rows, own in zip(supply, counts.T, strict=True)
    ]
    lists = [torch.cat([own[i] for own in cuts]) for i in range(n_clients)]
    extra = {"shares": proportions(counts), "component": component}
    if by == "swaps":
        mapping = label_swaps("mixtures", pool.n_outputs, n_components, 1, fold(key, "swaps"))
        extra["mapping"] = mapping
        named = mapping[component.clamp(min=0), pool.y.long()].to(pool.y.dtype)
        pool = replace(pool, y=named)
    elif by == "rotation":
        table = turns("mixtures", pool.x.shape, n_components)
        index = table[component.clamp(min=0)]  # [n, h * w]
        flat = pool.x.flatten(-2)
        index = index.reshape(len(flat), *[1] * (flat.ndim - 2), -1).expand(flat.shape)
        pool = replace(pool, x=flat.gather(-1, index).reshape(pool.x.shape))
    return _federation(
        pool, lists, fold(key, "test"), test_fraction, truth=counts.argmax(1), extra=extra
    )


def _pool(owner: str, x: Any, y: Any, n_clients: int, n_groups: int) -> FederatedData:
    """The pool as the data of one client, which checks it and gives labels their codes."""
    if n_groups < 1:
        raise ConfigError(f"{owner}: n_groups must be at least 1, got {n_groups}.")
    if n_clients < n_groups:
        raise ConfigError(
            f"{owner}: n_clients must be at least the number of groups, {n_groups}, got "
            f"{n_clients}."
        )
    pool = from_arrays([x], [y], names=["pool"], test_fraction=0.0)
    if len(pool.y) < n_clients:
        raise DataError(
            f"{owner}: every client must have a row. There are {len(pool.y)} rows for {n_clients} "
            f"clients. Use fewer clients."
        )
    return pool


def _labelled(owner: str, x: Any, y: Any, n_clients: int, n_groups: int) -> FederatedData:
    pool = _pool(owner, x, y, n_clients, n_groups)
    if pool.task != "classification":
        raise DataError(f"{owner}: y must hold labels, integers or text. Got fractions.")
    return pool


def _federation(
    pool: FederatedData, lists: list[Tensor], key: Tensor, test_fraction: float, **truth: Any
) -> FederatedData:
    for i, rows in enumerate(lists):
        if not len(rows):
            raise DataError(
                f"Partition: every client must have a row. Client {i} has none. Use fewer clients."
            )
    names = tuple(f"client-{i}" for i in range(len(lists)))
    train, test = RowIndex.of([rows.sort().values for rows in lists]).divide(
        names, test_fraction, key
    )
    return replace(pool, rows={"train": train, "test": test}, names=names, **truth)


def _groups(n_clients: int, n_groups: int) -> Tensor:
    return torch.arange(n_clients) * n_groups // n_clients


def _check_cut(owner: str, n: int, n_clients: int, alpha: float, least: int) -> None:
    if not alpha > 0 or not math.isfinite(alpha):
        raise ConfigError(f"{owner}: alpha must be positive and finite, got {alpha}.")
    if least < 1:
        raise ConfigError(f"{owner}: least must be at least 1, got {least}.")
    if n < least * n_clients:
        raise DataError(
            f"{owner}: every client must have {least} rows. There are {n} rows for {n_clients} "
            f"clients. Use fewer clients or a smaller least."
        )


def _shares(given: Any, alpha: float, m: int, k: int, key: Tensor) -> Tensor:
    """Shares of each client [m, k], drawn unless given."""
    if given is None:
        if not alpha > 0:
            raise ConfigError(f"mixtures: alpha must be positive, got {alpha}.")
        return dirichlet_shares(alpha, (m, k), key)
    shares = torch.as_tensor(given, dtype=torch.float64)
    if shares.shape != (m, k) or (shares < 0).any() or not (shares.sum(1) > 0).all():
        raise ConfigError(
            f"mixtures: shares must be {m} rows of {k} numbers, none negative and not all zero. "
            f"Got shape {list(shares.shape)}."
        )
    return shares / shares.sum(1, keepdim=True)
