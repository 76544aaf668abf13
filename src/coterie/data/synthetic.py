"""Problems whose groups are known, made from a seed.

References
----------
Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS
2020, arXiv:2006.04088 (`linear_coordinates`, and rotation as the difference between groups).
CLoVE: `linear_groups` is its mixed linear regression.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, unknown
from coterie.core.random import fold, normal, seed_key, shuffled, uniform
from coterie.core.tree import Tree, take
from coterie.data.federated import FederatedData, RowIndex

PROBLEMS: dict[str, Callable[..., FederatedData]] = {}
"""The problems by name."""

P = ParamSpec("P")


def problem(function: Callable[P, FederatedData]) -> Callable[P, FederatedData]:
    """Register a function that makes data; what it makes remembers name and options."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> FederatedData:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        data = function(*args, **kwargs)
        return replace(data, name=function.__name__, options=dict(given.arguments))

    PROBLEMS[function.__name__] = made
    return made


@problem
def linear_groups(
    n_groups: int = 5,
    clients_per_group: int = 5,
    n: int = 900,
    test: int = 100,
    d: int = 20,
    separation: float = 1.0,
    noise: float = 1e-4,
    seed: int = 0,
    targets: str = "chain",
    dtype: str = "float32",
) -> FederatedData:
    """Linear regression where each group has its own unit vector of coefficients.

    x ~ N(0, I), y = <target, x> + N(0, noise**2). Defaults are those of CLoVE's study, Fig. 3.

    Parameters
    ----------
    n, test
        Training and test samples of a client.
    separation
        Least distance of two targets (Δ in the paper); the largest is five times that.
    noise
        Standard deviation σ of y.
    targets
        "chain": a target is an earlier one plus a random vector of length `separation`, brought
        back to length one. "orthonormal": targets at right angles, sqrt(2) apart whatever
        `separation` says.
    dtype
        "float32" or "float64".

    >>> data = linear_groups(n_groups=2, clients_per_group=1, n=8, test=2, d=3)
    >>> data.truth, data.extra["targets"].shape
    (tensor([0, 1]), torch.Size([2, 3]))
    """
    _at_least("linear_groups", 1, n_groups=n_groups, clients_per_group=clients_per_group, n=n, d=d)
    _at_least("linear_groups", 0, test=test, noise=noise)
    key = fold(seed_key(seed), "linear_groups")
    rules = {"chain": _chain, "orthonormal": _orthonormal}
    if targets not in rules:
        raise ConfigError(unknown("targets of linear_groups", targets, rules))
    theta = rules[targets](fold(key, "targets"), n_groups, d, separation)
    truth = torch.arange(n_groups).repeat_interleave(clients_per_group)
    return _regression(key, theta, truth, n, test, noise, dtype)


