"""Stacked twins: layers with the weights of many clients.

Activations are ordered by client, `[clients x batch, ...]`, so a network's own `forward`, ReLU,
pooling and reshapes run unchanged. Only layers with weights treat clients separately. A twin has
the same parameter names as the layer that it replaces.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.layers import SMALL, KeyedDropout, MaskedBatchNorm, current_mode
from coterie.core.model import Model, Network
from coterie.core.random import fold, uniform
from coterie.core.tree import tree_map
from coterie.engines.stacking.mode import stack_mode


class NoTwin(Exception):
    """A layer with weights that has no stacked twin."""


class Twin(nn.Module):
    """A layer with the same parameter names and a row of weights per client."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.like = (like,)  # in a tuple, so that its weights are not this module's
        for name, value in like.named_parameters(recurse=False):
            self.register_parameter(name, value)
        for name, value in like.named_buffers(recurse=False):
            self.register_buffer(name, value)

    def rows(self, x: Tensor) -> Any:
        """Activations by client: [c, b, ...]."""
        return x.unflatten(0, (current_mode().clients, -1))


class LinearTwin(Twin):
    def forward(self, x: Tensor) -> Any:
        mode, bias = stack_mode(), getattr(self, "bias", None)
        mode.used += [self.weight] if bias is None else [self.weight, bias]
        if mode.first is not None and mode.first.answers(self.weight, bias, x):
            out = Answered.apply(mode.first, mode.anchor)  # type: ignore[no-untyped-call]
            return out.reshape(*x.shape[:-1], out.shape[-1])
        rows = x.reshape(mode.clients, -1, x.shape[-1])  # [c, b, i]
        out = LinearStep.apply(rows, self.weight, bias, mode.step, mode.stepping, mode.anchor)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], out.shape[-1])


class Answered(torch.autograd.Function):
    """A first layer that another object computes: see `first.GramStep`."""

    @staticmethod
    def forward(ctx: Any, first: Any, anchor: Tensor) -> Any:
        ctx.first, ctx.anchor = first, anchor
        return first.value()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.first.learn(gradients[0])
        return None, torch.zeros_like(ctx.anchor)


