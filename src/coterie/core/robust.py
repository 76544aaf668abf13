"""Averages that a few liars cannot move far.

Every rule combines the replies x_1 .. x_m of one group's members. With w their weights, which add
up to one, and a the group's present model:

    clipped            a + sum w_i clip(x_i - a), where clip shortens a vector to the radius
    centred clipping   the same around its own result, repeated
    geometric median   the point with the smallest sum w_i |x_i - v|, by Weiszfeld's steps
    krum               the reply that is nearest to its m - f nearest, itself included
    trimmed            for each number, the mean without the f largest and the f smallest
    median             for each number, the weighted median

The first four need only the products of the differences x_i - a, an m x m matrix, and are sums of
replies. Without a given radius it is the median length. References: Blanchard et al., NeurIPS 2017
(Krum); Yin et al., ICML 2018 (median, trimmed mean); Karimireddy et al., ICML 2021 (centred
clipping); Pillutla et al., IEEE TSP 2022 (geometric median). Krum counts m - f neighbours, as in
Allouah et al., AISTATS 2023.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

STEPS = 10
"""Repetitions of centred clipping."""
MOST_STEPS = 200
"""Weiszfeld's steps, at most; they end earlier when nothing moves."""
PIECE = 2_000_000
"""Numbers that are held in double precision at a time: 16 MB."""
FEWEST = 3
"""A rule needs this number of members: of two that differ, nobody knows which one lies."""

BY_COORDINATE = ("median", "trimmed")


