"""Mosaic's server: what it does with the components of the clients, as functions of arrays."""

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.mosaic import merging, pooling
from coterie.algorithms.mosaic.merging import Criterion, Merged
from coterie.algorithms.mosaic.mixture import Covariance
from coterie.algorithms.mosaic.pooling import Groups
from coterie.clustering.arrays import Array, Labels
from coterie.clustering.overlap import connect, overlaps
from coterie.core.random import fold, normal


def pull(centres: Array, radii: Array, n: Array, clients: Labels) -> Array:
    """Move each centre to the point of its ball nearest to the weighted mean of its group.

    Components of different clients whose balls overlap form groups. A negative radius means that
    there is no component.

    >>> pull(np.array([[0.0], [1.0]]), np.array([0.5, 10.0]), np.array([1.0, 3.0]), np.arange(2))
    array([[0.5 ],
           [0.75]])
    """
    moved, real = centres.copy(), radii >= 0
    if not real.any():
        return moved
    points, reach, n, clients = centres[real], radii[real], n[real], clients[real]
    labels = connect(overlaps(points, reach, clients)[0], clients)
    sums, total = np.zeros((labels.max() + 1, points.shape[1])), np.bincount(labels, n)
    np.add.at(sums, labels, points * n[:, None])
    goal = np.divide(sums, total[:, None], out=np.zeros_like(sums), where=total[:, None] > 0)
    goal = np.where(total[labels, None] > 0, goal[labels], points)
    alone = np.bincount(labels)[labels] == 1
    way = np.where(alone[:, None], points, goal) - points
    length = np.linalg.norm(way, axis=1)
    share = np.divide(reach, length, out=np.ones_like(length), where=length > reach)
    moved[real] = points + np.minimum(share, 1.0)[:, None] * way
    return moved


def merge_summaries(
    n: Tensor,
    centres: Tensor,
    variance: Tensor,
    real: Tensor,
    covariance: Covariance,
    criterion: Criterion,
    tolerance: float,
    n_clusters: int | None,
) -> tuple[Merged, Groups, Tensor]:
    """Merge the components of all clients into groups.

    Inputs have a row per client and slot; `real` marks the slots with a component. Returns the path
    of the merge, the groups, and the group of each component [clients, slots].
    """
    owner = real.nonzero()[:, 0].numpy()
    told = n[real].numpy(), centres[real].numpy(), variance[real].numpy()
    least = merging.fewest(owner, tolerance)
    found = merging.merge(*told, owner, criterion, tolerance, least, n_clusters)
    groups, number = pooling.pool_groups(*told, found.labels, covariance)
    members = torch.full(real.shape, -1)
    members[real] = torch.from_numpy(number)
    return found, groups, members


def add_noise(sums: dict[str, Tensor], noise: float, clip: float, key: Tensor) -> dict[str, Tensor]:
    """Add noise to counts, sums and squares; one sample changes them by 1, clip and clip**2."""
    out = {}
    for i, (name, leaf) in enumerate(sums.items()):
        draw = normal(fold(key, name), tuple(leaf.shape), torch.float64)
        out[name] = leaf + noise * clip**i * draw
    return out
