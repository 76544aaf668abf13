"""Helpers of federated k-means and federated c-means: initial centres, and placing clients."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from coterie.algorithms.components import place_heard
from coterie.algorithms.samples import keep_finite, pad_rows, samples
from coterie.clustering.lloyd import kmeans
from coterie.core.algorithm import Evidence
from coterie.core.client import Client
from coterie.core.federation import Federation
from coterie.core.tree import Ids

STARTS = 10  # number of starts of k-means on the server

# client


def local_centres(client: Client, k: int) -> dict[str, Tensor]:
    """Centres and sizes of a client's own k-means."""
    x, _ = samples(client)
    labels, centres, _ = kmeans(client.key, x, min(k, len(x)), starts=5)
    return {"centres": pad_rows(centres, k), "n": torch.bincount(labels, minlength=k).double()}


# server


def initial_centres(owner: str, fed: Federation, first: Callable[..., Any], k: int) -> Tensor:
    """Cluster the local centres that the task `first` finds: [k, d]."""
    _, reply = keep_finite(owner, *fed.map(first, to=fed.everyone()))
    return cluster_centres(reply["centres"], reply["n"], k, fed.key("server"))


def cluster_centres(centres: Tensor, n: Tensor, k: int, key: Tensor) -> Tensor:
    """Weighted k-means of clients' centres [m, j, d], of sizes n [m, j]; sorted by coordinates.

    The order of the clients does not matter.
    """
    points, weight = centres.flatten(0, 1), n.flatten()
    real = weight > 0
    x, w = points[real].numpy(), weight[real].numpy()
    order = np.lexsort(x.T[::-1])
    x, w = x[order], w[order]
    found = min(k, len(np.unique(x, axis=0)))
    model = KMeans(found, n_init=STARTS, random_state=int(key % (2**31)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        means = model.fit(x, sample_weight=w).cluster_centers_
    means = means[np.lexsort(means.T[::-1])]
    # With fewer distinct points than centres, some centres appear twice.
    return torch.from_numpy(means[np.arange(k) % found])


def place_by_shares(
    fed: Federation, divide: Callable[..., Any], centres: Tensor, ids: Ids
) -> Evidence:
    """Place clients by the samples of each centre, which the task `divide` counts."""
    heard, reply = fed.map(divide, centres, to=ids)
    return place_heard(ids, heard, reply["n"] / reply["n"].sum(1, keepdim=True))
