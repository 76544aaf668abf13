"""A simulation in several processes: each owns some clients, their data and their memory.

A shard runs the stacked engine on its own clients and averages their replies itself, so the traffic
is a few models per shard, whatever the number of clients. The sums of the shards are added in the
order of the shards, never in the order of arrival: two runs with the same number of shards give the
same bits, and another number of shards gives the same result to rounding.
"""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.client import DataSource, TaskInfo
from coterie.core.errors import CoterieError, FederationError
from coterie.core.federation import BankRows, Call, Each, Federation, Gathered
from coterie.core.memory import Memory
from coterie.core.policy import Policy
from coterie.core.question import Question, describe_task
from coterie.core.replies import Fault
from coterie.core.tree import Ids, Tree, take, tree_map
from coterie.engines.faults import Faults
from coterie.engines.simulation import Simulation

RESTARTS = 3
"""Times in a row that a shard is started again before the run is given up."""


class Lost(Exception):
    """A shard has stopped, and with it everything its clients were doing."""


class Ask(NamedTuple):
    """A call as all shards get it; what belongs to one client each is left out."""

    task: Any  # plain data, see `describe_task`; a function that belongs to no method as it is
    info: TaskInfo
    given: tuple[Any, ...]
    means: tuple[Mean, ...]
    phase: str
    key: Tensor
    local_key: Tensor
    round: int
    support: str
    policy: Policy


class Own(NamedTuple):
    """What one shard gets besides."""

    ids: Ids  # numbers of the clients on this shard
    given: tuple[Any, ...]  # index of `rows(...)` or part of `each(...)`, else None
    by: tuple[Tensor | None, ...]  # groups of the clients, for each mean that is given them


class Answer(NamedTuple):
    """What a shard returns."""

    gathered: Gathered
    missing: str
    kernels: dict[str, Any]


