"""Losses on held-out rows, round by round: which round is best, and what to compare it by.

The best round of a way of training is the one with the smallest held-out loss, averaged over
clients. A loss that was used to choose a round looks better than it is. So the rows of every client
are divided into two halves: each half is scored at the round that the other half chose. Rows of one
unit (a patient, a day) are averaged first, so they are in the same half and count once.
"""

from typing import Any

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import FederatedData


def rank_units(data: FederatedData, split: str) -> Tensor:
    """Number of the unit of each row of each client, 0, 1, ...; -1 in the padding. [m, n]"""
    rows = data.rows[split]
    rank = rows.position
    if data.unit is not None:
        units, member = rows.of_units(data.unit[rows.index])
        rank = units.position[member]
    out = torch.full((len(data), max(1, int(rows.sizes.max()))), -1)
    out[rows.owner, rows.position] = rank
    return out


def average_units(values: Tensor, rank: Tensor) -> Tensor:
    """Means over the rows of each unit, [m, u]; nan in the padding.

    >>> average_units(torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([[0, 0, 1]]))
    tensor([[2., 5.]], dtype=torch.float64)
    """
    real = rank >= 0
    size = len(rank), max(1, int(rank.max()) + 1)
    total = torch.zeros(size, dtype=torch.float64)
    count = torch.zeros(size, dtype=torch.float64)
    place = rank.clamp(min=0)
    total.scatter_add_(1, place, torch.where(real, values.double(), 0.0))
    count.scatter_add_(1, place, real.double())
    return torch.where(count > 0, total / count, torch.nan)


def mean_of_clients(losses: Tensor, chosen: Tensor) -> Tensor:
    """Mean over clients of each client's mean over chosen units, both [m, u]; nan if none is.

    >>> losses = torch.tensor([[1.0, 3.0], [6.0, torch.nan]])
    >>> mean_of_clients(losses, ~losses.isnan())
    tensor(4., dtype=torch.float64)
    """
    return torch.where(chosen, losses, torch.nan).double().nanmean(1).nanmean()


class HeldOut:
    """What a run knows of its held-out rows.

    Parameters
    ----------
    rank
        Number of the unit of each row of each client, -1 in the padding. [m, n]
    """

    def __init__(self, rank: Tensor) -> None:
        self.rank = rank
        units = average_units(rank.double(), rank)  # [m, u]
        client = torch.arange(len(rank))[:, None]
        self.half = torch.where(units.isnan(), -1, (units.nan_to_num().long() + client) % 2)
        # Loss of each unit at the round that the other half chose. [m, u]
        self.losses = torch.full(units.shape, torch.nan, dtype=torch.float64)
        # Smallest loss so far on half 0, half 1 and all units, and in which rounds.
        self.least = torch.full((3,), torch.inf, dtype=torch.float64)
        self.round = torch.zeros(3, dtype=torch.int64)

    @property
    def best(self) -> int:
        """The round with the smallest loss on all units; 0: none yet."""
        return int(self.round[2])

    def see(self, number: int, ids: Tensor, losses: Tensor) -> None:
        """Note the losses [m, n] of some clients' rows after a round."""
        rows = torch.full(self.rank.shape, torch.nan, dtype=torch.float64)
        rows[ids] = losses.double()
        now = average_units(rows, self.rank)
        real = ~now.isnan()
        parts = [real & (self.half == 0), real & (self.half == 1), real]
        means = torch.stack([mean_of_clients(now, part) for part in parts])
        means = torch.where(means.isnan(), means[2], means)  # a half without units
        better = means < self.least
        for half in (0, 1):
            if better[half]:
                self.losses = torch.where(self.half == 1 - half, now, self.losses)
        self.least = torch.where(better, means, self.least)
        self.round = torch.where(better, number, self.round)

    def save(self) -> Tree:
        """What a checkpoint keeps."""
        return {"losses": self.losses, "least": self.least, "round": self.round}

    def restore(self, saved: Any) -> None:
        """Go on from a checkpoint."""
        self.losses, self.least, self.round = saved["losses"], saved["least"], saved["round"]
