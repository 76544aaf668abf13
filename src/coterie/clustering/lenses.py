"""Two views of clients through networks that were never trained, and the groups they show.

Every client evaluates R seeded networks and sends, for each network and each class, its number of
samples and the mean and variance of their losses: its *block*. Nothing was trained, so no memory
can bias it. The *conditional* lens compares mean losses within a class: it sees inputs, or the
meaning of labels, that differ, and is blind to label shares. The *joint* lens compares the sums
over each class: it sees label shares as well. Both are put in units of the noise of a mean over a
client's samples, with variances pooled over clients, so that `clustering/noise.py` can say how many
groups there are.

Without classes (regression, reconstruction) there is one mean loss per network, seen jointly. What
makes a sample hard for one network makes it hard for all, so these columns are correlated and a few
clients would scatter by far more than 1 by chance; clients send how their losses vary together, and
the columns are freed of it.
"""

import warnings
from typing import Literal, NamedTuple, get_args

import torch
from sklearn.metrics import silhouette_score
from torch import Tensor

from coterie.clustering.noise import (
    Choice,
    Ward,
    between,
    choose_by_noise,
    curve,
    distances,
    pooled,
    weighted_ward,
)
from coterie.core.algorithm import Curve

THRESHOLD = 1.3
"""Noise ratio of seeded networks that counts as noise. True groups lay at .87 to 1.32, one group
too few at 1.6 and more (MNIST partitions, 50 to 500 samples a client)."""

REFUSAL = 1.5
"""A client at more than this times the distance of the worst member fits no group."""

RIDGE = 1e-6  # of the mean variance
ROUNDING = 1e-12  # of the mean square; a network that says the same to all has no other scatter

