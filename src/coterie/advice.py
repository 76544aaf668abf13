"""Advice before training: one model, groups, or client by client.

It depends on a survey (`running/survey.py`): every client evaluates a few networks that are drawn
from a seed and never trained, and reports its losses class by class.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from coterie.algorithms.survey import seeded
from coterie.algorithms.survey.seeded import LEVEL, Kind
from coterie.core.model import Model
from coterie.data import FederatedData
from coterie.measured import say_best
from coterie.report import evidence
from coterie.report.table import Table
from coterie.report.why import Why
from coterie.report.words import join_words
from coterie.running.build import build_model, check_model
from coterie.running.folder import no_nan
from coterie.running.progress import megabytes
from coterie.running.survey import survey_clients
from coterie.running.why import Part, check_parts

FEW = 8
"""Number of clients below which the number of groups is a guess."""
BEFORE: tuple[Part, ...] = ("columns", "labels")
"""What clients can send before there are models, so that groups can be described."""
APART = 0.05
"""Mean overlap of label frequencies below which groups have almost no label in common."""


@dataclass(frozen=True, repr=False)
class Advice:
    """What to train, and why. Made by `coterie.advise`.

    Parameters
    ----------
    n_groups
        Number of groups; None if no number describes the clients. Odd clients are not counted.
    kind
        "one": there are no groups. "meaning": inputs, or the meaning of labels, differ between
        groups. "labels": only label frequencies differ. "client by client": every client differs
        from all others.
    assignment
        Group of each client, by name. Odd clients, and those whose losses are not numbers, are left
        out.
    odd
        Clients that are unlike all others, by name, and what is strange about each.
    explained
        Share of what differs between clients that groups and odd clients explain.
    confidence
        Agreement of two halves of the networks: 1 if they give the same answer.
    worth
        Size of the differences. By how much the mean loss of a client on an untrained network
        differs from that of all clients, as a root mean square beyond chance; for kind "labels",
        what knowing the group tells about a label, in nats.
    evidence
        The measurements as plain values: the `curves`, `p_values`, `networks`, `samples`, ...
    """

    n_groups: int | None
    kind: Kind
    assignment: dict[str, int]
    odd: dict[str, str]
    explained: float
    confidence: float
    worth: float
    evidence: dict[str, Any]

    @property
    def start(self) -> dict[str, int]:
        """Initial groups for `fit(data, ..., start=advice)`, even where no number fits well."""
        return dict(self.evidence["proposed_assignment"]) or self.assignment

    @property
    def curves(self) -> Table:
        """What each number of groups leaves unexplained, and the chosen number."""
        return evidence.table(self.evidence["curves"])

    def picture(self, out: str | Path) -> Path:
        """Draw what each number of groups leaves unexplained to a file."""
        odd = len(self.odd) if self.n_groups is not None else 0
        return evidence.picture(self.evidence["curves"], out, odd)

    @property
    def why(self) -> Why:
        """In what each group and odd client differs from the others, as far as known so far."""
        return Why.of(self.evidence["why"])

    def to_json(self) -> str:
        """The advice and its evidence as JSON."""
        found = {name: value for name, value in self.evidence.items() if name != "why"}
        content = {**asdict(self), "evidence": found, "why": self.why.to_json()}
        content |= {"odd": list(self.odd), "strange": self.odd, "text": str(self)}
        return json.dumps(no_nan(content))

    def __repr__(self) -> str:
        odd = f", {len(self.odd)} odd" if self.odd else ""
        return (
            f"Advice({self.kind!r}, {self.n_groups} groups of {len(self.assignment)} clients{odd})"
        )

    def __str__(self) -> str:
        return "\n\n".join(_paragraphs(self))

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(part)}</p>" for part in _paragraphs(self))


def advise(
    data: FederatedData,
    *,
    model: str | dict[str, Any] | nn.Module | Model | None = None,
    max_groups: int = 10,
    networks: int = seeded.MOST_NETWORKS,
    seed: int = 0,
    why: str | Sequence[Part] = "auto",
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
        The largest number of random networks that every client evaluates. 16 are tried first, then
        twice as many, until two halves of them give the same answer.
    seed
        Seed of the networks.
    why
        What clients may send so that `advice.why` can say in what groups differ: "columns" (count,
        mean and spread of each column) and "labels" (nothing more than the survey knows). "auto":
        both. "nothing": neither.

    Examples
    --------
    >>> from coterie.data.synthetic import blobs
    >>> advice = advise(blobs(n_groups=2, clients_per_group=5, n=60), model="mlp")
    >>> advice.kind, advice.n_groups
    ('meaning', 2)
    """
    network = build_model(model, data)
    check_model(network, data)
    parts = check_parts("advise", why, BEFORE)
    options = {"max_groups": max_groups, "networks": networks, "seed": seed}
    return Advice(*survey_clients(data, network, **options, why=parts))


