"""The networks of the published studies, layer by layer, with torch's own initialisation.

References: the code released with CLoVE (`GreyCNN`) decides where its text is silent.
"""

import torch  # noqa: F401  the examples use it
from torch import Tensor, nn


class GreyCNN(nn.Module):
    """Two 5 x 5 convolutions (6 and 16 channels) with pooling, one linear layer: CLoVE's small net.

    >>> sum(p.numel() for p in GreyCNN(10).parameters())
    5142
    """

    def __init__(self, n_outputs: int, size: int = 28) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        side = ((size - 4) // 2 - 4) // 2
        self.output = nn.Linear(16 * side * side, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x).flatten(1))
