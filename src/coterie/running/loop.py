"""The loop: the only one. State, step, commit; every so often examine, save, show."""

import csv
import io
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from coterie import metrics
from coterie.core import wire
from coterie.core.algorithm import Algorithm, Evidence, grow, name_of
from coterie.core.errors import DataError, FederationError
from coterie.core.federation import Rows
from coterie.core.tree import BUFFER, Tree, named_leaves, row
from coterie.data import Encoder, FederatedData
from coterie.engines.chunks import chunk_size
from coterie.engines.faults import Faults
from coterie.engines.simulation import Simulation
from coterie.running.build import Settings, check, describe
from coterie.running.evaluation import LabelCounts, Oracle, Scores, examine, placed
from coterie.running.folder import RunFolder, no_nan, to_json
from coterie.running.progress import Progress, chosen


@dataclass
class Result:
    """A run that came to its end."""

    algorithm: Algorithm
    data: FederatedData
    fed: Simulation
    state: Any
    rounds: list[dict[str, Any]]
    evidence: Evidence
    scores: Scores
    summary: dict[str, Any]
    description: dict[str, Any]
    files: dict[str, bytes] = field(repr=False)  # what final/ holds
    folder: Path | None = None


def run(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = False,
) -> Result:
    """Run a method on data.

    Parameters
    ----------
    out
        Run folder to write; it must not exist. None: nothing is written.
    progress
        Show rounds as they pass.
    """
    settings = settings or Settings()
    check(algorithm, data)
    folder = None if out is None else RunFolder(out)
    if folder is not None:
        description = describe(algorithm, data, settings)
        folder.create({**description, "fingerprint": data.fingerprint()})
    return _run(algorithm, data, settings, folder, chosen(progress))


def resume(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    out: str | Path,
    progress: bool | Progress = False,
) -> Result:
    """Continue a run from its folder, exactly as if it had never stopped."""
    if RunFolder(out).description().get("fingerprint", "") not in ("", data.fingerprint()):
        raise DataError(
            f"{out}: the data are not those the run began with. Put the old files back, or start a "
            "new run."
        )
    return _run(algorithm, data, settings, RunFolder(out), chosen(progress))


def _run(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    folder: RunFolder | None,
    progress: Progress,
) -> Result:
    if settings.restarts == 1:
        return _attempt(algorithm, data, settings, 0, folder, progress)
    results = []
    for number in range(settings.restarts):
        own = None
        if folder is not None:
            own = RunFolder(folder.path / "restarts" / f"{number:02d}")
            if not (own.path / "run.json").exists():
                own.create(folder.description())
        results.append(_attempt(algorithm, data, settings, number, own, progress))
    losses = [result.summary["train_loss"] for result in results]
    best = min(range(len(losses)), key=lambda i: (losses[i] != losses[i], losses[i]))
    result = results[best]
    result.summary = {**result.summary, "restart": best, "restart_losses": losses}
    if folder is not None and result.folder is not None:
        for name in ("rounds.jsonl", "timings.jsonl"):
            shutil.copy(result.folder / name, folder.path / name)
        folder.finish(RunFolder(result.folder).final_files(), result.summary)
        result.folder = folder.path
    progress.say(f"Kept attempt {best + 1} of {len(losses)}: the lowest training loss.")
    return result


