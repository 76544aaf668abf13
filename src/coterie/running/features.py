"""Fewer, better features before clustering: found by everybody together, applied by each alone.

A step of its own: it takes a federation and gives one with other inputs. Images are clustered in
the space of such features, not of pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms.fedavg import FedAvg
from coterie.core.aggregate import Mean
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data.federated import SPLITS, FederatedData, RowIndex
from coterie.engines.simulation import Simulation
from coterie.models.mlp import Bottleneck
from coterie.running.build import Settings
from coterie.running.loop import run


@dataclass(frozen=True)
class Projection:
    """Principal directions of everybody's samples."""

    mean: Tensor  # [d]
    directions: Tensor  # [q, d]  orthonormal, largest variance first
    variance: Tensor  # [q]  along each
    total: Tensor  # variance in all directions

    def __call__(self, x: Tensor) -> Tensor:
        """Coordinates of samples: [n, q]."""
        return (x.flatten(1).double() - self.mean) @ self.directions.T


@dataclass(frozen=True)
class Encoding:
    """The code of a trained autoencoder."""

    model: Model
    params: dict[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Codes of samples: [n, q]."""
        with torch.no_grad():
            plain = self.model.plain(self.params)
            return plain.encode(x.to(self.model.dtype)).double()  # type: ignore[operator]


@task(stackable=False, phase="features")
def _mean(client: Client) -> dict[str, Tensor]:
    x = client.train.x.flatten(1).double()
    return {"mean": x.mean(0), "n": client.train.size}


@task(stackable=False, phase="features")
def _second_moments(client: Client, mean: Tensor) -> dict[str, Tensor]:
    x = client.train.x.flatten(1).double() - mean
    return {"moments": x.T @ x / len(x), "n": client.train.size}


def principal(data: FederatedData, n_features: Annotated[int, Ge(1)], seed: int = 0) -> Projection:
    """Principal components from federated first and second moments: two exchanges, only means.

    The same directions as a central analysis of the pooled training samples. A client sends d +
    d**2 numbers, so this is for up to a few thousand features.

    >>> from coterie.data import from_arrays
    >>> x = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> principal(from_arrays([x[:3], x[3:]], test_fraction=0.0), 1).directions.abs()
    tensor([[1., 0.]], dtype=torch.float64)
    """
    fed = Simulation(data, seed, stack=False)
    d = data.gather("train", torch.tensor([0])).x.flatten(2).shape[2]
    if n_features > d:
        raise ConfigError(f"principal: n_features must be at most {d}, got {n_features}.")
    fed.begin(0)
    zeros = torch.zeros(d, dtype=torch.float64)
    everyone = fed.everyone()
    _, reply = fed.map(_mean, to=everyone, reduce=Mean("mean", zeros, weight="n"))
    mean = reply["mean"]
    around = torch.zeros(d, d, dtype=torch.float64)
    reduce = Mean("moments", around, weight="n")
    _, reply = fed.map(_second_moments, mean, to=everyone, reduce=reduce)
    values, vectors = torch.linalg.eigh(reply["moments"])
    best = values.argsort(descending=True)[:n_features]
    directions = vectors[:, best].T
    largest = directions.abs().argmax(1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()  # a sign that is always the same
    return Projection(mean, directions, values[best], values.sum())


def autoencoded(
    data: FederatedData,
    n_features: int,
    *,
    hidden: Sequence[int] = (128,),
    rounds: int = 20,
    epochs: int = 1,
    learning_rate: float = 1e-3,
    batch_size: int = 32,
    seed: int = 0,
) -> Encoding:
    """An autoencoder trained by federated averaging on everybody's samples, without labels."""
    shape = data.sample_shape
    if isinstance(shape, dict):
        raise ConfigError("autoencoded: samples must be one array, and these are a dict.")
    n_inputs = int(torch.Size(shape).numel())
    model = Model(lambda: Bottleneck(n_inputs, n_features, hidden), "reconstruction")
    local = LocalSGD(learning_rate, epochs=epochs, batch_size=batch_size, optimizer="adam")
    unlabelled = replace(data, task="reconstruction", n_outputs=1, classes=None, encoder=None)
    settings = Settings(rounds=rounds, seed=seed, evaluate_every=0, save_every=0)
    result = run(FedAvg(model, local), unlabelled, settings)
    return Encoding(model, result.state.params)


def with_features(data: FederatedData, features: Callable[[Tensor], Tensor]) -> FederatedData:
    """The same clients with other inputs: each applies `features` to its own samples."""
    pool_x, pool_y, rows, start = [], [], {}, 0
    for split in SPLITS:
        sizes = data.sizes(split)
        rows[split] = RowIndex.blocks(sizes, start)
        start += int(sizes.sum())
        for i in range(len(data)):
            if int(sizes[i]):
                batch = data.gather(split, torch.tensor([i]))
                pool_x.append(features(batch.x[0]))
                pool_y.append(batch.y[0])
    return replace(
        data,
        x=torch.cat(pool_x),
        y=torch.cat(pool_y),
        rows=rows,
        transform=None,
        name=None,
        options=None,
        encoder=None,
    )
