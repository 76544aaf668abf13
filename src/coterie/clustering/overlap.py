"""Balls of uncertainty around components: which meet, and where their centres go.

While clients still move, balls that overlap are pulled together inside them. At the end balls of a
fixed size say what belongs together, in the paper's way; its size is chosen by silhouette. No
sample is ever seen here, but for `silhouettes`, which a client takes of its own.
"""

from typing import Literal

import numpy as np
import torch
from scipy.spatial import cKDTree
from scipy.stats import chi2
from torch import Tensor

from coterie.clustering.mixtures import squared_distances
from coterie.clustering.pooling import Array, Labels, means

TREE_DIMENSIONS = 16  # above, a KD-tree is no faster than all distances
FOLDS = 3  # parts of the clients that judge a factor the others were merged by
FACTORS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1e3, 1e4, 1e5, 1e6)


def overlaps(centres: Array, radii: Array, clients: Labels) -> tuple[Labels, Array]:
    """Pairs of components of different clients whose balls meet, and distance over summed radii.

    Pairs [p, 2] come by closeness (ties by index). A negative radius never meets anything.

    >>> centres, radii = np.array([[0.0], [3.0]]), np.array([1.0, 2.0])
    >>> pairs, closeness = overlaps(centres, radii, clients=np.array([0, 1]))
    >>> pairs.tolist(), closeness.tolist()
    ([[0, 1]], [1.0])
    """
    real = np.flatnonzero(radii >= 0)
    none = np.zeros((0, 2), dtype=np.int64), np.zeros(0)
    if len(real) < 2:
        return none
    points, reach = centres[real], radii[real]
    if centres.shape[1] <= TREE_DIMENSIONS:
        first, second = _near_by_tree(points, reach)
    else:
        first, second = _near_by_blocks(points, reach)
    a, b = real[first], real[second]
    different = clients[a] != clients[b]
    a, b = a[different], b[different]
    distance = np.linalg.norm(centres[a] - centres[b], axis=1)
    total = radii[a] + radii[b]
    meet = distance <= total
    a, b, distance, total = a[meet], b[meet], distance[meet], total[meet]
    closeness = np.divide(distance, total, out=np.zeros_like(distance), where=total > 0)
    order = np.lexsort((b, a, closeness))
    return np.stack([a, b], 1)[order], closeness[order]


def _near_by_tree(points: Array, reach: Array) -> tuple[Labels, Labels]:
    tree = cKDTree(points)
    # A hair more than the exact distance, which is checked afterwards.
    radius = (reach + reach.max()) * (1 + 1e-9)
    found = tree.query_ball_point(points, radius)
    first = np.repeat(np.arange(len(points)), [len(near) for near in found])
    second = np.concatenate([np.asarray(near, dtype=np.int64) for near in found])
    return first[first < second], second[first < second]


def _near_by_blocks(points: Array, reach: Array, block: int = 1024) -> tuple[Labels, Labels]:
    middle = points.mean(0)
    points = points - middle
    squares = (points * points).sum(1)
    first, second = [], []
    slack = 1e-9 * squares.max(initial=0.0)
    for start in range(0, len(points), block):
        part = slice(start, start + block)
        squared = squares[part, None] + squares - 2 * points[part] @ points.T
        i, j = np.nonzero(squared <= (reach[part, None] + reach) ** 2 + slack)
        first.append(i[i + start < j] + start)
        second.append(j[i + start < j])
    return np.concatenate(first), np.concatenate(second)


class _Sets:
    """Union-find whose sets refuse to hold two components of a client."""

    def __init__(self, clients: Labels) -> None:
        self.parent = list(range(len(clients)))
        self.holders = [1 << int(client) for client in clients]

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            self.parent[a] = self.parent[self.parent[a]]
            a = self.parent[a]
        return a

    def unite(self, a: int, b: int, exclusive: bool = True) -> bool:
        a, b = self.find(a), self.find(b)
        if a == b or (exclusive and self.holders[a] & self.holders[b]):
            return False
        low, high = min(a, b), max(a, b)
        self.parent[high] = low
        self.holders[low] |= self.holders[high]
        return True

    def labels(self) -> Labels:
        roots = np.array([self.find(a) for a in range(len(self.parent))], dtype=np.int64)
        return np.unique(roots, return_inverse=True)[1].astype(np.int64)


def connect(pairs: Labels, clients: Labels, exclusive: bool = True) -> Labels:
    """Groups of components that hang together, closest pairs first, no client twice in a group."""
    sets = _Sets(clients)
    for a, b in pairs.tolist():
        sets.unite(a, b, exclusive)
    return sets.labels()


def common_point(a: Array, b: Array, radius_a: float, radius_b: float) -> Array | None:
    """The point of two balls with the least summed squared distance to both centres.

    None if they do not meet.

    >>> common_point(np.array([0.0, 0.0]), np.array([3.0, 0.0]), 1.0, 2.5)
    array([1., 0.])
    """
    distance = float(np.linalg.norm(b - a))
    if distance > radius_a + radius_b:
        return None
    if distance == 0:
        return a.copy()
    step = min(max(0.5, 1 - radius_b / distance), radius_a / distance)
    return a + step * (b - a)


