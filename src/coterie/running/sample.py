"""Rounds with some of the clients, timed and weighed: what forecasts are made from."""

import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coterie.core.federation import Call, Federation
from coterie.core.tree import Ids, n_bytes
from coterie.data.federated import FederatedData
from coterie.engines.sharded import Here, Shard, Sharded
from coterie.engines.simulation import Simulation
from coterie.engines.stacking.chunks import chunk_size
from coterie.running.build import Run, policy_of
from coterie.running.final import held_split
from coterie.running.folder import RunFolder
from coterie.running.forecast import Rounds, Shares
from coterie.running.held_out import HeldOut, rank_units
from coterie.running.loop import run_round, save_round, start_engine
from coterie.running.start import initial_groups

SECONDS = 3.0
"""Time that sampling may take before it stops adding clients."""
MOST = 6
"""Rounds of a sample; the first is not counted where there are others."""


def choose(data: FederatedData, count: int) -> Ids:
    """Some of the clients: of all sizes, in equal parts."""
    order = data.sizes("train").argsort(stable=True)
    places = (torch.arange(count) + 0.5) * len(data) / count
    return order[places.long()].sort().values


def sizes(clients: int, groups: int) -> Iterator[int]:
    """Numbers of clients to sample: each four times as many, until all.

    >>> list(sizes(40, 2)), list(sizes(3, 2))
    ([4, 16, 40], [3])
    """
    size = min(clients, max(4, 2 * groups))
    while size < clients:
        yield size
        size *= 4
    yield clients


def sample_rounds(ready: Run, seconds: float = SECONDS) -> list[Rounds]:
    """Rounds with more and more clients, until they are all of them or the time is over.

    Two numbers of clients are timed in any case, unless the second would take very long.
    """
    data, groups = ready.data, getattr(ready.algorithm, "n_groups", None) or 1
    found: list[Rounds] = []
    spent = next_one = 0.0
    for count in sizes(len(data), groups):
        if found and spent + next_one > (seconds if len(found) > 1 else 10 * seconds):
            break
        began = time.perf_counter()
        found.append(_sample(ready, count, seconds / 8))
        last = time.perf_counter() - began
        if len(found) > 1:  # the first one also warms up
            spent += last
        one = found[-1]
        next_one = 4 * 3 * (one.work + one.server + one.saving)
    return found


def _sample(ready: Run, count: int, seconds: float) -> Rounds:
    settings = replace(ready.settings, engine=_plain(ready), shards=None, address=None)
    data = ready.data if count == len(ready.data) else ready.data.subset(choose(ready.data, count))
    if settings.validation:
        data = data.hold_out(settings.validation, seed=settings.seed)
    one = Run(ready.algorithm, data, settings)
    description = {"plan": {"chunk": find_chunk(ready)}}
    fed = start_engine(one.algorithm, data, settings, description)
    if isinstance(fed, Simulation):
        fed.stand_for(ready.data)
    fed.start = initial_groups(settings.start, data.names)
    fed.policy = policy_of(one.algorithm, settings)
    held = HeldOut(rank_units(data, held_split(data)))
    meter = Meter(fed)
    rounds: list[tuple[float, float, float, float, float]] = []
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = RunFolder(Path(place) / "run")
        folder.create(one.description)
        fed.begin(-1)
        state = one.algorithm.init(fed)
        fed.commit()
        began = time.perf_counter()
        for number in range(max(1, min(MOST, settings.rounds))):
            if one.algorithm.done(state) or (number > 1 and time.perf_counter() - began > seconds):
                break
            before, meter.seconds, meter.calls = fed.traffic.total(), 0.0, 0
            start = time.perf_counter()
            state, *_ = run_round(one.algorithm, data, settings, fed, state, number, {}, held)
            middle = time.perf_counter()
            save_round(folder, number + 1, state, fed, held, None)
            saved = time.perf_counter() - middle
            other = middle - start - meter.seconds
            traffic = fed.traffic.total() - before
            rounds.append((meter.seconds, other, saved, meter.calls, traffic))
        fed.rest()
    later = rounds[1:] or rounds
    work, server, saving, calls, traffic = (
        statistics.median(values) for values in zip(*later, strict=True)
    )
    kept = sum(n_bytes(tree) for tree in fed.memory.committed.values())
    return Rounds(
        count, work, server, saving, calls, traffic, 2 * kept + 2 * meter.held, peak_memory()
    )


