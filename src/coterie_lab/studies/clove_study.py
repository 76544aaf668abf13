"""Census and CLoVE on partitions of MNIST.

    python -m coterie_lab.studies.clove_study liars --json clove.json
    python -m coterie_lab.studies.clove_study erosion --json clove.json --picture erosion.png
    python -m coterie_lab.studies.clove_study accuracy --json clove.json
    python -m coterie_lab.studies.clove_study count --json clove.json
    python -m coterie_lab.studies.clove_study newcomers --json clove.json

`liars`: a fifth of the clients send false losses in round 3; the ARI of the honest clients with and
without the guard. `erosion`: label skew 4 over sixty rounds; ARI and accuracy by round for CLoVE
with and without early stop, `census` with and without a stop, and `survey`. `accuracy`: test
accuracy after twenty rounds with 400 samples. `count`: at most twelve groups; how often several
rules find the true number from the same losses. `newcomers`: placing new clients and refusing
foreign ones; `--members 3` keeps three members per group.

Figures are written at once, and an interrupted study continues where it stopped. Seeds start at 21,
or at `--first`. The rules were set on seeds 0 to 5 only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import metrics
from coterie.algorithms import Census
from coterie.algorithms.census.accumulate import noise_units
from coterie.algorithms.census.guard import clip, flat, loners
from coterie.clustering import noise
from coterie.clustering.hierarchical import choose_k
from coterie.clustering.kmeans import kmeans
from coterie.core.algorithm import find
from coterie.core.client import Batch
from coterie.core.tree import row
from coterie.data import FederatedData, from_arrays
from coterie.engines import Simulation
from coterie.running.evaluation import evaluate
from coterie_lab.studies.common import (
    LOCAL,
    PARTITIONS,
    Store,
    options,
    partition,
    run,
    small_net,
    table,
)

FIRST_SEED = 21


class Recorder(Simulation):
    """A simulation that stores the losses that clients sent in each round."""

    said: list[dict[str, Tensor]]

    def map(self, task: Callable[..., Any], *given: Any, **known: Any) -> Any:
        ids, reply = super().map(task, *given, **known)
        if task.__name__ == "losses":
            self.said = [*getattr(self, "said", []), reply]
        return ids, reply


def ari(labels: Tensor, truth: Tensor) -> float:
    """The ARI; 1 if there is one true group and one was found."""
    found = metrics.adjusted_rand(labels, truth)
    return float(len(labels.unique()) == 1) if found is None else found


# liars


def lies(kind: str, losses: Tensor, who: Tensor, truth: Tensor, draw: torch.Generator) -> Tensor:
    """Replace the losses of some clients by invented ones."""
    out, k = losses.clone(), losses.shape[1]
    for i in who.tolist():
        if kind == "uniform in range":
            low, high = losses.min(), losses.max()
            out[i] = low + (high - low) * torch.rand(k, generator=draw)
        elif kind == "ten times too large":
            out[i] = 10 * losses[i]
        elif kind == "constant":
            out[i] = losses[i].mean()
        elif kind == "columns permuted":
            out[i] = losses[i][torch.randperm(k, generator=draw)]
        elif kind == "another group's mean":
            others = [g for g in truth.unique().tolist() if g != int(truth[i])]
            other = others[int(torch.randint(len(others), (1,), generator=draw))]
            out[i] = losses[truth == other].mean(0)
    return out


LIES = (
    "none",
    "uniform in range",
    "ten times too large",
    "constant",
    "columns permuted",
    "another group's mean",
)


def liars(seeds: range, store: Store) -> None:
    parts, draws = ("LS4", "LS1", "rot 4", "concept 4"), 20
    for seed in seeds:
        for part in parts:
            if f"liars/{part}/{seed}" in store:
                continue
            data = partition(part, seed)
            truth, k = data.truth, PARTITIONS[part][3]
            assert truth is not None
            fed = Recorder(data, seed=seed)
            for _ in run(Census(small_net(data), LOCAL, n_groups=k), fed, 3):
                pass
            said, sizes = fed.said[2], fed.said[2]["n"]
            found: dict[str, dict[str, list[float]]] = {}
            for kind in LIES:
                for number in range(draws):
                    draw = torch.Generator().manual_seed(number)
                    m = len(truth)
                    who = torch.randperm(m, generator=draw)[: m // 5 if kind != "none" else 0]
                    losses = lies(kind, said["losses"], who, truth, draw)
                    honest = ~torch.isin(torch.arange(m), who)
                    weight = sizes.double()[:, None].expand(m, losses.shape[1])
                    plain = noise_units(losses, said["errors"], sizes)
                    guarded = noise_units(clip(losses), said["errors"], sizes)
                    line = found.setdefault(kind, {})
                    labels, _ = kmeans(losses.double(), k, number, n_init=1)
                    line.setdefault("k-means", []).append(ari(labels[honest], truth[honest]))
                    labels = noise.weighted_ward(plain, weight).labels(k)
                    line.setdefault("off", []).append(ari(labels[honest], truth[honest]))
                    for neighbour in (1, 2):
                        aside = loners(guarded, weight, neighbour) | flat(clip(losses))
                        kept = ~aside
                        labels = noise.weighted_ward(guarded[kept], weight[kept]).labels(k)
                        score = ari(labels[honest[kept]], truth[kept][honest[kept]])
                        name = "guard" if neighbour == 2 else "nearest alone"
                        line.setdefault(name, []).append(score)
                        if len(who):
                            share = float(aside[who].double().mean())
                            line.setdefault(f"{name}: liars aside", []).append(share)
                        share = float(aside[honest].double().mean())
                        line.setdefault(f"{name}: honest aside", []).append(share)
            mean = {kind: {a: float(np.mean(v)) for a, v in f.items()} for kind, f in found.items()}
            store.put(f"liars/{part}/{seed}", mean)
    ways = ["k-means", "off", "guard", "nearest alone"]
    ways += ["guard: liars aside", "guard: honest aside", "nearest alone: honest aside"]
    lines = []
    for kind in LIES:
        cells = []
        for way in ways:
            own = [_mean(store, f"liars/{part}/", (kind, way)) for part in parts]
            cells.append(" / ".join("-" if v is None else f"{v:.2f}" for v in own))
        lines.append([kind, *cells])
    table(
        f"A fifth sends false losses in round 3, ARI of the others: {' / '.join(parts)}",
        ["lie", *ways],
        lines,
    )


def _mean(store: Store, start: str, path: tuple[str, ...]) -> float | None:
    values = []
    for name, value in store.figures.items():
        if name.startswith(start):
            for step in path:
                value = value.get(step) if value is not None else None
            values.append(value)
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


# erosion

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "census": ("census", {"n_groups": 10}),
    "clove": ("clove", {"n_groups": 10, "first": "random", "stable_after": 0}),
    "census, no stop": ("census", {"n_groups": 10, "stable_after": 0}),
    "clove, early stop": ("clove", {"n_groups": 10, "first": "random"}),
    "census, K unknown": ("census", {"max_groups": 15}),
    "survey": ("survey", {"max_groups": 15}),
}


def erosion(
    seeds: range, store: Store, rounds: int, picture: Path | None, only: str | None
) -> None:
    for seed in seeds:
        for arm, (method, given) in ARMS.items():
            if f"erosion/{arm}/{seed}" in store or only not in (None, arm):
                continue
            data = partition("LS4", seed)
            assert data.truth is not None
            model = small_net(data)
            algorithm = find(method)(model=model, local=LOCAL, **given)  # type: ignore[call-arg]
            fed = Simulation(data, seed=seed)
            curve: list[float] = []
            accuracy, used, stable = [], [], []
            for number, (state, info) in enumerate(run(algorithm, fed, rounds), start=1):
                curve.append(ari(state.assignment, data.truth))
                used.append(len(state.assignment.unique()))
                stable.append(bool(info.get("stable", True)))
                if number in (1, 2, 3, 5) or number % 5 == 0:
                    scores = evaluate(algorithm, fed, state, data.task)
                    accuracy.append([number, 100 * float(scores.accuracy.mean())])
            found = {"ari": curve, "groups": used, "accuracy": accuracy}
            store.put(
                f"erosion/{arm}/{seed}",
                {**found, "frozen": stable.index(True) + 1 if any(stable) else None},
            )
            print(arm, seed, [round(v, 2) for v in curve[::5]], accuracy[-1], flush=True)
    at = (2, 3, 5, 10, 20, 30, 40, 50, 60)
    lines = []
    for arm in ARMS:
        runs = [v for name, v in store.figures.items() if name.startswith(f"erosion/{arm}/")]
        if not runs:
            continue
        curves = [r["ari"] for r in runs]  # some seeds were stopped earlier
        means = [_at(curves, t) for t in at if t <= rounds]
        least = min(min(r["ari"][1:]) for r in runs)
        exact = [dict(map(tuple, r["accuracy"])) for r in runs]
        right = [[one[t] for one in exact if t in one] for t in (20, 40, 60) if t <= rounds]
        shown = " / ".join(f"{np.mean(v):.1f}" if v else "-" for v in right)
        lines.append([arm, len(runs), *means, least, shown, [r["frozen"] for r in runs]])
    names = [
        "arm",
        "seeds",
        *map(str, (t for t in at if t <= rounds)),
        "least",
        "accuracy 20/40/60",
        "frozen",
    ]
    table("Label skew 4: mean ARI at rounds", names, lines)
    if picture is not None:
        draw_erosion(store, picture)


def _at(curves: list[list[float]], t: int) -> float | None:
    """The mean in one round, over the runs that reached it."""
    there = [curve[t - 1] for curve in curves if len(curve) >= t]
    return float(np.mean(there)) if there else None


def draw_erosion(store: Store, out: Path) -> None:
    """Draw ARI and accuracy by round: a thin line per seed and a thick line for the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from coterie.report.page import COLOURS, DASHES

    page = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(page)
    left, right = page.subplots(1, 2)
    for place, arm in enumerate(ARMS):
        runs = [v for name, v in store.figures.items() if name.startswith(f"erosion/{arm}/")]
        if not runs:
            continue
        look = {"color": COLOURS[place], "linestyle": DASHES[place % 4]}
        length = max(len(r["ari"]) for r in runs)
        curves = [r["ari"] for r in runs]  # some seeds were stopped earlier
        for curve in curves if len(curves) > 1 else ():
            x = range(1, len(curve) + 1)
            left.plot(x, curve, color=COLOURS[place], alpha=0.25, linewidth=0.8)
        mean = [_at(curves, t) for t in range(1, length + 1)]
        left.plot(range(1, length + 1), mean, linewidth=2.2, label=arm, **look)
        exact = [dict(map(tuple, r["accuracy"])) for r in runs]
        marks = sorted(set().union(*exact))
        means = [np.mean([one[t] for one in exact if t in one]) for t in marks]
        right.plot(marks, means, linewidth=2, **look)
    left.set_xlabel("round")
    left.set_ylabel("agreement with the true groups (ARI)")
    left.set_ylim(-0.05, 1.04)
    left.set_title("MNIST, label skew 4: groups by round", loc="left", fontsize=11)
    left.legend(fontsize=9, loc="lower left")
    right.set_xlabel("round")
    right.set_ylabel("test accuracy in %")
    right.set_ylim(80, 100)
    right.set_title("accuracy, mean over clients", loc="left", fontsize=11)
    for axes in (left, right):
        axes.grid(color="#E3E3E3")
        axes.spines[["top", "right"]].set_visible(False)
    page.savefig(out)


