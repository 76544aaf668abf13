"""Means of features by class, which FedProto and FedPAC exchange."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.model import Model


def with_head(model: Model, owner: str) -> Model:
    """The model with a linear layer as its head: the one it names, or its last linear layer."""
    network, name = model.evaluating_network, model.head
    if name is None:
        linear = [n for n, layer in network.named_modules() if n and isinstance(layer, nn.Linear)]
        name = linear[-1] if linear else None
    layer = network.get_submodule(name) if isinstance(name, str) else None
    if not isinstance(layer, nn.Linear) or model.loss != "cross_entropy":
        raise ConfigError(
            f"{owner}: model must be a classifier (loss cross_entropy) with a linear layer as its "
            f"head. Got {model.title} with loss {model.loss!r} and head {model.head!r}; name the "
            "layer by Model(..., head=...), or head under [model] in a run file."
        )
    return model if model.head == name else replace(model, head=name)


def head_shape(model: Model) -> tuple[int, int]:
    """Number of classes and of features."""
    assert isinstance(model.head, str)
    layer = model.evaluating_network.get_submodule(model.head)
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def class_means(values: Tensor, batch: Batch, n_classes: int) -> tuple[Tensor, Tensor]:
    """Mean of the real rows of each class (zeros for a class without rows), and their number.

    `values` has a row per sample. The result: [c, d] and [c].
    """
    classes = torch.arange(n_classes, device=batch.y.device)
    member = (batch.y[:, None] == classes) & batch.mask[:, None]  # [n, c]
    counts = member.sum(0)
    rows = torch.where(batch.mask[:, None], values, torch.zeros_like(values)).double()
    means = (member.double() / counts.clamp(min=1)).mT @ rows
    return means.to(values.dtype), counts


def row_of_class(table: Tensor, label: Tensor) -> Tensor:
    """The row of a table that belongs to each sample's class: [n, ...].

    A kernel may run several clients at once: tables are [clients, c, ...] then, and labels those of
    one client after the other.
    """
    if table.ndim == 3:
        clients, n_classes = table.shape[:2]
        first = torch.arange(clients, device=label.device) * n_classes
        label = label + first.repeat_interleave(len(label) // clients)
        table = table.flatten(0, 1)
    return table.index_select(0, label)
