"""Answers to a survey that cannot be true, found before clients are compared.

A client divides its rows at random, so its mean losses in the folds of a class differ by chance.
Chance has a form: networks that were drawn alike find the same rows hard, so their losses go up and
down together, and how they do is much the same for all clients. One extreme row makes differences
larger; it does not change their form. Numbers drawn at random, or put in another order, have lost
it. With D the differences between folds of a client, in all P pairs of folds of a class and r
networks, and S_c the covariance of losses in a class, two explanations are compared, each with the
scale that suits it best:

    honest      D ~ s S_c      log likelihood  -P r / 2 log(sum D' S_c^-1 D) - P / 2 log det S_c
    made up     D ~ s 1                        -P r / 2 log(sum D' D)

An answer contradicts itself if the second is the more likely one, and D is larger than chance makes
it. It repeats one number if D is close to nothing. S_c is a mean over clients in which each has the
same scale; a class with few rows borrows from the others.

A false answer that is as consistent as a true one is not found here. It is a client unlike all
others, or a member of the group whose answers it copies.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.evidence.replication import RIDGE
from coterie.evidence.summaries import diagonal, unpack

MADE_UP = 0.4
"""An answer contradicts itself if it is more likely to be made up by this log likelihood for each
network, and differs by more than the next limit. With that limit at 2, this was so for 2 of 5,384
honest clients in 22 kinds of federations, and for all but 22 of 3,200 whose numbers were put in
another order."""
LARGER = 4.0
"""Differences of this many times the size that chance makes; it is not counted less than usual
for a client that varies less than others. Honest clients of ten rows exceeded 2 in 12 of 100
federations of 60. Of 480 such clients whose numbers were put in another order, 476 exceeded 4."""
REPEATS = 0.05
"""Differences below this share of what chance makes repeat one number. Honest clients had at least
.1."""
FEWEST = 3
"""Pairs of folds below which a client is not judged."""
CONTRADICTS, FEW = 5.0, 12
"""Label shares that differ by 5 (1 + 12 / degrees of freedom) times what chance makes contradict
each other."""
NEARLY = 1e-3
"""Shares may add up to one less or more by this: they travel with few digits."""
STEPS = 3
"""How often the form of losses is taken, each time without the made-up scatters of the last."""
LARGE = 10.0
"""A client's scatter counts with at most this many times that of the median client."""


class Screened(NamedTuple):
    """What is left of the answers."""

    good: Tensor  # [m]  False: the answer cannot be true
    why: dict[int, str]  # by position, what is wrong
    factor: Tensor  # [m]  by which the scatter of each client is multiplied


