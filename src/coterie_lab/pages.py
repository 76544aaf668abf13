"""Write the result pages of the documentation from the summaries of the runs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.running.folder import write
from coterie.running.progress import duration
from coterie_lab import recipes  # noqa: F401 - registers them
from coterie_lab.recipe import RECIPES, Entry, Recipe
from coterie_lab.reproduce import Plan, machine, read_summary, summary_path
from coterie_lab.tables import (
    OURS,
    difference,
    figures,
    is_better,
    markdown,
    ours_by_row,
    scales,
)

STORE = "summaries.jsonl"


def write_pages(plan: Plan, folder: Path) -> list[Path]:
    """Write a page and a picture for each table with results, an index, and the summaries.

    The summaries that are already in the folder are read first, so that runs from other machines
    are not lost. If a run has two summaries, the one without a remark is kept, or else the one with
    more rounds.
    """
    from coterie_lab.drawing import picture

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
        picture(recipe, plan, folder / f"{recipe.name}.png")
    write(folder / "index.md", _index(plan, done).encode())
    return [*paths, folder / "index.md"]


def take_in(plan: Plan, store: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Add the summaries of a store to those of the plan; return all by study, seed and scale."""
    for one in json_lines(store):
        own = replace(plan, scale=one["scale"])
        here = read_summary(own, one["study"], one["seed"])
        if one["scale"] in scales(plan) and (here is None or _better(one, here)):
            path = summary_path(own, one["study"], one["seed"])
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, (json.dumps(one) + "\n").encode())
    tables = {study.name for recipe in RECIPES.values() for study in recipe.studies()}
    found = {  # runs of no table, such as those on clients without groups
        (one["study"], one["seed"], one["scale"]): one
        for one in json_lines(store)
        if one["study"] not in tables
    }
    for scale in scales(plan):
        own = replace(plan, scale=scale)
        for recipe in RECIPES.values():
            for study in recipe.studies():
                for seed in recipe.seeds:
                    kept = read_summary(own, study.name, seed)
                    if kept is not None:
                        found[study.name, seed, scale] = kept
    return found


def _better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a summary replaces another of the same run."""
    return ("remark" not in one, one["rounds"]) > ("remark" not in other, other["rounds"])


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the summaries of a store."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _runs(recipe: Recipe, plan: Plan, *only: str) -> list[dict[str, Any]]:
    """The finished runs of a table, at the scales that are shown or at those that are named."""
    plans = [replace(plan, scale=scale) for scale in only or scales(plan)]
    found = [
        read_summary(own, study.name, seed)
        for own in plans
        for study in recipe.studies()
        for seed in recipe.seeds
    ]
    return [one for one in found if one is not None]


def _page(recipe: Recipe, plan: Plan) -> str:
    runs = _runs(recipe, plan)
    paper, reduced = _runs(recipe, plan, "paper"), _runs(recipe, plan, "reduced")
    whole = len(recipe.studies()) * len(recipe.seeds)
    short = [one for one in paper if one["rounds"] < one["published_rounds"]]
    text = [f"# {recipe.paper}, {recipe.title}", "", conclude(recipe, plan), ""]
    text += [f"![Published figures and ours]({recipe.name}.png)", ""]
    state = f"{len(paper)} of {whole} runs are finished at the published size"
    if short:
        state += f", {len(short)} of them with fewer rounds than published"
    state += (
        f", and {len(reduced)} of {len(recipe.studies())} at reduced scale." if reduced else "."
    )
    seconds = sum(one["seconds"] for one in runs)
    text += [f"{state} They took {duration(seconds)} on {hardware(runs)}.", "", *LEGEND]
    text += ["", markdown(recipe, plan)]
    if reduced and recipe.reduced:
        text += ["## Reduced scale", "", recipe.reduced, ""]
    text += _orders(recipe, plan)
    text += _differences(recipe, plan)
    if recipe.notes:
        text += ["## Notes", "", *(f"- {note}" for note in recipe.notes), ""]
    checks = _check_averages(recipe, plan)
    if checks:
        text += ["## Checks", "", *(f"- {one}" for one in checks), ""]
    if recipe.departures:
        text += ["## Differences from the paper", ""]
        text += [*(f"- {one}" for one in recipe.departures), ""]
    text += ["## Run it again", "", "<!-- skip -->", "```console"]
    text += [
        f"$ coterie reproduce {recipe.name}",
        f"$ coterie reproduce {recipe.name} --scale reduced",
    ]
    return "\n".join([*text, "```"]).rstrip() + "\n"


LEGEND = (
    "Columns: **published** is the figure of the paper, **paper** ours at the published size, "
    "**reduced** ours at reduced scale, which cannot be compared with the published figures but "
    "shows the order of the methods. A figure without ± is from one seed. An empty cell has not "
    "run yet. The best figure of a block is bold. ≠ marks a figure that differs from the published "
    "one by more than two published standard deviations and by more than 0.5 points of accuracy or "
    "0.05 of ARI; runs with fewer rounds, or older than a correction of the method, are not "
    "compared.",
)


def conclude(recipe: Recipe, plan: Plan) -> str:
    """What the figures say: who is best, and whether the published order holds."""
    parts = []
    wins: Counter[str] = Counter()
    blocks = 0
    for part, column in dict.fromkeys((e.part, e.column) for e in recipe.entries):
        own = ours_by_row(recipe, plan, part, column, _widest(recipe, plan, part, column))
        metric = next(e.metric for e in recipe.entries if e.column == column)
        key = is_better(metric)
        rows = {e.row for e in recipe.entries if (e.part, e.column) == (part, column)}
        if key is None or len(own) < 2 or 2 * len(own) < len(rows) or metric in SPEEDS:
            continue  # the best of a few methods says little
        top = max(round(key(value), 3) for value in own.values())
        best = [row for row, value in own.items() if round(key(value), 3) == top]
        if len(best) < len(own):
            blocks += 1
            wins.update(best)
    if wins:
        names = [f"{name(row)} ({count} of {blocks})" for row, count in wins.most_common(3)]
        parts.append(f"Most often best in our runs: {', '.join(names)}.")
    for row, rival in recipe.compare:
        good, count = _count_pairs(recipe, plan, row, rival)
        if count:
            parts.append(f"{name(row)} is at least as good as {name(rival)} in {good} of {count}.")
    agreements = [one["correlation"] for one in orders(recipe, plan)]
    if agreements:
        mean = sum(agreements) / len(agreements)
        parts.append(
            f"The order of the methods agrees with the published order with a rank correlation of "
            f"{mean:.2f} (mean over {len(agreements)} columns; 1 is the same order)."
        )
    return " ".join(parts) or "There are too few runs to conclude anything yet."


SPEEDS = ("first_round", "stable_round")  # a dash is no figure: the winners would be misleading


def name(row: str) -> str:
    """A method's name as it is written in a sentence."""
    return f"`{row}`" if row.split(",")[0] in OURS else row


