"""What methods that cluster samples by centres have in common, as functions."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from coterie.clustering import mixtures
from coterie.core.algorithm import Algorithm, Evidence
from coterie.core.client import Client
from coterie.core.federation import Federation
from coterie.core.tree import Ids

# client


def samples(client: Client) -> tuple[Tensor, Tensor]:
    """Samples as vectors in double precision, and which of them count."""
    x, mask = client.train.x, client.train.mask
    if isinstance(x, dict):
        raise ValueError("samples must be one array of numbers, and these are a dict of arrays")
    return x.reshape(len(mask), -1).double(), mask


def known_count(client: Client, n_components: int | Literal["facts"]) -> int:
    """How many components a client is said to have."""
    if n_components == "facts":
        if "n_components" not in client.facts:
            raise ValueError(
                "n_components='facts' needs a fact 'n_components' of every client. Give it with "
                "the data, or give a number for all (FedGEM: or 'auto', and clients choose)"
            )
        return int(client.facts["n_components"])
    return n_components


def unexplained(client: Client, k: int) -> dict[str, Tensor]:
    """Mean scatter of samples around the centres of a client's own mixture: [d, d]."""
    x, mask = samples(client)
    floor = mixtures.variance_floor(x, mask)
    mixture, _ = mixtures.local_fit(client.key, x, k, "tied", 1.0, floor)
    share, _ = mixtures.estep(x, mask, mixture)
    found = mixtures.moments(x, share, mixture.centres, mixtures.NDIM["full"])
    return {"within": found.scatter.sum(0) / len(x), "n": client.train.size}


def root_of(within: Tensor) -> Tensor:
    """Lower triangular root of a covariance with its ridge; a constant feature stays one."""
    least = mixtures.RIDGE * within.trace() / len(within) + 1e-200
    root: Tensor = torch.linalg.cholesky(
        within + least * torch.eye(len(within), dtype=within.dtype)
    )
    return root


def local_start(client: Client, k: int) -> dict[str, Tensor]:
    """Centres and sizes of a client's own k-means, for a first look at everybody's data."""
    x, _ = samples(client)
    found = min(k, len(x))
    labels, centres, _ = mixtures.kmeans(client.key, x, found, starts=5)
    n = torch.bincount(labels, minlength=k).double()
    return {"centres": padded(centres, k), "n": n}


def padded(leaf: Tensor, slots: int, fill: float = 0.0) -> Tensor:
    """Rows of a fill value after the rows there are."""
    missing = slots - len(leaf)
    return torch.cat([leaf, leaf.new_full((missing, *leaf.shape[1:]), fill)]) if missing else leaf


def divided(x: Tensor, mask: Tensor, centres: Tensor) -> dict[str, Tensor]:
    """Means and sizes of the samples nearest to each centre; where there are none, the centre."""
    nearest = mixtures.squared_distances(x, centres).argmin(1)
    member = (nearest[:, None] == torch.arange(len(centres))) & mask[:, None]  # [n, k]
    n = member.double().sum(0)
    means = member.double().T @ x / n.clamp(min=1)[:, None]
    return {"centres": torch.where(n[:, None] > 0, means, centres), "n": n}


# server


def finite(owner: Algorithm, ids: Ids, reply: dict[str, Any]) -> tuple[Ids, dict[str, Any]]:
    """Leave out replies that are not numbers."""
    if not len(ids):
        return ids, reply
    good = torch.ones(len(ids), dtype=torch.bool)
    for leaf in reply.values():
        if leaf.is_floating_point():
            good &= leaf.reshape(len(ids), -1).isfinite().all(1)
    if bool(good.all()):
        return ids, reply
    lost = int((~good).sum())
    warnings.warn(
        f"{type(owner).__name__}: {lost} replies were not finite and were left out.", stacklevel=3
    )
    return ids[good], {name: leaf[good] for name, leaf in reply.items()}


def weighted_kmeans(points: Tensor, weight: Tensor, k: int, key: Tensor, starts: int) -> Tensor:
    """Centres [k, d] of weighted points, by coordinates; the points' order does not matter."""
    real = weight > 0
    x, w = points[real].numpy(), weight[real].numpy()
    order = np.lexsort(x.T[::-1])
    x, w = x[order], w[order]
    found = min(k, len(np.unique(x, axis=0)))
    seed = int(key % (2**31))
    model = KMeans(found, n_init=starts, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        centres = model.fit(x, sample_weight=w).cluster_centers_
    centres = centres[np.lexsort(centres.T[::-1])]
    # Fewer different points than centres: some centres stand twice.
    return torch.from_numpy(centres[np.arange(k) % found])


def first_centres(
    owner: Algorithm, fed: Federation, first: Callable[..., Any], k: int, starts: int = 10
) -> Tensor:
    """Centres of everybody's own centres, which the task `first` finds: [k, d]."""
    _, reply = finite(owner, *fed.map(first, to=fed.everyone()))
    return clustered(fed, reply, k, starts)


def clustered(fed: Federation, reply: dict[str, Any], k: int, starts: int = 10) -> Tensor:
    """Centres of the centres that clients sent, weighted by their sizes: [k, d]."""
    points, weight = reply["centres"].flatten(0, 1), reply["n"].flatten()
    return weighted_kmeans(points, weight, k, fed.key("server"), starts)


def by_shares(fed: Federation, divide: Callable[..., Any], found: Tensor, ids: Ids) -> Evidence:
    """Where clients belong by how the task `divide` deals their samples to the centres."""
    ids, reply = fed.map(divide, found, to=ids)
    return everywhere(ids, reply["n"] / reply["n"].sum(1, keepdim=True))


def everywhere(ids: Ids, shares: Tensor) -> Evidence:
    """The heaviest component of each client as its group."""
    two = torch.cat([shares, shares.new_zeros(len(shares), 1)], 1).sort(1, descending=True).values
    fits = torch.ones(len(ids), dtype=torch.bool)
    return Evidence(shares.argmax(1), two[:, 0] - two[:, 1], two[:, 0] * torch.nan, fits)


# prediction


def closeness(centres: Tensor, x: Tensor) -> Tensor:
    """Minus the squared distance to each centre: [n, k]."""
    return -mixtures.squared_distances(x.reshape(len(x), -1).double(), centres)
