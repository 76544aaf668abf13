"""Train a model for each group, and the runs that it is compared with: from data to a `Fitted`."""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.advice import Advice
from coterie.core.algorithm import Algorithm, find, name_of
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.data import FederatedData
from coterie.data.warnings import warn_of_loss
from coterie.fitted import Fitted, read_verdict
from coterie.report.verdict import Verdict
from coterie.report.words import NAMES
from coterie.running.build import Run, build, check
from coterie.running.files import blame
from coterie.running.final import Result, write_clients
from coterie.running.folder import RunFolder, no_nan, to_json
from coterie.running.loop import begin
from coterie.running.loop import resume as resume_loop
from coterie.running.progress import Line, Progress, Silent, choose_progress, expect
from coterie.running.reference import keep_reference
from coterie.running.request import DEFAULT_METHOD, ROUNDS, Network, Request, resolve
from coterie.running.trackers import Tracker, choose_tracker, tracked
from coterie.running.verdict import (
    ARMS,
    HEADLINE,
    as_trained,
    hide_clients,
    instead_of_groups,
    judge,
    rivals_of,
)

GAINS = {"local_only": "gain over alone", "fedavg": "gain over one model"}


def fit(
    data: FederatedData,
    algorithm: str | Algorithm = DEFAULT_METHOD,
    *,
    model: Network = None,
    n_groups: int | str | None = "auto",
    local: dict[str, Any] | None = None,
    start: Advice | dict[str, int] | str | Path | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    out: str | Path | None = None,
    compare: bool = True,
    quiet: bool = False,
    progress: Progress | None = None,
    policy: dict[str, Any] | None = None,
    track: str | Tracker | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Fitted:
    """Find the groups in a federation and train a model for each.

    Parameters
    ----------
    data
        Made by `from_folder`, `from_table`, `from_arrays`, ...
    algorithm
        Name of a method, or an instance.
    model
        Name of a network ("linear", "mlp", "cnn"), a dict of name and options, an `nn.Module`, or
        None: chosen from the kind of data.
    n_groups
        Number of groups. "auto": up to 10, found by the method, or by a survey before training if
        the method needs to be told the number.
    local
        Options of local training that differ from the default: Adam, learning rate 0.01, batches
        of 32, one pass over the data per round.
    start
        Initial groups: the result of `advise`, a dict of client name and group, or a CSV file with
        the columns client and group. Clients that are not listed are assigned by the method.
    rounds
        Number of communication rounds.
    seed
        Seed of everything random except the data.
    out
        Run folder to write; it must not exist. None: nothing is written.
    compare
        Also train every client alone and one model for all, to measure what grouping gains.
    quiet
        Whether to show nothing: neither warnings about the data, nor progress, nor where the
        result is kept.
    progress
        Receives the rounds instead of showing them.
    policy
        What is done about clients that lie, see `Policy`: {"mean": "median"}, for example.
    track
        Where to log the run besides: "tensorboard", "mlflow", "wandb", or a `Tracker`.
    settings
        Further options of the run, see `Settings`.
    options
        Further options of the method.
    """
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"fit: data must be a FederatedData. Got {type(data).__name__}. Make one with "
            "coterie.from_table, from_folder or from_arrays."
        )
    request = Request(
        data,
        algorithm,
        model=model,
        n_groups=n_groups,
        local=local or {},
        start=start.start if isinstance(start, Advice) else start,
        options=options,
        settings={
            "rounds": rounds,
            "seed": seed,
            "compare": compare,
            **({} if policy is None else {"policy": policy}),
            **(settings or {}),
        },
    )
    ready = resolve(request)
    for warning in () if quiet else ready.data.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    show = progress or (Silent() if quiet else Line())
    fitted = fit_run(ready, out, show, choose_tracker(track))
    if not quiet:
        for warning in fitted.warnings[len(ready.data.warnings) :]:
            print(f"Warning: {warning}", file=sys.stderr)
        kept = "Not saved; fit.save(FOLDER) keeps it." if out is None else f"Saved to {out}."
        print(kept, file=sys.stderr)
    return fitted


def fit_run(
    ready: Run,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    tracker: Tracker | None = None,
) -> Fitted:
    """Run what was requested, and the runs it is compared with."""
    return _run_all(ready, out, progress, tracker, lambda show: begin(ready, out, show))


def resume_run(
    ready: Run, out: str | Path, progress: bool | Progress = False, tracker: Tracker | None = None
) -> Fitted:
    """Continue a run, and the runs it is compared with."""

    def go_on(show: Progress) -> Result:
        return resume_loop(ready.algorithm, ready.data, ready.settings, out, show)

    return _run_all(ready, out, progress, tracker, go_on)


