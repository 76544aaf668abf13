"""The networks of the workloads."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.client import Batch


def small_cnn() -> nn.Module:
    """Two 5 x 5 convolutions and two linear layers, 0.6 million weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def cifar_net(dropout: bool = True) -> nn.Module:
    """Three 3 x 3 convolutions with batch norm, and dropout: 2.2 million weights."""
    first, second = (0.25, 0.5) if dropout else (0.0, 0.0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(first),
        nn.Linear(8192, 256),
        nn.ReLU(),
        nn.Dropout(second),
        nn.Linear(256, 10),
    )


def autoencoder() -> nn.Module:
    """784-128-32-128-784."""
    return nn.Sequential(
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, 128),
        nn.ReLU(),
        nn.Linear(128, 784),
    )


class VAE(nn.Module):
    """784-256-16-256-784; returns logits of the pixels, means and logarithms of variances.

    The noise is computed from the image instead of drawn, so that it is the same in all variants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(784, 256)
        self.moments = nn.Linear(256, 32)
        self.outward = nn.Linear(16, 256)
        self.pixels = nn.Linear(256, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.moments(functional.relu(self.inward(x))).chunk(2, -1)
        noise = 2**0.5 * torch.sin(37 * x.unflatten(-1, (16, 49)).sum(-1))
        code = mean + noise * torch.exp(0.5 * logvar)
        return self.pixels(functional.relu(self.outward(code))), mean, logvar


def vae_losses(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    """Binary cross-entropy of the pixels and divergence of the code, times 0.01."""
    logits, mean, logvar = output
    pixels = functional.binary_cross_entropy_with_logits(logits, batch.x, reduction="none").sum(-1)
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
    return 0.01 * (pixels + divergence)


class UserNet(nn.Module):
    """A user-defined network: own `forward`, residual connections, layer norm."""

    def __init__(self, width: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(784, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.classify = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            hidden = hidden + functional.gelu(mix(norm(hidden)))
        return self.classify(hidden)


def focal_losses(output: Tensor, batch: Batch) -> Tensor:
    """A user-defined loss: cross-entropy with a smaller weight on samples that are right."""
    losses = functional.cross_entropy(output, batch.y, reduction="none")
    return (1 - torch.exp(-losses)).square() * losses
