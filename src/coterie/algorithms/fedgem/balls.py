"""FedGEM's server: moving centres inside their balls, and the balls of the final size.

Arrays have one row per component, and `clients` has the client of each. No function here uses
samples, except `silhouettes`, which each client calls on its own samples.
"""

import numpy as np
import torch
from torch import Tensor

from coterie.clustering.arrays import Array, Labels
from coterie.clustering.lloyd import squared_distances
from coterie.clustering.overlap import connect, overlaps

FOLDS = 3  # parts of the clients; each evaluates the factors with the groups of the other parts
FACTORS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1e3, 1e4, 1e5, 1e6)


# rounds


def move(centres: Array, radii: Array, clients: Labels) -> Array:
    """Move each centre to the mean of itself and its common points with the balls of its group.

    All these points lie in the ball of the centre, so their mean does, too, and the client loses
    nothing.
    """
    pairs, _ = overlaps(centres, radii, clients)
    groups = connect(pairs, clients)
    total, count = centres.copy(), np.ones(len(centres))
    for a, b in pairs.tolist():
        if groups[a] == groups[b]:
            total[[a, b]] += common_point(centres[a], centres[b], radii[a], radii[b])
            count[[a, b]] += 1
    moved: Array = total / count[:, None]
    return moved


def common_point(a: Array, b: Array, radius_a: float, radius_b: float) -> Array:
    """The common point of two balls with the smallest sum of squared distances to their centres.

    >>> common_point(np.array([0.0, 0.0]), np.array([3.0, 0.0]), 1.0, 2.5)
    array([1., 0.])
    """
    distance = float(np.linalg.norm(b - a))
    if distance == 0:
        return a.copy()
    step = min(max(0.5, 1 - radius_b / distance), radius_a / distance)
    return a + step * (b - a)


# final aggregation


def final_groups(
    centres: Array, clients: Labels, n: Array, factor: float, sigma: float
) -> tuple[Labels, Array]:
    """Group components whose balls of the final size overlap: labels [c], centres [k, d].

    The centre of a group is the mean of its members.
    """
    radii = final_radii(centres, clients, n, factor, sigma)
    labels = connect(overlaps(centres, radii, clients)[0], clients)
    sums = np.zeros((int(labels.max()) + 1, centres.shape[1]))
    np.add.at(sums, labels, centres)
    return labels, sums / np.bincount(labels)[:, None]


def final_radii(centres: Array, clients: Labels, n: Array, factor: float, sigma: float) -> Array:
    """Final radii: r^2 = factor * sigma * R / (pi * sqrt(N)), with pi = 1 / (components): [c].

    R is the smallest distance between two centres of the client, N = `n` its number of samples. A
    client with one component has no R: it gets the mean R of the other clients.
    """
    own = [np.flatnonzero(clients == client) for client in np.unique(clients)]
    least = np.array([smallest_distance(centres[rows]) for rows in own])
    some = np.isfinite(least)
    least[~some] = least[some].mean() if some.any() else 0.0
    radii = np.zeros(len(centres))
    for rows, gap in zip(own, least, strict=True):
        radii[rows] = np.sqrt(factor * sigma * gap * len(rows) / np.sqrt(n[rows]))
    return radii


def smallest_distance(points: Array) -> float:
    """Smallest distance between two of some points; infinity for a single one."""
    first, second = np.triu_indices(len(points), 1)
    gaps = np.linalg.norm(points[first] - points[second], axis=1)
    return float(gaps.min(initial=np.inf))


# choice of the factor


def factor_banks(centres: Array, clients: Labels, n: Array, fold: Labels, sigma: float) -> Array:
    """Centres of the groups without each fold, for each factor: [folds, factors, k, d].

    Rows after the last centre are infinite. A fold that has all components is not left out.
    """
    banks: list[Array] = []
    for part in range(FOLDS):
        kept = fold != part if (fold != part).any() else np.ones(len(n), dtype=bool)
        told = centres[kept], clients[kept], n[kept]
        banks += [final_groups(*told, factor, sigma)[1] for factor in FACTORS]
    padded = np.full((len(banks), max(map(len, banks)), centres.shape[1]), np.inf)
    for i, bank in enumerate(banks):
        padded[i, : len(bank)] = bank
    return padded.reshape(FOLDS, len(FACTORS), *padded.shape[1:])


def silhouettes(x: Tensor, mask: Tensor, banks: Tensor) -> Tensor:
    """Mean simplified silhouette of samples for each bank of centres; 0 for one centre: [f]."""
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
        ratio = torch.where(near[:, 1].isinf(), 0.0, ratio)
        scores.append(torch.where(mask, ratio, 0.0).sum() / mask.sum())
    return torch.stack(scores)
