"""Do clients of a set differ? What really differs repeats itself in other rows; noise does not.

Every client has divided its rows into folds (`summaries.py`). With x its mean loss in a fold and
class, in units of the noise of one row, its residual is

    r = sqrt(n) (x - mean of its set in that fold and class)

and G_ij sums <r_i, r_j> over all pairs of *different* folds, over classes too. Within a set without
differences the expectation of G is zero, whatever the noise looks like. Three figures are read from
it: the largest eigenvalue (the best split of a set in two that repeats itself), the largest entry
of the diagonal (the client that differs most), and the trace (everything). Chance is known by
permutation: clients of a set change places, within each class and fold.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.random import fold, normal, uniform
from coterie.evidence.summaries import Summary

RIDGE = 1e-2  # of the mean variance of a class
NOTHING = 1e-12  # of the mean square: scatter that is rounding only
STEPS = 20  # of Lanczos' method; its value need not be the eigenvalue, permutations see the same
DRAWS = 199
ENOUGH = 10  # draws above what was observed: the p-value is above .05 for certain
HELD = 4_000_000  # numbers of permuted residuals that are held at a time


class Units(NamedTuple):
    """How losses become units of noise, class by class."""

    centre: Tensor  # [c, r]
    root: Tensor  # [c, r, r]  zero: the class does not vary and is not used


class Test(NamedTuple):
    """What repeats itself within sets."""

    split: float  # p-value of the best split of a set
    odd: float  # p-value of the client that differs most
    total: float  # p-value of the sum over clients
    deviation: Tensor  # [m]  of each client from its set, in standard deviations of chance


def noise_units(answers: Summary, labels: Tensor, ridge: float = RIDGE) -> Units:
    """Units in which losses of a class vary by one around the mean of the client's set.

    The scatter around sets, not around clients, does not change when clients of a set change
    places, which keeps the permutations exact, and no class is too small for it.

    Parameters
    ----------
    answers
        Of m clients; the scatter is the sum over clients.
    labels
        Set of each client, 0 .. k - 1. [m]
    ridge
        Share of the mean variance that is added to every direction.
    """
    count, mean, scatter = answers
    r = mean.shape[-1]
    sets = _member(labels)
    of_client = (count[..., None] * mean).sum(1)  # [m, c, r]
    weight = sets.T @ count.sum(1)  # [k, c]
    centre = torch.einsum("mk,mcr->kcr", sets, of_client) / weight.clamp(min=1)[..., None]
    apart = count.sqrt()[..., None] * (mean - centre[labels][:, None])
    free = (count.sum((0, 1)) - (weight > 0).sum(0)).clamp(min=1)
    square = (scatter + torch.einsum("mfcr,mfcs->crs", apart, apart)) / free[:, None, None]
    size = square.diagonal(dim1=1, dim2=2).mean(1)  # [c]
    level = (count[..., None] * mean.square()).sum((0, 1, 3)) / count.sum((0, 1)).clamp(min=1) / r
    used = (size > NOTHING * level) & (count.sum((0, 1)) >= 2)
    eye = torch.eye(r, dtype=torch.float64)
    value, axes = torch.linalg.eigh(
        torch.where(used[:, None, None], square + ridge * size[:, None, None] * eye, eye)
    )
    # The symmetric root does not depend on the signs of axes, nor on the order of clients.
    # A false scatter may have negative axes; true ones have at least the ridge.
    value = value.clamp(min=0.5 * ridge * size.clamp(min=1e-300)[:, None])
    root = torch.where(used[:, None, None], (axes / value.sqrt()[:, None]) @ axes.mT, 0.0)
    return Units(of_client.sum(0) / count.sum((0, 1)).clamp(min=1)[:, None], root)


def in_units(answers: Summary, units: Units) -> Tensor:
    """Mean losses in units of the noise of one row: [m, f, c, r]."""
    return torch.einsum("mfcr,crs->mfcs", answers.mean - units.centre, units.root)


def average_folds(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each client over its folds, by class, and the rows behind it: [m, c, r], [m, c]."""
    rows = count.sum(1)
    return (count[..., None] * x).sum(1) / rows.clamp(min=1)[..., None], rows


