"""A few rounds of real clients in this process: how many messages there are, and of what size."""

import statistics
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from coterie.core import wire
from coterie.core.tree import n_bytes
from coterie.data import DataCard, FederatedData
from coterie.deploy.rehearsal import Rehearsal
from coterie.deploy.worker import Worker
from coterie.engines.relay import Envelope
from coterie.engines.remote import Remote
from coterie.running.build import Run, policy_of
from coterie.running.forecast import Messages
from coterie.running.loop import run_round
from coterie.running.sample import choose
from coterie.running.start import initial_groups

CLIENTS = 6
"""Clients that play; messages to others are as long."""
ROUNDS = 8
"""As many as show how exchanges change: some methods ask less once groups stay the same."""


class Nearby(Worker):
    """A worker whose data are in memory."""

    def __init__(self, home: Path, name: str, data: FederatedData) -> None:
        super().__init__(home, name, "")
        self.own = data

    def _read(self, setup: dict[str, Any]) -> FederatedData:
        return self.own


class Hand:
    """A link that passes messages to workers in this process, and counts."""

    def __init__(self, workers: dict[int, Nearby]) -> None:
        self.workers = workers
        self.answers: dict[str, Envelope | str] = {}
        self.seconds, self.exchanges, self.number = 0.0, 0, 0

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(self.workers, "")

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        began = time.perf_counter()
        numbers: list[str | None] = []
        for node, asked in messages:
            self.number += 1
            self.answers[str(self.number)] = self.workers[node].handle(asked)
            numbers.append(str(self.number))
        self.exchanges += any(asked.head["calls"] for _, asked in messages)
        self.seconds += time.perf_counter() - began
        return numbers

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope | str]]:
        return [(n, self.answers.pop(n)) for n in sorted(numbers) if n in self.answers]


def sample_messages(ready: Run) -> Messages:
    """Play rounds of some clients; every message becomes bytes, as in a deployment."""
    groups = getattr(ready.algorithm, "n_groups", None) or 1
    count = min(len(ready.data), max(CLIENTS, 2 * groups))
    data = ready.data.subset(choose(ready.data, count))
    card = DataCard.of(ready.data)
    described = {**ready.description, "run": {**ready.description.get("run", {}), "start": None}}
    setup = {"description": described, "card": {**card.to_dict(), "truth": None}}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers do
    try:
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            workers = {}
            for number, name in enumerate(data.names):
                home = Path(place) / str(number)
                home.mkdir()
                own = data.subset(torch.tensor([number])).compact()
                workers[number + 1] = Nearby(home, name, own)
            with redirect_stdout(StringIO()):
                return _play(ready, Hand(workers), setup, card, count)
    finally:
        torch.set_num_threads(threads)


def _play(ready: Run, link: Hand, setup: dict[str, Any], card: DataCard, count: int) -> Messages:
    settings, method = ready.settings, ready.algorithm
    rehearse = None if isinstance(card.sample_shape, dict) else Rehearsal(card, settings.seed)
    fed = Remote(
        link, setup, "0", settings.seed, settings.participation, deadline=600.0, poll=0.0,
        rehearse=rehearse,
    )  # fmt: skip
    fed.meet(count, 600.0)
    fed.start = initial_groups(settings.start, fed.names)
    fed.policy = policy_of(method, settings)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    late: dict[str, Any] = {}
    rounds = []
    for number in range(max(1, min(ROUNDS, settings.rounds - 1))):
        if method.done(state):
            break
        before = dict(fed.wire_bytes), link.exchanges, link.seconds
        began = time.perf_counter()
        state, *_ = run_round(method, card, settings, fed, state, number, late, None)
        spent = time.perf_counter() - began
        work = link.seconds - before[2]
        traffic = [fed.wire_bytes[way] - before[0][way] for way in ("down", "up")]
        rounds.append((link.exchanges - before[1], *traffic, work / count, spent - work))
    later = rounds[1:] or rounds
    exchanges, down, up, work, server = (
        statistics.fmean(part) for part in zip(*later, strict=True)
    )
    held = n_bytes(state) + sum(n_bytes(tree) for tree in fed.memory.committed.values())
    one = next(iter(link.workers.values()))
    return Messages(count, exchanges, down, up, work, server, held + round(up), _own_memory(one))


def _own_memory(worker: Nearby) -> int:
    """Bytes of a client's data and of what it was sent, on top of an empty process."""
    trees = sum(len(wire.dump(tree)) for tree in worker.trees.values())
    data = n_bytes(worker.own.x) + n_bytes(worker.own.y)
    return 3 * data + 4 * trees