# accuracy


def accuracy(seeds: range, store: Store) -> None:
    """The test accuracy after twenty rounds with 400 samples and a given number of groups."""
    parts = ("LS1", "rot 4", "concept 4")
    for seed in seeds:
        for part in parts:
            if f"accuracy/{part}/{seed}" in store:
                continue
            data = partition(part, seed, n=400)
            fed = Simulation(data, seed=seed)
            algorithm = Census(small_net(data), LOCAL, n_groups=PARTITIONS[part][3])
            *_, (state, _) = run(algorithm, fed, 20)
            right = 100 * float(evaluate(algorithm, fed, state, data.task).accuracy.mean())
            agreement = ari(state.assignment, data.truth)
            store.put(f"accuracy/{part}/{seed}", {"accuracy": right, "ari": agreement})
    lines = []
    for part in parts:
        runs = [v for name, v in store.figures.items() if name.startswith(f"accuracy/{part}/")]
        right = [r["accuracy"] for r in runs]
        if runs:
            least = min(r["ari"] for r in runs)
            lines.append([part, len(runs), float(np.mean(right)), min(right), max(right), least])
    names = ["partition", "seeds", "accuracy", "least", "most", "least ARI"]
    table("Test accuracy in % after twenty rounds", names, lines)


# number of groups


