"""Rotated digits: different starts, an unknown number of groups, and few participants.

Forty clients in four groups have scikit-learn's digits rotated by 0, 90, 180 and 270 degrees; the
network is an MLP 64-32-10. Local training: Adam with 1e-2 (the rate of CLoVE's authors for grey
images), batches of 20, one epoch per round. These settings were fixed before the study, after one
run of four rounds with SGD 0.1 (seed 0). The runs that stop when groups are stable, and those with
ten epochs and 200 clients (where an epoch has two steps), were added after the others had run.

Parts: `starts` (CLoVE and IFCA, identical or different initial models, first round at random or by
evaluation), `unknown` (K unknown, at most 10), `few` (200 clients, 10 % per round) and `fewer` (10
groups of 2 clients, 40 % per round: fewer participants than groups).
"""

from dataclasses import replace
from typing import Any

import torch

from coterie import metrics, models
from coterie.algorithms import IFCA, CLoVE
from coterie.core import Algorithm, LocalSGD, Model
from coterie.data import FederatedData, digits
from coterie.engines import Simulation
from coterie_lab.studies.common import options, run, stays, table, write

LOCAL = LocalSGD(learning_rate=1e-2, optimizer="adam", batch_size=20, epochs=1)
PARTS = ("starts", "unknown", "few", "fewer")


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    figures: dict[str, list[Any]] = {}
    for part in args.parts:
        figures[part] = globals()[part](args.seeds)
        write(args.json, figures)


def starts(seeds: int) -> list[dict]:
    """Four combinations of initial models and first round, for both methods."""
    figures, lines, failures = [], [], []
    for method in (CLoVE, IFCA):
        for init in ("different", "same"):
            for first in ("random", "evaluation"):
                runs = []
                for seed in range(seeds):
                    data = digits(seed=seed)
                    algorithm = method(net(data), LOCAL, n_groups=4, init_models=init, first=first)
                    runs.append(follow(algorithm, data, seed, 15))
                    if not runs[-1]["kept"]:
                        name = f"{method.__name__} {init} {first} seed {seed}"
                        failures.append([name, runs[-1]["ari"][-1], runs[-1]["confusion"]])
                figures += [
                    {"method": method.__name__, "init": init, "first": first, **r} for r in runs
                ]
                lines.append([method.__name__, init, first, *summary(runs, (1, 2, 3, 5, 10, 15))])
                print(*lines[-1], flush=True)
    names = ["method", "models", "first", "recovered", "first round kept (median, worst)"]
    table(
        f"Digits, {seeds} seeds: mean ARI at rounds",
        [*names, "1", "2", "3", "5", "10", "15", "accuracy"],
        lines,
    )
    table(
        "Groups not found: clients of each true group (row) in each model (column)",
        ["run", "ARI", "table"],
        failures,
    )
    return figures


def unknown(seeds: int) -> list[dict]:
    """K unknown, at most 10 groups: rules for K, with and without a stop for stable groups."""
    figures, lines = [], []
    rules: dict[str, dict[str, Any]] = {
        "silhouette": {"stable_after": 0},
        "silhouette, stop when stable": {"stable_after": 3},
    }
    for name, rule in rules.items():
        runs = []
        for seed in range(seeds):
            data = digits(seed=seed)
            algorithm = CLoVE(net(data), LOCAL, max_groups=10, first="random", **rule)
            runs.append({"rule": name, **follow(algorithm, data, seed, 15)})
        figures += runs
        used = [[r["groups"][t] for r in runs] for t in (1, 4, 9, 14)]
        lines.append([name, *used, *summary(runs, (5, 15))])
        print(*lines[-1], flush=True)
    table(
        f"Digits, K unknown (4), {seeds} seeds: groups used at rounds 2, 5, 10, 15; mean ARI",
        ["rule", "2", "5", "10", "15", "recovered", "kept (median, worst)", "5", "15", "accuracy"],
        lines,
    )
    return figures


