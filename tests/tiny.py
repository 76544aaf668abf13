"""Federations, models and rooms small enough to work out by hand."""

from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.client import Batch, Client
from coterie.core.model import Model
from coterie.core.random import fold, normal, seed_key
from coterie.core.tree import row
from coterie.data import FederatedData, RowIndex, from_arrays
from coterie.engines import Simulation

ENGINES: dict[str, dict[str, Any]] = {
    "loop": {"stack": False},
    "stacked": {"stack": True},
    "wire": {"stack": False, "wire": True},
}


def points(*clients: list[float], names: list[str] | None = None) -> FederatedData:
    """One list of numbers per client, to be reconstructed."""
    xs = [torch.tensor(values)[:, None] for values in clients]
    return from_arrays(xs, test_fraction=0.0, names=names)


class Centre(nn.Module):
    """One number, the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.centre)

    def forward(self, x: Tensor) -> Tensor:
        return self.centre.expand(x.shape)


def mean_model(dtype: torch.dtype = torch.float64) -> Model:
    """Loss (centre - x)², so its gradient is 2 (centre - mean of x)."""
    return Model(Centre, "reconstruction", dtype=dtype)


def centres(*values: float) -> dict[str, Tensor]:
    """A bank of such models."""
    return {"centre": torch.tensor(values, dtype=torch.float64)}


def centre(value: float) -> dict[str, Tensor]:
    """One such model."""
    return {"centre": torch.tensor(value, dtype=torch.float64)}


def ragged(*sizes: int, shape: tuple[int, ...] = (4,), classes: int = 3) -> FederatedData:
    """Labelled noise: clients with these numbers of samples."""
    n = sum(sizes)
    x = normal(seed_key(1), (n, *shape), torch.float64)
    y = torch.arange(n) % classes
    names = tuple(f"client-{i}" for i in range(len(sizes)))
    return FederatedData(x, y, {"train": RowIndex.blocks(sizes)}, names, "classification", classes)


def batch(x: Any, y: Any = None, mask: Any = None) -> Batch:
    """Rows of one client."""
    x = torch.as_tensor(x)
    y = torch.zeros(len(x)) if y is None else torch.as_tensor(y)
    mask = torch.ones(len(x), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return Batch(x, y, mask, torch.ones(len(x)))


def room(train: Batch, seed: int = 0, round: int = 0) -> Client:
    """A client outside any engine."""
    key = seed_key(seed)
    own = fold(key, "client")
    return Client(train, train, {}, {}, own, key, torch.tensor(round), own)


def rooms(data: FederatedData) -> Client:
    """All clients of some data on a leading axis, padded; key and round as an engine gives them."""
    ids = torch.arange(len(data))
    train = data.gather("train", ids)
    key = seed_key(0).expand(len(ids))
    own = fold(key, ids)
    return Client(train, train, {}, {}, own, key, torch.zeros_like(ids), own)


def alone(data: FederatedData, i: int) -> Client:
    """The same client, unpadded."""
    train = row(data.gather("train", torch.tensor([i])), 0)
    key = seed_key(0)
    own = fold(key, i)
    return Client(train, train, {}, {}, own, key, torch.tensor(0), own)


def everywhere(data: FederatedData, task: Any, *given: Any, **options: Any) -> dict[str, Any]:
    """What all clients reply to a task, on every engine."""
    replies = {}
    for name, kind in ENGINES.items():
        fed = Simulation(data, **kind)
        fed.begin(0)
        replies[name] = fed.map(task, *given, to=fed.everyone(), **options)[1]
    return replies


def rounds(algorithm: Any, fed: Simulation, n: int) -> Any:
    """The state after some rounds."""
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    for r in range(n):
        fed.begin(r)
        state, _ = algorithm.step(fed, state)
        fed.commit()
    return state