def _widest(recipe: Recipe, plan: Plan, part: str, column: str) -> str:
    """The scale with the most methods in a block; paper scale if equal."""
    return max(scales(plan), key=lambda s: len(ours_by_row(recipe, plan, part, column, s)))


def _count_pairs(recipe: Recipe, plan: Plan, row: str, rival: str) -> tuple[int, int]:
    """In how many columns a method is at least as good as another, and of how many."""
    good = count = 0
    for part, column in dict.fromkeys((e.part, e.column) for e in recipe.entries):
        key = is_better(next(e.metric for e in recipe.entries if e.column == column))
        for scale in scales(plan):
            own = ours_by_row(recipe, plan, part, column, scale)
            if key is not None and row in own and rival in own:
                count += 1
                good += round(key(own[row]), 3) >= round(key(own[rival]), 3)
                break
    return good, count


def orders(recipe: Recipe, plan: Plan) -> list[dict[str, Any]]:
    """For each block with published figures: both orders of the methods, and how they agree."""
    from scipy.stats import spearmanr

    out = []
    for part, column in dict.fromkeys((e.part, e.column) for e in recipe.entries):
        entries = [e for e in recipe.entries if (e.part, e.column) == (part, column)]
        key = is_better(entries[0].metric)
        printed = {e.row: e.published.mean for e in entries if e.published is not None}
        scale = _widest(recipe, plan, part, column)
        ours = ours_by_row(recipe, plan, part, column, scale)
        both = [row for row, value in printed.items() if value is not None and row in ours]
        if key is None or len(both) < 4 or entries[0].metric in SPEEDS:
            continue
        theirs = {row: key(printed[row] or 0.0) for row in both}
        own = {row: key(ours[row]) for row in both}
        if len(set(theirs.values())) < 2 or len(set(own.values())) < 2:
            continue
        found = spearmanr(list(theirs.values()), list(own.values())).statistic
        out.append(
            {
                "part": part,
                "column": column,
                "scale": scale,
                "methods": len(both),
                "published": sorted(both, key=lambda row: -theirs[row]),
                "ours": sorted(ours, key=lambda row: -key(ours[row])),
                "correlation": float(found),
            }
        )
    return out


