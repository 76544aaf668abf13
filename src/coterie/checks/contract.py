"""The contract: what every method must do. A check is called with a maker and an engine."""

import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.checks.problem import Guarded, Problem, tiny
from coterie.checks.trial import (
    EXACTLY,
    ROUNDING,
    Exchange,
    Make,
    advance,
    answers,
    difference,
    model_leaves,
    not_finite,
    outcome,
    states,
    traces,
    watch,
)
from coterie.core import wire
from coterie.core.algorithm import per_client_fields, state_type
from coterie.core.memory import Memory
from coterie.core.tree import Tree, n_bytes
from coterie.engines.faults import Faults
from coterie.running.build import Settings
from coterie.running.evaluation import evaluate
from coterie.running.final import Result
from coterie.running.folder import RunFolder
from coterie.running.loop import resume, run


class Broken(Exception):
    """A method breaks the contract; the message says how, and what to do."""


class DoesNotApply(Exception):
    """The check does not apply to this method."""


Check = Callable[[Make, str], None]
CHECKS: dict[str, Check] = {}


def _check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _same(old: Tree, new: Tree, tolerance: float, owner: str, advice: str) -> None:
    found = difference(old, new, tolerance)
    if found:
        raise Broken(f"{owner}: {found} {advice}")


# engines and chunks

STACKABLE = (
    "Reduce over samples through the mask, draw from client.key, take sizes from batch.size and "
    "change nothing that was handed over, or mark the task @task(stackable=False)."
)


@_check
def engines_agree(make: Make, engine: str) -> None:
    """All engines reach the same state and memory, with unequal clients and half of them asked."""
    _agree_on(make, tiny(), engine)


@_check
def batch_norm_and_dropout(make: Make, engine: str) -> None:
    """Engines also agree on a network with batch norm and dropout."""
    _agree_on(make, tiny(net="normed"), engine)


def _agree_on(make: Make, problem: Problem, engine: str) -> None:
    if engine == "loop":  # the reference; it must run
        outcome(make, problem, "loop", rounds=1, participation=0.5)
        return
    reference = outcome(make, problem, "loop", participation=0.5)
    other = outcome(make, problem, engine, participation=0.5)
    owner = f"The {engine} engine must give the same result as running one client at a time"
    _same(reference, other, ROUNDING, owner, STACKABLE)


@_check
def chunks_do_not_matter(make: Make, engine: str) -> None:
    """The number of clients that run at once changes nothing beyond rounding."""
    whole = outcome(make, tiny(), engine, chunk=100)
    for chunk in (1, 4):
        parts = outcome(make, tiny(), engine, chunk=chunk)
        owner = f"{chunk} clients at once must give the same result as all clients at once"
        _same(whole, parts, ROUNDING, owner, STACKABLE)


# stopping, losing, joining


@_check
def resume_is_exact(make: Make, engine: str) -> None:
    """Three rounds, a stop and two more rounds write the same bytes as five rounds."""
    problem = tiny()
    with tempfile.TemporaryDirectory() as folder:
        stopped, whole = Path(folder) / "stopped", Path(folder) / "whole"
        _run(make, problem, engine, 3, stopped)
        # The new instance has nothing that a method keeps outside its state.
        _run(make, problem, engine, 5, whole)
        resume(make(problem), problem.data, _settings(engine, 5), stopped)
        ours, theirs = _read_results(whole), _read_results(stopped)
    odd = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if odd:
        raise Broken(
            "A resumed run must write the same bytes as a run without a stop. These files differ: "
            f"{', '.join(odd)}. Keep everything that the next round needs in State or in the "
            "clients' memory, and nothing in Python objects."
        )


def _settings(engine: str, rounds: int) -> Settings:
    # Evaluations after rounds 3 and 5, where both runs have one.
    kind, _, kernel = engine.partition(":")
    run = {"engine": kind, "kernel": kernel or "auto", "shards": 2 if kind == "ray" else None}
    return Settings(rounds, participation=0.5, evaluate_every=3, save_every=3, **run)  # type: ignore[arg-type]


def _run(make: Make, problem: Problem, engine: str, rounds: int, out: Path) -> Result:
    return run(make(problem), problem.data, _settings(engine, rounds), out)


