"""Attacks x shares of liars x policies: what is left for the honest clients.

    python -m coterie_lab.studies.attack_study --json attacks.json

Two federations: `digits`, 40 clients in 4 groups whose images are rotated, and `cancer`, the table
of breast cancer diagnoses of scikit-learn dealt to 20 clients, of which half use the two labels the
other way round. `coterie.fit` with its defaults, but 15 rounds, is attacked in all ways of
`coterie_lab.attacks` by 10, 20 and 30 % of the clients; without a policy (plain means), with the
default of `census`, and at 20 % with every policy. A figure that the file holds is not computed
again, so the study may be stopped at any time. `--picture` draws the page's picture.
"""

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

import coterie
from coterie import metrics
from coterie.data import FederatedData, digits, from_arrays
from coterie_lab.attacks import ATTACKS, UPDATES, hostile, swap_labels
from coterie_lab.studies.common import Store, options, table

SHARES = (0.1, 0.2, 0.3)
POLICIES = ("clipped", "trimmed", "median", "geometric_median", "krum", "centred_clipping")
ROUNDS = 15


def cancer(seed: int, clients: int = 20) -> FederatedData:
    """Breast cancer diagnoses, assigned at random; the second half of the clients swaps labels."""
    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    parts = np.array_split(order, clients)
    truth = [int(i >= clients // 2) for i in range(clients)]
    labels = [1 - y[p] if group else y[p] for p, group in zip(parts, truth, strict=True)]
    return from_arrays(
        [x[p] for p in parts], labels, truth=truth, test_fraction=0.3, seed=seed,
        task="classification", n_outputs=2,
    )  # fmt: skip


DATA = {"digits": lambda seed: digits(seed=seed), "cancer": cancer}


def measure(where: str, attack: str, share: float, policy: str, seed: int) -> dict[str, Any]:
    """One run: ARI and accuracy of the honest clients, and who was set aside."""
    data = DATA[where](seed)
    n = len(data)
    assert data.truth is not None
    draw = torch.Generator().manual_seed(seed + 7)
    liars = sorted(torch.randperm(n, generator=draw)[: round(share * n)].tolist())
    given: dict[str, Any] = {} if policy == "default" else {"policy": {"mean": policy}}
    truth = torch.as_tensor(data.truth)
    if attack == "labels":
        data = swap_labels(data, liars)
    began = time.perf_counter()
    with warnings.catch_warnings(), hostile(attack, liars, truth, seed):
        warnings.simplefilter("ignore")
        fit = coterie.fit(data, rounds=ROUNDS, seed=seed, compare=False, **given)
    honest = [i for i in range(n) if i not in liars]
    group = torch.tensor([line["group"] for line in fit.rows])
    accuracy = [fit.rows[i]["accuracy"] for i in honest]
    odd = {fit.names.index(name) for name in fit.odd}
    return {
        "ari": float(metrics.adjusted_rand(group[honest], truth[honest])),
        "accuracy": sum(accuracy) / len(accuracy),
        "worst": min(accuracy),
        "groups": fit.n_groups,
        "liars": len(liars),
        "set_aside": len(odd & set(liars)),
        "honest_set_aside": len(odd - set(liars)),
        "seconds": round(time.perf_counter() - began, 1),
    }


def cases(seeds: int) -> list[tuple[str, str, float, str, int]]:
    """All runs, seed by seed and the most telling first: a study stopped early has all attacks."""
    out: list[tuple[str, str, float, str, int]] = []
    for part in ((0.2,), (0.3, 0.1)):
        for seed in range(seeds):
            for where in DATA:
                for policy in ("default", "plain"):
                    cells = [(attack, share) for share in part for attack in ATTACKS]
                    cells += [("none", 0.0)] if 0.2 in part else []
                    out += [(where, attack, share, policy, seed) for attack, share in cells]
    for seed in range(seeds):
        for where in DATA:
            for policy in POLICIES:
                out.append((where, "none", 0.0, policy, seed))
                out += [(where, attack, 0.2, policy, seed) for attack in UPDATES]
    return out


def summarise(figures: dict[str, Any], key: str) -> list[float] | None:
    """Mean ARI and accuracy of a case over its seeds; None if there are none."""
    found = [value for name, value in figures.items() if name.rsplit("/", 1)[0] == key]
    if not found:
        return None
    return [sum(one[part] for one in found) / len(found) for part in ("ari", "accuracy")]


def show(figures: dict[str, Any]) -> None:
    """The tables of the page."""
    for where in DATA:
        for policy in ("default", "plain"):
            lines = []
            for attack in ("none", *ATTACKS):
                shares = (0.0,) if attack == "none" else SHARES
                cells = [
                    summarise(figures, f"{where}/{attack}/{share}/{policy}") for share in shares
                ]
                texts = [f"{c[0]:.2f} / {100 * c[1]:.1f}" if c else "-" for c in cells]
                lines.append([attack, *texts, *["-"] * (3 - len(texts))])
            table(f"{where}, {policy}: honest ARI / accuracy", ["attack", *map(str, SHARES)], lines)
        lines = []
        for policy in ("plain", "default", *POLICIES):
            cells = [
                summarise(figures, f"{where}/{a}/{0.0 if a == 'none' else 0.2}/{policy}")
                for a in ("none", *UPDATES)
            ]
            lines.append([policy, *[f"{100 * c[1]:.1f}" if c else "-" for c in cells]])
        table(f"{where}: honest accuracy, 20 % liars", ["policy", "none", *UPDATES], lines)


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """Honest accuracy under every attack by 20 % of the clients, plain and by default."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DATA), figsize=(10, 4.6), sharey=True)
    colours = {"plain": "#c44e52", "default": "#4c72b0"}
    for axis, where in zip(axes, DATA, strict=True):
        names = ["none", *ATTACKS]
        for offset, (policy, colour) in zip((-0.2, 0.2), colours.items(), strict=True):
            found = [
                summarise(figures, f"{where}/{a}/{0.0 if a == 'none' else 0.2}/{policy}")
                for a in names
            ]
            heights = [100 * value[1] if value else 0.0 for value in found]
            places = [i + offset for i in range(len(names))]
            said = "plain mean" if policy == "plain" else "default of census"
            axis.barh(places, heights, 0.38, color=colour, label=said)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(0, 100)
        axis.set_xlabel("accuracy of honest clients (%)")
        axis.set_title(
            {"digits": "rotated digits, 40 clients", "cancer": "a table, 20 clients"}[where]
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper right", frameon=False)
    figure.suptitle("20 % of the clients lie: what is left for the honest ones")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = options(__doc__ or "", 5)
    parser.add_argument("--picture", type=Path, help="file for the picture")
    parser.add_argument("--only", default="", help="run only cases whose name holds this text")
    chosen = parser.parse_args()
    store = Store(chosen.json)
    for where, attack, share, policy, seed in cases(chosen.seeds):
        name = f"{where}/{attack}/{share}/{policy}/{seed}"
        if name in store or chosen.only not in name:
            continue
        store.put(name, measure(where, attack, share, policy, seed))
        print(name, store.figures[name], flush=True)
    show(store.figures)
    if chosen.picture is not None:
        draw_picture(store.figures, chosen.picture)


if __name__ == "__main__":
    main()
