"""Where a new loss vector belongs, and whether it belongs anywhere.

Known groups are summed up by the centroids of their members' vectors and by one pooled spread.
With c_g a centroid, S the pooled within-group covariance, n2 the mean squared standard error of
an entry, n_m the members' mean number of samples and n_new the newcomer's, a vector v of d
entries lies from group g at

    A = 0.7 S + 0.3 diag(S) + diag(n2 max(n_m / n_new - 1, 0))
    q_g = (v - c_g)' A^-1 (v - c_g) / d

and goes to the smallest q. The last term of A allows for the noise of a newcomer with fewer
samples than the members had. It uses the members' noise, not the newcomer's: data unlike
anything seen has large losses *and* large standard errors, and would excuse itself.

The worst member sets the scale, each weighed without itself. Few members make that a matter of
luck: the scatter is then badly known, and the worst of a few is not far off. So the scale is at
least what chance allows. With B = A^-1 S, f = members - groups degrees of freedom and
D = tr(B)^2 / tr(B^2) effective dimensions, q of a newcomer of the right kind stays in 99 % of all
cases below

    (1 + groups / members) tr(B) / d  F(D, f),    F: the 99 % point of that F distribution

which is Hotelling's limit where A = S and d = 1. The F distribution allows for a poorly known
scatter, the worst member for long tails, which no Gaussian has. With correlated Gaussian vectors of
four entries and three groups, newcomers of the right kind were refused in 0-2 % with 20, 5 or 4
members a group; by the worst member alone in 0-2, 0-6 and 1-11 %.
"""

from typing import NamedTuple

import torch
from scipy.stats import f as f_distribution
from torch import Tensor

from coterie.clustering.labels import centroids

REFUSAL = 1.5
"""Refuse a newcomer whose score exceeds this. Measured with trained banks of CNNs on MNIST
partitions: coterie_lab.studies.clove_study. Exception: under label skew after twelve rounds, an
even mixture of two groups was never refused."""

SURE = 0.99
"""Share of the newcomers of the right kind that chance alone must not refuse."""

RIDGE = 1e-9  # of the mean variance; a column without scatter would make A singular
NO_SCATTER = 1e-24  # of the mean square; equal vectors differ from their mean by rounding


class Reference(NamedTuple):
    """What is kept of the groups to weigh newcomers by. All float64."""

    centroids: Tensor  # [k, d], row g = group g, nan if nobody is in it
    spread: Tensor  # [d, d], pooled within-group covariance S
    noise: Tensor  # [d], mean squared standard error of an entry, n2
    size: Tensor  # [], mean number of samples of a member, n_m
    worst: Tensor  # [], q of the worst member, left out, or what chance allows; nan if unknown


def no_reference(n_groups: int, d: int) -> Reference:
    """A reference of the right shapes that knows nothing.

    Examples
    --------
    >>> no_reference(n_groups=2, d=3).centroids.shape
    torch.Size([2, 3])
    """
    shapes = ((n_groups, d), (d, d), (d,), (), ())
    return Reference(*(torch.full(shape, torch.nan, dtype=torch.float64) for shape in shapes))


def reference(
    vectors: Tensor, labels: Tensor, sizes: Tensor, n_groups: int, noise: Tensor | None = None
) -> Reference:
    """Sum up the members of known groups.

    Parameters
    ----------
    vectors : shape [m, d], finite; the members' loss vectors.
    labels : shape [m], the group of each, 0 .. n_groups - 1; some groups may be empty.
    sizes : shape [m], number of samples behind each vector.
    n_groups : rows of the centroids.
    noise : shape [d], squared standard error of an entry, mean over members. Without it the
        pooled within-group variance, diag(S), stands in.

    Notes
    -----
    `worst` weighs each member against the centroid of the others in its group, with the same S
    and its own size; a member alone in its group is skipped. It is at least what `chance` allows,
    over `REFUSAL`. Where members show no scatter at all (every group of one, or equal vectors),
    `worst` is nan and the spread is diag(noise), or the identity without noise: newcomers can be
    placed but not refused.

    Examples
    --------
    >>> vectors = torch.tensor([[0.0], [2.0], [9.0], [11.0]])
    >>> known = reference(vectors, torch.tensor([0, 0, 1, 1]), torch.full((4,), 100), n_groups=2)
    >>> known.centroids.flatten(), known.spread.item()  # S = 4 squares of 1 over 4 - 2
    (tensor([ 1., 10.], dtype=torch.float64), 2.0)
    >>> round(known.worst.item(), 3)  # members: 4 / 2; chance: F(1, 2) = 98.503, 1.5 of it / 1.5
    98.503
    """
    vectors = vectors.double()
    means = centroids(vectors, labels, n_groups)  # [k, d]
    count = torch.bincount(labels, minlength=n_groups)  # [k]
    residuals = vectors - means[labels]  # [m, d]
    free = len(vectors) - int((count > 0).sum())
    spread = residuals.mT @ residuals / max(free, 1)
    scattered = bool(spread.trace() > NO_SCATTER * vectors.square().mean())
    if not scattered:
        if noise is not None and noise.any():
            spread = torch.diag(noise)
        else:
            spread = torch.eye(vectors.shape[1])
    known = Reference(
        centroids=means,
        spread=spread.double(),
        noise=(spread.diagonal() if noise is None else noise).double().clone(),
        size=sizes.double().mean(),
        worst=torch.tensor(torch.nan, dtype=torch.float64),
    )
    if not scattered:
        return known
    members = count[labels] > 1
    others = count[labels[members]].double()[:, None] - 1
    # v - mean of the others = (v - mean) n / (n - 1)
    left_out = residuals[members] * (others + 1) / others
    distance = _distance(known, left_out[:, None], sizes[members])
    allowed = chance(known, len(vectors), len(vectors) - free) / REFUSAL
    return known._replace(worst=distance.max().clamp(min=allowed))


