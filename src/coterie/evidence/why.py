"""In what groups differ: columns, shares of labels, what the models of other groups say.

All of it is read from sums over the rows of each client. A statement compares one group, or one odd
client, with the groups elsewhere. Its effect is a difference in standard deviations of a row
(columns) or of angles (shares: 2 arcsin sqrt(p), Cohen's h), so that statements of different kinds
can be ranked.

Clients of a group differ among themselves, and a statement about the group is less certain for it.
With n_i rows of client i, and a row's variance as the unit, the mean of a set of clients with
weights w_i has the variance

    sum_i w_i^2 (t + 1 / n_i)

where t is what clients of one group differ by beyond their rows. It is estimated for each item
(column, label) from all groups together, and moderated by the other items as in limma (Smyth 2004):
two or three clients say little about the spread of one item, but they say it for many items. The
intervals hold for everything that is compared at once (Bonferroni). With fewer than `LEAST_FREE`
clients more than sets nothing is known about t. It is then left out, and the intervals speak of the
rows of these clients only.

References
----------
J. Cohen: Statistical power analysis for the behavioral sciences. 2nd edition, 1988.
G. K. Smyth: Linear models and empirical Bayes methods for assessing differential expression in
microarray experiments. Statistical Applications in Genetics and Molecular Biology 3, 2004.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from scipy.special import polygamma
from scipy.stats import t as student
from torch import Tensor

from coterie.evidence.gains import LEVEL
from coterie.evidence.replication import in_units, noise_units
from coterie.evidence.summaries import Summary

Kind = Literal["column", "share", "label", "target", "class", "wrong", "confusion", "error", "bias"]
FEW = 5
"""Items below which there are too few to moderate the spread of one by that of the others."""
LEAST_FREE = 3
"""Clients, less the number of groups, from which on it is known how much clients of one differ."""
MOST_EFFECT = 10.0
"""Largest effect of a column that is constant in every group; all larger ones are alike."""


class Sets(NamedTuple):
    """Groups and odd clients."""

    labels: Tensor  # [m]  number of each client's set, 0 .. k - 1
    odd: Tensor  # [m]  True for odd clients, each of which is a set of its own

    @property
    def knows_clients(self) -> bool:
        """Whether there are enough clients to know how much those of one group differ."""
        usual = self.labels[~self.odd]
        return len(usual) - len(usual.unique()) >= LEAST_FREE

    @property
    def sides(self) -> list[tuple[int, Tensor, Tensor]]:
        """Each set, and the clients elsewhere that it is compared with: those of other groups."""
        out = []
        for number in self.labels.unique().tolist():
            here = self.labels == number
            elsewhere = ~here & ~self.odd
            if bool(elsewhere.any()):
                out.append((number, here, elsewhere))
        return out


class Statement(NamedTuple):
    """One difference between a set of clients and the clients elsewhere."""

    kind: Kind
    group: int
    item: tuple[int, ...]  # column; label; model's group; model's group, label, what it says
    here: float  # mean of the column, or share
    elsewhere: float
    effect: float
    error: float  # standard error of the effect
    free: float  # its degrees of freedom
    unit: float  # of the effect, for columns; 1 for shares
    low: float = -math.inf
    high: float = math.inf

    @property
    def strength(self) -> float:
        """The smallest effect that the interval allows; 0 if it may be none."""
        return max(self.low, -self.high, 0.0)


def compare_columns(count: Tensor, mean: Tensor, square: Tensor, sets: Sets) -> list[Statement]:
    """Compare the means of columns.

    Parameters
    ----------
    count, mean, square
        Of each client and column: number of values that are not missing, their mean, and the sum
        of squared deviations from it. [m, d]
    sets
        Groups and odd clients.
    """
    columns = _Columns.of(count, mean, square, sets)
    out = []
    for group, here, elsewhere in sets.sides:
        found = columns.contrast(here, elsewhere)
        out += [Statement("column", group, (j,), *found.at(j)) for j in found.chosen]
    return out


def compare_errors(count: Tensor, mean: Tensor, square: Tensor, sets: Sets) -> list[Statement]:
    """Compare the errors of a group's model on its own rows and on those of another group.

    A statement "error" with the item (a,) compares squared errors of the model of group a, "bias"
    its errors with their sign; `elsewhere` are the rows of group a.

    Parameters
    ----------
    count, mean, square
        Of each client, for each model: rows, and mean and squared deviations as in
        `compare_columns`, of the squared errors and of the errors. [m], [m, k, 2]
    sets
        Groups and odd clients; models have the numbers of sets.
    """
    k = mean.shape[1]
    every = count[:, None].expand(-1, 2 * k)
    columns = _Columns.of(every, mean.flatten(1), square.flatten(1), sets)
    out = []
    for model, group, here, own in _pairs(sets, k):
        found = columns.contrast(here, own)
        for j, kind in ((2 * model, "error"), (2 * model + 1, "bias")):
            if j in found.chosen:
                out.append(Statement(kind, group, (model,), *found.at(j)))  # type: ignore[arg-type]
    return out


def compare_shares(hits: Tensor, rows: Tensor, sets: Sets, kind: Kind = "share") -> list[Statement]:
    """Compare how often something is true.

    Parameters
    ----------
    hits, rows
        Of each client and item: rows for which it is true, and all rows. [m, d]
    sets
        Groups and odd clients.
    kind
        Kind of the statements.
    """
    hits, rows = hits.double(), rows.double()
    spread = _spread(rows, hits / rows.clamp(min=1), _share_noise(hits, rows, sets), sets)
    out = []
    for group, here, elsewhere in sets.sides:
        found = _contrast(hits, rows, here, elsewhere, spread)
        out += [Statement(kind, group, (j,), *found.at(j)) for j in found.chosen]
    return out


def compare_predictions(table: Tensor, sets: Sets) -> list[Statement]:
    """Compare what a group's model says of its own rows and of those of another group.

    A statement "confusion" with the item (a, y, z) is about rows of a group with label y, which the
    model of group a takes for z; "wrong" with the item (a,) about rows for which it is wrong.
    `elsewhere` are the rows of group a.

    Parameters
    ----------
    table
        Rows of each client by model, label and what the model says. [m, k, c, c]
    sets
        Groups and odd clients; models have the numbers of sets.
    """
    table = table.double()
    k, c = table.shape[1:3]
    right = table.diagonal(dim1=2, dim2=3).sum(2)  # [m, k]
    rows = table.sum((2, 3))
    off = ~torch.eye(c, dtype=torch.bool).flatten()
    hits = table.flatten(2)[..., off]  # [m, k, c (c - 1)]
    of = table.sum(3, keepdim=True).expand_as(table).flatten(2)[..., off]
    pairs = off.nonzero()[:, 0].tolist()
    hits, of = torch.cat([(rows - right)[..., None], hits], 2), torch.cat([rows[..., None], of], 2)
    d = hits.shape[2]
    flat_hits, flat_of = hits.flatten(1), of.flatten(1)  # [m, k d]
    spread = _spread(
        flat_of, flat_hits / flat_of.clamp(min=1), _share_noise(flat_hits, flat_of, sets), sets
    )
    out = []
    for model, group, here, own in _pairs(sets, k):
        part = slice(model * d, (model + 1) * d)
        found = _contrast(flat_hits[:, part], flat_of[:, part], here, own, spread.take(part))
        for j in found.chosen:
            if j == 0:
                out.append(Statement("wrong", group, (model,), *found.at(j)))
            else:
                y, z = divmod(pairs[j - 1], c)
                out.append(Statement("confusion", group, (model, y, z), *found.at(j)))
    return out


def compare_classes(answers: Summary, sets: Sets) -> list[Statement]:
    """Compare the rows of a class by their losses on untrained networks (a survey's answers).

    The effect is the distance between two sets in the loss space of a class, in standard deviations
    of a row. Only what repeats itself in other folds counts, so that chance gives zero. Unlike
    above, clients of a set are taken as they are: rows alone make it uncertain.
    """
    x = in_units(answers, noise_units(answers, sets.labels))  # [m, f, c, r]
    out = []
    for group, here, elsewhere in sets.sides:
        n = torch.stack([answers.counts[side].sum(0) for side in (here, elsewhere)])  # [2, f, c]
        means = [
            (answers.counts[side][..., None] * x[side]).sum(0) / of.clamp(min=1)[..., None]
            for side, of in zip((here, elsewhere), n, strict=True)
        ]
        there = (n > 0).all(0)  # [f, c]
        apart = torch.where(there[..., None], means[0] - means[1], 0.0)  # [f, c, r]
        noise = torch.where(there, (1 / n.clamp(min=1)).sum(0), 0.0)
        folds = there.sum(0).double()  # [c]
        pairs = folds * (folds - 1)
        square = (apart.sum(0).square() - apart.square().sum(0)).sum(1) / pairs.clamp(min=1)
        chance = 2 * x.shape[-1] * (noise.sum(0).square() - noise.square().sum(0))
        signal = 4 * square.clamp(min=0) * noise.sum(0) / folds.clamp(min=1).square()
        error = (chance / pairs.clamp(min=1).square() + signal).sqrt()
        effect = square.clamp(min=1e-12).sqrt()
        for j in (pairs > 0).nonzero()[:, 0].tolist():
            size = float(effect[j])
            parts = size, 0.0, size, float(error[j] / effect[j]), math.inf, 1.0
            out.append(Statement("class", group, (j,), *parts))
    return out


def set_intervals(statements: Sequence[Statement], level: float = LEVEL) -> list[Statement]:
    """Intervals that hold for all statements together with a probability."""
    if not statements:
        return []
    tail = (1 - level) / (2 * len(statements))
    quantile = student.ppf(1 - tail, [one.free for one in statements]).tolist()
    return [
        one._replace(low=one.effect - q * one.error, high=one.effect + q * one.error)
        for one, q in zip(statements, quantile, strict=True)
    ]


def share_interval(statement: Statement) -> tuple[float, float]:
    """The difference of two shares that the interval of its angle allows.

    With a and b the angles of two shares, these differ by sin((a + b) / 2) sin((a - b) / 2); the
    first factor is taken as it was found.

    >>> one = Statement("label", 0, (0,), 0.5, 0.1, 0.93, 0.1, 99, 1.0, 0.73, 1.13)
    >>> tuple(round(end, 2) for end in share_interval(one))
    (0.32, 0.48)
    """
    shares = statement.here, statement.elsewhere
    middle = sum(math.asin(math.sqrt(min(max(share, 0.0), 1.0))) for share in shares)
    ends = (min(max(end, -math.pi), math.pi) for end in (statement.low, statement.high))
    low, high = (math.sin(middle) * math.sin(end / 2) for end in ends)
    return low, high


# inside


class _Spread(NamedTuple):
    """What clients of one group differ by beyond their rows."""

    extra: Tensor  # [d]  t, in variances of a row
    free: Tensor  # [d]  degrees of freedom; infinite if only rows decide
    square: Tensor  # [d]  sum over clients of rows times squared distance from their group's mean
    groups: Tensor  # [d]  number of sets that have rows

    def take(self, part: slice) -> "_Spread":
        return _Spread(*(leaf[part] for leaf in self))


class _Contrast(NamedTuple):
    """A difference between two sides, for many items."""

    here: Tensor  # [d]  mean or share
    elsewhere: Tensor
    effect: Tensor
    error: Tensor
    free: Tensor
    unit: Tensor
    known: Tensor  # [d]  both sides have rows

    @property
    def chosen(self) -> list[int]:
        """Items that can be compared."""
        out: list[int] = self.known.nonzero()[:, 0].tolist()
        return out

    def at(self, j: int) -> tuple[float, ...]:
        return tuple(float(part[j]) for part in self[:6])


class _Columns(NamedTuple):
    """Columns of all clients, with what makes their means uncertain."""

    rows: Tensor  # [m, d]
    mean: Tensor  # [m, d]
    noise: Tensor  # [m, d]  variance of a row, in the client's set and at least as in all groups
    free: Tensor  # [m, d]  degrees of freedom that a client adds to it
    unit: Tensor  # [d]  of effects: standard deviation of a row of the groups
    spread: "_Spread"
    varies: Tensor  # [d]

    @classmethod
    def of(cls, count: Tensor, mean: Tensor, square: Tensor, sets: Sets) -> "_Columns":
        count, mean, square = count.double(), mean.double(), square.double()
        rows = count.sum(0).clamp(min=1)
        whole = (count * mean).sum(0) / rows
        total = (square + count * (mean - whole).square()).sum(0) / rows  # [d]  of all rows
        least = (1e-6 * total).clamp(min=1e-300)
        free, usual = (count - 1).clamp(min=0), ~sets.odd
        common = square[usual].sum(0) / free[usual].sum(0).clamp(min=1)
        common = torch.maximum(common, least)
        noise, known = common.expand_as(mean).clone(), free[usual].sum(0).expand_as(mean).clone()
        for number in sets.labels.unique().tolist():
            own = sets.labels == number
            freedom = free[own].sum(0)
            here = square[own].sum(0) / freedom.clamp(min=1)
            larger = here > common
            noise[own] = torch.where(larger, here, common)
            known[own] = torch.where(larger, freedom, known[own])
        spread = _spread(count, mean, noise, sets)
        inside = square[usual].sum(0) + spread.square
        within = inside / (count[usual].sum(0) - spread.groups).clamp(min=1)
        unit = torch.maximum(within, total / MOST_EFFECT**2).clamp(min=1e-300).sqrt()
        varies = total > 1e-12 * (whole.square() + total)
        return cls(count, mean, noise, known.clamp(min=1), unit, spread, varies)

    def contrast(self, here: Tensor, elsewhere: Tensor) -> _Contrast:
        sides = [_mean(self.rows[side], self.mean[side]) for side in (here, elsewhere)]
        parts = [
            _variance(self.rows[side], self.noise[side], self.spread) for side in (here, elsewhere)
        ]
        least = [self.free[side].amin(0) for side in (here, elsewhere)]
        total = parts[0] + parts[1]
        free = total.square() / sum(v.square() / f for v, f in zip(parts, least, strict=True))
        rows = [self.rows[side].sum(0) for side in (here, elsewhere)]
        most = (self.rows[here | elsewhere] - 1).clamp(min=0).sum(0).clamp(min=1)
        return _Contrast(
            sides[0],
            sides[1],
            (sides[0] - sides[1]) / self.unit,
            total.sqrt() / self.unit,
            torch.minimum(self.spread.free, torch.minimum(free, most)),
            self.unit,
            self.varies & (rows[0] > 0) & (rows[1] > 0),
        )


def _pairs(sets: Sets, k: int) -> list[tuple[int, int, Tensor, Tensor]]:
    """Model, another set, its clients, and the clients of the model's own set."""
    groups = sets.labels.unique().tolist()
    return [
        (model, group, sets.labels == group, sets.labels == model)
        for model in range(k)
        for group in groups
        if group != model and model in groups
    ]


def _mean(count: Tensor, mean: Tensor) -> Tensor:
    return (count * mean).sum(0) / count.sum(0).clamp(min=1)


def _share_noise(hits: Tensor, rows: Tensor, sets: Sets) -> Tensor:
    """Variance of a row of each client, by the share in its set; never 0: [m, d]."""
    out = torch.ones_like(hits)
    for number in sets.labels.unique().tolist():
        own = sets.labels == number
        p = (hits[own].sum(0) + 0.5) / (rows[own].sum(0) + 1)
        out[own] = p * (1 - p)
    return out


def _spread(count: Tensor, mean: Tensor, noise: Tensor, sets: Sets) -> _Spread:
    """How much clients of one group differ, from all groups together.

    Parameters
    ----------
    count, mean, noise
        Of each client and item: rows, their mean and the variance of one. [m, d]
    sets
        Groups and odd clients.
    """
    d = count.shape[1]
    square, ratio = torch.zeros(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    free, rows = torch.zeros(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    groups = torch.zeros(d, dtype=torch.float64)
    for number in sets.labels.unique().tolist():
        own = sets.labels == number
        n, there = count[own], count[own] > 0
        apart = n * (mean[own] - _mean(n, mean[own])).square()
        square += apart.sum(0)
        ratio += (apart / noise[own]).sum(0)
        free += (there.sum(0) - 1).clamp(min=0)
        rows += n.sum(0) - n.square().sum(0) / n.sum(0).clamp(min=1)
        groups += there.any(0)
    level, total = _moderate(ratio / free.clamp(min=1), free)
    extra = ((level - 1) * free / rows.clamp(min=1)).clamp(min=0)
    known = free >= LEAST_FREE
    total = torch.where(known, total, torch.inf)
    return _Spread(torch.where(known, extra, 0.0), total, square, groups)


def _moderate(ratio: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Variance ratios drawn towards what is usual among items, and their degrees of freedom.

    A scaled F distribution is fitted to the logarithms of the ratios (Smyth 2004, section 6.2).
    """
    used = (free > 0) & (ratio > 0)
    if int(used.sum()) < FEW:
        return ratio, free
    half = free[used] / 2
    e = ratio[used].log() - half.digamma() + half.log()
    excess = float(e.var() - torch.polygamma(1, half).mean())
    if excess <= 0:  # all items are alike
        prior, usual = math.inf, float((free * ratio)[used].sum() / free[used].sum())
        return torch.full_like(ratio, usual), torch.full_like(free, float(free[used].sum()))
    prior = 2 * _inverse_trigamma(excess)
    usual = math.exp(
        float(e.mean()) + float(torch.tensor(prior / 2).digamma()) - math.log(prior / 2)
    )
    return (prior * usual + free * ratio) / (prior + free), prior + free


def _inverse_trigamma(value: float) -> float:
    """The number whose trigamma is a positive value, by Newton's method."""
    x = 0.5 + 1 / value
    for _ in range(50):
        slope = polygamma(1, x)
        step = slope * (1 - slope / value) / polygamma(2, x)
        x += step
        if abs(step) < 1e-8 * x:
            break
    return float(x)


def _variance(count: Tensor, noise: Tensor, spread: _Spread) -> Tensor:
    """Variance of the mean over the rows of some clients: [d]."""
    weight = count / count.sum(0).clamp(min=1)
    return (weight.square() * noise * (spread.extra + 1 / count.clamp(min=1))).sum(0)


def _contrast(
    hits: Tensor, rows: Tensor, here: Tensor, elsewhere: Tensor, spread: _Spread
) -> _Contrast:
    """Shares on two sides, and their difference in angles, in which a row has variance 1."""
    sides = [(hits[side].sum(0), rows[side].sum(0)) for side in (here, elsewhere)]
    a, b = (2 * ((h + 0.5) / (n + 1)).sqrt().asin() for h, n in sides)
    one = torch.ones_like(rows)
    error = sum(_variance(rows[side], one[side], spread) for side in (here, elsewhere))
    p, q = (h / n.clamp(min=1) for h, n in sides)
    known = (sides[0][1] > 0) & (sides[1][1] > 0)
    return _Contrast(p, q, a - b, torch.as_tensor(error).sqrt(), spread.free, one[0], known)
