"""Helpers of the methods that cluster samples: fedgem, mosaic, kfed, federated k- and c-means."""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.clustering.lloyd import squared_distances
from coterie.core.algorithm import Evidence
from coterie.core.client import Client
from coterie.core.tree import Ids

# client


def samples(client: Client) -> tuple[Tensor, Tensor]:
    """Samples as vectors in double precision, and the mask of the real ones."""
    x, mask = client.train.x, client.train.mask
    if isinstance(x, dict):
        raise ValueError("samples must be one array of numbers, got a dict of arrays")
    return x.reshape(len(mask), -1).double(), mask


def known_count(client: Client, n_components: int | Literal["facts"]) -> int:
    """The number of components given for a client."""
    if n_components == "facts":
        if "n_components" not in client.facts:
            raise ValueError(
                "with n_components='facts', every client must have a fact 'n_components', and this "
                "client has none. Give it with the data, or set n_components to one number for all "
                "clients (mosaic: or to 'auto')"
            )
        return int(client.facts["n_components"])
    return n_components


def pad_rows(leaf: Tensor, slots: int, fill: float = 0.0) -> Tensor:
    """Append rows of a fill value until there are `slots` rows."""
    missing = slots - len(leaf)
    return torch.cat([leaf, leaf.new_full((missing, *leaf.shape[1:]), fill)]) if missing else leaf


# server


def keep_finite(owner: str, ids: Ids, reply: dict[str, Any]) -> tuple[Ids, dict[str, Any]]:
    """Leave out replies that are not finite, with a warning that names the method (`owner`)."""
    if not len(ids):
        return ids, reply
    good = torch.ones(len(ids), dtype=torch.bool)
    for leaf in reply.values():
        if leaf.is_floating_point():
            good &= leaf.reshape(len(ids), -1).isfinite().all(1)
    if bool(good.all()):
        return ids, reply
    lost = int((~good).sum())
    warnings.warn(f"{owner}: {lost} replies were not finite and were left out.", stacklevel=3)
    return ids[good], {name: leaf[good] for name, leaf in reply.items()}


def evidence_of(shares: Tensor) -> Evidence:
    """Place each client in the component that has the largest share [m, k] of its samples."""
    two = torch.cat([shares, shares.new_zeros(len(shares), 1)], 1).sort(1, descending=True).values
    fits = torch.ones(len(shares), dtype=torch.bool)
    return Evidence(shares.argmax(1), two[:, 0] - two[:, 1], two[:, 0] * torch.nan, fits)


def place_heard(asked: Ids, heard: Ids, shares: Tensor) -> Evidence:
    """Place the clients that answered by their shares [m, k]; others are in no component."""
    found, answered = evidence_of(shares), torch.isin(asked, heard)
    nothing = torch.full((len(asked),), torch.nan, dtype=shares.dtype)
    group = torch.full((len(asked),), -1).masked_scatter(answered, found.group)
    margin = nothing.masked_scatter(answered, found.margin)
    return Evidence(group, margin, nothing, torch.ones_like(answered))


# prediction


def closeness(centres: Tensor, x: Tensor) -> Tensor:
    """Minus the squared distance to each centre: [n, k]."""
    return -squared_distances(x.reshape(len(x), -1).double(), centres)
