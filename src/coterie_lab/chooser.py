"""Which methods did best for which kind of difference, from the stored summaries of the runs.

python -m coterie_lab.chooser --run     run what is missing on clients without groups
python -m coterie_lab.chooser           write the data file, the section of the page, the picture
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from coterie.measured import FILE, measurements
from coterie.running.build import Description
from coterie.running.folder import write
from coterie_lab import plugin  # registers the partitions
from coterie_lab.pages import STORE, json_lines
from coterie_lab.recipe import METHODS, Study, method
from coterie_lab.reproduce import Plan, Task, perform, read_summary

KINDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "label skew 1": ("groups without a common label", ("clove/*/label-skew-1",), 8),
    "label skew 2": ("groups of four labels, any two share two", ("clove/*/label-skew-2",), 8),
    "label skew 3": ("groups lack one label each", ("clove/*/label-skew-3",), 8),
    "label skew 4": ("each group has one frequent label", ("clove/*/label-skew-4",), 8),
    "rotation": (
        "groups see turned images",
        ("clove/*mnist/feature-skew", "ifca/rotated-mnist/*"),
        8,
    ),
    "concept shift": (
        "groups give the same inputs other labels",
        ("clove/*/concept-shift", "clove/cifar10/feature-skew"),
        8,
    ),
    "mixture": ("each client mixes two kinds of images", ("fedgmi/*mnist/k2-s*",), 5),
    "quantity": ("clients differ in size only", ("kinds/digits/quantity",), 8),
    "none": ("clients do not differ", ("kinds/digits/none",), 8),
}
"""Kinds of difference: what it means, the blocks of the tables, and the fewest methods."""
METRICS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "accuracy": ("accuracy, %", "{:.1f}", lambda value: -value),
    "worst_decile": ("worst tenth, %", "{:.1f}", lambda value: -value),
    "ari": ("right groups, ARI", "{:.2f}", lambda value: -value),
    "megabytes": ("least traffic, MB", "{:.1f}", lambda value: value),
    "seconds": ("least time, s", "{:.0f}", lambda value: value),
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def without_groups() -> list[Study]:
    """Every method on digits whose clients are alike, or differ in size only."""

    def study(kind: str, row: str) -> Study:
        def describe(seed: int, scale: str) -> Description:
            sizes = "equal" if kind == "none" else "unequal"
            own = method(row, None if row == "census" else 4)
            return {
                "algorithm": own | ({"max_groups": 6} if row == "census" else {}),
                "model": {"name": "mlp", "hidden": [32]},
                "local": {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 20},
                "data": {"name": "digits_without_groups", "sizes": sizes, "seed": seed},
                "run": {"rounds": 15, "seed": seed},
            }

        return Study(f"kinds/digits/{kind}/{METHODS[row]}", describe)

    return [study(kind, row) for kind in ("none", "quantity") for row in METHODS]


def run_missing(plan: Plan, store: Path) -> None:
    """Run every method on clients without groups, and add the summaries to the store."""
    known = json_lines(store)
    have = {one["study"] for one in known}
    for study in without_groups():
        if study.name not in have:
            found = read_summary(plan, study.name, 1) or perform(Task(study, 1), plan)
            known.append(found)
            print(f"{study.name}: {found['accuracy']:.1f} %", flush=True)
    lines = [json.dumps(one, sort_keys=True) for one in known]
    write(store, ("\n".join(lines) + "\n").encode())


def measure(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the methods by kind of difference, best first.

    A block is one partition of one data set. Its figures are of one scale, the one with more
    methods. A method's figure is its mean over the blocks with enough methods; methods that are
    missing in one of them are left out.
    """
    out: dict[str, Any] = {}
    for kind, (meaning, patterns, fewest) in KINDS.items():
        blocks: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
        for one in summaries:
            block, _, name = one["study"].rpartition("/")
            whole = one["rounds"] >= one["published_rounds"] and "remark" not in one
            if whole and "accuracy" in one and any(fnmatchcase(block, p) for p in patterns):
                scale = blocks.setdefault(block, {}).setdefault(one["scale"], {})
                scale.setdefault(name, []).append(one)
        chosen = {
            block: max(found.items(), key=lambda pair: (len(pair[1]), pair[0] == "paper"))
            for block, found in blocks.items()
        }
        chosen = {block: pair for block, pair in chosen.items() if len(pair[1]) >= fewest}
        if not chosen:
            continue
        common = set.intersection(*(set(found) for _, found in chosen.values()))
        entry: dict[str, Any] = {
            "meaning": meaning,
            "blocks": sorted(chosen),
            "scales": sorted(
                {
                    "small" if block.startswith("kinds/") else scale
                    for block, (scale, _) in chosen.items()
                }
            ),
            "methods": sorted(common),
        }
        for metric, (_, _, better) in METRICS.items():
            rows = []
            for name in common:
                values = [_mean(found[name], metric) for _, found in chosen.values()]
                known = [value for value in values if value is not None]
                if len(known) == len(values):
                    rows.append((name, sum(known) / len(known)))
            if metric in ("megabytes", "seconds"):  # those who share nothing win trivially
                rows = [row for row in rows if row[0] != "local_only"]
            rows.sort(key=lambda row: (better(row[1]), row[0]))
            entry[metric] = [[name, round(value, 4)] for name, value in rows]
        out[kind] = entry
    return out


