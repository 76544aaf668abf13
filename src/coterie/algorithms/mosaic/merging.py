"""Merge the components of many clients into groups, and choose the number of groups.

Ward merges of summaries (count, centre, variance) form a path, and a criterion decides where on the
path to stop. A group has at most one component of each client, up to a tolerance. There are two
exceptions. A group that no client has without a certain other group may be a piece of it, and is
merged into it. Two groups may be distant copies of one group if no client has both. Everything is
float64 NumPy on the server; samples are not used here.
"""

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.stats import chi2

from coterie.algorithms.mosaic.pooling import mean_variance, means
from coterie.clustering.arrays import Array, Labels
from coterie.clustering.ward import (
    NEIGHBOURS,
    TOLERANCE,
    Path,
    cut,
    holder_bits,
    neighbourhoods,
    ward_path,
)
from coterie.core.algorithm import Curve

Criterion: TypeAlias = Literal["icl", "bic"]

FLOOR = 1e-12  # smallest variance of a group, as a part of the pooled variance
SURE = 0.99  # confidence of the lower bound on the scatter of clients' copies


class Merged(NamedTuple):
    """A partition of the components and how it was chosen."""

    labels: Labels  # [c]
    curve: Array  # [p, 3]  number of groups, criterion, Ward cost of the merge that led there
    gap: float  # criterion of the best other number of groups minus that of the chosen one


def merge(
    n: Array,
    centres: Array,
    variance: Array,
    clients: Labels,
    criterion: Criterion = "icl",
    tolerance: float = TOLERANCE,
    k_min: int = 1,
    k_given: int | None = None,
) -> Merged:
    """Find which components of all clients belong together, and the number of groups.

    Parameters
    ----------
    n, centres, variance
        Count [c], centre [c, d] and variance of each component: [c] spherical, [c, d] diagonal or
        [c, d, d] full.
    clients
        Client of each component. [c]
    criterion
        "icl", or "bic" (no penalty for overlap: for groups that are really Gaussian and close).
    tolerance, k_min
        See `ward_path`.
    k_given
        Number of groups, if it is known; the path is cut there.

    >>> one, two = np.array([[0.0], [3.58]]), np.array([[0.0], [3.60]])
    >>> n, variance, clients = np.array([100.0, 100.0]), np.ones(2), np.array([0, 1])
    >>> merge(n, one, variance, clients).labels, merge(n, two, variance, clients).labels
    (array([0, 0]), array([0, 1]))
    """
    centres, variance = whiten(n, centres, variance)
    k_min = k_min if k_given is None else 1
    path, values = merge_path(n, centres, variance, clients, criterion, tolerance, k_min)
    groups = len(n) - np.arange(len(values), dtype=float)
    curve = np.stack([groups, values, np.concatenate([[0.0], path.costs])], 1)
    best = int(values.argmin() if k_given is None else np.abs(groups - k_given).argmin())
    others = np.delete(values, best)
    gap = float(others.min() - values[best]) if len(others) else float("inf")
    return Merged(cut(path, len(n), best), curve, gap)


def merge_path(
    n: Array,
    centres: Array,
    variance: Array,
    clients: Labels,
    criterion: Criterion = "icl",
    tolerance: float = TOLERANCE,
    k_min: int = 1,
) -> tuple[Path, Array]:
    """All merges, and the criterion before and after each; `centres`, `variance` are whitened.

    Three steps:

    1. Ward merges of allowed pairs; the criterion is best somewhere on this path.
    2. From there, copies of one centre join (see `_copy_joins`). Copies of a group at different
       clients may lie so far apart that their samples look like two groups. Two groups can only be
       copies if no client has both.
    3. If there are no copies, nested groups join (see `_nested_joins`). If a client's number of
       components is too large, it cuts one cluster into pieces, and no client has the small piece
       without the large one. Skipped with tolerance 0 (never allowed) and 1 (allowed in step 1).

    After step 2 or 3 the Ward merges continue, until neither step applies. Under BIC, where
    components may be groups that are close together, only step 1 is taken.
    """
    path = ward_path(n, centres, holder_bits(clients), tolerance, k_min)
    copied: dict[int, float] = {}  # change of the criterion, by the copy that joined another group
    while True:
        tally = _Tally(n, centres, variance, clients, entropy=criterion != "bic")
        joined = (tally.join(a, b, copied.get(b)) for a, b in path.joins)
        values = np.array([tally.value, *joined])
        if criterion == "bic":
            return path, values
        best = int(values.argmin())
        tally = _Tally(n, centres, variance, clients, entropy=True)
        for a, b in path.joins[:best]:
            tally.join(a, b, copied.get(b))
        labels = cut(path, len(n), best)
        found = _copy_joins(n, centres, mean_variance(n, variance), clients, labels)
        copied |= {gone: change for (_, gone), change in found.items()}
        late = _carry_out(tally, [*found])
        if not found and 0 < tolerance < 1:
            late = _nested_joins(tally)
        if not late.joins:
            return path, values
        left = sorted(tally.alive)
        holders = [tally.holders[a] for a in left]
        rest = ward_path(tally.size[left], tally.mu[left], holders, tolerance, k_min)
        later = [(left[a], left[b]) for a, b in rest.joins]
        joins = [*path.joins[:best], *late.joins, *later]
        path = Path(joins, np.concatenate([path.costs[:best], late.costs, rest.costs]))


