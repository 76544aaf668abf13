"""The losses of a bank of models on the data of many clients."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.client import Batch
from coterie.core.model import Model, Network
from coterie.core.ops import Losses, channels_last, convolves, stack_size
from coterie.core.tree import Params, n_rows, row, tree_map
from coterie.engines.stacking.first import Watch, Wide
from coterie.engines.stacking.mode import probing, stack_mode
from coterie.engines.stacking.side_by_side import SideBySide


class Probes:
    """Runs the rows of all clients of a stack as one batch, model by model.

    Small convolutional networks run as one wide network. A linear first layer that reads the inputs
    directly is computed for all models at once, and its outputs are kept for the training that
    follows (`start`).
    """

    def __init__(self) -> None:
        self._networks: dict[Model, Network] = {}
        self._firsts: dict[Model, tuple[str, str | None] | None] = {}
        self._wide: Wide | None = None
        self._abreast = SideBySide()

    def forget(self) -> None:
        """Drop what was kept, because the next chunk has other data."""
        self._wide = None

    def start(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Outputs of a first layer on all rows, [s, n, h], if a probe has computed them."""
        return None if self._wide is None else self._wide.start(x, weight, bias)

    def __call__(self, losses: Losses, bank: Params, batch: Batch, each: bool = False) -> Tensor:
        s, n = stack_size(batch), batch.mask.shape[1]
        batch = tree_map(lambda leaf: leaf.expand(s, *leaf.shape[1:]), batch)
        rows = tree_map(lambda leaf: leaf.flatten(0, 1), batch)
        columns = [values.reshape(s, n) for values in self._columns(losses, bank, rows)]
        if not each:
            mean = torch.vmap(Batch.mean)
            columns = [mean(batch, values) for values in columns]
        return torch.stack(columns, 1)  # [s, k], or [s, k, n] of each sample

    def _columns(self, losses: Losses, bank: Params, rows: Batch) -> list[Tensor]:
        """Losses of every model on all rows."""
        model = getattr(losses, "__self__", None)
        if isinstance(model, Model) and getattr(losses, "__func__", None) is Model.losses:
            together = self._abreast.losses(model, bank, rows)
            if together is not None:
                return list(together)
        self._wide = wide = self._read_together(losses, bank, rows)
        columns = []
        for j in range(n_rows(bank)):
            own = row(bank, j)
            if wide is not None:
                known = Known(rows.x, own[self._firsts[losses.__self__][0]], wide.out[:, j])  # type: ignore[attr-defined, index]
                with probing(self._network, known):
                    columns.append(losses(own, rows))
            elif convolves(own) and isinstance(rows.x, Tensor) and rows.x.ndim == 4:
                columns.append(_in_pieces(losses, own, rows))
            else:
                columns.append(losses(own, rows))
        return columns

    def _read_together(self, losses: Losses, bank: Params, rows: Batch) -> Wide | None:
        model = getattr(losses, "__self__", None)
        if not isinstance(model, Model) or not isinstance(rows.x, Tensor):
            return None
        if model not in self._firsts:
            self._firsts[model] = self._find(model, row(bank, 0), rows)
        names = self._firsts[model]
        if names is None or rows.x.dtype != bank[names[0]].dtype:
            return None
        bias = None if names[1] is None else bank[names[1]]
        return Wide(rows.x.flatten(1), bank[names[0]], bias)

    def _find(self, model: Model, params: Params, rows: Batch) -> tuple[str, str | None] | None:
        """Names of the weights of the only layer that reads the inputs directly, if any."""
        if not any(type(layer) is nn.Linear for layer in model.evaluating_network.modules()):
            return None
        few = tree_map(lambda leaf: leaf[:2], rows)
        watch = Watch(few.x)
        with probing(self._network, watch):
            model.losses(params, few)
        names = [name for i in watch.seen for name, leaf in params.items() if id(leaf) == i]
        weights = [name for name in names if params[name].ndim == 2]
        if len(weights) != 1 or params[weights[0]].shape[1] != rows.x[0].numel():
            return None
        return weights[0], next((name for name in names if name != weights[0]), None)

    def _network(self, model: Model) -> Network:
        if model not in self._networks:
            module = copy.deepcopy(model.evaluating_network)
            for layer in list(module.modules()):
                for name, child in list(layer._modules.items()):
                    if type(child) is nn.Linear:
                        setattr(layer, name, FirstLinear(child))
            self._networks[model] = Network(module)
        return self._networks[model]


PIECE = 256
"""Number of images in one pass of convolutions, so that their activations stay in the cache."""


def _in_pieces(losses: Losses, model: Params, rows: Batch) -> Tensor:
    """Losses of images, some at a time, in the layout in which convolutions are fastest."""
    pieces = [rows.part(start, PIECE) for start in range(0, len(rows.mask), PIECE)]
    fast = tree_map(channels_last, model)
    try:
        return torch.cat([losses(fast, p._replace(x=channels_last(p.x))) for p in pieces])
    except RuntimeError as error:  # the network may need the usual layout for a view
        if "view size is not compatible" not in str(error):
            raise
        return torch.cat([losses(model, piece) for piece in pieces])


class Known(Watch):
    """The output of one layer on all inputs, computed before."""

    def __init__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        super().__init__(x)
        self.weight, self.out = weight, out

    def answers(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
        return weight is self.weight and self.meets(x)

    def value(self) -> Tensor:
        """Output of the layer: [rows, h]."""
        return self.out


class FirstLinear(nn.Module):
    """A linear layer that first checks whether its output is known."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.register_parameter("weight", like.weight)
        self.register_parameter("bias", like.bias)

    def forward(self, x: Tensor) -> Any:
        first = stack_mode().first
        if first is not None and first.answers(self.weight, self.bias, x):
            return first.value().reshape(*x.shape[:-1], -1)
        return functional.linear(x, self.weight, self.bias)
