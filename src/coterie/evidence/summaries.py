"""What one client computes: its losses summed up by fold and class.

A client assigns its rows at random to a few folds, class by class. For each fold and class it sends
the number of rows and their mean loss on each network, and for each class how its losses scatter
around these means. A difference between clients that is real shows in every fold; noise does not
(`replication.py`). Rows that belong together, such as those of one patient, are averaged first:
they are one observation.

These functions take padded rows with a mask, and work on one client or, by `vmap`, on many.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.random import permutation

FOLDS = 4
"""Two folds find fewer groups, eight no more."""


class Rows(NamedTuple):
    """Observations of one client; those that are not real are padding."""

    values: Tensor  # [r, n]  losses on r networks
    label: Tensor  # [n]  class, 0 .. c - 1
    unit: Tensor  # [n]  number of the unit it belongs to
    mask: Tensor  # [n]  True for real ones


class Summary(NamedTuple):
    """One client's answer; those of many clients have a first axis m, and one sum of scatters."""

    counts: Tensor  # [f, c]  rows
    mean: Tensor  # [f, c, r]  of their values; zero where there are none
    scatter: Tensor  # [c, r, r]  products of deviations from these means, summed over rows


def reveal(arguments: Mapping[str, Any]) -> str:
    """What the answer to a survey tells about classes, by its lens: of rows as a whole, nothing."""
    by_class = arguments.get("lens", "auto") in ("auto", "conditional")
    return "label counts" if by_class else ""


def average_units(rows: Rows) -> Rows:
    """Average the rows of a unit that have the same class; the result is sorted by unit.

    The number of places stays the same, so that this works on stacked clients; those that are not
    needed are masked.

    Examples
    --------
    Two rows of unit 7 and one of unit 2, all of class 0:

    >>> values, label = torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([0, 0, 0])
    >>> rows = Rows(values, label, torch.tensor([7, 7, 2]), torch.ones(3, dtype=torch.bool))
    >>> out = average_units(rows)
    >>> out.values.tolist(), out.mask.tolist()
    ([[5.0, 2.0, 0.0]], [True, True, False])
    """
    values, label, unit, mask = rows
    last = torch.iinfo(torch.int64).max
    order = torch.where(mask, label.long(), last).argsort(stable=True)
    order = order[torch.where(mask, unit.long(), last)[order].argsort(stable=True)]
    values, label, unit, mask = values.double()[:, order], label[order], unit[order], mask[order]
    new = (unit[1:] != unit[:-1]) | (label[1:] != label[:-1]) | (mask[1:] != mask[:-1])
    place = torch.cat([torch.zeros_like(label[:1]).long(), new.long().cumsum(0)])
    empty = torch.zeros_like(values)
    size = empty[0].scatter_add(0, place, mask.double())
    total = empty.scatter_add(1, place.expand_as(values), torch.where(mask, values, 0.0))
    return Rows(
        total / size.clamp(min=1),
        torch.zeros_like(label).scatter(0, place, label),
        torch.zeros_like(unit).scatter(0, place, unit),
        size > 0,
    )


def assign_folds(key: Tensor, rows: Rows, n_classes: int, folds: int = FOLDS) -> Tensor:
    """Fold of each row: evenly within a class, at random, a unit as a whole: [n].

    The rows of a unit must stand together, as `average_units` leaves them; the class of its first
    row counts. All clients begin a class with the same fold. Clients with few rows of it then
    have them in the same folds and can be compared.
    """
    first = torch.ones_like(rows.mask[:1])
    leads = torch.cat([first, rows.unit[1:] != rows.unit[:-1]]) & rows.mask
    order = permutation(key, leads)
    label = rows.label[order].long()
    member = (label[:, None] == torch.arange(n_classes, device=label.device)) & leads[order, None]
    rank = member.long().cumsum(0).gather(1, label[:, None])[:, 0] - 1
    fold = torch.zeros_like(label).scatter(0, order, (rank + label) % folds)
    place = torch.arange(len(fold), device=fold.device)
    return fold[torch.where(leads, place, 0).cummax(0).values]


