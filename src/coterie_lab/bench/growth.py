"""The time per round when one size grows and all others stay the same."""

import statistics
from typing import Any

import torch

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ifca import IFCA
from coterie.core.model import Model
from coterie.core.tree import n_bytes
from coterie.models import MLP
from coterie_lab.bench import measure
from coterie_lab.bench.large import many
from coterie_lab.bench.variants import simulate
from coterie_lab.bench.workloads import NAMES

SIZES = {
    "clients": (100, 300, 1_000, 3_000, 10_000),
    "samples": (20, 40, 80, 160, 320),
    "groups": (1, 2, 4, 8, 16),
    "weights": (32, 64, 128, 256, 512),
}
WORDS = {
    "clients": "clients (W9's model, 40 samples each)",
    "samples": "samples per client (W9's model, 300 clients)",
    "groups": "models that every client evaluates (IFCA, W9's model, 300 clients)",
    "weights": "weights of the model (one hidden layer, 300 clients)",
}


def curve(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds per round for several values of one size, and fit a line."""
    what, scale = job["size"], job.get("scale", 1.0)
    sizes: list[int] = []
    runs = {}
    for size in SIZES[what]:
        m = max(8, int((size if what == "clients" else 300) * scale))
        hidden = size if what == "weights" else 32
        model = Model(MLP(64, 10, hidden=(hidden,)))
        local = NAMES["W9"].local
        k = size if what == "groups" else 1
        method = IFCA(model, local, n_groups=k) if what == "groups" else FedAvg(model, local)
        fed = simulate(many(m, size if what == "samples" else 40))
        fed.begin(-1)
        state = method.init(fed)

        def run(method: Any = method, fed: Any = fed, state: Any = state) -> None:
            fed.begin(0)
            method.step(fed, state)
            fed.commit()

        weights = n_bytes(model.init(torch.tensor(0))) // 4
        sizes.append({"clients": m, "weights": weights}.get(what, size))
        runs[str(size)] = run
    timings = measure.time_in_turn(runs, job.get("repeats", 5))
    seconds = [t.seconds for t in timings.values()]
    start, slope, deviation = fit_line(sizes, seconds)
    return {
        "what": WORDS[what],
        "sizes": sizes,
        "seconds": seconds,
        "foreign": max((t.foreign or 0.0) for t in timings.values()),
        "start": start,
        "slope": slope,
        "deviation": deviation,
        "threads": torch.get_num_threads(),
    }


def fit_line(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Fit a line to the times by relative least squares; return it and the largest deviation.

    The intercept is the fixed cost of a round. It is not below zero.

    >>> start, slope, deviation = fit_line([1, 2, 3], [3.0, 5.0, 7.0])
    >>> round(start, 6), round(slope, 6), round(deviation, 6)
    (1.0, 2.0, 0.0)
    """
    x = torch.tensor(sizes, dtype=torch.float64)
    t = torch.tensor(seconds, dtype=torch.float64)
    table = torch.stack([torch.ones_like(x), x], 1) / t[:, None]
    start, slope = torch.linalg.lstsq(table, torch.ones_like(t)).solution.tolist()
    if start < 0:
        start, slope = 0.0, statistics.fmean((x / t).tolist()) / float((x / t).square().mean())
    line = start + slope * x
    return start, slope, float(((t - line) / line).abs().max())