# words


def _paragraphs(advice: Advice) -> list[str]:
    found = advice.evidence
    parts = [_verdict(advice)]
    if advice.odd:
        parts.append(_odd(advice))
    parts.append(_sizes(advice))
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
    times = "one exchange" if found["exchanges"] == 1 else f"{found['exchanges']} exchanges"
    parts.append(
        f"Cost: {times}, {megabytes(found['bytes_down'])} to and {megabytes(found['bytes_up'])} "
        "from each client. No model was sent and nothing trained."
        + (" The server learns the label counts of each client." if classes else "")
    )
    parts.append(
        "Limits: a random network may miss a difference, and groups that exist need not improve "
        'the models. After training, ask for the verdict, which uses held-out data (see "Should I '
        'cluster?" in the documentation).'
    )
    if measured := say_best(_measured_kind(advice)):
        parts.append(measured)
    return parts


def _measured_kind(advice: Advice) -> str:
    """The kind of difference in our measurements that is most like the one found."""
    found = advice.evidence
    if advice.kind == "meaning":
        return {True: "rotation", False: "concept shift", None: ""}[found["inputs_differ"]]
    if advice.kind != "labels":
        return ""
    overlap = found["label_overlap"]
    return "label skew 1" if overlap is not None and overlap < APART else "label skew 4"


COMPARE = 'train with groups and with one model (methods "survey" and "fedavg"), and compare.'


def _verdict(advice: Advice) -> str:
    k, found = advice.n_groups, advice.evidence
    rest = found["clients"] - len(advice.odd)
    others = "other clients" if advice.odd else "clients"
    if advice.kind == "one" and rest < 2:
        return (
            f"No groups: {len(advice.odd)} of {found['clients']} clients are odd, so only one is "
            "left, which is no group. Train one model for all and every client alone (methods "
            '"fedavg" and "local_only"), and compare.'
        )
    if advice.kind == "one":
        train = (
            'Train one model for them and each odd client alone (method "survey" does both).'
            if advice.odd
            else 'Train one model for all of them (method "fedavg").'
        )
        return f"One model: the {rest} {others} differ by no more than chance. {train}"
    if advice.kind == "client by client":
        if not found["proposal"]:
            return (
                "Client by client, in label frequencies only: every client has its own, and no "
                "groups explain them. Otherwise the clients are alike. Begin with one model for "
                'all (method "fedavg"). To find out whether clients gain from a model of their '
                'own, also train every client alone (method "local_only"), and compare.'
            )
        return (
            "Client by client: every client differs from all others, as writers or cameras do, and "
            f"no number of groups up to {found['max_groups']} describes them. One model may still "
            "work well for all of them. To find out, train one model and every client alone "
            '(methods "fedavg" and "local_only"), and compare. If you want to try groups, try '
            f"{found['proposal']}, but there is no evidence that they exist."
        )
    sizes = list(advice.assignment.values())
    counts = sorted((sizes.count(g) for g in set(sizes)), reverse=True)
    text = f"{k} groups ({join_words(counts)} clients). "
    if advice.kind == "meaning":
        return text + _meaning(found["inputs_differ"], found["inputs_p_value"])
    overlap = found["label_overlap"]
    text += "They differ in how often each label occurs, and in nothing else. "
    if overlap is not None and overlap < APART:
        return text + (
            "They have almost no label in common, so the model of a group has fewer classes to "
            f"tell apart. To find out whether they need a model each, {COMPARE}"
        )
    return text + (
        "They have many labels in common, so one model may be as good or better in the end. "
        f"To find out, {COMPARE}"
    )


