"""Small convolutional networks of a bank as one wide network.

Model j has the j-th part of the channels of the wide network, so an image is read once for all
models. Vector registers are also used better: a first layer of six channels fills only a third of
one. ReLU and pooling treat all channels alike and run unchanged.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.client import Batch
from coterie.core.model import Model, Network
from coterie.core.ops import channels_last
from coterie.core.tree import Params, leaves, n_rows, row
from coterie.engines.stacking.mode import probing

LIGHT = 50_000
"""Up to this number of weights, the time of a network is calls and vector width, not arithmetic."""
ABREAST = 8
"""Number of models in a wide network; with more, activations do not fit in the cache."""
PIECE = 64
"""Images that go through the wide network together."""


class SideBySide:
    """Outputs of a bank of small convolutional networks.

    A network that mixes channels in other ways gives wrong outputs or an error. Both are detected
    on the first images; such a network then runs model by model.
    """

    def __init__(self) -> None:
        self._networks: dict[Model, Network | None] = {}

    def losses(self, model: Model, bank: Params, rows: Batch) -> Tensor | None:
        """Losses of every model on every image: [k, rows]; None if this network cannot be used."""
        k = n_rows(bank)
        if k == 1 or not isinstance(rows.x, Tensor):
            return None
        if model not in self._networks:
            wide = _wide(model) if _light(bank, k) else None
            fits = wide is not None and _same(model, wide, bank, rows)
            self._networks[model] = wide if fits else None
        network = self._networks[model]
        if network is None:
            return None
        sizes = [len(part) for part in torch.arange(k).chunk(-(-k // ABREAST))]
        pieces = [rows.part(start, PIECE) for start in range(0, len(rows.mask), PIECE)]
        columns = []
        for abreast in zip(*(leaf.split(sizes) for leaf in bank.values()), strict=True):
            some = dict(zip(bank, abreast, strict=True))
            outputs = (_outputs(model, network, some, piece.x) for piece in pieces)
            parts = [
                torch.stack([model.loss_of(output, piece) for output in each])
                for each, piece in zip(outputs, pieces, strict=True)
            ]
            columns.append(torch.cat(parts, 1))
        return torch.cat(columns)


def _light(bank: Params, k: int) -> bool:
    own = leaves(bank)
    return any(leaf.ndim == 5 for leaf in own) and sum(leaf.numel() for leaf in own) < LIGHT * k


def _outputs(model: Model, network: Network, bank: Params, x: Tensor) -> Tensor:
    """[k, b, ...]"""
    with probing(lambda _: network, None):
        out: Tensor = model.apply(bank, channels_last(x))
    k = n_rows(bank)
    return out.reshape(len(out), k, -1, *out.shape[2:]).movedim(1, 0)


def _same(model: Model, network: Network, bank: Params, rows: Batch) -> bool:
    """Whether the wide network gives the same outputs as the models one by one."""
    few = rows.part(0, 3)
    try:
        wide = _outputs(model, network, bank, few.x)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    alone = torch.stack([model.apply(row(bank, j), few.x) for j in range(len(wide))])
    return wide.shape == alone.shape and torch.allclose(wide, alone, 1e-4, 1e-5)


def _wide(model: Model) -> Network | None:
    """The network with wide layers; None: a layer with weights has no wide form."""
    module = copy.deepcopy(model.evaluating_network)
    for layer in list(module.modules()):
        for name, child in list(layer._modules.items()):
            if type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros":
                setattr(layer, name, WideConv(child))
            elif type(child) is nn.Linear:
                setattr(layer, name, WideLinear(child))
    for layer in module.modules():
        values = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if values and not isinstance(layer, WideConv | WideLinear):
            return None
    return Network(module)


class WideLayer(nn.Module):
    """A layer with a row of weights for each model."""

    weight: Tensor  # [k, ...]
    bias: Tensor | None

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.register_parameter("weight", like.weight)
        self.register_parameter("bias", like.bias)
        self.like = (like,)  # in a tuple, so that its weights are not this module's


class WideConv(WideLayer):
    def forward(self, x: Tensor) -> Tensor:
        like, weight, bias = self.like[0], self.weight, self.bias
        groups = 1 if x.shape[1] == weight.shape[2] else len(weight)  # the images, or wide already
        return functional.conv2d(
            x,
            channels_last(weight.flatten(0, 1)),
            None if bias is None else bias.flatten(),
            like.stride,
            like.padding,
            like.dilation,
            groups,
        )


class WideLinear(WideLayer):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        k, _, width = weight.shape
        if x.ndim != 2 or x.shape[1] != k * width:
            raise ValueError("the network mixes the channels of its models")
        rows = x.unflatten(1, (k, width)).movedim(1, 0)  # [k, b, i]
        out = rows @ weight.mT if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
        return out.movedim(0, 1).flatten(1)