def consensus(centres: Array, radii: Array, n: Array, labels: Labels) -> Array:
    """Every centre at the point of its ball nearest to its group's weighted mean.

    >>> consensus(
    ...     np.array([[0.0], [1.0]]), np.array([0.5, 10.0]), np.array([1.0, 3.0]), np.array([0, 0])
    ... ).ravel()
    array([0.5 , 0.75])
    """
    k = int(labels.max(initial=-1)) + 1
    sums, total = np.zeros((k, centres.shape[1])), np.zeros(k)
    np.add.at(sums, labels, centres * n[:, None])
    np.add.at(total, labels, n)
    goal = np.divide(sums, total[:, None], out=np.zeros_like(sums), where=total[:, None] > 0)
    goal = np.where(total[labels, None] > 0, goal[labels], centres)
    size = np.bincount(labels, minlength=k)[labels]
    goal = np.where(size[:, None] > 1, goal, centres)  # alone: exactly where it was
    way = goal - centres
    length = np.linalg.norm(way, axis=1)
    reach = np.clip(radii, 0, None)
    share = np.divide(reach, length, out=np.ones_like(length), where=length > reach)
    moved: Array = centres + np.minimum(share, 1.0)[:, None] * way
    return moved


def pairwise_means(centres: Array, radii: Array, pairs: Labels, labels: Labels) -> Array:
    """The paper's update: the mean of a centre and its common points with its group's others."""
    total, count = centres.copy(), np.ones(len(centres))
    for a, b in pairs.tolist():
        if labels[a] == labels[b]:
            point = common_point(centres[a], centres[b], radii[a], radii[b])
            if point is not None:
                total[[a, b]] += point
                count[[a, b]] += 1
    moved: Array = total / count[:, None]
    return moved


def pulled(
    centres: Array, radii: Array, n: Array, clients: Labels, rule: Literal["mean", "pairwise"]
) -> Array:
    """Where centres go whose balls meet, each inside its own; a negative radius is nobody's."""
    moved, real = centres.copy(), radii >= 0
    if not real.any():
        return moved
    points, reach, owner = centres[real], radii[real], clients[real]
    pairs, _ = overlaps(points, reach, owner)
    labels = connect(pairs, owner)
    if rule == "pairwise":
        moved[real] = pairwise_means(points, reach, pairs, labels)
    else:
        moved[real] = consensus(points, reach, n[real], labels)
    return moved


# balls of a fixed size


def joined(centres: Array, radii: Array, clients: Labels) -> Labels:
    """Groups of components whose balls meet, no client twice in a group."""
    return connect(overlaps(centres, radii, clients)[0], clients)


def statistical_radii(n: Array, variance: float, d: int) -> Array:
    """Balls that hold the true centre with probability 0.99 for all components at once."""
    quantile = chi2.ppf(1 - 0.01 / max(len(n), 1), d)
    radii: Array = np.sqrt(variance * quantile / n)
    return radii


def published_radii(
    n: Array, centres: Array, clients: Labels, factor: float, sigma: float = 1.0
) -> Array:
    """Square root of factor * R / (share * sqrt(N)), R the least distance of a client's centres.

    A client with one component has no R: it takes the mean of the others'.
    """
    radii, least = np.zeros(len(n)), {}
    for client in np.unique(clients).tolist():
        own = np.flatnonzero(clients == client)
        gaps = [
            float(np.linalg.norm(centres[a] - centres[b]))
            for i, a in enumerate(own)
            for b in own[i + 1 :]
        ]
        least[client] = min(gaps) if gaps else np.nan
    usual = (
        float(np.nanmean(list(least.values()))) if not all(map(np.isnan, least.values())) else 0.0
    )
    for client, gap in least.items():
        own = np.flatnonzero(clients == client)
        total = n[own].sum()
        gap = usual if np.isnan(gap) else gap
        radii[own] = np.sqrt(factor * gap * sigma / (n[own] / total * np.sqrt(total)))
    return radii


def factor_banks(n: Array, centres: Array, clients: Labels, fold: Labels, sigma: float) -> Array:
    """Merged centres without each fold, for each factor: [folds, factors, k, d].

    Rows after the last centre are infinite. A fold that holds everything is left in.
    """
    banks: list[Array] = []
    for part in range(FOLDS):
        kept = fold != part if (fold != part).any() else np.ones(len(n), dtype=bool)
        for factor in FACTORS:
            radii = published_radii(n[kept], centres[kept], clients[kept], factor, sigma)
            banks.append(means(n[kept], centres[kept], joined(centres[kept], radii, clients[kept])))
    padded = np.full((FOLDS, len(FACTORS), max(map(len, banks)), centres.shape[1]), np.inf)
    for i, bank in enumerate(banks):
        padded[i // len(FACTORS), i % len(FACTORS), : len(bank)] = bank
    return padded


def silhouettes(x: Tensor, mask: Tensor, banks: Tensor) -> Tensor:
    """Mean simplified silhouette of samples for each bank of centres; 0 where there is one: [f]."""
    scores = []
    for bank in banks:  # [k, d], rows of infinity where there is no centre
        real = bank.isfinite().all(1)
        distance = squared_distances(x, torch.where(real[:, None], bank, 0.0))
        distance = torch.where(real, distance, torch.inf)
        if bank.shape[0] == 1:
            scores.append(distance.new_zeros(()))
            continue
        near = distance.topk(2, 1, largest=False).values.sqrt()  # [n, 2]
        ratio = 1 - near[:, 0] / near[:, 1].clamp(min=1e-300)
        ratio = torch.where(near[:, 1].isinf(), 0.0, ratio)  # one group: no silhouette
        scores.append(torch.where(mask, ratio, 0.0).sum() / mask.sum())
    return torch.stack(scores)