def _orders(recipe: Recipe, plan: Plan) -> list[str]:
    found = orders(recipe, plan)
    if not found:
        return []
    text = ["## Order of the methods", ""]
    text += ["The best three of each column, and the rank correlation of all methods with both "]
    text += ["figures (1: the same order, 0: none).", ""]
    text += [
        "| | | published | ours | scale | methods | correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        theirs, own = (", ".join(one[side][:3]) for side in ("published", "ours"))
        cells = [one["part"], one["column"], theirs, own, one["scale"], str(one["methods"])]
        text.append("| " + " | ".join([*cells, f"{one['correlation']:.2f}"]) + " |")
    return [*text, ""]


def _differences(recipe: Recipe, plan: Plan) -> list[str]:
    """Figures in percent that differ from the published ones by more than 3 points, and why."""
    rows = []
    for entry in recipe.entries:
        ours, found = figures(entry, recipe, replace(plan, scale="paper"))
        gap = difference(entry, ours)
        whole = all(
            one["rounds"] >= one["published_rounds"] and "remark" not in one for one in found
        )
        if gap is None or not whole or "%" not in recipe.title or abs(gap) <= 3:
            continue
        assert entry.published is not None
        why = " ".join([*entry.notes, *_groups_found(entry, found)]) or "No explanation yet."
        cells = [entry.part, entry.row, entry.column, entry.published.text, ours.text(1)]
        rows.append("| " + " | ".join([*cells, f"{gap:+.1f}", why]) + " |")
    if not rows:
        return []
    head = ["## Differences above 3 points, at the published size", ""]
    head += [
        "| | method | | published | ours | difference | why |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*head, *rows, ""]


def _groups_found(entry: Entry, found: list[dict[str, Any]]) -> list[str]:
    """How well our runs and the published ones found the groups, where they differ."""
    printed = [
        other.published
        for recipe in RECIPES.values()
        for other in recipe.entries
        if other.metric == "ari" and other.study is not None and other.published is not None
        if entry.study is not None and other.study.name == entry.study.name
    ]
    ours = [one["ari"] for one in found if one.get("ari") is not None]
    if not ours or not printed or printed[0].mean is None:
        return []
    own = ", ".join(f"{value:.2f}" for value in ours)
    mean = sum(ours) / len(ours)
    if abs(mean - printed[0].mean) < 0.05:
        return [f"It is not the groups: ARI {own} in our runs, published {printed[0].text}."]
    return [f"Groups: ARI {own} in our runs, published {printed[0].text}."]


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


def count_cells(recipe: Recipe, plan: Plan) -> tuple[int, int, int]:
    """The number of cells, of those with a figure at paper scale, and of the rest at reduced."""
    paper = reduced = 0
    for entry in recipe.entries:
        if figures(entry, recipe, replace(plan, scale="paper"))[1]:
            paper += 1
        elif figures(entry, recipe, replace(plan, scale="reduced"))[1]:
            reduced += 1
    return len(recipe.entries), paper, reduced


def _index(plan: Plan, done: list[Recipe]) -> str:
    counts = {recipe.name: count_cells(recipe, plan) for recipe in RECIPES.values()}
    whole, paper, reduced = (sum(one[i] for one in counts.values()) for i in range(3))
    text = [
        "# Results",
        "",
        "These pages are for readers of the papers. They compare published tables with our own",
        "runs. Each page has the published figures, our figures, the order of the methods, and",
        "how our runs differ from the paper. Rows named after a paper's method run the method",
        "of the paper; `census`, `blend` and `mosaic` are our own methods.",
        "[](../reproducing.md) says how to run a table again.",
        "",
        "The pages are generated from [the summaries](summaries.jsonl) of the runs. Times are",
        "wall-clock times; the machine was shared with other programs.",
        "",
        f"**{len(done)} of {len(RECIPES)} tables and figures have a page.** Of {whole:,} cells, "
        f"{paper:,} have a figure at the published size, {reduced:,} more at reduced scale, and "
        f"{whole - paper - reduced:,} have not run yet.",
        "",
        "| table | content | cells | published size | reduced only | not run | hours for all |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in RECIPES.values():
        link = f"[{recipe.name}]({recipe.name}.md)" if recipe in done else f"`{recipe.name}`"
        cells, full, small = counts[recipe.name]
        what = f"{recipe.paper}, {recipe.title}"
        figures_ = f"{cells} | {full} | {small} | {cells - full - small}"
        text.append(f"| {link} | {what} | {figures_} | {recipe.hours():.0f} |")
    text += ["", "Hours for all: an estimate for all seeds at the published size, on one core."]
    text += ["", "```{toctree}", ":hidden:", ""]
    text += [recipe.name for recipe in done]
    return "\n".join([*text, "```", ""])
