"""What a run will need: seconds and bytes of a round, and memory, from rounds with some clients.

All functions take numbers and give numbers. The figures come from `running.sample`, which times a
few rounds of exactly this run on this machine, from `deploy.sample`, which counts the messages of
real clients, and from `overheads.json`, which holds what Ray and Flower cost.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OVERHEADS = Path(__file__).with_name("overheads.json")


class Rounds(NamedTuple):
    """Rounds that were run with some of the clients."""

    clients: int
    work: float  # seconds a round that clients compute, evaluations included
    server: float  # seconds a round of everything else
    saving: float  # seconds of a checkpoint
    calls: float  # exchanges a round, evaluations included
    bytes: float  # a round, as messages to real clients would have them
    held: int  # bytes that this process kept of these clients: memory, and replies at a time
    memory: int  # largest memory of this process so far


class Shares(NamedTuple):
    """Bytes a round between the main process and one shard."""

    clients: int  # on the shard
    bytes: float


class Messages(NamedTuple):
    """A round of real clients, played in one process."""

    clients: int
    exchanges: float  # a round
    down: float  # bytes a round to all clients
    up: float
    work: float  # seconds a round of one client
    server: float  # seconds a round of the server
    held: int  # bytes that the server kept of these clients
    client_memory: int  # largest memory of a client's process, in bytes


class Forecast(NamedTuple):
    """What a run will need."""

    where: str
    seconds: dict[str, float]  # of a round, by what takes them
    memory: dict[str, int]  # bytes, by process
    bytes: int  # a round
    sent: str  # what these bytes are

    @property
    def round(self) -> float:
        """Seconds of a round."""
        return sum(self.seconds.values())

    @property
    def largest(self) -> str:
        """What takes most of a round."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def read_overheads() -> dict[str, float]:
    """What Ray and Flower cost, as measured."""
    found: dict[str, float] = json.loads(OVERHEADS.read_text())
    return found