def few(seeds: int) -> list[dict]:
    """200 clients with 29 training images, a tenth of them per round; one epoch or ten."""
    figures, lines = [], []
    at = (1, 2, 3, 5, 10, 20)
    settings: dict[str, tuple[int, dict[str, Any]]] = {
        "1 epoch": (1, {}),
        "10 epochs": (10, {}),
        "10 epochs, sqrt": (10, {"embedding": "sqrt"}),
    }
    for name, (epochs, known) in settings.items():
        runs = []
        for seed in range(seeds):
            data = digits(n_clients=200, seed=seed)
            algorithm = CLoVE(
                net(data),
                replace(LOCAL, epochs=epochs),
                n_groups=4,
                first="random",
                stable_after=0,
                **known,
            )
            runs.append({"work": name, **follow(algorithm, data, seed, 20, 0.1)})
        figures += runs
        mean = [average([r["participants"][t - 1] for r in runs]) for t in at]
        reached = [1.0 in r["participants"][:10] for r in runs]
        lines.append([name, *mean, sum(reached), sum(r["participants"][-1] == 1.0 for r in runs)])
        print(*lines[-1], flush=True)
    table(
        f"Digits, 200 clients, 10 % per round, {seeds} seeds: mean ARI of participants at rounds",
        ["local work", *map(str, at), "1.0 within 10 rounds", "1.0 at the end"],
        lines,
    )
    return figures


def fewer(seeds: int) -> list[dict]:
    """Ten groups of two clients, eight participants per round."""
    figures, lines = [], []
    at = (1, 2, 5, 10, 20, 40, 60)
    settings: dict[str, dict[str, Any]] = {
        "K = 10": {"n_groups": 10, "stable_after": 0},
        "K = 10, stop": {"n_groups": 10, "stable_after": 3},
        "K <= 20": {"max_groups": 20, "stable_after": 0},
        "K <= 20, stop": {"max_groups": 20, "stable_after": 3},
    }
    for name, known in settings.items():
        runs = []
        for seed in range(seeds):
            data = digits(n_clients=20, n_groups=10, seed=seed)
            algorithm = CLoVE(net(data), LOCAL, **known)
            runs.append({"known": name, **follow(algorithm, data, seed, 60, 0.4)})
        figures += runs
        lines.append([name, "seen", *[average([r["ari"][t - 1] for r in runs]) for t in at]])
        on = [average([r["participants"][t - 1] for r in runs]) for t in at]
        lines.append([name, "participants", *on])
        print(*lines[-2:], flush=True)
    table(
        f"Digits, 10 groups x 2 clients, 8 participants, {seeds} seeds: mean ARI at rounds",
        ["groups", "on", *map(str, at)],
        lines,
    )
    return figures


def net(data: FederatedData) -> Model:
    return Model(models.make("mlp", data, hidden=(32,)))


def follow(
    algorithm: Algorithm, data: FederatedData, seed: int, rounds: int, share: float = 1.0
) -> dict:
    """One run: ARI of the clients seen so far and of the participants, groups used, errors."""
    ari, participants, groups = [], [], []
    for state, info in run(algorithm, Simulation(data, seed, share), rounds):
        ari.append(metrics.adjusted_rand(state.assignment, data.truth))
        participants.append(
            metrics.adjusted_rand(state.assignment, data.truth, info["participants"])
        )
        groups.append(info["groups_used"])
    seen = state.assignment >= 0
    confusion = torch.zeros(int(data.truth.max()) + 1, len(state.models["output.bias"])).long()
    for true, found in zip(data.truth[seen].tolist(), state.assignment[seen].tolist(), strict=True):
        confusion[true, found] += 1
    return {
        "seed": seed,
        "ari": ari,
        "participants": participants,
        "groups": groups,
        "kept": stays(ari),
        "accuracy": accuracy(algorithm, data, state),
        "confusion": confusion.tolist(),
        "assignment": state.assignment.tolist(),
    }


def accuracy(algorithm: Algorithm, data: FederatedData, state: Any) -> float:
    """The mean accuracy of the clients with a group, each on its own test data."""
    scores = []
    for client in torch.nonzero(state.assignment >= 0).flatten():
        own = {name: leaf[state.assignment[client]] for name, leaf in state.models.items()}
        test = data.gather("test", client.reshape(1))
        outputs = algorithm.predict(own, test.x[0])
        scores.append(float(metrics.accuracy(outputs, test.y[0], test.mask[0])))
    return sum(scores) / len(scores)


def summary(runs: list[dict], at: tuple[int, ...]) -> list[Any]:
    kept = sorted(r["kept"] or 99 for r in runs)
    worst = "-" if kept[-1] == 99 else kept[-1]
    middle = "-" if kept[len(kept) // 2] == 99 else kept[len(kept) // 2]
    return [
        f"{sum(k < 99 for k in kept)}/{len(runs)}",
        f"{middle}, {worst}",
        *[average([r["ari"][t - 1] for r in runs]) for t in at],
        average([r["accuracy"] for r in runs]),
    ]


def average(values: list[float | None]) -> float:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined)


if __name__ == "__main__":
    main()