def _read_results(out: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on where it stopped."""
    files = [*(out / "final").iterdir(), out / "rounds.jsonl", out / "summary.json"]
    return {path.name: path.read_bytes() for path in files}


@_check
def lost_replies_do_no_harm(make: Make, engine: str) -> None:
    """A run continues if a third of the replies are lost; lost clients keep their memory."""
    problem, accepted = tiny(), 0
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine)
    first, *_ = states(algorithm, fed, 0)
    fed.faults = Faults(drop=1 / 3)
    state = first
    for number in range(5):
        before, n_seen = traces(fed, state)["memory"], len(fed.log)
        state, went_on = advance(algorithm, fed, state, number)
        accepted += went_on
        heard = {fed.names[i] for seen in fed.log[n_seen:] for i in seen.heard.tolist()}
        after = traces(fed, state)["memory"]
        for memory in (before, after):
            for name in heard & memory.keys():
                del memory[name]
        owner = f"The memory of clients that did not answer must not change; in round {number}"
        _same(
            before, after, EXACTLY, owner, "Clients change their memory by Reply(keep=...) alone."
        )
    if accepted < 3:
        raise Broken(
            f"A run must continue if replies are lost. {5 - accepted} of 5 rounds were abandoned. "
            "Use a smaller at_least in fed.map."
        )
    advice = "Average over the clients that answered, not over those that were asked."
    _finite(first, state, "when replies are lost", advice)
    idle = _idle(make, engine, faults=fed.faults)
    _same(*idle, ROUNDING, "Lost replies alone must not change a model", advice)


def _finite(first: Any, state: Any, when: str, advice: str) -> None:
    where = not_finite(first, state)
    if where:
        raise Broken(
            f"The state must stay finite {when}. '{where}' has nan or infinite numbers. Average "
            f"with Mean(..., around=...), which keeps the rows that no client trained. {advice}"
        )


@_check
def abandoned_rounds_leave_no_trace(make: Make, engine: str) -> None:
    """A round that fails at any of its exchanges changes nothing, then or later."""
    problem = tiny()
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine)
    *_, state = states(algorithm, fed, 2)
    n_exchanges = sum(seen.round == 1 for seen in fed.log)
    expected = traces(fed, advance(algorithm, fed, state, 3)[0])
    abandoned = 0
    for number in range(n_exchanges):
        algorithm = make(problem)
        fed = watch(algorithm, problem.data, engine)
        *_, state = states(algorithm, fed, 2)
        before = traces(fed, state)
        fed.silent = number
        _, accepted = advance(algorithm, fed, state, 2)
        if accepted:  # the method does not need these answers
            continue
        abandoned += 1
        fed.silent = None
        owner = f"A round abandoned at exchange {number + 1} must leave no trace"
        advice = "Change no tensor in place (use put and _replace) and keep nothing outside State."
        _same(before, traces(fed, state), EXACTLY, owner, advice)
        later = traces(fed, advance(algorithm, fed, state, 3)[0])
        _same(expected, later, EXACTLY, f"{owner} in the next one", advice)
    if not abandoned:
        raise DoesNotApply("no round is abandoned, whichever exchange is not answered.")


@_check
def late_joiners_are_taken_in(make: Make, engine: str) -> None:
    """A client that joins in the third round is asked, placed and evaluated like the others."""
    problem = tiny()
    n_clients = len(problem.data)
    newcomer = n_clients - 1
    joins = [0] * newcomer + [2]
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine, joins=joins)
    first, *_, state = states(algorithm, fed, 4)
    for name in per_client_fields(state):
        if len(getattr(state, name)) != n_clients:
            raise Broken(
                f"A PerClient field must have an entry for each of {n_clients} clients, including "
                f"late ones. '{name}' has {len(getattr(state, name))}. Update it with put."
            )
    if not any(newcomer in seen.heard for seen in fed.log):
        raise Broken(
            "A client that joins late must be asked. It was not asked in two rounds. Call "
            "fed.cohort() or fed.everyone() in every step."
        )
    if hasattr(state, "assignment") and int(state.assignment[newcomer]) < 0:
        raise Broken(
            "A client that joins late must be placed. Its assignment is still "
            f"{int(state.assignment[newcomer])} after two rounds. Place newcomers in step."
        )
    _finite(first, state, "when a client joins late", "")
    scores = evaluate(algorithm, fed, state, problem.data.task)
    if not bool(scores.loss.isfinite().all()):
        raise Broken(
            "A client that joins late must have a model that predicts. The evaluation's losses are "
            f"{[round(loss, 3) for loss in scores.loss.tolist()]}. See deploy and personalise."
        )


@_check
def nan_replies_are_dropped(make: Make, engine: str) -> None:
    """Replies with nan are left out with a warning, and the state stays finite."""
    problem = tiny()
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine)
    fed.poisoned = 1
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first, *_, state = states(algorithm, fed, 3)
    if not any(seen.sizes for seen in fed.log):
        raise DoesNotApply("clients send nothing.")
    _finite(first, state, "when a client replies with nan", "Or leave such replies out yourself.")
    if not warned:
        raise Broken(
            "Replies with nan must be left out with a warning. There was no warning. Average with "
            "Mean, or warn where you leave replies out."
        )


# what a run may depend on


@_check
def evaluations_change_nothing(make: Make, engine: str) -> None:
    """Evaluating after every round or never gives the same state and memory."""
    problem = tiny()
    never = outcome(make, problem, engine, participation=0.5)
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine, participation=0.5)
    for state in states(algorithm, fed, 3):
        evaluate(algorithm, fed, state, problem.data.task)
    advice = "place, deploy, personalise and predict must return new tensors and keep nothing."
    _same(never, traces(fed, state), EXACTLY, "Evaluations must not change a run", advice)


@_check
def client_order_does_not_matter(make: Make, engine: str) -> None:
    """Another numbering of the clients renumbers the result, and changes nothing else."""
    problem = tiny()
    order = torch.arange(len(problem.data)).flip(0).roll(2)
    other = Problem(problem.data.subset(order), problem.model, problem.local, problem.n_groups)
    first = outcome(make, problem, engine, participation=0.5)
    second = outcome(make, other, engine, participation=0.5)
    state = first["state"]
    for name in per_client_fields(state):
        state = state._replace(**{name: getattr(state, name)[order]})
    expected = {"state": state, "memory": first["memory"]}
    owner = "Renumbering the clients must only renumber the result"
    advice = (
        "Do not compute with client ids: draw with fed.turns or client.key, and mark state fields "
        "with one entry per client as PerClient."
    )
    _same(expected, second, ROUNDING, owner, advice)


@_check
def seeds_decide(make: Make, engine: str) -> None:
    """The same seed gives the same run, and another seed gives another run."""
    once, again = (outcome(make, tiny(), engine, participation=0.5) for _ in range(2))
    owner = "The same seed must give a bit-identical run"
    advice = "Draw from fed.key(...) and client.key, and keep nothing in Python objects."
    _same(once, again, EXACTLY, owner, advice)
    other = outcome(make, tiny(), engine, participation=0.5, seed=1)
    if not difference(once, other, EXACTLY):
        raise Broken(
            "Another seed must give another run. Seeds 0 and 1 end in the same state. Draw initial "
            "models from fed.key(...)."
        )


@_check
def global_generators_stay_untouched(make: Make, engine: str) -> None:
    """The method does not draw from the global generators of torch, numpy or Python."""
    problem = tiny()
    before = _generators()
    algorithm = make(problem)
    for _ in states(algorithm, watch(algorithm, problem.data, engine), 2):
        for name, state in _generators().items():
            if state != before[name]:
                raise Broken(
                    f"The global generator of {name} must not be used. Its state has changed. Draw "
                    "from client.key or fed.key(...) with coterie.core.random."
                )


def _generators() -> dict[str, bytes]:
    numpy = np.random.get_state(legacy=False)["state"]
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": numpy["key"].tobytes() + str(numpy["pos"]).encode(),
        "Python": repr(random.getstate()).encode(),
    }


@_check
def only_evaluation_reads_test_data(make: Make, engine: str) -> None:
    """Only the evaluation reads test data."""
    problem = tiny()
    guarded = Guarded(problem.data)
    algorithm = make(problem)
    fed = watch(algorithm, guarded, engine)
    error: Exception | None = None
    try:
        *_, state = states(algorithm, fed, 3)
    except Exception as raised:
        error = raised
    if guarded.guard.refused:
        raise Broken(
            "Only the evaluation may read test data. They were read during a round. Use "
            "client.train, or client.validation with a held-out share."
        ) from error
    if error is not None:
        raise error
    guarded.guard.opened = True
    evaluate(algorithm, fed, state, problem.data.task)


# messages and memory


@_check
def replies_do_not_grow_with_data(make: Make, engine: str) -> None:
    """Replies have the same size with four times the number of samples."""
    few, many = (_reply_sizes(make, tiny(n=n), engine) for n in (8, 32))
    for name in few.keys() & many.keys():
        if many[name] > few[name]:
            raise Broken(
                f"Replies must not grow with a client's data. '{name}' has {few[name]} bytes with "
                f"8 samples and {many[name]} with 32. Send means, counts or models; keep what "
                'belongs to samples in Reply(keep={"samples": ...}).'
            )


def _reply_sizes(make: Make, problem: Problem, engine: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for seen in _log(make, problem, engine)[0]:
        for part, size in seen.sizes.items():
            name = f"{seen.task}/{part}"
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def _log(make: Make, problem: Problem, engine: str) -> tuple[list[Exchange], Any]:
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine)
    *_, state = states(algorithm, fed, 2)
    return fed.log, state


@_check
def server_memory_does_not_grow_with_clients(make: Make, engine: str) -> None:
    """If replies are averaged as they arrive, the server keeps no model per client."""
    held, model, n_clients = [], 0, []
    for clients_per_group in (2, 4):
        problem = tiny(n=8, clients_per_group=clients_per_group)
        if make(problem).summaries:
            raise DoesNotApply("the server keeps summaries of clients in order to cluster them.")
        log, state = _log(make, problem, engine)
        means = [seen for seen in log if seen.reduced]
        if not means:
            raise DoesNotApply("no reply is averaged as it arrives (`reduce`).")
        model = max(sum(seen.sizes.get(name, 0) for name in seen.reduced) for seen in means)
        held.append(max(seen.held for seen in means) + n_bytes(state))
        n_clients.append(len(problem.data))
    growth = (held[1] - held[0]) / (n_clients[1] - n_clients[0])
    if growth >= model:
        raise Broken(
            "If replies are averaged as they arrive, the server must not keep a model per client. "
            f"It keeps {growth:.0f} bytes more for each client, and a model has {model} bytes. Use "
            "a Mean for every large part of the reply, and keep none of them in State."
        )


@_check
def saved_models_predict_the_same(make: Make, engine: str) -> None:
    """State and memory that are saved and loaded again give bit-identical predictions."""
    problem = tiny()
    with tempfile.TemporaryDirectory() as folder:
        result = _run(make, problem, engine, 2, Path(folder) / "run")
        files = RunFolder(Path(folder) / "run").final_files()
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine)
    saved = wire.load(files["state.safetensors"], like={"state": state_type(algorithm)})
    memory = wire.load(files["memory.safetensors"]) if "memory.safetensors" in files else {}
    fed.restore(Memory.of(memory))
    fed.begin(result.fed.round)
    x = problem.data.gather("train", torch.tensor([0])).x[0]
    now = answers(result.algorithm, result.fed, result.state, x)
    then = answers(algorithm, fed, saved["state"], x)
    owner = "A saved run must give the same predictions as the run itself"
    advice = "Predict from State and the client's memory only; annotate the return type of init."
    _same(now, then, EXACTLY, owner, advice)


# learning


@_check
def zero_epochs_change_no_model(make: Make, engine: str) -> None:
    """Without local training, no model changes."""
    first, last = _idle(make, engine)
    if not last:
        raise DoesNotApply("there is no model in the state or in the clients' memory.")
    advice = "Weights of a mean must add up to one: average with Mean, and only train models."
    _same(first, last, ROUNDING, "Without local training no model may change", advice)


def _idle(make: Make, engine: str, **options: Any) -> tuple[Tree, Tree]:
    """All models at the start, and after some rounds without local training."""
    problem = tiny(epochs=0, learning_rate=0.0)  # rate 0, because some methods step on the server
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine, **options)
    first: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for state in states(algorithm, fed, 3):
        last = model_leaves(algorithm, traces(fed, state))
        first = {**last, **first}
    return {name: first[name] for name in last}, last


@_check
def the_tiny_problem_is_learnt(make: Make, engine: str) -> None:
    """The clients' models reach the accuracy `bar` of the method on their test data."""
    problem, best = tiny(n=40, epochs=2), 0.0
    algorithm = make(problem)
    for seed in range(3):  # some initial models are unlucky, as the authors of IFCA say
        fed = watch(algorithm, problem.data, engine, seed)
        *_, state = states(algorithm, fed, 8)
        scores = evaluate(algorithm, fed, state, problem.data.task)
        score = scores.accuracy if algorithm.supervised else scores.agreement
        accuracy = float(score.mean())
        best = max(best, accuracy)
        if best >= algorithm.bar:
            return
    raise Broken(
        f"The tiny problem must be learnt to an accuracy of {algorithm.bar:.2f}. The best of three "
        f"seeds reached {best:.2f}. Correct the method, or set `bar` to what it can reach and "
        "explain why."
    )
