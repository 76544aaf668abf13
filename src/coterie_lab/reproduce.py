"""Run the experiments of published tables; finished runs are not repeated.

OUT/runs/SCALE/STUDY/seed-N/             run folders, resumed if they were interrupted
OUT/summaries/SCALE/STUDY--seed-N.json   the figures of a finished run
OUT/tables/RECIPE[-quick].md, .csv, .tex, .png
"""

import json
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import __version__, data, metrics
from coterie.core.config import find_imports
from coterie.core.errors import ConfigError, DataError
from coterie.running.build import build
from coterie.running.final import Result, mean
from coterie.running.folder import no_nan, read_json, to_json, write
from coterie.running.loop import resume, run
from coterie.running.progress import Progress, Silent, choose_progress, duration
from coterie_lab import (
    recipes,  # noqa: F401 - registers them
    sources,
)
from coterie_lab.recipe import RECIPES, Recipe, Study


@dataclass(frozen=True)
class Plan:
    """How to run the studies. Only `scale` and `rounds` change the results by more than rounding.

    Parameters
    ----------
    out
        Folder for runs, summaries and tables.
    scale
        "paper" for the published size; "reduced" for the same partitions with fewer clients,
        samples and rounds, so that a table takes minutes; "quick" for a check that takes seconds
        per run.
    engine
        Engine of the simulation.
    threads
        Threads per run.
    rounds
        Stop after this number of rounds instead of the published number. The tables say so.
    data_dir
        Folder of the data sets; None for the usual folders.
    """

    out: Path = Path("results")
    scale: str = "paper"
    engine: str = "stacked"
    threads: int = 1
    rounds: int | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class Task:
    """One seed of one study."""

    study: Study
    seed: int

    @property
    def label(self) -> str:
        return f"{self.study.name}, seed {self.seed}"


def summary_path(plan: Plan, study: str, seed: int) -> Path:
    """The file with the figures of a run."""
    name = f"{study.replace('/', '--')}--seed-{seed}.json"
    return plan.out / "summaries" / plan.scale / name


def read_summary(plan: Plan, study: str, seed: int) -> dict[str, Any] | None:
    """Read the figures of a finished run; None if it has not run."""
    path = summary_path(plan, study, seed)
    return read_json(path) if path.exists() else None


def list_missing(plan: Plan, studies: Iterable[Study], seeds: Iterable[int]) -> list[Task]:
    """List the missing runs: the first seed of all studies, then the second, and so on."""
    studies = list(studies)
    out = []
    for seed in seeds:
        for study in studies:
            kept = read_summary(plan, study.name, seed)
            wanted = description(study, seed, plan)["run"]["rounds"]
            if kept is None or (kept["rounds"] < wanted and not kept.get("done")):
                out.append(Task(study, seed))
    return out


def description(study: Study, seed: int, plan: Plan) -> dict[str, Any]:
    """The run file of a study, with the settings of a plan."""
    tables = study.describe(seed, plan.scale)
    settings = tables["run"]
    settings |= {"engine": plan.engine, "threads": plan.threads}
    if plan.rounds is not None:
        settings["rounds"] = min(plan.rounds, settings["rounds"])
    settings.setdefault("evaluate_every", 10 if settings["rounds"] >= 20 else 1)
    settings.setdefault("save_every", 10)
    if plan.data_dir is not None and study.source is not None:
        tables["data"]["data_dir"] = plan.data_dir
    return tables


def list_missing_data(studies: Iterable[Study], data_dir: str | None = None) -> dict[str, str]:
    """List the data sets that were not found, each with what to do."""
    names = sorted({s.source for s in studies if s.source is not None})
    return {
        name: sources.source(name).missing(data_dir)
        for name in names
        if sources.source(name).find(data_dir) is None
    }