def summarise(rows: Rows, fold: Tensor, n_classes: int, folds: int = FOLDS) -> Summary:
    """Counts and means by fold and class, and the scatter around them.

    Examples
    --------
    Losses 1 and 3 in fold 0, loss 6 in fold 1:

    >>> values, label = torch.tensor([[1.0, 3.0, 6.0]]), torch.tensor([0, 0, 0])
    >>> rows = Rows(values, label, torch.arange(3), torch.ones(3, dtype=torch.bool))
    >>> out = summarise(rows, torch.tensor([0, 0, 1]), n_classes=1, folds=2)
    >>> out.counts.flatten().tolist(), out.mean.flatten().tolist(), out.scatter.flatten().tolist()
    ([2.0, 1.0], [2.0, 6.0], [2.0])
    """
    values, mask = rows.values.double(), rows.mask
    values = torch.where(mask, values, 0.0)
    cell = fold * n_classes + rows.label.long()
    cells = torch.arange(folds * n_classes, device=cell.device)
    member = ((cell[:, None] == cells) & mask[:, None]).double()  # [n, f c]
    count = member.sum(0)
    centre = values.sum(1, keepdim=True) / mask.sum().clamp(min=1)  # sums of small numbers
    mean = torch.where(mask, values - centre, 0.0) @ member / count.clamp(min=1)  # [r, f c]
    mean = torch.where(count > 0, mean + centre, 0.0)
    apart = torch.where(mask, values - mean[:, cell], 0.0)
    of_class = member.reshape(-1, folds, n_classes).sum(1)  # [n, c]
    scatter = torch.einsum("rn,nc,sn->crs", apart, of_class, apart)
    return Summary(count.reshape(folds, n_classes), mean.T.reshape(folds, n_classes, -1), scatter)


def share_rows(label: Tensor, unit: Tensor, mask: Tensor, n_classes: int) -> Rows:
    """Rows whose values say which class they are of: with them, clients are compared by shares.

    All rows count as one class, so that folds do not depend on labels.

    >>> share_rows(torch.tensor([1, 0]), torch.arange(2), torch.ones(2).bool(), 2).values.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    classes = torch.arange(n_classes, device=label.device)
    values = (label.long() == classes[:, None]).double()
    return Rows(values, torch.zeros_like(label).long(), unit, mask)


def select(answers: Summary, ids: Tensor) -> Summary:
    """The answers of some clients; of the summed scatter, the part of each class by its rows.

    >>> counts = torch.tensor([[[3.0]], [[1.0]]])
    >>> answers = Summary(counts, torch.zeros(2, 1, 1, 1), torch.tensor([[[8.0]]]))
    >>> select(answers, torch.tensor([0])).scatter
    tensor([[[6.]]])
    """
    counts = answers.counts[ids]
    share = counts.sum((0, 1)) / answers.counts.sum((0, 1)).clamp(min=1)  # [c]
    return Summary(counts, answers.mean[ids], share[:, None, None] * answers.scatter)


def pack(scatter: Tensor) -> Tensor:
    """The lower triangles of symmetric matrices, row by row: [..., r, r] to [..., r (r + 1) / 2].

    >>> pack(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    tensor([1., 2., 3.])
    """
    low = torch.tril_indices(*scatter.shape[-2:], device=scatter.device)
    return scatter[..., low[0], low[1]]


def unpack(packed: Tensor, r: int) -> Tensor:
    """The inverse of `pack`.

    >>> unpack(torch.tensor([1.0, 2.0, 3.0]), 2)
    tensor([[1., 2.],
            [2., 3.]])
    """
    low = torch.tril_indices(r, r)
    out = packed.new_zeros(*packed.shape[:-1], r, r)
    out[..., low[0], low[1]] = out[..., low[1], low[0]] = packed
    return out


def diagonal(packed: Tensor, r: int) -> Tensor:
    """The diagonals of packed matrices: [..., r].

    >>> diagonal(torch.tensor([1.0, 2.0, 3.0]), 2)
    tensor([1., 3.])
    """
    row = torch.arange(r)
    return packed[..., row * (row + 3) // 2]


def number_distinct(*columns: Tensor) -> Tensor:
    """A number for each row, the same for rows that are equal in every column: [n].

    Bits are compared, so that missing values (nan) equal one another. If there are fewer numbers
    than rows, some rows are repeats, and the numbers may serve as their units.

    Examples
    --------
    >>> x = torch.tensor([[1.0, float("nan")], [2.0, 0.0], [1.0, float("nan")]])
    >>> number_distinct(x, torch.tensor([0, 1, 0])).tolist()
    [0, 1, 0]
    """
    sight = torch.cat([_bits(column.reshape(len(column), -1)) for column in columns], 1)
    _, number = sight.unique(dim=0, return_inverse=True)
    first = torch.full((len(number),), len(number)).scatter_reduce(
        0, number, torch.arange(len(number)), "amin"
    )
    return first.argsort(stable=True).argsort()[number]


def repeated_share(number: Tensor, mask: Tensor) -> Tensor:
    """Share of the real rows that repeat another one, from the numbers of `number_distinct`.

    >>> repeated_share(torch.tensor([0, 1, 0, 1, 2]), torch.ones(5, dtype=torch.bool))
    tensor(0.4000, dtype=torch.float64)
    """
    number = torch.where(mask, number, -1).sort().values
    again = (number[1:] == number[:-1]) & (number[1:] >= 0)
    return again.double().sum() / mask.sum().clamp(min=1)


def _bits(column: Tensor) -> Tensor:
    """A column as integers: equal numbers get equal ones, and nan equals nan."""
    if not column.is_floating_point():
        return column.long()
    column = column.double() + 0.0  # -0.0 becomes 0.0
    return torch.where(column.isnan(), torch.nan, column).view(torch.int64)
