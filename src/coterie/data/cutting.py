"""Arithmetic of partitions: shares, counts and rows of a pool. No loop depends on luck."""

import torch
from scipy.special import gammaincinv
from torch import Tensor

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import fold, shuffled, uniform


def cut(y: Tensor, shares: Tensor, key: Tensor) -> list[Tensor]:
    """Rows of each owner: every class is cut by its column of the shares [owners, c]."""
    order = shuffled(key, len(y))
    parts: list[list[Tensor]] = [[] for _ in shares]
    for c in range(shares.shape[1]):
        rows = order[y[order] == c]
        counts = whole(shares[:, c], len(rows))
        for part, own in zip(parts, rows[: int(counts.sum())].split(counts.tolist()), strict=True):
            part.append(own)
    return [torch.cat(part) for part in parts]


def dealt(parts: list[Tensor], truth: Tensor, key: Tensor) -> list[Tensor]:
    """The rows of each group, evenly among its clients in random order."""
    lists: list[Tensor] = []
    for group, rows in enumerate(parts):
        mixed = rows[shuffled(fold(key, group), len(rows))]
        lists += mixed.tensor_split(int((truth == group).sum()))
    return lists


def topped_up(parts: list[Tensor], least: Tensor, key: Tensor) -> tuple[list[Tensor], int]:
    """Give owners that lack rows some of the largest owner's; at most one visit each."""
    parts = list(parts)
    sizes = torch.tensor([len(part) for part in parts])
    moved = 0
    for poor in (sizes < least).nonzero()[:, 0].tolist():
        while (lack := int(least[poor] - sizes[poor])) > 0:
            spare = sizes - least
            rich = int(spare.argmax())  # the total suffices, so somebody has a row to spare
            n = min(lack, max(1, int(spare[rich]) // 2))
            own = parts[rich][shuffled(fold(key, poor, moved), len(parts[rich]))]
            parts[rich], given = own[n:], own[:n]
            parts[poor] = torch.cat([parts[poor], given])
            sizes[rich], sizes[poor] = sizes[rich] - n, sizes[poor] + n
            moved += n
    return parts, moved


def dirichlet_shares(alpha: float, shape: tuple[int, ...], key: Tensor) -> Tensor:
    """Shares that sum to one along the last axis.

    A gamma number of shape alpha is one of shape alpha + 1 times u ** (1 / alpha); as logarithms
    they do not vanish, however small alpha is.
    """
    grid = 2.0**-25  # uniform() has steps of twice that and begins at 0
    first = uniform(fold(key, 0), shape, torch.float64) + grid
    second = uniform(fold(key, 1), shape, torch.float64) + grid
    log = torch.from_numpy(gammaincinv(alpha + 1.0, first.numpy())).log() + second.log() / alpha
    return log.softmax(-1)


def whole(shares: Tensor, n: int) -> Tensor:
    """Counts in proportion to shares: at most n, all of n if shares sum to one.

    >>> whole(torch.tensor([0.5, 0.3, 0.2]), 4)
    tensor([2, 1, 1])
    """
    total = round(n * min(1.0, float(shares.sum())))
    exact = shares * n
    counts = (exact + 1e-9).floor().long()
    rest = int(total - counts.sum())
    counts[(exact - counts).argsort(descending=True, stable=True)[: max(rest, 0)]] += 1
    return counts


def proportions(counts: Tensor) -> Tensor:
    """Counts as shares of their row."""
    return (counts / counts.sum(1, keepdim=True)).float()


_DRAWS = 1000  # for each group; two groups of one swap among ten classes meet once in 45


def label_swaps(owner: str, n_classes: int, n_groups: int, swaps: int, key: Tensor) -> Tensor:
    """What each group calls each class [k, c]; all but the first have swapped pairs."""
    if not 1 <= swaps <= n_classes // 2:
        raise ConfigError(
            f"{owner}: swaps must lie in 1..{n_classes // 2} for {n_classes} classes, got {swaps}."
        )
    orders = [torch.arange(n_classes)]
    for group in range(1, n_groups):
        for draw in range(_DRAWS):
            first, second = shuffled(fold(key, group, draw), n_classes)[: 2 * swaps].chunk(2)
            order = torch.arange(n_classes)
            order[first], order[second] = second, first
            if not any(torch.equal(order, other) for other in orders):
                orders.append(order)
                break
        else:
            raise ConfigError(
                f"{owner}: groups must swap different labels. {n_classes} classes do not allow "
                f"{n_groups} groups with {swaps} swaps. Use fewer groups."
            )
    return torch.stack(orders)


def turns(owner: str, shape: tuple[int, ...], n: int) -> Tensor:
    """Where each pixel of an image comes from, for n turns [n, h * w]."""
    if n not in (1, 2, 4):
        raise ConfigError(f"{owner}: the number of rotations must be 1, 2 or 4, got {n}.")
    if len(shape) not in (3, 4) or shape[-1] != shape[-2]:
        raise DataError(
            f"{owner}: x must hold square images. Samples have shape {list(shape[1:])}. Crop or "
            f"scale them."
        )
    grid = torch.arange(shape[-1] ** 2).reshape(shape[-2:])
    return torch.stack([torch.rot90(grid, g * 4 // n).flatten() for g in range(n)])
