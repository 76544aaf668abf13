"""The loop that every run goes through: step, commit, and now and then evaluate, save, show."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from coterie import metrics
from coterie.core.algorithm import Algorithm, grow, name_of
from coterie.core.errors import ConfigError, DataError, FederationError
from coterie.core.federation import Federation
from coterie.core.memory import Memory
from coterie.core.policy import as_policy
from coterie.core.tree import n_rows
from coterie.data import DataCard, FederatedData
from coterie.engines.faults import Faults
from coterie.engines.simulation import Simulation
from coterie.engines.stacking.chunks import chunk_size
from coterie.running.build import Description, Run, Settings, check, policy_of
from coterie.running.evaluation import Scores, evaluate, evaluate_later
from coterie.running.files import read
from coterie.running.final import Result, assignment_of, finish, held_split, mean, some, spread
from coterie.running.folder import RECORD, RunFolder, write
from coterie.running.held_out import HeldOut, rank_units
from coterie.running.privacy import count_releases, start_budget
from coterie.running.progress import Progress, choose_progress
from coterie.running.record import digest, moves
from coterie.running.start import initial_groups

MOST_MISSING = 100
"""Clients that did not answer, named in the line of a round."""


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
    ready = Run(algorithm, data, settings or Settings())
    check(ready)
    return begin(ready, out, progress)


def begin(
    ready: Run,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    replicate: int = 0,
) -> Result:
    """Run what has been checked already; replicates differ in the randomness of training alone."""
    show = choose_progress(progress)
    if out is None:
        return _run(ready, None, show, replicate)
    folder = RunFolder(out)
    with folder.lock():
        described = {**ready.description, "fingerprint": ready.data.fingerprint()}
        folder.create(described, ready.data.names)
        return _run(ready, folder, show, replicate)


def resume(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    out: str | Path,
    progress: bool | Progress = False,
    replicate: int = 0,
) -> Result:
    """Continue a run from its folder, exactly as if it had never stopped."""
    folder = RunFolder(out)
    if folder.description().get("fingerprint", "") not in ("", data.fingerprint()):
        raise DataError(
            f"{out}: the data must be those the run began with. They have changed. Restore the old "
            "files, or start a new run."
        )
    with folder.lock():
        ready = Run(algorithm, data, settings)
        return _run(ready, folder, choose_progress(progress), replicate)


def conduct(
    algorithm: Algorithm,
    card: DataCard,
    settings: Settings,
    fed: Federation,
    out: str | Path,
    progress: bool | Progress = False,
) -> Result:
    """Run a method on real clients, or go on where its run folder ends."""
    if settings.stop == "validation":
        raise ConfigError(
            'stop="validation" is for simulations: real clients keep their own memory. Leave it '
            "out, and choose the number of rounds."
        )
    folder = RunFolder(out)
    made = folder.description()
    with folder.lock():
        return _attempt(algorithm, card, settings, made, 0, folder, choose_progress(progress), fed)


def _run(ready: Run, folder: RunFolder | None, progress: Progress, replicate: int) -> Result:
    parts = ready.algorithm, ready.data, ready.settings, ready.description
    first = replicate * ready.settings.restarts
    if ready.settings.restarts == 1:
        return _attempt(*parts, first, folder, progress)
    results = []
    for number in range(ready.settings.restarts):
        own = None
        if folder is not None:
            own = RunFolder(folder.path / "restarts" / f"{number:02d}")
            if not (own.path / "run.json").exists():
                own.create(folder.description())
        results.append(_attempt(*parts, first + number, own, progress))
    losses = [result.summary["train_loss"] for result in results]
    best = min(range(len(losses)), key=lambda i: (losses[i] != losses[i], losses[i]))
    result = results[best]
    result.summary = {**result.summary, "restart": best, "restart_losses": losses}
    if folder is not None and result.folder is not None:
        kept = RunFolder(result.folder)
        for name in ("rounds.jsonl", "timings.jsonl", RECORD):
            write(folder.path / name, read(kept.path / name))
        folder.record("kept", attempt=best)
        folder.finish(kept.final_files(), result.summary)
        result.folder = folder.path
    progress.say(f"Kept attempt {best + 1} of {len(losses)}: the lowest training loss.")
    return result


def _attempt(
    algorithm: Algorithm,
    data: FederatedData | DataCard,
    settings: Settings,
    description: Description,
    restart: int,
    folder: RunFolder | None,
    progress: Progress,
    fed: Federation | None = None,
) -> Result:
    if isinstance(data, FederatedData):
        if settings.validation:
            data = data.hold_out(settings.validation, seed=settings.seed)
        fed = start_engine(algorithm, data, settings, description, restart, folder)
    assert fed is not None
    fed.start = initial_groups(settings.start, fed.names)
    plan = {} if folder is None else folder.description().get("plan", {})
    saved_policy = plan.get("policy")  # a later version may have another default
    fed.policy = as_policy(saved_policy) if saved_policy else policy_of(algorithm, settings)
    fed.budget = start_budget(settings, folder)
    _freeze(folder, fed)
    lines: list[dict[str, Any]] = []
    late: dict[str, Any] = {}
    scores: dict[str, Scores] = {}
    held = HeldOut(rank_units(data, held_split(data))) if isinstance(data, FederatedData) else None
    keeps = settings.stop == "validation"
    best: tuple[int, Any] | None = None  # the best round, and state and memory after it
    if folder is not None and any(folder.checkpoints.glob("*.json")):
        saved = folder.load(algorithm)
        done, state = saved.done, saved.state
        fed.restore(saved.memory)
        fed.traffic.totals = {tuple(k.split("/")): v for k, v in saved.traffic.items()}
        if held is not None and saved.held_out:
            held.restore(saved.held_out)
            best = None if saved.best is None else (held.best, saved.best)
        folder.trim(done)
        fed.record.restore(folder.lines())
        folder.record("resumed", round=done)
        fed.begin(done - 1)  # a run that had ended asks its last questions with the same keys
        known = assignment_of(state)
        _recall_budget(folder, fed, done)
    else:
        done = 0
        if not fed.simulated:
            _recall_budget(folder, fed, done)
        fed.begin(-1)
        state = algorithm.init(fed)
        fed.commit()
        if folder is not None and fed.budget is not None:
            folder.record("budget", round=0, releases=fed.budget.releases)
        _freeze(folder, fed)
        known = _note(folder, state, None)
        save_round(folder, 0, state, fed, held, best)
    turn = restart % settings.restarts + 1
    attempt = f", attempt {turn} of {settings.restarts}" if settings.restarts > 1 else ""
    progress.start(f"{name_of(algorithm)}{attempt}", settings.rounds, done)
    saved_rounds = done
    try:
        while done < settings.rounds and not algorithm.done(state):
            if fed.budget is not None and fed.budget.used_up:
                progress.say(f"The privacy budget is used up after {done - 1} rounds.")
                break
            if keeps and held is not None and _stale(held, done, settings):
                break
            began = time.perf_counter()
            with _ctrl_c():
                state, line, scores = run_round(
                    algorithm, data, settings, fed, state, done, late, held
                )
            done += 1
            if keeps and held is not None and held.best == done:
                memory = {str(client): tree for client, tree in fed.memory.committed.items()}
                best = done, {"state": state, "memory": memory}
            _freeze(folder, fed)
            known = _note(folder, state, known, line)
            if folder is None:
                lines.append(line)
            else:
                folder.append("rounds.jsonl", line)
                seconds = round(time.perf_counter() - began, 4)
                folder.append("timings.jsonl", {"round": done, "seconds": seconds})
            if settings.save_every and done % settings.save_every == 0:
                save_round(folder, done, state, fed, held, best)
                saved_rounds = done
            progress.round(line)
        if saved_rounds != done:
            save_round(folder, done, state, fed, held, best)
            saved_rounds = done
        if best is not None:
            state = best[1]["state"]
            fed.restore(Memory.of(best[1].get("memory") or {}))
            scores = scores if best[0] == done else {}
        if folder is not None:  # rounds are not kept in memory as well
            lines = folder.lines()
        parts = algorithm, data, settings, description, fed, state, lines, folder
        result = finish(*parts, scores, held, known)
    except KeyboardInterrupt:
        # Nothing is saved here: memory and traffic may already be those of the round under way.
        if folder is not None:
            rounds = f"{saved_rounds} of {settings.rounds} rounds are saved"
            progress.say(f"Stopped. {rounds}. Continue with: coterie resume {folder.whole}")
        raise
    finally:
        progress.end()
        fed.rest()
    return result


@contextmanager
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C counts even where a library swallows its exception or turns it into another."""
    old = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(old):
        yield
        return
    pressed = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        old(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if pressed:  # raised inside a library's C code, which reports an error of its own
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, old)
    if pressed:
        raise KeyboardInterrupt


