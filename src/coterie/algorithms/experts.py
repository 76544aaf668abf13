"""Several predictors that all clients share, mixed for each client: for FedEM and FedGMM."""

from typing import Any

import torch
from torch import Tensor

from coterie.core.client import Batch, Client
from coterie.core.layers import current_mode
from coterie.core.model import Model
from coterie.core.ops import Losses
from coterie.core.training import LocalSGD
from coterie.core.tree import Params, row

STEPS = 100
"""Steps of the shares of a newcomer; they rise towards one maximum, so more change little."""


def responsibilities(fit: Tensor, share: Tensor) -> Tensor:
    """Chance of each component for each sample, from log-likelihoods [n, k] and shares [k]."""
    fit = fit.double().nan_to_num(-1e30, 1e30, -1e30)
    return torch.softmax(share.log() + fit, 1)


def mean_share(chances: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Mean of the chances over the real samples, mixed with even shares by `smoothing`: [k]."""
    share = (chances * batch.share()[:, None]).sum(0)
    return (1 - smoothing) * share + smoothing / chances.shape[1]


def fit_shares(fit: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The shares that explain a client's samples best while the components stay: [k]."""
    share = torch.full(fit.shape[1:], 1 / fit.shape[1], dtype=torch.float64)
    for _ in range(STEPS):
        share = mean_share(responsibilities(fit, share), batch, smoothing)
    return share


def train_experts(
    client: Client, local: LocalSGD, losses: Losses, models: Params, weights: Tensor
) -> Params:
    """Every model of a bank after local training with its own weights of the samples: [k, n]."""

    def one(params: Params, number: Tensor, weight: Tensor) -> Any:
        on = client.train._replace(weight=client.train.weight * weight)
        return local(client, params, losses, on=on, salt=number)

    weights = weights.to(client.train.weight.dtype)
    return torch.vmap(one)(models, torch.arange(len(weights)), weights)


def weight_of_batch(batch: Batch) -> Tensor:
    """Mean weight of a batch's rows, for each of them.

    The mean of losses divides by the sum of the weights. Times this, it divides by the number of
    rows, so a component that explains few samples moves little. A kernel may run several clients at
    once.
    """
    clients = current_mode().clients
    mask = batch.mask.reshape(clients, -1)
    total = (batch.weight.reshape(clients, -1) * mask).sum(1)
    mean = total / mask.sum(1).clamp(min=1)
    return mean[:, None].expand(mask.shape).flatten()


def mix_outputs(model: Model, models: Params, x: Any, log_share: Tensor) -> Tensor:
    """Output of the mixture: log-probabilities of classes, or a mean of predictions.

    `log_share` is that of each model, [k], or of each model for each sample, [n, k].
    """
    k = log_share.shape[-1]
    every = torch.stack([model.apply(row(models, j), x) for j in range(k)], 1)  # [n, k, ...]
    log_share = log_share.to(every.dtype).expand(len(every), k)
    log_share = log_share.reshape(len(every), k, *(1,) * (every.ndim - 2))
    if model.loss == "cross_entropy":
        return torch.logsumexp(every.log_softmax(2) + log_share, 1)
    return (every * log_share.exp()).sum(1)
