"""What a finished run leaves: evidence for every place, a summary, the files people keep."""

import csv
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from coterie import metrics
from coterie.core import wire
from coterie.core.algorithm import Algorithm, Evidence, grow, name_of
from coterie.core.federation import BankRows, Each, Federation
from coterie.core.question import Question
from coterie.core.tree import BUFFER, Tree, named_leaves, row, take
from coterie.data import DataCard, FederatedData
from coterie.evidence.why import Sets
from coterie.running.build import Description, Settings
from coterie.running.evaluation import Oracle, Scores, count_labels, evaluate, place_all
from coterie.running.files import blame
from coterie.running.folder import RunFolder, no_nan, to_json
from coterie.running.held_out import HeldOut
from coterie.running.record import moves
from coterie.running.why import USUAL, Asking, Part, Who, explain


@dataclass(repr=False)
class Result:
    """A run that came to its end."""

    algorithm: Algorithm
    data: FederatedData | DataCard
    fed: Federation
    state: Any
    rounds: list[dict[str, Any]]
    evidence: Evidence
    scores: Scores
    train: Scores  # the same on the data that trained
    summary: dict[str, Any]
    description: dict[str, Any]
    clients: list[dict[str, Any]] = field(default_factory=list, repr=False)  # a row per client
    held_out: dict[str, Any] = field(default_factory=dict, repr=False)  # see `describe_held_out`
    # Losses of each client's held-out units at the best round. [m, u]
    held_losses: Tensor = field(default_factory=lambda: torch.zeros(0, 0), repr=False)
    files: dict[str, bytes] = field(default_factory=dict, repr=False)  # what final/ holds
    folder: Path | None = None

    def __repr__(self) -> str:
        name, n = self.summary["algorithm"], self.summary["clients"]
        return f"Result({name}, {n} clients, {len(self.rounds)} rounds)"


def assignment_of(state: Any) -> Tensor | None:
    """The group of every client in a state; None for a method without groups."""
    assignment = getattr(state, "assignment", None)
    return assignment if isinstance(assignment, Tensor) else None


def some(values: Tensor) -> Tensor:
    """The values that are numbers."""
    return values[~values.isnan()]


def mean(values: Tensor, fewest: int = 1) -> float | None:
    """The mean of those that are numbers; None if they are fewer than `fewest`."""
    numbers = some(values)
    return float(numbers.mean()) if len(numbers) >= max(fewest, 1) else None


def spread(accuracy: Tensor, fewest: int) -> dict[str, Any]:
    """How the clients' accuracies differ, without what concerns fewer than `fewest` clients."""
    found: dict[str, Any] = dict(metrics.spread(accuracy))
    single = (
        {"min", "median"} if len(accuracy) // 10 >= fewest else {"worst_decile", "min", "median"}
    )
    return {name: found[name] for name in found if fewest == 1 or name not in single}


def finish(
    algorithm: Algorithm,
    data: FederatedData | DataCard,
    settings: Settings,
    description: Description,
    fed: Federation,
    state: Any,
    lines: list[dict[str, Any]],
    folder: RunFolder | None,
    scores: dict[str, Scores],
    held: HeldOut | None,
    known: Tensor | None,
) -> Result:
    """Place every client, score the final models, and write the files of the result.

    `scores` are those of the last round by split, if this process has run it. `held` knows the
    losses on held-out rows. `known` are the groups in the record so far.
    """
    if isinstance(data, DataCard):
        data = replace(data, names=fed.names)
    everyone = fed.everyone()
    with fed.aside(support=settings.support):
        scored = place_all(algorithm, fed, grow(state, fed.n_clients), everyone)
        state, evidence = algorithm.place(fed, scored, everyone)
    given = [algorithm.deploy(one, everyone) for one in (scored, state)]
    same = bool(lines) and _equal(*given)
    asks = held is not None and not held.best and held_split(data) == "test"
    rows = held.rank.shape[1] if held is not None and asks else 0  # no round was evaluated
    test = _score(algorithm, fed, state, data.task, same, scores.get("test"), rows)
    if held is not None and asks and test.rows is not None:
        held.see(len(lines), test.ids, test.rows)
    train = evaluate(algorithm, fed, state, data.task, split="train")
    summary = _summary(algorithm, data, fed, state, lines, test, train)
    result = Result(algorithm, data, fed, state, lines, evidence, test, train, summary, description)
    result.clients = no_nan(list_clients(result))
    if settings.stop == "validation" and held is not None:
        summary["kept_round"] = held.best
    result.held_out = no_nan(describe_held_out(result, settings.stop, held))
    result.held_losses = torch.zeros(0, 0) if held is None else held.losses
    result.files = _final_files(result) | explain_groups(result, settings.why)
    if folder is not None:
        folder.record("placed", moved=moves(known, assignment_of(state)))
        folder.finish(result.files, summary)
        result.folder = folder.path
    return result