def _run_all(
    ready: Run,
    out: str | Path | None,
    progress: bool | Progress,
    tracker: Tracker | None,
    train: Callable[[Progress], Result],
) -> Fitted:
    """Train, and then the runs it is compared with."""
    shown = choose_progress(progress)
    expect(shown, count_rounds(ready))
    with (
        nullcontext() if out is None else RunFolder(out).lock(),
        tracked(tracker, shown, ready.description) as (show, summary),
    ):
        fit = compare(train(show), *run_others(ready, out, show))
        summary.update(fit.summary)
    return fit


def run_others(
    ready: Run, out: str | Path | None, progress: Progress
) -> tuple[dict[str, Result], list[dict[str, Result]]]:
    """The runs that a run is compared with: other ways of training, and replicates of all ways.

    The other ways train the same model without groups: every client alone, and one model for all.
    Nothing is run if the method has no such model, or no comparison is wanted.
    """
    if not _compares(ready):
        return {}, []
    # Liars are treated alike in all ways of training.
    same = {**ready.algorithm.policy, **(ready.settings.policy or {})} or None
    settings = replace(ready.settings, compare=False, replicates=1, start=None, policy=same)
    parts = {name: getattr(ready.algorithm, name, None) for name in ("model", "local")}
    others = {name: Run(find(name)(**parts), ready.data, settings) for name in GAINS}
    whole = None if out is None else Path(out)
    at = None if whole is None else whole / "baselines"
    baselines = {name: _run_in(one, at, name, 0, progress) for name, one in others.items()}
    own = replace(ready, settings=replace(ready.settings, compare=False, replicates=1))
    replicates = []
    for number in range(1, ready.settings.replicates):
        at = None if whole is None else whole / "replicates" / f"{number:02d}"
        ways = {"groups": own, **others}
        replicates.append(
            {name: _run_in(one, at, name, number, progress) for name, one in ways.items()}
        )
    return baselines, replicates


def _compares(ready: Run) -> bool:
    """Whether a run is compared with others: if it is wanted, and there is a model to train."""
    parts = [getattr(ready.algorithm, name, None) for name in ("model", "local")]
    wanted = ready.settings.compare and ready.settings.privacy is None  # each would spend as much
    return wanted and None not in parts and name_of(ready.algorithm) not in GAINS


def count_rounds(ready: Run) -> int:
    """Rounds of everything that will run: attempts, other ways of training, replicates."""
    ways = 1 + len(GAINS)
    trainings = 1 if not _compares(ready) else ways * ready.settings.replicates
    return trainings * ready.settings.restarts * ready.settings.rounds


def _run_in(ready: Run, above: Path | None, name: str, number: int, progress: Progress) -> Result:
    """Run in a folder of this name, or go on if it is there."""
    folder = None if above is None else above / name
    if folder is not None and (folder / "run.json").exists():
        return resume_loop(ready.algorithm, ready.data, ready.settings, folder, progress, number)
    check(ready)
    return begin(ready, folder, progress, number)


def compare(
    result: Result, others: dict[str, Result], replicates: list[dict[str, Result]]
) -> Fitted:
    """A finished run, with what each client gains over the other runs."""
    rows = result.clients
    column, sign = ("accuracy", 1) if "accuracy" in rows[0] else ("error", -1)
    for name, other in others.items():
        for mine, line in zip(rows, other.clients, strict=True):
            both = mine[column], line[column]
            mine[GAINS[name]] = None if None in both else sign * (both[0] - both[1])
        scores = [line[column] for line in other.clients if line[column] is not None]
        result.summary[f"{name}_{column}"] = sum(scores) / len(scores) if scores else None
    if set(others) >= set(GAINS) and isinstance(result.data, FederatedData):
        trainings = [{"groups": result, **others}, *replicates]
        arms = {
            arm: [as_trained(one[name or "groups"]) for one in trainings]
            for arm, name in ARMS.items()
        }
        cards = json.loads(result.files["groups.json"])["groups"]
        n_groups = sum("odd" not in card for card in cards)
        odd = result.summary.get("odd", [])
        instead = instead_of_groups(result.summary, odd, n_groups)
        verdict = judge(arms, rivals_of(result), n_groups, instead, odd)
        if result.fed.policy.min_group > 1:
            verdict |= hide_clients(verdict)
        result.files["verdict.json"] = to_json(no_nan(verdict))
        curves = {name: [_thin(line) for line in one.rounds] for name, one in others.items()}
        result.files["curves.json"] = to_json(no_nan(curves))
        result.summary["verdict"] = {name: verdict[name] for name in HEADLINE}
    own = {method: NAMES[arm] for arm, method in ARMS.items() if method}.get(
        result.description.get("algorithm", {}).get("name"), "the groups"
    )
    ways = {own: result} | {NAMES[a]: others[n] for a, n in ARMS.items() if n in others}
    if len(result.summary.get("groups", {})) == 1 and len(ways) > 1:
        ways.pop(own)  # which would be one model for all, said twice
    rising = [
        warn_of_loss(dict(one.held_out.get("by_round", [])), way) for way, one in ways.items()
    ]
    if any(rising):
        result.summary["warnings"] = [one._asdict() for one in rising if one is not None]
    result.files |= write_clients(rows) | _keep_groups(result)
    if result.folder is not None:
        RunFolder(result.folder).finish(result.files, result.summary)
    return Fitted(result.algorithm, result.files, result.description, result.summary, result.rounds)