Kind = Literal["one", "meaning", "labels", "client by client"]
Lens = Literal["conditional", "joint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LENSES: tuple[Lens, ...] = get_args(Lens)
MEANING: dict[Kind, str] = {
    "one": "clients differ by no more than chance: one group",
    "meaning": "between groups the inputs, or what a label means, differ",
    "labels": "groups differ in how often they have each label, and in nothing else",
    "client by client": "clients differ one by one: no number of groups describes them",
}


class Block(NamedTuple):
    """What clients answered."""

    counts: Tensor  # [m, c]  samples of each class
    mean: Tensor  # [m, r, c]  of their losses on each network
    variance: Tensor  # [m, r, c]


class Sums(NamedTuple):
    """A block without label counts, for the joint lens alone."""

    n: Tensor  # [m]  samples
    mean: Tensor  # [m, r, c]  of (loss less that of an undecided network) where the class is c
    variance: Tensor  # [m, r, c]


class Whole(NamedTuple):
    """What clients without classes answered."""

    n: Tensor  # [m]  samples
    mean: Tensor  # [m, r]  of their losses on each network
    covariance: Tensor  # [m, r (r + 1) / 2]  lower triangle, row by row


class Scale(NamedTuple):
    """How losses become units of noise."""

    centre: Tensor  # [d]
    unit: Tensor  # [d]  0: the column does not vary and is not used; [d, d]: a root of covariances


class View(NamedTuple):
    """Clients through a lens: d = r x c columns in units of noise."""

    x: Tensor  # [m, d]
    weight: Tensor  # [m, d]
    scale: Scale


def class_moments(losses: Tensor, label: Tensor, mask: Tensor, n_classes: int) -> Block:
    """One client's block from its losses [r, n]; works on stacked clients.

    Examples
    --------
    Two samples of class 0 with losses 1 and 3, none of class 1:

    >>> real = torch.tensor([True, True])
    >>> block = class_moments(torch.tensor([[1.0, 3.0]]), torch.tensor([0, 0]), real, 2)
    >>> block.counts.tolist(), block.mean.tolist(), block.variance.tolist()
    ([2.0, 0.0], [[2.0, 0.0]], [[1.0, 0.0]])
    """
    classes = torch.arange(n_classes, device=label.device)
    member = ((label[:, None] == classes) & mask[:, None]).double()  # [n, c]
    count = member.sum(0)
    losses = torch.where(mask, losses.double(), 0.0)
    centre = losses.sum(1, keepdim=True) / mask.sum().clamp(min=1)  # squares of small numbers
    apart = torch.where(mask, losses - centre, 0.0)
    mean = apart @ member / count.clamp(min=1)  # [r, c]
    variance = (apart.square() @ member / count.clamp(min=1) - mean.square()).clamp(min=0)
    return Block(count, torch.where(count > 0, mean + centre, 0.0), variance)


def whole_moments(losses: Tensor, mask: Tensor) -> Whole:
    """One client's answer without classes, from its losses [r, n]; works on stacked clients.

    >>> losses = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> whole_moments(losses, torch.tensor([True, True])).covariance.tolist()
    [1.0, -1.0, 1.0]
    """
    n = mask.sum().double()
    losses = torch.where(mask, losses.double(), 0.0)
    mean = losses.sum(1) / n.clamp(min=1)
    apart = torch.where(mask, losses - mean[:, None], 0.0)
    square = apart @ apart.mT / n.clamp(min=1)  # [r, r]
    low = torch.tril_indices(*square.shape, device=mask.device)
    return Whole(n, mean, square[low[0], low[1]])


def class_sums(block: Block, undecided: float) -> Sums:
    """Means and variances of a loss that counts only within a class; of one client or of many.

    Examples
    --------
    A sample of class 0 with loss log 2 + .3 and one of class 1 with log 2 - .3 have the mean loss
    of an undecided network, and sums of .15 and -.15 all the same:

    >>> half = torch.tensor(2.0).log().item()
    >>> mean = torch.tensor([[half + 0.3, half - 0.3]])
    >>> sums = class_sums(Block(torch.tensor([1.0, 1.0]), mean, torch.zeros(1, 2)), half)
    >>> [round(value, 6) for value in sums.mean[0].tolist()]
    [0.15, -0.15]
    """
    n = block.counts.sum(-1)
    share = (block.counts / n.clamp(min=1).unsqueeze(-1)).unsqueeze(-2)  # [..., 1, c]
    above = block.mean - undecided
    mean = share * above
    square = share * (block.variance + above.square())
    return Sums(n, mean, (square - mean.square()).clamp(min=0))


def conditional(block: Block, scale: Scale | None = None) -> View:
    """Losses within each class, in units of noise; in those of others, if a scale is given."""
    count = block.counts.double()[:, None].expand(block.mean.shape)  # [m, r, c]
    free = (count - 1).clamp(min=0)
    return _view(block.mean, block.variance, count, free, scale)


def joint(sums: Sums, scale: Scale | None = None) -> View:
    """Sums over each class, in units of noise; in those of others, if a scale is given."""
    n = sums.n.double()[:, None, None].expand(sums.mean.shape)
    return _view(sums.mean, sums.variance, n, n - 1, scale)


def whole(answers: Whole, scale: Scale | None = None) -> View:
    """Mean losses freed of what they have in common, in units of noise."""
    n, mean = answers.n.double()[:, None], answers.mean.double()
    r = mean.shape[1]
    if scale is None:
        low = torch.tril_indices(r, r)
        pooled_ = (n * answers.covariance.double()).sum(0) / (n - 1).sum().clamp(min=1)
        square = torch.zeros(r, r, dtype=torch.float64)
        square[low[0], low[1]] = square[low[1], low[0]] = pooled_
        # The ridge keeps directions in which nothing varies from counting, and rounding small.
        ridge = RIDGE * square.diagonal().mean() + ROUNDING * mean.square().mean()
        root = torch.linalg.cholesky(square + ridge * torch.eye(r, dtype=torch.float64))
        scale = Scale((n * mean).sum(0) / n.sum().clamp(min=1), root)
    x = torch.linalg.solve_triangular(scale.unit, (mean - scale.centre).mT, upper=False).mT
    return View(x, n.expand(x.shape), scale)


def _view(
    mean: Tensor, variance: Tensor, weight: Tensor, free: Tensor, scale: Scale | None
) -> View:
    mean, variance, weight, free = (
        part.double().flatten(1) for part in (mean, variance, weight, free)
    )
    if scale is None:
        total = weight.sum(0)
        pooled_ = (weight * variance).sum(0) / free.sum(0).clamp(min=1)
        centre = (weight * mean).sum(0) / total.clamp(min=1)
        square = (weight * mean.square()).sum(0) / total.clamp(min=1)
        varies = (pooled_ > ROUNDING * square) & (free.sum(0) > 0)
        scale = Scale(centre, torch.where(varies, pooled_, 0.0).sqrt())
    used = scale.unit > 0
    x = torch.where(used, (mean - scale.centre) / torch.where(used, scale.unit, 1.0), 0.0)
    return View(x, torch.where(used, weight, 0.0), scale)


def sound(block: Block | Sums | Whole) -> Tensor:
    """Clients whose answers are numbers, with a warning about the others: [m]."""
    good = torch.stack([part.flatten(1).isfinite().all(1) for part in block[1:]]).all(0)
    if not bool(good.all()):
        warnings.warn(
            f"{int((~good).sum())} of {len(good)} clients answered the survey with losses that are "
            "not numbers; they are set aside, and placed once they answer.",
            stacklevel=2,
        )
    return good


class Look(NamedTuple):
    """What the lenses show."""

    kind: Kind
    k: int
    labels: Tensor  # [m]
    lens: Lens  # the one the groups are read from
    loose: bool  # no number of groups fits; k is a proposal by silhouette, or one model for all
    choices: dict[str, Choice]  # the choice of each lens
    view: View  # of the lens


def look(
    views: dict[str, View], limit: int, threshold: float = THRESHOLD, n_groups: int | None = None
) -> Look:
    """Kind and number of groups, one included.

    The conditional lens decides if it shows anything but one group; label shares inside its groups
    are then ignored. Else the joint lens does. Where no number up to the limit fits, clients differ
    one by one: in their label shares alone (one model for all), or in more (the best silhouette
    proposes groups, to be taken with care).

    Parameters
    ----------
    views : of "conditional" and "joint", or of one of them.
    limit : the largest number considered.
    threshold : ratio that counts as noise; more does where chance alone reaches it.
    n_groups : the number, if it is known; the lens is chosen all the same.
    """
    trees = {lens: weighted_ward(view.x, view.weight) for lens, view in views.items()}
    choices = {
        lens: choose_by_noise(tree.ratio, limit, tree.thresholds(limit, threshold))
        for lens, tree in trees.items()
    }
    shares = "joint" in views and choices.get("conditional", _ONE).k == 1
    lens: Lens = "joint" if shares else "conditional"
    classes = "conditional" in views
    kind: Kind
    k = choices[lens].k
    loose = k is None
    if loose:
        kind = "client by client"
        k = 1 if shares and classes else proposal(views[lens], trees[lens], limit)
    elif k == 1:
        kind = "one"
    else:
        kind = "labels" if shares and classes else "meaning"
    k = min(n_groups or k or 1, len(views[lens].x))
    if k == 1 and classes:  # label shares do not matter to one model, nor to who joins it
        lens = "conditional"
    return Look(kind, k, trees[lens].labels(k), lens, loose, choices, views[lens])


def no_curves(width: int) -> Tensor:
    """Nothing measured: [2, 2, width] of lenses, ratio and threshold, numbers of groups."""
    return torch.full((len(LENSES), 2, width), torch.nan, dtype=torch.float64)


def curves(seen: Look, width: int) -> Tensor:
    """Noise ratios and thresholds of both lenses, filled up with nan: [2, 2, width]."""
    out = no_curves(width)
    for row, lens in enumerate(LENSES):
        if lens in seen.choices:
            choice = seen.choices[lens]
            both = torch.tensor([choice.ratio, choice.threshold], dtype=torch.float64)
            out[row, :, : both.shape[1]] = both
    return out


def evidence(curves: Tensor, kind: Kind, decides: Lens) -> list[Curve]:
    """What `curves` keeps, for reports."""
    found = []
    for (ratio, most), lens in zip(curves, LENSES, strict=True):
        width = int((~most.isnan()).sum())
        if width:
            more = ratio.new_full((1,), torch.nan)  # the curve stops short of the number of clients
            choice = choose_by_noise(torch.cat([ratio[:width], more]), width, most[:width].tolist())
            note = MEANING[kind] if lens == decides else ""
            found.append(curve(choice, lens, lens == decides, note))
    return found


_ONE = Choice(1, (), (), None, True, ())


def proposal(view: View, tree: Ward, limit: int) -> int:
    """The number of groups with the best silhouette; 1 where none can be scored."""
    apart = distances(view.x[tree.rows], view.weight[tree.rows]).numpy()
    scores = {}
    for k in range(2, min(limit, len(apart) - 1) + 1):
        labels = tree.labels(k)[tree.rows].numpy()
        scores[k] = float(silhouette_score(apart, labels, metric="precomputed"))
    return max(scores, key=lambda k: scores[k]) if scores else 1


class Yardstick(NamedTuple):
    """What is kept of the groups, to place newcomers by."""

    scale: Scale
    mean: Tensor  # [k, d]
    weight: Tensor  # [k, d]
    worst: Tensor  # []  largest distance of a member from the others of its group, at least 1


def no_yardstick() -> Yardstick:
    """One that knows nothing."""
    empty = torch.zeros(0, dtype=torch.float64)
    none = torch.zeros(0, 0, dtype=torch.float64)
    return Yardstick(Scale(empty, empty), none, none, torch.tensor(1.0, dtype=torch.float64))


def yardstick(view: View, labels: Tensor) -> Yardstick:
    """Sum up the members of groups.

    A member's distance is 1 on average. The joint lens has few effective dimensions and the
    distance a long tail, so the worst member sets the scale of what is strange.
    """
    mean, weight = pooled(view.x, view.weight, labels)
    rest = (weight[labels] - view.weight).clamp(min=0)  # [m, d]
    others = weight[labels] * mean[labels] - view.weight * view.x
    others = torch.where(rest > 0, others / rest.clamp(min=1e-300), 0.0)
    left_out = between(view.x, view.weight, others, rest)
    known = left_out[left_out.isfinite()]
    worst = known.max().clamp(min=1) if len(known) else torch.tensor(1.0, dtype=torch.float64)
    return Yardstick(view.scale, mean, weight, worst)


def weigh(known: Yardstick, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Group, margin and score of clients, as `clustering.evidence.weigh` gives them.

    The noise allowed for is that of the members' samples at the newcomer's number of them, not the
    newcomer's own: data unlike anything seen scatters widely and would excuse itself.
    """
    rows = zip(known.mean, known.weight, strict=True)
    cost = torch.stack([between(view.x, view.weight, *row) for row in rows], 1)  # [m, k]
    ordered, order = cost.sort(dim=1, stable=True)
    smallest = ordered[:, 0]
    margin = torch.ones_like(smallest)
    if cost.shape[1] > 1:
        second = ordered[:, 1]
        margin = ((second - smallest) / (second + smallest)).nan_to_num(1.0, posinf=1.0)
    score = torch.where(smallest.isfinite(), smallest / known.worst, torch.nan)
    margin = torch.where(smallest.isfinite(), margin, 0.0)  # no class in common: nothing is known
    return order[:, 0], margin, score
