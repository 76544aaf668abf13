"""Speed of engine "ray": compute-bound rounds on two shards, and growth of the number of clients.

    python benchmarks/scale/shards.py

Seconds per round are medians without the first round; one thread per process. Figures are stored in
`figures/scale.jsonl`.
"""

import statistics
import time
from typing import Any

import torch
from common import load, store

from coterie.engines.simulation import Simulation
from coterie.running.build import Run, build
from coterie.running.loop import start_engine


def seconds(ready: Run, rounds: int) -> float:
    """Median seconds of a round, without evaluations."""
    fed = start_engine(ready.algorithm, ready.data, ready.settings, ready.description)
    fed.begin(-1)
    state = ready.algorithm.init(fed)
    fed.commit()
    times = []
    for number in range(rounds):
        began = time.perf_counter()
        fed.begin(number)
        state, _ = ready.algorithm.step(fed, state)
        fed.commit()
        times.append(time.perf_counter() - began)
    fed.rest()
    assert isinstance(fed, Simulation) or len(fed.names)
    return statistics.median(times[1:])


def describe(hidden: list[int], data: dict[str, Any], **run: Any) -> Run:
    """IFCA with two models on some data."""
    return build(
        {
            "algorithm": {"name": "ifca", "n_groups": 2},
            "model": {"name": "mlp", "hidden": hidden} if hidden else {"name": "linear"},
            "local": {"learning_rate": 0.05, "batch_size": 20, "epochs": 2},
            "data": data,
            "run": {"rounds": 4, "threads": 1, **run},
        }
    )


def main() -> None:
    torch.set_num_threads(1)
    digits = {"name": "digits", "n_clients": 40, "n_groups": 4, "per_client": 150}
    many = {"name": "blobs", "n_groups": 2, "n": 5, "test": 0}
    cases = [("compute-bound", [1024, 1024], digits)]
    cases += [
        (f"{n} clients", [], {**many, "clients_per_group": n // 2}) for n in (10**3, 10**4, 10**5)
    ]
    for name, hidden, data in cases:
        pairs, before = [], load()
        for _ in range(3):
            one = seconds(describe(hidden, data), 4)
            two = seconds(describe(hidden, data, engine="ray", shards=2), 4)
            pairs.append((one, two))
        one, two = (statistics.median(part) for part in zip(*pairs, strict=True))
        times = {"one": round(one, 3), "two": round(two, 3), "ratio": round(one / two, 2)}
        each = [round(one / two, 2) for one, two in pairs]
        store("shards", name, {**times, "ratios": each, "load": before})


if __name__ == "__main__":
    main()