def screen_losses(count: Tensor, mean: Tensor, scatter: Tensor) -> Screened:
    """Find answers that contradict themselves or repeat one number.

    Parameters
    ----------
    count
        Rows by fold and class. [m, f, c]
    mean
        Their mean losses. [m, f, c, r]
    scatter
        Products of the deviations from these means, summed over the rows of a class, packed.
        [m, c, r (r + 1) / 2]

    Examples
    --------
    Twenty clients whose losses on three networks go up and down together, one that repeats itself,
    one that made up its numbers:

    >>> from coterie.core.random import normal, seed_key
    >>> draw = normal(seed_key(0), (22, 4, 5, 3), torch.float64) / 5
    >>> mean = draw.cumsum(3)  # of 25 rows, each with variance one
    >>> mean[3], mean[7] = 1.0, 5 * draw[7]
    >>> spread = torch.tensor([1.0, 1.0, 2.0, 1.0, 2.0, 3.0]).double()
    >>> count = torch.full((22, 4, 5), 25.0, dtype=torch.float64)
    >>> found = screen_losses(count, mean, 96 * spread.expand(22, 5, 6))
    >>> {i: why.split(" as")[0] for i, why in found.why.items()}
    {3: 'its answers hardly differ from row to row, though its rows do', 7: 'its answers about \
different rows differ 56 times'}
    """
    m, r = len(count), mean.shape[-1]
    inner = (count.sum(1) - (count > 0).sum(1)).clamp(min=0)  # [m, c]  rows less their means
    total = diagonal(scatter, r).clamp(min=0).sum((1, 2))
    own, factor = _limit_scatter(total, inner.sum(1) * r)
    known = (own > 0) & (inner.sum(1) > 0)
    usual = float(own[known].median()) if bool(known.any()) else 0.0
    fine = Screened(torch.ones(m, dtype=torch.bool), {}, factor)
    if usual == 0:
        return fine
    root, log_size = _form(inner, scatter, torch.where(known, own, 0.0), r)
    apart = _differences(count, mean)
    pairs = ((count > 0).sum(1) - 1).clamp(min=0).double()  # [m, c]
    n = (pairs.sum(1) * r).clamp(min=1)
    honest = torch.einsum("mfcr,crs->mfcs", apart, root).square().sum((1, 2, 3)) / n
    made_up = apart.square().sum((1, 2, 3)) / n
    likely = _compare(honest, made_up, n, pairs @ log_size) / r
    judged = (pairs.sum(1) >= FEWEST) & known
    by_all = honest / own.clamp(min=usual, max=LARGE * usual)
    by_own = honest / own.clamp(max=usual).clamp(min=1e-300)
    middle = by_all[judged].median() if bool(judged.any()) else by_all.new_ones(())
    times = by_all / middle.clamp(min=1e-300)
    strange = judged & (likely > MADE_UP)
    if 2 * int(strange.sum()) > int(judged.sum()):  # the losses of this model have another form
        strange = torch.zeros_like(strange)
    more, less = strange & (times > LARGER), judged & (by_own < REPEATS * middle.clamp(max=1.0))
    why = {}
    for i in (more | less).nonzero()[:, 0].tolist():
        why[i] = (
            f"its answers about different rows differ {float(times[i]):.0f} times as much as "
            "chance allows, and not as losses do"
            if bool(more[i])
            else "its answers hardly differ from row to row, though its rows do"
        )
    return fine._replace(good=~(more | less), why=why)


def _differences(count: Tensor, mean: Tensor) -> Tensor:
    """Folds less the client's mean of their class, times the root of the count: [m, f, c, r]."""
    rows = count.sum(1).clamp(min=1)[..., None]
    centre = (count[..., None] * mean).sum(1) / rows
    return count.sqrt()[..., None] * (mean - centre[:, None])