def with_margin(scores: dict[int, float], margin: float) -> int:
    """The number of clusters by silhouettes; a larger one must be better by this share."""
    chosen = min(scores, default=1)
    for k, score in scores.items():
        if score > scores[chosen] + margin * abs(scores[chosen]):
            chosen = k
    return chosen


def count(seeds: range, store: Store, only: str | None) -> None:
    most, rounds = 12, 6
    for seed in seeds:
        for part in PARTITIONS:
            if f"count/{part}/{seed}" in store or only not in (None, part):
                continue
            few = {"LS4": 4, "LS1": 4, "LS3": 4, "IID": 20}.get(part)
            data = partition(part, seed, n=400, per_group=few)
            assert data.truth is not None
            fed = Recorder(data, seed=seed)
            algorithm = Census(small_net(data), LOCAL, max_groups=most, stable_after=0)
            lines = []
            for number, (state, _) in enumerate(run(algorithm, fed, rounds)):
                said = fed.said[number]
                weight = said["n"].double()[:, None].expand(said["losses"].shape)
                now = noise_units(clip(said["losses"]), said["errors"], said["n"])
                ratio = noise.weighted_ward(now, weight).ratio[:most]
                silhouettes = {
                    f"{margin}": with_margin(choose_k(said["losses"], most)[1], margin)
                    for margin in (0.0, 0.1)
                }
                line = {
                    "used": len(state.assignment.unique()),
                    "ari": ari(state.assignment, data.truth),
                    "added": state.curve[:, 1].tolist() if len(state.curve) else [],
                    "now": ratio.tolist(),
                    "silhouette": silhouettes,
                }
                lines.append(line)
            store.put(f"count/{part}/{seed}", lines)
            print(part, seed, [line["used"] for line in lines], flush=True)
    rules: dict[str, Callable[[dict[str, Any]], int | None]] = {}
    for theta in (1.5, 2.0, 2.5, 3.0):
        for which in ("added", "now"):
            rules[f"noise ratio, {which}, <= {theta}"] = lambda line, t=theta, w=which: _first(
                line[w], t
            )
    rules["noise ratio, added, <= 2.5, and on over a cliff"] = lambda line: _over(
        line["added"], 2.5
    )
    rules["silhouette, best"] = lambda line: line["silhouette"]["0.0"]
    rules["silhouette, 10 % margin"] = lambda line: line["silhouette"]["0.1"]
    rules["online (2.5, added up)"] = lambda line: line["used"]
    rows = []
    for rule, say in rules.items():
        cells, right, asked = [], 0, 0
        for part, (*_, k) in PARTITIONS.items():
            runs = [v for name, v in store.figures.items() if name.startswith(f"count/{part}/")]
            hits = [say(line) == k for lines in runs for line in lines[1:]]
            cells.append(f"{sum(hits)}/{len(hits)}")
            right, asked = right + sum(hits), asked + len(hits)
        rows.append([rule, *cells, f"{right}/{asked}"])
    table("Exact number of groups, rounds 2 to 6", ["rule", *PARTITIONS, "all"], rows)