def _carry_out(tally: "_Tally", joins: list[tuple[int, int]]) -> Path:
    """Make these joins in the tally; return them with their Ward costs."""
    costs = []
    for pair in joins:
        costs.append(tally.cost(*pair))
        tally.join(*pair)
    return Path(joins, np.array(costs))


def _nested_joins(tally: "_Tally") -> Path:
    """Joins of groups that no client has without a certain other group.

    Each join must lower the criterion by the price of a component: in case of doubt, the components
    of a client stay apart. Two components of a single client never join here.
    """
    joins, costs, changes = [], [], {}
    for a in tally.alive:
        changes.update(tally.nested(a))
    while changes:
        a, b = min(changes, key=lambda pair: (changes[pair], pair))
        if changes[a, b] > -tally.price:
            break
        joins.append((a, b))
        costs.append(tally.cost(a, b))
        tally.join(a, b)
        kept = {pair: change for pair, change in changes.items() if not {a, b} & {*pair}}
        changes = kept | tally.nested(a)
    return Path(joins, np.array(costs))


def _copy_joins(
    n: Array, centres: Array, within: float, clients: Labels, labels: Labels
) -> dict[tuple[int, int], float]:
    """Joins of groups that are copies of one centre, and the change of the criterion by each.

    Copies of a centre mu are assumed to follow N(mu, (s2 / n + t2) I). With c components in all, m
    copies in each group and summed precisions w, a join changes the criterion by

        |mu_A - mu_B|^2 / (1 / w_A + 1 / w_B) - 2 h - (d + 1) log c,
        h = (m_A + m_B) log(m_A + m_B) - m_A log m_A - m_B log m_B.

    t2 is a lower bound (at confidence `SURE`) on the scatter of copies within groups that their
    counts do not explain. A join is named by the first component of each group. Two groups that one
    client has both of are never copies.
    """
    found: dict[tuple[int, int], float] = {}
    while joins := _nearest_copies(n, centres, within, clients, labels):
        for kept, gone in joins:
            labels = np.where(labels == labels[gone], labels[kept], labels)
        labels = np.unique(labels, return_inverse=True)[1]
        found |= joins
    return found


def _nearest_copies(
    n: Array, centres: Array, within: float, clients: Labels, labels: Labels
) -> dict[tuple[int, int], float]:
    """The best joins of copies; each group is in at most one join."""
    pairs, copy = np.unique(np.stack([labels, clients], 1), axis=0, return_inverse=True)
    group, owner = pairs.T  # a client's components in a group are one copy
    m, d = np.bincount(group).astype(float), centres.shape[1]
    free = d * (m - 1).sum()
    if not (free and within > 0 and len(m) > 1):
        return {}
    mean, noise = means(n, centres, copy), within / np.bincount(copy, n)
    apart = mean - means(np.ones(len(mean)), mean, group)[group]
    explained = d * (np.bincount(group, noise) * (1 - 1 / m)).sum()
    scatter = max((apart**2).sum() / chi2.ppf(SURE, free) - explained / free, 0.0)
    precision = 1 / (noise + scatter)
    w, mu = np.bincount(group, precision), means(precision, mean, group)
    near = neighbourhoods(mu, [*range(len(m))], NEIGHBOURS)
    a, b = np.array([(one, other) for one in near for other in near[one] if one < other]).T
    squared = ((mu[a] - mu[b]) ** 2).sum(1) / (1 / w[a] + 1 / w[b])
    change = squared - 2 * _label_cost(m[a], m[b]) - (d + 1) * np.log(len(n))
    held = [{*owner[group == k].tolist()} for k in range(len(m))]
    first = np.unique(labels, return_index=True)[1].tolist()  # component of each group
    found, changed = {}, set[int]()
    less = change < 0
    for value, one, other in sorted(zip(change[less], a[less], b[less], strict=True)):
        if not changed & {one, other} and not held[one] & held[other]:
            changed |= {one, other}
            kept, gone = sorted((first[one], first[other]))
            found[kept, gone] = float(value)
    return found


def _label_cost(a: Array, b: Array) -> Array:
    """Nats needed to state the group of each member of two groups of these sizes."""
    apart: Array = (a + b) * np.log(a + b) - a * np.log(a) - b * np.log(b)
    return apart


def fewest(clients: Labels, tolerance: float) -> int:
    """Smallest number of groups allowed: the most components of a client; 1 if these may merge."""
    return int(np.bincount(clients).max()) if tolerance < 1 else 1


