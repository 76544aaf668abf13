"""A guard against vectors that lie: clipped entries, and clients set aside.

A few clients that send nonsense take clusters for themselves, and groups of honest clients are
merged to make room. Losses beyond three times the usual are clipped. Two kinds of clients are left
out of the clustering: those without company, whose second-nearest neighbour is farther away than
three times the median of that distance and three times the noise; and those that say nothing, whose
losses differ a tenth as much from model to model as usual. They are told the nearest group, and do
not take part in training.

A client that copies another group's vector cannot be seen here, and a group needs four honest
members; the members of an honest group of one or two are set aside if the other groups are larger.
So with a known number of groups nobody is set aside in a cohort of fewer than four clients a group:
drawn at random, some groups are bound to have one or two there.
"""

import torch
from torch import Tensor

from coterie.clustering.noise import between, distances, pooled

FAR = 3.0
"""Times the usual from which on an entry is clipped and a client is a loner."""
FLAT = 0.1
"""Share of the usual difference between models below which a client says nothing."""
COMPANY = 4
"""Clients (of a group, where the number of groups is known) below which nobody is a loner."""
OTHERS = 2_000  # clients everybody is compared with at most


def clip(losses: Tensor) -> Tensor:
    """Losses of at most three times the median entry.

    >>> clip(torch.tensor([[1.0, 2.0], [2.0, 90.0], [3.0, 2.0]]))
    tensor([[1., 2.],
            [2., 6.],
            [3., 2.]])
    """
    ordered = losses.double().flatten().sort().values
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    if median <= 0:  # losses that may be negative have no usual size
        return losses
    return losses.clamp(max=float(FAR * median))


def flat(losses: Tensor) -> Tensor:
    """Who says nothing: [m], True for a client that loses alike on all models, unlike the others.

    >>> flat(torch.tensor([[1.0, 2.0], [2.0, 1.0], [9.0, 9.05]]))
    tensor([False, False,  True])
    """
    spread = losses.double().std(1, correction=0)
    return spread < FLAT * spread.median()


def loners(units: Tensor, counts: Tensor, neighbour: int = 2, floor: float = 1.0) -> Tensor:
    """Who has no company: [m], True for a client far from its second-nearest neighbour.

    Parameters
    ----------
    units, counts : shape [m, d], vectors in units of noise and their weights, 0 where missing.
    neighbour : which neighbour must be near.
    floor : distance that is nothing unusual: 1 is what noise alone makes.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2], [90.0]]).double()
    >>> loners(x, torch.ones_like(x))
    tensor([False, False, False, False, False, False,  True])
    """
    m = len(units)
    if m < COMPANY:
        return torch.zeros(m, dtype=torch.bool)
    if m > OTHERS:
        chosen = torch.randperm(m, generator=torch.Generator().manual_seed(0))[:OTHERS]
        columns = [between(units, counts, units[i], counts[i]) for i in chosen]
        apart = torch.stack(columns, 1).sqrt()  # [m, others]
        apart[chosen, torch.arange(OTHERS)] = torch.inf
    else:
        apart = distances(units, counts).fill_diagonal_(torch.inf)
    far = apart.kthvalue(neighbour, dim=1).values
    usual = far.median().clamp(min=floor)
    return far > FAR * usual if usual > 0 else torch.zeros(m, dtype=torch.bool)


def nearest(units: Tensor, counts: Tensor, labels: Tensor, aside: Tensor) -> Tensor:
    """The label of everyone, [m]; of those set aside that of the nearest group.

    `labels` are those of the rest, in order.

    >>> x = torch.tensor([[0.0], [9.0], [7.0]]).double()
    >>> aside = torch.tensor([False, False, True])
    >>> nearest(x, torch.ones_like(x), torch.tensor([0, 1]), aside)
    tensor([0, 1, 1])
    """
    means, weight = pooled(units[~aside], counts[~aside], labels)
    out = labels.new_zeros(len(units))
    out[~aside] = labels
    pairs = zip(means, weight, strict=True)
    cost = torch.stack([between(units[aside], counts[aside], *pair) for pair in pairs], 1)
    out[aside] = cost.argmin(1)
    return out
