"""Groups of clients whose rows differ by no more than their noise, and how many there are.

A row holds a client's measurements in units of their noise: entry d of a client with weight W_d has
variance 1 / W_d around its group's mean (W_d = 0: not measured). Two sets of clients A and B that
are one raise the within-group chi-square by

    sum_d W_Ad W_Bd / (W_Ad + W_Bd) (X_Ad - X_Bd)^2,

and the pair with the smallest rise is merged first: Ward's criterion with a weight for every entry.
The chi-square left at k groups, over its degrees of freedom, is the *noise ratio*: 1 where clients
of a group differ by noise alone. The smallest k that gets there is the number of groups, and k = 1
is as good an answer as any other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from torch import Tensor

from coterie.clustering.labels import relabel
from coterie.core.algorithm import Curve

CLIFF = 1.5
"""Fall of the noise ratio from k - 1 to k groups from which on k is clear: true numbers of groups
fell by 1.6 and more in 27 of 28 measured runs."""

TREE_ROWS = 5_000  # 1.25e7 pairs, and a few seconds

STRANGERS = 1e300  # cost of a pair without a common column: merged last, and then for nothing

Array = NDArray[np.float64]


class Ward(NamedTuple):
    """A tree of merges. Rows beyond 5,000 join the nearest group of a sample."""

    x: Tensor  # [m, d]
    weight: Tensor  # [m, d]
    rows: Tensor  # [s]  the rows the tree is built on: all, or a sample of them
    pairs: Tensor  # [s - 1, 2]  set j joins set i < j, each named by its first row, as merged
    cost: Tensor  # [s - 1]  rise of the chi-square by each merge
    ratio: Tensor  # [s]  noise ratio at k = 1, 2, ..., s groups; nan where nothing is left to tell

    def labels(self, k: int) -> Tensor:
        """Group of each row when the tree is cut at k groups, numbered by smallest member: [m].

        >>> points = torch.tensor([[5.0], [0.0], [1.0], [5.5]])
        >>> weighted_ward(points, torch.ones(4, 1)).labels(2)
        tensor([0, 1, 1, 0])
        """
        s = len(self.rows)
        node = torch.arange(s)
        for i, j in self.pairs[: s - max(1, min(k, s))].tolist():
            node[node == j] = i
        labels = relabel(node)
        if s == len(self.x):
            return labels
        means, weight = pooled(self.x[self.rows], self.weight[self.rows], labels)
        groups = zip(means, weight, strict=True)
        cost = torch.stack([between(self.x, self.weight, *one) for one in groups], 1)
        nearest = cost.argmin(1)
        nearest[self.rows] = labels
        return relabel(nearest)


def weighted_ward(x: Tensor, weight: Tensor) -> Ward:
    """Merge the pair that adds least to the within-group chi-square, until one group remains.

    Ties go to the pair with the smallest rows. A pair without a common column says nothing about
    each other and is merged last. With equal weights this is Ward's method. Time and memory grow
    with the square of the rows, so above 5,000 rows the tree is built on 5,000 of them, drawn with
    a fixed seed.

    Parameters
    ----------
    x : shape [m, d]; what stands in an entry of weight 0 does not matter.
    weight : shape [m, d], or [m, 1] where all columns weigh alike; not negative.

    Examples
    --------
    >>> tree = weighted_ward(torch.tensor([[-1.1], [-0.9], [0.9], [1.1]]), torch.ones(4, 1))
    >>> [round(ratio, 4) for ratio in tree.ratio.tolist()]  # 4.04 / 3, .04 / 2, .02 / 1
    [1.3467, 0.02, 0.02, nan]
    """
    weight = weight.double().expand(x.shape)
    x = torch.where(weight > 0, x.double(), 0.0)
    m, rows = len(x), torch.arange(len(x))
    if m > TREE_ROWS:
        draw = torch.randperm(m, generator=torch.Generator().manual_seed(0))
        rows = draw[:TREE_ROWS].sort().values
    used = weight.any(0)
    pairs, cost, common = _merge(x[rows][:, used].numpy(), weight[rows][:, used].numpy())
    chi, free = cost.cumsum(0).flip(0), common.cumsum(0).flip(0)  # of 1, 2, ..., s - 1 groups
    ratio = torch.where(free > 0, chi / free.clamp(min=1), torch.nan)
    last = torch.full((min(len(rows), 1),), torch.nan, dtype=torch.float64)
    return Ward(x, weight, rows, pairs, cost, torch.cat([ratio, last]))


def _merge(x: Array, weight: Array) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in the order they are merged, the cost of each, and its number of common columns."""
    m = len(x)
    # Columns with the same weights for all rows count together: one block of distances for each.
    if x.shape[1]:
        shares, block = np.unique(weight, axis=1, return_inverse=True)
    else:
        shares, block = np.zeros((m, 0)), np.zeros(0, dtype=int)
    member = np.eye(shares.shape[1])[block.ravel()]  # [d, g]
    columns = member.sum(0)
    cost = np.full((m, m), np.inf)  # above the diagonal; inf: merged away
    for i in range(m - 1):
        cost[i, i + 1 :] = _rises(x[i], shares[i], x[i + 1 :], shares[i + 1 :], member, columns)
    best = cost.argmin(1)  # of each row, the first of the cheapest partners
    least = cost[np.arange(m), best]
    alive = np.ones(m, dtype=bool)
    pairs, costs, common = [], [], []
    for _ in range(m - 1):
        i = int(least.argmin())
        j = int(best[i])
        both = (shares[i] > 0) & (shares[j] > 0)
        pairs.append((i, j))
        costs.append(0.0 if least[i] >= STRANGERS else float(least[i]))
        common.append(float(columns[both].sum()))
        total = shares[i] + shares[j]
        part = np.divide(shares[j], total, out=np.zeros_like(total), where=total > 0)
        x[i] += (member @ part) * (x[j] - x[i])
        shares[i] = total
        alive[j] = False
        cost[j, :] = cost[:, j] = np.inf
        least[j] = np.inf
        others = np.flatnonzero(alive)
        others = others[others != i]
        rise = _rises(x[i], shares[i], x[others], shares[others], member, columns)
        lower = others < i
        cost[others[lower], i] = rise[lower]
        cost[i, others[~lower]] = rise[~lower]
        before = others[lower]
        cheaper = rise[lower] < least[before]
        tied = (rise[lower] == least[before]) & (i < best[before])
        best[before[cheaper | tied]] = i
        least[before[cheaper | tied]] = rise[lower][cheaper | tied]
        # Sets whose best partner was one of the two look for another; so does the new set.
        stale = np.append(np.flatnonzero(alive & ((best == i) | (best == j))), i)
        best[stale] = cost[stale].argmin(1)
        least[stale] = cost[stale, best[stale]]
    return (
        torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(costs, dtype=torch.float64),
        torch.tensor(common, dtype=torch.float64),
    )