def chance(known: Reference, members: int, groups: int) -> float:
    """What q of a newcomer of the right kind stays below in 99 % of all cases.

    Examples
    --------
    Of one entry: Student's t squared, with 12 members in 2 groups 3.169 ** 2 (1 + 2 / 12).

    >>> vectors = torch.arange(12.0)[:, None] % 6
    >>> known = reference(vectors, torch.arange(12) // 6, torch.full((12,), 100), n_groups=2)
    >>> round(chance(known, 12, 2), 2)
    11.72
    """
    share = torch.linalg.solve(_metric(known, torch.zeros(())), known.spread)  # B: A^-1 S, [d, d]
    trace = float(share.trace())
    effective = trace**2 / float((share * share.mT).sum())
    point = f_distribution.ppf(SURE, effective, members - groups)
    return (1 + groups / members) * trace / len(share) * float(point)


def weigh(reference: Reference, vectors: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Place vectors in known groups, and say how surely.

    Parameters
    ----------
    reference : only its groups with a centroid are eligible.
    vectors : shape [m, d], finite.
    sizes : shape [m], number of samples behind each vector, n_new.

    Returns
    -------
    group [m] : the nearest group.
    margin [m] : (q2 - q1) / (q2 + q1) of the two nearest, 0 between groups to 1; 1 when only
        one is eligible.
    score [m] : q1 in units of the worst a member may be; refuse above `REFUSAL`. nan where the
        reference does not know that.

    Notes
    -----
    Without any centroid the vector itself decides: entry j is the loss of model j, the smallest
    wins, the margin compares the two smallest, the score is nan.

    Examples
    --------
    >>> vectors = torch.tensor([0.0, 1, 2, 3, 20, 21, 22, 23])[:, None]
    >>> groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> known = reference(vectors, groups, torch.full((8,), 100), n_groups=2)
    >>> group, margin, score = weigh(known, torch.tensor([[4.0], [30.0]]), torch.full((2,), 100))
    >>> group, score > REFUSAL
    (tensor([0, 1]), tensor([False,  True]))
    """
    vectors = vectors.double()
    groups = reference.centroids.isfinite().all(dim=1).nonzero().flatten()  # [g]
    if len(groups) == 0:
        groups = torch.arange(vectors.shape[1])
        costs = vectors
    else:
        differences = vectors[:, None] - reference.centroids[groups]  # [m, g, d]
        costs = _distance(reference, differences, sizes)  # [m, g]
    ordered, order = costs.sort(dim=1, stable=True)  # stable: ties to the lowest group
    smallest = ordered[:, 0]
    if len(groups) == 1:
        margin = torch.ones_like(smallest)
    else:
        second = ordered[:, 1]
        margin = ((second - smallest) / (second.abs() + smallest.abs())).nan_to_num(0.0)
    return groups[order[:, 0]], margin, smallest / reference.worst


def _distance(known: Reference, differences: Tensor, sizes: Tensor) -> Tensor:
    """q of each difference [m, g, d] for vectors of `sizes` [m] samples, as [m, g]."""
    extra = (known.size / sizes.double().clamp_min(1) - 1).clamp_min(0)  # [m]
    solved: Tensor = torch.linalg.solve(_metric(known, extra), differences.mT).mT  # [m, g, d]
    return (differences * solved).mean(dim=2)


def _metric(known: Reference, extra: Tensor) -> Tensor:
    """A for vectors with so much more noise than the members', [...]: [..., d, d]."""
    variance = known.spread.diagonal()  # [d]
    diagonal = 0.3 * variance + RIDGE * variance.mean() + extra[..., None] * known.noise
    return 0.7 * known.spread + torch.diag_embed(diagonal)
