"""Blend's start: what clients send about their codes, and what the server finds from it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.blend import simplex
from coterie.algorithms.common_vae import latent_size
from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.tree import Params, put

PER_CLASS = 20  # samples per class and client needed to count components inside classes

# client


def describe_codes(code: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Mean and scatter of a client's codes: [d], [1, d, d]."""
    share = batch.share()
    mean = (code * share[:, None]).sum(0)
    apart = code - mean
    scatter = torch.einsum("n,nd,ne->de", share, apart, apart)[None]
    return {"mean": mean, "n": batch.size, "scatter": scatter}


def describe_classes(code: Tensor, batch: Batch, n_classes: int) -> dict[str, Tensor]:
    """Counts [c], sums [c, d] and scatter [c, d, d] of a client's codes inside each class."""
    member = batch.y.long()[:, None] == torch.arange(n_classes, device=code.device)
    member = (member & batch.mask[:, None]).double()  # [n, c]
    counts, sums = member.sum(0), member.T @ code
    means = sums / counts.clamp(min=1)[:, None]
    apart = (code - member @ means) * batch.mask[:, None]
    inner = torch.einsum("nc,nd,ne->cde", member, apart, apart)
    inner = inner / counts.clamp(min=1)[:, None, None]
    return {"counts": counts, "sums": sums, "class_scatter": inner}


# server


class Found(NamedTuple):
    """Result of `find_components`."""

    simplex: simplex.Simplex
    counted: int  # number of components that the moments suggest
    few: bool  # whether labels differ and classes are too small to count components inside


def find_components(reply: dict[str, Any], fine: Tensor, k: int | None, most: int) -> Found:
    """Find the number of components, purest clients and initial shares from clients' moments.

    Parameters
    ----------
    reply
        Replies of the clients: `describe_codes` and, if there are labels, `describe_classes`, with
        the scatters averaged.
    fine
        Which of the replies are finite. [m]
    k
        The number of components, if it is known.
    most
        Upper bound on the number of components, if it is not.
    """
    n = reply["n"][fine].double()
    mean, within = reply["mean"][fine], reply["scatter"][0] * n.sum() / (n.sum() - len(n))
    inside, few = None, False
    if "counts" in reply:
        counts, sums = reply["counts"][fine].double(), reply["sums"][fine]
        if simplex.labels_differ(counts):
            few = float(n.mean()) / max(counts.shape[1], 1) < PER_CLASS
            if not few:
                spare = counts.sum(0) / (counts.sum(0) - (counts > 0).sum(0)).clamp(min=1)
                inner = reply["class_scatter"] * spare[:, None, None]
                inside = int(simplex.per_class(sums, counts, inner).median())
                k = k or min(inside, most)
                centres = sums.sum(0) / counts.sum(0).clamp(min=1)[:, None]
                mean = mean - (counts @ centres) / n[:, None]
                within = (inner * counts.sum(0)[:, None, None]).sum(0) / n.sum()
    found = simplex.simplex(mean, n, within, k, most)
    return Found(found, found.counted if inside is None else inside, few)


def count_classes(vae: Model, model: Model, vae_params: Params, expert_params: Params) -> int:
    """Number of an expert's outputs, found on a decoded sample."""
    code = torch.zeros(1, latent_size(vae), dtype=vae.dtype)
    sample = vae.apply(vae_params, {"code": code})
    try:
        return int(model.apply(expert_params, sample).shape[1])
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"Blend: samples of the VAE must fit the expert {model.title} "
            f"({str(error).splitlines()[0]}). Give the VAE the shape of a sample, such as "
            "VAE((1, 28, 28))."
        ) from error


def choose_anchors(anchor: Tensor, first: Tensor, components: Tensor) -> tuple[Tensor, Tensor]:
    """The anchor of each of some components; if a component has none, the purest client.

    Parameters
    ----------
    anchor
        Component that each client is the anchor of; -1: none, -2: the client did not answer.
        [clients]
    first
        Initial shares of all clients. [clients, k]

    Returns
    -------
    `anchor` with the new anchors, and the client of each component.
    """
    at = torch.stack([(anchor == j).int().argmax() for j in components.tolist()])
    missing = ~torch.isin(components, anchor)
    for place in torch.nonzero(missing).flatten().tolist():
        free = anchor == -1
        if not bool(free.any()):
            anchor = torch.where(anchor == -2, -1, anchor)
            free = anchor == -1
        purest = torch.where(free, first[:, components[place]], -torch.inf)
        at[place] = purest.argmax()
        anchor = put(anchor, at[place : place + 1], components[place])
    return anchor, at
