"""From the components of many clients to the groups they are copies of.

A path of Ward merges on summaries (count, centre, variance), and a criterion that says where on the
path to stop. A group holds at most one component of a client, up to a tolerance. Everything is
float64 NumPy on the server; no sample is ever seen here.
"""

import heapq
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.spatial import cKDTree

from coterie.clustering.overlap import TREE_DIMENSIONS
from coterie.clustering.pooling import Array, Labels
from coterie.core.algorithm import Curve

Criterion: TypeAlias = Literal["icl", "bic", "random_effects", "overlap", "given"]

DENSE = 600  # up to so many components, all pairs are candidates
NEIGHBOURS = 16  # above, each component's nearest ones
FLOOR = 1e-12  # of the pooled variance: no group has a smaller one


class Path(NamedTuple):
    """Merges from single components upwards."""

    joins: list[tuple[int, int]]  # roots that become one; the smaller index stays
    costs: Array  # [p]  Ward cost of each


def ward_path(
    mass: Array, centres: Array, clients: Labels, tolerance: float = 0.1, k_min: int = 1
) -> Path:
    """Merge the allowed pair of smallest Ward cost until none is left or there are `k_min` groups.

    Two groups may merge if the clients they share are at most `tolerance` times those of the
    larger one: below ten holders, none.
    """
    if len(mass) <= DENSE:
        return _dense_path(mass, centres, clients, tolerance, k_min)
    return _sparse_path(mass, centres, clients, tolerance, k_min, NEIGHBOURS)


def _may_merge(a: int, b: int, tolerance: float) -> bool:
    shared = (a & b).bit_count()
    return shared == 0 or shared <= tolerance * max(a.bit_count(), b.bit_count())


def _dense_path(mass: Array, centres: Array, clients: Labels, tolerance: float, k_min: int) -> Path:
    n, mu, count = mass.astype(float), centres - centres.mean(0), len(mass)
    holders = [1 << int(client) for client in clients]
    squares = (mu * mu).sum(1)
    cost = (squares[:, None] + squares - 2 * mu @ mu.T).clip(min=0)
    cost *= n[:, None] * n / (n[:, None] + n)
    np.fill_diagonal(cost, np.inf)
    if tolerance < 1:
        cost[clients[:, None] == clients] = np.inf
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
    mass: Array, centres: Array, clients: Labels, tolerance: float, k_min: int, neighbours: int
) -> Path:
    """The same by a heap over each component's nearest ones; stale entries are skipped."""
    n = mass.astype(float).tolist()
    mu = [row.copy() for row in centres - centres.mean(0)]
    holders = [1 << int(client) for client in clients]
    version = [0] * len(n)
    alive = set(range(len(n)))
    joins: list[tuple[int, int]] = []
    costs: list[float] = []
    while len(alive) > k_min:
        links = _links(np.array([mu[a] for a in sorted(alive)]), sorted(alive), neighbours)
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
            break  # not even among all that are left is a pair allowed
    return Path(joins, np.array(costs))


def _links(points: Array, names: list[int], neighbours: int) -> dict[int, set[int]]:
    """Each group's nearest ones, both ways; all others when there are few."""
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
    """Labels after the first so many merges, numbered by smallest member."""
    parent = np.arange(count)
    for a, b in path.joins[:merges]:
        parent[b] = a
    for a in range(count):  # a parent's index is smaller, so it is final already
        parent[a] = parent[parent[a]]
    return np.unique(parent, return_inverse=True)[1].astype(np.int64)


class Merged(NamedTuple):
    """A partition of the components and how it was chosen."""

    labels: Labels  # [c]
    curve: Array  # [p, 3]  number of groups, criterion, Ward cost of the merge that led there
    gap: float  # criterion of the best other number of groups minus that of the chosen one
    shift: float = 0.0  # standard deviation of clients' copies (random effects)


