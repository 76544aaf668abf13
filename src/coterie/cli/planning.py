"""What `coterie plan` does: sample, predict, print."""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from coterie.cli.sources import say_data
from coterie.core.algorithm import name_of
from coterie.core.errors import ConfigError
from coterie.running.build import Run, policy_of
from coterie.running.forecast import (
    Forecast,
    advise,
    duration,
    find_limit,
    on_one_machine,
    on_real_clients,
    on_shards,
    read_overheads,
    size,
    to_dict,
)
from coterie.running.sample import (
    cores,
    find_chunk,
    free_memory,
    peak_memory,
    sample_rounds,
    sample_shards,
)


class Plan(NamedTuple):
    """Forecasts of one run."""

    ready: Run
    sampled: tuple[int, ...]  # numbers of clients that were timed
    seconds: float  # that sampling took
    forecasts: list[Forecast]
    limit: str
    advice: str


def make_plan(
    make: Callable[[], Run],
    *,
    shards: int | None,
    clients: int | None,
    link: float,
    latency: float,
    say: bool,
) -> Plan:
    """Make a run, sample some of its rounds, and predict; the options are those of `coterie plan`.

    `make` reads the data: the memory that this takes is measured.
    """
    before = peak_memory()
    ready = make()
    read_in = max(0, peak_memory() - before)
    if say:
        say_data(ready.data)
        print("Running a few rounds with some of the clients ...", flush=True)
    shards = shards or ready.settings.shards
    if shards is None and ready.settings.engine == "ray":
        shards = min(cores(), len(ready.data))
    if shards is not None and shards > len(ready.data):
        raise ConfigError(
            f"coterie plan: --shards must be at most the number of clients, {len(ready.data)}. Got "
            f"{shards}."
        )
    return predict(ready, read_in, shards, clients, link * 1e6 / 8, latency / 1e3)


def predict(
    ready: Run,
    read_in: int,
    shards: int | None,
    clients: int | None,
    link: float,
    latency: float,
    places: int | None = None,
) -> Plan:
    """The forecasts: one process, shards if a number is given, real clients if a number is given.

    Parameters
    ----------
    read_in
        Bytes that reading the data took.
    link, latency
        Bytes per second of the server's line, and seconds that a message is under way.
    places
        Cores that all real clients share; None: each has its own machine.
    """
    costs, settings = read_overheads(), ready.settings
    began = time.perf_counter()
    if settings.threads is not None or shards:
        torch.set_num_threads(settings.threads or 1)
    rounds = sample_rounds(ready)
    n, saves = len(ready.data), 1 / settings.save_every if settings.save_every else 0.0
    chunk = find_chunk(ready)
    found = [on_one_machine(rounds, n, chunk, saves)]
    if shards:
        traffic = sample_shards(ready, rounds[-1])
        parts = rounds, traffic, n, chunk, saves, shards
        found.append(
            on_shards(*parts, max(cores(), shards * bool(settings.address)), read_in, costs)
        )
    if clients:
        from coterie.deploy.sample import sample_messages

        played = sample_messages(ready)
        found.append(on_real_clients(played, clients, link, latency, costs, places))
    seconds = time.perf_counter() - began
    last, room = found[-1], free_memory()
    room = None if clients or settings.address else room
    holds = "held" in _rule(ready)
    limit, advice = find_limit(last, room), advise(last, room, cores(), holds)
    return Plan(ready, tuple(r.clients for r in rounds), seconds, found, limit, advice)


def _rule(ready: Run) -> str:
    """Whether means hold the replies or add them up."""
    mean = policy_of(ready.algorithm, ready.settings).mean
    return "added" if mean in ("plain", "clipped") else "held"


def show_plan(found: Plan, as_json: bool) -> None:
    """Print a plan as a table and two sentences, or as JSON."""
    if as_json:
        plain = {
            "clients": len(found.ready.data),
            "sampled": list(found.sampled),
            "sampling_seconds": round(found.seconds, 3),
            "forecasts": [to_dict(one) for one in found.forecasts],
            "limit": found.limit,
            "advice": found.advice,
        }
        print(json.dumps(plain))
        return
    n, rounds = len(found.ready.data), found.ready.settings.rounds
    timed = ", ".join(map(str, found.sampled))
    print(
        f"\n{name_of(found.ready.algorithm)} with {n} clients, {rounds} rounds. Timed with {timed} "
        f"of them, in {duration(found.seconds)}."
    )
    rows = [("", "a round", f"{rounds} rounds", "memory", "bytes a round")]
    for one in found.forecasts:
        memory = ", ".join(f"{name} {size(value)}" for name, value in one.memory.items())
        times = duration(one.round), duration(one.round * rounds)
        rows.append((one.where, *times, memory, f"{size(one.bytes)} {one.sent}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    print()
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    last = found.forecasts[-1]
    parts = sorted(last.seconds.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{name} {duration(value)}" for name, value in parts if value >= 1e-4)
    print(f"\nA round of {last.where}: {spent}.")
    if len(found.forecasts) > 1:
        print("The costs of Ray and Flower were measured on one machine; on a network they differ.")
    print(f"What limits first: {found.limit}. {found.advice}".rstrip())