def _attempt(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    restart: int,
    folder: RunFolder | None,
    progress: Progress,
) -> Result:
    if settings.validation:
        data = data.hold_out(settings.validation, seed=settings.seed)
    fed = _federation(algorithm, data, settings, restart, folder)
    lines: list[dict[str, Any]] = []
    if folder is not None and any(folder.checkpoints.glob("*.json")):
        done, state, traffic, fed.memory = folder.load(algorithm)
        fed.traffic.totals = {tuple(k.split("/")): v for k, v in traffic.items()}
        folder.trim(done)
        lines = folder.lines()
    else:
        done = 0
        fed.begin(-1)
        state = algorithm.init(fed)
        fed.commit()
        _save(folder, 0, state, fed)
    attempt = f", attempt {restart + 1} of {settings.restarts}" if settings.restarts > 1 else ""
    progress.start(f"{name_of(algorithm)}{attempt}", settings.rounds, done)
    saved = done
    try:
        while done < settings.rounds and not algorithm.done(state):
            began = time.perf_counter()
            state, line = _round(algorithm, data, settings, fed, state, done)
            done += 1
            lines.append(line)
            if folder is not None:
                folder.append("rounds.jsonl", line)
                seconds = round(time.perf_counter() - began, 4)
                folder.append("timings.jsonl", {"round": done, "seconds": seconds})
            if settings.save_every and done % settings.save_every == 0:
                _save(folder, done, state, fed)
                saved = done
            progress.round(line)
        if saved != done:
            _save(folder, done, state, fed)
            saved = done
        result = _finish(algorithm, data, settings, fed, state, lines, folder)
    except KeyboardInterrupt:
        # Nothing is saved here: memory and traffic may already be those of the round under way.
        if folder is not None:
            rounds = f"{saved} of {settings.rounds} rounds are saved"
            progress.say(f"Stopped. {rounds}. Go on with: coterie resume {folder.whole}")
        raise
    finally:
        progress.end()
    return result


def _federation(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    restart: int,
    folder: RunFolder | None,
) -> Simulation:
    """The engine, with the numeric plan the run began with, or a new one that is written down."""
    description = folder.description() if folder is not None else {}
    plan = description.get("plan", {})
    threads = plan.get("threads") or settings.threads
    if threads:
        torch.set_num_threads(threads)
    faults = None
    if settings.drop or settings.delay:
        deadline = settings.deadline or float("inf")
        faults = Faults(settings.drop, settings.delay, deadline, settings.seed)
    fed = Simulation(
        data,
        settings.seed,
        settings.participation,
        stack=settings.engine == "stacked",
        wire=settings.engine == "wire",
        chunk=plan.get("chunk") or settings.chunk or chunk_size(algorithm, data),
        faults=faults,
        restart=restart,
        device=settings.device,
    )
    if folder is not None and not plan:
        folder.describe({**description, "plan": fed.plan})
    return fed


def _round(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    fed: Simulation,
    state: Any,
    number: int,
) -> tuple[Any, dict[str, Any]]:
    """One round: an abandoned one leaves the state as it was and says why."""
    fed.begin(number)
    state = before = grow(state, fed.n_clients)
    line: dict[str, Any] = {"round": number + 1}
    try:
        state, info = algorithm.step(fed, before)
        fed.commit()
    except FederationError as error:
        fed.rollback()
        info = {"abandoned": str(error)}
    last = number + 1 == settings.rounds or algorithm.done(state)
    if (settings.evaluate_every and (number + 1) % settings.evaluate_every == 0) or last:
        scores = examine(algorithm, fed, state, data.task, support=settings.support)
        line["loss"] = _mean(scores.loss)
        if len(accuracy := _some(scores.accuracy)):
            line["accuracy"] = float(accuracy.mean())
            line["worst_decile"] = metrics.spread(accuracy)["worst_decile"]
    line |= _groups(before, state, data, info)
    line |= {name: value for name, value in info.items() if _shown(value)}
    line["bytes"] = fed.traffic.total()
    return state, line