def start_engine(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    description: Description,
    restart: int = 0,
    folder: RunFolder | None = None,
) -> Federation:
    """The engine, with the numeric plan the run began with, or a new one that is written down."""
    if folder is not None:
        description = folder.description()
    plan = description.get("plan", {})
    threads = plan.get("threads") or settings.threads
    if threads:
        torch.set_num_threads(threads)
    faults = None
    if settings.drop or settings.delay:
        deadline = settings.deadline or float("inf")
        faults = Faults(settings.drop, settings.delay, deadline, settings.seed)
    if settings.engine == "ray":
        from coterie.running.shards import start_shards

        return start_shards(algorithm, data, settings, description, restart, faults)
    return Simulation(
        data,
        settings.seed,
        settings.participation,
        stack=settings.engine == "stacked",
        wire=settings.engine == "wire",
        chunk=plan.get("chunk") or settings.chunk or chunk_size(algorithm, data),
        faults=faults,
        restart=restart,
        device=settings.device,
        workers=settings.workers,
        kernel=settings.kernel,
        choices=plan.get("kernels"),
    )


def _freeze(folder: RunFolder | None, fed: Federation) -> None:
    """Write the numeric plan down, so that the run is resumed with it."""
    if folder is None:
        return
    description = folder.description()
    plan = {**fed.plan, "policy": asdict(fed.policy)}
    if description.get("plan") != plan:
        folder.describe({**description, "plan": plan})
        folder.record("plan", plan=plan)


