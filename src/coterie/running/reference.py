"""What a run keeps of its groups, so that new rows can be compared with them later.

At the end of a run all clients answer the questions of a survey once more: their losses on networks
that were drawn from a seed and never trained, by fold and class, with their labels and with the
same label on all rows. Of the answers the means of each group and of each client are kept. No model
that was trained is asked: it knows the rows it was trained on, and new rows would look strange. New
rows answer the same questions, and are placed by `evidence/placing.py`. A client has changed if its
new rows are unlike both its group and its own former rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.survey import seeded
from coterie.core import wire
from coterie.core.algorithm import Algorithm
from coterie.core.model import Model
from coterie.core.random import fold
from coterie.core.tree import Ids
from coterie.data import FederatedData
from coterie.engines.simulation import Simulation
from coterie.evidence import placing
from coterie.evidence.placing import Known, Place, learn_groups
from coterie.evidence.summaries import select

NETWORKS = 32
MOST = 1_000
"""Clients whose own means are kept; later rows of others are compared with their group only."""
LEVEL = 0.05
"""Probability that any client without a change is said to have changed, for all together."""


class Reference(NamedTuple):
    """What is kept."""

    seed: Tensor  # of the networks
    labelled: Known  # the groups, by the numbers that users see
    inputs: Known  # the same with one label on all rows
    own_labelled: Known  # every client by itself, by its position
    own_inputs: Known

    def groups(self, labelled: bool) -> Known:
        """The groups that new rows are compared with."""
        return self.labelled if labelled else self.inputs

    def write(self) -> bytes:
        """As a file."""
        return wire.dump({"reference": self})

    @classmethod
    def read(cls, content: bytes) -> "Reference":
        """From a file."""
        found: Reference = wire.load(content, like={"reference": cls})["reference"]
        return found


def keep_reference(
    algorithm: Algorithm, data: FederatedData, ids: Ids, group: Tensor, own: bool = True
) -> Reference | None:
    """Ask the members of groups; None if there is no network to draw, or no answer.

    Parameters
    ----------
    ids
        The clients.
    group
        The number of each one's group, -1 for those that are unlike all others. [m]
    own
        Whether to keep what single clients answered.
    """
    if not isinstance(getattr(algorithm, "model", None), Model) or not bool((group >= 0).any()):
        return None
    fed = _federation(data)
    seed = fed.key("reference")
    group_of = torch.full((len(data),), -1)
    group_of[ids] = group
    heard, answers = seeded.ask(algorithm, fed, ids, seed, NETWORKS)
    again, inputs = seeded.ask(algorithm, fed, ids, seed, NETWORKS, "inputs")
    both = heard[torch.isin(heard, again)]
    if not len(both) or not bool((group_of[both] >= 0).any()):
        return None
    answers, inputs = _some(answers, heard, both), _some(inputs, again, both)
    label, first = group_of[both], both[:MOST]
    few, few_inputs = _some(answers, both, first), _some(inputs, both, first)
    number = first if own else torch.full_like(first, -1)
    statistic = seeded.choose_statistic(answers, label, fold(seed, "statistic"))
    return Reference(
        seed,
        learn_groups(answers, label, statistic == "shares"),
        learn_groups(inputs, label, by_shares=False),
        learn_groups(few, number, statistic == "shares"),
        learn_groups(few_inputs, number, by_shares=False),
    )


def _federation(data: FederatedData) -> Simulation:
    """A federation of its own, so that answers do not depend on how a run was carried out."""
    fed = Simulation(data)
    fed.begin(0)
    return fed


def _some(answers: seeded.Answers, ids: Ids, chosen: Ids) -> seeded.Answers:
    """The answers of some of the clients."""
    place = torch.isin(ids, chosen).nonzero()[:, 0]
    return {name: select(answer, place) for name, answer in answers.items()}


def look_again(
    reference: Reference,
    algorithm: Algorithm,
    data: FederatedData,
    labelled: bool,
    former: Sequence[int] = (),
) -> tuple[Ids, Place, Tensor]:
    """Where new rows belong: clients that answered, the position of their groups, what changed.

    Parameters
    ----------
    former
        Position in the run of each client of the data; -1 for newcomers. [n]

    Returns
    -------
    Clients that answered, where they belong, and the p-value of "its rows are like those in the
    run", nan where these are not known.
    """
    fed = _federation(data)
    labelled = labelled or data.task == "reconstruction"
    asked = fed.everyone(), reference.seed, NETWORKS
    ids, answers = seeded.ask(algorithm, fed, *asked, lens="auto" if labelled else "inputs")
    groups, own = reference.groups(labelled), reference.own_labelled
    own = own if labelled else reference.own_inputs
    if not answers:
        empty = torch.zeros(0, dtype=torch.float64)
        return ids[:0], Place(ids[:0], empty, empty.reshape(0, len(groups.number))), empty
    same = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    was = torch.tensor([*former, *[-1] * (len(data) - len(former))])[ids]
    known = torch.isin(was, own.number).nonzero()[:, 0]
    if len(known):
        some = _some(answers, torch.arange(len(ids)), known)
        place = torch.searchsorted(own.number, was[known])
        same[known] = placing.compare_one(some, own, place)
    return ids, placing.place_in(answers, groups), same


def describe_changes(
    found: Place,
    same: Tensor,
    numbers: Sequence[int],
    names: Sequence[str],
    before: Mapping[str, int | str],
    labelled: bool,
) -> list[dict[str, Any]]:
    """A row per client: where it was, where it is now, and whether that is a change.

    Parameters
    ----------
    found
        Where the new rows of clients belong.
    same
        The p-value of "its rows are like those in the run", nan where these are not known.
    numbers
        Number of each group, as users see it.
    names
        Names of the clients.
    before
        Number of the group of each client of the run, or "apart".
    labelled
        Whether labels were compared. Inputs that fit several groups do not tell the group.
    """
    place = {number: position for position, number in enumerate(numbers)}
    was = torch.tensor([place.get(before.get(name), -1) for name in names], dtype=torch.int64)  # type: ignore[arg-type]
    lines = []
    for i, change in enumerate(placing.recheck(found, was, same, LEVEL)):
        old, said = before.get(names[i]), str(change)
        groups = [numbers[group] for group in found.candidates[i]]
        now: int | None = numbers[int(found.group[i])]
        if was[i] < 0 and old is not None and said in ("new", "nowhere"):
            said = {"new": "moved", "nowhere": "stays"}[said]  # too many to keep the rows of all
        if said == "stays":
            now = old if isinstance(old, int) and old in place else None
        elif said == "nowhere":
            now = None
        elif not labelled and len(groups) > 1:
            now, said = None, "labels" if said == "new" else said
        p = float(found.p[i].max() if was[i] < 0 else found.p[i, was[i]])
        p = p if same[i].isnan() else float(same[i]) if was[i] < 0 else max(p, float(same[i]))
        one = {"client": names[i], "rows": 0, "before": old, "now": now, "change": said}
        lines.append({**one, "groups": groups, "p": p})
    return lines