def count_liars(share: float, members: int) -> int:
    """The number of members that may lie: the share, rounded up, and always less than half.

    >>> [count_liars(0.2, m) for m in (3, 5, 10, 11)]
    [1, 1, 2, 3]
    """
    return min(math.ceil(share * members - 1e-9), (members - 1) // 2)


def limit_weights(weight: Tensor, cap: float | None) -> Tensor:
    """Weights of at most `cap`; None: at most twice the median of those above zero.

    >>> limit_weights(torch.tensor([1.0, 2.0, 3.0, 1e9]), None)
    tensor([1., 2., 3., 4.])
    """
    if cap is None:
        some = weight[weight > 0]
        if not len(some):
            return weight
        cap = 2 * float(some.median())
    return weight.clamp(max=cap)


def combine(
    values: list[Tensor],
    around: list[Tensor],
    weight: Tensor,
    rule: str,
    liars: float,
    radius: float | None = None,
) -> list[Tensor]:
    """One value for each leaf, in double precision, from those of m members.

    Parameters
    ----------
    values
        Leaves of the members, [m, ...] each.
    around
        The group's present model, leaf by leaf.
    weight
        Weights of the members, above zero. [m]
    rule
        "clipped", "centred_clipping", "geometric_median", "krum", "trimmed" or "median".
    liars
        Share of the members that may lie.
    radius
        Length to which differences are shortened; None: their median length.
    """
    m = len(weight)
    weight = weight.double() / weight.double().sum()
    f = count_liars(liars, m)
    if rule in BY_COORDINATE:
        return [_by_coordinate(leaf, weight, f if rule == "trimmed" else None) for leaf in values]
    products = torch.zeros(m, m, dtype=torch.float64)
    for leaf, old in zip(values, around, strict=True):
        for part, base in _pieces(leaf, old):
            apart = part - base
            products += (apart @ apart.T).cpu()
    share = _SHARES[rule](products, weight.cpu(), f, radius)
    out = []
    for leaf, old in zip(values, around, strict=True):
        parts = [
            (1 - share.sum()) * base + share.to(part) @ part for part, base in _pieces(leaf, old)
        ]
        out.append(torch.cat(parts).reshape(old.shape) if parts else old.double())
    return out


def _pieces(leaf: Tensor, old: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of a leaf [m, ...] and of its present value, in double precision, some at a time."""
    flat, base = leaf.reshape(len(leaf), -1), old.reshape(-1)
    step = max(1, PIECE // len(flat))
    for start in range(0, flat.shape[1], step):
        part = slice(start, start + step)
        yield flat[:, part].double(), base[part].double()


# by coordinate


def _by_coordinate(leaf: Tensor, weight: Tensor, trim: int | None) -> Tensor:
    """The trimmed mean (`trim` members on each side) or the median (None) of every number."""
    shape = leaf.shape[1:]
    zeros = leaf.new_zeros(shape)
    parts = [_column(part, weight.to(part), trim) for part, _ in _pieces(leaf, zeros)]
    return torch.cat(parts).reshape(shape) if parts else zeros.double()


def _column(x: Tensor, weight: Tensor, trim: int | None) -> Tensor:
    """Trimmed means or medians of the columns of x, [m, d]."""
    m = len(x)
    x, order = x.sort(dim=0)
    weight = weight[order]  # [m, d]
    if trim is not None:
        kept = slice(trim, m - trim)
        return (weight[kept] * x[kept]).sum(0) / weight[kept].sum(0)
    below = weight.cumsum(0)
    low = (below < 0.5 - 1e-12).sum(0, keepdim=True).clamp(max=m - 1)
    high = (below <= 0.5 + 1e-12).sum(0, keepdim=True).clamp(max=m - 1)
    return ((x.gather(0, low) + x.gather(0, high)) / 2)[0]


# by distance; each gives the share of every difference in the result


def _lengths(products: Tensor, share: Tensor) -> Tensor:
    """Distance of each difference from the point with these shares: [m]."""
    there = products @ share
    square = products.diagonal() - 2 * there + share @ there
    return square.clamp(min=0).sqrt()


def _median(values: Tensor, weight: Tensor) -> float:
    return float(_column(values[:, None], weight, None))


def _shorten(length: Tensor, weight: Tensor, radius: float | None) -> Tensor:
    """By what factor each vector is shortened."""
    most = _median(length, weight) if radius is None else radius
    return (most / length.clamp(min=1e-300)).clamp(max=1.0)


def _clipped(products: Tensor, weight: Tensor, f: int, radius: float | None) -> Tensor:
    return weight * _shorten(products.diagonal().sqrt(), weight, radius)


def _centred(products: Tensor, weight: Tensor, f: int, radius: float | None) -> Tensor:
    share = torch.zeros_like(weight)
    for _ in range(STEPS):
        step = weight * _shorten(_lengths(products, share), weight, radius)
        share = share * (1 - step.sum()) + step
    return share


def _geometric(products: Tensor, weight: Tensor, f: int, radius: float | None) -> Tensor:
    apart = _pairs(products)
    # Start within the half that is nearest to the most central reply: liars far away cannot
    # spoil the first step.
    centre = apart.median(1).values.argmin()
    near = apart[centre] <= apart[centre].median()
    share = weight * near / (weight * near).sum()
    for _ in range(MOST_STEPS):
        length = _lengths(products, share)
        here = length <= 1e-9 * float(length.median())  # the point is a reply itself
        pull = torch.where(here, 0.0, weight / length.clamp(min=1e-300))
        total = float(pull.sum())
        if total == 0:
            break
        new = pull / total
        if bool(here.any()):
            # It stays, unless the others pull harder than it weighs (Vardi and Zhang, 2000).
            force = pull - total * share
            strength = float((force @ products @ force).clamp(min=0).sqrt())
            stay = min(1.0, float(weight[here].sum()) / max(strength, 1e-300))
            new = (1 - stay) * new + stay * share
        moved = float((new - share).abs().max())
        share = new
        if moved < 1e-12:
            break
    return share


def _krum(products: Tensor, weight: Tensor, f: int, radius: float | None) -> Tensor:
    near = _pairs(products).square().sort(dim=1).values[:, 1 : max(len(weight) - f, 2)]
    share = torch.zeros_like(weight)
    share[near.mean(1).argmin()] = 1.0
    return share


def _pairs(products: Tensor) -> Tensor:
    """Distances between replies: [m, m]."""
    own = products.diagonal()
    return (own[:, None] + own - 2 * products).clamp(min=0).sqrt().fill_diagonal_(0.0)


_SHARES = {
    "clipped": _clipped,
    "centred_clipping": _centred,
    "geometric_median": _geometric,
    "krum": _krum,
}
