"""Averages of client updates: weights, groups, empty groups, rules that resist liars."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.core.errors import TaskError
from coterie.core.robust import FEWEST, combine, limit_weights
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


class Averaging(Protocol):
    """An average that is under way: of sums, or of replies that are held."""

    mean: Mean
    broken: int  # replies that were not finite

    def add(self, reply: dict[str, Tree], position: Tensor, checked: bool = False) -> None:
        """Add the replies of some clients; `position` is their index among the clients asked.

        `checked`: they are known to be finite.
        """

    def merge(self, other: Any, position: Tensor) -> None:
        """Add what another process gathered; `position`: its clients among all clients asked."""

    def result(self) -> Tree:
        """The means; rows without weight are unchanged."""


class RunningMean:
    """The running sums of one `Mean`, in double precision, so that chunk sizes do not matter.

    Parameters
    ----------
    mean
        What is averaged.
    owner
        Method and task, for messages.
    cap
        The largest weight of a client; None: no limit.
    radius
        Length to which the difference between a reply and the present model is shortened; None: it
        is not.
    fewest
        Rows with fewer clients are unchanged.
    """

    def __init__(
        self,
        mean: Mean,
        owner: str,
        cap: float | None = None,
        radius: float | None = None,
        fewest: int = 1,
    ) -> None:
        self.mean, self.owner, self.cap, self.radius = mean, owner, cap, radius
        self.fewest = fewest
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
        self.members = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.first = torch.full((self.rows,), torch.iinfo(torch.int64).max, device=device)
        self.broken = 0

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process, to be merged there: the sums, not the models."""
        return {k: v for k, v in self.__dict__.items() if k not in ("mean", "around")}

    def add(self, reply: dict[str, Tree], position: Tensor, checked: bool = False) -> None:
        """Add the replies of some clients; `position` is their index among the clients asked.

        `checked`: they are known to be finite.
        """
        mean = self.mean
        values, weight = read_values(mean, self.owner, reply, len(position), self.rows)
        finite = find_finite(values, weight, checked)
        if not bool(finite.all()):
            self.broken += int((~finite).sum())
            values = [leaf[finite] for leaf in values]
            weight, position = weight[finite], position[finite]
            if not len(position):
                return
        if self.cap is not None:
            most = weight.reshape(len(weight), -1).sum(1)
            weight = weight * _column(self.cap / most.clamp(min=self.cap), weight)
        group = self._groups(reply, position, finite)
        if mean.slots:
            self.weights += weight.sum(0)
            self.members += (weight > 0).sum(0)
        else:
            self.weights.index_add_(0, group, weight)
            self.members.index_add_(0, group, (weight > 0).long())
        if self.radius is not None:
            values = self._shorten(values, group, self.radius)
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
        return read_groups(self.mean, reply, position, finite)

    def _shorten(self, values: list[Tensor], group: Tensor, radius: float) -> list[Tensor]:
        """Replies whose difference from the present model is at most `radius` long."""
        old = [
            leaf if self.mean.slots else (leaf if self.bank else leaf[None])[group]
            for leaf in self.around
        ]
        axes = 2 if self.mean.slots else 1
        apart = [
            leaf.double() - base if leaf.is_floating_point() else None
            for leaf, base in zip(values, old, strict=True)
        ]
        squares = [
            part.flatten(axes).square().sum(-1) if part.ndim > axes else part.square()
            for part in apart
            if part is not None
        ]
        if not squares:
            return values
        length = torch.stack(squares).sum(0).sqrt()
        factor = (radius / length.clamp(min=1e-300)).clamp(max=1.0)
        return [
            leaf if part is None else base + _column(factor, part) * part
            for leaf, base, part in zip(values, old, apart, strict=True)
        ]

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
        self.members += other.members
        self.first = torch.minimum(self.first, first)
        self.broken += other.broken

    def result(self) -> Tree:
        """The means; rows without weight are unchanged."""
        warn_broken(self.mean, self.owner, self.broken)
        trained = (self.weights > 0) & (self.members >= self.fewest)
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


