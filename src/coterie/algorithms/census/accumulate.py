"""Losses as evidence: in units of their noise, added up over rounds.

A client's mean loss on model j of a bank is known up to a standard error. Most of that error is one
number per client (hard samples are hard for every model) and says nothing about groups, so rows are
centred. What is left is divided by its noise, pooled over clients: with V the losses, e the
standard errors of the centred losses and n the numbers of samples,

    C_ij = V_ij - mean over j of V_ij
    X_ij = (C_ij - weighted mean over i) / sqrt(mean over i of n_i e_ij^2),   weight W_ij = n_i

so that clients of one group scatter by 1 / sqrt(W). Every round appends its columns to those of
earlier rounds. Two clients that once differed by 60 standard errors stay apart, even if later
models have the same loss for both. A client that was not asked has weight 0 in the columns of a
round.
"""

import torch
from torch import Tensor

from coterie.core.tree import Ids

COLUMNS = 512
"""Columns kept at most: with ten models fifty rounds."""
FAR = 25.0  # medians of squared errors; more is limited
FAINT = 1e-6  # of the largest variance: less is rounding
ENTRIES = 2_000_000
"""Entries kept at most, 16 MB; with 10,000 clients 200 columns."""


def noise_units(losses: Tensor, errors: Tensor, sizes: Tensor) -> Tensor:
    """Losses [m, k], each row centred, in units of the noise of one sample: X of the formula.

    Parameters
    ----------
    losses : shape [m, k], finite.
    errors : shape [m, k], standard errors of the centred losses. Those of a client with a single
        sample are unknown and left out, as are those that are not finite.
    sizes : shape [m], number of samples behind each row.

    Notes
    -----
    A column without any noise stays in the unit of the loss.

    Examples
    --------
    Two clients that differ by a constant are the same client.

    >>> losses = torch.tensor([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    >>> noise_units(losses, torch.full((2, 3), 0.1), torch.tensor([100, 100])).abs().max().item()
    0.0
    """
    centred = losses.double() - losses.double().mean(1, keepdim=True)
    weight = sizes.double()[:, None]
    known = (weight > 1) & errors.isfinite()  # [m, k]
    squares = torch.where(known, weight * errors.double().nan_to_num().square(), 0.0)
    middle = torch.where(known, squares, torch.nan).nanmedian(0).values  # one client sets no unit
    squares = torch.where(middle > 0, torch.minimum(squares, FAR * middle), squares)
    variance = squares.sum(0) / known.sum(0).clamp(min=1)  # [k]
    unit = torch.where(variance > 0, variance.clamp(min=FAINT * float(variance.max())), 1.0).sqrt()
    around = (weight * centred).sum(0) / weight.sum().clamp(min=1)
    return (centred - around) / unit


def append(
    units: Tensor, counts: Tensor, ids: Ids, block: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a round's columns: values and weights of all clients, [clients, d + k] each.

    `sizes` weigh a client's whole row, [m], or each of its entries, [m, k].

    Where there are more than `COLUMNS` (or `ENTRIES`), the earlier columns that separate clients
    least are dropped; those of this round always stay.

    Examples
    --------
    >>> nothing = torch.zeros(3, 0, dtype=torch.float64)
    >>> block, sizes = torch.tensor([[1.0, -1.0], [2.0, -2.0]]), torch.tensor([5, 7])
    >>> units, counts = append(nothing, nothing, torch.tensor([0, 2]), block, sizes)
    >>> counts[:, 0].tolist()  # the second client was not asked
    [5.0, 0.0, 7.0]
    """
    new = units.new_zeros(len(units), block.shape[1])
    weight = torch.zeros_like(new)
    weights = sizes if sizes.ndim == 2 else sizes[:, None]
    new[ids], weight[ids] = block.to(new), weights.to(new).expand_as(block)
    spare = min(COLUMNS, ENTRIES // max(len(units), 1)) - block.shape[1]
    if units.shape[1] > spare:
        strongest = strength(units, counts).sort(descending=True, stable=True).indices
        kept = strongest[: max(spare, 0)].sort().values
        units, counts = units[:, kept], counts[:, kept]
    return torch.cat([units, new], 1), torch.cat([counts, weight], 1)


def strength(units: Tensor, counts: Tensor) -> Tensor:
    """How far apart a column holds clients: its chi-square per degree of freedom, [d].

    >>> column = torch.tensor([[1.0], [-1.0], [5.0]], dtype=torch.float64)
    >>> strength(column, torch.tensor([[2.0], [2.0], [0.0]], dtype=torch.float64))  # 2 + 2 over 1
    tensor([4.], dtype=torch.float64)
    """
    total = counts.sum(0)
    mean = (counts * units).sum(0) / torch.where(total > 0, total, 1.0)
    free = ((counts > 0).sum(0) - 1).clamp(min=1)
    return (counts * (units - mean).square()).sum(0) / free
