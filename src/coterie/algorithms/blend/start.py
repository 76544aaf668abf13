"""How Blend begins: what clients send of their codes, and what the server reads off it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.blend import simplex
from coterie.algorithms.common_vae import latent_size
from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.tree import Params, put

PER_CLASS = 20  # samples of a class and client from which moments inside classes mean something

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
    """What the moments show."""

    simplex: simplex.Simplex
    counted: int  # number of components that the moments suggest
    few: bool  # whether labels differ, and classes are too small to look inside


def find_components(reply: dict[str, Any], fine: Tensor, k: int | None, most: int) -> Found:
    """Number of components, purest clients and first shares from clients' moments.

    Parameters
    ----------
    reply
        What clients sent: `describe_codes`, and `describe_classes` if there are labels, with the
        scatters averaged.
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
    """The client that stands for each of some components; where there is none, the purest.

    Parameters
    ----------
    anchor
        Component each client stands for; -1: none, -2: it was asked and did not answer. [clients]
    first
        First shares of all clients. [clients, k]

    Returns
    -------
    `anchor` with the new ones, and the client of each component.
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