def extend(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """The value at a size, on the line through the two largest sizes that were measured.

    A line never falls, and never starts below zero.

    >>> extend([10, 20], [1.0, 1.5], 40)
    2.5
    >>> extend([10, 20], [1.0, 3.0], 40)
    6.0
    >>> extend([10, 20], [1.0, 0.9], 40), extend([10], [1.0], 40)
    (0.9, 4.0)
    """
    fixed, slope = line(sizes, values)
    return fixed + slope * size


def line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Fixed part and slope of the line that `extend` follows."""
    n, value = sizes[-1], values[-1]
    if len(sizes) < 2:
        return 0.0, value / max(n, 1)
    slope = max(0.0, (value - values[-2]) / (n - sizes[-2]))
    fixed = value - slope * n
    return (fixed, slope) if fixed >= 0 else (0.0, value / n)


def _seconds(rounds: Sequence[Rounds], clients: int, name: str) -> float:
    sizes = [one.clients for one in rounds]
    return extend(sizes, [getattr(one, name) for one in rounds], clients)


def _working(rounds: Sequence[Rounds], clients: int, chunk: int) -> int:
    """Bytes of a process that runs these clients, what it keeps of each client left out."""
    sizes = [min(one.clients, chunk) for one in rounds]
    values = [one.memory - one.held for one in rounds]
    wanted = min(clients, chunk)
    if len(sizes) < 2 or sizes[-1] == sizes[-2] or wanted <= sizes[-1]:
        return values[-1]
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return int(values[-1] + slope * (wanted - sizes[-1]))


def _held(rounds: Sequence[Rounds], clients: int) -> int:
    return int(rounds[-1].held / rounds[-1].clients * clients)


def on_one_machine(rounds: Sequence[Rounds], clients: int, chunk: int, saves: float) -> Forecast:
    """A run in one process.

    Parameters
    ----------
    rounds
        Rounds with more and more clients.
    clients
        Number of clients of the run.
    chunk
        Clients that run at once.
    saves
        Checkpoints a round.
    """
    seconds = {
        "work of the clients": _seconds(rounds, clients, "work"),
        "step of the server": _seconds(rounds, clients, "server"),
        "checkpoints": _seconds(rounds, clients, "saving") * saves,
    }
    memory = {"this process": _working(rounds, clients, chunk) + _held(rounds, clients)}
    traffic = round(_seconds(rounds, clients, "bytes"))
    return Forecast("one process", seconds, memory, traffic, "between server and clients")


def on_shards(
    rounds: Sequence[Rounds],
    shares: Sequence[Shares],
    clients: int,
    chunk: int,
    saves: float,
    shards: int,
    cores: int,
    data: int,
    costs: Mapping[str, float],
) -> Forecast:
    """A run on several processes with one thread each.

    Parameters
    ----------
    rounds, clients, chunk, saves
        As in `on_one_machine`; rounds with one thread.
    shares
        Traffic of shards with more and more clients.
    shards
        Number of processes.
    cores
        Cores they have together.
    data
        Bytes that reading the data takes; every process reads them.
    costs
        What Ray costs, see `overheads.json`.
    """
    alone = on_one_machine(rounds, clients, chunk, saves)
    each = -(-clients // shards)
    traffic = extend([s.clients for s in shares], [s.bytes for s in shares], each)
    calls = _seconds(rounds, clients, "calls") if len(rounds) < 2 else rounds[-1].calls
    turns = -(-shards // cores)  # shards that wait for each other
    busy = min(shards, cores)
    slower = 1 + (costs["neighbour"] - 1) * (busy > 1)
    seconds = {
        "work of the clients": _seconds(rounds, each, "work") * turns * slower,
        "step of the server": alone.seconds["step of the server"],
        "checkpoints": alone.seconds["checkpoints"],
        "traffic between processes": (calls + 1) * costs["ray_call"]
        + shards * traffic * costs["ray_byte"],
    }
    working = _working(rounds, each, chunk) + _held(rounds, each)
    main = int(costs["ray_main"]) + data + 2 * _held(rounds, clients)
    shard = working - int(costs["process"]) + int(costs["ray_shard"])
    memory = {"main process": main, "each shard": shard, "Ray": int(costs["ray_rest"])}
    where = f"{shards} processes (Ray)"
    return Forecast(where, seconds, memory, round(shards * traffic), "between the processes")


def on_real_clients(
    played: Messages,
    clients: int,
    link: float,
    latency: float,
    costs: Mapping[str, float],
    places: int | None = None,
) -> Forecast:
    """A deployment.

    Parameters
    ----------
    played
        A round of some clients.
    clients
        Number of clients of the deployment.
    link
        Bytes per second that the server's line carries.
    latency
        Seconds that a message is under way.
    costs
        What Flower costs, see `overheads.json`.
    places
        Cores that all clients share, for a trial on one machine. None: a machine for each client.
    """
    part = clients / played.clients
    down, up = played.down * part, played.up * part
    handled = played.exchanges * (costs["flower_exchange"] + clients * costs["flower_message"])
    handled += (down + up) * costs["flower_byte"]
    waiting = clients / places if places and places < clients else 1.0
    seconds = {
        "work of the clients": played.work * waiting,
        "step of the server": played.server * part,
        "messages through Flower": handled,
        "transfer": (down + up) / link + 2 * latency * played.exchanges,
    }
    memory = {
        "server": int(costs["flower_server"] + played.held * part + down + up),
        "each client": played.client_memory + int(costs["flower_client"]),
    }
    return Forecast(
        f"{clients} real clients", seconds, memory, round(down + up), "between server and clients"
    )


def find_limit(found: Forecast, room: int | None) -> str:
    """What limits a run first, in a sentence.

    Parameters
    ----------
    room
        Bytes of memory that are free on this machine; None: unknown, or not this machine's matter.
    """
    need = sum(found.memory.values())
    if room is not None and need > room:
        return f"memory: {size(need)} are needed and {size(room)} are free"
    share = found.seconds[found.largest] / max(found.round, 1e-12)
    return f"{found.largest}: {share:.0%} of a round"


ADVICE = {
    "work of the clients": "A smaller network, fewer local epochs or a smaller participation.",
    "step of the server": "More processes do not help. Another method, or fewer evaluations "
    "(--set run.evaluate_every=10), may.",
    "checkpoints": "Save less often: --set run.save_every=10.",
    "traffic between processes": "Fewer processes, or one.",
    "messages through Flower": "More local work in each exchange: --set local.epochs=5.",
    "transfer": "A smaller network, a smaller participation, or more local work in each exchange.",
}


def advise(found: Forecast, room: int | None, cores: int, holds: bool) -> str:
    """What to do about the limit, in a sentence; empty if nothing needs to be done."""
    if room is not None and sum(found.memory.values()) > room:
        if holds:
            return "The mean holds the reply of every client: --set run.policy.mean=plain does not."
        return "More machines (--engine ray --address ...), or a smaller participation."
    if found.where == "one process" and found.largest == "work of the clients":
        if cores > 1 and found.round >= WORTH:
            return f"More processes: --engine ray --shards {cores}; see what they bring: --shards."
        return ""
    return ADVICE[found.largest] if found.round >= WORTH else ""


WORTH = 0.5
"""Seconds of a round below which nothing needs to be done."""


def size(number: float) -> str:
    """Bytes as a person reads them.

    >>> size(900), size(1_500_000), size(2.5e9)
    ('1 kB', '1.5 MB', '2.5 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{max(1, round(number / 1e3)) if number else 0} kB"


def duration(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> duration(0.0123), duration(1.234), duration(75), duration(7200)
    ('0.012 s', '1.2 s', '75 s', '2.0 h')
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def to_dict(found: Forecast) -> dict[str, Any]:
    """A forecast as plain data."""
    return {
        "where": found.where,
        "seconds_a_round": found.round,
        "seconds": found.seconds,
        "memory": found.memory,
        "bytes_a_round": found.bytes,
        "bytes_are": found.sent,
    }
