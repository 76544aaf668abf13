"""Helpers of the methods that cluster samples: fedgem, mosaic, kfed, federated k- and c-means."""

from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.clustering.lloyd import squared_distances
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
    floats = [leaf for leaf in reply.values() if leaf.is_floating_point()]
    good = find_finite(owner, "replies", *floats)
    return ids[good], {name: leaf[good] for name, leaf in reply.items()}


# prediction


def closeness(centres: Tensor, x: Tensor) -> Tensor:
    """Minus the squared distance to each centre: [n, k]."""
    return -squared_distances(x.reshape(len(x), -1).double(), centres)