def _groups(before: Any, state: Any, data: FederatedData, info: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the groups, who moved, and agreement with the truth where it is known."""
    assignment = getattr(state, "assignment", None)
    if assignment is None:
        return {}
    seen = assignment >= 0
    k = len(next(iter(state.models.values()))) if hasattr(state, "models") else 1
    changed = (before.assignment != assignment) & (before.assignment >= 0)
    out: dict[str, Any] = {
        "sizes": torch.bincount(assignment[seen], minlength=k).tolist(),
        "churn": float(changed.double().mean()),
    }
    if data.truth is not None:
        truth = data.truth[: len(assignment)]
        out["ari"] = metrics.adjusted_rand(assignment, truth)
        out["identity"] = metrics.identity_accuracy(assignment, truth)
        took_part = info.get("participants", assignment)
        if len(took_part) < len(assignment):
            out["ari_participants"] = metrics.adjusted_rand(assignment, truth, on=took_part)
    if len(assignment) <= 1000:
        out["assignment"] = assignment.tolist()
    return out


def _shown(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _some(values: Tensor) -> Tensor:
    return values[~values.isnan()]


def _mean(values: Tensor) -> float | None:
    some = _some(values)
    return float(some.mean()) if len(some) else None


def _save(folder: RunFolder | None, done: int, state: Any, fed: Simulation) -> None:
    if folder is not None:
        traffic = {"/".join(key): amount for key, amount in fed.traffic.totals.items()}
        folder.save(done, state, traffic, fed.memory)


def _finish(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    fed: Simulation,
    state: Any,
    lines: list[dict[str, Any]],
    folder: RunFolder | None,
) -> Result:
    """The last exam, the evidence for everyone's place, and the files people keep."""
    everyone = fed.everyone()
    with fed.aside(support=settings.support):
        state = placed(algorithm, fed, grow(state, fed.n_clients), everyone)
        state, evidence = algorithm.place(fed, state, everyone)
    scores = examine(algorithm, fed, state, data.task)
    train = examine(algorithm, fed, state, data.task, split="train")
    summary = _summary(algorithm, data, fed, state, lines, scores, train)
    description = describe(algorithm, data, settings)
    result = Result(algorithm, data, fed, state, lines, evidence, scores, summary, description, {})
    result.files = _final_files(result)
    if folder is not None:
        folder.finish(result.files, summary)
        result.folder = folder.path
    return result


def _summary(
    algorithm: Algorithm,
    data: FederatedData,
    fed: Simulation,
    state: Any,
    lines: list[dict[str, Any]],
    scores: Scores,
    train: Scores,
) -> dict[str, Any]:
    oracle = Oracle(algorithm, fed, state, data)
    ari = [line.get("ari") for line in lines]
    phases: dict[str, dict[str, int]] = {}
    for (phase, direction), amount in fed.traffic.totals.items():
        phases.setdefault(phase, {})[direction] = int(amount.sum())
    summary: dict[str, Any] = {
        "algorithm": name_of(algorithm),
        "rounds": len(lines),
        "clients": len(scores.ids),
        "loss": _mean(scores.loss),
        "train_loss": _mean(train.loss),
        "personal": type(algorithm).personalise is not Algorithm.personalise,
    }
    if len(accuracy := _some(scores.accuracy)):
        summary["accuracy"] = metrics.spread(accuracy)
    if hasattr(state, "assignment"):
        groups, sizes = state.assignment.unique(return_counts=True)
        summary["groups"] = dict(zip(map(str, groups.tolist()), sizes.tolist(), strict=True))
        if data.truth is not None:
            summary["ari"], summary["identity"] = oracle.ari(), oracle.identity()
            summary["first_round_ari_0.9"] = metrics.first_round(ari, 0.9)
    distance = oracle.parameter_distance()
    if distance is not None:
        summary["parameter_distance"] = distance
    summary["bytes"] = fed.traffic.total()
    summary["traffic"] = phases
    summary["abandoned_rounds"] = sum("abandoned" in line for line in lines)
    return summary


def _final_files(result: Result) -> dict[str, bytes]:
    """The state, client memory, a file per model under the network's own names, and the groups."""
    files = {"state.safetensors": wire.dump({"state": result.state})}
    # Sorted: a resumed run holds clients in another order than one that never stopped.
    committed = sorted(result.fed.memory.committed.items())
    memory = {str(client): tree for client, tree in committed if tree}
    if memory:
        files["memory.safetensors"] = wire.dump(memory)
    given = result.algorithm.deploy(result.state, result.fed.everyone())
    if isinstance(given, Rows):
        for number, group in enumerate(given.index.unique().tolist()):
            files[f"model-{number}.safetensors"] = _plain_weights(row(given.bank, group))
    elif given:
        files["model.safetensors"] = _plain_weights(given)
    rows = clients(result)
    files["clients.json"] = to_json(no_nan({"clients": rows}))
    files["clients.csv"] = as_csv(rows)
    files["data.json"] = to_json(card(result.data))
    files["groups.json"] = to_json(no_nan({"groups": group_cards(result)}))
    return files


def card(data: FederatedData) -> dict[str, Any]:
    """What must be known of the data to use the models later; no data."""
    return {
        "task": data.task,
        "n_outputs": data.n_outputs,
        "classes": None if data.classes is None else list(data.classes),
        "sample_shape": data.sample_shape,
        "names": list(data.names),
        "truth": None if data.truth is None else data.truth.tolist(),
        "encoder": _encoder(data).to_dict(),
        "notes": list(data.notes),
    }


def _encoder(data: FederatedData) -> Encoder:
    """The rules new rows go through; made problems have none, and take arrays as they are."""
    if data.encoder is not None or isinstance(data.sample_shape, dict):
        return data.encoder or Encoder(task=data.task, classes=data.classes)
    sample = data.gather("train", torch.tensor([0])).x[0]
    return Encoder.of_arrays(sample, data.task, data.classes)


def group_cards(result: Result) -> list[dict[str, Any]]:
    """Each group in figures: members, labels, losses on all models, the nearest other group."""
    algorithm, data, fed, scores = result.algorithm, result.data, result.fed, result.scores
    counts = None
    if data.task == "classification":
        with fed.aside():
            _, reply = fed.map(LabelCounts(algorithm, data.n_outputs), to=scores.ids)
        counts = reply["counts"].double()
    classes = data.classes or [str(c) for c in range(data.n_outputs)]
    reference = getattr(result.state, "reference", None)
    cards = []
    used = result.evidence.group.unique()
    for number, group in enumerate(used.tolist()):
        member = result.evidence.group == group
        margins = _some(result.evidence.margin[member])
        one: dict[str, Any] = {
            "group": number,
            "model": group,  # its row in the state
            "clients": [fed.names[i] for i in scores.ids[member].tolist()],
            "loss": _mean(scores.loss[member]),
            "margin": float(margins.median()) if len(margins) else None,
        }
        if counts is not None:
            shares = counts[member].sum(0) / counts[member].sum()
            one["accuracy"] = _mean(scores.accuracy[member])
            one["labels"] = dict(zip(map(str, classes), shares.tolist(), strict=True))
        if reference is not None and not bool(reference.centroids[group].isnan().any()):
            apart = (reference.centroids[used] - reference.centroids[group]).norm(dim=1)
            apart[number] = torch.nan
            one["loss_profile"] = reference.centroids[group][used].tolist()
            if not bool(apart.isnan().all()):
                one["nearest"] = int(torch.where(apart.isnan(), torch.inf, apart).argmin())
        cards.append(one)
    return cards


def _plain_weights(params: Tree) -> bytes:
    plain = {"/".join(path).removeprefix(BUFFER): leaf for path, leaf in named_leaves(params)}
    return save_tensors({name: leaf.contiguous().clone() for name, leaf in plain.items()})


def clients(result: Result) -> list[dict[str, Any]]:
    """A row per client: its group, how clear that is, and its score on its own test data.

    The score is the accuracy, or the root mean squared error in the unit of the labels.
    """
    evidence, scores, data = result.evidence, result.scores, result.data
    column, score = "accuracy", scores.accuracy
    if data.task != "classification":
        scale = data.encoder.target_scale if data.encoder is not None else ()
        column, score = "error", scores.loss.sqrt() * (scale[0] if len(scale) == 1 else 1.0)
    used = evidence.group.unique()  # groups are numbered without the models nobody uses
    return [
        {
            "client": result.fed.names[client],
            "group": int(torch.searchsorted(used, evidence.group[i])),
            "margin": float(evidence.margin[i]),
            "fits": bool(evidence.fits[i]),
            column: float(score[i]),
        }
        for i, client in enumerate(scores.ids.tolist())
    ]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    """Rows as CSV; empty where there is no number."""
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    for line in rows:
        table.writerow({name: "" if value != value else value for name, value in line.items()})
    return text.getvalue().encode()
