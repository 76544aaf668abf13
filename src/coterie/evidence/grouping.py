"""How many groups, who is in them, and who is odd: sets are added until nothing within repeats.

The clients begin as one set. While a test (`replication.py`) says that clients of a set differ,
there is one set more: a cut of Ward's tree, or the present sets and a new one around the client
that differs most, whichever leaves less. A set of one is an odd client, larger sets are groups; a
client like an odd one joins it, so that two alike become a group. The number of sets is at most a
third of the number of clients, but three are always allowed. Where a test still rejects then, and
the sets explain too little, clients differ one by one and there are no groups.
"""

from typing import NamedTuple

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from coterie.core.random import fold
from coterie.evidence.replication import (
    Test,
    average_folds,
    compare,
    in_units,
    noise_units,
    remaining,
    repeated,
    residuals,
)
from coterie.evidence.summaries import Summary

SPLIT, ODD, TOTAL = 0.01, 0.005, 0.005
"""Levels of the three tests of a step. Together they add a set too many in at most 2 % of all
federations. Twice these levels added one in 18 of 480 federations without groups. The price is
power where differences are weak: of 30 pairs of groups that differ little in label shares, 5 were
missed instead of 2."""

EXPLAINED = 0.8
"""Where a test still rejects at the largest number of sets: share of the differences that the sets
must explain to be called groups. Chosen on few federations: five with the true groups explained .84
and more, six whose clients differ one by one .37 to .42."""


ROUNDS = 20
"""Rounds of moves from set to set, if they do not end before."""


class Step(NamedTuple):
    """One number of sets that was tried."""

    n_sets: int
    test: Test
    explained: float  # share of what repeats itself between clients that these sets account for
    labels: Tensor  # [m]


class Grouping(NamedTuple):
    """The answer."""

    labels: Tensor  # [m]  set of each client; a set of one is an odd client
    n_groups: int | None  # sets of two and more; None: clients differ one by one, and the labels
    # are a proposal that keeps to the largest number of groups
    odd: list[int]
    explained: float
    steps: list[Step]