def merge(
    n: Array,
    centres: Array,
    variance: Array,
    clients: Labels,
    criterion: Literal["icl", "bic", "random_effects", "given"] = "icl",
    tolerance: float = 0.1,
    k_min: int = 1,
    k_given: int | None = None,
) -> Merged:
    """How many groups the components of all clients come from, and which belong together.

    Parameters
    ----------
    n, centres, variance
        Count [c], centre [c, d] and variance of each component: [c] spherical, [c, d] diagonal or
        [c, d, d] full.
    clients
        Whose component it is.
    criterion
        "icl", "bic" (no price for overlap: truly Gaussian, close groups), "random_effects"
        (clients' copies of a centre scatter) or "given" (cut at `k_given`).
    tolerance, k_min
        See `ward_path`.

    >>> one, two = np.array([[0.0], [3.58]]), np.array([[0.0], [3.60]])
    >>> n, variance, clients = np.array([100.0, 100.0]), np.ones(2), np.array([0, 1])
    >>> merge(n, one, variance, clients).labels, merge(n, two, variance, clients).labels
    (array([0, 0]), array([0, 1]))
    """
    centres, variance = whitened(n, centres, variance)
    if criterion == "random_effects":
        return _random_effects(n, centres, variance, clients, tolerance, k_min)
    path = ward_path(n, centres, clients, tolerance, k_min if criterion != "given" else 1)
    values = _criterion_along(path, n, centres, variance, entropy=criterion != "bic")
    curve = _curve(path, len(n), values)
    if criterion == "given":
        assert k_given is not None
        best = int(np.abs(curve[:, 0] - k_given).argmin())
    else:
        best = int(values.argmin())
    others = np.delete(values, best)
    gap = float(others.min() - values[best]) if len(others) else float("inf")
    return Merged(cut(path, len(n), best), curve, gap)


def _curve(path: Path, count: int, values: Array) -> Array:
    groups = count - np.arange(len(values), dtype=float)
    return np.stack([groups, values, np.concatenate([[0.0], path.costs])], 1)


def fewest(clients: Labels, tolerance: float) -> int:
    """Groups there must be: as many as a client has components, unless they may merge freely."""
    return int(np.bincount(clients).max()) if tolerance < 1 else 1


def whitened(n: Array, centres: Array, variance: Array) -> tuple[Array, Array]:
    """Units in which the mean covariance within components is one, so that Ward costs compare."""
    centres = centres - np.average(centres, axis=0, weights=n)
    if variance.ndim == 1:
        return centres, variance
    within = np.average(variance, axis=0, weights=n)
    if variance.ndim == 2:
        scale = np.sqrt(within)
        return centres / scale, variance / within
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    return centres @ inverse.T, inverse @ variance @ inverse.T


