"""Pages of results for the documentation, made from the summaries that runs leave."""

import json
from pathlib import Path
from typing import Any

from coterie.running.folder import write
from coterie.running.progress import duration
from coterie_lab import recipes  # noqa: F401 - lists them
from coterie_lab.recipe import RECIPES, Recipe
from coterie_lab.reproduce import Plan, machine, stored, summary_path
from coterie_lab.tables import figures, markdown

STORE = "summaries.jsonl"


def write_pages(plan: Plan, folder: Path) -> list[Path]:
    """A page and a picture per table that has results, an index, and the summaries themselves.

    Summaries kept in the folder are taken in first, so that runs made elsewhere are not lost; of
    two of the same run the one with more rounds is kept.
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
    """Summaries of a store put beside those of the plan; all of them by study and seed."""
    known = json_lines(store)
    for one in known:
        here = stored(plan, one["study"], one["seed"])
        if one["scale"] == plan.scale and (here is None or here["rounds"] < one["rounds"]):
            path = summary_path(plan, one["study"], one["seed"])
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, (json.dumps(one) + "\n").encode())
    out = {}
    for recipe in RECIPES.values():
        for study in recipe.studies():
            for seed in recipe.seeds:
                found = stored(plan, study.name, seed)
                if found is not None:
                    out[study.name, seed] = found
    return out


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The summaries of a store."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _runs(recipe: Recipe, plan: Plan) -> list[dict[str, Any]]:
    found = [stored(plan, s.name, seed) for s in recipe.studies() for seed in recipe.seeds]
    return [one for one in found if one is not None]


def _page(recipe: Recipe, plan: Plan) -> str:
    runs = _runs(recipe, plan)
    whole = len(recipe.studies()) * len(recipe.seeds)
    short = [one for one in runs if one["rounds"] < one["published_rounds"]]
    seconds = sum(one["seconds"] for one in runs)
    text = [f"# {recipe.paper}, {recipe.title}", ""]
    text += ["<!-- skip -->", "```console", f"$ coterie reproduce {recipe.name}", "```", ""]
    state = f"{len(runs)} of {whole} runs are done"
    if short:
        state += f", {len(short)} of them with fewer rounds than published"
    text += [
        f"{state}; they took {duration(seconds)} on {hardware(runs)}. Entries without a figure "
        "have not run yet, or their method is not built yet; they fill in when they are.",
        "",
        "Bold: outside two published deviations and outside "
        "0.5 points of accuracy or 0.05 of ARI, whichever is wider. Runs with fewer rounds than "
        "published are not judged.",
        "",
        markdown(recipe, plan),
        f"![Published figures and ours]({recipe.name}.png)",
        "",
    ]
    if recipe.notes:
        text += ["## Notes", "", *(f"- {note}" for note in recipe.notes), ""]
    checked = _checked(recipe, plan)
    if checked:
        text += ["## What was checked", "", *(f"- {one}" for one in checked), ""]
    if recipe.departures:
        text += ["## Departures", "", *(f"- {one}" for one in recipe.departures), ""]
    return "\n".join(text).rstrip() + "\n"


def _checked(recipe: Recipe, plan: Plan) -> list[str]:
    """Facts that follow from the runs and that no published figure shows."""
    out = []
    for entry in recipe.entries:
        _, found = figures(entry, recipe, plan)
        if entry.metric != "accuracy" or entry.row != "FedAvg" or not found:
            continue
        own = [one["accuracy"] for one in found]
        train = [one["train_accuracy"] for one in found]
        text = (
            f"{entry.part}, {entry.column}: FedAvg has {max(own):.1f} % at most on test data and "
            f"{max(train):.1f} % on training data"
        )
        if entry.part == "Concept shift":
            verdict = "keeps to" if max(own) <= 62 else "does not keep to"
            text += f"; it {verdict} the 60 % that no single model can exceed by more than noise"
        out.append(text + ".")
    return out


def hardware(runs: list[dict[str, Any]]) -> str:
    """What the runs ran on."""
    kinds = sorted({(one["threads"], one.get("machine") or machine()) for one in runs})
    return "; ".join(f"{n} thread{'s' if n > 1 else ''} of a {kind}" for n, kind in kinds)


def _index(plan: Plan, done: list[Recipe]) -> str:
    text = [
        "# Published tables, run again",
        "",
        "Every page has the command, the published figures, ours, and where the two differ. The",
        "figures come from [the summaries](summaries.jsonl) that runs leave; nothing on these",
        "pages is written by hand. Times are those of a clock on the wall; the machine was shared",
        "with other work, which now and then stopped these runs.",
        "",
        "| table | what | runs done | hours for all, one core |",
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