def find_groups(answers: Summary, key: Tensor, max_groups: int = 10) -> Grouping:
    """Number of groups, their members, and odd clients.

    Parameters
    ----------
    answers
        Of m clients; the scatter is the sum over clients.
    key
        Decides the permutations.
    max_groups
        More groups than this are no answer: the clients differ one by one.
    """
    m = len(answers.counts)
    one = torch.zeros(m, dtype=torch.int64)
    if m < 2:
        return Grouping(one, m, [], 0.0, [])
    centre, weight = _sharp(answers)
    cuts = ward(centre, weight)
    flat = in_units(answers, noise_units(answers, one))
    all_of_it = remaining(flat, answers.counts, one)
    labels, steps = one, []
    while True:
        k = int(labels.max()) + 1
        x = in_units(answers, noise_units(answers, labels))
        test = compare(x, answers.counts, labels, fold(key, k))
        left = remaining(flat, answers.counts, labels)
        steps.append(Step(k, test, 1 - left / all_of_it if all_of_it > 0 else 0.0, labels))
        n_groups = int((labels.bincount() > 1).sum())
        fine = test.split > SPLIT and test.odd > ODD and test.total > TOTAL
        if fine or k >= max(3, m // 3) or k >= m - 1 or n_groups > max_groups:
            break
        seeded = labels.clone()
        seeded[test.deviation.argmax()] = k
        tries = [settle(centre, weight, start) for start in (cuts[k + 1], seeded)]
        labels = min(tries, key=lambda labels: remaining(flat, answers.counts, labels))
    alone = labels.bincount()[labels] == 1
    odd = alone.nonzero()[:, 0].tolist() if k > 1 else []
    explained = steps[-1].explained
    if fine or (n_groups <= max_groups and explained >= EXPLAINED):
        return Grouping(labels, n_groups, odd, explained, steps)
    proposed = max((s for s in steps if s.n_sets <= max_groups), key=lambda step: step.n_sets)
    return Grouping(proposed.labels, None, odd, proposed.explained, steps)


def _sharp(answers: Summary) -> tuple[Tensor, Tensor]:
    """Mean losses of clients in units of the noise within clients, and the rows behind them."""
    units = noise_units(answers, torch.arange(len(answers.counts)))
    return average_folds(in_units(answers, units), answers.counts)


def ward(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Merge the two sets whose union adds least to the weighted squares, until one is left.

    Parameters
    ----------
    x
        Means in units of noise. [m, c, r]
    weight
        Rows behind them. [m, c]

    Returns
    -------
    Labels for each number of sets: entry k holds k sets, 0 .. k - 1.
    """
    x, weight, m = x.clone(), weight.clone(), len(x)
    labels = torch.arange(m)
    cuts = [labels] * (m + 1)
    cost = torch.full((m, m), torch.inf, dtype=torch.float64)

    def rise(i: int, others: Tensor) -> Tensor:
        common = weight[i] * weight[others] / (weight[i] + weight[others]).clamp(min=1e-300)
        return (common * (x[i] - x[others]).square().sum(-1)).sum(-1)

    for i in range(m - 1):
        others = torch.arange(i + 1, m)
        cost[i, others] = cost[others, i] = rise(i, others)
    alive = torch.ones(m, dtype=torch.bool)
    for left in range(m - 1, 0, -1):
        i, j = sorted(divmod(int(cost.argmin()), m))
        both = (weight[i] + weight[j]).clamp(min=1e-300)[:, None]
        x[i] = (weight[i][:, None] * x[i] + weight[j][:, None] * x[j]) / both
        weight[i] += weight[j]
        alive[j] = False
        cost[j] = cost[:, j] = torch.inf
        others = alive.nonzero()[:, 0]
        others = others[others != i]
        cost[i, others] = cost[others, i] = rise(i, others)
        labels = torch.where(labels == j, i, labels)
        cuts[left] = labels.unique(return_inverse=True)[1]
    return cuts


def distances(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each client from the other members of each set, in units of chance.

    It is r on average for a client that belongs there; inf where no class is known of both.
    """
    sets = torch.nn.functional.one_hot(labels).double()  # [m, k]
    own = sets.T[..., None] * weight  # [k, m, c]
    rest = own.sum(1, keepdim=True) - own
    part = own[..., None] * x
    mean = (part.sum(1, keepdim=True) - part) / rest.clamp(min=1)[..., None]
    size = weight * rest / (weight + rest).clamp(min=1)
    known = (size > 0).sum(2)
    squares = (size * (x - mean).square().sum(3)).sum(2)
    return torch.where(known > 0, squares / known.clamp(min=1), torch.inf).T  # [m, k]


def settle(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Move clients to the set that they differ least from; no set is emptied."""
    for _ in range(ROUNDS):
        new = distances(x, weight, labels).argmin(1)
        size = labels.bincount()
        new = torch.where(size[labels] == 1, labels, new)
        lost = new.bincount(minlength=len(size)) == 0
        new = torch.where(lost[labels], labels, new)
        if bool((new == labels).all()):
            break
        labels = new
    return labels


def divide(answers: Summary, k: int) -> Tensor:
    """Labels of a known number of sets."""
    m = len(answers.counts)
    x, weight = _sharp(answers)
    return settle(x, weight, ward(x, weight)[min(k, m)])


def agree(first: Grouping, second: Grouping) -> float:
    """How far two answers are the same, 0 to 1: the adjusted Rand index of their sets.

    Two answers "the clients differ one by one" are the same, whatever sets they propose.
    """
    if first.n_groups is None and second.n_groups is None:
        return 1.0
    if first.n_groups is None or second.n_groups is None:
        return 0.0
    a, b = first.labels, second.labels
    if len(torch.stack([a, b], 1).unique(dim=0)) == len(a.unique()) == len(b.unique()):
        return 1.0  # the same sets, under other names
    return max(0.0, float(adjusted_rand_score(a.numpy(), b.numpy())))


def effect(answers: Summary) -> float:
    """How far mean losses of a client and class lie from those of all, as a root mean square.

    It is in units of the loss. Only what repeats itself in other folds counts, so that noise adds
    nothing on average; 0 if chance makes the mean square negative.

    Examples
    --------
    Two clients at 1 and 3, in both folds:

    >>> mean = torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64).reshape(2, 2, 1, 1)
    >>> effect(Summary(torch.ones(2, 2, 1).double(), mean, torch.zeros(1, 1, 1).double()))
    1.0
    """
    one = torch.zeros(len(answers.counts), dtype=torch.int64)
    r, there = residuals(answers.mean, answers.counts, one)
    root = torch.where(there, answers.counts, 0.0).sqrt()  # [m, f, c]
    pairs = float((root.sum(1).square() - root.square().sum(1)).sum()) * r.shape[-1]
    return max(0.0, float(repeated(r).sum()) / pairs) ** 0.5 if pairs > 0 else 0.0


def information(shares: Summary, labels: Tensor) -> float:
    """What knowing the group tells about a row's class, in nats: their mutual information.

    Parameters
    ----------
    shares
        Answers about the share of each class.
    labels
        Group of each client, 0 .. k - 1. [m]

    Examples
    --------
    Two clients with one class each: the group tells it, which is worth log 2.

    >>> mean = torch.eye(2).double().reshape(2, 1, 1, 2)
    >>> answers = Summary(torch.ones(2, 1, 1).double(), mean, torch.zeros(1, 2, 2).double())
    >>> round(information(answers, torch.tensor([0, 1])), 4)
    0.6931
    """
    table = (shares.counts[..., None] * shares.mean).sum((1, 2))  # [m, classes]
    table = torch.nn.functional.one_hot(labels).double().T @ table
    table = table / table.sum().clamp(min=1e-300)
    expected = table.sum(1, keepdim=True) * table.sum(0)
    ratio = torch.where(table > 0, table / expected.clamp(min=1e-300), 1.0)
    return float((table * ratio.log()).sum())


def halves(answers: Summary) -> tuple[Summary, Summary]:
    """The answers on every other network."""

    def take(start: int) -> Summary:
        mean, scatter = answers.mean[..., start::2], answers.scatter[:, start::2, start::2]
        return Summary(answers.counts, mean, scatter)

    return take(0), take(1)


def strange_classes(answers: Summary, labels: Tensor, client: int) -> Tensor:
    """How far a client deviates from another set, class by class, in standard deviations: [c].

    It is compared with the set nearest to it, which for an odd client is the group it would be
    in. Only what repeats itself counts, so chance gives about zero with a spread of one.
    """
    x = in_units(answers, noise_units(answers, labels))
    away = distances(*average_folds(x, answers.counts), labels)[client]
    away[labels[client]] = torch.inf
    joined = labels.clone()
    joined[client] = away.argmin()
    r, there = residuals(x, answers.counts, joined.unique(return_inverse=True)[1])
    k = there[client].sum(0)  # [c]
    scale = (2 * r.shape[-1] * k * (k - 1)).clamp(min=1).double().sqrt()
    return repeated(r[client].transpose(0, 1)[..., None, :]) / scale
