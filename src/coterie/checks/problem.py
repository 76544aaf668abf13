"""The tiny problem for the checks, and data that refuse access to test data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Tree
from coterie.data.federated import FederatedData
from coterie.data.synthetic import blobs
from coterie.models.mlp import MLP

N_INPUTS, N_CLASSES, N_GROUPS = 4, 4, 2


@dataclass(frozen=True)
class Problem:
    """What `Algorithm.example` is given to build a small instance of a method."""

    data: FederatedData
    model: Model
    local: LocalSGD
    n_groups: int

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the weights."""
        return self.model.dtype


class Normed(nn.Module):
    """A network with layers that behave differently in training: batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(N_INPUTS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)
        )
        self.output = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x))


def plain() -> nn.Module:
    """The network of the tiny problem; its body is larger than its head."""
    return MLP(N_INPUTS, N_CLASSES, hidden=(8,))


def tiny(
    n: int = 14,
    clients_per_group: int = 3,
    epochs: int = 1,
    learning_rate: float = 0.2,
    net: Literal["plain", "normed"] = "plain",
) -> Problem:
    """Four clusters that two groups label differently; clients of unequal size; float64.

    >>> tiny().data.sizes("train")
    tensor([14,  5,  4, 13, 10, 10])
    """
    data = blobs(N_GROUPS, clients_per_group, n, N_INPUTS, N_CLASSES, unequal=True, test=20)
    model = Model(plain if net == "plain" else Normed, dtype=torch.float64)
    local = LocalSGD(learning_rate=learning_rate, epochs=epochs, batch_size=4)
    return Problem(data, model, local, N_GROUPS)


@dataclass
class Guard:
    """Whether test data may be read, and how often they were refused."""

    opened: bool = False
    refused: int = 0


class Guarded:
    """Only what engines need from data; test data are refused until the guard is opened."""

    def __init__(self, data: FederatedData, guard: Guard | None = None) -> None:
        self.names: Sequence[str] = data.names
        self.guard = own = guard or Guard()

        def gather(split: str, ids: Ids) -> Batch:
            if split == "test" and not own.opened:
                own.refused += 1
                raise PermissionError("only the evaluation may read test data")
            return data.gather(split, ids)

        # Closures, so that no attribute of this object gives access to all data or to the truth.
        self._gather, self._sizes, self._facts = gather, data.sizes, data.facts
        self._subset = lambda ids: Guarded(data.subset(ids), own)

    def subset(self, ids: Ids) -> "Guarded":
        """Some of the clients, under the same guard."""
        return self._subset(ids)

    def gather(self, split: str, ids: Ids) -> Batch:
        """Samples of some clients."""
        return self._gather(split, ids)

    def sizes(self, split: str) -> Tensor:
        """Number of samples of every client."""
        return self._sizes(split)

    def facts(self, ids: Ids) -> Tree:
        """Facts of some clients."""
        return self._facts(ids)