def _score(
    algorithm: Algorithm,
    fed: Federation,
    state: Any,
    task: str,
    same: bool,
    known: Scores | None,
    rows: int,
) -> Scores:
    """The final scores on test rows; those of the last round if the models are the same."""
    if same and known is not None and len(known.ids) == fed.n_clients:
        return known
    paid = dict(fed.traffic.totals)
    scores = evaluate(algorithm, fed, state, task, rows=rows)
    if same:  # a resumed run: the last round, in another process, has counted this traffic
        fed.traffic.totals = paid
    return scores


def _equal(one: Any, other: Any) -> bool:
    """Whether two deployments hand every client the same values."""
    if isinstance(one, BankRows):
        return torch.equal(one.index, other.index) and _equal(one.bank, other.bank)
    if isinstance(one, Each):
        return _equal(one.tree, other.tree)
    ours, theirs = named_leaves(one), named_leaves(other)
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a.shape == b.shape and _agree(a, b) for (_, a), (_, b) in pairs)


def _agree(one: Tensor, other: Tensor) -> bool:
    return one is other or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _summary(
    algorithm: Algorithm,
    data: FederatedData | DataCard,
    fed: Federation,
    state: Any,
    lines: list[dict[str, Any]],
    scores: Scores,
    train: Scores,
) -> dict[str, Any]:
    oracle, fewest = Oracle(algorithm, fed, state, data), fed.policy.min_group
    ari = [line.get("ari") for line in lines]
    phases: dict[str, dict[str, int]] = {}
    for (phase, direction), amount in fed.traffic.totals.items():
        phases.setdefault(phase, {})[direction] = int(amount.sum())
    summary: dict[str, Any] = {
        "algorithm": name_of(algorithm),
        "rounds": len(lines),
        "clients": len(scores.ids),
        "loss": mean(scores.loss, fewest),
        "train_loss": mean(train.loss, fewest),
        "personal": type(algorithm).personalise is not Algorithm.personalise,
    }
    if len(accuracy := some(scores.accuracy)) >= fewest:
        summary["accuracy"] = spread(accuracy, fewest)
    if len(agreement := some(scores.agreement)) >= fewest:
        summary["agreement"] = spread(agreement, fewest)
    if hasattr(state, "members"):
        summary["components"] = int(state.members.max()) + 1
    if hasattr(state, "assignment"):
        known = state.assignment[state.assignment >= 0]  # a real client may never have answered
        groups, sizes = known.unique(return_counts=True)
        summary["groups"] = dict(zip(map(str, groups.tolist()), sizes.tolist(), strict=True))
        if data.truth is not None:
            summary["ari"], summary["identity"] = oracle.ari(), oracle.identity()
            with blame("rounds.jsonl"):
                summary["first_round_ari_0.9"] = metrics.first_round(ari, 0.9)
    if len(odd := algorithm.odd(state)):
        summary["odd"] = [fed.names[i] for i in odd.tolist()]
    if curves := algorithm.curves(state):
        summary["evidence"] = no_nan([curve._asdict() for curve in curves])
    if (mixture := oracle.mixture()) is not None:
        summary["mixture"] = no_nan(mixture)
        if len(own := some(train.accuracy)) >= fewest:
            summary["train_accuracy"] = float(own.mean())
    distance = oracle.parameter_distance()
    if distance is not None:
        summary["parameter_distance"] = distance
    summary["bytes"] = fed.traffic.total()
    summary["traffic"] = phases
    summary["abandoned_rounds"] = sum("abandoned" in line for line in lines)
    summary["policy"] = fed.policy.mean
    if fewest > 1:
        summary["min_group"] = fewest
    if fed.budget is not None:
        summary["epsilon"] = round(fed.budget.epsilon, 6)
    if fed.record.counts:
        summary["faults"] = dict(sorted(fed.record.counts.items()))
    if fed.record.aside:
        summary["aside"] = dict(sorted(fed.record.aside.items()))
    return summary


def _final_files(result: Result) -> dict[str, bytes]:
    """The state, client memory, a file per model under the network's own names, and the groups."""
    files = {"state.safetensors": wire.dump({"state": result.state})}
    # Sorted: a resumed run holds clients in another order than one that never stopped.
    committed = sorted(result.fed.memory.committed.items())
    memory = {str(client): tree for client, tree in committed if tree}
    if memory and result.fed.simulated:  # real clients keep theirs
        files["memory.safetensors"] = wire.dump(memory)
    given = result.algorithm.deploy(result.state, result.fed.everyone())
    if isinstance(given, BankRows):
        members = torch.bincount(given.index)
        for number, group in enumerate(given.index.unique().tolist()):
            if int(members[group]) < result.fed.policy.min_group:
                continue
            files[f"model-{number}.safetensors"] = _plain_weights(row(given.bank, group))
    elif given and not isinstance(given, Each):  # a model of each client's own is in the state
        files["model.safetensors"] = _plain_weights(given)
    card = result.data if isinstance(result.data, DataCard) else DataCard.of(result.data)
    files["data.json"] = to_json(card.to_dict())
    files["groups.json"] = to_json(no_nan({"groups": group_cards(result)}))
    files["held_out.json"] = to_json(result.held_out)
    files["held_out.safetensors"] = wire.dump({"losses": result.held_losses})
    return {**files, **write_clients(result.clients)}


