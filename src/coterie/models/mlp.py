"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise

import torch  # noqa: F401  the examples use it
from torch import Tensor, nn


class MLP(nn.Module):
    """Hidden layers with ReLU on the flattened input, then a linear layer `output`.

    >>> MLP(64, 10, hidden=(32, 16))(torch.ones(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(self, n_inputs: int, n_outputs: int, hidden: Sequence[int] = (32,)) -> None:
        super().__init__()
        widths = [n_inputs, *hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(*layers)
        self.output = nn.Linear(widths[-1], n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x.flatten(1)))


class Bottleneck(nn.Module):
    """An autoencoder of fully connected layers; `encode` returns the code in the middle.

    >>> net = Bottleneck(16, 3, hidden=(8,))
    >>> net(torch.ones(5, 1, 4, 4)).shape, net.encode(torch.ones(5, 1, 4, 4)).shape
    (torch.Size([5, 1, 4, 4]), torch.Size([5, 3]))
    """

    def __init__(self, n_inputs: int, n_code: int, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        self.encoder = MLP(n_inputs, n_code, hidden)
        self.decoder = MLP(n_code, n_inputs, tuple(reversed(hidden)))

    def encode(self, x: Tensor) -> Tensor:
        """The code of each sample: [n, n_code]."""
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).reshape(x.shape)
