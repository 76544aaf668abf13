"""What a run keeps of its groups, so that new rows can be compared with them later.

At the end of a run all members answer the questions of a survey once more: their losses on networks
that were drawn from a seed and never trained, by fold and class, with their labels and with the
same label on all rows. Of the answers the means of each group are kept. No model that was trained
is asked: it knows the rows it was trained on, and new rows would look strange. New rows answer the
same questions, and are placed by `evidence/placing.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.survey import seeded
from coterie.algorithms.survey.seeded import STATISTICS
from coterie.core import wire
from coterie.core.algorithm import Algorithm
from coterie.core.model import Model
from coterie.core.random import fold
from coterie.core.tree import Ids
from coterie.data import FederatedData
from coterie.engines.simulation import Simulation
from coterie.evidence import placing
from coterie.evidence.placing import Groups, Place
from coterie.evidence.replication import compare, in_units, noise_units
from coterie.evidence.summaries import Summary

NETWORKS = 32
LEVEL = 0.05
"""Probability that any client without a change is said to have changed, for all together."""


class Reference(NamedTuple):
    """What is kept."""

    seed: Tensor  # of the networks
    number: Tensor  # [k]  number of each group, as users see it
    statistic: Tensor  # position in STATISTICS: what is compared if there are labels
    labelled: Groups
    inputs: Groups  # with the same label on all rows

    def write(self) -> bytes:
        """As a file."""
        return wire.dump({"reference": self})

    @classmethod
    def read(cls, content: bytes) -> "Reference":
        """From a file."""
        found: Reference = wire.load(content, like={"reference": cls})["reference"]
        return found


def keep_reference(
    algorithm: Algorithm, data: FederatedData, ids: Ids, group: Tensor
) -> Reference | None:
    """Ask the members of groups; None if there is no network to draw, or no answer.

    Parameters
    ----------
    ids
        The members; clients that are unlike all others are left out.
    group
        The number of each one's group. [m]
    """
    if not isinstance(getattr(algorithm, "model", None), Model) or not len(ids):
        return None
    fed = _federation(data)
    seed = fed.key("reference")
    group_of = torch.full((len(data),), -1)
    group_of[ids] = group
    heard, answers = seeded.ask(algorithm, fed, ids, seed, NETWORKS)
    again, inputs = seeded.ask(algorithm, fed, ids, seed, NETWORKS, "inputs")
    if not answers or not inputs:
        return None
    number, labels = group_of[heard].unique(return_inverse=True)
    statistic = _choose(answers, len(number), fold(seed, "statistic"))
    known = torch.isin(again, heard)  # who answered one may not have answered the other
    return Reference(
        seed,
        number,
        torch.tensor(STATISTICS.index(statistic)),
        placing.keep_groups(answers[statistic], labels),
        placing.keep_groups(
            _some(inputs["joint"], known), torch.searchsorted(number, group_of[again[known]])
        ),
    )


def _federation(data: FederatedData) -> Simulation:
    """A federation of its own, so that answers do not depend on how a run was carried out."""
    fed = Simulation(data)
    fed.begin(0)
    return fed


def _some(answers: Summary, chosen: Tensor) -> Summary:
    return Summary(answers.counts[chosen], answers.mean[chosen], answers.scatter)


def _choose(answers: seeded.Answers, n_groups: int, key: Tensor) -> seeded.Statistic:
    """Label shares where groups differ in nothing else, otherwise losses."""
    losses: seeded.Statistic = "conditional" if "conditional" in answers else "joint"
    if n_groups < 2 or "shares" not in answers:
        return losses
    summary = answers[losses]
    one = torch.zeros(len(summary.counts), dtype=torch.int64)
    test = compare(in_units(summary, noise_units(summary, one)), summary.counts, one, key)
    differ = seeded.p_value(torch.tensor(test[:3])) <= seeded.LEVEL
    return losses if differ else "shares"


def look_again(
    reference: Reference, algorithm: Algorithm, data: FederatedData, labelled: bool
) -> tuple[Ids, Place]:
    """Where new rows belong: clients that answered, and the position of their groups."""
    fed = _federation(data)
    everyone = fed.everyone()
    if labelled or data.task == "reconstruction":
        ids, answers = seeded.ask(algorithm, fed, everyone, reference.seed, NETWORKS)
        statistic, groups = STATISTICS[int(reference.statistic)], reference.labelled
    else:
        ids, answers = seeded.ask(algorithm, fed, everyone, reference.seed, NETWORKS, "inputs")
        statistic, groups = "joint", reference.inputs
    if not answers:
        empty = torch.zeros(0, dtype=torch.float64)
        return ids[:0], Place(ids[:0], empty, empty.reshape(0, len(reference.number)))
    return ids, placing.place(answers[statistic], groups)


def describe_changes(
    found: Place,
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
    for i, change in enumerate(placing.recheck(found, was, LEVEL)):
        old, said = before.get(names[i]), str(change)
        groups = [numbers[group] for group in found.candidates[i]]
        now: int | None = numbers[int(found.group[i])]
        if was[i] < 0 and old is not None:  # was unlike all others
            said = {"new": "moved", "nowhere": "stays"}[said]
        if said == "stays":
            now = old if isinstance(old, int) and old in place else None
        elif said == "nowhere":
            now = None
        elif not labelled and len(groups) > 1:
            now, said = None, "labels" if said == "new" else said
        p = float(found.p[i].max() if was[i] < 0 else found.p[i, was[i]])
        one = {"client": names[i], "rows": 0, "before": old, "now": now, "change": said}
        lines.append({**one, "groups": groups, "p": p})
    return lines