def find_chunk(ready: Run) -> int:
    """Number of clients that run at once."""
    return ready.settings.chunk or chunk_size(ready.algorithm, ready.data)


def _plain(ready: Run) -> Any:
    return "stacked" if ready.settings.engine == "ray" else ready.settings.engine


class Meter:
    """Notes what the clients of a federation take: seconds, exchanges, bytes of their replies."""

    def __init__(self, fed: Federation) -> None:
        self.seconds, self.calls, self.held = 0.0, 0, 0
        self._gather = fed.gather
        fed.gather = self._measure  # type: ignore[method-assign]

    def _measure(self, call: Call, means: Any) -> Any:
        began = time.perf_counter()
        try:
            got = self._gather(call, means)
        finally:
            self.seconds += time.perf_counter() - began
            self.calls += 1
        averaged = {total.mean.leaf for total in got.means if not hasattr(total, "held")}
        each = sum(amount for name, amount in got.sizes.items() if name not in averaged)
        self.held = max(self.held, each * len(got.position))
        return got


class Weighed(Here):
    """Shards in this process; what would travel to the first of them is weighed."""

    def __init__(self, makers: Any) -> None:
        super().__init__(makers)
        self.bytes = 0

    def share(self, value: Any) -> Any:
        self.bytes += weigh(value)
        return value

    def ask(self, shard: int, name: str, *given: Any) -> Any:
        answer = super().ask(shard, name, *given)
        if shard == 0:
            more = given[1:] if name == "gather" else given  # the first part was shared
            self.bytes += weigh(more) + weigh(answer)
        return answer


def weigh(value: Any) -> int:
    """Bytes of a value as it travels to another process."""
    return len(pickle.dumps(value, protocol=5))


def sample_shards(ready: Run, sample: Rounds) -> list[Shares]:
    """What travels in a round between the main process and shards of two sizes."""
    groups = getattr(ready.algorithm, "n_groups", None) or 1
    most = min(sample.clients, 4 * max(4, 2 * groups))
    found = []
    for count in (most // 2, most):
        if count < 2:
            continue
        data = ready.data.subset(choose(ready.data, count))
        settings = replace(ready.settings, engine="stacked", shards=None, address=None)
        if settings.validation:
            data = data.hold_out(settings.validation, seed=settings.seed)
        half = torch.arange(count).tensor_split(2)
        makers = [
            partial(Shard, ready.algorithm, partial(data.subset, ids), {"seed": settings.seed})
            for ids in half
        ]
        pool = Weighed(makers)
        fed = Sharded(
            data.names, pool, [len(i) for i in half], settings.seed, settings.participation
        )
        fed.start = initial_groups(settings.start, data.names)
        fed.policy = policy_of(ready.algorithm, settings)
        held = HeldOut(rank_units(data, held_split(data)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fed.begin(-1)
            state = ready.algorithm.init(fed)
            fed.commit()
            travelled = []
            for number in range(3):
                if ready.algorithm.done(state):
                    break
                pool.bytes = 0
                state, *_ = run_round(ready.algorithm, data, settings, fed, state, number, {}, held)
                travelled.append(pool.bytes)
        found.append(Shares(len(half[0]), statistics.median(travelled[1:] or travelled)))
    return found


def peak_memory() -> int:
    """Largest memory of this process so far, in bytes."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> int | None:
    """Bytes of memory that are free on this machine; None where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
