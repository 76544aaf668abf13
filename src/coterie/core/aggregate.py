"""Averages of client updates: weights, groups, empty groups, replies that are not finite."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import TaskError
from coterie.core.tree import Tree, leaves, rebuild


@dataclass(frozen=True)
class Mean:
    """Average one leaf (or subtree) of the replies as they arrive.

    Parameters
    ----------
    leaf
        Name of the part of the reply that is averaged.
    around
        The present models: a tree, or a bank if there are groups. A group that no client trained
        keeps its row unchanged.
    by
        Group of each client: a name in the reply, or a tensor with an entry per client asked.
    weight
        Name of the clients' weights in the reply. None: all clients have the same weight.
    slots
        True: each client replies with one value and one weight per row of the bank.
    """

    leaf: str
    around: Tree
    by: str | Tensor | None = None
    weight: str | None = None
    slots: bool = False


class RunningMean:
    """The running sums of one `Mean`, in double precision, so that chunk sizes do not matter."""

    def __init__(self, mean: Mean, owner: str) -> None:
        self.mean, self.owner = mean, owner
        self.bank = mean.slots or mean.by is not None
        self.around = leaves(mean.around)
        self.rows = len(self.around[0]) if self.bank and self.around else 1
        self.sums: list[Tensor] = [
            torch.zeros(
                leaf.shape if self.bank else (1, *leaf.shape),
                dtype=torch.float64 if leaf.is_floating_point() else leaf.dtype,
                device=leaf.device,
            )
            for leaf in self.around
        ]
        device = self.around[0].device if self.around else None
        self.weights = torch.zeros(self.rows, dtype=torch.float64, device=device)
        self.first = torch.full((self.rows,), torch.iinfo(torch.int64).max, device=device)
        self.broken = 0

    def add(self, reply: dict[str, Tree], position: Tensor) -> None:
        """Add the replies of some clients; `position` is their index among the clients asked."""
        mean = self.mean
        for name in (mean.leaf, mean.weight, mean.by):
            if isinstance(name, str) and name not in reply:
                raise TaskError(
                    f"{self.owner}: Mean needs '{name}' in the reply. Got: {', '.join(reply)}."
                )
        values = leaves(reply[mean.leaf])
        m = len(position)
        weight = (
            torch.ones(m, dtype=torch.float64, device=position.device)
            if mean.weight is None
            else reply[mean.weight].double()
        )
        if mean.slots:
            weight = weight.reshape(m, -1).expand(m, self.rows)
        finite = torch.isfinite(weight.reshape(m, -1).sum(1))
        for leaf in values:
            if leaf.is_floating_point() and not torch.isfinite(leaf.sum()):
                finite = finite & torch.isfinite(leaf.reshape(m, -1).sum(1, dtype=torch.float64))
        if not bool(finite.all()):
            self.broken += int((~finite).sum())
            values = [leaf[finite] for leaf in values]
            weight, position = weight[finite], position[finite]
            if not len(position):
                return
        group = self._groups(reply, position, finite)
        if mean.slots:
            self.weights += weight.sum(0)
        else:
            self.weights.index_add_(0, group, weight)
        earlier, who = self._first(weight, group, position)
        for total, leaf in zip(self.sums, values, strict=True):
            if not leaf.is_floating_point():  # integer counters: the first contributor's value
                own = leaf[who, torch.arange(self.rows)] if mean.slots else leaf[who]
                total[earlier] = own[earlier]
            elif mean.slots:
                total += torch.einsum("mk,mk...->k...", weight, leaf.double())
            else:
                _fold(total, leaf, group, weight)

    def _groups(self, reply: dict[str, Tree], position: Tensor, finite: Tensor) -> Tensor:
        by = self.mean.by
        if by is None:
            return torch.zeros_like(position)
        return (reply[by][finite] if isinstance(by, str) else by[position]).long()

    def _first(self, weight: Tensor, group: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose first contributor is among these clients, and which of them it is."""
        if not self.mean.slots:
            member = group[:, None] == torch.arange(self.rows, device=group.device)
            weight = member * weight[:, None]  # [m, k]
        never = torch.iinfo(torch.int64).max
        place, who = torch.where(weight > 0, position[:, None], never).min(0)  # [k]
        earlier = place < self.first
        self.first = torch.minimum(place, self.first)
        return earlier, who

    def merge(self, other: "RunningMean", position: Tensor) -> None:
        """Add the sums of other clients; `position` is their index among all clients asked.

        Sums are added in double precision, so the order of merging can change the last bit.
        """
        never = torch.iinfo(torch.int64).max
        known = other.first < never
        first = torch.where(known, position[torch.where(known, other.first, 0)], never)
        earlier = first < self.first
        for total, more in zip(self.sums, other.sums, strict=True):
            if total.is_floating_point():
                total += more
            else:
                total[earlier] = more[earlier]
        self.weights += other.weights
        self.first = torch.minimum(self.first, first)
        self.broken += other.broken

    def result(self) -> Tree:
        """The means; rows without weight are unchanged."""
        if self.broken:
            warnings.warn(
                f"{self.owner}: {self.broken} replies were not finite and were left out of the "
                f"mean of '{self.mean.leaf}'.",
                stacklevel=3,
            )
        trained = self.weights > 0
        out = []
        for old, total in zip(self.around, self.sums, strict=True):
            kept = old if self.bank else old.unsqueeze(0)
            shape = (-1, *(1,) * (kept.ndim - 1))
            if old.is_floating_point():
                divisor = torch.where(trained, self.weights, 1.0).reshape(shape)
                total = (total / divisor).to(old.dtype)
            new = torch.where(trained.reshape(shape), total, kept)
            out.append(new if self.bank else new.squeeze(0))
        return rebuild(self.mean.around, out)


def as_means(reduce: Mean | Sequence[Mean] | None) -> tuple[Mean, ...]:
    """None, one mean or several means, as a tuple."""
    if reduce is None:
        return ()
    return (reduce,) if isinstance(reduce, Mean) else tuple(reduce)


def _fold(total: Tensor, leaf: Tensor, group: Tensor, weight: Tensor) -> None:
    """Add weighted rows to the sums of their groups, in pieces that stay in the cache."""
    if leaf[0].numel() >= LARGE:
        pairs = zip(leaf.unbind(), group.tolist(), weight.tolist(), strict=True)
        for one, row, share in pairs:
            total[row].add_(one, alpha=share)
        return
    # One buffer for all pieces, because allocating memory again costs more than the sums.
    size = max(1, min(len(leaf), PIECE // max(leaf[0].numel(), 1)))
    buffer = torch.empty((size, *leaf.shape[1:]), dtype=torch.float64, device=leaf.device)
    for rows, to, share in zip(
        leaf.split(size), group.split(size), weight.split(size), strict=True
    ):
        scaled = buffer[: len(rows)].copy_(rows).mul_(share.reshape(-1, *(1,) * (leaf.ndim - 1)))
        total.index_add_(0, to, scaled)


LARGE = 50_000
"""Leaves with at least this number of values are added one client at a time."""
PIECE = 200_000
"""Number of values in a piece of several clients: 1.6 MB in double precision."""