def _thin(line: dict[str, Any]) -> dict[str, Any]:
    """What curves need of a round."""
    return {name: line[name] for name in ("round", "loss", "accuracy") if name in line}


def _keep_groups(result: Result) -> dict[str, bytes]:
    """The file by which new rows are compared with the groups; none without networks."""
    cards = json.loads(result.files["groups.json"])["groups"]
    of_client = {
        name: card["group"] for card in cards if "odd" not in card for name in card["clients"]
    }
    known = {"components", "epsilon"} & result.summary.keys()
    if not isinstance(result.data, FederatedData) or known:
        return {}
    group = torch.tensor([of_client.get(name, -1) for name in result.fed.names])
    fewest = result.fed.policy.min_group
    numbers, sizes = group.unique(return_counts=True)
    group[torch.isin(group, numbers[sizes < fewest])] = -1
    everyone = torch.arange(len(group))
    kept = keep_reference(result.algorithm, result.data, everyone, group, own=fewest == 1)
    return {} if kept is None else {"reference.safetensors": kept.write()}


def verdict_of(
    path: str | Path, progress: bool | Progress = False, trust: Iterable[str] = ()
) -> Verdict:
    """The verdict on the run in a folder; runs that it is compared with are trained if missing."""
    folder = RunFolder(path)
    finished = (folder.path / "summary.json").exists()
    if finished and "verdict.json" in (files := folder.final_files()):
        return read_verdict(files)
    ready = rebuild(folder, trust)
    name = name_of(ready.algorithm)
    parts = (getattr(ready.algorithm, part, None) for part in ("model", "local"))
    if name in GAINS or None in parts:
        raise ConfigError(
            f"verdict: the run must be of a method that trains a network per group. {name} does "
            "not. Choose a run of census, clove, ifca or survey."
        )
    if ready.settings.privacy is not None:
        raise ConfigError(
            "verdict: a run with privacy cannot be compared with other trainings, because each "
            "would spend as much again. Compare them on data that need no protection."
        )
    ready = replace(ready, settings=replace(ready.settings, compare=True))
    return resume_run(ready, path, progress).verdict


def rebuild(folder: RunFolder, trust: Iterable[str] = (), **given: Any) -> Run:
    """The run that a run folder describes."""
    description = folder.description()
    with blame(folder.path / "run.json"):
        return build({k: v for k, v in description.items() if isinstance(v, dict)}, trust, **given)


def resume(
    path: str | Path,
    *,
    data: FederatedData | None = None,
    model: Model | nn.Module | None = None,
    trust: Iterable[str] = (),
    progress: bool | Progress = False,
    track: str | Tracker | None = None,
) -> Fitted:
    """Continue a run that was stopped, with exactly the results of a run that was not.

    Parameters
    ----------
    path
        The run folder.
    data
        The data, needed only if they came from memory, which a file cannot name.
    model
        The network, needed only if it was given as a module, which a file cannot name.
    trust
        Code of your own that the run uses, as "package.module:Name". Nothing else is imported.
    progress
        Whether to show the rounds as they pass.
    track
        Where to log the rest of the run besides, as in `fit`; a tracker begins a log of its own.
    """
    given: dict[str, Any] = {} if data is None else {"data": data}
    if model is not None:
        given["model"] = model
    ready = rebuild(RunFolder(path), trust, **given)
    return resume_run(ready, path, progress, choose_tracker(track))