@problem
def linear_coordinates(
    n_clients: int = 20,
    n: int = 100,
    d: int = 200,
    n_groups: int = 2,
    scale: float = 1.0,
    noise: float = 0.1,
    seed: int = 0,
    rule: str = "code",
    test: int = 20,
    dtype: str = "float32",
) -> FederatedData:
    """Linear regression with coefficients drawn as coin flips, in groups of equal size.

    x ~ N(0, I), y = <target, x> + N(0, noise**2). Defaults are IFCA's study, Fig. 3, at a fifth of
    its size.

    Parameters
    ----------
    n, test
        Training and test samples of a client.
    scale
        R in the paper.
    noise
        Standard deviation σ of y.
    rule
        "code": coordinates are 0 or `scale`, as the authors' code has it. "paper": coin flips
        brought to Euclidean length `scale`.

    >>> data = linear_coordinates(n_clients=4, n=5, d=6, scale=0.5)
    >>> sorted(set(data.extra["targets"].flatten().tolist()))
    [0.0, 0.5]
    """
    _at_least("linear_coordinates", 1, n_clients=n_clients, n=n, d=d, n_groups=n_groups)
    _at_least("linear_coordinates", 0, test=test, noise=noise)
    if n_clients % n_groups:
        raise ConfigError(
            f"linear_coordinates: n_clients must be a multiple of n_groups, got {n_clients} and "
            f"{n_groups}."
        )
    if rule not in ("code", "paper"):
        raise ConfigError(unknown("rule of linear_coordinates", rule, ("code", "paper")))
    key = fold(seed_key(seed), "linear_coordinates")
    flips = (uniform(fold(key, "targets"), (n_groups, d), torch.float64) < 0.5).double()
    if len(flips.unique(dim=0)) < n_groups or not flips.any(1).all():
        raise ConfigError(
            f"linear_coordinates: targets must differ and none may be zero. With d={d} and "
            f"seed={seed} they do not. Use a larger d or another seed."
        )
    theta = scale * (flips if rule == "code" else flips / flips.norm(dim=1, keepdim=True))
    truth = torch.arange(n_groups).repeat_interleave(n_clients // n_groups)
    return _regression(key, theta, truth, n, test, noise, dtype)


@problem
def blobs(
    n_groups: int = 3,
    clients_per_group: int = 6,
    n: int = 60,
    d: int = 2,
    n_classes: int = 3,
    separation: float = 4.0,
    seed: int = 0,
    unequal: bool = False,
    test: int = 20,
) -> FederatedData:
    """Round classes at the same points for all clients; each group has its own labels for them.

    Inputs look alike everywhere, so one model for all cannot do well and a group needs its own.

    Parameters
    ----------
    n, test
        Training and test samples of a client.
    separation
        Distance of neighbouring clouds, whose standard deviation is one.
    unequal
        Client sizes between n / 4 and n.

    >>> data = blobs()
    >>> data.extra["mapping"]  # cloud of class c in group g
    tensor([[0, 1, 2],
            [1, 2, 0],
            [2, 0, 1]])
    """
    _at_least("blobs", 1, n_groups=n_groups, clients_per_group=clients_per_group, n=n, d=d)
    _at_least("blobs", 1, n_classes=n_classes)
    _at_least("blobs", 0, test=test)
    key = fold(seed_key(seed), "blobs")
    mapping = _mappings(fold(key, "mapping"), n_groups, n_classes)  # [k, c]
    places = torch.arange(n_classes)
    centres = torch.zeros(n_classes, d)
    if d == 1 or n_classes < 3:  # in a row
        centres[:, 0] = separation * (places - (n_classes - 1) / 2)
    else:  # on a circle
        angle = 2 * math.pi * places / n_classes
        circle = torch.stack([angle.cos(), angle.sin()], dim=1)
        centres[:, :2] = circle * separation / (2 * math.sin(math.pi / n_classes))

    truth = torch.arange(n_groups).repeat_interleave(clients_per_group)
    ids = torch.arange(len(truth))
    y = (uniform(fold(key, "y"), (len(truth), n + test), torch.float64) * n_classes).long()
    spread = torch.vmap(lambda k: normal(k, (n + test, d)))(fold(key, "x", ids))  # [m, n, d]
    x = centres[mapping[truth[:, None], y]] + spread
    least = max(1, math.ceil(n / 4))
    draw = uniform(fold(key, "sizes"), (len(truth),), torch.float64)
    sizes = least + (draw * (n + 1 - least)).long() if unequal else torch.full((len(truth),), n)
    return FederatedData(
        x.flatten(0, 1),
        y.flatten(),
        _leading(sizes, n, test),
        names=_names(truth),
        task="classification",
        n_outputs=n_classes,
        truth=truth,
        extra={"centres": centres, "mapping": mapping},
        classes=tuple(str(c) for c in range(n_classes)),
    )


@problem
def digits(
    n_clients: int = 40,
    n_groups: int = 4,
    per_client: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    n_max: int | None = None,
    flat: bool = True,
) -> FederatedData:
    """Handwritten digits, rotated or mirrored differently in each group.

    Every group has all 1,797 images that come with scikit-learn (8 x 8 pixels, scaled to [0, 1]),
    divided among its clients; within a group no image is used twice. Groups 0 to 3 rotate them by
    0, 90, 180 and 270 degrees, groups 4 to 7 have the mirror images of these, and any further group
    has its pixels in a random order.

    Parameters
    ----------
    per_client
        Images of a client, training and test together; an equal cut if None.
    n_max
        Number of images used; None: all.
    flat
        Images as 64 numbers, or as [1, 8, 8].

    >>> data = digits()
    >>> len(data), data.sample_shape, data.sizes("train")[:3]
    (40, (64,), tensor([144, 144, 144]))
    """
    from sklearn.datasets import load_digits  # slow to import, and needed here alone

    least = 1 if per_client is None else per_client
    _at_least("digits", 1, n_groups=n_groups, per_client=least)
    _at_least("digits", n_groups, n_clients=n_clients)
    key = fold(seed_key(seed), "digits")
    source = load_digits()
    used = shuffled(fold(key, "used"), len(source.target))[:n_max]
    truth = torch.arange(n_clients) * n_groups // n_clients
    members = torch.bincount(truth, minlength=n_groups)  # [k]
    if least * int(members.max()) > len(used):
        raise ConfigError(
            f"digits: no image may be used twice in a group. There are {len(used)} images for "
            f"{int(members.max())} clients of at least {least}. Use fewer clients or more groups."
        )
    parts: list[Tensor] = []
    for group, m in enumerate(members.tolist()):
        order = used[shuffled(fold(key, "order", group), len(used))]
        if per_client is None:
            parts += order.tensor_split(m)
        else:
            parts += order[: m * per_client].split(per_client)
    names = _names(truth)
    train, test = RowIndex.of(parts).divide(names, test_fraction, fold(key, "test"))
    return FederatedData(
        torch.from_numpy(source.data).to(torch.uint8),  # [1797, 64], 0 to 16
        torch.from_numpy(source.target).to(torch.uint8),
        {"train": train, "test": test},
        names=names,
        task="classification",
        n_outputs=10,
        client_facts={"view": truth.clone()},
        transform=View(_views(fold(key, "views"), n_groups), flat),
        truth=truth,
        classes=tuple(str(label) for label in range(10)),
        notes=("Images of the UCI optical recognition of handwritten digits test set.",),
    )


@dataclass(frozen=True, eq=False)
class View:
    """Eight by eight images as a client sees them: pixels reordered, 0..16 scaled to [0, 1]."""

    table: Tensor  # [views, 64]
    flat: bool

    def __call__(self, x: Tensor, facts: Tree) -> Tensor:
        seen = x.index_select(1, take(self.table, facts["view"])).float() / 16  # [n, 64]
        return seen if self.flat else seen.reshape(-1, 1, 8, 8)


def _views(key: Tensor, n_views: int) -> Tensor:
    """Orders of 64 pixels: four turns, four turns of the mirror image, then random ones."""
    grid = torch.arange(64).reshape(8, 8)
    turns = [torch.rot90(side, turn) for side in (grid, grid.flip(1)) for turn in range(4)]
    orders = [turn.flatten() for turn in turns]
    orders += [shuffled(fold(key, view), 64) for view in range(8, n_views)]
    return torch.stack(orders[:n_views])  # [views, 64]


def _regression(
    key: Tensor, theta: Tensor, truth: Tensor, n: int, test: int, noise: float, dtype: str
) -> FederatedData:
    """Gaussian inputs and their noisy linear targets, one draw per client."""
    types = {"float32": torch.float32, "float64": torch.float64}
    if dtype not in types:
        raise ConfigError(unknown("dtype", dtype, types))
    d, ids = theta.shape[1], torch.arange(len(truth))

    def one(x_key: Tensor, y_key: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = normal(x_key, (n + test, d), types[dtype])
        return x, x.double() @ target + noise * normal(y_key, (n + test,), torch.float64)

    x, y = torch.vmap(one)(fold(key, "x", ids), fold(key, "y", ids), theta[truth])
    return FederatedData(
        x.flatten(0, 1),
        y.flatten().to(types[dtype]),
        _leading(torch.full((len(truth),), n), n, test),
        names=_names(truth),
        task="regression",
        n_outputs=1,
        truth=truth,
        extra={"targets": theta.to(types[dtype])},
    )


def _leading(sizes: Tensor, n: int, test: int) -> dict[str, RowIndex]:
    """Rows for a pool with n + test rows per client: the first ones train, the last `test` test."""
    place = torch.arange(n + test)
    rows = RowIndex.blocks(torch.full_like(sizes, n + test))
    return {
        "train": rows.where((place < sizes[:, None]).flatten()),
        "test": rows.where((place >= n).repeat(len(sizes))),
    }


def _names(truth: Tensor) -> tuple[str, ...]:
    return tuple(f"client-{i}" for i in range(len(truth)))


def _at_least(owner: str, least: float, **values: float) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ConfigError(f"{owner}: {name} must be at least {least}, got {value}.")


def _orthonormal(key: Tensor, n_groups: int, d: int, separation: float) -> Tensor:
    if n_groups > d:
        raise ConfigError(
            f"linear_groups: orthonormal targets must be no more than the dimension. Got "
            f"n_groups={n_groups}, d={d}."
        )
    return torch.linalg.qr(normal(key, (d, n_groups), torch.float64)).Q.T.contiguous()


_CANDIDATES = 2048
_DRAWS = 256  # half a million candidates; separations of 1e-4 to 1 need a few thousand at d = 20


def _chain(key: Tensor, n_groups: int, d: int, separation: float) -> Tensor:
    """Unit vectors, each near an earlier one, all pairs between one and five separations apart."""
    if not 0 < separation <= 2:
        raise ConfigError(
            f"linear_groups: separation of unit vectors must be in (0, 2], got {separation}."
        )
    targets = _unit(normal(fold(key, 0), (1, d), torch.float64))
    for j in range(1, n_groups):
        for draw in range(_DRAWS):
            own = fold(key, j, draw)
            earlier = (uniform(fold(own, "from"), (_CANDIDATES,), torch.float64) * j).long()
            step = separation * _unit(normal(fold(own, "step"), (_CANDIDATES, d), torch.float64))
            candidates = _unit(targets[earlier] + step)
            # By products the distances of near vectors would be noise.
            apart = torch.cdist(candidates, targets, compute_mode="donot_use_mm_for_euclid_dist")
            good = ((apart >= separation) & (apart <= 5 * separation)).all(1).nonzero()
            if len(good):
                targets = torch.cat([targets, candidates[good[0]]])
                break
        else:
            raise ConfigError(
                f"linear_groups: {n_groups} unit vectors in d={d} dimensions must be between "
                f"{separation:g} and {5 * separation:g} apart. Found {j} of them and no further "
                f"one in {_CANDIDATES * _DRAWS} tries. Use fewer groups, a larger d or another "
                f"separation."
            )
    return targets


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _mappings(key: Tensor, n_groups: int, n_classes: int) -> Tensor:
    """Different orders of the classes: shifts first, no class in one place twice, then any."""
    if n_groups > math.factorial(n_classes):
        raise ConfigError(
            f"blobs: groups must name the clouds differently. {n_classes} classes allow "
            f"{math.factorial(n_classes)} ways, n_groups is {n_groups}. Use more classes."
        )
    places = torch.arange(n_classes)
    orders = [tuple(places.roll(-g).tolist()) for g in range(min(n_groups, n_classes))]
    draw = 0
    while len(orders) < n_groups:
        order = tuple(shuffled(fold(key, draw), n_classes).tolist())
        draw += 1
        if order not in orders:
            orders.append(order)
    return torch.tensor(orders)