def _meaning(inputs_differ: bool | None, chance: float | None) -> str:
    """In what groups differ, and what follows."""
    if inputs_differ is None:
        return (
            "They differ in their inputs, or in what is predicted from them. To find out whether "
            f"they need a model each, {COMPARE}"
        )
    if inputs_differ:
        return (
            "They differ in their inputs, and perhaps in what a label means. To find out whether "
            f"they need a model each, {COMPARE}"
        )
    return (
        "They differ in which inputs have which label. The inputs alone show no difference beyond "
        f"chance (p = {chance:.2g}), which does not prove that they are alike. If they are, a "
        "label means something else in each group, and one model would learn from contradictory "
        f"labels. To find out how much groups gain, {COMPARE}"
    )


def _odd(advice: Advice) -> str:
    """The odd clients, one sentence each."""
    said = " ".join(f"{name}: {text}." for name, text in list(advice.odd.items())[:10])
    more = f" And {len(advice.odd) - 10} more." if len(advice.odd) > 10 else ""
    one = len(advice.odd) == 1
    head = "1 odd client, unlike" if one else f"{len(advice.odd)} odd clients, each unlike"
    rest = (
        "Look at its data; training keeps it apart, with a model of its own."
        if one
        else "Look at their data; training keeps them apart, each with a model of its own."
    )
    return f"{head} all others. {said}{more} {rest}"


def _sizes(advice: Advice) -> str:
    """How much of the differences is explained, and how large they are."""
    found = advice.evidence
    chance = found["p_values"][-1] if found["p_values"] else 1.0
    if advice.kind == "one" and not advice.odd:
        return f"Size: no difference between clients is beyond chance (p = {chance:.2g})."
    near = f"; {LEVEL:g} or less would count" if LEVEL < chance <= 0.05 else ""
    more = "no" if chance > LEVEL else "still"
    left = f"The rest is {more} more than chance (p = {chance:.2g}{near})"
    if advice.kind == "labels":
        return (
            f"Size: the groups explain {_share(advice.explained)} of the differences in label "
            f"frequencies. {left}. The group of a row tells {_amount(advice.worth)} nats about "
            "its label."
        )
    if not found["proposal"] and advice.kind == "client by client":
        return "Size: only label frequencies differ by more than chance."
    parts = [f"the {advice.n_groups} groups"] if advice.kind == "meaning" else []
    one = len(advice.odd) == 1
    parts += ["the odd client" if one else "the odd clients"] if advice.odd else []
    who = " and ".join(parts) if parts else "the best division"
    single = not parts or (parts == ["the odd client"])
    return (
        f"Size: {who} explain{'s' if single else ''} "
        f"{_share(advice.explained)} of what differs between clients. {left}. On an untrained "
        f"network, the mean loss of a client typically differs by {_amount(advice.worth)} from "
        "that of all clients, after subtracting chance."
    )


def _share(part: float) -> str:
    return f"{100 * min(max(part, 0.0), 1.0):.0f} %"


def _amount(value: float) -> str:
    """
    >>> _amount(617.3), _amount(0.00612)
    ('617', '0.0061')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _doubts(advice: Advice) -> list[str]:
    found, doubts = advice.evidence, []
    if advice.confidence < 1:
        doubts.append(
            f"Two halves of the networks give different answers (agreement {advice.confidence:.2f} "
            "of 1), so the groups are uncertain."
        )
    if found["clients"] < FEW:
        doubts.append(f"With fewer than {FEW} clients, the number of groups is a guess.")
    if found["samples"]["median"] < 50:
        doubts.append("With fewer than 50 samples per client, small differences are lost in noise.")
    if found["set_aside"]:
        names = join_words(found["set_aside"][:5])
        doubts.append(f"Left out because their losses are not numbers: {names}.")
    if not found["classes"]:
        doubts.append("This advice has been tested little on data without classes.")
    return doubts
