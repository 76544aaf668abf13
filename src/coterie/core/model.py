"""A model: any `nn.Module` as functions of a tree of weights and buffers.

Evaluation mode is the rule; training mode exists only inside the training operation. Batch norm and
dropout are swapped for layers that know padding and keys (`core/layers.py`).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.layers import (
    HalvingPool,
    KeyedDropout,
    MaskedBatchNorm,
    current_mode,
    evaluating,
)
from coterie.core.ops import probe, seeded
from coterie.core.random import fold
from coterie.core.tree import BUFFER, Params, Tree, stack, tree_map

Loss: TypeAlias = Callable[[Any, Batch], Tensor]
"""Outputs and batch in, one loss per sample out."""


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of logits; averaged over positions where a sample has several."""
    losses = functional.cross_entropy(output, batch.y.long(), reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def squared_error(output: Tensor, batch: Batch) -> Tensor:
    """Squared error without the factor one half, averaged over the outputs of a sample."""
    return _mean_square(output - batch.y.to(output.dtype).reshape(output.shape))


def reconstruction(output: Tensor, batch: Batch) -> Tensor:
    """Squared error between output and input, averaged over the elements of a sample."""
    return _mean_square(output - batch.x.to(output.dtype).reshape(output.shape))


def _mean_square(error: Tensor) -> Tensor:
    return error.square().flatten(1).mean(1) if error.ndim > 1 else error.square()


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "squared_error": squared_error,
    "reconstruction": reconstruction,
}


class Network:
    """A network called with given weights.

    The network is this object's own, so weights are put in their places directly, which costs a
    tenth of `functional_call`. `own` names layers that a kernel runs for each client in turn.
    """

    def __init__(self, module: nn.Module, own: Sequence[str] = ()) -> None:
        self.module, self.own = module, tuple(own)
        names = {
            id(value): name for name, value in (*module.named_parameters(), *module.named_buffers())
        }
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for layer in module.modules():
            for table in (layer._parameters, layer._buffers):
                for key, value in table.items():
                    if value is not None:
                        self.places.setdefault(names[id(value)], []).append((table, key))

    def __call__(self, values: dict[str, Tensor], x: Any) -> Any:
        for name, value in values.items():
            for table, key in self.places[name]:
                table[key] = value
        return self.module(x)


