"""Advice before training: one model, groups, or client by client.

It rests on a survey (`algorithms/survey.py`): every client evaluates a few networks that are drawn
from a seed and never trained, and sends its losses class by class. One exchange, no model sent,
nothing trained.
"""

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithms import seeded
from coterie.algorithms.survey import Survey
from coterie.clustering import lenses
from coterie.clustering.lenses import Block, Look
from coterie.core.errors import DataError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data import FederatedData
from coterie.engines.simulation import Simulation
from coterie.report import evidence
from coterie.report.table import Table
from coterie.report.words import listed
from coterie.running.build import as_model, check, make_model, suggested
from coterie.running.folder import no_nan
from coterie.running.progress import megabytes

FEW = 8
"""Clients below which a number of groups is a guess."""
APART = 0.05
"""Mean overlap of the groups' label shares below which they share hardly a label."""


@dataclass(frozen=True)
class Advice:
    """What to train, and why. Made by `coterie.advise`.

    Parameters
    ----------
    n_groups
        Models to train: 1, or the number of groups; None where no number describes the clients.
    kind
        "one": no groups. "meaning": inputs, or what a label means, differ between groups. "labels":
        only the label shares do. "client by client": clients differ one by one.
    assignment
        Group of each client, by name; without those whose losses are not numbers.
    evidence
        What it rests on, as plain values: the `curves` of both lenses, `networks`, `samples`, ...
    """

    n_groups: int | None
    kind: lenses.Kind
    assignment: dict[str, int]
    evidence: dict[str, Any]

    @property
    def curves(self) -> Table:
        """Noise ratio by number of groups, and what was chosen."""
        return evidence.table(self.evidence["curves"])

    def picture(self, out: str | Path) -> Path:
        """Draw the curves of both lenses to a file."""
        return evidence.picture(self.evidence["curves"], out)

    def to_json(self) -> str:
        """All of it, for scripts."""
        return json.dumps(no_nan({**asdict(self), "text": str(self)}))

    def __str__(self) -> str:
        return "\n\n".join(_paragraphs(self))

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(part)}</p>" for part in _paragraphs(self))


def advise(
    data: FederatedData,
    *,
    model: str | dict[str, Any] | nn.Module | Model | None = None,
    max_groups: int = 10,
    networks: int = seeded.NETWORKS,
    threshold: float = lenses.THRESHOLD,
    seed: int = 0,
) -> Advice:
    """Say whether the clients of a federation should be grouped, before anything is trained.

    Parameters
    ----------
    model
        The network you mean to train, as in `fit`; its seeded draws are the probes. Nothing: chosen
        from the kind of data.
    max_groups
        The largest number of groups considered.
    networks, threshold
        As in `Survey`.

    Examples
    --------
    >>> from coterie.data.synthetic import blobs
    >>> advice = advise(blobs(n_groups=2, clients_per_group=5, n=60), model="mlp")
    >>> advice.kind, advice.n_groups
    ('meaning', 2)
    """
    if len(data) < 2:
        raise DataError(f"advise: there must be at least two clients to compare. Got {len(data)}.")
    name = suggested(data) if model is None else model
    if isinstance(name, nn.Module | Model):
        net = as_model(name, data.task)
    else:
        net = make_model({"name": name} if isinstance(name, str) else name, data)
    local = LocalSGD(batch_size=32)  # never used: nothing is trained
    method = Survey(
        net, local, max_groups=max_groups, networks=max(networks, 1), threshold=threshold
    )
    check(method, data)
    fed = Simulation(data, seed)
    fed.begin(-1)
    ids, block = seeded.ask(method, fed, fed.everyone(), fed.key("survey"), method.networks)
    if block is None:
        raise DataError("advise: no client has losses that are numbers. Look for nan in the data.")
    seen = lenses.look(seeded.views(block, net), max_groups, threshold)
    names = [data.names[i] for i in ids.tolist()]
    stray = seen.loose and seen.k != 1  # no number fits: everybody stands alone
    label = torch.arange(len(ids)) if stray else seen.labels
    found = {
        "curves": [curve._asdict() for curve in _curves(seen)],
        "loose": seen.loose,
        "proposal": seen.k if stray else None,
        "proposed_assignment": dict(zip(names, seen.labels.tolist(), strict=True)) if stray else {},
        "label_overlap": _overlap(block, seen.labels) if seen.kind == "labels" else None,
        "networks": method.networks,
        "model": net.title,
        "threshold": threshold,
        "max_groups": max_groups,
        "clients": len(ids),
        "set_aside": sorted(set(data.names) - set(names)),
        "samples": _range(data.sizes("train")[ids]),
        "classes": block.counts.shape[1] if isinstance(block, Block) else None,
        "bytes_down": _per_client(fed, "down"),
        "bytes_up": _per_client(fed, "up"),
    }
    return Advice(
        None if stray else seen.k,
        seen.kind,
        dict(zip(names, label.tolist(), strict=True)),
        no_nan(found),
    )