def _recall_budget(folder: RunFolder | None, fed: Federation, done: int) -> None:
    """Go on with what was spent; with real clients, write down what is spent before it is."""
    if folder is None or fed.budget is None:
        return
    fed.budget.releases = count_releases(folder, done, fed.simulated)
    if not fed.simulated:
        fed.budget.note = lambda releases: folder.record("budget", releases=releases)


def run_round(
    algorithm: Algorithm,
    data: FederatedData | DataCard,
    settings: Settings,
    fed: Federation,
    state: Any,
    number: int,
    late: dict[str, Any],
    held: HeldOut | None,
) -> tuple[Any, dict[str, Any], dict[str, Scores]]:
    """One round: the state, its line in the log, and the scores by split if there are any.

    An abandoned round leaves the state as it was and says why. `late` holds scores of an earlier
    round that arrived with this round's messages. `held` notes the losses on held-out rows.
    """
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
    scores: dict[str, Scores] = {}
    line |= late
    late.clear()
    due = settings.evaluate_every and (number + 1) % settings.evaluate_every == 0
    if fed.defers and due and not last:
        _evaluate_later(algorithm, fed, state, data.task, late)
    elif due or last:
        own = held_split(data)
        for split in dict.fromkeys(("test", own)):
            support = settings.support if split == "test" else "train"
            rows = held.rank.shape[1] if held is not None and split == own else 0
            scores[split] = evaluate(
                algorithm, fed, state, data.task, split=split, support=support, rows=rows
            )
        line |= {"evaluated": number + 1} if fed.defers else {}
        line |= _summarise(scores["test"], fed.policy.min_group)
        if "validation" in scores:
            line["validation_loss"] = mean(scores["validation"].loss, fed.policy.min_group)
        losses = scores[own].rows
        if held is not None and losses is not None:
            held.see(number + 1, scores[own].ids, losses)
    line |= _groups(before, state, data, info)
    line |= {name: value for name, value in info.items() if _shown(value)}
    line |= fed.record.take()
    if fed.budget is not None:
        line |= {"epsilon": round(fed.budget.epsilon, 6), "releases": fed.budget.releases}
    if fed.absent:
        line["missing"] = [fed.names[i] for i in sorted(fed.absent)[:MOST_MISSING]]
    line["bytes"] = fed.traffic.total()
    if fed.wire_bytes:
        line["wire"] = sum(fed.wire_bytes.values())  # of this server process, with evaluations
    return state, line, scores


