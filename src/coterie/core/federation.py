"""The server's room: a federation that can be asked, and never shows its data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.aggregate import Averaging, Mean, RunningMean, as_means
from coterie.core.client import TaskInfo
from coterie.core.errors import FederationError
from coterie.core.memory import Memory
from coterie.core.policy import Policy
from coterie.core.privacy import Budget, answers_count
from coterie.core.question import Question, info_of
from coterie.core.random import codes, fold, seed_key
from coterie.core.replies import Fault, Inspector, Record
from coterie.core.tree import Ids, Tree, leaves, n_bytes, n_rows, take, tree_map

LOCAL = "update"
"""Label of local training in the clients' keys."""


@dataclass(frozen=True)
class BankRows:
    """Row `index[i]` of a bank for the i-th client asked; nothing is copied until it is needed."""

    bank: Tree
    index: Tensor


@dataclass(frozen=True)
class Each:
    """Row i of a tree for the i-th client asked."""

    tree: Tree


def rows(bank: Tree, index: Tensor) -> BankRows:
    """Give each client asked one row of a bank."""
    return BankRows(bank, index)


def each(tree: Tree) -> Each:
    """Give each client asked its own part of a tree."""
    return Each(tree)


class Call(NamedTuple):
    """One exchange, as the engines see it."""

    task: Callable[..., Any]
    info: TaskInfo
    given: tuple[Any, ...]
    ids: Ids
    phase: str
    key: Tensor  # of the exchange; folded with each client's name
    local_key: Tensor  # of local training in it; likewise

    @property
    def owner(self) -> Any:
        """The method whose clients are asked; None for a plain function."""
        if isinstance(self.task, Question):
            return self.task.method
        return getattr(self.task, "__self__", None)

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The smallest and largest value that parts of a reply can have."""
        out = dict.fromkeys(self.info.shares, (0.0, 1.0))
        loss = getattr(getattr(self.owner, "model", None), "loss", "")
        if isinstance(loss, str) and getattr(self.owner, "supervised", False):  # a loss of ours
            out |= dict.fromkeys(self.info.losses, (0.0, float("inf")))
        return out

    @property
    def name(self) -> str:
        """Method and task, for messages."""
        asked = self.task.function if isinstance(self.task, Question) else self.task
        name: str = asked.__name__
        return name if self.owner is None else f"{type(self.owner).__name__}.{name}"


@dataclass
class Gathered:
    """The replies to a call: some leaves averaged, the rest stacked in the order of arrival."""

    position: Tensor  # [m]  of each reply among the clients asked
    rest: dict[str, Tree]  # leaves [m, ...]; empty if nobody replied
    means: list[Averaging]
    sizes: dict[str, int]  # bytes of each part of one client's reply
    faults: list[Fault] = field(default_factory=list)  # replies that were left out


def _blur(
    budget: Budget, call: Call, reply: dict[str, Any], means: Sequence[Averaging]
) -> dict[str, Any]:
    """Replies and means with the noise of differential privacy, paid for."""
    samples = call.info.samples
    first = budget.releases
    filled = sum(bool(leaves(total.mean.around)) for total in means)  # a shared part may be empty
    budget.pay(call.name, answers_count(reply, samples) + filled)
    reply = budget.blur_answers(reply, samples, call.name, first)
    for number, total in enumerate(means, 1):
        assert isinstance(total, RunningMean)  # see Privacy.limit
        members = torch.where(total.members >= total.fewest, total.members, 0)
        mean = total.result()
        reply[total.mean.leaf] = budget.blur_mean(mean, members, total.bank, first, number)
    return reply


class Traffic:
    """Bytes per client, by phase and direction.

    What a client was sent in this round and is sent again counts as an index: the client still
    has it.
    """

    INDEX = 8  # bytes that name a row

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """A new round: clients hold nothing of the last one."""
        # Bank and holders by the bank's name; a holder has all of it (row -1) or one row.
        self._held: dict[tuple[int, ...], tuple[Tree, set[tuple[int, int]]]] = {}

    def add(self, phase: str, direction: str, ids: Ids, amount: Tensor | int) -> None:
        """Count bytes of some clients."""
        old = self.totals.get((phase, direction), torch.zeros(0, dtype=torch.int64))
        if len(ids) and int(ids.max()) >= len(old):
            old = torch.cat([old, old.new_zeros(int(ids.max()) + 1 - len(old))])
        more = torch.as_tensor(amount, dtype=torch.int64).expand(len(ids))
        self.totals[phase, direction] = old.index_add(0, ids.cpu(), more.cpu())

    def count_sent(self, call: Call) -> None:
        """Count what a call sends down."""
        for given in call.given:
            self.add(call.phase, "down", call.ids, self._weigh(given, call.ids))

    def _weigh(self, given: Any, ids: Ids) -> Tensor:
        if isinstance(given, Each):
            m = max(len(ids), 1)
            return torch.full((len(ids),), n_bytes(given.tree) // m, dtype=torch.int64)
        bank = given.bank if isinstance(given, BankRows) else given
        whole = n_bytes(bank)
        name = tuple(id(leaf) for leaf in leaves(bank))
        # The tree is kept with its name, so that no other tensor can take over the id.
        _, holders = self._held.setdefault(name, (bank, set()))
        part = given.index.tolist() if isinstance(given, BankRows) else [-1] * len(ids)
        wanted = list(zip(ids.tolist(), part, strict=True))
        known = torch.tensor(
            [w in holders or (w[0], -1) in holders for w in wanted], dtype=torch.bool
        )
        holders.update(wanted)
        if isinstance(given, BankRows) and whole:
            whole //= n_rows(bank)
        return torch.where(known, min(self.INDEX, whole), whole)

    def total(self, *phases: str) -> int:
        """All bytes so far, of some phases or of all but the evaluations."""
        return sum(
            int(amount.sum())
            for (phase, _), amount in self.totals.items()
            if (phase in phases if phases else phase != "evaluation")
        )


Then = Callable[[Ids, dict[str, Any]], None]
"""Gets the clients that answered a question asked later, and their replies."""


class Federation(ABC):
    """Clients that can be asked. Engines say how; see `exchange`.

    An engine must define `exchange`, or `gather` if it averages elsewhere. It may change `defers`,
    `simulated`, `plan`, `fewest`, `why_missing`, `restore`, `rest`, `note_saved` and `ask_later`.

    Parameters
    ----------
    names
        Client names; an id is a position in this list.
    seed
        Root of all randomness.
    participation
        Share of the clients in a cohort.
    restart
        Number of the attempt; attempts share data and cohorts and nothing else.
    """

    defers = False
    """Whether evaluations wait for the next messages, because an exchange is slow."""
    simulated = True
    """Whether clients' memory is here; real clients keep theirs."""

    def __init__(
        self, names: Sequence[str], seed: int = 0, participation: float = 1.0, restart: int = 0
    ) -> None:
        self.names = tuple(names)
        self.seed, self.participation, self.restart = seed, participation, restart
        self.round = -1
        self.support = "train"
        self.start: Tensor | None = None  # [clients] int64; initial group of each, -1: not given
        self.traffic = Traffic()
        self.memory = Memory()  # what each client remembers
        self.wire_bytes: dict[str, int] = {}  # bytes over a network; empty in a simulation
        self.policy = Policy()  # how means are taken, and when a client is asked no more
        self.record = Record()  # faulty replies
        self.joins: Tensor | None = None  # round in which each client joins; None: all have
        self.budget: Budget | None = None  # differential privacy; None: no noise
        self.absent: set[int] = set()  # clients that were asked in this round and did not answer
        self._shared_key = seed_key(seed)
        self.run_key = fold(self._shared_key, "restart", restart) if restart else self._shared_key
        self._name_keys = fold(seed_key(0), codes(self.names))  # [clients]
        self._calls: dict[str, int] = {}
        self._phase: str | None = "setup"

    @property
    def n_clients(self) -> int:
        """Clients that have joined so far."""
        if self.joins is None:
            return len(self.names)
        return int((self.joins <= max(self.round, 0)).sum())

    def everyone(self) -> Ids:
        """Ids of all clients."""
        return torch.arange(self.n_clients)

    def per_client(self, fill: float) -> Tensor:
        """A tensor with one entry per client."""
        return torch.full((self.n_clients,), fill)

    def key(self, *labels: str | int) -> Tensor:
        """Randomness of the server, by name; another one each round."""
        return fold(self.run_key, "server", self.round, *labels)

    def cohort(self) -> Ids:
        """Ids of the clients in this round: a function of seed and round alone."""
        n = self.n_clients
        count = max(1, int(self.participation * n + 1e-9))
        if count == n:
            return self.everyone()
        order = fold(fold(self._shared_key, "cohort", self.round), self._name_keys[:n]).argsort()
        return order[:count].sort().values

    def turns(self, ids: Ids, label: str, every_round: bool = False) -> Tensor:
        """A random place for each client, 0 to m - 1, by name: numbering does not matter."""
        key = fold(self.run_key, "turns", label) if every_round else self.key("turns", label)
        return fold(key, self._name_keys[ids]).argsort().argsort()

    def map(
        self,
        task: Callable[..., Any],
        *given: Any,
        to: Ids,
        reduce: Mean | Sequence[Mean] | None = None,
        at_least: int = 1,
    ) -> tuple[Ids, dict[str, Any]]:
        """Ask clients to do a task.

        Parameters
        ----------
        given
            What they are handed: a tree for all, `rows(bank, index)` or `each(tree)`.
        to
            Ids of the clients asked.
        reduce
            Means to take of some leaves on the way in; the rest comes stacked.
        at_least
            Fewer answers are an error, and the round is abandoned.

        Returns
        -------
        ids, reply
            The clients that answered, in the order asked, and their replies; empty if none did.
            Faulty replies are left out, and clients that sent too many are not asked.
        """
        means = as_means(reduce)
        trusted = self.record.trusted(self.names, to, self.policy.strikes)
        if not bool(trusted.all()):
            to, given, means = _keep(trusted, to, given, means)
        call = self.call(task, given, to)
        at_least = self.fewest(at_least, len(to))
        budget = None if call.phase == "evaluation" else self.budget
        if budget is not None:
            means = budget.admit(call.name, means)
        self.traffic.count_sent(call)
        got = self.gather(call, means)
        for place, why in got.faults:
            self.note_fault(int(to[place]), call.name, why)
        answered, order = got.position, got.position.argsort()
        if call.phase != "evaluation":
            wrong = [int(to[place]) for place, _ in got.faults]
            self.absent |= set(to.tolist()) - set(to[answered].tolist()) - set(wrong)
        self.traffic.add(call.phase, "up", to[answered], sum(got.sizes.values()))
        if len(answered) < at_least:
            raise FederationError(
                f"{call.name}: at least {at_least} of {len(to)} clients must answer in round "
                f"{self.round + 1}. {len(answered)} did{self.why_missing()}."
            )
        reply = tree_map(lambda leaf: leaf[order], got.rest)
        if budget is not None and len(answered):
            return to[answered[order]], _blur(budget, call, reply, got.means)
        for total in got.means:
            reply[total.mean.leaf] = total.result()
        return to[answered[order]], reply

    def call(self, task: Callable[..., Any], given: tuple[Any, ...], to: Ids) -> Call:
        """A call as engines see it.

        Each call has a key of its own. The key of local training does not depend on the name of the
        task: methods that train a client once in a round draw the same batches and dropout, so that
        they differ in what they do and not in luck.
        """
        info = info_of(task)
        number = self._calls.get(info.name, 0)
        self._calls[info.name] = number + 1
        of_round = fold(self.run_key, "client", -1 if info.steady else self.round)
        key = fold(of_round, info.name, number)
        local = key if isinstance(task, Question) else fold(of_round, LOCAL, number)
        return Call(task, info, given, to, self._phase or info.phase, key, local)

    def gather(self, call: Call, means: Sequence[Mean]) -> Gathered:
        """Run a call, and average some leaves of the replies as they arrive."""
        sums = [self.average(mean, call.name) for mean in means]
        reduced = {mean.leaf for mean in means}
        evaluation = call.phase == "evaluation"
        declared = self.declared(call.info.split or self.support)[call.ids]
        if evaluation and call.info.split is None:  # perhaps on rows that are not the client's own
            declared = torch.full_like(declared, -1)
        strict = call.info.finite and not evaluation
        inspector = Inspector(means, declared, call.info.samples, strict, call.limits)
        positions, parts, sizes = [], [], {}
        for position, reply in self.exchange(call) if len(call.ids) else ():
            sizes = {name: n_bytes(part) // max(len(position), 1) for name, part in reply.items()}
            position, reply = inspector.check(position, reply)
            if not len(position):
                continue  # every reply of this part was faulty
            for total in sums:
                total.add(reply, position, checked=True)
            parts.append({name: leaf for name, leaf in reply.items() if name not in reduced})
            positions.append(position)
        for position, rest in inspector.judge():
            for total in sums:
                total.broken += len(position)
            parts.append(rest)
            positions.append(position)
        rest = tree_map(lambda *leaf: torch.cat(leaf), parts[0], *parts[1:]) if parts else {}
        answered = torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)
        return Gathered(answered, rest, sums, sizes, inspector.faults)

    def average(self, mean: Mean, owner: str) -> Averaging:
        """Begin to take a mean by the rule of the run; `owner` names the task in messages."""
        return self.policy.average(mean, owner)

    def declared(self, split: str) -> Tensor:
        """Number of samples that each client has declared, -1 if unknown: [clients]."""
        return torch.full((len(self.names),), -1)

    def note_aside(self, client: int, why: str) -> None:
        """Name a client whose answers are not believed, with the reason."""
        self.record.set_aside(self.names[client], why)

    def distrusted(self, ids: Ids) -> Tensor:
        """Which of some clients were set aside because their answers cannot be true: [m]."""
        return torch.tensor([self.names[i] in self.record.aside for i in ids.tolist()]).bool()

    def note_fault(self, client: int, task: str, why: str) -> None:
        """Name a client whose reply is left out, and count it."""
        self.record.add(self.names[client], task, why, self.policy.strikes)

    @abstractmethod
    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Run a call; yield positions among those asked with their replies, stacked."""

    def fewest(self, at_least: int, asked: int) -> int:
        """The number of answers without which a round is abandoned; a method asks for some."""
        return at_least

    def why_missing(self) -> str:
        """The first reason for a missing reply, to end an error message with."""
        return ""

    def begin(self, round: int) -> None:
        """Open a round: nothing counted, nothing held."""
        self.round, self._calls, self._phase = round, {}, None if round >= 0 else "setup"
        self.absent = set()
        self.traffic.forget()

    def restore(self, memory: Memory) -> None:
        """Give clients the memory of an earlier part of the run."""
        self.memory = memory

    def commit(self) -> None:
        """Accept what clients kept in this round."""
        self.memory.commit()

    def rollback(self) -> None:
        """Drop what clients kept in this round."""
        self.memory.rollback()

    @property
    def plan(self) -> dict[str, Any]:
        """What decides the last bits, as plain data; a run writes it down and resumes with it."""
        return {}

    def rest(self) -> None:  # noqa: B027 - most engines hold nothing
        """Let go of processes; they are started again when clients are asked again."""

    def note_saved(self) -> None:  # noqa: B027 - most engines need not know
        """Hear that a checkpoint has been written."""

    def ask_later(self, task: Callable[..., Any], *given: Any, to: Ids, then: Then) -> None:
        """Ask between rounds without a trace, when it costs least; by default at once."""
        with self.aside():
            heard, reply = self.map(task, *given, to=to, at_least=0)
        if len(heard):
            then(heard, reply)

    @contextmanager
    def aside(self, phase: str = "evaluation", support: str = "train") -> Iterator[None]:
        """Ask between rounds without a trace: memory, keys and traffic stay as they are.

        `support` names the data a client shows as its training data meanwhile.
        """
        calls, old, held = dict(self._calls), self._phase, self.traffic._held
        self._phase, self.support = phase, support
        self.traffic.forget()
        try:
            yield
        finally:
            self.rollback()
            self._calls, self._phase, self.traffic._held = calls, old, held
            self.support = "train"


def _keep(
    some: Tensor, to: Ids, given: tuple[Any, ...], means: tuple[Mean, ...]
) -> tuple[Ids, tuple[Any, ...], tuple[Mean, ...]]:
    """What some of the clients asked are handed, and the means of their replies."""
    kept = some.nonzero()[:, 0]

    def pick(part: Any) -> Any:
        if isinstance(part, BankRows):
            return BankRows(part.bank, part.index[kept])
        return Each(take(part.tree, kept)) if isinstance(part, Each) else part

    by = [mean.by[kept] if isinstance(mean.by, Tensor) else mean.by for mean in means]
    fewer = tuple(replace(mean, by=own) for mean, own in zip(means, by, strict=True))
    return to[kept], tuple(map(pick, given)), fewer
