"""The server only: means of 100,000 updates, and clustering of 100,000 clients."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.clustering.hierarchical import WARD_ROWS, choose_k
from coterie.clustering.kmeans import kmeans
from coterie.clustering.matching import match_clusters
from coterie.core.aggregate import Mean, RunningMean
from coterie_lab.bench import measure

CLIENTS, WEIGHTS, GROUPS = 100_000, 10_000, 10
POOL = 2_000  # updates in memory (80 MB), used in turn; all of them would need 4 GB


def mean(job: dict[str, Any]) -> dict[str, Any]:
    """The weighted mean of all updates by group: a loop over replies, and ours in chunks."""
    m = int(CLIENTS * job.get("scale", 1.0))
    chunk = min(100, m)
    pool = torch.randn(POOL, WEIGHTS)
    group = torch.randint(GROUPS, (m,))
    weight = torch.randint(1, 300, (m,))
    around = {"w": torch.zeros(GROUPS, WEIGHTS)}

    def plain() -> Tensor:
        sums = [torch.zeros(WEIGHTS) for _ in range(GROUPS)]
        totals = [0.0] * GROUPS
        for i, (j, w) in enumerate(zip(group.tolist(), weight.tolist(), strict=True)):
            sums[j] = sums[j] + w * pool[i % POOL]
            totals[j] += w
        return torch.stack([s / max(t, 1.0) for s, t in zip(sums, totals, strict=True)])

    def in_place() -> Tensor:
        sums = [torch.zeros(WEIGHTS) for _ in range(GROUPS)]
        totals = [0.0] * GROUPS
        for i, (j, w) in enumerate(zip(group.tolist(), weight.tolist(), strict=True)):
            sums[j].add_(pool[i % POOL], alpha=w)
            totals[j] += w
        return torch.stack([s / max(t, 1.0) for s, t in zip(sums, totals, strict=True)])

    def ours() -> Tensor:
        total = RunningMean(Mean("params", around, by=group, weight="n"), "bench")
        for start in range(0, m, chunk):
            place = torch.arange(start, min(start + chunk, m))
            reply = {"params": {"w": pool[start % POOL :][: len(place)]}, "n": weight[place]}
            total.add(reply, place)
        return total.result()["w"]

    runs: dict[str, Callable[[], Tensor]] = {"plain": plain, "in_place": in_place, "ours": ours}
    apart = float((ours() - plain()).abs().max())
    timings = measure.time_in_turn(runs, job.get("repeats", 5))
    base = timings["plain"].seconds
    gflop = 2 * m * WEIGHTS / 1e9
    return {
        "clients": m,
        "agreement": apart,
        "threads": torch.get_num_threads(),
        "variants": {
            name: {
                "seconds": t.seconds,
                "ratio": base / t.seconds,
                "gflops": gflop / t.seconds,
                "spread": t.spread,
                "foreign": t.foreign,
            }
            for name, t in timings.items()
        },
        "peak_mb": measure.peak_memory(),
    }


def _vectors(m: int) -> Tensor:
    """Loss vectors of ten overlapping groups."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.0 + torch.rand(GROUPS, GROUPS, generator=generator)
    centres.fill_diagonal_(0.5)
    truth = torch.arange(m) % GROUPS
    return centres[truth] + 0.2 * torch.randn(m, GROUPS, generator=generator)


def _time(job: dict[str, Any], run: Callable[[], Any]) -> dict[str, Any]:
    times = []
    for _ in range(min(job.get("repeats", 3), 3)):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times), "peak_mb": measure.peak_memory(), "result": result}


def cluster(job: dict[str, Any]) -> dict[str, Any]:
    """Time k-means on 100,000 loss vectors."""
    points = _vectors(int(CLIENTS * job.get("scale", 1.0)))
    found = _time(job, lambda: len(kmeans(points, GROUPS)[1]))
    return {**found, "clients": len(points)}


def choice(job: dict[str, Any]) -> dict[str, Any]:
    """Time the choice of the number of groups for 100,000 loss vectors, by silhouettes."""
    points = _vectors(int(CLIENTS * job.get("scale", 1.0)))
    found = _time({"repeats": 1}, lambda: choose_k(points, GROUPS + 2))
    rows = min(len(points), WARD_ROWS)
    return {**found, "clients": len(points), "result": found["result"][0], "rows": rows}


def matching(job: dict[str, Any]) -> dict[str, Any]:
    """Time the matching of clusters of 100,000 clients to models."""
    points = _vectors(int(CLIENTS * job.get("scale", 1.0)))
    labels = torch.arange(len(points)) % GROUPS
    found = _time(job, lambda: len(match_clusters(points, labels)))
    return {**found, "clients": len(points)}


PARTS = {f.__name__: f for f in (mean, cluster, choice, matching)}
