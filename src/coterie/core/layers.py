"""Training mode, and the layers that depend on it.

Training mode exists only inside the training operation, which sets a `Mode` that the layers read:
batch norm computes its statistics from real rows only, and dropout draws from the client's key.
Pooling stores what gradients need only in training mode.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.random import fold, uniform


@dataclass
class Mode:
    """What the layers must know about the present pass."""

    training: bool = False
    mask: Tensor | None = None  # [b]
    key: Tensor | None = None
    whole: bool = False  # no row is padding
    draws: int = 0
    updates: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # old buffer, new buffer
    clients: int = 1  # rows are [clients x b]; with several clients, `key` has one entry each
    # Plug-in point of kernels: returns the kernel's own form of a model's network.
    network: Callable[[Any], Callable[..., Any]] | None = None


_MODE: ContextVar[Mode] = ContextVar("mode", default=Mode())  # noqa: B039 - never written to


def current_mode() -> Mode:
    """The mode of the present pass; evaluation unless the training operation set another mode."""
    return _MODE.get()


M = TypeVar("M", bound=Mode)


@contextmanager
def entering(mode: M) -> Iterator[M]:
    """Run a pass in a mode."""
    token = _MODE.set(mode)
    try:
        yield mode
    finally:
        _MODE.reset(token)


@contextmanager
def training(mask: Tensor, key: Tensor) -> Iterator[Mode]:
    """Training mode; only the training operation uses it."""
    with entering(Mode(True, mask, key)) as mode:
        yield mode


@contextmanager
def evaluating(mask: Tensor) -> Iterator[None]:
    """Evaluation mode for layers that use statistics of their batch even in evaluation."""
    with entering(Mode(mask=mask)):
        yield


SMALL = 16
"""Smallest number of values per channel for which torch's own kernel is faster."""


class MaskedBatchNorm(nn.Module):
    """Batch norm whose statistics leave out padding; equal to torch's if there is no padding."""

    weight: Tensor | None
    bias: Tensor
    running_mean: Tensor | None
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = like.eps, like.momentum
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(like, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(like, name))

    def forward(self, x: Tensor) -> Tensor:
        mode = current_mode()
        if mode.training and mode.whole and x.numel() >= SMALL * x.shape[1]:
            out, *found = self.whole(x, self.weight, self.bias)
            if self.running_mean is not None:
                self.remember(mode, self.running_mean, *found)
            return out
        shape = (1, -1, *(1,) * (x.ndim - 2))
        if mode.training or self.running_mean is None:
            mean, variance, count = self.statistics(x, mode.mask)
            if mode.training and self.running_mean is not None:
                self.remember(mode, self.running_mean, mean, variance, count)
        else:
            mean, variance = self.running_mean, self.running_var
        x = (x - mean.reshape(shape)) / torch.sqrt(variance.reshape(shape) + self.eps)
        if self.weight is not None:
            x = x * self.weight.reshape(shape) + self.bias.reshape(shape)
        return x

    def whole(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalise rows without padding by torch's own kernel: outputs, mean, variance, count."""
        out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, self.eps)
        count = torch.tensor([x.numel() // x.shape[1]], dtype=x.dtype, device=x.device)
        return out, mean.detach(), (scale**-2 - self.eps).detach(), count

    def statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.movedim(1, -1)  # [b, ..., f]
        real = torch.ones(len(x), dtype=x.dtype, device=x.device) if mask is None else mask
        # A network may merge other axes into the batch, sample by sample, so the mask is repeated.
        real = real.to(x.dtype).repeat_interleave(len(x) // len(real))
        real = real.reshape(-1, *(1,) * (rows.ndim - 1)).expand(*rows.shape[:-1], 1)
        axes = tuple(range(rows.ndim - 1))
        count = real.sum(axes).clamp(min=1)  # [1]
        mean = (rows * real).sum(axes) / count
        variance = ((rows - mean) ** 2 * real).sum(axes) / count
        return mean, variance, count

    def remember(
        self, mode: Mode, running_mean: Tensor, mean: Tensor, variance: Tensor, count: Tensor
    ) -> None:
        seen = self.num_batches_tracked + 1
        step = 1.0 / seen.to(mean.dtype) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1)
        for old, new in ((running_mean, mean), (self.running_var, unbiased)):
            mode.updates.append((old, (old + step * (new - old)).detach()))
        mode.updates.append((self.num_batches_tracked, seen))


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the client's key; `channels` drops whole channels."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, x: Tensor) -> Tensor:
        mode = current_mode()
        if not mode.training or self.p == 0.0:
            return x
        assert mode.key is not None
        mode.draws += 1
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if self.channels else tuple(x.shape)
        keep = uniform(fold(mode.key, mode.draws), shape) >= self.p
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
        return x * keep.to(x.dtype) * scale


class HalvingPool(nn.Module):
    """Max-pooling of adjacent 2 x 2 windows; in evaluation equal to torch's, and faster.

    torch stores an index per window, which only gradients need. Here the maximum is taken over
    pairs of rows and then over pairs of columns, in two vectorised passes. On one core this takes
    1 us instead of 10 to 20 for an image with 6 channels of 24 x 24 pixels, which halves the time
    of a small network.
    """

    @staticmethod
    def stands_for(layer: nn.Module) -> bool:
        """Whether a layer is such a pooling layer, so that this class can replace it."""
        if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
            return False
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        pairs = [(size, size) if isinstance(size, int) else tuple(size) for size in sizes]
        return pairs == [(2, 2), (2, 2), (0, 0), (1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        if current_mode().training or x.requires_grad:
            return functional.max_pool2d(x, 2)
        h, w = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        x = torch.maximum(x[..., 0:h:2, :], x[..., 1:h:2, :])
        return torch.maximum(x[..., 0:w:2], x[..., 1:w:2])
