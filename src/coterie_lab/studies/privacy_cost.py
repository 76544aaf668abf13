"""What differential privacy costs: accuracy and ARI by epsilon, on rotated digits.

    python -m coterie_lab.studies.privacy_cost [--seeds 3] [--clients 80]

Two ways for each budget: one model by FedAvg, and groups by CLoVE with their number given. The
noise is the smallest with which all rounds fit into the budget.
"""

import argparse
import json
import warnings
from pathlib import Path

import torch

from coterie.core.privacy import spent
from coterie.running.build import build
from coterie.running.loop import run

FIGURES = Path("benchmarks/figures/privacy.jsonl")
EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
RELEASES = {"fedavg": 1, "clove": 2}  # in a round
DELTA = 1e-5


def find_noise(epsilon: float, releases: int) -> float:
    """The smallest noise with which a number of releases fits into a budget."""
    low, high = 0.1, 1000.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if spent(middle, releases, DELTA) <= epsilon else (middle, high)
    return high


def measure(method: str, epsilon: float | None, clients: int, rounds: int, seed: int) -> dict:
    """One run."""
    settings: dict = {"rounds": rounds, "seed": seed, "threads": 1, "evaluate_every": 0}
    noise = None
    if epsilon is not None:
        noise = find_noise(epsilon, RELEASES[method] * rounds)
        own = {"epsilon": epsilon + 1e-9, "delta": DELTA, "noise": noise}
        settings["privacy"] = {**own, "clip": 1.0, "answers": 3.0}
    algorithm = {"name": method} | ({"n_groups": 2} if method == "clove" else {})
    ready = build(
        {
            "algorithm": algorithm,
            "model": {"name": "linear"},
            "local": {"learning_rate": 0.2, "batch_size": 16, "epochs": 2},
            "data": {"name": "digits", "n_clients": clients, "n_groups": 2, "per_client": 16},
            "run": settings,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        summary = run(ready.algorithm, ready.data, ready.settings).summary
    found = {"accuracy": summary["accuracy"]["mean"], "ari": summary.get("ari")}
    about = {"method": method, "epsilon": epsilon, "noise": noise, "clients": clients}
    return {**about, "rounds": rounds, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=FIGURES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = given.json.read_text().splitlines() if given.json.exists() else []
    known = [json.loads(line) for line in lines]
    names = ("method", "epsilon", "clients", "rounds", "seed")
    done = {tuple(line[name] for name in names) for line in known}
    for seed in range(given.seeds):
        for epsilon in EPSILONS:
            for method in RELEASES:
                if (method, epsilon, given.clients, given.rounds, seed) in done:
                    continue
                line = measure(method, epsilon, given.clients, given.rounds, seed)
                with given.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
