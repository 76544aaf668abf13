"""Gaussian mixtures of one client: densities, EM steps, and how far a centre may move.

A mixture has a fixed number of slots. A slot of weight 0 is empty, so clients with different
numbers of components can be stacked. `estep`, `moments`, `mstep` and `squared_radius` use masks and
are stackable; functions that loop until convergence are not. Data must be float64.
"""

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from scipy.stats import chi2
from sklearn.metrics import silhouette_score
from torch import Tensor

from coterie.clustering.lloyd import kmeans, squared_distances
from coterie.core.random import fold, shuffled

Covariance: TypeAlias = Literal["tied", "tied_full", "spherical", "diagonal", "full"]
NDIM = {"tied": 0, "tied_full": 0, "spherical": 0, "diagonal": 1, "full": 2}
ONE = ("tied", "tied_full")  # one variance for all components; "tied_full": in common units
EMPTY = 1e-6  # a component with a smaller count keeps its centre
FLOOR = 1e-6  # smallest variance, as a part of the client's mean feature variance
SEEN = 1000  # largest number of samples on which silhouettes are computed
MOST = 10  # largest number of components that a client tries when it chooses the number
RIDGE = 1e-3  # part of the mean variance that is added to diagonal and full covariances


class Mixture(NamedTuple):
    """Components in slots."""

    centres: Tensor  # [k, d]
    weights: Tensor  # [k]  sum 1; 0 for a slot without a component
    variance: Tensor  # [k], [k, d] or [k, d, d]


class Moments(NamedTuple):
    """Moments of each component under the responsibilities of an E-step."""

    n: Tensor  # [k]  expected number of samples
    mean: Tensor  # [k, d]
    scatter: Tensor  # [k], [k, d] or [k, d, d]  summed squares around the mean


def log_density(x: Tensor, centres: Tensor, variance: Tensor) -> Tensor:
    """Log-density of every row under every component: [n, k]."""
    d = x.shape[-1]
    structure = variance.ndim - centres.ndim + 1
    if structure == 0:
        distance = squared_distances(x, centres) / variance
        logdet = d * variance.log()
    elif structure == 1:
        inverse = 1 / variance  # [k, d]
        middle = centres.mean(0)
        y, c = x - middle, centres - middle
        distance = (y * y) @ inverse.T - 2 * y @ (c * inverse).T + (c * c * inverse).sum(1)
        distance, logdet = distance.clamp(min=0), variance.log().sum(1)
    else:
        factor = torch.linalg.cholesky(variance)  # [k, d, d]
        y = (x[None] - centres[:, None]).transpose(1, 2)  # [k, d, n]
        distance = torch.linalg.solve_triangular(factor, y, upper=False).square().sum(1).T
        logdet = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    return -0.5 * (distance + logdet + d * LOG_2_PI)


LOG_2_PI = float(torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64)))


def log_joint(x: Tensor, mixture: Mixture) -> Tensor:
    """Log of weight times density: [n, k]; minus infinity for empty slots."""
    return mixture.weights.log() + log_density(x, mixture.centres, mixture.variance)


