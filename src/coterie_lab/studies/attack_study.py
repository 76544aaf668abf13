"""Clients that lie: what is left for the honest ones, and what protection costs without liars.

    python -m coterie_lab.studies.attack_study --json attacks.json

Four parts, all with `coterie.fit`, ten rounds and seeds from 100 on, which no rule was chosen on:

    attacks    all attacks of `coterie_lab.attacks` by 10, 20 and 30 % of the clients; all defaults
    policies   every rule for means, without an attack and under all attacks on updates by 20 %; the
               groups are given, so that nothing but the mean differs
    minority   40 clients, 4 of which are of a kind of their own; no liars, or 20 % of the others
    clean      100 federations without liars: is any client called odd or set aside?

Two federations: `digits`, 40 clients in 4 groups whose images are rotated, and `cancer`, the table
of breast cancer diagnoses of scikit-learn dealt to 20 clients, of which half use the two labels the
other way round. A figure that the file holds is not computed again, so the study may be stopped at
any time. `--page` and `--picture` write the tables and the picture of `docs/liars.md`.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

import coterie
from coterie import metrics
from coterie.core.aggregate import HeldMean
from coterie.core.tree import leaves
from coterie.data import FederatedData, digits, from_arrays
from coterie.fitted import Fitted
from coterie_lab.attacks import ATTACKS, HALVES, UPDATES, hostile, swap_labels
from coterie_lab.studies import evidence_cases as cases
from coterie_lab.studies.common import Store, options

SHARES = (0.1, 0.2, 0.3)
RULES = ("clipped", "trimmed", "median", "geometric_median", "krum", "centred_clipping")
POLICIES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "plain": {"mean": "plain"},
    "plain, capped": {"mean": "plain"},
    **{rule: {"mean": rule} for rule in RULES},
    "geometric_median, capped": {"mean": "geometric_median"},
}
CAPS = {"digits": 150, "cancer": 20}
"""Samples that a client counts with where the rule is capped; clients have 144, and 19 or 20."""
ROUNDS = 10
FIRST, SEEDS = 100, 5
CLEAN = {"cancer": 60, "digits": 20, "mnist": 20}
LOST = 0.03
"""Accuracy that liars may cost the honest clients."""
FOUND = 0.95
"""Adjusted Rand index of the honest clients' groups that must be reached."""


def cancer(seed: int, clients: int = 20, groups: int = 2) -> FederatedData:
    """Breast cancer diagnoses, assigned at random; the second half of the clients swaps labels."""
    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    parts = np.array_split(order, clients)
    truth = [i * groups // clients for i in range(clients)]
    labels = [1 - y[p] if group else y[p] for p, group in zip(parts, truth, strict=True)]
    return from_arrays(
        [x[p] for p in parts], labels, truth=truth, test_fraction=0.3, seed=seed,
        task="classification", n_outputs=2,
    )  # fmt: skip


def minority(seed: int) -> FederatedData:
    """40 clients of 45 digits each; the images of the last four are turned by 90 degrees."""
    parts = {split: digits(40, 1, seed=seed).gather(split, torch.arange(40)) for split in SPLITS}
    rows: dict[str, Any] = {}
    for split, batch in parts.items():
        xs = [batch.x[i][batch.mask[i]] for i in range(40)]
        turned = [x.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64) for x in xs[36:]]
        rows[split] = xs[:36] + turned, [batch.y[i][batch.mask[i]] for i in range(40)]
    return from_arrays(
        *rows["train"], test=rows["test"], truth=[0] * 36 + [1] * 4,
        task="classification", n_outputs=10,
    )  # fmt: skip


def mnist(seed: int) -> FederatedData:
    """20 clients of 40 to 120 images of one kind."""
    case = cases.odd_ones(20, [], np.random.default_rng(seed))
    return cases.federation(case, 0.2)


SPLITS = ("train", "test")
DATA = {"digits": lambda seed: digits(seed=seed), "cancer": cancer}
OTHERS = {"minority": minority, "mnist": mnist}


@contextmanager
def held_bytes() -> Iterator[list[int]]:
    """The largest number of bytes that a mean held at once."""
    most, honest = [0], HeldMean.result

    def result(self: HeldMean) -> Any:
        size = sum(x.nbytes for values, *_ in self.held for x in leaves(values))
        most[0] = max(most[0], size)
        return honest(self)

    HeldMean.result = result  # type: ignore[method-assign]
    try:
        yield most
    finally:
        HeldMean.result = honest  # type: ignore[method-assign]


