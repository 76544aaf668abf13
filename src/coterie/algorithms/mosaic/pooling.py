"""Groups of components: their counts, centres and variances.

After a merge they are computed from the summaries of the clients, and in a round of pooled EM from
sums over the samples of all clients. Variances have the same structure as those of the components:
[k], [k, d] or [k, d, d].
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.mosaic.mixture import EMPTY, FLOOR, NDIM, ONE, RIDGE, Covariance
from coterie.clustering.arrays import Array, Labels


class Groups(NamedTuple):
    """The merged components, in the order of their first coordinates."""

    centres: Tensor  # [k, d]
    variance: Tensor  # [k], [k, d] or [k, d, d]
    n: Tensor  # [k]  samples in all


def no_groups(d: int, covariance: Covariance) -> Groups:
    """An empty set of groups, for the time before the first merge."""
    shape = (d,) * NDIM[covariance]
    zeros = torch.zeros(0, d, dtype=torch.float64)
    return Groups(zeros, torch.ones(0, *shape, dtype=torch.float64), zeros.sum(1))


def means(n: Array, centres: Array, labels: Labels) -> Array:
    """Weighted mean of the centres under each label: [k, d].

    >>> means(np.array([1.0, 3.0]), np.array([[0.0], [4.0]]), np.array([0, 0]))
    array([[3.]])
    """
    sums = np.zeros((int(labels.max()) + 1, centres.shape[1]))
    np.add.at(sums, labels, n[:, None] * centres)
    mean: Array = sums / np.bincount(labels, n)[:, None]
    return mean


def mean_variance(n: Array, variance: Array) -> float:
    """Mean variance of a feature within components."""
    if variance.ndim == 3:
        variance = np.diagonal(variance, axis1=1, axis2=2)
    own = variance if variance.ndim == 1 else variance.mean(1)
    return float(np.average(own, weights=n))


def pool_groups(
    n: Array, centres: Array, variance: Array, labels: Labels, covariance: Covariance
) -> tuple[Groups, Labels]:
    """Groups of merged components, and the number of each component's group.

    Groups are sorted by the coordinates of their centres; the order of clients does not matter.
    """
    k, d = int(labels.max()) + 1, centres.shape[1]
    size, mu = np.bincount(labels, n, k), means(n, centres, labels)
    gap = centres - mu[labels]
    spread: Array
    if variance.ndim == 1:
        spread = variance + (gap**2).sum(1) / d
    elif variance.ndim == 2:
        spread = variance + gap**2
    else:
        spread = variance + gap[:, :, None] * gap[:, None, :]
    shape = (-1, *(1,) * (variance.ndim - 1))
    total = np.zeros((k, *variance.shape[1:]))
    np.add.at(total, labels, spread * n.reshape(shape))
    within, count = torch.from_numpy(total / size.reshape(shape)), torch.from_numpy(size)
    found = Groups(torch.from_numpy(mu), shape_variance(within, count, covariance), count)
    order = np.lexsort(mu.T[::-1])
    index = torch.from_numpy(order)
    return Groups(*(leaf[index] for leaf in found)), np.argsort(order)[labels]


def shape_variance(variance: Tensor, n: Tensor, covariance: Covariance) -> Tensor:
    """Variances of groups in the chosen structure: their mean where all share one."""
    if covariance in ONE:
        return ((variance * n).sum() / n.sum()).expand(len(n)).clone()
    return variance


def common_variance(groups: Groups) -> Tensor:
    """One variance for all groups, in the same structure."""
    share = groups.n / groups.n.sum()
    return torch.einsum("k,k...->...", share, groups.variance).expand_as(groups.variance)


def middle(groups: Groups) -> Tensor:
    """Mean of all samples; as an origin it reduces cancellation and tightens bounds: [d]."""
    return (groups.centres * groups.n[:, None]).sum(0) / groups.n.sum()


def sums(x: Tensor, share: Tensor, structure: int) -> dict[str, Tensor]:
    """Counts, sums and squares of samples (from the middle) under their responsibilities."""
    if structure == 0:
        squares = share.T @ x.square().sum(1)
    elif structure == 1:
        squares = share.T @ x.square()
    else:
        squares = torch.einsum("nk,ni,nj->kij", share, x, x)
    return {"n": share.sum(0), "x": share.T @ x, "squares": squares}


def no_sums(groups: Groups) -> dict[str, Tensor]:
    """Zeros in the shape of `sums`."""
    leaves = {"n": groups.n, "x": groups.centres, "squares": groups.variance}
    return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}


def from_sums(
    groups: Groups,
    found: dict[str, Tensor],
    covariance: Covariance,
    least: float = EMPTY,
) -> Groups:
    """Groups after a pooled step; a group with at most `least` samples is unchanged."""
    d, n, origin = groups.centres.shape[1], found["n"], middle(groups)
    some = n > least
    safe = torch.where(some, n, 1.0)
    mean = found["x"] / safe[:, None]
    shape = (-1, *(1,) * NDIM[covariance])
    second = found["squares"] / safe.reshape(shape)
    if NDIM[covariance] == 0:
        within = (second - mean.square().sum(1)) / d
    elif NDIM[covariance] == 1:
        within = second - mean.square()
    else:
        within = second - mean[:, :, None] * mean[:, None, :]
    floor = FLOOR * mean_variance(groups.n.numpy(), groups.variance.numpy())
    if NDIM[covariance] < 2:
        within = within.clamp(min=floor)
    else:
        values, vectors = torch.linalg.eigh(within)
        within = vectors @ torch.diag_embed(values.clamp(min=floor)) @ vectors.mT
    variance = torch.where(some.reshape(shape), within, groups.variance)
    variance = shape_variance(variance, torch.where(some, n, 0.0), covariance)
    centres = torch.where(some[:, None], mean + origin, groups.centres)
    return Groups(centres, variance, torch.where(some, n, groups.n))


def common_units(within: Tensor) -> Tensor:
    """The matrix [d, d] to multiply samples by, so that a covariance (plus a ridge) is identity."""
    if not bool(within.trace() > 0):
        return torch.eye(len(within), dtype=within.dtype)
    least = RIDGE * within.trace() / len(within) + 1e-200
    root = torch.linalg.cholesky(within + least * torch.eye(len(within), dtype=within.dtype))
    back: Tensor = torch.linalg.inv(root).T
    return back


def in_data_units(centres: Tensor, units: Tensor) -> Tensor:
    """Convert centres from common units (samples @ units) to the units of the samples."""
    if not units.numel():
        return centres
    back: Tensor = torch.linalg.inv(units)
    return centres @ back


def covariances(variance: Tensor, units: Tensor) -> Tensor:
    """Convert variances from common units to covariances in the units of the samples."""
    if not units.numel():
        return variance
    back: Tensor = torch.linalg.inv(units)
    return variance[:, None, None] * (back.T @ back)
