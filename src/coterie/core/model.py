"""A model: any `nn.Module` as functions of a tree of weights and buffers.

Models run in evaluation mode, except inside the training operation. Batch norm and dropout are
replaced by layers that handle padding and keys (`core/layers.py`).
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
from coterie.core.ops import probe, probe_random
from coterie.core.random import fold
from coterie.core.tree import BUFFER, Params, Tree, stack, tree_map

Loss: TypeAlias = Callable[[Any, Batch], Tensor]
"""A function of outputs and batch that returns one loss per sample."""


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of logits, averaged over positions if a sample has several."""
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

    The network belongs to this object, so weights are assigned directly, which costs a tenth of
    `functional_call`. `own` has the names of layers that a kernel runs for each client in turn.
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
        The network, or a function that builds it. Initial weights are drawn from a key: by calling
        the function, or by `reset_parameters` of every layer that has this method.
    loss
        "cross_entropy", "squared_error", "reconstruction", or a function of outputs and batch
        that returns one loss per sample.
    head
        Name or names of the submodules (or parameters) that each group has for itself; all groups
        share the other weights. None: each group has all weights for itself.
    dtype
        Floating-point type of the weights; inputs are cast to it.
    made_from
        Description of the model in a run file, so that the run can be built again. None: the model
        cannot be described in a run file.
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
    _loose: set[str] = field(init=False, repr=False)  # buffers of layers of other packages
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
                    f"Model: head must be the name of a part of {title}. Got '{head}'. Known: "
                    f"{', '.join(name for name, _ in skeleton.named_children())}."
                )
        clustered = {
            leaf
            for leaf, name in names.items()
            if not heads or any(_within(name, h) for h in heads)
        }
        set_(self, "_clustered", clustered)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process is built anew: networks in use hold the tensors of a stack."""
        return type(self), (self.module, self.loss, self.head, self.dtype, self.made_from)

    def _draw(self, seed: int) -> nn.Module:
        """The module with newly drawn weights; the global generator is not changed."""
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
        """A bank of k independent draws, or of k copies of one draw."""
        return stack([self.init(fold(key, 0 if same else j)) for j in range(k)])

    def apply(self, params: Params, x: Any) -> Any:
        """Outputs of the network."""
        mode = current_mode()
        training = mode.training
        module = self._training if training else self._evaluating
        values = {name: params[leaf] for leaf, name in self._names.items()}
        if mode.network is not None:  # the network of a kernel, with stacked weights
            return mode.network(self)(values, _cast(x, self.dtype))
        if training and not self._loose:  # the fast path, used in every step of every client
            return self._called(values, _cast(x, self.dtype))
        if training:  # a layer may write to its buffers; the caller's buffers must not change
            values |= {self._names[b]: params[b].clone() for b in self._loose}
        return torch.func.functional_call(module, values, (_cast(x, self.dtype),))

    def losses(
        self, params: Params, batch: Batch, key: Tensor | None = None, *given: Tree
    ) -> Tensor:
        """One loss per sample; `given` has the extra arguments of a training."""
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

    def probe_random(self, key: Tensor, count: int, batch: Batch) -> Tensor:
        """Losses of untrained networks, drawn from a key, on each sample: [count, n]."""
        flattens = not self.mixes_samples
        return probe_random(self.init, self.losses, key, count, batch, flattens=flattens)

    def n_outputs(self, x: Any) -> int:
        """Number of outputs for a sample: with cross-entropy, the number of classes."""
        with torch.no_grad():
            few = tree_map(lambda leaf: leaf[:1], x)
            output: Tensor = self._evaluating(_cast(few, self.dtype))
        return output.shape[1] if output.ndim > 1 else 1

    def split(self, params: Params) -> tuple[Params, Params]:
        """The weights that all groups share (none without a head), and the weights of a group."""
        own = self._clustered
        shared = {leaf: value for leaf, value in params.items() if leaf not in own}
        return shared, {leaf: value for leaf, value in params.items() if leaf in own}

    def merge(self, shared: Params, clustered: Params) -> Params:
        """The inverse of `split`."""
        return {**shared, **clustered}

    def features(self, params: Params, x: Any) -> Tensor:
        """The inputs of the head."""
        return self.features_and_output(params, x)[0]

    def features_and_output(self, params: Params, x: Any) -> tuple[Tensor, Any]:
        """The inputs of the head, and the outputs, from one pass."""
        if not isinstance(self.head, str):
            raise ConfigError(
                "Model: head must be the name of one submodule for features. "
                f"Got {self.head!r}. Set head when you build the model."
            )
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
        """The network in training mode, for kernels that build their own network from it."""
        return self._training

    @property
    def evaluating_network(self) -> nn.Module:
        """The network in evaluation mode, for the same purpose."""
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
    """Use layers that handle padding and keys; refuse layers that use global random numbers."""
    if isinstance(module, _BATCH_NORMS + _CHANNEL_DROPOUTS + (nn.Dropout,)):
        raise ConfigError(
            f"Model: module must be a network with layers. Got a single {type(module).__name__}. "
            "Wrap it in an nn.Module."
        )
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout:
            raise ConfigError(
                f"Model: {type(layer).__name__} must have dropout=0, because it draws from the "
                f"global generator. Got {layer.dropout}; put an nn.Dropout beside it."
            )
        # Not named_children, which skips the second place of a layer that is used twice.
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