def _criterion_along(path: Path, n: Array, centres: Array, variance: Array, entropy: bool) -> Array:
    """ICL (or BIC, without the entropy of memberships) before and after every merge."""
    c, d = centres.shape
    total = n.sum()
    free = {1: 1, 2: d, 3: d * (d + 1) // 2}[variance.ndim]
    per_feature = {1: lambda v: v, 2: lambda v: v.mean(1), 3: lambda v: _diagonals(v).mean(1)}
    pooled = float(np.average(per_feature[variance.ndim](variance), weights=n))
    pooled += float((n[:, None] * centres**2).sum() / (d * total))
    floor = FLOOR * pooled + 1e-300
    size = n.astype(float).copy()
    mu = centres.copy()
    shape = (slice(None), *(None,) * (variance.ndim - 1))
    scatter = variance * size[shape] * (d if variance.ndim == 1 else 1)
    terms = [_term(size[a], scatter[a], d, floor, entropy) for a in range(c)]
    value = float(np.sum(terms)) + c * (d + free) * np.log(total)
    values = [value]
    for a, b in path.joins:
        gap = mu[b] - mu[a]
        weight = size[a] * size[b] / (size[a] + size[b])
        between = {1: gap @ gap, 2: gap * gap}.get(variance.ndim)
        scatter[a] += scatter[b] + weight * (np.outer(gap, gap) if between is None else between)
        mu[a] += size[b] / (size[a] + size[b]) * gap
        size[a] += size[b]
        joined = _term(size[a], scatter[a], d, floor, entropy)
        value += joined - terms[a] - terms[b] - (d + free) * np.log(total)
        terms[a] = joined
        values.append(value)
    return np.array(values)


def _diagonals(matrices: Array) -> Array:
    return np.diagonal(matrices, axis1=1, axis2=2)


def _term(n: float, scatter: Array, d: int, floor: float, entropy: bool) -> float:
    """-2 log-likelihood of a group, and twice the code length of its memberships."""
    if np.ndim(scatter) == 0:
        fit = d * n * np.log(max(float(scatter) / (d * n), floor))
    elif np.ndim(scatter) == 1:
        fit = n * np.log(np.maximum(scatter / n, floor)).sum()
    else:
        fit = n * np.linalg.slogdet(scatter / n + floor * np.eye(d))[1]
    return float(fit - 2 * n * np.log(n)) if entropy else float(fit)


def _random_effects(
    n: Array, centres: Array, variance: Array, clients: Labels, tolerance: float, k_min: int
) -> Merged:
    """The best of Ward paths that allow clients' copies of a centre to scatter more and more."""
    c, d = centres.shape
    mean = {1: lambda v: v, 2: lambda v: v.mean(1), 3: lambda v: _diagonals(v).mean(1)}
    within = float(np.average(mean[variance.ndim](variance), weights=n))
    most = float(centres.var(0).mean())
    smallest = min(within / n.max(), most) / 100 if most > 0 else 0.0
    shifts = [0.0, *(np.geomspace(smallest, most, 16) if smallest > 0 else [])]
    best: tuple[float, Merged] | None = None
    for shift in shifts:
        spread = within / n + shift
        mass = 1 / spread
        path = ward_path(mass, centres, clients, tolerance, k_min)
        start = d * float(np.log(spread).sum()) + c * (d + 1) * np.log(c)
        size, values = np.ones(c), [start]
        for (a, b), cost in zip(path.joins, path.costs.tolist(), strict=True):
            both = size[a] + size[b]
            entropy = both * np.log(both) - size[a] * np.log(size[a]) - size[b] * np.log(size[b])
            values.append(values[-1] + cost - 2 * entropy - (d + 1) * np.log(c))
            size[a] = both
        curve = _curve(path, c, np.array(values))
        chosen = int(np.argmin(values))
        if best is None or values[chosen] < best[0]:
            others = np.delete(np.array(values), chosen)
            gap = float(others.min() - values[chosen]) if len(others) else float("inf")
            found = Merged(cut(path, c, chosen), curve, gap, float(np.sqrt(shift)))
            best = values[chosen], found
    assert best is not None
    return best[1]


# what the criterion says


def effective_radii(n: Array, variance: float, d: int, entropy: bool = True) -> Array:
    """Radii at which the criterion acts: half the distance at which a component and a twin merge.

    With one variance, ICL merges A and B iff their squared distance is at most
    s2 (1/n_A + 1/n_B) [(d + 1) log N + 2 h]; for equal counts h = 2 n log 2.
    """
    price = (d + 1) * np.log(max(n.sum(), 1.0))
    real = np.maximum(n, 1e-12)
    twice = 4 * real * np.log(2.0) if entropy else 0.0
    return np.where(n > 0, np.sqrt(variance / (2 * real) * (price + twice)), -1.0)


def resolution(d: int) -> float:
    """Distance, in standard deviations, below which ICL sees two equal large groups as one.

    >>> [round(resolution(d), 3) for d in (1, 2, 4, 10)]
    [3.464, 2.828, 2.574, 2.439]
    """
    return float(2 * np.sqrt(d * (4 ** (1 / d) - 1)))


def near_best(curve: Array, within: float = 10.0) -> list[int]:
    """Numbers of groups almost as good as the best: with more than one, K is not determined."""
    best = curve[:, 1].min()
    return sorted({int(k) for k, value, _ in curve if value - best <= within})


def evidence(curve: Array, criterion: str) -> list[Curve]:
    """The path of a criterion for reports; empty where there is none, or the number was given."""
    if criterion == "given" or not len(curve):
        return []
    path = {int(k): float(value) for k, value, _ in curve}
    best, *rest = sorted(path, key=lambda k: (path[k], k))
    close = tuple(k for k in near_best(curve) if k != best)
    ks = tuple(k for k in sorted(path) if k <= max(40, best + 5))
    values, second = tuple(path[k] for k in ks), rest[0] if rest else None
    return [Curve("components", criterion, ks, values, best, second, close)]