def perform(task: Task, plan: Plan, progress: bool | Progress = False) -> dict[str, Any]:
    """Run one seed of one study, or resume it, and save its figures."""
    tables = description(task.study, task.seed, plan)
    if task.study.trial is not None:
        return _run_trial(task, plan, tables["run"]["rounds"])
    folder = plan.out / "runs" / plan.scale / task.study.name / f"seed-{task.seed}"
    ready = build(tables, find_imports(tables))  # the recipe's own code
    if any((folder / "checkpoint").glob("*.json")):
        result = resume(
            ready.algorithm, ready.data, ready.settings, folder, choose_progress(progress)
        )
    else:
        if folder.exists():  # the run was interrupted before its first checkpoint
            shutil.rmtree(folder)
        result = run(ready.algorithm, ready.data, ready.settings, folder, choose_progress(progress))
    figures = summarise(task, plan, result)
    path = summary_path(plan, task.study.name, task.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, to_json(no_nan(figures)))
    whole = task.study.describe(task.seed, plan.scale)["run"]["rounds"]
    if figures["done"] or figures["rounds"] >= whole:  # checkpoints are only needed to resume
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        shutil.rmtree(folder / "final", ignore_errors=True)
    return figures


def _run_trial(task: Task, plan: Plan, rounds: int) -> dict[str, Any]:
    """Run a study of many short runs and save its figures; it cannot be resumed."""
    assert task.study.trial is not None
    began = time.perf_counter()
    found = task.study.trial(task.seed, plan.scale)
    figures = {
        "study": task.study.name,
        "seed": task.seed,
        "scale": plan.scale,
        "rounds": rounds,
        "published_rounds": rounds,
        "seconds": round(time.perf_counter() - began, 1),
        "version": __version__,
        "engine": plan.engine,
        "threads": plan.threads,
        "machine": machine(),
        **found,
    }
    path = summary_path(plan, task.study.name, task.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, to_json(no_nan(figures)))
    return figures


def machine() -> str:
    """The kind of machine, without its name."""
    return f"{os.cpu_count()}-core {platform.machine()} CPU, no GPU"


def summarise(task: Task, plan: Plan, result: Result) -> dict[str, Any]:
    """Collect the figures of a run that tables and pages show."""
    assert result.folder is not None
    rounds = result.rounds
    timings = _lines(result.folder / "timings.jsonl")
    whole = task.study.describe(task.seed, plan.scale)["run"]["rounds"]
    done = bool(result.algorithm.done(result.state))
    if done:  # the method has finished before the published number of rounds
        whole = len(rounds)
    ari = [line.get("ari_participants", line.get("ari")) for line in rounds]
    seen = [line.get("ari") for line in rounds]
    figures: dict[str, Any] = {
        "study": task.study.name,
        "seed": task.seed,
        "scale": plan.scale,
        "rounds": len(rounds),
        "published_rounds": whole,
        "done": done,
        "seconds": round(sum(line["seconds"] for line in timings), 1),
        "version": __version__,
        "engine": plan.engine,
        "threads": plan.threads,
        "machine": machine(),
        "loss": result.summary["loss"],
        "clients": result.summary["clients"],
        "bytes": result.summary["bytes"],
    }
    if "accuracy" in result.summary:
        figures["accuracy"] = 100 * result.summary["accuracy"]["mean"]
        figures["worst_decile"] = 100 * result.summary["accuracy"]["worst_decile"]
        trained = mean(result.train.accuracy)
        figures["train_accuracy"] = None if trained is None else 100 * trained
    if any(value is not None for value in ari):
        figures["ari"] = ari[-1]
        figures["ari_seen"] = seen[-1]
        figures["ari_round_10"] = ari[9] if len(ari) > 9 else None
        last = ari[-1] if plan.scale == "reduced" else None  # some have fewer rounds
        figures["ari_round_11"] = ari[10] if len(ari) > 10 else last
        figures["first_round"] = metrics.first_round(ari, 0.9)
        figures["groups"] = len(result.summary["groups"])
        figures["by_round"] = {
            "ari": [None if v is None else round(v, 4) for v in ari],
            "ari_seen": [None if v is None else round(v, 4) for v in seen],
            "identity": [_round(line.get("identity")) for line in rounds],
        }
        figures["identity"] = rounds[-1].get("identity")
        stable = [line.get("stable") for line in rounds]
        if any(stable):
            figures["stable_round"] = stable.index(True)
    marks = [(line["round"], line["accuracy"]) for line in rounds if "accuracy" in line]
    if marks:
        figures["best_accuracy"] = 100 * max(value for _, value in marks)
    figures["accuracy_by_round"] = [[number, round(100 * value, 2)] for number, value in marks]
    losses = [(line["round"], line["loss"]) for line in rounds if line.get("loss") is not None]
    figures["loss_by_round"] = [[number, round(value, 5)] for number, value in losses]
    if task.study.after is not None:
        figures |= task.study.after(result)
    return figures


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reproduce(
    recipe: Recipe,
    plan: Plan,
    *,
    cells: str | None = None,
    methods: Iterable[str] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    jobs: int = 1,
    quiet: bool = False,
) -> list[Path]:
    """Run the missing studies of a table, then write the table; return its files."""
    from coterie_lab.tables import write_tables

    usual = {"paper": None, "reduced": 1, "quick": 1}[plan.scale]
    wanted = recipe.seeds[: usual if seeds is None else seeds]
    if seed is not None:
        if seed not in recipe.seeds:
            known = ", ".join(map(str, recipe.seeds))
            raise ConfigError(
                f"{recipe.name}: unknown seed {seed}. The seeds of the paper are {known}."
            )
        wanted = (seed,)
    studies = recipe.select(cells, methods, plan.scale)
    absent = list_missing_data(studies, plan.data_dir)
    if absent and len(absent) == len({s.source for s in studies}):
        raise DataError(next(iter(absent.values())))
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    for text in absent.values():
        say(f"Skipped: {text}")
    studies = [study for study in studies if study.source not in absent]
    todo = list_missing(plan, studies, wanted)
    n = len(studies) * len(wanted)
    say(f"{recipe.name}: {recipe.title}. {n - len(todo)} of {n} runs are finished.")
    for text in _perform_all(todo, plan, jobs, show=not quiet):
        say(text)
    return write_tables(recipe, plan)