def estep(x: Tensor, mask: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Responsibilities [n, k], zero for padding, and the log-likelihood."""
    joint = log_joint(x, mixture)
    total = joint.logsumexp(1)
    share = torch.where(mask[:, None], (joint - total[:, None]).exp(), 0.0)
    return share, torch.where(mask, total, 0.0).sum()


def log_likelihood(x: Tensor, mask: Tensor, mixture: Mixture) -> Tensor:
    """Log-likelihood of the real rows."""
    return estep(x, mask, mixture)[1]


def moments(x: Tensor, share: Tensor, centres: Tensor, structure: int) -> Moments:
    """Counts, means and scatter under given responsibilities; an empty component keeps its centre.

    >>> share, x = torch.ones(3, 1), torch.tensor([[0.0], [2.0], [4.0]])
    >>> moments(x, share, torch.tensor([[5.0]]), 0)
    Moments(n=tensor([3.]), mean=tensor([[2.]]), scatter=tensor([8.]))
    """
    n = share.sum(0)
    middle = centres.mean(0)
    y = x - middle
    some = (n > EMPTY)[:, None]
    sums = share.T @ y
    mean = torch.where(some, sums / n.clamp(min=EMPTY)[:, None], centres - middle)  # [k, d]
    if structure == 0:
        scatter = (share * squared_distances(y, mean)).sum(0)
    elif structure == 1:
        squares = share.T @ (y * y) - 2 * mean * sums + n[:, None] * mean * mean
        scatter = squares.clamp(min=0)
    else:
        cross = mean[:, :, None] * sums[:, None, :]
        own = n[:, None, None] * mean[:, :, None] * mean[:, None, :]
        scatter = torch.einsum("nk,ni,nj->kij", share, y, y) - cross - cross.mT + own
    return Moments(n, mean + middle, scatter)


def mean_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Variance of a feature of the real rows, averaged over the features."""
    count = mask.sum().clamp(min=1)
    rows = torch.where(mask[:, None], x, 0.0)
    centred = torch.where(mask[:, None], x - rows.sum(0) / count, 0.0)
    return centred.square().sum() / (count * x.shape[1])


def mstep(found: Moments, old: Mixture, covariance: Covariance, floor: Tensor) -> Mixture:
    """Weights, centres and variances that maximise the expected log-likelihood."""
    d, total = found.mean.shape[1], found.n.sum()
    real = old.weights > 0
    weights = torch.where(real, found.n / total, 0.0)
    n = found.n.clamp(min=EMPTY)
    some = found.n > EMPTY
    if covariance in ONE:
        variance = torch.maximum(found.scatter.sum() / (d * total), floor).expand(len(n))
    elif covariance == "spherical":
        own = torch.maximum(found.scatter / (d * n), floor)
        variance = torch.where(some, own, old.variance)
    elif covariance == "diagonal":
        ridge = RIDGE * found.scatter.sum() / (d * total) + floor
        variance = torch.where(some[:, None], found.scatter / n[:, None] + ridge, old.variance)
    else:
        trace = found.scatter.diagonal(dim1=1, dim2=2).sum()
        ridge = (RIDGE * trace / (d * total) + floor) * torch.eye(d, dtype=n.dtype)
        own = found.scatter / n[:, None, None] + ridge
        variance = torch.where(some[:, None, None], own, old.variance)
    return Mixture(found.mean, weights, variance)


def squared_radius(found: Moments, old: Mixture, new: Mixture, covariance: Covariance) -> Tensor:
    """Squared radius of the largest ball in which each new centre may move without loss: [k].

    Inside the ball, the component's part of the expected complete log-likelihood, with the new
    variance, is no smaller than before the step. For diagonal and full covariances this set is an
    ellipsoid; the ball is the largest one inside it.
    """
    d = found.mean.shape[1]
    shift = found.mean - old.centres
    moved = shift.square().sum(1)
    n = found.n.clamp(min=EMPTY)
    if covariance in ONE:  # the gain by the common variance is not used
        squared = new.variance / old.variance * moved
    elif covariance == "spherical":
        a = found.scatter / n
        gain = d * (old.variance / new.variance).log() + a / old.variance - a / new.variance
        squared = new.variance * (gain + moved / old.variance)
    elif covariance == "diagonal":
        a = found.scatter / n[:, None]
        gain = (old.variance / new.variance).log() + (a + shift**2) / old.variance
        squared = (gain - a / new.variance).sum(1) * new.variance.min(1).values
    else:
        a = found.scatter / n[:, None, None]
        before = a + shift[:, :, None] * shift[:, None, :]
        gain = torch.linalg.slogdet(old.variance)[1] - torch.linalg.slogdet(new.variance)[1]
        gain = gain + _trace(torch.linalg.solve(old.variance, before))
        gain = gain - _trace(torch.linalg.solve(new.variance, a))
        squared = gain * torch.linalg.eigvalsh(new.variance)[:, 0]
    return torch.where(found.n > EMPTY, squared.clamp(min=0), 0.0)


def step(
    x: Tensor, mask: Tensor, old: Mixture, covariance: Covariance, floor: Tensor
) -> tuple[Mixture, Moments]:
    """One EM step, and the moments it is computed from."""
    share, _ = estep(x, mask, old)
    found = moments(x, share, old.centres, NDIM[covariance])
    return mstep(found, old, covariance, floor), found


def per_feature(variance: Tensor) -> Tensor:
    """Variance of a feature, per component: [k]."""
    if variance.ndim == 1:
        return variance
    return variance.mean(1) if variance.ndim == 2 else variance.diagonal(dim1=1, dim2=2).mean(1)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)


# not stackable: loops until convergence


def spread_out(squared: Tensor, d: int, k: int, covariance: Covariance) -> Tensor:
    """One variance for all, in the structure of the covariances of k components."""
    if NDIM[covariance] == 0:
        return squared.expand(k).clone()
    if NDIM[covariance] == 1:
        return squared.expand(k, d).clone()
    return squared * torch.eye(d, dtype=squared.dtype).expand(k, d, d)


def from_seeds(x: Tensor, centres: Tensor, covariance: Covariance, floor: Tensor) -> Mixture:
    """Uniform weights; variance: mean squared distance to the nearest seed, per feature."""
    k, d = centres.shape
    nearest = squared_distances(x, centres).min(1).values
    squared = torch.maximum(nearest.mean() / d, floor)
    weights = torch.full((k,), 1 / k, dtype=x.dtype)
    return Mixture(centres, weights, spread_out(squared, d, k, covariance))