class HeldMean:
    """One `Mean` by a rule that must see all replies at once.

    It holds the leaf of every reply, and while it computes, once more those of one group.

    Parameters
    ----------
    mean
        What is averaged.
    owner
        Method and task, for messages.
    rule, liars, radius
        As in `robust.combine`.
    cap
        The largest weight of a client; None: twice the median of its group.
    fewest
        Rows with fewer clients are unchanged.
    tell
        Whether to warn of rows with too few replies for the rule.
    """

    def __init__(
        self,
        mean: Mean,
        owner: str,
        rule: str,
        liars: float,
        cap: float | None = None,
        radius: float | None = None,
        fewest: int = 1,
        tell: bool = True,
    ) -> None:
        self.mean, self.owner, self.rule = mean, owner, rule
        self.fewest, self.tell = fewest, tell
        self.liars, self.cap, self.radius = liars, cap, radius
        self.bank = mean.slots or mean.by is not None
        self.around = leaves(mean.around)
        self.rows = len(self.around[0]) if self.bank and self.around else 1
        self.held: list[tuple[list[Tensor], Tensor, Tensor, Tensor]] = []
        self.broken = 0
        self.few: list[int] = []  # rows with too few members for the rule

    def add(self, reply: dict[str, Tree], position: Tensor, checked: bool = False) -> None:
        """Hold the replies of some clients; `position` is their index among the clients asked.

        `checked`: they are known to be finite.
        """
        values, weight = read_values(self.mean, self.owner, reply, len(position), self.rows)
        finite = find_finite(values, weight, checked)
        self.broken += int((~finite).sum())
        group = read_groups(self.mean, reply, position[finite], finite)
        values = [leaf[finite] for leaf in values]
        self.held.append((values, weight[finite], group, position[finite]))

    def merge(self, other: "HeldMean", position: Tensor) -> None:
        """Hold what another process held; `position`: its clients among all clients asked."""
        for values, weight, group, place in other.held:
            self.held.append((values, weight, group, position[place]))
        self.broken += other.broken

    def result(self) -> Tree:
        """The means; rows without weight are unchanged."""
        warn_broken(self.mean, self.owner, self.broken)
        out = [(old if self.bank else old.unsqueeze(0)).clone() for old in self.around]
        if self.held and self.around:
            parts = list(zip(*self.held, strict=True))
            order = torch.cat(parts[3]).argsort()
            values = [torch.cat(leaf)[order] for leaf in zip(*parts[0], strict=True)]
            weight, group = torch.cat(parts[1])[order], torch.cat(parts[2])[order]
            for row in range(self.rows):
                self._combine(out, row, values, weight, group)
        if self.few and self.tell:
            shown = ", ".join(map(str, self.few[:5])) + (" ..." if len(self.few) > 5 else "")
            rows = f" of group{'s' * (len(self.few) > 1)} {shown}" if self.bank else ""
            warnings.warn(
                f"{self.owner}: '{self.rule}' needs {FEWEST} replies. The mean of "
                f"'{self.mean.leaf}'{rows} has fewer, and the plain mean is taken.",
                stacklevel=3,
            )
        return rebuild(self.mean.around, out if self.bank else [leaf[0] for leaf in out])

    def _combine(
        self, out: list[Tensor], row: int, values: list[Tensor], weight: Tensor, group: Tensor
    ) -> None:
        own = weight[:, row] if self.mean.slots else weight
        who = ((own > 0) & ((group == row) | self.mean.slots)).nonzero()[:, 0]
        if len(who) < max(self.fewest, 1):
            return
        given = limit_weights(own[who], self.cap)
        mine = [leaf[who, row] if self.mean.slots else leaf[who] for leaf in values]
        floats = [i for i, leaf in enumerate(mine) if leaf.is_floating_point()]
        few = len(who) < FEWEST
        if few and len(who) > 1:
            self.few.append(row)
        # A mean is a clipped mean whose radius nothing exceeds.
        rule, radius = ("clipped", torch.inf) if few else (self.rule, self.radius)
        new = combine(
            [mine[i] for i in floats],
            [out[i][row] for i in floats],
            given,
            rule,
            self.liars,
            radius,
        )
        for i, leaf in zip(floats, new, strict=True):
            out[i][row] = leaf.to(out[i].dtype)
        for i, leaf in enumerate(mine):
            if i not in floats:  # integer counters: the middle one
                out[i][row] = leaf.sort(dim=0).values[(len(leaf) - 1) // 2]


def read_values(
    mean: Mean, owner: str, reply: dict[str, Tree], m: int, rows: int
) -> tuple[list[Tensor], Tensor]:
    """The leaves of m replies and their weights: [m], or one per row, [m, rows]."""
    for name in (mean.leaf, mean.weight, mean.by):
        if isinstance(name, str) and name not in reply:
            raise TaskError(f"{owner}: Mean needs '{name}' in the reply. Got: {', '.join(reply)}.")
    values = leaves(reply[mean.leaf])
    device = values[0].device if values else None
    weight = (
        torch.ones(m, dtype=torch.float64, device=device)
        if mean.weight is None
        else reply[mean.weight].double()
    )
    if mean.slots:
        weight = weight.reshape(m, -1).expand(m, rows)
    return values, weight


def find_finite(values: list[Tensor], weight: Tensor, checked: bool = False) -> Tensor:
    """Which of m replies are finite, with their weights; all, if they are checked already: [m]."""
    m = len(weight)
    finite = torch.isfinite(weight.reshape(m, -1).sum(1))
    for leaf in values if not checked else ():
        if leaf.is_floating_point() and not torch.isfinite(leaf.sum()):
            finite = finite & torch.isfinite(leaf.reshape(m, -1).sum(1, dtype=torch.float64))
    return finite


def read_groups(mean: Mean, reply: dict[str, Tree], position: Tensor, finite: Tensor) -> Tensor:
    """The group of each finite reply; `position` is that of the finite ones."""
    if mean.by is None:
        return torch.zeros_like(position)
    by = mean.by
    return (reply[by][finite] if isinstance(by, str) else by[position]).long()


def warn_broken(mean: Mean, owner: str, broken: int) -> None:
    """Say how many replies were not finite."""
    if broken:
        warnings.warn(
            f"{owner}: {broken} replies were not finite and were left out of the "
            f"mean of '{mean.leaf}'.",
            stacklevel=4,
        )


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Values with further axes of size one, so that they multiply a tensor of more axes."""
    return values.reshape(*values.shape, *(1,) * (like.ndim - values.ndim))


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
