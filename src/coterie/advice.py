"""Advice before training: one model, groups, or client by client.

It depends on a survey (`running/survey.py`): every client evaluates a few networks that are drawn
from a seed and never trained, and reports its losses class by class.
"""

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from coterie.algorithms import seeded
from coterie.clustering import lenses
from coterie.core.model import Model
from coterie.data import FederatedData
from coterie.report import evidence
from coterie.report.table import Table
from coterie.report.words import listed
from coterie.running.build import build_model, check_model
from coterie.running.folder import no_nan
from coterie.running.progress import megabytes
from coterie.running.survey import Findings, survey_clients

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
    def start(self) -> dict[str, int]:
        """Initial groups for `fit(data, ..., start=advice)`, even where no number fits well."""
        return Findings(self.n_groups, self.kind, self.assignment, self.evidence).proposal[1]

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
    data
        Made by `from_folder`, `from_table`, `from_arrays`, ...
    model
        The network you want to train, as in `fit`. Random draws of it are what clients evaluate.
        None: chosen from the kind of data.
    max_groups
        The largest number of groups considered.
    networks
        Number of random networks that every client evaluates.
    threshold
        Noise ratio up to which clients count as alike.
    seed
        Seed of the networks.

    Examples
    --------
    >>> from coterie.data.synthetic import blobs
    >>> advice = advise(blobs(n_groups=2, clients_per_group=5, n=60), model="mlp")
    >>> advice.kind, advice.n_groups
    ('meaning', 2)
    """
    network = build_model(model, data)
    check_model(network, data)
    return Advice(
        *survey_clients(
            data,
            network,
            max_groups=max_groups,
            networks=networks,
            threshold=threshold,
            seed=seed,
        )
    )


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
