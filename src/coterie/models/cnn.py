"""Small convolutional networks."""

from collections.abc import Sequence
from itertools import pairwise

import torch  # noqa: F401  the examples use it
from torch import Tensor, nn

from coterie.core.errors import ConfigError


class CNN(nn.Module):
    """Blocks of 3 x 3 convolution, rectifier and 2 x 2 pooling, then a linear layer `output`.

    Parameters
    ----------
    channels, size
        Shape of the images [channels, height, width]; `size` is one number for square images.
    widths
        Channels after each block. A block halves height and width.

    >>> CNN(1, 8, 10)(torch.ones(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        channels: int,
        size: int | tuple[int, int],
        n_outputs: int,
        widths: Sequence[int] = (16, 32),
    ) -> None:
        super().__init__()
        widths = [channels, *widths]
        height, width = (size, size) if isinstance(size, int) else size
        shrunk = 2 ** (len(widths) - 1)
        if min(height, width) < shrunk:
            raise ConfigError(
                f"CNN: images must be at least {shrunk} pixels wide and high for "
                f"{len(widths) - 1} blocks, got {height} x {width}. Use fewer widths."
            )
        blocks = [
            layer
            for a, b in pairwise(widths)
            for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        self.body = nn.Sequential(*blocks)
        self.output = nn.Linear(widths[-1] * (height // shrunk) * (width // shrunk), n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x).flatten(1))
