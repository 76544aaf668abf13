"""Ward merges of clients' components: of all pairs, or of near neighbours if there are many."""

import heapq
from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree

from coterie.clustering.arrays import TREE_DIMENSIONS, Array, Labels

DENSE = 600  # up to this number of components, all pairs are candidates
NEIGHBOURS = 16  # with more components, this number of nearest neighbours of each
TOLERANCE = 0.05  # share of a group's clients that may have two components in it


class Path(NamedTuple):
    """Merges from single components upwards."""

    joins: list[tuple[int, int]]  # groups that are merged; the smaller index remains
    costs: Array  # [p]  Ward cost of each merge


def holder_bits(clients: Labels) -> list[int]:
    """The client of each component, as one bit of a number."""
    return [1 << int(client) for client in clients]


def ward_path(
    mass: Array, centres: Array, holders: list[int], tolerance: float = TOLERANCE, k_min: int = 1
) -> Path:
    """Merge the allowed pair with the smallest Ward cost, until no pair or `k_min` groups are left.

    Two groups may merge if they share at most `tolerance` times the clients of the larger group; by
    default none below 20 clients. The clients of a group are the bits of `holders`.
    """
    if len(mass) <= DENSE:
        return _dense_path(mass, centres, holders, tolerance, k_min)
    return _sparse_path(mass, centres, holders, tolerance, k_min, NEIGHBOURS)


def _may_merge(a: int, b: int, tolerance: float) -> bool:
    shared = (a & b).bit_count()
    return shared == 0 or shared <= tolerance * max(a.bit_count(), b.bit_count())


def _dense_path(
    mass: Array, centres: Array, holders: list[int], tolerance: float, k_min: int
) -> Path:
    n, mu, count, holders = mass.astype(float), centres - centres.mean(0), len(mass), [*holders]
    squares = (mu * mu).sum(1)
    cost = (squares[:, None] + squares - 2 * mu @ mu.T).clip(min=0)
    cost *= n[:, None] * n / (n[:, None] + n)
    np.fill_diagonal(cost, np.inf)
    if tolerance < 1:
        same = np.unique(np.array(holders, dtype=object), return_inverse=True)[1]
        cost[same[:, None] == same] = np.inf  # not necessary, but excludes many pairs early
    nearest = cost.argmin(1)
    least = cost[np.arange(count), nearest]
    alive = np.ones(count, dtype=bool)
    joins, costs, groups = [], [], count
    while groups > k_min and count > 1:
        a = int(least.argmin())
        if not np.isfinite(least[a]):
            break
        b = int(nearest[a])
        if not _may_merge(holders[a], holders[b], tolerance):
            cost[a, b] = cost[b, a] = np.inf
            for row in (a, b):
                nearest[row] = cost[row].argmin()
                least[row] = cost[row, nearest[row]]
            continue
        a, b = min(a, b), max(a, b)
        joins.append((a, b))
        costs.append(cost[a, b])
        groups -= 1
        total = n[a] + n[b]
        mu[a] = (n[a] * mu[a] + n[b] * mu[b]) / total
        n[a], holders[a] = total, holders[a] | holders[b]
        row = ((mu - mu[a]) ** 2).sum(1) * n * n[a] / (n + n[a])
        alive[b] = False
        row[~alive] = row[a] = np.inf
        cost[a], cost[:, a] = row, row
        cost[b], cost[:, b] = np.inf, np.inf
        stale = np.flatnonzero((nearest == a) | (nearest == b))
        closer = row < least
        nearest[closer], least[closer] = a, row[closer]
        for other in {*stale.tolist(), a, b}:
            nearest[other] = cost[other].argmin()
            least[other] = cost[other, nearest[other]]
    return Path(joins, np.array(costs))


def _sparse_path(
    mass: Array, centres: Array, holders: list[int], tolerance: float, k_min: int, neighbours: int
) -> Path:
    """The same with a heap over the nearest neighbours; outdated entries are skipped."""
    n, holders = mass.astype(float).tolist(), [*holders]
    mu = [row.copy() for row in centres - centres.mean(0)]
    version = [0] * len(n)
    alive = set(range(len(n)))
    joins: list[tuple[int, int]] = []
    costs: list[float] = []
    while len(alive) > k_min:
        links = neighbourhoods(np.array([mu[a] for a in sorted(alive)]), sorted(alive), neighbours)
        heap = []
        for a, near in links.items():
            others = [b for b in near if b > a]
            if others:
                gaps = np.array([mu[b] for b in others]) - mu[a]
                for b, squared in zip(others, (gaps * gaps).sum(1).tolist(), strict=True):
                    heap.append(
                        (n[a] * n[b] / (n[a] + n[b]) * squared, a, b, version[a], version[b])
                    )
        heapq.heapify(heap)
        before = len(joins)
        while heap and len(alive) > k_min:
            cost, a, b, age_a, age_b = heapq.heappop(heap)
            if version[a] != age_a or version[b] != age_b:
                continue
            if not _may_merge(holders[a], holders[b], tolerance):
                continue
            joins.append((a, b))
            costs.append(cost)
            total = n[a] + n[b]
            mu[a] = (n[a] * mu[a] + n[b] * mu[b]) / total
            n[a], holders[a] = total, holders[a] | holders[b]
            version[a] += 1
            version[b] += 1
            alive.discard(b)
            near = (links.pop(b) | links[a]) - {a, b}
            for other in near:
                links[other].discard(b)
                links[other].add(a)
            links[a] = near
            others = list(near)
            if others:
                gaps = np.array([mu[c] for c in others]) - mu[a]
                for c, squared in zip(others, (gaps * gaps).sum(1).tolist(), strict=True):
                    low, high = (a, c) if a < c else (c, a)
                    weight = n[a] * n[c] / (n[a] + n[c])
                    heapq.heappush(heap, (weight * squared, low, high, version[low], version[high]))
        if len(joins) == before:
            break  # no allowed pair is left
    return Path(joins, np.array(costs))


def neighbourhoods(points: Array, names: list[int], neighbours: int) -> dict[int, set[int]]:
    """The nearest groups of each group, as a symmetric relation; with few groups, all others."""
    count = len(points)
    links: dict[int, set[int]] = {name: set() for name in names}
    if count <= DENSE:
        everyone = set(names)
        return {name: everyone - {name} for name in names}
    k = min(neighbours + 1, count)
    if points.shape[1] <= TREE_DIMENSIONS:
        found = cKDTree(points).query(points, k)[1]
    else:
        squares, parts = (points * points).sum(1), []
        for start in range(0, count, 1024):
            part = slice(start, start + 1024)
            squared = squares[part, None] + squares - 2 * points[part] @ points.T
            parts.append(np.argpartition(squared, k - 1, axis=1)[:, :k])
        found = np.concatenate(parts)
    for i, row in enumerate(found.tolist()):
        for j in row:
            if i != j:
                links[names[i]].add(names[j])
                links[names[j]].add(names[i])
    return links


def cut(path: Path, count: int, merges: int) -> Labels:
    """Labels after this number of merges, numbered by their smallest member."""
    parent = np.arange(count)
    for a, b in path.joins[:merges]:
        parent[b] = a
    for a in range(count):  # the index of a parent is smaller, so its label is already final
        parent[a] = parent[parent[a]]
    return np.unique(parent, return_inverse=True)[1].astype(np.int64)
