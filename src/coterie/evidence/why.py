"""In what groups differ: columns, shares of labels, what models of other groups say.

All of it is read from sums over the rows of each client. A statement compares one group with the
clients elsewhere. Its effect is a difference in standard deviations of a row (columns) or of angles
(shares: 2 arcsin sqrt(p), Cohen's h), so that statements of different kinds can be ranked.
Intervals take clients as the unit: clients of a group that differ among themselves make a statement
about the group less certain. They hold for all statements of one kind about a group (Bonferroni).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from scipy.stats import t as student
from torch import Tensor

from coterie.evidence.gains import LEVEL


class Statement(NamedTuple):
    """One difference between a group and the clients elsewhere."""

    kind: Literal["column", "label", "prediction"]
    group: int
    item: tuple[int, ...]  # column; label; model's group, label, what the model says instead
    here: float  # mean of the column, or share
    elsewhere: float
    effect: float
    low: float
    high: float

    @property
    def strength(self) -> float:
        """The smallest effect that the interval allows; 0 if it may be none."""
        return max(self.low, -self.high, 0.0)


class _Level(NamedTuple):
    """Means of many items in a set of clients."""

    mean: Tensor  # [d]
    variance: Tensor  # [d]  of the mean
    free: Tensor  # [d]  degrees of freedom of the variance


def column_statements(
    count: Tensor, total: Tensor, square: Tensor, labels: Tensor, level: float = LEVEL
) -> list[Statement]:
    """Compare the columns of a table.

    Parameters
    ----------
    count, total, square
        Of each client and column: values that are not missing, their sum, and the sum of their
        squares. [m, d]
    labels
        Group of each client, 0 .. k - 1. [m]
    level
        Probability that all intervals of a group hold.
    """
    count, total, square = count.double(), total.double(), square.double()
    mean = total / count.clamp(min=1)
    inside = (square - count * mean.square()).clamp(min=0).sum(0)
    row = inside / (count - 1).clamp(min=0).sum(0).clamp(min=1)  # [d]  variance of a row
    used = row > 1e-12 * (square.sum(0) / count.sum(0).clamp(min=1))
    unit = torch.where(used, row, 1.0).sqrt()
    out = []
    for group, here, elsewhere in _sides(labels):
        a = _level(mean[here], count[here], row)
        b = _level(mean[elsewhere], count[elsewhere], row)
        effect, low, high = _interval(a, b, unit, level, int(used.sum()))
        known = used & (count[here].sum(0) > 0) & (count[elsewhere].sum(0) > 0)
        for j in known.nonzero()[:, 0].tolist():
            values = (float(part[j]) for part in (a.mean, b.mean, effect, low, high))
            out.append(Statement("column", group, (j,), *values))
    return out


def label_statements(count: Tensor, labels: Tensor, level: float = LEVEL) -> list[Statement]:
    """Compare how often groups have each label.

    Parameters
    ----------
    count
        Rows of each client and label. [m, c]
    labels, level
        As in `column_statements`.
    """
    count = count.double()
    rows = count.sum(1, keepdim=True).expand_as(count)
    out = []
    for group, here, elsewhere in _sides(labels):
        found = _shares(count[here], rows[here], count[elsewhere], rows[elsewhere], level)
        out += [
            Statement("label", group, (j,), *values)
            for j, values in enumerate(zip(*(part.tolist() for part in found), strict=True))
        ]
    return out


def prediction_statements(table: Tensor, labels: Tensor, level: float = LEVEL) -> list[Statement]:
    """Compare what a group's model says of its own rows and of those of another group.

    A statement about `item` (a, y, z) of group b: rows of b with label y, which the model of group
    a takes for z; `elsewhere` are the rows of group a.

    Parameters
    ----------
    table
        Rows of each client by model, label and what the model says. [m, k, c, c]
    labels, level
        As in `column_statements`.
    """
    table = table.double()
    k, c = table.shape[1:3]
    rows = table.sum(3, keepdim=True).expand_as(table)
    out = []
    for model in range(k):
        own = labels == model
        for group in range(k):
            here = labels == group
            if group == model or not bool(own.any()) or not bool(here.any()):
                continue
            hits, of = table[here, model].flatten(1), rows[here, model].flatten(1)
            own_hits, own_of = table[own, model].flatten(1), rows[own, model].flatten(1)
            found = _shares(hits, of, own_hits, own_of, level)
            seen = (of.sum(0) > 0) & (own_of.sum(0) > 0) & ~torch.eye(c).bool().flatten()
            for j in seen.nonzero()[:, 0].tolist():
                values = (float(part[j]) for part in found)
                out.append(Statement("prediction", group, (model, j // c, j % c), *values))
    return out


def most_telling(statements: Sequence[Statement], per_group: int = 5) -> dict[int, list[Statement]]:
    """The strongest statements about each group, those that may be chance left out."""
    out: dict[int, list[Statement]] = {}
    for found in sorted(statements, key=lambda found: -found.strength):
        chosen = out.setdefault(found.group, [])
        if found.strength > 0 and len(chosen) < per_group:
            chosen.append(found)
    return out


def _sides(labels: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    groups = labels.unique().tolist()
    return [(g, labels == g, labels != g) for g in groups] if len(groups) > 1 else []


def _level(mean: Tensor, count: Tensor, row: Tensor) -> _Level:
    """Mean over the rows of some clients; it varies as clients do, and at least as rows do."""
    rows = count.sum(0).clamp(min=1)
    share = count / rows
    centre = (share * mean).sum(0)
    least = row / rows
    between = (share.square() * (mean - centre).square() / (1 - share).clamp(min=1e-9)).sum(0)
    many = (count > 0).sum(0) > 1
    variance = torch.where(many, torch.maximum(between, least), least)
    free = 1 / share.square().sum(0).clamp(min=1e-9) - 1
    free = torch.where(many & (between >= least), free.clamp(min=0.5), (rows - 1).clamp(min=1))
    return _Level(centre, variance, free)


def _interval(
    a: _Level, b: _Level, unit: Tensor, level: float, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Difference of two means in a unit, with intervals that hold for n of them together."""
    va, vb = a.variance / unit.square(), b.variance / unit.square()
    total = (va + vb).clamp(min=1e-300)
    free = total.square() / (va.square() / a.free + vb.square() / b.free).clamp(min=1e-300)
    q = torch.from_numpy(student.ppf(1 - (1 - level) / (2 * max(n, 1)), free.numpy()))
    effect = (a.mean - b.mean) / unit
    return effect, effect - q * total.sqrt(), effect + q * total.sqrt()


def _shares(
    hits: Tensor, rows: Tensor, other_hits: Tensor, other_rows: Tensor, level: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shares here and elsewhere, and their difference in angles with an interval: [d] each."""
    a, b = _angle(hits, rows), _angle(other_hits, other_rows)
    one = torch.ones_like(a.mean)
    effect, low, high = _interval(a, b, one, level, len(one))
    here, elsewhere = (
        h.sum(0) / n.sum(0).clamp(min=1) for h, n in ((hits, rows), (other_hits, other_rows))
    )
    return here, elsewhere, effect, low, high


def _angle(hits: Tensor, rows: Tensor) -> _Level:
    """Shares as angles, 2 arcsin sqrt(p)."""
    p = (hits.sum(0) + 0.5) / (rows.sum(0) + 1)  # never 0 or 1
    row = p * (1 - p)
    found = _level(hits / rows.clamp(min=1), rows, row)
    return _Level(2 * p.sqrt().asin(), found.variance / row, found.free)  # slope 1 / sqrt(row)