def _evaluate_later(
    algorithm: Algorithm, fed: Federation, state: Any, kind: str, late: dict[str, Any]
) -> None:
    """Put the scores of this round's models into the line of the next round."""
    number = fed.round + 1

    def note(scores: Scores) -> None:
        late.update({"evaluated": number, **_summarise(scores, fed.policy.min_group)})

    evaluate_later(algorithm, fed, state, kind, note)


def _summarise(scores: Scores, fewest: int) -> dict[str, Any]:
    out: dict[str, Any] = {"loss": mean(scores.loss, fewest)}
    if len(accuracy := some(scores.accuracy)) >= fewest:
        found = spread(accuracy, fewest)
        out["accuracy"] = found["mean"]
        out |= {name: value for name, value in found.items() if name == "worst_decile"}
    if len(agreement := some(scores.agreement)) >= fewest:
        out["agreement"] = float(agreement.mean())
    return out


def _groups(
    before: Any, state: Any, data: FederatedData | DataCard, info: dict[str, Any]
) -> dict[str, Any]:
    """Sizes of the groups, share of clients that moved, agreement with the truth if known."""
    assignment = getattr(state, "assignment", None)
    if assignment is None:
        return {}
    seen = assignment >= 0
    k = n_rows(state.models) if hasattr(state, "models") else 1
    changed = (before.assignment != assignment) & (before.assignment >= 0)
    out: dict[str, Any] = {
        "sizes": torch.bincount(assignment[seen], minlength=k).tolist(),
        "churn": float(changed.double().mean()),
    }
    if data.truth is not None:
        truth = torch.as_tensor(data.truth)[: len(assignment)]
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


def _stale(held: HeldOut, done: int, settings: Settings) -> bool:
    """Whether the loss on validation rows has not become smaller for too long."""
    return done - held.best >= settings.patience * settings.evaluate_every


def save_round(
    folder: RunFolder | None,
    done: int,
    state: Any,
    fed: Federation,
    held: HeldOut | None,
    best: tuple[int, Any] | None,
) -> None:
    if folder is not None:
        traffic = {"/".join(key): amount for key, amount in fed.traffic.totals.items()}
        held_out = None if held is None else held.save()
        folder.save(done, state, traffic, fed.memory, held_out, best)
        fed.note_saved()


def _note(
    folder: RunFolder | None, state: Any, known: Tensor | None, line: dict[str, Any] | None = None
) -> Tensor | None:
    """Add to the record who moved where and which replies were faulty; the groups now."""
    now = assignment_of(state)
    if folder is None:
        return now
    if line is None:
        folder.record("started", moved=moves(known, now))
        return now
    for fault in line.get("faults", ()):
        folder.record("fault", round=line["round"], **fault)
    if "epsilon" in line:
        spent = {"epsilon": line["epsilon"], "releases": line["releases"]}
        folder.record("budget", round=line["round"], **spent)
    folder.record("round", round=line["round"], line=digest(line), moved=moves(known, now))
    return now