def write_clients(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """The files with a row per client."""
    return {"clients.json": to_json({"clients": rows}), "clients.csv": as_csv(rows)}


def describe_held_out(result: Result, stop: str, held: HeldOut | None) -> dict[str, Any]:
    """What a verdict has to know of a run besides the losses of its held-out rows.

    Held-out rows are validation rows if there are any, else test rows.
    """
    split = held_split(result.data)
    name = "loss" if split == "test" else "validation_loss"
    train = result.train
    return {
        "split": split,
        "stop": stop,
        "clients": [result.fed.names[i] for i in train.ids.tolist()],
        "trained_on": train.n.tolist(),  # rows
        "rounds": len(result.rounds),
        "best_round": len(result.rounds) if held is None else held.best,
        "by_round": [[line["round"], line[name]] for line in result.rounds if name in line],
        "bytes": result.summary["bytes"],
    }


def held_split(data: FederatedData | DataCard) -> str:
    """Where the rows are that train nothing: "validation" if there are any here, else "test"."""
    there = isinstance(data, FederatedData) and bool(data.sizes("validation").any())
    return "validation" if there else "test"


def group_cards(result: Result) -> list[dict[str, Any]]:
    """Each group in figures: members, labels, losses on all models, the nearest other group."""
    algorithm, data, fed, scores = result.algorithm, result.data, result.fed, result.scores
    counts = None
    # Real clients keep the distribution of their labels to themselves.
    if data.task == "classification" and isinstance(data, FederatedData) and fed.budget is None:
        with fed.aside():
            # Labels need no memory, and clients nobody has asked yet have another than the rest.
            ask = Question(
                count_labels,
                algorithm,
                {"n_classes": data.n_outputs},
                stackable=algorithm.supervised,
            )
            heard, reply = fed.map(ask, to=scores.ids, at_least=0)
        counts = torch.zeros(len(scores.ids), data.n_outputs, dtype=torch.float64)
        if len(heard):  # a client that is asked no more has no counts
            counts[torch.isin(scores.ids, heard)] = reply["counts"].double()
    classes = data.classes or [str(c) for c in range(data.n_outputs)]
    profiles = algorithm.profiles(result.state)
    cards = []
    used = used_groups(result.evidence)
    # A client that is trained alone has a model of its own, after those of the groups.
    odd, fewest = algorithm.odd(result.state), fed.policy.min_group
    hidden = hide_groups(result.evidence.group, fewest)
    shown = used[: 0 if profiles is None else int((used < len(profiles)).sum())]
    for number, group in enumerate(used.tolist()):
        member = result.evidence.group == group
        margins = some(result.evidence.margin[member])
        one: dict[str, Any] = {
            "group": number,
            "model": group,  # its row in the state
            "clients": [fed.names[i] for i in scores.ids[member].tolist()],
            "loss": mean(scores.loss[member], fewest),
            "margin": float(margins.median()) if len(margins) else None,
        }
        if bool(torch.isin(scores.ids[member], odd).all()):
            one["odd"] = True  # a client on its own, and no group
        if data.task == "classification":
            one["accuracy"] = mean(scores.accuracy[member], fewest)
        if counts is not None and bool(counts[member].any()):
            shares = counts[member].sum(0) / counts[member].sum()
            one["labels"] = dict(zip(map(str, classes), shares.tolist(), strict=True))
        if profiles is not None and number < len(shown) and not profiles[group].isnan().any():
            apart = (profiles[shown] - profiles[group]).norm(dim=1)
            apart[number] = torch.nan
            one["loss_profile"] = profiles[group][shown].tolist()
            if not bool(apart.isnan().all()):
                one["nearest"] = int(torch.where(apart.isnan(), torch.inf, apart).argmin())
        if group in hidden:
            known = ("group", "model", "clients", "odd")
            one = {name: one[name] for name in known if name in one} | {
                "margin": None,
                "loss": None,
            }
        cards.append(one)
    return cards


def hide_groups(group: Tensor, fewest: int) -> set[int]:
    """Groups whose figures are not shown: those of fewer clients, and no remainder that small.

    Figures of all clients less those of the other groups are those of the groups that are left out.

    >>> sorted(hide_groups(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, -1]), 3))
    [1, 2]
    """
    sizes = torch.bincount(group[group >= 0])
    order = [int(one) for one in sizes.argsort(stable=True) if int(sizes[one])]
    hidden = {one for one in order if int(sizes[one]) < fewest}
    left = int(sum(sizes[one] for one in hidden))
    rest = [one for one in order if one not in hidden]
    if 0 < left < fewest and rest:
        hidden.add(rest[0])
    return hidden


def explain_groups(result: Result, parts: str | tuple[Part, ...]) -> dict[str, bytes]:
    """The files that say in what the groups differ; none if clients may be asked nothing.

    The rows are those that trained nothing. If there are none, they are the training rows.
    """
    data, fed, state = result.data, result.fed, result.state
    if isinstance(parts, str):
        parts = USUAL if isinstance(data, FederatedData) else ()
    group = result.evidence.group
    if not parts or fed.budget is not None or hide_groups(group, fed.policy.min_group):
        return {}
    ids = result.scores.ids
    used, odd = used_groups(result.evidence), torch.isin(ids, result.algorithm.odd(state))
    placed = result.evidence.group >= 0
    labels = torch.searchsorted(used, result.evidence.group[placed])
    names = [fed.names[i] for i in ids[placed].tolist()]
    who = Who(ids[placed], Sets(labels, odd[placed]), names)
    split = held_split(data)
    fresh = not isinstance(data, FederatedData) or bool(data.sizes(split).any())
    card = data if isinstance(data, DataCard) else DataCard.of(data)
    asking = Asking(fed, result.algorithm, card, who, split if fresh else "train")
    with fed.aside():
        found, images = explain(asking, parts, _group_models(result, who))
    if not fresh:
        found["notes"].append(
            "No rows are held out, so training rows were compared: groups that were formed by "
            "chance may look different."
        )
    files = {"why.json": to_json(found)}
    return files | ({"why_images.safetensors": wire.dump(images)} if images else {})


def _group_models(result: Result, who: Who) -> Tree | None:
    """The model of each group, stacked; None if groups have none that could be compared."""
    algorithm, sets = result.algorithm, who.sets
    own = type(algorithm).personalise is not Algorithm.personalise
    if own or not algorithm.supervised or not bool((~sets.odd).any()):
        return None
    given = algorithm.deploy(result.state, who.ids)
    if not isinstance(given, BankRows):
        return None
    k = int(sets.labels[~sets.odd].max()) + 1
    first = torch.stack([given.index[sets.labels == number][0] for number in range(k)])
    return take(given.bank, first)


def used_groups(evidence: Evidence) -> Tensor:
    """Groups that have members; they are numbered without the models nobody uses."""
    return evidence.group[evidence.group >= 0].unique()


def _plain_weights(params: Tree) -> bytes:
    plain = {"/".join(path).removeprefix(BUFFER): leaf for path, leaf in named_leaves(params)}
    return save_tensors({name: leaf.contiguous().clone() for name, leaf in plain.items()})


def list_clients(result: Result) -> list[dict[str, Any]]:
    """A row per client: its group, how clear that is, and its score on its own test data.

    The score is the accuracy, or the root mean squared error in the unit of the labels.
    """
    evidence, scores, data = result.evidence, result.scores, result.data
    column, score = "accuracy", scores.accuracy
    if not result.algorithm.supervised:
        column, score = "surprise", scores.loss
    elif data.task != "classification":
        scale = data.encoder.target_scale if data.encoder is not None else ()
        column, score = "error", scores.loss.sqrt() * (scale[0] if len(scale) == 1 else 1.0)
    used = used_groups(evidence)
    has_place = (evidence.group >= 0).tolist()
    mixture = result.algorithm.mixture(result.state, scores.ids)
    if single := result.fed.policy.min_group > 1:  # nothing about a single client
        score, mixture = score * torch.nan, None

    def shares(i: int) -> dict[str, Any]:
        """Shares of components with their standard errors, for methods that estimate them."""
        if mixture is None:
            return {}
        pairs = zip(mixture.shares[i].tolist(), mixture.errors[i].tolist(), strict=True)
        return {
            name: round(value, 6) if value == value else value
            for j, (share, error) in enumerate(pairs)
            for name, value in ((f"share {j}", share), (f"error {j}", error))
        }

    return [
        {
            "client": result.fed.names[client],
            "group": int(torch.searchsorted(used, evidence.group[i])) if has_place[i] else -1,
            "margin": float("nan") if single else float(evidence.margin[i]),
            "fits": bool(evidence.fits[i]),
            column: float(score[i]),
            **shares(i),
        }
        for i, client in enumerate(scores.ids.tolist())
    ]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    """Rows as CSV; a cell is empty where there is no number."""
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    for line in rows:
        table.writerow(line)
    return text.getvalue().encode()
