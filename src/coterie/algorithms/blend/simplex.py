"""Components from clients' mean features: their number, the purest clients, initial shares.

The mean of any feature of a mixture is the mixture of the components' means, so the means of all
clients lie in a simplex whose corners are the components. Its dimension is found by comparing
eigenvalues with those of clients that differ by chance only. Its corners are approximated by the
purest clients, and the barycentric coordinates of a client are its initial shares.
"""

import math
from typing import NamedTuple

import torch
from scipy.stats import gamma
from torch import Tensor

LEVERAGE = 0.5  # a client that contributes more than this to a direction is an outlier
FEW = 10  # with fewer clients, an ordinary client may contribute that much


class Spectrum(NamedTuple):
    """The directions in which clients differ. All float64."""

    centre: Tensor  # [d]  mean of all clients
    root: Tensor  # [d, r]  whitening: differences in units of the scatter of a sample
    axes: Tensor  # [r, r]  directions in which clients differ, the strongest first
    eigenvalues: Tensor  # [r]  about 1 if clients differ by chance only
    points: Tensor  # [m, r]  coordinates of the clients on these axes


def spectrum(means: Tensor, n: Tensor, within: Tensor, most: int | None = None) -> Spectrum:
    """Directions in which clients differ, relative to the noise of their means.

    Parameters
    ----------
    means, n
        Mean feature of each client [m, d], and its number of samples [m].
    within
        Covariance of a sample around its client's mean. [d, d]
    most
        Largest number of directions; those in which samples vary most are kept.
    """
    means, n, within = means.double(), n.double(), within.double()
    values, vectors = torch.linalg.eigh(within)
    kept = values > 1e-6 * values.max()
    d, m = min(int(kept.sum()), most or len(values)), len(means)
    if m < d + 2:  # too few clients for all directions: use the leading ones
        d = min(d, max(4, m // 2), max(m - 2, 1))
    values, vectors = values.flip(0)[:d], _fix_signs(vectors.flip(1)[:, :d])
    root = vectors / values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    centre = (n[:, None] * means).sum(0) / n.sum()
    points = (means - centre) @ root
    u = n.sqrt()[:, None] * points
    eigenvalues, axes = torch.linalg.eigh(u.T @ u / max(m - 1, 1))
    axes = _fix_signs(axes.flip(1))
    return Spectrum(centre, root, axes, eigenvalues.flip(0), points @ axes)


def _fix_signs(vectors: Tensor) -> Tensor:
    """Make the largest entry of each column positive, so that all machines give the same signs."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    return vectors * signs


def null_point(m: int, d: int, level: float = 0.99) -> float:
    """Quantile of the largest eigenvalue for m clients that differ by chance in d directions.

    The largest eigenvalue of a Wishart matrix, centred and scaled after Johnstone (Annals of
    Statistics, 2001), approximately follows the law of Tracy and Widom, which is approximated by a
    shifted gamma distribution (Chiani, Journal of Multivariate Analysis, 2014).

    >>> round(null_point(50, 16), 2)
    2.75
    """
    if m < 2 or d < 1:
        return float("inf")
    a, b = math.sqrt(m - 1.5), math.sqrt(d - 0.5)
    centre, scale = (a + b) ** 2, (a + b) * math.cbrt(1 / a + 1 / b)
    law = float(gamma.ppf(level, 46.44604884387787, scale=0.18605402228279347)) - 9.848007781128567
    return (centre + scale * law) / (m - 1)


def thresholds(m: int, d: int, level: float = 0.99, most: int = 12) -> Tensor:
    """Thresholds for the eigenvalues in turn: the k-th is the largest of the remaining ones."""
    points = [null_point(m - k, d - k, level) for k in range(min(d, most))]
    return torch.tensor(points, dtype=torch.float64)


def count_significant(eigenvalues: Tensor, above: Tensor) -> int:
    """Count the leading eigenvalues up to the first that does not exceed its threshold.

    >>> count_significant(torch.tensor([9.0, 4.0, 2.0, 3.0]), torch.tensor([2.5, 2.4, 2.3, 2.2]))
    2
    """
    beyond = (eigenvalues[: len(above)] > above).tolist()
    return beyond.index(False) if False in beyond else len(beyond)


def per_class(sums: Tensor, counts: Tensor, within: Tensor, level: float = 0.999) -> Tensor:
    """Components counted inside each class, where labels differ between clients: [classes].

    Parameters
    ----------
    sums, counts
        Sum of the features of each client's samples of each class [m, c, d], and their number.
    within
        Covariance of a sample of each class around its client's mean. [c, d, d]
    """
    found = []
    for c in range(counts.shape[1]):
        some = counts[:, c] >= 5  # the mean of fewer samples is too noisy
        if int(some.sum()) < 4:
            continue
        n = counts[some, c]
        seen = spectrum(sums[some, c] / n[:, None], n, within[c], most=8)
        limits = thresholds(int(some.sum()), len(seen.eigenvalues), level)
        found.append(1 + count_significant(seen.eigenvalues, limits))
    return torch.tensor(found)


def labels_differ(counts: Tensor) -> bool:
    """Whether clients have different labels, beyond chance (chi-square, 99 %). [m, classes]"""
    counts = counts[:, counts.sum(0) > 0].double()
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum().clamp(min=1)
    statistic = ((counts - expected).square() / expected.clamp(min=1e-12)).sum()
    freedom = max((len(counts) - 1) * (counts.shape[1] - 1), 1)
    # The 99 % point by Wilson and Hilferty's cube root.
    rare = 2 / (9 * freedom)
    return bool(statistic > freedom * (1 - rare + 2.326 * rare**0.5) ** 3)


def outliers(points: Tensor, n: Tensor, n_axes: int) -> Tensor:
    """Mark clients that alone contribute more than half of a significant direction: [m]."""
    if len(points) < FEW or not n_axes:
        return torch.zeros(len(points), dtype=torch.bool)
    square = n.double()[:, None] * points[:, :n_axes].square()
    return (square / square.sum(0).clamp(min=1e-300) > LEVERAGE).any(1)


def corners(points: Tensor, k: int) -> Tensor:
    """Successive projection: k points whose simplex approximately contains the others.

    >>> corners(torch.tensor([[0.0], [1.0], [5.0], [4.0]]) - 2.5, 2).tolist()
    [0, 2]
    """
    points = points.double()
    if k == 1:
        return points.square().sum(1).argmin().reshape(1)
    constant = points.square().sum(1).mean().sqrt().clamp(min=1e-12)
    rows = torch.cat([points, constant.expand(len(points), 1)], 1)
    found: list[int] = []
    for _ in range(k):
        length = rows.square().sum(1)
        length[found] = -1.0  # a client is the corner of one component only
        first = int(length.argmax())
        found.append(first)
        if float(length[first]) > 0:
            unit = rows[first] / rows[first].norm()
            rows = rows - (rows @ unit)[:, None] * unit
    return torch.tensor(found)


def barycentric(points: Tensor, at: Tensor) -> Tensor:
    """Shares of the corners in each point, on the simplex: [m, k].

    >>> barycentric(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    points, at = points.double(), at.double()
    one = torch.ones(len(at), 1, dtype=torch.float64)
    system = torch.cat([at, one], 1).T  # [k, k]
    target = torch.cat([points, torch.ones(len(points), 1, dtype=torch.float64)], 1).T
    return project_to_simplex(torch.linalg.lstsq(system, target, driver="gelsd").solution.T)


def beyond(points: Tensor, at: Tensor) -> Tensor:
    """Approximate distance of each point from the simplex of the corners: [m]."""
    inside = barycentric(points, at) @ at.double()
    apart: Tensor = points.double() - inside
    return apart.square().sum(1).sqrt()


def project_to_simplex(values: Tensor) -> Tensor:
    """Project values to the nearest shares, which are not negative and add up to one.

    >>> project_to_simplex(torch.tensor([0.8, 0.6, -0.1])).round(decimals=6)
    tensor([0.6000, 0.4000, 0.0000])
    """
    ordered = values.sort(-1, descending=True).values
    excess = (ordered.cumsum(-1) - 1) / torch.arange(1, values.shape[-1] + 1)
    count = (ordered > excess).sum(-1, keepdim=True).clamp(min=1)
    return (values - excess.gather(-1, count - 1)).clamp(min=0)


class Simplex(NamedTuple):
    """Components found from clients' means. Floating-point tensors are float64."""

    counted: int  # number of components that the eigenvalues suggest
    strange: Tensor  # [m]  outliers, which are left out
    anchors: Tensor  # [k]  indices of the purest clients
    shares: Tensor  # [m, k]  initial shares
    eigenvalues: Tensor  # [r]
    thresholds: Tensor  # of the leading eigenvalues
    centre: Tensor  # [d]
    root: Tensor  # [d, k - 1]  maps means to the axes
    corners: Tensor  # [k, k - 1]  the anchors on these axes


def simplex(
    means: Tensor, n: Tensor, within: Tensor, k: int | None = None, most: int = 8
) -> Simplex:
    """Find the number of components, purest clients and initial shares from mean features.

    Parameters
    ----------
    means, n, within
        As in `spectrum`.
    k, most
        The number of components, if it is known, and otherwise its upper bound.
    """
    strange = torch.zeros(len(means), dtype=torch.bool)
    while True:
        seen = spectrum(means[~strange], n[~strange], within)
        above = thresholds(len(seen.points), len(seen.eigenvalues))
        counted = 1 + count_significant(seen.eigenvalues, above)
        odd = outliers(seen.points, n[~strange], counted - 1)
        if not bool(odd.any()):
            break
        strange = strange.masked_scatter(~strange, odd)
    k = min(counted, most) if k is None else k
    root = (seen.root @ seen.axes)[:, : k - 1]
    places = torch.nonzero(~strange).flatten()
    anchors = places[corners(seen.points[:, : k - 1], k)]
    points = (means.double() - seen.centre) @ root
    at = points[anchors]
    shares = barycentric(points, at) if k > 1 else torch.ones(len(points), 1).double()
    return Simplex(
        counted, strange, anchors, shares, seen.eigenvalues, above, seen.centre, root, at
    )
