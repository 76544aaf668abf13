"""Many clients: 100,000 with 1 % participation, and rotated digits stored as bytes."""

import time
from typing import Any

import torch

from coterie.algorithms.clove import CLoVE
from coterie.algorithms.ifca import IFCA
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import n_bytes
from coterie.data.federated import FederatedData, RowIndex
from coterie_lab.bench import measure
from coterie_lab.bench.variants import simulate
from coterie_lab.bench.workloads import NAMES, mlp, rotate_digits, tiny_mlp


def many(m: int, n: int = 40, groups: int = 10, pool: int = 40_000) -> FederatedData:
    """Clients that share a pool of rows; each group has its own labelling rule."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(pool, 64, generator=generator)
    rules = torch.randn(groups, 64, 10, generator=generator)
    owner = torch.arange(pool) % groups
    y = torch.einsum("nd,ndc->nc", x, rules[owner]).argmax(1)
    truth = torch.arange(m) % groups
    row = torch.randint(pool // groups, (m, n), generator=generator) * groups + truth[:, None]
    index = RowIndex(row.flatten(), torch.arange(m + 1) * n)
    names = tuple(f"client{i}" for i in range(m))
    return FederatedData(x, y, {"train": index}, names, "classification", 10, truth=truth)


def scale100k(job: dict[str, Any]) -> dict[str, Any]:
    """CLoVE with ten models; 1 % of the clients take part in a round."""
    m = int(100_000 * job.get("scale", 1.0))
    bare = measure.memory_now()
    start = time.perf_counter()
    data = many(m)
    made = measure.memory_now()
    method = CLoVE(Model(tiny_mlp), NAMES["W9"].local, n_groups=10, first="random", stable_after=0)
    fed = simulate(data, participation=0.01)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    setup = time.perf_counter() - start
    seconds = []
    for number in range(1 + max(5, job.get("repeats", 5))):
        start = time.perf_counter()
        fed.begin(number)
        state, info = method.step(fed, state)
        fed.commit()
        seconds.append(time.perf_counter() - start)
    later = sorted(seconds[1:])
    return {
        "clients": m,
        "cohort": len(info["participants"]),
        "threads": torch.get_num_threads(),
        "setup_seconds": setup,
        "first_round_seconds": seconds[0],
        "seconds": later[len(later) // 2],
        "rounds": seconds,
        "libraries_mb": bare,
        "data_mb": made - bare,
        "peak_mb": measure.peak_memory(),
    }


def ifca_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Rounds of IFCA on rotated digits that are stored once, as bytes."""
    m, n = int(job["clients"] * job.get("scale", 1.0)) // 4 * 4, job["samples"]
    bare = measure.memory_now()
    data = rotate_digits(m, n, 4)
    rest = n_bytes(data.x) + n_bytes(data.y)
    rest += sum(n_bytes(rows) for rows in data.rows.values()) + n_bytes(data.client_facts)
    ready = measure.memory_now()
    method = IFCA(Model(mlp), LocalSGD(learning_rate=0.1, steps=10), n_groups=4)
    fed = simulate(data)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    seconds = []
    for number in range(job.get("rounds", 3)):
        start = time.perf_counter()
        fed.begin(number)
        state, _ = method.step(fed, state)
        fed.commit()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for part in torch.arange(m).split(fed.chunk or m):
        data.gather("train", part)
    loading = time.perf_counter() - start
    return {
        "clients": m,
        "samples": n,
        "threads": torch.get_num_threads(),
        "seconds": min(seconds[1:]),
        "rounds": seconds,
        "loading_seconds": loading,
        "at_rest_mb": rest / 2**20,
        "libraries_mb": bare,
        "ready_mb": ready,
        "peak_mb": measure.peak_memory(),
        "plan": {k: str(v) for k, v in fed.plan.items()},
    }


PARTS = {f.__name__: f for f in (scale100k, ifca_memory)}
