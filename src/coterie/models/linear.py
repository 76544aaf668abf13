"""Linear models."""

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """One layer on the flattened input: softmax regression, or linear regression.

    >>> Linear(3, 2)(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, n_inputs: int, n_outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.output = nn.Linear(n_inputs, n_outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x.flatten(1))


class LinearRegressor(nn.Module):
    """The inner product of the input with one vector, initially a random unit vector.

    The model of CLoVE's linear study. Its output has the shape of the targets: [n].

    >>> LinearRegressor(3)(torch.ones(5, 3)).shape
    torch.Size([5])
    """

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_inputs))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a new vector."""
        self.weight.normal_()
        self.weight.div_(self.weight.norm())

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight
