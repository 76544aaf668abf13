"""Simulated clients: stacked, one by one, or one by one through bytes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from coterie.core import wire as bytes_
from coterie.core.algorithm import Algorithm
from coterie.core.client import Client, DataSource, as_reply
from coterie.core.errors import ConfigError, CoterieError, TaskError
from coterie.core.federation import BankRows, Call, Each, Federation
from coterie.core.ops import Kernel, Loop, using
from coterie.core.random import fold
from coterie.core.tree import Ids, Tree, row, stack, take, tree_map
from coterie.engines.faults import Faults
from coterie.engines.stacking.chunks import Gatherer, chunk_size, chunks
from coterie.engines.stacking.kernels import Path, Stacked
from coterie.engines.workers import available, in_workers

RULES = (
    (r"\.item\(\)|data-dependent|Dynamic", "no `if` on a tensor and no `.item()`: use torch.where"),
    (r"random", "random numbers come from `client.key`: use coterie.core.random"),
    (r"index|nonzero|masked_select", "pick rows with `take`, and reduce through the mask"),
)


class Simulation(Federation):
    """A federation on this machine.

    Parameters
    ----------
    source
        The clients' data.
    stack
        True: run many clients as one computation. False: run one client at a time (the reference).
    wire
        Convert every message to bytes and back; needs `stack=False`.
    chunk
        Number of clients per stack. None: chosen by the size of models and data.
    faults
        Replies that are lost.
    joins
        Round in which each client joins, from 0 and in ascending order. None: all in round 0.
    device
        Device on which clients run.
    workers
        Number of processes, with one thread each, that run clients; needs `stack=False`.
    kernel
        How stacks are trained: "auto", or one kernel where it is possible: "gram", "twins", "vmap",
        "loop".
    choices
        Kernels that an earlier part of the run chose (`plan["kernels"]`).
    """

    def __init__(
        self,
        source: DataSource,
        seed: int = 0,
        participation: float = 1.0,
        *,
        stack: bool = True,
        wire: bool = False,
        chunk: int | None = None,
        faults: Faults | None = None,
        joins: Sequence[int] | None = None,
        restart: int = 0,
        device: str | torch.device = "cpu",
        workers: int = 1,
        kernel: Path = "auto",
        choices: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source.names, seed, participation, restart)
        self.source, self.stack, self.wire = source, stack and not wire, wire
        self.chunk, self.faults = chunk, faults
        self.joins = torch.as_tensor(joins) if joins is not None else None
        if joins is not None and (len(joins) != len(self.names) or list(joins) != sorted(joins)):
            raise ConfigError(
                f"Simulation: joins must have a round for each of {len(self.names)} clients, in "
                f"rising order. Got {list(joins)}."
            )
        if workers > 1 and (stack or wire or not available()):
            raise ConfigError(
                f"Simulation: workers need the loop engine (stack=False) on a system that can fork "
                f"processes. Got workers={workers}, stack={stack}, wire={wire}."
            )
        self.device, self.workers = torch.device(device), workers
        if kernel not in get_args(Path):
            raise ConfigError(
                f"Simulation: kernel must be one of {', '.join(get_args(Path))}. Got '{kernel}'."
            )
        self.kernel: Kernel = Stacked(kernel, choices) if self.stack else Loop()
        self._gather = Gatherer(source, self.device)
        self._sizes = source.sizes("train")
        self._declared: dict[str, Tensor] = {"train": self._sizes}
        self._missing = ""

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if self.chunk is None:
            self.chunk = chunk_size(call.owner, self.source)
        asked = torch.arange(len(call.ids))
        asked = asked[self._find_heard(call)]
        stacked = self.stack and call.info.stackable
        for part in chunks(call.ids[asked], self._sizes, self.chunk):
            position = asked[part].sort().values
            self._wake(call, call.ids[position])
            with torch.no_grad(), using(self.kernel):
                run = self._run_stacked if stacked and len(position) > 1 else self._run_one_by_one
                sent = run(call, position)
            yield position, tree_map(lambda leaf: leaf.cpu(), sent)

    def _find_heard(self, call: Call) -> Tensor:
        """The clients that will answer; lost clients do no work and do not change."""
        self._missing = ""
        if self.faults is None or call.phase == "evaluation":
            return torch.ones(len(call.ids), dtype=torch.bool)
        dropped, late = self.faults.lost(call.key, self._name_keys[call.ids])
        lost = dropped | late
        if bool(lost.any()):
            first = int(lost.nonzero()[0])
            why = "did not answer" if bool(dropped[first]) else "answered after the deadline"
            self._missing = f"; '{self.names[int(call.ids[first])]}' {why}"
        return ~lost

    def why_missing(self) -> str:
        return self._missing

    def declared(self, split: str) -> Tensor:
        """The sizes of the data."""
        if split not in self._declared:
            self._declared[split] = self.source.sizes(split)
        return self._declared[split]

    def stand_for(self, source: DataSource) -> None:
        """Keep between rounds what a simulation of more clients could keep of these."""
        share = len(self.names) / max(1, len(source.names))
        self._gather.keep_like(source, share)
        if isinstance(self.kernel, Stacked):
            self.kernel.keep_share(share)

    def _wake(self, call: Call, ids: Ids) -> None:
        """Initialise the memory of clients that are asked for the first time."""
        owner = call.owner
        for client in ids.tolist():
            if self.memory.knows(client):
                continue
            memory = {}
            if isinstance(owner, Algorithm) and type(owner).client_init != Algorithm.client_init:
                own = fold(fold(self.run_key, "client_init"), self._name_keys[client])
                me = row(self._client(call, torch.tensor([client]), {}), 0)
                with torch.no_grad():
                    memory = owner.client_init(me._replace(key=own))
            self.memory.keep(client, memory)

    def _client(self, call: Call, ids: Ids, state: Tree) -> Client:
        """Clients on a leading axis; values that they share are repeated without copying."""
        m = len(ids)
        train = self._gather.batch(self.support, ids)
        self.kernel.serves((self.support, tuple(ids.tolist())), train.x)
        return Client(
            train=train,
            validation=self._gather.batch("validation", ids),
            facts=self._gather.facts(ids),
            state=state,
            key=fold(call.key, self._name_keys[ids]).to(self.device),
            run_key=self.run_key.to(self.device).expand(m),
            round=torch.tensor(self.round, device=self.device).expand(m),
            local_key=fold(call.local_key, self._name_keys[ids]).to(self.device),
        )

    def _extra(self, call: Call, ids: Ids) -> tuple[Any, ...]:
        return () if call.info.split is None else (self._gather.batch(call.info.split, ids),)

    def _run_stacked(self, call: Call, position: Tensor) -> dict[str, Any]:
        ids = call.ids[position]
        n = int(self._sizes[ids].max())
        client = self._client(call, ids, self.memory.stack(ids.tolist(), n))
        handed = [self._for_many(given, position) for given in call.given]
        handed += [(extra, 0) for extra in self._extra(call, ids)]
        given, axes = [tree for tree, _ in handed], [axis for _, axis in handed]

        def one(client: Client, *given: Tree) -> tuple[dict[str, Tree], Tree]:
            reply = as_reply(call.task(client, *given), call.name)
            return reply.sent, reply.keep or {}

        # run_key and round are the same for all clients: outside the stack, Python can read them.
        common = Client(0, 0, 0, 0, 0, None, None, 0)  # type: ignore[arg-type]
        client = client._replace(run_key=client.run_key[0], round=client.round[0])
        try:
            with self._no_global_draws(call):
                sent, keep = torch.vmap(one, in_dims=(common, *axes))(client, *given)
        except CoterieError:
            raise
        except Exception as error:
            raise self._blame(call, position, error) from error
        self.memory.keep_stacked(ids.tolist(), keep, self._sizes[ids])
        return sent

    def _for_many(self, given: Any, position: Tensor) -> tuple[Tree, int | None]:
        if isinstance(given, BankRows):
            tree, axis = take(given.bank, given.index[position]), 0
        elif isinstance(given, Each):
            tree, axis = take(given.tree, position), 0
        else:
            tree, axis = given, None
        return tree_map(lambda leaf: leaf.to(self.device), tree), axis

    def _run_one_by_one(self, call: Call, position: Tensor) -> dict[str, Any]:
        places = position.tolist()
        if self.workers == 1 or len(places) == 1:
            return stack([self._one(call, place) for place in places])
        # The first client runs here; its answer shows the shape of the other answers.
        first = self._ask(call, places[0])
        replies = [first]
        work = lambda place: bytes_.dump(self._ask(call, place))  # noqa: E731
        for said in in_workers(work, places[1:], self.workers):
            replies.append(bytes_.load(said, like=first))
        for place, (_, keep) in zip(places, replies, strict=True):
            self._remember(int(call.ids[place]), keep)
        return stack([sent for sent, _ in replies])

    def _one(self, call: Call, place: int) -> dict[str, Any]:
        sent, keep = self._ask(call, place)
        self._remember(int(call.ids[place]), keep)
        return sent

    def _remember(self, client: int, keep: Tree) -> None:
        if keep:
            self.memory.keep(client, tree_map(torch.clone, keep))

    def _ask(self, call: Call, place: int) -> tuple[dict[str, Any], Tree]:
        """Ask one client, without padding; through bytes if `wire` is set."""
        number = int(call.ids[place])
        ids = torch.tensor([number])
        client = row(self._client(call, ids, {}), 0)._replace(state=self.memory.get(number))
        given = [self._for_many(g, torch.tensor([place])) for g in call.given]
        handed = tuple(tree if axis is None else row(tree, 0) for tree, axis in given)
        handed += tuple(row(extra, 0) for extra in self._extra(call, ids))
        if self.wire:
            handed = tuple(bytes_.load(bytes_.dump(tree), like=tree) for tree in handed)
        try:
            with self._no_global_draws(call):
                reply = as_reply(call.task(client, *handed), call.name)
        except CoterieError:
            raise
        except Exception as error:
            raise TaskError(
                f"{call.name}: client '{self.names[number]}' failed in round {self.round + 1}: "
                f"{error}"
            ) from error
        sent, keep = reply.sent, reply.keep or {}
        if self.wire:
            sent, keep = (bytes_.load(bytes_.dump(part), like=part) for part in (sent, keep))
        return sent, keep

    @contextmanager
    def _no_global_draws(self, call: Call) -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise TaskError(
                f"{call.name}: a task must not draw from the global generator. Use client.key with "
                "coterie.core.random, and nn.Dropout instead of functional dropout."
            )

    def _blame(self, call: Call, position: Tensor, error: Exception) -> TaskError:
        """Find the cause of an error: one client, or a task that cannot be stacked."""
        for place in position.tolist():
            try:
                self._one(call, place)
            except TaskError as own:
                return own
        reason = str(error).strip().splitlines()[0]
        rule = next((rule for pattern, rule in RULES if re.search(pattern, str(error))), None)
        rule = f" It breaks a rule: {rule}." if rule else ""
        return TaskError(
            f"{call.name}: the task works for one client but cannot be stacked ({reason}).{rule} "
            "Change the task, or mark it @task(stackable=False)."
        )

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that affect the last bits; a run saves them so that it resumes exactly."""
        return {
            "engine": "stacked" if self.stack else "wire" if self.wire else "loop",
            "chunk": self.chunk,
            "threads": torch.get_num_threads(),
            "workers": self.workers,
            "device": str(self.device),
            "kernels": self.kernel.describe(),
        }