class Shard:
    """Some of the clients, in a process of their own.

    Parameters
    ----------
    algorithm
        The method.
    load
        Loads the data of these clients, here.
    options
        Options of the simulation.
    threads
        Number of threads; None: as they are.
    """

    simulation = Simulation

    def __init__(
        self,
        algorithm: Any,
        load: Callable[[], DataSource],
        options: Mapping[str, Any],
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.algorithm = algorithm
        self.fed = self.simulation(load(), **options)

    def process(self) -> int:
        """Number of the process it is in."""
        return os.getpid()

    def gather(self, ask: Ask, own: Own) -> Answer | CoterieError:
        """Run a call on some of the clients here, and average their replies."""
        self.fed.round, self.fed.support, self.fed.policy = ask.round, ask.support, ask.policy
        given = tuple(_join(g, o) for g, o in zip(ask.given, own.given, strict=True))
        call = Call(self._task(ask), ask.info, given, own.ids, ask.phase, ask.key, ask.local_key)
        means = [
            mean if by is None else replace(mean, by=by)
            for mean, by in zip(ask.means, own.by, strict=True)
        ]
        try:
            return Answer(
                self.fed.gather(call, means), self.fed.why_missing(), self.fed.kernel.describe()
            )
        except CoterieError as error:
            return error

    def _task(self, ask: Ask) -> Callable[..., Any]:
        if not isinstance(ask.task, dict):
            return ask.task  # type: ignore[no-any-return]
        if "question" in ask.task:
            arguments = ask.task["arguments"], ask.task["split"], ask.info.stackable
            return Question(ask.task["function"], self.algorithm, *arguments)
        return getattr(self.algorithm, ask.task["name"])  # type: ignore[no-any-return]

    def commit(self) -> dict[int, Tree]:
        """Accept what clients kept in this round; the memory that has changed."""
        changed = dict(self.fed.memory.tentative)
        self.fed.commit()
        self.fed.memory.unsaved = set()  # checkpoints are written elsewhere
        return changed

    def rollback(self) -> None:
        """Drop what clients kept in this round."""
        self.fed.rollback()

    def restore(self, committed: dict[int, Tree]) -> None:
        """Give clients the memory of an earlier part of the run."""
        memory = Memory()
        memory.committed = committed
        self.fed.restore(memory)

    def set_faults(self, faults: Faults | None) -> None:
        """Lose some replies."""
        self.fed.faults = faults


class Pool(ABC):
    """The processes of the shards."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Make a value known to all shards, once."""

    @abstractmethod
    def ask(self, shard: int, name: str, *given: Any) -> Any:
        """Call a method of a shard; what is returned goes to `take`."""

    @abstractmethod
    def take(self, ticket: Any) -> Any:
        """Wait for what a shard returns; raise `Lost` if it has stopped."""

    @abstractmethod
    def restart(self, shard: int) -> None:
        """Start a shard again, with the same clients and no memory."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""


class Here(Pool):
    """Shards in this process; for tests of what shards do apart from their processes."""

    def __init__(self, makers: Sequence[Callable[[], Shard]]) -> None:
        self.makers, self.shards = makers, {n: make() for n, make in enumerate(makers)}

    def share(self, value: Any) -> Any:
        return value

    def ask(self, shard: int, name: str, *given: Any) -> Any:
        return getattr(self.shards[shard], name)(*given)

    def take(self, ticket: Any) -> Any:
        return ticket

    def restart(self, shard: int) -> None:
        self.shards[shard] = self.makers[shard]()

    def close(self) -> None:
        self.shards = {}


class Sharded(Federation):
    """A federation whose clients are divided among shards.

    Parameters
    ----------
    names
        Names of all clients, shard by shard.
    pool
        The processes of the shards.
    sizes
        Number of clients of each shard.
    joins
        Round in which each client joins, as in `Simulation`.
    faults
        Replies that the shards lose, as in `Simulation`.
    plan
        Settings of the shards that affect the last bits, as plain data.
    """

    def __init__(
        self,
        names: Sequence[str],
        pool: Pool,
        sizes: Sequence[int],
        seed: int = 0,
        participation: float = 1.0,
        *,
        restart: int = 0,
        joins: Sequence[int] | None = None,
        faults: Faults | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(names, seed, participation, restart)
        self.pool = pool
        self.joins = None if joins is None else torch.as_tensor(joins)
        self._ends = torch.tensor([0, *sizes]).cumsum(0)  # [shards + 1]
        self._shard = torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes)))
        self._plan = dict(plan or {})
        self._kernels: list[dict[str, Any]] = [{} for _ in sizes]
        self._rests = False
        self._asked: set[int] = set()  # shards that have been asked since the last commit
        self._lost: set[int] = set()
        self._tries = [0] * len(sizes)
        self._missing, self._faults = "", faults

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        raise AssertionError("shards average their replies: see gather")

    def gather(self, call: Call, means: Sequence[Mean]) -> Gathered:
        """Ask all shards at once, and add up what they have averaged."""
        self._missing = ""
        self._wake()
        common = self.pool.share(self._common(call, means))
        tickets = []
        for shard in self._shard[call.ids].unique().tolist():
            position = (self._shard[call.ids] == shard).nonzero().squeeze(1)
            if shard in self._lost:
                self._miss(shard)
                continue
            own = self._own(call, means, position, shard)
            self._asked.add(shard)
            tickets.append((shard, position, self.pool.ask(shard, "gather", common, own)))
        total = Gathered(
            torch.empty(0, dtype=torch.int64),
            {},
            [self.average(mean, call.name) for mean in means],
            {},
        )
        failed: CoterieError | None = None
        for shard, position, ticket in tickets:
            answer = self._take(shard, ticket)
            if isinstance(answer, CoterieError):
                failed = failed or answer  # the others are heard out: no call may be under way
            elif answer is not None:
                self._tries[shard] = 0
                self._kernels[shard] = answer.kernels
                self._missing = self._missing or answer.missing
                total = _merge(total, answer.gathered, position)
        if failed is not None:
            raise failed
        return total

    def _common(self, call: Call, means: Sequence[Mean]) -> Ask:
        task: Any = call.task
        if call.owner is not None:
            task = describe_task(call.task)
            if isinstance(call.task, Question):
                task["function"] = call.task.function
        given = tuple(
            BankRows(g.bank, torch.empty(0))
            if isinstance(g, BankRows)
            else Each({})
            if isinstance(g, Each)
            else g
            for g in call.given
        )
        plain = [replace(m, by=None) if isinstance(m.by, Tensor) else m for m in means]
        return Ask(
            task, call.info, given, tuple(plain), call.phase, call.key, call.local_key,
            self.round, self.support, self.policy,
        )  # fmt: skip

    def _own(self, call: Call, means: Sequence[Mean], position: Tensor, shard: int) -> Own:
        given = tuple(
            g.index[position]
            if isinstance(g, BankRows)
            else take(g.tree, position)
            if isinstance(g, Each)
            else None
            for g in call.given
        )
        by = tuple(m.by[position] if isinstance(m.by, Tensor) else None for m in means)
        return Own(call.ids[position] - self._ends[shard], given, by)

    def _take(self, shard: int, ticket: Any) -> Any:
        """What a shard returned; None if it has stopped."""
        try:
            answer = self.pool.take(ticket)
        except Lost:
            self._lost.add(shard)
            self._miss(shard)
            return None
        return answer

    def _miss(self, shard: int) -> None:
        count = int(self._ends[shard + 1] - self._ends[shard])
        self._missing = f"; shard {shard + 1} of {len(self._tries)} ({count} clients) has stopped"

    def why_missing(self) -> str:
        return self._missing

    def rest(self) -> None:
        self.pool.close()
        self._rests = True

    def _wake(self) -> None:
        """Start the shards again after a rest, with the memory of their clients."""
        if not self._rests:
            return
        self._rests = False
        for shard in range(len(self._tries)):
            self.pool.restart(shard)
            self._remind(shard)

    # memory

    def commit(self) -> None:
        """Accept what clients kept; a copy stays here for checkpoints and for lost shards."""
        tickets = [(s, self.pool.ask(s, "commit")) for s in sorted(self._asked - self._lost)]
        for shard, ticket in tickets:
            first = int(self._ends[shard])
            for client, tree in (self._take(shard, ticket) or {}).items():
                self.memory.tentative[first + client] = tree
        super().commit()
        self._settle()

    def rollback(self) -> None:
        tickets = [(s, self.pool.ask(s, "rollback")) for s in sorted(self._asked - self._lost)]
        for shard, ticket in tickets:
            self._take(shard, ticket)
        super().rollback()
        self._settle()

    def restore(self, memory: Memory) -> None:
        super().restore(memory)
        if self._rests:
            return
        for shard in range(len(self._tries)):
            self._remind(shard)

    def _remind(self, shard: int) -> None:
        first, end = int(self._ends[shard]), int(self._ends[shard + 1])
        own = {c - first: tree for c, tree in self.memory.committed.items() if first <= c < end}
        self._take(shard, self.pool.ask(shard, "restore", own))

    def _settle(self) -> None:
        """Start lost shards again, with the memory of the last round that was accepted."""
        self._asked = set()
        while self._lost:
            shard = self._lost.pop()
            self._tries[shard] += 1
            what = f"Shard {shard + 1} of {len(self._tries)}"
            if self._tries[shard] > RESTARTS:
                raise FederationError(
                    f"{what} has stopped {self._tries[shard]} times in a row. Perhaps memory ran "
                    "out: use more shards on more machines. The run can be resumed."
                )
            warnings.warn(
                f"{what} has stopped; its clients missed round {self.round + 1}. It is started "
                "again.",
                stacklevel=3,
            )
            self.pool.restart(shard)
            self._remind(shard)

    # what else the contract's checks and the loop use

    @property
    def faults(self) -> Faults | None:
        """Replies that are lost."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        self._faults = faults
        for ticket in [self.pool.ask(s, "set_faults", faults) for s in range(len(self._tries))]:
            self.pool.take(ticket)

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that affect the last bits; kernels are those of each shard."""
        return {**self._plan, "shards": len(self._tries), "kernels": self._kernels}


def _join(given: Any, own: Any) -> Any:
    if isinstance(given, BankRows):
        return BankRows(given.bank, own)
    return Each(own) if isinstance(given, Each) else given


def _merge(total: Gathered, more: Gathered, position: Tensor) -> Gathered:
    """Add the replies of a shard; `position`: its clients' places among all that were asked."""
    faults = total.faults + [Fault(int(position[at]), why) for at, why in more.faults]
    if not len(more.position):
        total.faults = faults
        return total
    for ours, theirs in zip(total.means, more.means, strict=True):
        ours.merge(theirs, position)
    places = torch.cat([total.position, position[more.position]])
    rest = more.rest
    if len(total.position):
        rest = tree_map(lambda a, b: torch.cat([a, b]), total.rest, more.rest)
    return Gathered(places, rest, total.means, more.sizes, faults)
