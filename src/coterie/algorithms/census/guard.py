"""A guard against false losses: large entries are limited, and some clients are set aside.

A few clients that send false losses can form clusters of their own, and groups of honest clients
are then merged to make room. So losses above three times the median are limited to that. Two kinds
of clients are left out of the clustering. *Loners* have no similar client: their second-nearest
neighbour is farther away than three times the median of that distance, and than three times the
noise. *Flat* clients have nearly the same loss on all models: their losses differ a tenth as much
from model to model as usual, or less if there are few models. Clients set aside get the nearest
group, and do not train.

A client that copies the losses of another group is not detected. A group needs four honest members:
members of a group of one or two are set aside if the other groups are larger. Therefore, with a
known number of groups, no client is set aside in a cohort of fewer than four clients per group.
"""

import torch
from scipy.stats import chi2
from torch import Tensor

from coterie.clustering.noise import between, distances, nearest_group

FAR = 3.0
"""An entry above this many medians is limited; a client at such a distance is a loner."""
FLAT = 0.1
"""A client whose losses differ by less than this share of the median is flat."""
CHANCE = 1e-5  # share of honest clients that may be as flat by chance
COMPANY = 4
"""With fewer clients (per group, if the number of groups is known) there are no loners."""
OTHERS = 2_000  # number of clients that each client is compared with, at most


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
    """Which clients are flat, [m]: nearly the same loss on all models, unlike the others.

    On two models one honest client in twenty differs a tenth as much as usual by chance. So the
    limit is lower for few models: chance alone makes one in 100,000 as flat.

    >>> flat(torch.tensor([[1.0, 2.0], [2.0, 1.0], [9.0, 9.05], [9.0, 9.0]]))
    tensor([False, False, False,  True])
    """
    free = max(losses.shape[1] - 1, 1)
    chance = float((chi2.ppf(CHANCE, free) / chi2.ppf(0.5, free)) ** 0.5)
    spread = losses.double().std(1, correction=0)
    return spread < min(FLAT, chance) * spread.median()


def loners(units: Tensor, counts: Tensor, neighbour: int = 2) -> Tensor:
    """Which clients are loners, [m]: far from their second-nearest neighbour.

    A distance of 1 is what noise alone makes, so it is never far.

    Parameters
    ----------
    units, counts : shape [m, d], vectors in units of noise and their weights, 0 where missing.
    neighbour : which neighbour must be near.

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
    return far > FAR * far.median().clamp(min=1.0)


def label_all(units: Tensor, counts: Tensor, labels: Tensor, aside: Tensor) -> Tensor:
    """The label of everyone, [m]; of those set aside that of the nearest group.

    `labels` are those of the rest, in order.

    >>> x = torch.tensor([[0.0], [9.0], [7.0]]).double()
    >>> aside = torch.tensor([False, False, True])
    >>> label_all(x, torch.ones_like(x), torch.tensor([0, 1]), aside)
    tensor([0, 1, 1])
    """
    out = labels.new_zeros(len(units))
    out[~aside] = labels
    out[aside] = nearest_group(units[aside], counts[aside], units[~aside], counts[~aside], labels)
    return out
