"""Write the result pages of the documentation from the summaries of the runs."""

import json
from pathlib import Path
from typing import Any

from coterie.running.folder import write
from coterie.running.progress import duration
from coterie_lab import recipes  # noqa: F401 - registers them
from coterie_lab.recipe import RECIPES, Recipe
from coterie_lab.reproduce import Plan, machine, read_summary, summary_path
from coterie_lab.tables import figures, markdown

STORE = "summaries.jsonl"


def write_pages(plan: Plan, folder: Path) -> list[Path]:
    """Write a page and a picture for each table with results, an index, and the summaries.

    The summaries that are already in the folder are read first, so that runs from other machines
    are not lost. If a run has two summaries, the one without a remark is kept, or else the one with
    more rounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = take_in(plan, folder / STORE)
    lines = [json.dumps(one, sort_keys=True) for _, one in sorted(kept.items())]
    write(folder / STORE, ("\n".join(lines) + "\n").encode())
    paths = [folder / STORE]
    done = [recipe for recipe in RECIPES.values() if _runs(recipe, plan)]
    for recipe in done:
        path = folder / f"{recipe.name}.md"
        write(path, _page(recipe, plan).encode())
        paths.append(path)
        from coterie_lab.drawing import picture

        picture(recipe, plan, folder / f"{recipe.name}.png")
    write(folder / "index.md", _index(plan, done).encode())
    return [*paths, folder / "index.md"]


def take_in(plan: Plan, store: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Add the summaries of a store to those of the plan; return all of them by study and seed."""
    known = json_lines(store)
    for one in known:
        here = read_summary(plan, one["study"], one["seed"])
        if one["scale"] == plan.scale and (here is None or _better(one, here)):
            path = summary_path(plan, one["study"], one["seed"])
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, (json.dumps(one) + "\n").encode())
    out = {}
    for recipe in RECIPES.values():
        for study in recipe.studies():
            for seed in recipe.seeds:
                found = read_summary(plan, study.name, seed)
                if found is not None:
                    out[study.name, seed] = found
    return out


def _better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a summary replaces another of the same run."""
    return ("remark" not in one, one["rounds"]) > ("remark" not in other, other["rounds"])


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the summaries of a store."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _runs(recipe: Recipe, plan: Plan) -> list[dict[str, Any]]:
    found = [read_summary(plan, s.name, seed) for s in recipe.studies() for seed in recipe.seeds]
    return [one for one in found if one is not None]


def _page(recipe: Recipe, plan: Plan) -> str:
    runs = _runs(recipe, plan)
    whole = len(recipe.studies()) * len(recipe.seeds)
    short = [one for one in runs if one["rounds"] < one["published_rounds"]]
    seconds = sum(one["seconds"] for one in runs)
    text = [f"# {recipe.paper}, {recipe.title}", ""]
    text += ["<!-- skip -->", "```console", f"$ coterie reproduce {recipe.name}", "```", ""]
    state = f"{len(runs)} of {whole} runs are finished"
    if short:
        state += f", {len(short)} of them with fewer rounds than published"
    text += [
        f"This page compares the published figures with ours. {state}. They took "
        f"{duration(seconds)} on {hardware(runs)}.",
        "",
        "A figure is bold if it differs from the published one by more than two published standard "
        "deviations and by more than 0.5 points of accuracy or 0.05 of ARI. Figures of runs with "
        "fewer rounds than published, or older than a correction of the method, are never bold.",
        "",
        markdown(recipe, plan),
        f"![Published figures and ours]({recipe.name}.png)",
        "",
    ]
    if recipe.notes:
        text += ["## Notes", "", *(f"- {note}" for note in recipe.notes), ""]
    checks = _check_averages(recipe, plan)
    if checks:
        text += ["## Checks", "", *(f"- {one}" for one in checks), ""]
    if recipe.departures:
        text += ["## Differences from the paper", ""]
        text += [*(f"- {one}" for one in recipe.departures), ""]
    return "\n".join(text).rstrip() + "\n"


def _check_averages(recipe: Recipe, plan: Plan) -> list[str]:
    """Compare the test accuracy of FedAvg with its training accuracy and with what is possible."""
    out = []
    for entry in recipe.entries:
        _, found = figures(entry, recipe, plan)
        if entry.metric != "accuracy" or entry.row != "FedAvg" or not found:
            continue
        own = [one["accuracy"] for one in found]
        train = [one["train_accuracy"] for one in found]
        text = (
            f"{entry.part}, {entry.column}: the highest accuracy of FedAvg is {max(own):.1f} % on "
            f"test data and {max(train):.1f} % on training data"
        )
        if entry.part == "Concept shift":
            verdict = "respects" if max(own) <= 62 else "violates"
            text += f"; it {verdict} the limit of 60 % for any single model (up to noise)"
        out.append(text + ".")
    return out


def hardware(runs: list[dict[str, Any]]) -> str:
    """The machines of the runs."""
    kinds = sorted({(one["threads"], one.get("machine") or machine()) for one in runs})
    return "; ".join(f"{n} thread{'s' if n > 1 else ''} of a {kind}" for n, kind in kinds)


def _index(plan: Plan, done: list[Recipe]) -> str:
    text = [
        "# Results",
        "",
        "These pages compare published tables with our own runs. Each page has the command, the",
        "published figures, our figures, and how our runs differ from the paper. The pages are",
        "generated from [the summaries](summaries.jsonl) of the runs. Times are wall-clock times;",
        "the machine was shared with other programs, which sometimes interrupted the runs.",
        "",
        "A row with the name of a paper's method is the method as printed. `census`, `blend` and",
        "`mosaic` are our own methods.",
        "",
        "| table | content | finished runs | hours for all runs, one core |",
        "|---|---|---|---|",
    ]
    for recipe in RECIPES.values():
        runs = len(_runs(recipe, plan))
        whole = len(recipe.studies()) * len(recipe.seeds)
        name = f"[{recipe.name}]({recipe.name}.md)" if recipe in done else f"`{recipe.name}`"
        state = f"{runs} of {whole}" if runs else "not run yet"
        what = f"{recipe.paper}, {recipe.title}"
        text.append(f"| {name} | {what} | {state} | {recipe.hours():.0f} |")
    text += ["", "```{toctree}", ":hidden:", ""]
    text += [recipe.name for recipe in done]
    return "\n".join([*text, "```", ""])
