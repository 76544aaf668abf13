"""Where a newcomer belongs, whether it belongs anywhere, and whether members still do.

The groups are kept as means in units of noise, class by class. A client goes to the group whose
mean it differs least from. It fits there if what it differs by does not repeat itself in its folds
more than chance allows. With r its residuals sqrt(n) (x - mean) in the folds of one class, W the
rows behind the mean, v the roots of the client's own counts and A a matrix of ones with a zero
diagonal, what repeats itself is sum r'Ar, and without a difference the residuals of a network have
the covariance S = I + vv'/W. This gives its mean tr(AS), variance 2 tr(ASAS) and third moment
8 tr(ASASAS), which add up over classes and networks; the p-value is that of a gamma distribution
with these moments. Members, each compared with its group without itself, correct for noise with
longer tails: the p-value is at least that of Student's t for one more value like theirs.

Advice, methods, newcomers and `recheck` all place clients by these functions. What is kept of the
groups is a `Known`: means of losses, and of label shares where groups differ in nothing else.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from scipy.stats import norm, pearson3
from scipy.stats import t as student
from torch import Tensor

from coterie.evidence.gains import holm
from coterie.evidence.replication import (
    RIDGE,
    Units,
    average_folds,
    in_units,
    noise_units,
    repeated,
)
from coterie.evidence.summaries import Summary, select

LEVEL = 0.01
"""Share of the newcomers of a known kind that may be refused."""

Change = Literal["stays", "moved", "nowhere", "new"]


class Groups(NamedTuple):
    """What is kept of groups."""

    units: Units
    mean: Tensor  # [k, c, r]  in these units
    weight: Tensor  # [k, c]  rows behind it
    shift: Tensor  # [k]  mean deviation of members; 0 in theory, and never less
    spread: Tensor  # [k]  its standard deviation; 1 in theory, and never less
    members: Tensor  # [k]  number of members behind these two


class Known(NamedTuple):
    """Groups that clients can be placed in."""

    number: Tensor  # [k]  number of each group, as its method counts them
    losses: Groups
    shares: Groups  # of labels; without groups: shares are not compared


class Place(NamedTuple):
    """Where clients belong."""

    group: Tensor  # [n]  the nearest group
    margin: Tensor  # [n]  0: another is as near, 1: the others are far away
    p: Tensor  # [n, k]  p-value of "it is of this group"

    @property
    def fits(self) -> Tensor:
        """Whether each client fits its nearest group."""
        return self.p.gather(1, self.group[:, None])[:, 0] > LEVEL

    @property
    def score(self) -> Tensor:
        """Deviation from the nearest group in units of what one member in a hundred exceeds."""
        p = self.p.gather(1, self.group[:, None])[:, 0].clamp(min=1e-300)
        return (torch.from_numpy(norm.isf(p.numpy())) / float(norm.isf(LEVEL))).clamp(min=0)

    @property
    def candidates(self) -> list[list[int]]:
        """For each client, the groups that it fits."""
        return [(row > LEVEL).nonzero()[:, 0].tolist() for row in self.p]


def keep_groups(answers: Summary, labels: Tensor) -> Groups:
    """Keep what is needed of known groups to place others.

    Parameters
    ----------
    answers
        Of the members; the scatter is the sum over them.
    labels
        Group of each, 0 .. k - 1. [m]
    """
    units = _for_others(noise_units(answers, labels), answers.counts.sum((0, 1)))
    x, count = in_units(answers, units), answers.counts
    member = torch.nn.functional.one_hot(labels).double()
    weight = member.T @ count.sum(1)  # [k, c]
    of_client = (count[..., None] * x).sum(1)  # [m, c, r]
    total = torch.einsum("mk,mcr->kcr", member, of_client)
    rest = (weight[labels] - count.sum(1)).clamp(min=0)  # [m, c]
    others = (total[labels] - of_client) / rest.clamp(min=1)[..., None]
    known = (labels.bincount()[labels] > 1) & ((rest > 0) & (count.sum(1) > 0)).any(1)
    z = _deviation(x, count, others, rest)[0]
    of_group = member.T * known  # [k, m]
    members = of_group.sum(1)
    shift = of_group @ z / members.clamp(min=1)
    square = (of_group * (z - shift[:, None]).square()).sum(1) / (members - 1).clamp(min=1)
    # Noise may differ between groups; one without members to compare has that of all.
    spread = torch.where(members > 1, square, square.sum() / (members > 1).sum().clamp(min=1))
    mean = total / weight.clamp(min=1)[..., None]
    return Groups(units, mean, weight, shift.clamp(min=0), spread.sqrt().clamp(min=1), members)


def no_groups() -> Known:
    """What is known before there are any groups."""
    empty = [torch.zeros((0,) * n, dtype=torch.float64) for n in range(4)]
    none = Groups(Units(empty[2], empty[3]), empty[3], empty[2], empty[1], empty[1], empty[1])
    return Known(torch.zeros(0, dtype=torch.int64), none, none)


def learn_groups(answers: Mapping[Any, Summary], labels: Tensor, by_shares: bool) -> Known:
    """Keep what is needed of the answers of members to place others.

    Parameters
    ----------
    answers
        Losses first, then "shares" where they were sent.
    labels
        Number of the group of each, -1 for clients that are in none. [m]
    by_shares
        Whether groups differ in label shares and in nothing else. Otherwise shares say nothing
        about the group: members may differ in them.
    """
    member = (labels >= 0).nonzero()[:, 0]
    if not len(member):
        return no_groups()
    number, group = labels[member].unique(return_inverse=True)
    kept = [keep_groups(select(answer, member), group) for answer in answers.values()]
    by_shares = by_shares and "shares" in answers
    return Known(number, kept[0], kept[1] if by_shares else no_groups().shares)


def place_in(answers: Mapping[Any, Summary], known: Known) -> Place:
    """Place clients that answered as the members did; groups are positions in `known.number`.

    Where shares are compared, too, they say which group is near, and a client must fit it in both
    respects: the p-value is twice the smaller one (Bonferroni).
    """
    by_losses = place(next(iter(answers.values())), known.losses)
    if not len(known.shares.mean):
        return by_losses
    by_shares = place(answers["shares"], known.shares)
    return by_shares._replace(p=(2 * torch.minimum(by_losses.p, by_shares.p)).clamp(max=1))


def choose_by_loss(found: Place, loss: Tensor) -> Place:
    """Of several groups that a client fits, choose the one whose model has the smallest loss.

    Networks that were never trained may not tell groups apart; the models of the groups then do.

    Parameters
    ----------
    found
        Where clients belong by their answers.
    loss
        Of each client on the model of each group. [n, k]

    Examples
    --------
    Both groups fit the first client; the second fits one, whatever the losses say.

    >>> found = Place(torch.tensor([0, 0]), torch.ones(2), torch.tensor([[0.9, 0.5], [0.4, 0.0]]))
    >>> choose_by_loss(found, torch.tensor([[3.0, 1.0], [3.0, 1.0]]))[:2]
    (tensor([1, 0]), tensor([0.5000, 1.0000]))
    """
    fits = found.p > LEVEL
    several = fits.sum(1) > 1
    cost, order = torch.where(fits, loss.to(found.p), torch.inf).sort(dim=1, stable=True)
    margin = found.margin.clone()
    if cost.shape[1] > 1:
        first, second = cost[several, 0], cost[several, 1]
        apart = (second - first) / (second.abs() + first.abs())
        margin[several] = apart.nan_to_num(0.0).to(margin)
    return found._replace(group=torch.where(several, order[:, 0], found.group), margin=margin)


def _for_others(units: Units, rows: Tensor) -> Units:
    """Units in which the noise of *other* rows is one, class by class.

    Units are fitted to the rows they were computed from: those have a variance of one in each
    direction, others of 1 / (1 - d / n), with n the rows of a class and d the directions that they
    determine, tr(S (S + ridge)^-1). With 100 rows and 32 networks this is 1.5.

    Parameters
    ----------
    rows
        Of each class. [c]
    """
    r = units.root.shape[-1]
    value = torch.linalg.eigvalsh(units.root).square()  # of (S + ridge)^-1: [c, r]
    used = value[:, -1] > 0
    value = torch.where(used[:, None], value, 1.0)
    ridge = RIDGE / (1 + RIDGE) * (1 / value).mean(1)
    determined = r - ridge * value.sum(1)
    left = torch.where(used, 1 - determined / rows.clamp(min=1), 0.0).clamp(min=0)
    return Units(units.centre, units.root * left.sqrt()[:, None, None])


def place(answers: Summary, groups: Groups) -> Place:
    """Place clients that answered the same questions; their scatter is not used."""
    x, count = in_units(answers, groups.units), answers.counts
    mean, own = average_folds(x, count)
    size = own[:, None] * groups.weight / (own[:, None] + groups.weight).clamp(min=1)  # [n, k, c]
    squares = (size * (mean[:, None] - groups.mean).square().sum(3)).sum(2)
    shared = (size > 0).sum(2)
    far = torch.where(shared > 0, squares / shared.clamp(min=1), torch.inf)  # [n, k]
    near = far.sort(1).values
    margin = torch.ones(len(far), dtype=torch.float64)
    if far.shape[1] > 1:
        margin = ((near[:, 1] - near[:, 0]) / (near[:, 1] + near[:, 0])).nan_to_num(1.0)
    margin = torch.where(near[:, 0].isfinite(), margin, 0.0)  # no class in common
    every = [torch.full((len(x),), k) for k in range(len(groups.mean))]
    p = [_chance(x, count, groups, k) for k in every]
    return Place(far.argmin(1), margin, torch.stack(p, 1))


def compare_one(answers: Mapping[Any, Summary], known: Known, group: Tensor) -> Tensor:
    """The p-value of "it is of this group", one group for each client: [n].

    Parameters
    ----------
    group
        Position in `known.number`. [n]
    """
    p = []
    for answer, groups in zip(answers.values(), (known.losses, known.shares), strict=False):
        if len(groups.mean):
            p.append(_chance(in_units(answer, groups.units), answer.counts, groups, group))
    return (len(p) * torch.stack(p).amin(0)).clamp(max=1)


def _chance(x: Tensor, count: Tensor, groups: Groups, group: Tensor) -> Tensor:
    """The p-value of "it is of this group" from means in units of noise: [n]."""
    z, skew = _deviation(x, count, groups.mean[group], groups.weight[group])
    z = (z - groups.shift[group]) / groups.spread[group]
    members = groups.members[group]
    wider, free = (1 + 1 / members.clamp(min=1)).sqrt(), (members - 1).clamp(min=1)
    by_member = torch.from_numpy(student.sf(z / wider, free))
    chance = torch.from_numpy(pearson3.sf(z, skew))
    return torch.where(members > 1, torch.maximum(chance, by_member), chance)


def recheck(
    found: Place, labels: Tensor, same: Tensor | None = None, level: float = 0.05
) -> list[Change]:
    """Whether members still fit their group, and newcomers any group, on new rows.

    A member has changed if its new rows are unlike its group and also unlike its own former rows:
    one that was never like its group has not changed.

    Parameters
    ----------
    found
        Where the new rows belong.
    labels
        The group each client has been in, -1 for those that have been in none. [n]
    same
        The p-value of "its new rows are like its former ones", nan where these are not known, as
        those of newcomers. [n]
    level
        Probability that any client that did not change is said to have, or that any newcomer of a
        known kind is refused, for all clients together (Holm).

    Returns
    -------
    For each member "stays", "moved" (to the group found) or "nowhere"; for those that were in no
    group "stays" or "moved"; for newcomers "new" (in the group found) or "nowhere".
    """
    same = torch.full(labels.shape, torch.nan) if same is None else same
    member, met = labels >= 0, same.isfinite()
    own = found.p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    own = torch.where(member, torch.maximum(own, same.nan_to_num(0.0).to(own)), found.p.amax(1))
    left = holm(torch.where(met & ~member, same.to(own), own), level)
    elsewhere = found.fits & (found.group != labels)
    out: list[Change] = []
    for old, known, gone, fits in zip(
        member.tolist(), met.tolist(), left.tolist(), elsewhere.tolist(), strict=True
    ):
        if old:
            out.append("stays" if not gone else "moved" if fits else "nowhere")
        elif known:
            out.append("moved" if gone and fits else "stays")
        else:
            out.append("nowhere" if gone else "new")
    return out


def _deviation(x: Tensor, count: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How far each client deviates from a mean, in standard deviations, and the skewness of that.

    Parameters
    ----------
    x, count
        Of clients. [n, f, c, r] and [n, f, c]
    mean, weight
        What each is compared with. [n, c, r] and [n, c]
    """
    root = torch.where(weight[:, None] > 0, count, 0.0).sqrt()  # [n, f, c]
    seen = repeated(root[..., None] * (x - mean[:, None]))
    root = root.transpose(1, 2)  # [n, c, f]
    there = (root > 0).double()
    eye = torch.eye(root.shape[-1], dtype=torch.float64)
    pairs = there[..., None] * there[..., None, :] * (1 - eye)
    product = root[..., None] * root[..., None, :] / weight.clamp(min=1)[..., None, None]
    step = pairs @ (eye + product)  # [n, c, f, f]
    power, moments = step, []
    for _ in range(3):
        moments.append(power.diagonal(dim1=-2, dim2=-1).sum((-2, -1)) * x.shape[-1])
        power = power @ step
    first, second, third = moments
    spread = (2 * second).clamp(min=1e-300).sqrt()
    known = second > 0
    z = torch.where(known, (seen - first) / spread, 0.0)
    return z, torch.where(known, 8 * third / spread**3, 0.0)
