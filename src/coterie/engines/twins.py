"""Stacked twins: layers that hold the weights of many clients.

Activations stay client-major, `[clients x batch, ...]`, so a network's own `forward`, ReLU, pooling
and reshapes run unchanged; only layers with weights know of clients. A twin keeps the names of the
layer it stands for.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.layers import KeyedDropout, MaskedBatchNorm, current_mode
from coterie.core.model import Model
from coterie.core.random import fold, uniform


class NoTwin(Exception):
    """A layer with weights that has no stacked twin."""


class Twin(nn.Module):
    """A layer with the same names, holding a row of weights per client."""

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
        mode, bias = current_mode(), getattr(self, "bias", None)
        rows = x.reshape(mode.clients, -1, x.shape[-1])  # [c, b, i]
        out = LinearStep.apply(rows, self.weight, bias, mode.step, mode.stepping, mode.anchor)  # type: ignore[no-untyped-call]
        mode.used += [self.weight] if bias is None else [self.weight, bias]
        return out.reshape(*x.shape[:-1], out.shape[-1])


class LinearStep(torch.autograd.Function):
    """A linear layer whose backward pass takes the gradient step of the weights it is told to.

    Their gradient is never written; all other weights get theirs, laid out as they are.
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
    """One call per client: a grouped convolution is no faster, and loses the fast layout."""

    def forward(self, x: Tensor) -> Any:
        like, bias = self.like[0], getattr(self, "bias", None)
        apply: Callable[..., Tensor] = like._conv_forward
        parts = [
            apply(rows, self.weight[c], None if bias is None else bias[c])
            for c, rows in enumerate(self.rows(x))
        ]
        return torch.cat(parts)


class ConvTransposeTwin(Twin):
    def forward(self, x: Tensor) -> Any:
        like, bias = self.like[0], getattr(self, "bias", None)
        options = like.stride, like.padding, like.output_padding, like.groups, like.dilation
        parts = [
            functional.conv_transpose2d(
                rows, self.weight[c], None if bias is None else bias[c], *options
            )
            for c, rows in enumerate(self.rows(x))
        ]
        return torch.cat(parts)


class BatchNormTwin(Twin):
    def forward(self, x: Tensor) -> Any:
        mode, like = current_mode(), self.like[0]
        assert mode.mask is not None
        mean, variance, count = torch.vmap(like.statistics)(self.rows(x), self.rows(mode.mask))
        if getattr(self, "running_mean", None) is not None:
            self._remember(mode, mean, variance, count)
        shape = (mode.clients, 1, -1, *(1,) * (x.ndim - 2))
        out = (self.rows(x) - mean.reshape(shape)) / torch.sqrt(variance.reshape(shape) + like.eps)
        if getattr(self, "weight", None) is not None:
            out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
        return out.flatten(0, 1)

    def _remember(self, mode: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        momentum, seen = self.like[0].momentum, self.num_batches_tracked + 1  # [c]
        step = momentum if momentum is not None else (1.0 / seen)[:, None]
        unbiased = variance * count / (count - 1).clamp(min=1)
        for old, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            mode.updates.append((old, (old + step * (new - old)).detach()))
        mode.updates.append((self.num_batches_tracked, seen))


class NormTwin(Twin):
    """Layer and group norm: normalise every sample, then each client's own scale and shift."""

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
    nn.ConvTranspose2d: ConvTransposeTwin,
    MaskedBatchNorm: BatchNormTwin,
    nn.LayerNorm: NormTwin,
    nn.GroupNorm: NormTwin,
    nn.Embedding: EmbeddingTwin,
    KeyedDropout: DropoutTwin,
}


def twin_of(model: Model) -> nn.Module:
    """The network of a model with every layer that has weights swapped for its twin."""
    network = copy.deepcopy(model.training_network)
    swapped: dict[nn.Module, nn.Module] = {}
    for layer in list(network.modules()):
        for name, child in list(layer.named_children()):
            make = TWINS.get(type(child))
            if make is not None:
                swapped.setdefault(child, make(child))
                setattr(layer, name, swapped[child])
    for name, layer in network.named_modules():
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        if own and not isinstance(layer, Twin):
            raise NoTwin(f"{name or type(layer).__name__} ({type(layer).__name__}) has no twin")
        if isinstance(layer, EmbeddingTwin) and _special(layer.like[0]):
            raise NoTwin(f"{name} (Embedding with padding_idx, max_norm or sparse) has no twin")
    return network


def _special(like: nn.Embedding) -> bool:
    return like.padding_idx is not None or like.max_norm is not None or like.sparse