def em(
    x: Tensor,
    mixture: Mixture,
    covariance: Covariance,
    floor: Tensor,
    steps: int = 100,
    tolerance: float = 1e-6,
) -> tuple[Mixture, Tensor]:
    """EM until the log-likelihood rises by less than a relative tolerance: mixture, likelihood."""
    mask = torch.ones(len(x), dtype=torch.bool)
    last = None
    for _ in range(steps):
        share, value = estep(x, mask, mixture)
        if last is not None and abs(float(value - last)) <= tolerance * abs(float(value)):
            return mixture, value
        last = value
        found = moments(x, share, mixture.centres, NDIM[covariance])
        mixture = mstep(found, mixture, covariance, floor)
    return mixture, log_likelihood(x, mask, mixture)


def local_fit(
    key: Tensor, x: Tensor, k: int, covariance: Covariance, floor: Tensor, starts: int = 10
) -> tuple[Mixture, Tensor]:
    """A client's own best mixture: the best of several k-means, then EM; and its log-likelihood."""
    centres = kmeans(key, x, k, starts)[1]
    return em(x, from_seeds(x, centres, covariance, floor), covariance, floor)


def weights_alone(density: Tensor, steps: int) -> Tensor:
    """EM on the weights [k] of fixed components with log-densities [n, k], from equal weights."""
    k = density.shape[1]
    weights = torch.full((k,), 1 / k, dtype=density.dtype)
    for _ in range(steps):
        weights = (weights.log() + density).softmax(1).mean(0)
    return weights


def heaviest(x: Tensor, centres: Tensor, variance: Tensor, own: Mixture, k: int) -> Mixture:
    """The k common components with the largest weights, with the variance of a client's mixture."""
    weights = weights_alone(log_density(x, centres, variance), 10)
    best = weights.argsort(descending=True, stable=True)[:k]
    start = weights[best].clamp(min=1e-12)
    pooled = torch.einsum("k,k...->...", own.weights / own.weights.sum(), own.variance)
    return Mixture(centres[best], start / start.sum(), pooled.expand(k, *pooled.shape))


def fitting_weights(x: Tensor, centres: Tensor, variance: Tensor) -> Tensor:
    """Weights over common components, zero for those with very few samples: [k]."""
    weights = weights_alone(log_density(x, centres, variance), 20)
    enough = weights * len(x) >= min(max(3.0, 0.01 * len(x)), float(weights.max()) * len(x))
    weights = torch.where(enough, weights, 0.0)
    return weights / weights.sum()


def outside(x: Tensor, centres: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
    """Samples outside the 99.9 % region of every component with a positive weight: [n]."""
    kept = weights > 0
    density = log_density(x, centres[kept], variance[kept])
    peak = log_density(centres[kept], centres[kept], variance[kept]).diagonal()
    squared = (2 * (peak - density)).min(1).values  # Mahalanobis
    return squared > float(chi2.ppf(0.999, x.shape[1]))


def price(x: Tensor) -> float:
    """The BIC price of a component in nats: half its free parameters times log n."""
    return (x.shape[1] + 1) / 2 * math.log(len(x))


def n_free(k: int, d: int, covariance: Covariance) -> int:
    """Free parameters of a mixture, weights included."""
    own = {"spherical": k, "diagonal": k * d, "full": k * d * (d + 1) // 2}
    return k - 1 + k * d + own.get(covariance, int(covariance in ONE))


def choose_count(
    key: Tensor, x: Tensor, rule: Literal["auto", "bic"], covariance: Covariance
) -> int:
    """Choose the number of components from a client's own data.

    "auto": the k from 2 to min(MOST, n / 10) with the largest silhouette of k-means (on at most
    `SEEN` samples), plus one, because too few components do more harm than too many. "bic": the
    mixture with the smallest BIC.
    """
    n, d = x.shape
    most = min(MOST, n // 10, len(torch.unique(x, dim=0)))
    if most < 2:
        return 1
    if rule == "bic":
        floor = variance_floor(x, torch.ones(n, dtype=torch.bool))
        scores = []
        for k in range(1, most + 1):
            value = local_fit(fold(key, k), x, k, covariance, floor, starts=5)[1]
            price = n_free(k, d, covariance) * torch.log(torch.tensor(float(n)))
            scores.append(float(-2 * value + price))
        return 1 + min(range(most), key=scores.__getitem__)
    labels = (kmeans(fold(key, k), x, k, starts=5)[0] for k in range(2, most + 1))
    scores = [separation(key, x, own) for own in labels]
    return 3 + max(range(len(scores)), key=scores.__getitem__)


def separation(key: Tensor, x: Tensor, labels: Tensor) -> float:
    """Silhouette of labelled samples (at most `SEEN` of them); -1 if all have one label."""
    seen = shuffled(fold(key, "seen"), len(x))[:SEEN]
    x, labels = x[seen], labels[seen]
    if not 1 < len(labels.unique()) < len(x):
        return -1.0
    return float(silhouette_score(x.numpy(), labels.numpy()))


def variance_floor(x: Tensor, mask: Tensor) -> Tensor:
    """The smallest variance of a client's components; positive even for constant data."""
    return FLOOR * mean_variance(x, mask) + 1e-200