class LinearStep(torch.autograd.Function):
    """A linear layer whose backward pass makes the gradient step of some of its weights.

    The gradient of these weights is never stored; all other weights get a gradient as usual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rate: float,
        stepping: frozenset[int],
        anchor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.rate = weight, bias, rate
        ctx.steps = id(weight) in stepping, id(bias) in stepping
        ctx.anchor = anchor
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        wanted, of_weight, of_bias = ctx.needs_input_grad[:3], None, None
        below = torch.bmm(gradient, ctx.weight) if wanted[0] else None  # before the step
        if ctx.steps[0]:
            ctx.weight.baddbmm_(gradient.mT, x, alpha=-ctx.rate)
        elif wanted[1]:
            of_weight = torch.bmm(gradient.mT, x)
        if ctx.steps[1]:
            ctx.bias.sub_(gradient.sum(1), alpha=ctx.rate)
        elif wanted[2]:
            of_bias = gradient.sum(1)
        return below, of_weight, of_bias, None, None, torch.zeros_like(ctx.anchor)


class ConvTwin(Twin):
    """One call per client: a grouped convolution is no faster, and needs another layout."""

    def forward(self, x: Tensor) -> Any:
        mode, like, bias = stack_mode(), self.like[0], getattr(self, "bias", None)
        if isinstance(like.padding, str) or like.padding_mode != "zeros":
            apply: Callable[..., Tensor] = like._conv_forward
            rows = enumerate(self.rows(x))
            parts = [apply(x, self.weight[c], None if bias is None else bias[c]) for c, x in rows]
            return torch.cat(parts)
        shape = like.stride, like.padding, like.dilation
        options = (*shape, like.transposed, like.output_padding, like.groups)
        mode.used += [self.weight] if bias is None else [self.weight, bias]
        out: Tensor = ConvStep.apply(  # type: ignore[no-untyped-call]
            x, self.weight, bias, options, mode.step, mode.stepping, mode.anchor
        )
        mode.convolved += out.numel()
        return out


class ConvStep(torch.autograd.Function):
    """A convolution of many clients as one node, whose backward pass may update the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Any, ...],
        rate: float,
        stepping: frozenset[int],
        anchor: Tensor,
    ) -> Tensor:
        ctx.layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        x = x.to(memory_format=ctx.layout)
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.rate, ctx.options, ctx.anchor = (
            weight,
            bias,
            rate,
            options,
            anchor,
        )
        ctx.steps = id(weight) in stepping, id(bias) in stepping
        ctx.weights = [w.to(memory_format=ctx.layout) for w in weight]
        parts = [
            torch.convolution(rows, w, None if bias is None else bias[c], *options)
            for c, (rows, w) in enumerate(zip(x.chunk(len(weight)), ctx.weights, strict=True))
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        gradient = gradient.to(memory_format=ctx.layout)
        clients = len(ctx.weight)
        wanted = ctx.needs_input_grad[0], True, ctx.bias is not None
        sizes = None if ctx.bias is None else [len(ctx.bias[0])]
        parts = [
            torch.ops.aten.convolution_backward(g, rows, w, sizes, *ctx.options, wanted)
            for g, rows, w in zip(
                gradient.chunk(clients), x.chunk(clients), ctx.weights, strict=True
            )
        ]
        below = torch.cat([part[0] for part in parts]) if wanted[0] else None
        out: list[Tensor | None] = []
        for leaf, steps, place in ((ctx.weight, ctx.steps[0], 1), (ctx.bias, ctx.steps[1], 2)):
            slopes = [part[place] for part in parts]
            if leaf is not None and steps:
                torch._foreach_add_(list(leaf.unbind()), slopes, alpha=-ctx.rate)
            out.append(None if leaf is None or steps else torch.stack(slopes))
        return below, *out, None, None, None, torch.zeros_like(ctx.anchor)


class BatchNormTwin(Twin):
    def forward(self, x: Tensor) -> Any:
        mode, like = current_mode(), self.like[0]
        if mode.whole and x.numel() >= SMALL * mode.clients * x.shape[1]:
            return self._whole(x, mode)
        assert mode.mask is not None
        mean, variance, count = torch.vmap(like.statistics)(self.rows(x), self.rows(mode.mask))
        if getattr(self, "running_mean", None) is not None:
            self._remember(mode, mean, variance, count)
        shape = (mode.clients, 1, -1, *(1,) * (x.ndim - 2))
        out = (self.rows(x) - mean.reshape(shape)) / torch.sqrt(variance.reshape(shape) + like.eps)
        if getattr(self, "weight", None) is not None:
            out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
        return out.flatten(0, 1)

    def _whole(self, x: Tensor, mode: Any) -> Tensor:
        """Without padding: the rows of each client by torch's own kernel, as for one client."""
        weight, bias = (getattr(self, name, None) for name in ("weight", "bias"))
        parts = [
            self.like[0].whole(
                rows, *(None if leaf is None else leaf[c] for leaf in (weight, bias))
            )
            for c, rows in enumerate(self.rows(x))
        ]
        outs, means, variances, counts = zip(*parts, strict=True)
        if getattr(self, "running_mean", None) is not None:
            self._remember(mode, torch.stack(means), torch.stack(variances), torch.stack(counts))
        return torch.cat(outs)

    def _remember(self, mode: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        momentum, seen = self.like[0].momentum, self.num_batches_tracked + 1  # [c]
        step = momentum if momentum is not None else (1.0 / seen.to(mean.dtype))[:, None]
        unbiased = variance * count / (count - 1).clamp(min=1)
        for old, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            mode.updates.append((old, (old + step * (new - old)).detach()))
        mode.updates.append((self.num_batches_tracked, seen))


class NormTwin(Twin):
    """Layer and group norm: normalise every sample, then apply each client's scale and shift."""

    def forward(self, x: Tensor) -> Any:
        like, weight = self.like[0], getattr(self, "weight", None)
        if isinstance(like, nn.LayerNorm):
            out = functional.layer_norm(x, like.normalized_shape, eps=like.eps)
            shape = (len(self.rows(x)), *(1,) * (x.ndim - len(like.normalized_shape)))
            shape = (*shape, *like.normalized_shape)
        else:
            out = functional.group_norm(x, like.num_groups, eps=like.eps)
            shape = (len(self.rows(x)), 1, x.shape[1], *(1,) * (x.ndim - 2))
        if weight is None:
            return out
        out = self.rows(out) * weight.reshape(shape)
        bias = getattr(self, "bias", None)
        return (out if bias is None else out + bias.reshape(shape)).flatten(0, 1)


class EmbeddingTwin(Twin):
    def forward(self, x: Tensor) -> Any:
        clients, words, width = self.weight.shape
        start = torch.arange(clients, device=x.device) * words
        ids = self.rows(x) + start.reshape(-1, *(1,) * x.ndim)
        return functional.embedding(ids, self.weight.reshape(-1, width)).flatten(0, 1)


class DropoutTwin(nn.Module):
    def __init__(self, like: KeyedDropout) -> None:
        super().__init__()
        self.p, self.channels = like.p, like.channels

    def forward(self, x: Tensor) -> Any:
        mode = current_mode()
        if self.p == 0.0:
            return x
        assert mode.key is not None
        mode.draws += 1
        rows = x.unflatten(0, (mode.clients, -1))
        shape = tuple(rows.shape[1:])
        shape = (*shape[:2], *(1,) * (len(shape) - 2)) if self.channels else shape
        draw = torch.vmap(lambda key: uniform(fold(key, mode.draws), shape))
        keep = (draw(mode.key) >= self.p).to(x.dtype)
        scale = 1.0 / (1.0 - self.p) if self.p < 1 else 0.0
        return (rows * keep * scale).flatten(0, 1)


TWINS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: LinearTwin,
    nn.Conv1d: ConvTwin,
    nn.Conv2d: ConvTwin,
    nn.ConvTranspose2d: ConvTwin,
    MaskedBatchNorm: BatchNormTwin,
    nn.LayerNorm: NormTwin,
    nn.GroupNorm: NormTwin,
    nn.Embedding: EmbeddingTwin,
    KeyedDropout: DropoutTwin,
}


STEPPING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
"""Layers whose twins can make the step of plain SGD in their backward pass."""


class OwnTwin(Twin):
    """Replaces a layer without a twin; runs the layer for each client in turn."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        clients, names = current_mode().clients, list(self._parameters)
        parts = []
        for c in range(clients):
            own = {name: self._parameters[name][c] for name in names}  # type: ignore[index]
            mine = [_rows_of(value, c, clients) for value in inputs]
            rest = {name: _rows_of(value, c, clients) for name, value in options.items()}
            parts.append(torch.func.functional_call(self.like[0], own, tuple(mine), rest))
        return tree_map(lambda *rows: torch.cat(rows), parts[0], *parts[1:])


def _rows_of(value: Any, c: int, clients: int) -> Any:
    if isinstance(value, Tensor) and value.ndim and len(value) % clients == 0:
        return value.chunk(clients)[c]
    return value


def twin_of(model: Model) -> Network:
    """The network of a model, in which every layer with weights is replaced by its twin."""
    network = copy.deepcopy(model.training_network)
    swapped: dict[nn.Module, nn.Module] = {}
    own: list[str] = []
    for prefix, layer in list(network.named_modules()):
        for name, child in list(layer._modules.items()):
            if child is None or child in swapped.values():
                continue
            if child not in swapped:
                twin = _twin(child)
                if twin is None:
                    continue
                swapped[child] = twin
                if isinstance(twin, OwnTwin):
                    own.append(f"{prefix}.{name}" if prefix else name)
            setattr(layer, name, swapped[child])
    for name, layer in network.named_modules():
        values = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        if values and not isinstance(layer, Twin):
            raise NoTwin(f"{name or type(layer).__name__} ({type(layer).__name__}) has no twin")
    return Network(network, own)


def _twin(layer: nn.Module) -> nn.Module | None:
    """The twin of a layer; None if it has none, or needs none."""
    make = TWINS.get(type(layer))
    special = isinstance(layer, nn.Embedding) and _special(layer)
    if make is not None and not special:
        return make(layer)
    whole = not any(True for _ in layer.children()) and not any(True for _ in layer.buffers())
    plain = type(layer).__module__.startswith("torch.nn.modules") and not special
    if plain and whole and any(True for _ in layer.parameters()):
        return OwnTwin(layer)
    return None


def _special(like: nn.Embedding) -> bool:
    return like.padding_idx is not None or like.max_norm is not None or like.sparse