def whiten(n: Array, centres: Array, variance: Array) -> tuple[Array, Array]:
    """Change to units in which the mean covariance within components is the identity."""
    centres = centres - np.average(centres, axis=0, weights=n)
    if variance.ndim == 1:
        return centres, variance
    within = np.average(variance, axis=0, weights=n)
    if variance.ndim == 2:
        scale = np.sqrt(within)
        return centres / scale, variance / within
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    return centres @ inverse.T, inverse @ variance @ inverse.T


class _Tally:
    """Groups at one point of a path: counts, centres, scatter, clients, and the criterion.

    The criterion is ICL; without the entropy of the memberships it is BIC.
    """

    def __init__(self, n: Array, centres: Array, variance: Array, clients: Labels, entropy: bool):
        c, d = centres.shape
        free = {1: 1, 2: d, 3: d * (d + 1) // 2}[variance.ndim]
        pooled = mean_variance(n, variance) + float((n[:, None] * centres**2).sum() / (d * n.sum()))
        self.floor, self.entropy, self.d = FLOOR * pooled + 1e-300, entropy, d
        self.price = (d + free) * np.log(n.sum())
        self.size, self.mu = n.astype(float), centres.copy()
        shape = (slice(None), *(None,) * (variance.ndim - 1))
        self.scatter = variance * self.size[shape] * (d if variance.ndim == 1 else 1)
        self.holders = holder_bits(clients)
        self.alive = set(range(c))
        self.terms = [self._term(n, scatter) for n, scatter in zip(n, self.scatter, strict=True)]
        self.value = float(np.sum(self.terms)) + c * self.price

    def cost(self, a: int, b: int) -> float:
        """Ward cost of a join."""
        gap = self.mu[b] - self.mu[a]
        return float(self.size[a] * self.size[b] / (self.size[a] + self.size[b]) * (gap @ gap))

    def union(self, a: int, b: int) -> tuple[Array, float]:
        """Scatter and criterion term of the union of two groups."""
        gap, both = self.mu[b] - self.mu[a], self.size[a] + self.size[b]
        between = {0: gap @ gap, 1: gap * gap}.get(np.ndim(self.scatter[a]))
        between = np.outer(gap, gap) if between is None else between
        scatter = self.scatter[a] + self.scatter[b] + self.size[a] * self.size[b] / both * between
        return scatter, self._term(both, scatter)

    def change(self, a: int, b: int) -> float:
        """Change of the criterion by a join."""
        return float(self.union(a, b)[1] - self.terms[a] - self.terms[b] - self.price)

    def join(self, a: int, b: int, change: float | None = None) -> float:
        """Join b to a; return the new criterion. `change` replaces the computed change."""
        scatter, term = self.union(a, b)
        if change is None:
            change = term - self.terms[a] - self.terms[b] - self.price
        self.value += change
        self.scatter[a], self.terms[a] = scatter, term
        self.mu[a] += self.size[b] / (self.size[a] + self.size[b]) * (self.mu[b] - self.mu[a])
        self.size[a] += self.size[b]
        self.holders[a] |= self.holders[b]
        self.alive.discard(b)
        return float(self.value)

    def nested(self, a: int) -> dict[tuple[int, int], float]:
        """Pairs of a and a group that has all clients of a, or the reverse; change by each join."""
        own, pairs = self.holders[a], []
        for b in self.alive - {a}:
            both = own & self.holders[b]
            if both in (own, self.holders[b]) and (own | self.holders[b]).bit_count() > 1:
                pairs.append((min(a, b), max(a, b)))
        return {pair: self.change(*pair) for pair in pairs}

    def _term(self, n: float, scatter: Array) -> float:
        """-2 log-likelihood of a group, and twice the code length of its memberships."""
        if np.ndim(scatter) == 0:
            fit = self.d * n * np.log(max(float(scatter) / (self.d * n), self.floor))
        elif np.ndim(scatter) == 1:
            fit = n * np.log(np.maximum(scatter / n, self.floor)).sum()
        else:
            fit = n * np.linalg.slogdet(scatter / n + self.floor * np.eye(self.d))[1]
        return float(fit - 2 * n * np.log(n)) if self.entropy else float(fit)


# for reports


def near_best(curve: Array, within: float = 10.0) -> list[int]:
    """Numbers of groups almost as good as the best; if there are several, K is uncertain."""
    best = curve[:, 1].min()
    return sorted({int(k) for k, value, _ in curve if value - best <= within})


def evidence(curve: Array, criterion: str) -> list[Curve]:
    """The path of a criterion for reports; empty before the first merge."""
    if not len(curve):
        return []
    path = {int(k): float(value) for k, value, _ in curve}
    best, *rest = sorted(path, key=lambda k: (path[k], k))
    close = tuple(k for k in near_best(curve) if k != best)
    ks = tuple(k for k in sorted(path) if k <= max(40, best + 5))
    values, second = tuple(path[k] for k in ks), rest[0] if rest else None
    return [Curve("components", criterion, ks, values, best, second, close)]