def _perform_all(todo: list[Task], plan: Plan, jobs: int, show: bool) -> Iterable[str]:
    """Run the tasks; yield one line for each, with an estimate of the remaining time."""
    began, done, ahead = time.monotonic(), 0.0, sum(task.study.seconds for task in todo)
    for number, (task, figures) in enumerate(_results(todo, plan, jobs, show), start=1):
        done += task.study.seconds
        left = (time.monotonic() - began) / done * (ahead - done)
        parts = [f"[{number}/{len(todo)}] {task.label}:"]
        if "accuracy" in figures:
            parts.append(f"accuracy {figures['accuracy']:.1f} %,")
        elif "success" in figures:
            parts.append("success," if figures["success"] else "no success,")
        elif figures.get("loss") is not None:
            parts.append(f"loss {figures['loss']:.4f},")
        if "components" in figures:
            parts.append(f"{figures['components']} components,")
        if "global_ari" in figures:
            parts.append(f"ARI {figures['global_ari']:.2f},")
        if figures.get("ari") is not None:
            parts.append(f"ARI {figures['ari']:.2f},")
        parts.append(f"{duration(figures['seconds'])}; about {duration(left)} left")
        yield " ".join(parts)


def _results(
    todo: list[Task], plan: Plan, jobs: int, show: bool
) -> Iterable[tuple[Task, dict[str, Any]]]:
    if jobs <= 1 or len(todo) < 2:
        for task in todo:
            shown = choose_progress(True) if show and _on_screen() else Silent()
            yield task, perform(task, plan, shown)
        return
    context = multiprocessing.get_context("spawn")  # torch threads do not survive a fork
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context) as workers:
        running = {
            workers.submit(_by_name, task.study.name, task.seed, plan): task for task in todo
        }
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield running.pop(future), future.result()


def _on_screen() -> bool:
    import sys

    return sys.stdout.isatty()


def _by_name(study: str, seed: int, plan: Plan) -> dict[str, Any]:
    """Run a task in another process, which finds the study by its name."""
    found = next(s for recipe in RECIPES.values() for s in recipe.studies() if s.name == study)
    return perform(Task(found, seed), plan)


assert data  # imported to register its partitions