def _curves(seen: Look) -> list[Any]:
    width = max(len(choice.ratio) for choice in seen.choices.values())
    return lenses.evidence(lenses.curves(seen, width), seen.kind, seen.lens)


def _overlap(block: seeded.Answers, labels: Tensor) -> float | None:
    """Mean over pairs of groups of what their label shares have in common: 0 nothing, 1 all."""
    if not isinstance(block, Block):
        return None
    counts = torch.zeros(int(labels.max()) + 1, block.counts.shape[1], dtype=torch.float64)
    counts.index_add_(0, labels, block.counts)
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


# words


def _paragraphs(advice: Advice) -> list[str]:
    found = advice.evidence
    parts = [_verdict(advice), evidence.words(found["curves"])]
    samples, classes = found["samples"], found["classes"]
    each = (
        f"{samples['least']} samples each"
        if samples["least"] == samples["most"]
        else f"{samples['least']} to {samples['most']} samples each"
    )
    apart = f", told apart by {classes} classes" if classes else ", without classes"
    rests = (
        f"What this rests on: the losses of {found['clients']} clients ({each}) on "
        f"{found['networks']} networks ({found['model']}) that were drawn from a seed and never "
        f"trained{apart}."
    )
    parts.append(" ".join([rests, *_doubts(advice)]))
    parts.append(
        f"What it cost: one exchange, {megabytes(found['bytes_down'])} to and "
        f"{megabytes(found['bytes_up'])} from each client; no model was sent, nothing trained."
        + (" The answers tell the server each client's label counts." if classes else "")
    )
    parts.append(
        "What it cannot see: differences that a random network does not notice, and whether groups "
        "pay. Right groups need not be useful ones: after training, ask for the verdict on data "
        'that were held back (see "Should I cluster?" in the documentation).'
    )
    return parts


def _verdict(advice: Advice) -> str:
    k, found = advice.n_groups, advice.evidence
    clients = found["clients"]
    if advice.kind == "one":
        return (
            f"One model: the {clients} clients differ by no more than chance. Train one model for "
            'all (method "fedavg").'
        )
    if advice.kind == "client by client":
        if not advice.evidence["proposal"]:
            return (
                "Client by client: clients have different shares of labels, each its own, and are "
                "alike otherwise. There are no groups: train one model for all and personalise it."
            )
        return (
            "Client by client: the clients differ one by one, as writers or cameras do, and no "
            f"number of groups up to {found['max_groups']} describes them. Let everybody train "
            'alone (method "local_only") or personalise one model. If you want to try groups, '
            f"{found['proposal']} are the best cut, but nothing here says that they exist."
        )
    sizes = list(advice.assignment.values())
    counts = sorted((sizes.count(g) for g in set(sizes)), reverse=True)
    text = f"{k} groups ({listed(counts)} clients). "
    if advice.kind == "meaning":
        return text + (
            "Between them the inputs, or what a label means, differ, so that one model cannot "
            f'serve all: train a model for each (method "survey", n_groups={k}).'
        )
    overlap = found["label_overlap"]
    text += "They differ in how often they have each label, and in nothing else. "
    if overlap is not None and overlap < APART:
        return text + (
            "They share hardly a label, so each group needs to tell fewer classes apart: train a "
            f'model for each (method "survey", n_groups={k}).'
        )
    return text + (
        "Everybody has many of the same labels, so one model may serve all as well or better in "
        'the end: train both ("survey" and "fedavg") and compare.'
    )


def _doubts(advice: Advice) -> list[str]:
    found, doubts = advice.evidence, []
    if found["clients"] < FEW:
        doubts.append(f"With fewer than {FEW} clients the number is a guess.")
    if found["samples"]["median"] < 50:
        doubts.append("With so few samples small differences drown in noise.")
    if found["set_aside"]:
        names = listed(found["set_aside"][:5])
        doubts.append(f"Set aside because their losses are not numbers: {names}.")
    if not found["classes"]:
        doubts.append("Without classes the method has been measured little.")
    return doubts
