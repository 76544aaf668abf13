"""Answers to a survey that cannot be true, found before clients are compared.

A client divides its rows at random, so its mean losses in the folds of a class differ by what its
scatter says, and by no more and no less. Numbers drawn at random, or put in another order, differ
more by far; the same number everywhere does not differ at all. Both are compared with the scatter
of all clients and with the client's own, so that one extreme row proves nothing.

A false answer that is as consistent as a true one is not found here. It is a client unlike all
others, or one of the group whose answers it copies.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.evidence.summaries import diagonal

CONTRADICTS = 5.0
"""Folds that differ by this many times what chance makes contradict each other. Honest clients with
thirty pairs of folds had at most 1.5, numbers in another order at least 43."""
FEW = 12
"""With this number of pairs of folds the limit is twice as high, with fewer higher still: with six
pairs an honest client had 5."""
REPEATS = 0.05
"""Folds that differ by less than this share of chance repeat one number. Honest clients had at
least .5."""
MANY = 6
"""Pairs of folds below which nobody is said to repeat one number. Four rows of a rare class fall on
four folds evenly in one of eleven clients, and their label shares are then almost equal."""
FEWEST = 3
"""Pairs of folds below which a client is not judged."""
LARGE = 10.0
"""A client's scatter counts with at most this many times that of the median client."""


class Screened(NamedTuple):
    """What is left of the answers."""

    good: Tensor  # [m]  False: the answer cannot be true
    why: dict[int, str]  # by position, what is wrong
    factor: Tensor  # [m]  by which the scatter of each client is multiplied


def screen(count: Tensor, mean: Tensor, variance: Tensor) -> Screened:
    """Find answers that contradict themselves or repeat one number.

    Parameters
    ----------
    count
        Rows by fold and class. [m, f, c]
    mean
        Their mean losses. [m, f, c, r]
    variance
        Squares of the deviations from these means, summed over the rows of a class. [m, c, r]

    Examples
    --------
    Twenty clients whose folds differ by chance, one that repeats itself, one that contradicts
    itself:

    >>> from coterie.core.random import normal, seed_key
    >>> mean = normal(seed_key(0), (22, 4, 5, 3), torch.float64) / 5
    >>> mean[3], mean[7] = 1.0, 30 * mean[7]
    >>> count = torch.full((22, 4, 5), 25.0, dtype=torch.float64)
    >>> found = screen(count, mean, torch.full((22, 5, 3), 96.0, dtype=torch.float64))
    >>> {i: why.split(" differ")[0] for i, why in found.why.items()}
    {3: 'its answers hardly', 7: 'its answers about'}
    """
    m = len(count)
    rows = count.sum(1)  # [m, c]
    folds = (count > 0).sum(1)
    inner, pairs = (rows - folds).clamp(min=0), (folds - 1).clamp(min=0)
    # A million entries at most are needed twice, so nothing is kept by network.
    own = variance.clamp(min=0).sum((1, 2)) / (inner.sum(1) * mean.shape[-1]).clamp(min=1)
    known = own[(own > 0) & (inner.sum(1) > 0)]
    usual = float(known.median()) if len(known) else 0.0
    factor = (LARGE * usual / own.clamp(min=1e-300)).clamp(max=1.0) if usual > 0 else own * 0 + 1
    noise = (factor[:, None, None] * variance.clamp(min=0)).sum(0)
    noise = noise / inner.sum(0).clamp(min=1)[:, None]  # [c, r]
    centre = (count[..., None] * mean).sum(1) / rows.clamp(min=1)[..., None]
    apart = (count[..., None] * (mean - centre[:, None]).square()).sum((1, 2, 3))
    total = pairs.sum(1)
    by_all = (pairs[..., None] * noise).sum((1, 2))
    ratio = torch.stack(
        [apart / by_all.clamp(min=1e-300), apart / (total * mean.shape[-1] * own).clamp(min=1e-300)]
    )
    judged = (total >= FEWEST) & (by_all > 0) & (own > 0)
    if not bool(judged.any()):
        return Screened(torch.ones(m, dtype=torch.bool), {}, factor)
    middle = ratio[:, judged].median(1).values.clamp(min=1e-300)[:, None]
    ratio = ratio / middle
    limit = CONTRADICTS * (1 + FEW / total.clamp(min=1))
    more, less = ratio.amin(0) > limit, (ratio.amax(0) < REPEATS) & (total >= MANY)
    why = {}
    for i in (judged & (more | less)).nonzero()[:, 0].tolist():
        times = float(ratio[:, i].min())
        why[i] = (
            f"its answers about different rows differ {times:.0f} times as much as chance allows"
            if bool(more[i])
            else "its answers hardly differ from row to row, though its rows do"
        )
    return Screened(~(judged & (more | less)), why, factor)


def screen_reply(reply: Mapping[str, Any], prefix: str) -> Screened:
    """Screen answers as they travel: counts, means and packed scatters, by prefixed names."""
    count, mean, scatter = (
        reply[f"{prefix}{part}"].double() for part in ("count", "mean", "scatter")
    )
    return screen(count, mean, diagonal(scatter, mean.shape[-1]))