def choose_liars(n: int, share: float, seed: int, among: int) -> list[int]:
    """The clients that lie: a share of all, drawn from the first `among`."""
    draw = torch.Generator().manual_seed(seed + 7)
    return sorted(torch.randperm(among, generator=draw)[: round(share * n)].tolist())


def measure(name: str) -> dict[str, Any]:
    """One run, by its name "part/data/attack/share/policy/seed", judged by its honest clients.

    Without an attack the same clients are left out of the figures that would lie with one.
    """
    part, where, attack, share, policy, number = name.split("/")
    seed = int(number)
    data = {**DATA, **OTHERS}[where](seed)
    n = len(data)
    assert data.truth is not None
    truth = torch.as_tensor(data.truth)
    liars = choose_liars(n, float(share), seed, 36 if where == "minority" else n)
    given: dict[str, Any] = {}
    if POLICIES[policy] is not None:
        given["policy"] = {**(POLICIES[policy] or {})}
        if policy.endswith(", capped"):
            given["policy"]["cap"] = CAPS[where]
    if part == "policies":
        kinds = dict(zip(data.names, truth.tolist(), strict=True))
        given |= {"start": kinds, "n_groups": int(truth.max()) + 1}
    if attack == "labels":
        data = swap_labels(data, liars)
    began = time.process_time()
    with (
        warnings.catch_warnings(),
        hostile(attack, liars, truth, seed),
        held_bytes() as held,
    ):
        warnings.simplefilter("ignore")
        fit = coterie.fit(
            data,
            rounds=ROUNDS,
            seed=seed,
            compare=False,
            progress=False,
            settings={"why": "nothing"},
            **given,
        )
    seconds = time.process_time() - began
    return judge(fit, truth, liars) | {
        "seconds": round(seconds, 2),
        "held": held[0],
        "bytes": fit.summary["bytes"],
    }


def judge(fit: Fitted, truth: torch.Tensor, liars: list[int]) -> dict[str, Any]:
    """ARI and accuracy of the honest clients, and who was set aside."""
    honest = [i for i in range(len(truth)) if i not in liars]
    group = torch.tensor([line["group"] for line in fit.rows])
    accuracy = [fit.rows[i]["accuracy"] for i in honest]
    odd = {fit.names.index(name) for name in fit.odd}
    away = 0  # honest clients that are not with most of their kind
    for kind in truth[honest].unique().tolist():
        of_kind = [i for i in honest if int(truth[i]) == kind]
        away += len(of_kind) - int(group[of_kind].bincount().max())
    ari = metrics.adjusted_rand(group[honest], truth[honest])
    return {
        "ari": float(len(group[honest].unique()) == 1) if ari is None else ari,
        "accuracy": sum(accuracy) / len(accuracy),
        "worst": min(accuracy),
        "groups": fit.n_groups,
        "honest_groups": len({int(group[i]) for i in honest if i not in odd}),
        "liars": len(liars),
        "set_aside": len(odd & set(liars)),
        "honest_set_aside": len(odd - set(liars)),
        "away": away,
    }


def cases_of(seeds: int) -> list[str]:
    """Names of all runs, the most telling first, so that a study stopped early says the most."""
    out = []
    for seed in range(FIRST, FIRST + seeds):
        for where in ("cancer", "digits"):
            out += [f"attacks/{where}/{a}/0.2/default/{seed}" for a in ("none", *ATTACKS)]
        for where in ("cancer", "digits"):
            out += [f"policies/{where}/none/0.2/{p}/{seed}" for p in POLICIES if p != "default"]
            out += [f"policies/{where}/{a}/0.2/plain/{seed}" for a in UPDATES]
        for attack in ("none", "permuted", "crafted", "labels"):
            out.append(
                f"minority/minority/{attack}/{0.0 if attack == 'none' else 0.2}/default/{seed}"
            )
    for where, number in CLEAN.items():
        out += [f"clean/{where}/none/0.0/default/{FIRST + 100 + i}" for i in range(number)]
    for seed in range(FIRST, FIRST + seeds):
        for where in ("cancer", "digits"):
            out += [
                f"policies/{where}/{a}/0.2/{p}/{seed}"
                for a in UPDATES for p in POLICIES if p not in ("default", "plain")
            ]  # fmt: skip
    for seed in range(FIRST, FIRST + seeds):
        for share in (0.3, 0.1):
            for where in ("cancer", "digits"):
                whole = [a for a in ATTACKS if a not in HALVES]
                out += [f"attacks/{where}/{a}/{share}/default/{seed}" for a in whole]
    return list(dict.fromkeys(out))


