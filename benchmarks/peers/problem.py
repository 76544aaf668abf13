"""The problem a package is given: arrays in a file, the network, one client's training."""

import os
from functools import cache

import numpy as np
import torch
from torch import nn

BATCH, RATE = 20, 0.05


class MLP(nn.Module):
    """784-200-10, with the names its weights have in the file."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(784, 200), nn.ReLU())
        self.output = nn.Linear(200, 10)

    def forward(self, x):
        return self.output(self.body(x.flatten(1)))


def cnn():
    """Two 5 x 5 convolutions and two linear layers."""
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


@cache
def arrays():
    """Data of all clients [m, n, ...], order of the rows [m, n], first and expected weights."""
    with np.load(os.environ["COTERIE_PEER_PROBLEM"], allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def weights(kind):
    """Named weights: `start` of the round, or `mean` after it in the plain loop."""
    return {
        name.removeprefix(kind + "/"): leaf
        for name, leaf in arrays().items()
        if name.startswith(kind + "/")
    }


def network():
    """The network with the weights of the start."""
    made = cnn() if arrays()["x"].ndim == 5 else MLP()
    made.load_state_dict(weights("start"))
    return made


def apart(found):
    """Largest difference of any weight from the plain loop's mean after the first round."""
    expected = weights("mean")
    return max(float((found[name] - leaf).abs().max()) for name, leaf in expected.items())
