"""Which methods did best for which kind of difference, from the stored summaries of the runs.

python -m coterie_lab.chooser --run     run what is missing of the small runs
python -m coterie_lab.chooser           write the data file, the section of the page, the picture
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import stdev
from typing import Any

from coterie.core.algorithm import REGISTRY
from coterie.measured import FILE, measurements
from coterie.running.build import Description
from coterie.running.folder import write
from coterie_lab import plugin  # registers the partitions
from coterie_lab.pages import STORE, json_lines
from coterie_lab.recipe import METHODS, Study, local_training
from coterie_lab.recipes.clove_images import MIXINGS
from coterie_lab.reproduce import Plan, Task, perform, read_summary

KINDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "label skew 1": (
        "groups without a common label",
        ("kinds/*/label-skew-1", "clove/mnist/label-skew-1"),
        8,
    ),
    "label skew 2": (
        "groups of four labels, any two share two",
        ("kinds/*/label-skew-2", "clove/mnist/label-skew-2"),
        8,
    ),
    "label skew 3": (
        "groups lack one label each",
        ("kinds/*/label-skew-3", "clove/mnist/label-skew-3"),
        8,
    ),
    "label skew 4": (
        "each group has one frequent label",
        ("kinds/*/label-skew-4", "clove/mnist/label-skew-4"),
        8,
    ),
    "rotation": (
        "groups see turned images",
        ("kinds/*/feature-skew", "clove/mnist/feature-skew"),
        8,
    ),
    "concept shift": (
        "groups give the same inputs other labels",
        ("kinds/*/concept-shift", "clove/mnist/concept-shift"),
        8,
    ),
    "mixture": ("each client mixes two kinds of images", ("fedgmi/*mnist/k2-s*",), 5),
    "quantity": ("clients differ in size only", ("kinds/digits/quantity",), 8),
    "none": ("clients do not differ", ("kinds/digits/none",), 8),
}
"""Kinds of difference: what it means, the blocks of runs, and the fewest methods."""
SOURCES = ("mnist", "fashion_mnist")
SEEDS = (1, 2, 3)
CHOICES = (*METHODS.values(), "fedprox", "ditto")
"""The methods of the small runs."""
METRICS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "accuracy": ("accuracy, %", "{:.1f}", lambda value: -value),
    "worst_decile": ("worst tenth, %", "{:.1f}", lambda value: -value),
    "ari": ("right groups, ARI", "{:.2f}", lambda value: -value),
    "megabytes": ("least traffic, MB", "{:.1f}", lambda value: value),
    "seconds": ("least time, s", "{:.0f}", lambda value: value),
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def small_runs() -> list[Study]:
    """Every method on small clients of each kind: MNIST, Fashion-MNIST and digits."""
    out = []
    for source in SOURCES:
        for mixing, (partition, k, _, _) in MIXINGS.items():
            data = {**partition, "source": source, "n": 60, "clients_per_group": 3}
            data.pop("test_shares", None)  # clients are tested on what they train on
            place = f"kinds/{source}/{mixing.lower().replace(' ', '-')}"
            out += [_small_run(place, name, data, k) for name in CHOICES]
    for kind, sizes in (("none", "equal"), ("quantity", "unequal")):
        data = {"name": "digits_without_groups", "sizes": sizes}
        out += [_small_run(f"kinds/digits/{kind}", name, data, 4) for name in CHOICES]
    return out


def _small_run(place: str, name: str, data: dict[str, Any], k: int) -> Study:
    known = {field.name for field in fields(REGISTRY[name])}
    own: dict[str, Any] = {"name": name}
    if name == "census":
        own["max_groups"] = k + 2  # it finds the number
    elif "n_groups" in known:
        own["n_groups"] = k
    local = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 20}

    def describe(seed: int, scale: str) -> Description:
        return {
            "algorithm": own,
            "model": {"name": "mlp", "hidden": [32]},
            "local": local_training("CFL-S", local) if name == "cfl" else local,
            "data": {**data, "seed": seed},
            "run": {"rounds": 30, "seed": seed},
        }

    return Study(f"{place}/{name}", describe)


def run_missing(plan: Plan, store: Path) -> None:
    """Run what is missing of the small runs, and add the summaries to the store."""
    known = json_lines(store)
    have = {(one["study"], one["seed"]) for one in known}
    for seed in SEEDS:
        for study in small_runs():
            if (study.name, seed) not in have:
                found = read_summary(plan, study.name, seed) or perform(Task(study, seed), plan)
                known.append(found)
                print(f"{study.name}, seed {seed}: {found['accuracy']:.1f} %", flush=True)
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
        chosen = {
            block: (scale, _same_seeds(found))
            for block, (scale, found) in chosen.items()
            if len(found) >= fewest
        }
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
            "seeds": min(len(found[name]) for _, found in chosen.values() for name in common),
            "spread": _spread([found[name] for _, found in chosen.values() for name in common]),
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


def _same_seeds(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of the seeds that all methods of a block have; all runs if there is none."""
    seeds = set.intersection(*({one.get("seed") for one in runs} for runs in found.values()))
    return {
        name: [one for one in runs if one.get("seed") in seeds] or runs
        for name, runs in found.items()
    }


def _spread(blocks: list[list[dict[str, Any]]]) -> float | None:
    """Typical standard deviation of a method's accuracy over seeds; None with one seed."""
    own = [stdev(one["accuracy"] for one in runs) for runs in blocks if len(runs) > 1]
    return round(sum(own) / len(own), 2) if own else None


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
        "The figures of a row are means over these partitions:",
        "",
        "| difference | partitions | scale | methods | seeds | deviation over seeds |",
        "|---|---|---|---|---|---|",
        *(_basis(kind, entry) for kind, entry in found.items()),
        "",
        "- **Small runs** train a network with 32 hidden units for 30 rounds, on groups of three "
        "clients with 60 images each, or on 20 clients with digits.",
        "- **The number of groups** was given to methods that need it; it was four where there are "
        "no groups. `census` got an upper bound two larger.",
        "- **Traffic and time** leave out `local_only`. Times were measured on a shared machine "
        "and say little about small differences.",
        "- **The deviation** is the standard deviation of a method's accuracy. Methods that differ "
        "by less cannot be told apart.",
    ]
    if missing:
        text.append(f"\nNot measured with enough methods yet: {', '.join(missing)}.")
    return "\n".join([*text, "", END])


def _basis(kind: str, entry: dict[str, Any]) -> str:
    """A row of the table that says how much a row of figures rests on."""
    spread = "" if entry["spread"] is None else f"{entry['spread']:.1f} points"
    cells = ["<br>".join(entry["blocks"]), ", ".join(entry["scales"]), len(entry["methods"])]
    return "| " + " | ".join(map(str, [kind, *cells, entry["seeds"], spread])) + " |"


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
