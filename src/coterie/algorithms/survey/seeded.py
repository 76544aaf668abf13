"""The exchange of a survey: clients evaluate networks that are drawn from a seed.

The server sends a seed and a number of networks, and no model. Clients build the networks, evaluate
them and send their mean losses by fold and class (`evidence/summaries.py`). The server
looks for what repeats itself (`evidence/grouping.py`): odd clients, and groups of the others. Only
if losses show no groups does it compare how often each label occurs.

Networks are added until two halves of them give the same answer: 16, then 32, then 64.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from coterie.core.client import Batch, Client
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.question import Question, question
from coterie.core.random import fold
from coterie.core.tree import Ids
from coterie.evidence import grouping, placing
from coterie.evidence.gains import holm
from coterie.evidence.grouping import ODD, SPLIT, TOTAL, Grouping, Step
from coterie.evidence.replication import Test, average_folds, compare, in_units, noise_units
from coterie.evidence.screening import screen_reply
from coterie.evidence.summaries import (
    FOLDS,
    Rows,
    Summary,
    assign_folds,
    average_units,
    pack,
    reveal,
    select,
    share_rows,
    summarise,
    unpack,
)

NETWORKS = 16
"""Number of networks to begin with."""
MOST_NETWORKS = 64
"""Number of networks at which a survey ends in any case."""
REFUSAL = 1.5
"""Refuse a client whose score exceeds this: one in 4,000 of those that belong to a group."""
MANY = 1_000
"""Number of clients among which groups are looked for; further clients are placed in them."""
LEVEL = SPLIT + ODD + TOTAL  # of the three tests together

Lens: TypeAlias = Literal["auto", "conditional", "joint"]
Kind = Literal["one", "meaning", "labels", "client by client"]
Statistic = Literal["conditional", "joint", "shares"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)

Answers: TypeAlias = dict[Statistic, Summary]
"""What clients answered: losses ("conditional": by class, "joint": of all rows), and shares."""


# asking


@question(
    phase="cluster", key="survey", samples=("count", "share_count"), steady=True, reveals=reveal
)
def probe_seeded(
    method: Any,
    client: Client,
    seed: Tensor,
    networks: Tensor,
    *,
    lens: Lens | Literal["inputs"] = "auto",
) -> dict[str, Tensor]:
    """Losses of networks that are drawn from a seed and not trained, by fold and class.

    Parameters
    ----------
    method
        Its `model` is drawn; nothing else of it matters.
    lens
        "joint" keeps the label counts on the client, "conditional" does not send label shares.
        "inputs" puts the same label on all rows, so that only inputs matter.
    """
    model: Model = method.model
    batch, classes = client.train, count_classes(method.model, client.train)
    every = torch.zeros_like(batch.mask, dtype=torch.int64)
    unit = batch.units()
    key, by = fold(client.key, "losses"), classes if lens in ("auto", "conditional") else 1
    if lens == "inputs":
        batch = batch._replace(y=torch.zeros_like(batch.y))
    label = batch.y if by > 1 else every
    if model.mixes_samples:
        part = divide_units(key, unit)
        losses = _fold_losses(model, seed, int(networks), batch, part)
        rows = average_units(Rows(losses, label, unit, batch.mask))
        answer = summarise(rows, divide_units(key, rows.unit), by)
    else:
        losses = model.probe_random(seed, int(networks), batch).double()  # [r, n]
        answer = _sum_up(Rows(losses, label, unit, batch.mask), key, by)
    reply = _send(answer, model, "")
    if lens == "auto" and classes > 1:
        rows = share_rows(batch.y, unit, batch.mask, classes)
        reply |= _send(_sum_up(rows, fold(client.key, "shares"), 1), model, "share_")
    return reply


def _sum_up(rows: Rows, key: Tensor, classes: int) -> Summary:
    rows = average_units(rows)
    return summarise(rows, assign_folds(key, rows, classes), classes)


def divide_units(key: Tensor, unit: Tensor) -> Tensor:
    """A fold for each unit, at random: [n]."""
    return fold(key, unit) % FOLDS


def _fold_losses(model: Model, seed: Tensor, networks: int, batch: Batch, part: Tensor) -> Tensor:
    """Losses of networks whose outputs depend on the other rows of a batch: [r, n].

    Each fold is a batch of its own. Otherwise chance in one fold would repeat itself in the others.
    """
    losses = torch.zeros(networks, len(part), dtype=torch.float64, device=part.device)
    for number in range(FOLDS):
        own = (part == number).nonzero()[:, 0]
        if len(own):
            rows = batch.rows(own, torch.ones_like(own, dtype=torch.bool))
            losses[:, own] = model.probe_random(seed, networks, rows).double()
    return losses


def _send(answer: Summary, model: Model, name: str) -> dict[str, Tensor]:
    """An answer as it travels: counts in 4 bytes, the rest as precise as the model."""
    good = answer.mean.isfinite().all()  # others are told by their means
    return {
        f"{name}count": answer.counts.float(),
        f"{name}mean": answer.mean.to(model.dtype),
        f"{name}scatter": pack(torch.where(good, answer.scatter, 0.0)).to(model.dtype),
    }


def count_classes(model: Model, batch: Batch) -> int:
    """Number of classes that losses are split by: 1 unless a network learns by cross-entropy."""
    single = batch.y.ndim == 1 and not batch.y.is_floating_point()
    return model.n_outputs(batch.x) if single and model.loss == "cross_entropy" else 1


def ask(
    method: Any,
    fed: Federation,
    ids: Ids,
    seed: Tensor,
    networks: int,
    lens: Lens | Literal["inputs"] = "auto",
) -> tuple[Ids, Answers]:
    """Which clients answered with numbers, and their answers; none if no client did."""
    if lens == "auto" and not fed.simulated:
        lens = "joint"  # real clients keep their label counts, unless a user asks for them
    stackable = False if method.model.mixes_samples else None
    task = Question(probe_seeded, method, {"lens": lens}, stackable=stackable)
    ids, reply = fed.map(task, seed, torch.tensor(networks), to=ids, at_least=0)
    if not len(ids):
        return ids, {}
    found: Answers = {}
    by_class = reply["count"].shape[2] > 1
    losses: Statistic = "conditional" if by_class else "joint"
    good = _answered(reply)
    # They have no part in what screens the others.
    reply = {
        name: torch.where(good.reshape(-1, *(1,) * (part.ndim - 1)), part, 0)
        for name, part in reply.items()
    }
    good &= ~fed.distrusted(ids)
    parts = {name: p for name, p in ((losses, ""), ("shares", "share_")) if f"{p}count" in reply}
    checked = {name: screen_reply(reply, prefix) for name, prefix in parts.items()}
    for answer in checked.values():
        for place in (~answer.good & good).nonzero()[:, 0].tolist():
            fed.note_aside(int(ids[place]), answer.why[place])
        good = good & answer.good
    for name, prefix in parts.items():
        count, mean = reply[f"{prefix}count"][good], reply[f"{prefix}mean"][good]
        scatter = reply[f"{prefix}scatter"][good].double() * checked[name].factor[good, None, None]
        scatter = unpack(scatter.sum(0), mean.shape[-1])
        found[name] = Summary(count.double(), mean.double(), scatter)
    return ids[good], found if bool(good.any()) else {}


def _answered(reply: Mapping[str, Tensor]) -> Tensor:
    """Clients whose answers are numbers, with a warning about the others: [m]."""
    good = torch.stack([part.flatten(1).isfinite().all(1) for part in reply.values()]).all(0)
    if not bool(good.all()):
        many = f"{int((~good).sum())} of {len(good)} clients"
        warnings.warn(f"{many} answered the survey with values that are not numbers.", stacklevel=2)
    return good


# looking


class Seen(NamedTuple):
    """What a survey shows. Groups have the first numbers, odd clients a number each after them."""

    kind: Kind
    statistic: Statistic  # what the groups are read from
    n_groups: int | None  # None: no number describes the clients; the labels are a proposal
    labels: Tensor  # [m]
    odd: Tensor  # [m]  True: unlike all others
    explained: float  # share of what differs between clients that the groups account for
    confidence: float  # agreement of two halves of the networks: 1 if they say the same
    networks: int  # number of networks that were used
    worth: float  # size of the differences: of mean losses, or information of label shares
    steps: list[Step]
    answers: Answers

    @property
    def losses(self) -> Summary:
        """The losses of clients."""
        return next(iter(self.answers.values()))

    @property
    def summary(self) -> Summary:
        """What the groups are read from."""
        return self.answers[self.statistic]

    @property
    def exchanges(self) -> int:
        """How often clients were asked."""
        return len(list(_numbers(self.networks)))

    @property
    def classes(self) -> int | None:
        """Number of classes that were compared one by one; None if losses were not split."""
        count = self.losses.counts.shape[2]
        return count if count > 1 else None

    @property
    def used(self) -> int:
        """Number of groups, odd clients not counted; of the proposal, if no number fits."""
        return int(self.labels[~self.odd].max()) + 1


def look(
    method: Any,
    fed: Federation,
    ids: Ids,
    seed: Tensor,
    max_groups: int,
    n_groups: int | None = None,
    lens: Lens = "auto",
    most_networks: int = MOST_NETWORKS,
) -> tuple[Ids, Seen | None]:
    """Ask clients until the answer is stable; None if no client answers.

    Parameters
    ----------
    method, fed, ids, seed, lens
        As in `ask`.
    max_groups
        The largest number of groups considered.
    n_groups
        The number, if it is known; odd clients are not counted.
    most_networks
        Number of networks at which the survey ends, whether or not the answer is stable.
    """
    for networks in _numbers(most_networks):
        heard, answers = ask(method, fed, ids, seed, networks, lens)
        if not answers:
            return heard, None
        order = fed.turns(heard, "groups", every_round=True).argsort()  # depends on names alone
        ordered = {name: select(answer, order) for name, answer in answers.items()}
        found = decide(ordered, fold(seed, "groups"), max_groups, n_groups)
        back = order.argsort()
        found = found._replace(
            labels=found.labels[back], odd=found.odd[back], networks=networks, answers=answers
        )
        if found.confidence == 1:
            break
    return heard, found


def _numbers(most: int) -> Iterator[int]:
    networks = min(NETWORKS, most)
    while networks < most:
        yield networks
        networks *= 2
    yield most


def decide(answers: Answers, key: Tensor, max_groups: int, n_groups: int | None = None) -> Seen:
    """Odd clients, then kind and number of groups of the others, one included.

    Losses decide if they show more than one group; differences in label shares are then ignored.
    Otherwise label shares decide. A client is odd by its losses alone: one whose label shares are
    unusual joins the nearest group.

    Parameters
    ----------
    answers
        Losses, and shares where they were sent.
    key
        Decides the permutations.
    max_groups
        The largest number of groups considered.
    n_groups
        The number, if it is known.
    """
    name: Statistic = "conditional" if "conditional" in answers else "joint"
    losses = answers[name]
    found = _find(losses, fold(key, "all"), max_groups)
    confidence = _agreement(losses, found, key, max_groups)
    odd = torch.zeros(len(found.labels), dtype=torch.bool)
    odd[found.odd if found.n_groups is not None else []] = True
    kind: Kind = "one" if found.n_groups == 1 else "meaning"
    k, labels = found.n_groups, found.labels
    if k is None:
        kind = "client by client"
    elif k == 1 and "shares" in answers:
        rest = (~odd).nonzero()[:, 0]
        shares = select(answers["shares"], rest)
        by_share = _find(shares, fold(key, "shares"), max_groups)
        # A few sets explain most of what differs in a few shares, whatever the clients are like.
        left = by_share.steps and p_value(by_share.steps[-1].test) <= LEVEL
        if by_share.n_groups is None or left:
            kind = "client by client"  # in label shares only: one model
        elif by_share.n_groups > 1:
            kind, name, k, found = "labels", "shares", by_share.n_groups, by_share
            labels = labels.clone()
            labels[rest] = _join(shares, by_share)
    if n_groups is not None:
        k = min(n_groups, int((~odd).sum()))
        if len(labels[~odd].unique()) != k:
            labels = labels.clone()
            labels[~odd] = grouping.divide(select(answers[name], (~odd).nonzero()[:, 0]), k)
    labels = _number(labels, odd)
    worth = grouping.effect(losses)
    if name == "shares":
        worth = grouping.information(answers["shares"], labels)
    return Seen(
        kind, name, k, labels, odd, found.explained, confidence, 0, worth, found.steps, answers
    )


def _find(answers: Summary, key: Tensor, max_groups: int) -> Grouping:
    """Groups; among many clients those of the first thousand, in which the others are placed."""
    m = len(answers.counts)
    if m <= MANY:
        return grouping.find_groups(answers, key, max_groups)
    some, others = torch.arange(m) < MANY, torch.arange(MANY, m)
    found = grouping.find_groups(select(answers, some.nonzero()[:, 0]), key, max_groups)
    known = placing.keep_groups(select(answers, some.nonzero()[:, 0]), found.labels)
    place = placing.place(select(answers, others), known)
    strange = holm(place.p.amax(1), 0.05) if found.n_groups is not None else place.fits & False
    labels = torch.cat([found.labels, place.group])
    labels[others[strange]] = int(labels.max()) + 1 + torch.arange(int(strange.sum()))
    odd = [*found.odd, *others[strange].tolist()]
    return found._replace(labels=labels, odd=odd)


def _agreement(answers: Summary, found: Grouping, key: Tensor, max_groups: int) -> float:
    """What two halves of the networks have in common with each other and with all of them."""
    parts = [
        _find(part, fold(key, name), max_groups)
        for name, part in zip("ab", grouping.halves(answers), strict=True)
        if part.mean.shape[-1]
    ]
    pairs = [(found, part) for part in parts] + ([(parts[0], parts[1])] if len(parts) > 1 else [])
    return min(grouping.agree(*pair) for pair in pairs)


def _join(answers: Summary, found: Grouping) -> Tensor:
    """Labels in which sets of one have joined the nearest larger set."""
    odd = torch.zeros(len(found.labels), dtype=torch.bool)
    odd[found.odd] = True
    if not bool(odd.any()):
        return found.labels
    labels = found.labels.clone()
    kept = labels[~odd].unique(return_inverse=True)[1]
    groups = placing.keep_groups(select(answers, (~odd).nonzero()[:, 0]), kept)
    labels[~odd] = kept
    labels[odd] = placing.place(select(answers, odd.nonzero()[:, 0]), groups).group
    return labels


def _number(labels: Tensor, odd: Tensor) -> Tensor:
    """Numbers in the order of the first members, groups first, then odd clients, one each."""
    m = len(labels)
    place = torch.arange(m) + m * odd
    labels = labels + m * odd  # an odd client may have the number of a group
    first = torch.full((2 * m,), 2 * m).scatter_reduce(0, labels, place, "amin")
    return first.argsort().argsort()[labels]


def columns(seen: Seen) -> tuple[Tensor, Tensor]:
    """What the groups were read from as vectors in units of noise, and weights: [m, d] each."""
    answers = seen.summary
    x = in_units(answers, noise_units(answers, seen.labels))
    mean, weight = average_folds(x, answers.counts)
    return mean.flatten(1), weight[..., None].expand_as(mean).flatten(1)


def p_value(tests: Test | Sequence[float] | Tensor) -> float:
    """The p-value of three tests together, the first of a `Test`: each by its share of the level.

    >>> round(p_value([0.4, 0.01, 0.3]), 3)  # odd clients: .005 of .02
    0.04
    """
    shares = LEVEL / torch.tensor([SPLIT, ODD, TOTAL], dtype=torch.float64)
    return float((torch.as_tensor(tests[:3]).double() * shares).min().clamp(max=1))


# placing


def choose_statistic(answers: Answers, labels: Tensor, key: Tensor) -> Statistic:
    """Label shares where members of groups differ in nothing else, otherwise losses."""
    name, member = next(iter(answers)), (labels >= 0).nonzero()[:, 0]
    if len(labels[member].unique()) < 2 or "shares" not in answers:
        return name
    summary, one = select(answers[name], member), torch.zeros_like(member)
    test = compare(in_units(summary, noise_units(summary, one)), summary.counts, one, key)
    return name if p_value(test) <= LEVEL else "shares"