def _mean(runs: list[dict[str, Any]], metric: str) -> float | None:
    values = [one["bytes"] / 1e6 if metric == "megabytes" else one.get(metric) for one in runs]
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def section(found: dict[str, Any]) -> str:
    """The section of the page: the best three methods of each kind, by each metric."""
    text = [BEGIN, ""]
    heads = ["difference", *(head for head, _, _ in METRICS.values())]
    text += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind, entry in found.items():
        cells = [f"**{kind}**: {entry['meaning']}"]
        for metric, (_, form, _) in METRICS.items():
            best = [f"`{name}` {form.format(value)}" for name, value in entry[metric][:3]]
            cells.append("<br>".join(one.replace(" ", "\u00a0") for one in best))
        text.append("| " + " | ".join(cells) + " |")
    missing = [kind for kind in KINDS if kind not in found]
    text += [
        "",
        "![How far each method is behind the best, by kind of difference](choosing-a-method.png)",
        "",
        "Each row is a mean over these partitions: "
        + "; ".join(
            f"{kind}: {', '.join(entry['blocks'])} ({' and '.join(entry['scales'])} scale, "
            f"{len(entry['methods'])} methods)"
            for kind, entry in found.items()
        )
        + ". One seed each unless a [result page](results/index.md) shows more. Methods that need "
        "the number of groups got the true number; where there are no groups, four. "
        "`local_only` is left out of traffic and time. Seconds were measured on a shared machine "
        "and say little about small differences. One seed cannot tell methods apart that differ by "
        "a point or two.",
    ]
    if missing:
        text.append(f"\nNot measured with enough methods yet: {', '.join(missing)}.")
    return "\n".join([*text, "", END])


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw how many points of accuracy each method is behind the best, by kind of difference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from coterie.report.page import DPI, INK, use_style

    kinds = list(found)
    methods = sorted({name for entry in found.values() for name, _ in entry["accuracy"]})
    behind = [
        [
            entry["accuracy"][0][1] - dict(map(tuple, entry["accuracy"])).get(name, float("nan"))
            for entry in found.values()
        ]
        for name in methods
    ]
    order = sorted(range(len(methods)), key=lambda i: _typical(behind[i]))
    with use_style():
        page = Figure(figsize=(2.2 + 1.0 * len(kinds), 1.4 + 0.34 * len(methods)), dpi=DPI)
        FigureCanvasAgg(page)
        page.set_layout_engine("constrained")
        axes = page.subplots()
        axes.grid(False)
        axes.imshow(
            [behind[i] for i in order], cmap="YlOrBr", vmin=0, vmax=30, aspect="auto", alpha=0.75
        )
        axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
        axes.set_yticks(range(len(methods)), [methods[i] for i in order])
        for y, i in enumerate(order):
            for x, value in enumerate(behind[i]):
                if value == value:
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=INK, fontsize=9)
        axes.set_title("Points of accuracy behind the best method", color=INK, fontsize=11)
        page.savefig(path)


def _typical(values: list[float]) -> float:
    own = [value for value in values if value == value]
    return sum(own) / len(own) if own else float("inf")


def main() -> None:
    """Run what is missing, or write data file, page and picture."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    reader.add_argument("--docs", type=Path, default=Path("docs"))
    reader.add_argument("--out", type=Path, default=Path("results"))
    reader.add_argument("--run", action="store_true", help="run clients without groups")
    given = reader.parse_args()
    store = given.docs / "results" / STORE
    if given.run:
        run_missing(replace(Plan(), out=given.out), store)
    found = measure(json_lines(store))
    write(FILE, (json.dumps(found, indent=1) + "\n").encode())
    page = given.docs / "choosing-a-method.md"
    text = page.read_text()
    head, rest = text.split(BEGIN)
    write(page, (head + section(found) + rest.split(END)[1]).encode())
    picture(found, given.docs / "choosing-a-method.png")
    measurements.cache_clear()


assert plugin

if __name__ == "__main__":
    main()
