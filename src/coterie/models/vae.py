"""Variational autoencoders: density models whose score approximates minus a log density.

The score of a sample is its reconstruction error plus the divergence of its code from the prior, in
nats: `sum over pixels + sum over latents`. In evaluation mode the code is the posterior mean, so
scores are not random; in training the code is drawn with the client's key.

References: Kingma, Welling: Auto-encoding variational Bayes, ICLR 2014, arXiv 1312.6114.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.layers import current_mode
from coterie.core.random import fold, normal

VARIANCE = 0.1  # variance of a Gaussian pixel given its code


class Coded(NamedTuple):
    """Output of an autoencoder for a batch of samples."""

    output: Tensor  # [n, ...]  logits (Bernoulli) or means (Gaussian) of the pixels
    mean: Tensor  # [n, d]  of the code
    log_variance: Tensor  # [n, d]


def divergence(coded: Coded) -> Tensor:
    """Divergence of each sample's code from the standard normal distribution, in nats."""
    mean, log_variance = coded.mean, coded.log_variance
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)


def bernoulli(coded: Coded, batch: Batch) -> Tensor:
    """Score of each sample in nats, for pixels in [0, 1].

    >>> one = torch.ones(1)
    >>> coded = Coded(torch.zeros(1, 2), torch.ones(1, 1), torch.zeros(1, 1))
    >>> bernoulli(coded, Batch(torch.tensor([[1.0, 0.0]]), one, one.bool(), one))
    tensor([1.8863])
    """
    x = batch.x.flatten(1).to(coded.output.dtype)
    shown = coded.output.flatten(1)
    wrong = functional.binary_cross_entropy_with_logits(shown, x, reduction="none")
    return wrong.sum(1) + divergence(coded)


def gaussian(coded: Coded, batch: Batch) -> Tensor:
    """Score of each sample in nats, for pixels that are normal with variance 0.1."""
    x = batch.x.flatten(1).to(coded.output.dtype)
    constant = 0.5 * math.log(2 * math.pi * VARIANCE)
    wrong = (x - coded.output.flatten(1)).square() / (2 * VARIANCE) + constant
    return wrong.sum(1) + divergence(coded)


NATS = {"bernoulli": bernoulli, "gaussian": gaussian}