def _form(inner: Tensor, scatter: Tensor, own: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Inverse roots of the covariances of classes, [c, r, r], and their log determinants, [c].

    Every client counts on the same scale. To the rows of this class are added rows of all classes,
    as many as there are networks. Scatters that are more likely made up than of this form are left
    out, and it is taken again: otherwise made-up answers were compared with made-up scatters.
    """
    share = torch.where(own > 0, 1 / own.clamp(min=1e-300), 0.0)
    low = torch.tril_indices(r, r)
    twice = torch.where(low[0] == low[1], 1.0, 2.0).double()
    for _ in range(STEPS):
        free = (inner * (share > 0)[:, None]).sum(0)  # [c]
        sums = unpack(torch.einsum("m,mcp->cp", share, scatter), r)
        every = sums.sum(0) / free.sum().clamp(min=1)
        square = (sums + r * every) / (free + r)[:, None, None]
        size = square.diagonal(dim1=1, dim2=2).mean(1)
        eye = torch.eye(r, dtype=torch.float64)
        value, axes = torch.linalg.eigh(square + RIDGE * size[:, None, None] * eye)
        # A false scatter may have negative axes; true ones have at least the ridge.
        value = value.clamp(min=0.5 * RIDGE * size.clamp(min=1e-300)[:, None])
        log_size = value.log().sum(1)
        inverse = ((axes / value[:, None]) @ axes.mT)[:, low[0], low[1]] * twice
        n = inner.sum(1) * r
        honest = torch.einsum("mcp,cp->m", scatter, inverse) / n.clamp(min=1)
        likely = _compare(honest, own, n, inner @ log_size)
        found = (likely > MADE_UP * r) & (share > 0)
        if not bool(found.any()) or 2 * int(found.sum()) > int((share > 0).sum()):
            break
        share = torch.where(found, 0.0, share)
    return (axes / value.sqrt()[:, None]) @ axes.mT, log_size


def _compare(honest: Tensor, made_up: Tensor, n: Tensor, log_size: Tensor) -> Tensor:
    """By how much n numbers are more likely made up, from their mean squares in both units."""
    ratio = honest.clamp(min=1e-300) / made_up.clamp(min=1e-300)
    return (n * ratio.log() + log_size) / 2


def screen_shares(count: Tensor, mean: Tensor, scatter: Tensor) -> Screened:
    """Find label shares that are none, or differ between the folds of a client beyond chance.

    The parameters are those of `screen_losses`; the means of a fold are the shares of its labels.
    How far they differ is Pearson's statistic of a table of folds and labels.

    Examples
    --------
    The second client's shares add up to more than one, the third has a label in one fold only:

    >>> mean = torch.tensor([[0.5, 0.5], [0.5, 0.4]] + [[0.6, 0.6], [0.5, 0.5]])
    >>> mean = torch.stack([mean[:2], mean[2:], torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    >>> mean[0, 1, 1] = 0.5
    >>> count, scatter = torch.full((3, 2, 1), 200.0), torch.full((3, 1, 3), 50.0)
    >>> for why in screen_shares(count, mean[:, :, None], scatter).why.values():
    ...     print(why)
    its label shares do not add up to one
    its label shares in different rows differ 400 times as much as chance allows
    """
    count, mean = count.double(), mean.double()
    there = count > 0  # [m, f, 1]
    valid = (mean >= -NEARLY).all(3) & ((mean.sum(3) - 1).abs() <= NEARLY)
    whole = (valid | ~there).flatten(1).all(1)
    rows = count.sum(1, keepdim=True).clamp(min=1)[..., None]
    share = (count[..., None] * mean).sum(1, keepdim=True) / rows
    square = (mean - share).square() / share.clamp(min=1e-300) * (share > 0)
    free = (there.sum((1, 2)) - 1) * ((share > 0).sum((1, 2, 3)) - 1)
    times = (count[..., None] * square).sum((1, 2, 3)) / free.clamp(min=1)
    more = whole & (free > 0) & (times > CONTRADICTS * (1 + FEW / free.clamp(min=1)))
    why = dict.fromkeys((~whole).nonzero()[:, 0].tolist(), "its label shares do not add up to one")
    for i in more.nonzero()[:, 0].tolist():
        why[i] = (
            f"its label shares in different rows differ {float(times[i]):.0f} times as much as "
            "chance allows"
        )
    inner = (count.sum(1) - there.sum(1)).clamp(min=0)
    own = diagonal(scatter.double(), mean.shape[-1]).clamp(min=0).sum((1, 2))
    return Screened(whole & ~more, why, _limit_scatter(own, inner.sum(1) * mean.shape[-1])[1])


def _limit_scatter(total: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Variance of a row of each client, and the factor that limits it."""
    own = total / free.clamp(min=1)
    known = own[(own > 0) & (free > 0)]
    most = LARGE * float(known.median()) if len(known) else torch.inf
    return own, (most / own.clamp(min=1e-300)).clamp(max=1.0)


def screen_reply(reply: Mapping[str, Any], prefix: str) -> Screened:
    """Screen answers as they travel: counts, means and packed scatters, by prefixed names."""
    count, mean, scatter = (
        reply[f"{prefix}{part}"].double() for part in ("count", "mean", "scatter")
    )
    return (screen_shares if prefix else screen_losses)(count, mean, scatter)
