"""From the components of many clients to the groups they are copies of.

Two parts. Balls: which uncertainty balls overlap, which components hang together, and where each
centre goes. Merging: a path of Ward merges on summaries (count, centre, variance), and a criterion
that says where on the path to stop. A group holds at most one component of a client, up to a
tolerance. Everything is float64 NumPy on the server; no sample is ever seen here.
"""

import heapq
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.stats import chi2

Array: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]
Criterion: TypeAlias = Literal["icl", "bic", "random_effects", "overlap", "given"]

TREE_DIMENSIONS = 16  # above, a KD-tree is no faster than all distances
DENSE = 600  # up to so many components, all pairs are candidates
NEIGHBOURS = 16  # above, each component's nearest ones
FLOOR = 1e-12  # of the pooled variance: no group has a smaller one


# balls


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


# merging


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
    centres, variance = _whitened(n, centres, variance)
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


def _whitened(n: Array, centres: Array, variance: Array) -> tuple[Array, Array]:
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


# radii of the final rule


def effective_radii(n: Array, variance: float, d: int, entropy: bool = True) -> Array:
    """Radii at which the criterion acts: half the distance at which a component and a twin merge.

    With one variance, ICL merges A and B iff their squared distance is at most
    s2 (1/n_A + 1/n_B) [(d + 1) log N + 2 h]; for equal counts h = 2 n log 2.
    """
    price = (d + 1) * np.log(max(n.sum(), 1.0))
    real = np.maximum(n, 1e-12)
    twice = 4 * real * np.log(2.0) if entropy else 0.0
    return np.where(n > 0, np.sqrt(variance / (2 * real) * (price + twice)), -1.0)


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