def _rises(
    x: Array, share: Array, others: Array, shares: Array, member: Array, columns: Array
) -> Array:
    """Cost of merging one set with each of some others: [m]."""
    square = (others - x) ** 2
    if member.shape[1] == 1:
        square = square.sum(1, keepdims=True)
    else:
        square = square @ member  # [m, g]
    total = shares + share
    weight = np.divide(shares * share, total, out=np.zeros_like(total), where=total > 0)
    rise: Array = (weight * square).sum(1)
    rise[~(((shares > 0) & (share > 0)) @ columns > 0)] = STRANGERS
    return rise


def pooled(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and total weight of each group's rows, column by column: [k, d] each.

    >>> x, weight = torch.tensor([[0.0], [4.0]]), torch.tensor([[3.0], [1.0]])
    >>> pooled(x, weight, torch.tensor([0, 0]))[0]
    tensor([[1.]], dtype=torch.float64)
    """
    k = int(labels.max()) + 1
    total = torch.zeros(k, x.shape[1], dtype=torch.float64).index_add_(0, labels, weight.double())
    sums = torch.zeros_like(total).index_add_(0, labels, weight.double() * x.double())
    return torch.where(total > 0, sums / total.clamp(min=1e-300), 0.0), total


def between(x: Tensor, weight: Tensor, mean: Tensor, total: Tensor) -> Tensor:
    """Mean squared distance of rows from a group in units of noise, over common columns: [m].

    1 is expected of a row that belongs to the group and is not part of it; inf where there is no
    common column. This is the statistic by which newcomers are placed.

    >>> row, weight = torch.tensor([[3.0]]), torch.tensor([[1.0]])
    >>> between(row, weight, torch.tensor([1.0]), torch.tensor([1.0]))  # 2 squared / (1 + 1)
    tensor([2.], dtype=torch.float64)
    """
    both = (weight > 0) & (total > 0)  # [m, d]
    precision = torch.where(both, weight * total / (weight + total).clamp(min=1e-300), 0.0)
    square = (precision * (x - mean) ** 2).double().sum(1)
    return torch.where(both.any(1), square / both.sum(1).clamp(min=1), torch.inf)


def distances(x: Tensor, weight: Tensor) -> Tensor:
    """Root of the mean squared distance between rows in units of noise: [m, m].

    Pairs without a common column stand as far apart as the farthest of the others.

    >>> distances(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))  # 4 / (1 + 1)
    tensor([[0.0000, 1.4142],
            [1.4142, 0.0000]], dtype=torch.float64)
    """
    weight = weight.double().expand(x.shape)
    x = torch.where(weight > 0, x.double(), 0.0)
    if bool((weight == weight[:, :1]).all()):
        share = weight[:, :1]
        square = torch.from_numpy(cdist(x.numpy(), x.numpy(), "sqeuclidean")) / x.shape[1]
        square = square * share * share.mT / (share + share.mT).clamp(min=1e-300)
    else:
        square = torch.stack([between(x, weight, *one) for one in zip(x, weight, strict=True)])
    finite = square[square.isfinite()]
    most = float(finite.max()) if len(finite) else 0.0
    return square.clamp(max=most).fill_diagonal_(0.0).sqrt()


class Choice(NamedTuple):
    """A number of groups, and what else it might have been."""

    k: int | None  # None: no number up to the limit brings the ratio down to the threshold
    ratio: tuple[float, ...]  # the curve: noise ratio at 1, 2, ..., limit groups
    threshold: tuple[float, ...]  # what it may be at each
    runner_up: int | None  # the neighbour that a slightly different threshold would have chosen
    clear: bool  # the ratio falls by half or more from k - 1 to k; True at k = 1
    close: tuple[int, ...]  # numbers not distinguishable from k at this number of samples


def choose_by_noise(ratio: Tensor, limit: int, threshold: float | Sequence[float]) -> Choice:
    """The smallest number of groups whose noise ratio is at most a threshold.

    What lies above 1 grows in proportion to the number of samples. So k + 1 is not distinguishable
    from k where twice the samples would lift the ratio at k over the threshold, and a smaller
    number is not where the ratio falls by less than a third from there to k (no clear cliff).

    Parameters
    ----------
    ratio : shape [m], of k = 1, 2, ..., m groups.
    limit : the largest number considered; at most m - 1, where there is something left to compare.
    threshold : 2.5 for losses of trained networks; or one for each number of groups.

    Examples
    --------
    >>> choose_by_noise(torch.tensor([20.0, 8.0, 1.05, 1.0]), limit=10, threshold=1.3)[:1]
    (3,)
    >>> choose_by_noise(torch.tensor([20.0, 8.0, 5.0, torch.nan]), 10, threshold=1.3).k is None
    True
    """
    limit = max(1, min(limit, len(ratio) - 1))
    curve = tuple(float(value) for value in ratio[:limit])
    most = (threshold,) * limit if isinstance(threshold, float | int) else tuple(threshold)[:limit]
    if np.isnan(curve[0]):  # one row, or no column in common: nothing tells rows apart
        return Choice(1, curve, most, None, True, ())
    k = next((i + 1 for i, value in enumerate(curve) if value <= most[i]), None)
    if k is None:
        return Choice(None, curve, most, limit, False, ())
    own = max(curve[k - 1], 1e-12)
    close = [j + 1 for j in range(k - 1) if curve[j] < CLIFF * own]
    clear = k == 1 or not curve[k - 2] < CLIFF * own
    if own > (1 + most[k - 1]) / 2 and k < limit:
        close.append(k + 1)
    fewer = curve[k - 2] / most[k - 2] if k > 1 else np.inf  # how far a threshold would have to go
    more = most[k - 1] / own if k < limit else np.inf
    runner_up = None if np.isinf(min(fewer, more)) else (k - 1 if fewer <= more else k + 1)
    return Choice(k, curve, most, runner_up, clear, tuple(close))


def curve(choice: Choice, name: str, decides: bool = True, note: str = "") -> Curve:
    """A choice as evidence for reports.

    >>> curve(choose_by_noise(torch.tensor([9.0, 1.0, 0.9]), 10, 1.3), "losses").chosen
    2
    """
    ks = tuple(range(1, len(choice.ratio) + 1))
    if choice.k is None:
        note = note or f"no number up to {ks[-1]} brings clients of a group down to their noise"
    elif not choice.clear:
        note = note or "no clear cliff: too few samples, or clients that differ one by one"
    found = choice.k, choice.runner_up, choice.close, choice.threshold
    return Curve(name, "noise ratio", ks, choice.ratio, *found, decides, note)