class Draw(nn.Module):
    """Draws a code around its mean in training; otherwise returns the mean."""

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        mode = current_mode()
        if not mode.training:
            return mean
        assert mode.key is not None
        mode.draws += 1
        if mode.key.ndim:  # many clients in one network, [clients x b] rows
            rows = (len(mean) // mode.clients, mean.shape[1])
            draw = torch.vmap(lambda key: normal(fold(key, mode.draws), rows, mean.dtype))
            noise = draw(mode.key).flatten(0, 1)
        else:
            noise = normal(fold(mode.key, mode.draws), tuple(mean.shape), mean.dtype)
        return mean + noise * (0.5 * log_variance).exp()


class _Coder(nn.Module, ABC):
    """Base class of both autoencoders."""

    def __init__(self, likelihood: str, latent: int) -> None:
        super().__init__()
        self.latent = latent
        if likelihood not in NATS:
            raise ConfigError(
                f"VAE: likelihood must be one of {', '.join(NATS)}. Got '{likelihood}'."
            )
        self.likelihood = likelihood
        self.draw = Draw()

    @property
    def loss(self) -> Any:
        """The score in nats per sample, as the loss of a model."""
        return NATS[self.likelihood]

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of each sample's code."""

    @abstractmethod
    def decode(self, code: Tensor) -> Tensor:
        """The output for each code."""

    def forward(self, x: Any) -> Any:
        """Encode and decode samples; `{"code": z}` is only decoded: [n, ...]."""
        if isinstance(x, dict):
            return self.decode(x["code"])
        mean, log_variance = self.encode(x)
        log_variance = log_variance.clamp(-10, 10)  # exp stays finite
        return Coded(self.decode(self.draw(mean, log_variance)), mean, log_variance)


class VAE(_Coder):
    """Fully connected layers on each side; for flat samples and small images.

    Parameters
    ----------
    shape
        Shape of one sample, or its number of entries if it is flat.

    >>> coded = VAE((1, 8, 8), latent=4, hidden=[32])(torch.ones(5, 1, 8, 8))
    >>> coded.mean.shape, coded.output.shape
    (torch.Size([5, 4]), torch.Size([5, 1, 8, 8]))
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        latent: int = 16,
        hidden: Sequence[int] = (400,),
        likelihood: Literal["bernoulli", "gaussian"] = "bernoulli",
    ) -> None:
        super().__init__(likelihood, latent)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        n_inputs = math.prod(self.shape)
        widths = [n_inputs, *hidden]
        self.encoder = _layers(widths)
        self.mean = nn.Linear(widths[-1], latent)
        self.log_variance = nn.Linear(widths[-1], latent)
        self.decoder = _layers([latent, *reversed(hidden)])
        self.output = nn.Linear(hidden[0] if hidden else latent, n_inputs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.encoder(x.flatten(1))
        return self.mean(seen), self.log_variance(seen)

    def decode(self, code: Tensor) -> Tensor:
        return self.output(self.decoder(code)).unflatten(1, self.shape)


def _layers(widths: Sequence[int]) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))


class ConvVAE(_Coder):
    """4 x 4 convolutions with stride two as the encoder, and their mirror image as the decoder.

    >>> ConvVAE(3, 32, latent=8, widths=(4, 8))(torch.ones(2, 3, 32, 32)).output.shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        channels: int,
        size: int | tuple[int, int],
        latent: int = 64,
        widths: Sequence[int] = (32, 64, 128),
        likelihood: Literal["bernoulli", "gaussian"] = "gaussian",
    ) -> None:
        super().__init__(likelihood, latent)
        height, width = (size, size) if isinstance(size, int) else size
        sides = [(height, width)]
        for _ in widths:
            sides.append((sides[-1][0] // 2, sides[-1][1] // 2))
        if min(sides[-1]) < 1:
            raise ConfigError(
                f"ConvVAE: images must be at least {2 ** len(widths)} pixels wide and high for "
                f"{len(widths)} convolutions, got {height} x {width}. Use fewer widths."
            )
        steps = list(pairwise([channels, *widths]))
        down = [layer for a, b in steps for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.ReLU())]
        self.encoder = nn.Sequential(*down)
        self.folded = (widths[-1], *sides[-1])
        n = math.prod(self.folded)
        self.mean, self.log_variance = nn.Linear(n, latent), nn.Linear(n, latent)
        self.unfold = nn.Linear(latent, n)
        up: list[nn.Module] = []
        for level in reversed(range(len(steps))):
            (a, b), (h, w) = steps[level], sides[level]
            odd = (h % 2, w % 2)  # restores the pixel that halving an odd size has removed
            up += [nn.ReLU(), nn.ConvTranspose2d(b, a, 4, 2, 1, output_padding=odd)]
        self.decoder = nn.Sequential(*up)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.encoder(x).flatten(1)
        return self.mean(seen), self.log_variance(seen)

    def decode(self, code: Tensor) -> Tensor:
        image = self.unfold(code).reshape(len(code), *self.folded)
        return self.decoder(image)


def guard_terms(coded: Coded, mask: Tensor, n_clients: int = 1) -> Tensor:
    """Loss terms against posterior collapse, the same for every sample of a client's batch.

    The first term is the divergence from the prior of a normal distribution that is fitted to the
    posterior means of the batch; the second is the divergence of the posterior variances from one.
    Rows are `[clients x b]`.
    """
    rows = coded.mean.unflatten(0, (n_clients, -1))  # [c, b, d]
    real = mask.reshape(n_clients, -1, 1).to(rows.dtype)
    count = real.sum(1, keepdim=True).clamp(min=1)
    centre = (rows * real).sum(1, keepdim=True) / count
    spread = ((rows - centre).square() * real).sum(1, keepdim=True) / count + 1e-4  # one row: 0
    fitted = 0.5 * (spread + centre.square() - 1 - spread.log()).sum(2)  # [c, 1]
    fitted = fitted.expand(-1, rows.shape[1]).flatten()
    own = 0.5 * (coded.log_variance.exp() - 1 - coded.log_variance).sum(1)
    return fitted + own


def pixels(output: Tensor, loss: Any) -> Tensor:
    """The pixels of an output: probabilities for the Bernoulli loss, otherwise means."""
    return output.sigmoid() if loss is bernoulli else output