def gather(figures: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The runs of a case, one for each seed that is there."""
    return [run for name, run in figures.items() if name.rsplit("/", 1)[0] == key]


def mean(runs: list[dict[str, Any]], what: str) -> float:
    return sum(run[what] for run in runs) / len(runs)


def lost(figures: dict[str, Any], key: str, baseline: str) -> float:
    """Accuracy that an attack costs the honest clients, over the seeds that both have."""
    pairs = [
        (figures[f"{baseline}/{name.rsplit('/', 1)[1]}"]["accuracy"], run["accuracy"])
        for name, run in figures.items()
        if name.rsplit("/", 1)[0] == key and f"{baseline}/{name.rsplit('/', 1)[1]}" in figures
    ]
    return sum(a - b for a, b in pairs) / max(len(pairs), 1)


class Table(NamedTuple):
    """A table of the page: its place, its heads and its rows."""

    place: str
    heads: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        rows = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def tabulate_attacks(figures: dict[str, Any]) -> Table:
    """Index, accuracy and points lost by attack, data and share; bold where a goal is missed."""
    rows = []
    shares = [s for s in SHARES if any(f"/{s}/default/" in name for name in figures)]
    for attack in ("none", *ATTACKS):
        cells = [attack]
        for where in DATA:
            base = f"attacks/{where}/none/0.2/default"
            for share in shares:
                key = f"attacks/{where}/{attack}/{share}/default"
                cells.append(_judge(gather(figures, key), lost(figures, key, base)))
        rows.append(cells)
    heads = ["attack", *(f"{where}, {share:.0%}" for where in DATA for share in shares)]
    return Table("attacks", heads, rows)


def _judge(runs: list[dict[str, Any]], gone: float) -> str:
    if not runs:
        return "-"
    ari = mean(runs, "ari")
    index = f"{ari:.2f}" if ari >= FOUND else f"**{ari:.2f}**"
    points = f"{100 * gone:+.1f}" if gone <= LOST else f"**{100 * gone:+.1f}**"
    few = "" if len(runs) == SEEDS else f" ({len(runs)})"
    return f"{index} / {100 * mean(runs, 'accuracy'):.1f} / {points}{few}"


def tabulate_aside(figures: dict[str, Any]) -> Table:
    """Who is set aside at 20 %, and how many groups are found."""
    rows = []
    for attack in ("none", *ATTACKS):
        cells = [attack]
        for where in DATA:
            runs = gather(figures, f"attacks/{where}/{attack}/0.2/default")
            if not runs:
                cells += ["-"] * 3
                continue
            liars = sum(run["liars"] for run in runs) if attack != "none" else 0
            told = sum(run["set_aside"] for run in runs)
            cells += [
                f"{told} of {liars}" if liars else "",
                str(sum(run["honest_set_aside"] for run in runs) + (0 if liars else told)),
                f"{mean(runs, 'groups'):.1f}",
            ]
        rows.append(cells)
    heads = ["attack"]
    for where in DATA:
        heads += [f"{where}: liars set aside", "honest clients set aside", "groups"]
    return Table("aside", heads, rows)


def tabulate_policies(figures: dict[str, Any]) -> Table:
    """What each rule costs without an attack, and loses under those on updates."""
    rows = []
    for where in DATA:
        base = f"policies/{where}/none/0.2/plain"
        for policy in POLICIES:
            runs = gather(figures, f"policies/{where}/none/0.2/{policy}")
            if not runs:
                continue
            cells = [where, policy, f"{100 * mean(runs, 'accuracy'):.1f} ({len(runs)})"]
            cells += [
                f"{mean(runs, 'seconds') / ROUNDS:.3f}",
                f"{mean(runs, 'bytes') / 1e6:.1f}",
                f"{mean(runs, 'held') / 1e6:.2f}",
            ]
            for attack in UPDATES:
                key = f"policies/{where}/{attack}/0.2/{policy}"
                n = len(gather(figures, key))
                gone = 100 * lost(figures, key, base)
                text = f"{gone:.1f}" if gone <= 100 * LOST else f"**{gone:.1f}**"
                cells.append("-" if not n else text if n == SEEDS else f"{text} ({n})")
            rows.append(cells)
    heads = ["data", "mean", "accuracy", "CPU s a round", "MB sent", "MB held", *UPDATES]
    return Table("policies", heads, rows)


def tabulate_minority(figures: dict[str, Any]) -> Table:
    rows = []
    for attack in ("none", "permuted", "crafted", "labels"):
        share = 0.0 if attack == "none" else 0.2
        runs = gather(figures, f"minority/minority/{attack}/{share}/default")
        if runs:
            whole = sum(run["ari"] == 1.0 for run in runs)
            rows.append([attack, f"{whole} of {len(runs)}", f"{mean(runs, 'ari'):.2f}"])
    return Table("minority", ["attack by 20 %", "a group of its own", "index"], rows)


def tabulate_clean(figures: dict[str, Any]) -> Table:
    rows = []
    for where in CLEAN:
        runs = gather(figures, f"clean/{where}/none/0.0/default")
        some = sum(run["honest_set_aside"] > 0 for run in runs)
        if runs:
            rows.append([where, f"{some} of {len(runs)}", f"{mean(runs, 'ari'):.3f}"])
    return Table("clean", ["data", "any client set aside", "index"], rows)


def write_page(path: Path, tables: list[Table]) -> None:
    """Put each table between its two marks of a page."""
    text = path.read_text()
    for one in tables:
        start, end = f"<!-- {one.place} -->", f"<!-- end of {one.place} -->"
        if start not in text:  # no figures yet
            continue
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{one}\n\n{end}{rest.partition(end)[2]}"
    path.write_text(text)


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """What every attack by 20 % of the clients leaves: index of the groups and accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ["none", *ATTACKS]
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 6.2), sharey=True)
    blue, red = "#4c72b0", "#c44e52"
    for column, (where, title) in enumerate(
        {"digits": "rotated digits, 40 clients", "cancer": "a table, 20 clients"}.items()
    ):
        left, right = axes[2 * column : 2 * column + 2]
        for place, attack in enumerate(names):
            runs = gather(figures, f"attacks/{where}/{attack}/0.2/default")
            if runs:
                left.barh(place, mean(runs, "ari"), 0.7, color=blue)
                right.barh(place - 0.18, 100 * mean(runs, "accuracy"), 0.36, color=blue)
            plain = gather(figures, f"policies/{where}/{attack}/0.2/plain")
            if plain:
                right.barh(place + 0.18, 100 * mean(plain, "accuracy"), 0.36, color=red)
        left.axvline(FOUND, color="black", linewidth=0.8, linestyle=":")
        left.set_xlabel("groups: adjusted Rand index")
        right.set_xlabel("accuracy (%)")
        left.set_xlim(0, 1.02)
        right.set_xlim(0, 102)
        left.set_title(title, loc="left", fontsize=11)
    for axis in axes:
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    if any(name.startswith("policies/") for name in figures):
        bars = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (blue, red)]
        names = ["default of census", "plain means, groups given"]
        figure.legend(bars, names, loc="upper right", ncol=2, frameon=False)
    figure.suptitle("20 % of the clients lie: what is left for the honest ones", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = options(__doc__ or "", SEEDS)
    parser.add_argument("--picture", type=Path, help="file for the picture")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced")
    parser.add_argument("--only", default="", help="run only these parts: a,b")
    parser.add_argument("--show", action="store_true", help="compute nothing")
    chosen = parser.parse_args()
    store = Store(chosen.json)
    for name in () if chosen.show else cases_of(chosen.seeds):
        if name in store or (chosen.only and name.split("/")[0] not in chosen.only.split(",")):
            continue
        store.put(name, measure(name))
        print(name, store.figures[name], flush=True)
    makers = (
        tabulate_attacks, tabulate_aside, tabulate_policies, tabulate_minority, tabulate_clean
    )  # fmt: skip
    tables = [make(store.figures) for make in makers]
    for one in tables:
        print(f"\n{one.place}\n\n{one}")
    if chosen.page is not None:
        write_page(chosen.page, tables)
    if chosen.picture is not None:
        draw_picture(store.figures, chosen.picture)


if __name__ == "__main__":
    main()
