"""Helpers of FedGMI and Blend: the autoencoder and the expert of each component.

Both methods keep a variational autoencoder for every component and, if there are labels, an expert
classifier. The functions here score samples, train the models on the parts of a client's data, and
predict with the expert of each sample's component.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Params, Tree, n_rows, row
from coterie.models.vae import VAE, divergence, gaussian, pixels

Loss = Callable[..., Tensor]

# Tuned on digits with 300 samples per client; with 1,000 or more, use 2 epochs and 0.001 for both.
EXPERTS = LocalSGD(0.003, epochs=5, batch_size=32, optimizer="adam")
AUTOENCODERS = LocalSGD(0.001, epochs=5, batch_size=32, optimizer="adam")


# both sides


def check_vae(owner: str, vae: Model) -> None:
    """Raise an error if a network is not a density model."""
    if not hasattr(vae.training_network, "decode") or isinstance(vae.loss, str):
        raise ConfigError(
            f"{owner}: vae must be a density model. Got {vae.title} with loss {vae.loss!r}; use "
            "Model(VAE(784), loss=bernoulli), or [vae] in a run file."
        )


def check_components(owner: str, n_components: int | None, n_clients: int) -> None:
    """Raise an error if there are more components than clients: each starts from another client."""
    if n_components is not None and n_components > n_clients:
        raise ConfigError(
            f"{owner}: n_components must be at most the number of clients, {n_clients}. "
            f"Got {n_components}."
        )


def latent_size(vae: Model) -> int:
    """Length of a code."""
    return int(vae.training_network.latent)  # type: ignore[arg-type]


def unlabelled(x: Any) -> Batch:
    """Samples without labels as a batch."""
    n = len(x)
    ones = torch.ones(n, device=x.device)
    return Batch(x, torch.zeros(n, device=x.device), ones.bool(), ones)


def score(vae: Model, bank: Params, batch: Batch) -> Tensor:
    """Score of every sample under every autoencoder of a bank, in nats: [n, k]."""
    k = n_rows(bank)
    return torch.stack([vae.losses(row(bank, j), batch) for j in range(k)], 1)


# server


def train_cohort(fed: Federation, train: Any, state: Any) -> Any:
    """The state after the clients of the round have trained both models on their parts.

    The means are weighted by the sizes of the parts. `train` is the task of the clients.
    """
    cohort = fed.cohort()
    cohort = cohort[state.assignment[cohort] >= 0]
    if not len(cohort):
        return state
    means = [Mean("vaes", state.vaes, weight="n_vae", slots=True)]
    if state.experts:
        means.append(Mean("experts", state.experts, weight="n_expert", slots=True))
    _, reply = fed.map(train, state.vaes, state.experts, to=cohort, reduce=means)
    return state._replace(**{mean.leaf: reply[mean.leaf] for mean in means})


# client


def fit(
    client: Client, vae: Model, params: Params, local: LocalSGD, epochs: int, loss: Loss
) -> dict[str, Tree]:
    """Train an autoencoder on all samples of a client, and report how well it fits them."""
    params = replace(local, epochs=epochs, steps=None)(client, params, loss)
    coded, batch = vae.apply(params, client.train.x), client.train
    nats = batch.mean(vae.loss_of(coded, batch))
    apart = batch.mean(divergence(coded))
    return {"vae": params, "n": batch.size, "nats": nats, "divergence": apart}


def train_parts(
    client: Client,
    part: Tensor,
    which: Tensor,
    vaes: Params,
    experts: Params,
    fit_vae: tuple[LocalSGD, Loss],
    fit_expert: tuple[LocalSGD, Loss] | None,
) -> dict[str, Tree]:
    """Train both models of every component on the client's part of it, all parts in parallel.

    Parameters
    ----------
    part
        Component of each sample. [n]
    which
        Whether the client trains autoencoders, and whether it trains experts. [2]
    vaes
        Autoencoders of all components. [k, ...]
    experts
        Experts of all components; empty if there are none. [k, ...]
    fit_vae
        Training of the autoencoders, and their loss.
    fit_expert
        Training of the experts, and their loss; None: there are no experts.
    """
    k = n_rows(vaes)

    def one(vae: Params, expert: Params, j: Tensor) -> tuple[Tree, ...]:
        own = client.train.where(part == j)
        size = own.mask.sum().double()
        local, loss = fit_vae
        vae = local(client, vae, loss, on=own.where(which[0]), salt=j)
        if fit_expert is not None:
            local, loss = fit_expert
            expert = local(client, expert, loss, on=own.where(which[1]), salt=j)
        return vae, expert, size * which[0], size * which[1]

    trained = torch.vmap(one)(vaes, experts, torch.arange(k))
    return dict(zip(("vaes", "experts", "n_vae", "n_expert"), trained, strict=True))


# use


def example(problem: Any) -> dict[str, Any]:
    """Small models for the problem of the contract, and their training."""
    shape, local = tuple(problem.data.sample_shape), problem.local
    return {
        "vae": Model(lambda: VAE(shape, 2, (8,), "gaussian"), gaussian, dtype=problem.dtype),
        "model": problem.model,
        "local": local,
        "local_vae": LocalSGD(0.01, epochs=local.epochs, batch_size=8, optimizer="adam"),
    }


def answer(
    vae: Model, model: Model | None, vaes: Params, experts: Params, cost: Tensor, x: Any
) -> Tensor:
    """Outputs of the expert of each sample's best component; without experts, of its VAE.

    Parameters
    ----------
    cost
        Cost of each component for each sample; the smallest is best. [n, k]
    """
    k = cost.shape[1]
    if model is None:
        outputs = [vae.apply(row(vaes, j), x).output for j in range(k)]
        outputs = [pixels(output, vae.loss) for output in outputs]
    else:
        outputs = [model.apply(row(experts, j), x) for j in range(k)]
    every = torch.stack(outputs, 1)  # [n, k, ...]
    chosen = cost.argmin(1)[:, None] == torch.arange(k)
    chosen = chosen.reshape(*cost.shape, *(1,) * (every.ndim - 2))
    return torch.where(chosen, every, torch.zeros_like(every)).sum(1)