def _first(ratio: list[float], theta: float) -> int | None:
    return next((k for k, value in enumerate(ratio, start=1) if value <= theta), None)


def _over(ratio: list[float], theta: float) -> int | None:
    k = _first(ratio, theta)
    while k is not None and k < len(ratio) and ratio[k - 1] > 1.3 and ratio[k - 1] > 1.5 * ratio[k]:
        k += 1
    return k


# newcomers

FOREIGN = ("inverted", "noise", "labels shifted", "Fashion-MNIST", "half and half", "contrast 0.35")


def strange(kind: str, batch: Batch, other: Batch, fashion: Batch, draw: torch.Generator) -> Any:
    """A hundred samples of each client that belongs to no group."""
    n = 100
    x, y = batch.x[:n], batch.y[:n]
    if kind == "inverted":
        return 1 - x, y
    if kind == "noise":
        return torch.rand(x.shape, generator=draw), y
    if kind == "labels shifted":
        return x, (y + 1) % 10
    if kind == "Fashion-MNIST":
        return fashion.x[:n], fashion.y[:n]
    if kind == "half and half":
        return torch.cat([x[: n // 2], other.x[: n // 2]]), torch.cat(
            [y[: n // 2], other.y[: n // 2]]
        )
    return 0.35 * x, y


def newcomers(seeds: range, store: Store, only: str | None, members: int | None) -> None:
    clients = {"rot 4": (8, 8), "concept 4": (8, 8), "LS1": (5, 8), "LS4": (5, 6)}  # and guests
    kind = "newcomers" if members is None else f"newcomers of {members}"
    for seed in seeds:
        for part, (most, guests) in clients.items():
            name = f"{kind}/{part}/{seed}"
            if name in store or only not in (None, part):
                continue
            store.put(name, _newcomers(part, members or most, guests, seed))
            print(name, store.figures[name], flush=True)
    sizes = [f"{what} {n}" for what in ("placed", "refused") for n in (50, 100, 500)]
    lines = []
    for part in clients:
        runs = [v for name, v in store.figures.items() if name.startswith(f"{kind}/{part}/")]
        if runs:
            cells = [100 * float(np.mean([r[key] for r in runs])) for key in (*sizes, *FOREIGN)]
            ari_ = float(np.mean([r["ari"] for r in runs]))
            worst = 100 * max(r[key] for r in runs for key in sizes[3:])
            lines.append([part, len(runs), ari_, *cells, worst])
    names = ["partition", "seeds", "ARI", *sizes, *FOREIGN, "most refused in a run"]
    table("Newcomers: placed right and refused in %", names, lines)


def _newcomers(part: str, clients: int, fresh_clients: int, seed: int) -> dict[str, Any]:
    """Train members until the groups are frozen, then place new clients."""
    data = partition(part, seed, n=500, per_group=clients + fresh_clients)
    assert data.truth is not None
    turn = torch.arange(len(data)) % (clients + fresh_clients)
    inside = (turn < clients).nonzero().flatten()
    guests = (turn >= clients).nonzero().flatten()
    known = _rows(data, inside, 400)
    model, k = small_net(known), PARTITIONS[part][3]
    algorithm = Census(model, LOCAL, n_groups=k)
    fed = Simulation(known, seed=seed)
    for state, _ in run(algorithm, fed, 5):
        last = state
    state, _ = algorithm.place(fed, last, fed.everyone())
    meaning = {
        int(g): int(known.truth[state.assignment == g].mode().values)
        for g in state.assignment.unique()
    }
    found: dict[str, Any] = {"ari": ari(state.assignment, known.truth)}

    def place(xs: list[Tensor], ys: list[Tensor]) -> tuple[Tensor, Tensor]:
        new = from_arrays(xs, ys, test_fraction=0.0, n_outputs=10, task="classification")
        from coterie.core.algorithm import grow

        newcomers = Simulation(new, seed=seed)
        newcomers.begin(9)
        blank = state._replace(
            assignment=torch.full((len(xs),), -1),
            repeats=torch.zeros(len(xs), dtype=torch.int64),
            units=state.units.new_zeros(len(xs), 0),
            counts=state.counts.new_zeros(len(xs), 0),
            aside=state.aside.new_zeros(len(xs)),
        )
        _, evidence = algorithm.place(newcomers, grow(blank, len(xs)), newcomers.everyone())
        group, fits = evidence.group, evidence.fits
        return torch.tensor([meaning.get(int(g), -1) for g in group]), fits

    batches = [data.gather("train", guests[i : i + 1]) for i in range(len(guests))]
    own = [row(batch, 0) for batch in batches]
    truth = data.truth[guests]
    for n in (50, 100, 500):
        group, fits = place([b.x[:n] for b in own], [b.y[:n] for b in own])
        found[f"placed {n}"] = float((group == truth).double().mean())
        found[f"refused {n}"] = float((~fits).double().mean())
    fashion = partition_of("fashion_mnist", seed)
    draw = torch.Generator().manual_seed(seed)
    for kind in FOREIGN:
        xs, ys = [], []
        for i in range(24):
            mine = int(torch.randint(len(own), (1,), generator=draw))
            others = (truth != truth[mine]).nonzero().flatten()
            other = int(others[int(torch.randint(len(others), (1,), generator=draw))])
            x, y = strange(kind, own[mine], own[other], fashion[i], draw)
            xs.append(x)
            ys.append(y)
        _, fits = place(xs, ys)
        found[kind] = float((~fits).double().mean())
    return found


def _rows(data: FederatedData, ids: Tensor, n: int) -> FederatedData:
    """Some of the clients, with at most n training rows each."""
    from dataclasses import replace

    from coterie.data.federated import RowIndex

    few = data.subset(ids)
    parts = few.rows["train"].index.split(few.sizes("train").tolist())
    return replace(few, rows={**few.rows, "train": RowIndex.of([part[:n] for part in parts])})


def partition_of(source: str, seed: int) -> list[Batch]:
    """24 clients of another data set."""
    from coterie.data import make

    data = make("published_feature_skew", source=source, clients_per_group=24, n=100, seed=seed)
    batches = [data.gather("train", torch.tensor([i])) for i in range(24)]
    return [row(batch, 0) for batch in batches]


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=1)
    parser.add_argument("part", choices=("liars", "erosion", "accuracy", "count", "newcomers"))
    parser.add_argument("--only", help="one arm or partition")
    parser.add_argument("--rounds", type=int, default=60, help="of `erosion`")
    parser.add_argument("--picture", type=Path, help="of `erosion`")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--members", type=int, help="of each group, in `newcomers`")
    given = parser.parse_args()
    store, seeds = Store(given.json), range(given.first, given.first + given.seeds)
    if given.part == "liars":
        liars(seeds, store)
    elif given.part == "erosion":
        erosion(seeds, store, given.rounds, given.picture, given.only)
    elif given.part == "accuracy":
        accuracy(seeds, store)
    elif given.part == "count":
        count(seeds, store, given.only)
    else:
        newcomers(seeds, store, given.only, given.members)


if __name__ == "__main__":
    main()
