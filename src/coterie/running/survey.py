"""A survey of the clients before training: are there groups, how many, and who belongs where?

Every client evaluates a few networks that are drawn from a seed and never trained, and reports its
mean losses by fold and class. A few exchanges, no model sent, nothing trained.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.survey import Survey, keep_steps, make_curve, seeded
from coterie.algorithms.survey.seeded import Kind, Seen
from coterie.clustering.labels import relabel
from coterie.core.errors import DataError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import fold
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids
from coterie.data import DataCard, FederatedData
from coterie.engines.simulation import Simulation
from coterie.evidence.grouping import strange_classes
from coterie.evidence.replication import contrast, in_units, noise_units
from coterie.evidence.summaries import select
from coterie.evidence.why import Sets
from coterie.running.folder import no_nan
from coterie.running.why import MOST_CLIENTS, Asking, Part, Who, explain

FAR = 3.0
"""Standard deviations of chance from which on a class is named as strange."""


class Findings(NamedTuple):
    """What a survey found."""

    n_groups: int | None  # None: no number of groups describes the clients
    kind: Kind  # "one", "meaning", "labels" or "client by client"
    assignment: dict[str, int]  # group of each client, by name; odd clients have none
    odd: dict[str, str]  # clients that are unlike all others, and what is strange about them
    explained: float  # share of what differs between clients that groups and odd clients explain
    confidence: float  # 1: two halves of the networks say the same
    worth: float  # size of the differences, in units of the loss
    evidence: dict[str, Any]  # as plain values

    @property
    def proposal(self) -> tuple[int, dict[str, int]]:
        """The number of groups and the groups to train, even where no number fits well."""
        if self.n_groups is not None:
            return self.n_groups, self.assignment
        return int(self.evidence["proposal"]), dict(self.evidence["proposed_assignment"])


def survey_clients(
    data: FederatedData,
    model: Model,
    *,
    max_groups: int = 10,
    networks: int = seeded.MOST_NETWORKS,
    seed: int = 0,
    why: tuple[Part, ...] = (),
) -> Findings:
    """Look for groups with untrained networks; the options are those of `coterie.advise`."""
    if len(data) < 2:
        raise DataError(f"advise: there must be at least two clients to compare. Got {len(data)}.")
    local = LocalSGD(batch_size=32)  # never used: nothing is trained
    method = Survey(model, local, max_groups=max_groups, networks=max(networks, 2))
    fed = Simulation(data, seed)
    fed.begin(-1)
    ids, seen = seeded.look(
        method, fed, fed.everyone(), fed.key("survey"), max_groups, most_networks=method.networks
    )
    if seen is None:
        raise DataError(
            "advise: at least one client must have a loss that is a number. None has. Look for nan "
            "in the data."
        )
    inputs = None  # without classes, inputs cannot be told from what is predicted
    if seen.kind == "meaning" and seen.classes:
        inputs = compare_inputs(method, fed, ids[~seen.odd], seen.labels[~seen.odd])
    names = [data.names[i] for i in ids.tolist()]
    stray = seen.n_groups is None  # no number fits: every client is a group of its own
    stays = (~seen.odd).nonzero()[:, 0].tolist()
    labels = relabel(seen.labels[stays]).tolist()  # by first member, as the user lists them
    groups = {names[i]: label for i, label in zip(stays, labels, strict=True)}
    sets = _number_sets(seen, stays, labels, len(ids) if stray else 0)
    who = Who(ids, sets, names, single=stray)
    told, _ = explain(Asking(fed, method, DataCard.of(data), who, "train"), why, survey=seen.losses)
    asked = sum(part["numbers"] > 0 for part in told["sent"])
    chances = [seeded.p_value(step.test) for step in seen.steps]
    steps = keep_steps(seen.steps)
    shown = steps, seen.statistic, seen.kind, seen.n_groups, int(seen.odd.sum())
    found = {
        "curves": [make_curve(*shown)._asdict()] if len(steps) else [],
        "p_values": chances,
        "inputs_differ": None if inputs is None else inputs <= seeded.LEVEL,
        "inputs_p_value": inputs,
        "proposal": seen.used if stray else None,
        "proposed_assignment": groups if stray else {},
        "label_overlap": _overlap(seen) if seen.kind == "labels" else None,
        "networks": seen.networks,
        "exchanges": seen.exchanges + (inputs is not None) + asked,
        "model": model.title,
        "max_groups": max_groups,
        "clients": len(ids),
        "set_aside": sorted(set(data.names) - set(names)),
        "samples": _range(data.sizes("train")[ids]),
        "classes": seen.classes,
        "bytes_down": _per_client(fed, "down"),
        "bytes_up": _per_client(fed, "up"),
        "why": told,
    }
    return Findings(
        seen.n_groups,
        seen.kind,
        {name: number for number, name in enumerate(names)} if stray else groups,
        describe_odd(seen, names, data.classes) | fed.record.aside,
        seen.explained,
        seen.confidence,
        seen.worth,
        no_nan(found),
    )


def _number_sets(seen: Seen, stays: list[int], labels: list[int], alone: int) -> Sets:
    """Groups as they are numbered for the user, odd clients after them; or every client alone."""
    if alone:
        few = alone <= MOST_CLIENTS  # more are not compared one by one
        every = torch.arange(alone) if few else torch.zeros(alone, dtype=torch.int64)
        return Sets(every, torch.zeros(alone, dtype=torch.bool))
    out = torch.zeros(len(seen.labels), dtype=torch.int64)
    out[stays] = torch.tensor(labels, dtype=torch.int64)
    out[seen.odd] = max(labels, default=-1) + 1 + torch.arange(int(seen.odd.sum()))
    return Sets(out, seen.odd)


def compare_inputs(method: Survey, fed: Federation, ids: Ids, labels: Tensor) -> float:
    """The p-value of "the inputs of groups are distributed alike", in one more exchange.

    All networks that a survey may use are asked about: each sees the inputs from another side.

    Parameters
    ----------
    labels
        Group of each client, by the losses on its labels. [m]
    """
    seed, asked = fed.key("survey"), ids
    ids, answers = seeded.ask(method, fed, asked, seed, method.networks, "inputs")
    group = labels[torch.isin(asked, ids)]
    if len(group.unique()) < 2:
        return 1.0
    order = fed.turns(ids, "groups", every_round=True).argsort()
    summary, one = select(answers["joint"], order), torch.zeros_like(ids)
    x = in_units(summary, noise_units(summary, one))
    return contrast(x, summary.counts, group[order], fold(seed, "inputs"))


def describe_odd(seen: Seen, names: list[str], classes: tuple[str, ...] | None) -> dict[str, str]:
    """What is strange about each odd client, in a sentence."""
    said = {}
    others = torch.arange(len(names))
    if len(others) > seeded.MANY:  # each is compared with some; with all, the time is quadratic
        others = others[~seen.odd][: seeded.MANY]
    for client in seen.odd.nonzero()[:, 0].tolist():
        some = torch.cat([torch.tensor([client]), others[others != client]]).sort().values
        near = seen.labels[some].unique(return_inverse=True)[1]
        place = int((some == client).nonzero())
        away = strange_classes(select(seen.losses, some), near, place)  # [c]
        far = [int(c) for c in away.argsort(descending=True) if away[c] >= FAR]
        most = float(away.max())
        if len(away) == 1 or not far:
            said[names[client]] = (
                f"its losses are unlike those of any group ({most:.0f} standard deviations of "
                "chance)"
            )
            continue
        called = [classes[c] if classes else str(c) for c in far[:5]]
        more = f" and {len(far) - 5} more" if len(far) > 5 else ""
        said[names[client]] = (
            f"its rows of class {', '.join(called)}{more} are unlike those of the nearest group "
            f"(up to {most:.0f} standard deviations of chance)"
        )
    return said


def _overlap(seen: Seen) -> float:
    """Mean over pairs of groups of what their label shares have in common: 0 nothing, 1 all."""
    table = (seen.summary.counts[..., None] * seen.summary.mean).sum((1, 2))  # [m, classes]
    counts = torch.zeros(seen.used, table.shape[1], dtype=torch.float64)
    counts.index_add_(0, seen.labels[~seen.odd], table[~seen.odd])
    share = counts / counts.sum(1, keepdim=True)
    common = torch.minimum(share[:, None], share[None]).sum(2)  # [k, k]
    pairs = common[torch.triu(torch.ones_like(common), 1) > 0]
    return float(pairs.mean())


def _range(sizes: Tensor) -> dict[str, int]:
    ordered = sizes.sort().values
    return {
        "least": int(ordered[0]),
        "median": int(ordered[len(ordered) // 2]),
        "most": int(ordered[-1]),
    }


def _per_client(fed: Simulation, direction: str) -> int:
    total = sum(int(n.sum()) for (_, way), n in fed.traffic.totals.items() if way == direction)
    return total // max(fed.n_clients, 1)