def residuals(x: Tensor, count: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Differences from the mean of the set, times the root of the count; and where there are any.

    A cell counts if another client of the set has rows in it, too.

    Returns
    -------
    [m, f, c, r] and [m, f, c].
    """
    sets = _member(labels)
    weight = torch.einsum("mk,mfc->kfc", sets, count)[labels]
    total = torch.einsum("mk,mfcr->kfcr", sets, count[..., None] * x)[labels]
    there = (count > 0) & (weight > count)
    apart = x - total / weight.clamp(min=1)[..., None]
    return torch.where(there, count, 0.0).sqrt()[..., None] * apart, there


def repeated(r: Tensor) -> Tensor:
    """What repeats itself of each client, from residuals [..., m, f, c, r]: [..., m].

    Two folds of one class and network with residuals 2 and 3 give 2 x 3, counted both ways:

    >>> float(repeated(torch.tensor([[[[2.0]], [[3.0]]]]))[0])
    12.0
    """
    return r.sum(-3).square().sum((-2, -1)) - r.square().sum((-3, -2, -1))


def best_split(r: Tensor, start: Tensor) -> Tensor:
    """Largest eigenvalue of G from residuals [b, m, f, c, r], by Lanczos' method: [b].

    G is never formed: its product with a vector takes two products with the residuals.
    """
    b, m, f = r.shape[:3]
    parts = r.reshape(b, m, f, -1).transpose(1, 2).contiguous()  # [b, f, m, d]
    whole = parts.sum(1)  # [b, m, d]

    def times(v: Tensor) -> Tensor:
        v = v[..., None]
        of_fold = (parts @ (parts.mT @ v[:, None])).sum(1)
        return (whole @ (whole.mT @ v) - of_fold)[..., 0]

    steps = min(STEPS, m)
    basis = (start / start.norm()).expand(b, m)[:, None]  # [b, 1, m]
    tri = torch.zeros(b, steps, steps, dtype=r.dtype)
    for step in range(steps):
        w = times(basis[:, step])
        tri[:, step, step] = (w * basis[:, step]).sum(1)
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            w = w - (basis.mT @ (basis @ w[..., None]))[..., 0]
        size = w.norm(dim=1)
        if step + 1 < steps:
            # A vector that vanishes ends the search; what follows adds eigenvalues of zero only.
            goes_on = size > 1e-9 * tri.abs().amax((1, 2)).clamp(min=1e-300)
            size = torch.where(goes_on, size, 0.0)
            tri[:, step, step + 1] = tri[:, step + 1, step] = size
            w = torch.where(goes_on[:, None], w / size.clamp(min=1e-300)[:, None], 0.0)
            basis = torch.cat([basis, w[:, None]], 1)
    values: Tensor = torch.linalg.eigvalsh(tri)
    return values[:, -1]


def remaining(x: Tensor, count: Tensor, labels: Tensor) -> float:
    """What repeats itself within sets, summed over clients."""
    return float(repeated(residuals(x, count, labels)[0]).sum())


def compare(x: Tensor, count: Tensor, labels: Tensor, key: Tensor, draws: int = DRAWS) -> Test:
    """Test whether clients differ within their sets.

    Parameters
    ----------
    x
        Mean losses in units of noise. [m, f, c, r]
    count
        Rows behind them. [m, f, c]
    labels
        Set of each client, 0 .. k - 1. [m]
    key
        Decides the permutations.
    draws
        Number of permutations. Fewer are made where many exceed what was observed: a p-value
        above .05 is then certain, but known less exactly.
    """
    r, there = residuals(x, count, labels)
    m = len(r)
    k = there.sum(1)
    scale = (2 * r.shape[-1] * (k * (k - 1)).sum(1)).clamp(min=1).double().sqrt()  # [m]
    members = [(labels == s).nonzero()[:, 0] for s in range(int(labels.max()) + 1)]
    starts = normal(fold(key, "start"), (m,), torch.float64)

    def figures(r: Tensor) -> Tensor:  # [b, m, f, c, r] to [b, k + 2]
        own = repeated(r)
        tops = [best_split(r[:, ids], starts[ids]) for ids in members if len(ids) > 1]
        return torch.stack([*tops, (own / scale).amax(1), own.sum(1)], 1)

    if m == len(members):  # nobody to compare with
        return Test(1.0, 1.0, 1.0, torch.zeros(m, dtype=torch.float64))
    deviation = repeated(r) / scale
    seen, drawn = figures(r[None]), r.new_zeros(0, 1)
    step = max(1, min(25, HELD // r.numel()))
    chance: list[Tensor] = []
    for first in range(0, draws, step):
        some = min(step, draws - first)
        chance.append(figures(_permute(r, there, labels, fold(key, first), some)))
        drawn = torch.cat(chance)
        above = (_worst_set(seen, drawn) >= _worst_set(seen[:1], drawn, own=True) - 1e-9).sum(0)
        if bool((above >= ENOUGH).all()) and len(drawn) >= 25:
            break
    p = ((above + 1).double() / (len(drawn) + 1)).tolist()
    return Test(p[0], p[1], p[2], deviation)


def contrast(x: Tensor, count: Tensor, labels: Tensor, key: Tensor, draws: int = DRAWS) -> float:
    """The p-value of "known sets of clients are alike", which must not come from the same numbers.

    It asks one question less than `compare` and so sees smaller differences. What repeats itself of
    each set's mean is added up over sets; chance is known by permutation of all clients.

    Parameters
    ----------
    x, count, key, draws
        As in `compare`; the units of noise are those of one set.
    labels
        Set of each client. [m]
    """
    one = torch.zeros_like(labels)
    r, there = residuals(x, count, one)
    sets = _member(labels)
    rows = torch.where(there, count, 0.0)
    total = torch.einsum("mk,mfc->kfc", sets, rows).clamp(min=1).sqrt()

    def figure(r: Tensor) -> Tensor:  # [b, m, f, c, r] to [b]
        of_set = torch.einsum("mk,mfc,bmfcr->bkfcr", sets, rows.sqrt(), r)
        return repeated(of_set / total[..., None]).sum(1)

    seen, above = figure(r[None]), 0
    step = max(1, min(25, HELD // r.numel()))
    for first in range(0, draws, step):
        drawn = figure(_permute(r, there, one, fold(key, first), min(step, draws - first)))
        above += int((drawn >= seen - 1e-9).sum())
    return (above + 1) / (draws + 1)


def _worst_set(seen: Tensor, drawn: Tensor, own: bool = False) -> Tensor:
    """Best split over sets, each in units of its own chance, beside the other two figures."""
    mean, spread = drawn.mean(0), drawn.std(0, correction=0).clamp(min=1e-12)
    rows = ((seen if own else drawn) - mean) / spread
    return torch.stack([rows[:, :-2].amax(1), rows[:, -2], rows[:, -1]], 1)


def _permute(r: Tensor, there: Tensor, labels: Tensor, key: Tensor, draws: int) -> Tensor:
    """Residuals whose clients changed places within set, class and fold, the first fold apart."""
    m, f, c, width = r.shape
    stratum = torch.where(there, labels[:, None, None], labels.max() + 1).double()
    place = stratum.argsort(dim=0, stable=True)  # [m, f, c]
    taken = (stratum + uniform(key, (draws, m, f, c), torch.float64)).argsort(dim=1)
    source = torch.empty_like(taken).scatter_(1, place.expand_as(taken), taken)
    source[:, :, 0] = torch.arange(m)[:, None]
    return r.expand(draws, *r.shape).gather(1, source[..., None].expand(draws, m, f, c, width))


def _member(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels.long()).double()  # [m, k]
