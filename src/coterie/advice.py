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

from coterie.algorithms.survey import seeded
from coterie.clustering import lenses
from coterie.core.model import Model
from coterie.data import FederatedData
from coterie.report import evidence
from coterie.report.table import Table
from coterie.report.words import join_words
from coterie.running.build import build_model, check_model
from coterie.running.folder import no_nan
from coterie.running.progress import megabytes
from coterie.running.survey import Findings, survey_clients

FEW = 8
"""Number of clients below which the number of groups is a guess."""
APART = 0.05
"""Mean overlap of label frequencies below which groups have almost no label in common."""


@dataclass(frozen=True)
class Advice:
    """What to train, and why. Made by `coterie.advise`.

    Parameters
    ----------
    n_groups
        Number of models to train; None if no number of groups describes the clients.
    kind
        "one": there are no groups. "meaning": inputs, or the meaning of labels, differ between
        groups. "labels": only label frequencies differ. "client by client": every client differs
        from the others in its own way.
    assignment
        Group of each client, by name. Clients whose losses are not numbers are left out.
    evidence
        The measurements as plain values: the `curves` of both lenses, `networks`, `samples`, ...
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
        """The noise ratio for each number of groups, and the chosen number."""
        return evidence.table(self.evidence["curves"])

    def picture(self, out: str | Path) -> Path:
        """Draw the curves of both lenses to a file."""
        return evidence.picture(self.evidence["curves"], out)

    def to_json(self) -> str:
        """The advice and its evidence as JSON."""
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
    apart = f", for each of {classes} classes" if classes else ", without classes"
    rests = (
        f"Evidence: the losses of {found['clients']} clients ({each}) on {found['networks']} "
        f"random, untrained networks ({found['model']}){apart}."
    )
    parts.append(" ".join([rests, *_doubts(advice)]))
    parts.append(
        f"Cost: one exchange, {megabytes(found['bytes_down'])} to and "
        f"{megabytes(found['bytes_up'])} from each client. No model was sent and nothing trained."
        + (" The server learns the label counts of each client." if classes else "")
    )
    parts.append(
        "Limits: a random network may miss a difference, and groups that exist need not improve "
        'the models. After training, ask for the verdict, which uses held-out data (see "Should I '
        'cluster?" in the documentation).'
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
                "Client by client: every client has its own label frequencies, and the clients are "
                "alike otherwise. There are no groups: train one model for all and personalise it."
            )
        return (
            "Client by client: every client differs from the others in its own way, as writers or "
            f"cameras do, and no number of groups up to {found['max_groups']} describes them. Let "
            'every client train alone (method "local_only") or personalise one model. If you want '
            f"to try groups, {found['proposal']} are the best division, but there is no evidence "
            "that they exist."
        )
    sizes = list(advice.assignment.values())
    counts = sorted((sizes.count(g) for g in set(sizes)), reverse=True)
    text = f"{k} groups ({join_words(counts)} clients). "
    if advice.kind == "meaning":
        return text + (
            "They differ in their inputs, or in what a label means, so one model cannot serve all. "
            f'Train a model for each group (method "survey", n_groups={k}).'
        )
    overlap = found["label_overlap"]
    text += "They differ in how often each label occurs, and in nothing else. "
    if overlap is not None and overlap < APART:
        return text + (
            "They have almost no label in common, so each model has fewer classes to tell apart. "
            f'Train a model for each group (method "survey", n_groups={k}).'
        )
    return text + (
        "They have many labels in common, so one model may be as good or better in the end. "
        'Train both ("survey" and "fedavg") and compare.'
    )


def _doubts(advice: Advice) -> list[str]:
    found, doubts = advice.evidence, []
    if found["clients"] < FEW:
        doubts.append(f"With fewer than {FEW} clients the number is a guess.")
    if found["samples"]["median"] < 50:
        doubts.append("With fewer than 50 samples per client, small differences are lost in noise.")
    if found["set_aside"]:
        names = join_words(found["set_aside"][:5])
        doubts.append(f"Left out because their losses are not numbers: {names}.")
    if not found["classes"]:
        doubts.append("Without classes this advice has been tested little.")
    return doubts