@dataclass(frozen=True, eq=False)
class Model:
    """An `nn.Module` as pure functions of its parameters.

    Parameters
    ----------
    module
        The network, or a function that builds it. Initial weights are drawn anew from a key: by
        calling the function, or by `reset_parameters` of every layer that has one.
    loss
        "cross_entropy", "squared_error", "reconstruction", or a function of outputs and batch
        that gives one loss per sample.
    head
        Name or names of the submodules (or parameters) that belong to a group; the rest of the
        weights is shared by all groups. None: everything belongs to a group.
    dtype
        Floating type of the weights; inputs are cast to it.
    made_from
        How a run file describes it, so that a run can be built again; None: it cannot be named.
    """

    module: nn.Module | Callable[[], nn.Module]
    loss: str | Loss = "cross_entropy"
    head: str | tuple[str, ...] | None = None
    dtype: torch.dtype = torch.float32
    made_from: dict[str, Any] | None = None
    mixes_samples: bool = field(init=False, repr=False)
    _evaluating: nn.Module = field(init=False, repr=False)
    _training: nn.Module = field(init=False, repr=False)
    _names: dict[str, str] = field(init=False, repr=False)  # leaf of the tree -> name in the module
    _loose: set[str] = field(init=False, repr=False)  # buffers of layers that are not ours
    _clustered: set[str] = field(init=False, repr=False)
    _called: "Network" = field(init=False, repr=False)  # the training network, called directly
    title: str = field(init=False, repr=False)  # name of the wrapped module, for messages

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise ConfigError(
                f"Model: loss must be one of {', '.join(LOSSES)}, or a function. Got '{self.loss}'."
            )
        skeleton = self._draw(0)
        title = type(skeleton).__name__
        _swap(skeleton)
        names = {name: name for name, p in skeleton.named_parameters() if p.requires_grad}
        buffers = [name for name, p in skeleton.named_parameters() if not p.requires_grad]
        buffers += [name for name, _ in skeleton.named_buffers()]
        names |= {BUFFER + name: name for name in buffers}
        own = {
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in skeleton.named_modules()
            if isinstance(layer, MaskedBatchNorm)
            for name, _ in layer.named_buffers()
        }
        set_ = object.__setattr__
        set_(self, "_evaluating", skeleton.eval())
        set_(self, "_training", copy.deepcopy(skeleton).train())
        set_(self, "_called", Network(copy.deepcopy(self._training)))
        set_(self, "_names", names)
        set_(self, "_loose", {BUFFER + name for name in buffers} - {BUFFER + n for n in own})
        set_(self, "title", title)
        set_(self, "mixes_samples", _mixes(skeleton))
        heads = (self.head,) if isinstance(self.head, str) else self.head or ()
        for head in heads:
            if not any(_within(name, head) for name in names.values()):
                raise ConfigError(
                    f"Model: head must name a part of {title}. Got '{head}'; known: "
                    f"{', '.join(name for name, _ in skeleton.named_children())}."
                )
        clustered = {
            leaf
            for leaf, name in names.items()
            if not heads or any(_within(name, h) for h in heads)
        }
        set_(self, "_clustered", clustered)

    def _draw(self, seed: int) -> nn.Module:
        """The module with freshly drawn weights; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if not isinstance(self.module, nn.Module):
                return self.module().to(self.dtype)
            module = copy.deepcopy(self.module)
            for layer in module.modules():
                reset = getattr(layer, "reset_parameters", None)
                reset = reset or getattr(layer, "_reset_parameters", None)
                if reset is not None:
                    reset()
            return module.to(self.dtype)

    def init(self, key: Tensor) -> Params:
        """Weights and buffers drawn from a key."""
        module = self._draw(int(key) & (2**63 - 1))
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        return {
            leaf: values[name].detach().clone().to(key.device) for leaf, name in self._names.items()
        }

    def init_many(self, key: Tensor, k: int, same: bool = False) -> Params:
        """A bank of k independent draws, or of k copies of one."""
        return stack([self.init(fold(key, 0 if same else j)) for j in range(k)])

    def apply(self, params: Params, x: Any) -> Any:
        """Outputs of the network."""
        mode = current_mode()
        training = mode.training
        module = self._training if training else self._evaluating
        values = {name: params[leaf] for leaf, name in self._names.items()}
        if mode.network is not None:  # a kernel's own, of stacked weights
            return mode.network(self)(values, _cast(x, self.dtype))
        if training and not self._loose:  # every step of every client: no time for more
            return self._called(values, _cast(x, self.dtype))
        if training:  # a foreign layer may write into its buffers; the caller's stay as they are
            values |= {self._names[b]: params[b].clone() for b in self._loose}
        return torch.func.functional_call(module, values, (_cast(x, self.dtype),))

    def losses(
        self, params: Params, batch: Batch, key: Tensor | None = None, *given: Tree
    ) -> Tensor:
        """One loss per sample; `given` is what a training hands its penalty."""
        if self.mixes_samples and not current_mode().training:
            with evaluating(batch.mask):
                return self.loss_of(self.apply(params, batch.x), batch)
        return self.loss_of(self.apply(params, batch.x), batch)

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """One loss per sample from outputs."""
        loss = LOSSES[self.loss] if isinstance(self.loss, str) else self.loss
        return loss(output, batch)

    def probe(self, models: Params, batch: Batch) -> Tensor:
        """Mean loss of each model of a bank on a batch, in evaluation mode: [k]."""
        return probe(self.losses, models, batch, flattens=not self.mixes_samples)

    def probe_each(self, models: Params, batch: Batch) -> Tensor:
        """Loss of each model of a bank on each sample, in evaluation mode: [k, n]."""
        return probe(self.losses, models, batch, flattens=not self.mixes_samples, each=True)

    def seeded(self, key: Tensor, count: int, batch: Batch) -> Tensor:
        """Losses, sample by sample, of networks drawn from a key and never trained: [count, n]."""
        return seeded(self.init, self.losses, key, count, batch, flattens=not self.mixes_samples)

    def n_outputs(self, x: Any) -> int:
        """Outputs for a sample: classes, where the loss is cross-entropy."""
        with torch.no_grad():
            few = tree_map(lambda leaf: leaf[:1], x)
            output: Tensor = self._evaluating(_cast(few, self.dtype))
        return output.shape[1] if output.ndim > 1 else 1

    def split(self, params: Params) -> tuple[Params, Params]:
        """What all groups share (nothing unless there is a head), and what belongs to a group."""
        own = self._clustered
        shared = {leaf: value for leaf, value in params.items() if leaf not in own}
        return shared, {leaf: value for leaf, value in params.items() if leaf in own}

    def merge(self, shared: Params, clustered: Params) -> Params:
        """The inverse of `split`."""
        return {**shared, **clustered}

    def features(self, params: Params, x: Any) -> Tensor:
        """What enters the head."""
        return self.features_and_output(params, x)[0]

    def features_and_output(self, params: Params, x: Any) -> tuple[Tensor, Any]:
        """What enters the head, and the outputs, from one pass."""
        if not isinstance(self.head, str):
            raise ConfigError(f"Model: features need one head, got {self.head!r}.")
        mode = current_mode()
        module = self._evaluating
        if mode.network is not None:
            network: Any = mode.network(self)
            module = network.module
        elif mode.training:
            module = self._training if self._loose else self._called.module
        seen: list[Tensor] = []
        hook = module.get_submodule(self.head).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        try:
            output = self.apply(params, x)
        finally:
            hook.remove()
        return seen[0], output

    @property
    def training_network(self) -> nn.Module:
        """The network that training runs, for kernels that make one of their own from it."""
        return self._training

    @property
    def evaluating_network(self) -> nn.Module:
        """The network that evaluation runs, likewise."""
        return self._evaluating

    def plain(self, params: Params) -> nn.Module:
        """The user's own module with these weights, in evaluation mode."""
        module = self._draw(0)
        values = {name: params[leaf] for leaf, name in self._names.items()}
        module.load_state_dict(values, strict=False)
        return module.eval()


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {k: _cast(v, dtype) for k, v in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _swap(module: nn.Module) -> None:
    """Put in the layers that know padding and keys; refuse those that draw by themselves."""
    if isinstance(module, _BATCH_NORMS + _CHANNEL_DROPOUTS + (nn.Dropout,)):
        raise ConfigError(
            f"Model: a lone {type(module).__name__} is no model; wrap it in a module."
        )
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout:
            raise ConfigError(
                f"Model: {type(layer).__name__} must have dropout=0, because it draws from the "
                f"global generator. Got {layer.dropout}; put an nn.Dropout beside it."
            )
        # Not named_children: it passes over the second place of a layer that is used twice.
        for name, child in list(layer._modules.items()):
            if isinstance(child, _BATCH_NORMS):
                setattr(layer, name, MaskedBatchNorm(child))
            elif isinstance(child, _CHANNEL_DROPOUTS):
                setattr(layer, name, KeyedDropout(child.p, channels=True))
            elif isinstance(child, nn.Dropout):
                setattr(layer, name, KeyedDropout(child.p))
            elif child is not None and HalvingPool.stands_for(child):
                setattr(layer, name, HalvingPool())


def _mixes(module: nn.Module) -> bool:
    """Whether a sample's output may depend on its batch in evaluation mode."""
    return any(
        isinstance(layer, MaskedBatchNorm) and layer.running_mean is None
        for layer in module.modules()
    )
