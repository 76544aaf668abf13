"""Trials: short runs that are recorded and can be disturbed, and comparisons of their results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from coterie.checks.problem import Problem
from coterie.core.aggregate import Mean, as_means
from coterie.core.algorithm import Algorithm, grow
from coterie.core.client import Client, DataSource
from coterie.core.errors import FederationError
from coterie.core.federation import Call, Federation, Gathered
from coterie.core.model import Model
from coterie.core.question import Question, info_of, question
from coterie.core.random import seed_key
from coterie.core.tree import Ids, Tree, n_bytes, named_leaves, tree_map
from coterie.engines.sharded import Here, Shard, Sharded
from coterie.engines.simulation import Simulation

Make: TypeAlias = Callable[[Problem], Algorithm]
"""Builds the method under test; returns a new instance each time."""

ROUNDING = 1e-9  # of double precision, after a few dozen steps
EXACTLY = 0.0


class Exchange(NamedTuple):
    """One exchange as the server saw it."""

    task: str
    round: int
    heard: Ids
    sizes: dict[str, int]  # bytes of each part of one client's reply
    reduced: frozenset[str]  # the parts that were averaged as they arrived
    held: int  # bytes of the other parts, of all clients


class Watching(Federation):
    """A federation that records its exchanges, one of which may stay without an answer."""

    log: list[Exchange]
    silent: int | None = None  # number of an exchange that no client answers
    _number = 0

    def begin(self, round: int) -> None:
        super().begin(round)
        self._number = 0

    def map(
        self,
        task: Callable[..., Any],
        *given: Any,
        to: Ids,
        reduce: Mean | Sequence[Mean] | None = None,
        at_least: int = 1,
    ) -> tuple[Ids, dict[str, Any]]:
        self._sizes_of_parts: dict[str, int] = {}
        ids, reply = super().map(task, *given, to=to, reduce=reduce, at_least=at_least)
        reduced = frozenset(mean.leaf for mean in as_means(reduce))
        held = sum(n_bytes(part) for name, part in reply.items() if name not in reduced)
        sizes = self._sizes_of_parts
        self.log.append(Exchange(info_of(task).name, self.round, ids, sizes, reduced, held))
        return ids, reply

    def gather(self, call: Call, means: Sequence[Mean]) -> Gathered:
        number, self._number = self._number, self._number + 1
        if number == self.silent:
            nobody = call._replace(ids=call.ids[:0])
            return super().gather(nobody, means)
        got = super().gather(call, means)
        self._sizes_of_parts = got.sizes
        return got


class Poisoned(Simulation):
    """A simulation in which the replies of one client are nan."""

    poisoned: int | None = None

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for position, reply in super().exchange(call):
            if self.poisoned is not None and call.phase != "evaluation":
                reply = _poison(reply, call.ids[position] == self.poisoned)
            yield position, reply


class Watched(Watching, Poisoned):
    """A simulation that records its exchanges, and can disturb them."""

    def __init__(self, source: DataSource, engine: str, seed: int = 0, **options: Any) -> None:
        kind, _, kernel = engine.partition(":")
        options = {"kernel": kernel or "auto", **options}
        super().__init__(source, seed, stack=kind == "stacked", wire=kind == "wire", **options)
        self.log = []


class PoisonedShard(Shard):
    """A shard in which the replies of one client may be nan."""

    simulation = Poisoned


class WatchedShards(Watching, Sharded):
    """Two shards in this process that record their exchanges, and can be disturbed."""

    def __init__(
        self,
        source: Any,
        algorithm: Algorithm,
        seed: int = 0,
        participation: float = 1.0,
        joins: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        parts = torch.arange(len(source.names)).tensor_split(2)
        makers = [
            partial(
                PoisonedShard, algorithm, partial(source.subset, ids), {"seed": seed, **options}
            )
            for ids in parts
        ]
        sizes = [len(ids) for ids in parts]
        super().__init__(
            source.names,
            Here(makers),
            sizes,
            seed,
            participation,
            joins=joins,
            faults=options.get("faults"),
        )
        self.log = []

    @property
    def poisoned(self) -> int | None:
        """The client whose replies are nan."""
        return self._poisoned

    @poisoned.setter
    def poisoned(self, client: int) -> None:
        self._poisoned = client
        shard = int(self._shard[client])
        self.pool.shards[shard].fed.poisoned = client - int(self._ends[shard])  # type: ignore[attr-defined]


def watch(
    algorithm: Algorithm, source: Any, engine: str, seed: int = 0, **options: Any
) -> Watched | WatchedShards:
    """A federation that records its exchanges. Engine "ray": shards, here in this process."""
    if engine == "ray":
        return WatchedShards(source, algorithm, seed, **options)
    return Watched(source, engine, seed, **options)


def _poison(reply: Tree, who: Tensor) -> Tree:
    def spoil(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return leaf.masked_fill(who.reshape(-1, *(1,) * (leaf.ndim - 1)), torch.nan)

    return tree_map(spoil, reply)


def advance(algorithm: Algorithm, fed: Federation, state: Any, number: int) -> tuple[Any, bool]:
    """One round as in a run: the new state, and whether the round was accepted."""
    fed.begin(number)
    state = grow(state, fed.n_clients)
    try:
        new, _ = algorithm.step(fed, state)
    except FederationError:
        fed.rollback()
        return state, False
    fed.commit()
    return new, True


def states(algorithm: Algorithm, fed: Federation, rounds: int) -> Iterator[Any]:
    """The initial state, and the state after every round."""
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    yield state
    for number in range(rounds):
        state, _ = advance(algorithm, fed, state, number)
        yield state


def outcome(
    make: Make, problem: Problem, engine: str, *, rounds: int = 3, seed: int = 0, **options: Any
) -> dict[str, Tree]:
    """The result of a run: the state and the memory of each client."""
    algorithm = make(problem)
    fed = watch(algorithm, problem.data, engine, seed, **options)
    *_, state = states(algorithm, fed, rounds)
    return traces(fed, state)


def traces(fed: Federation, state: Any) -> dict[str, Tree]:
    """A copy of the state and of each client's memory, by name."""
    memory = {fed.names[i]: tree for i, tree in sorted(fed.memory.committed.items()) if tree}
    return tree_map(torch.clone, {"state": state, "memory": memory})


def difference(old: Tree, new: Tree, tolerance: float) -> str:
    """The first difference of two trees, as a sentence; empty if they are equal."""
    ours = {"/".join(path): leaf for path, leaf in named_leaves(old)}
    theirs = {"/".join(path): leaf for path, leaf in named_leaves(new)}
    odd = sorted(ours.keys() ^ theirs.keys())
    if odd:
        return f"only one of the two has '{odd[0]}'."
    for path, leaf in ours.items():
        other = theirs[path]
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            return f"'{path}' is {_kind(leaf)} in one and {_kind(other)} in the other."
        if not torch.allclose(leaf, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            gap = (leaf.double() - other.double()).abs().nan_to_num(torch.inf).max()
            return f"'{path}' differs by {float(gap):.2g}."
    return ""


def _kind(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def not_finite(first: Any, state: Any) -> str:
    """A part of a state that was finite at the start and no longer is; empty if there is none."""
    began = {path for path, leaf in named_leaves(first) if bool(leaf.isfinite().all())}
    for path, leaf in named_leaves(state):
        if path in began and not bool(leaf.isfinite().all()):
            return "/".join(path)
    return ""


def model_leaves(algorithm: Algorithm, tree: Tree) -> dict[str, Tensor]:
    """The leaves of a tree that are weights of the models of a method, by path."""
    nets = [getattr(algorithm, field.name) for field in fields(algorithm)]
    names = {name for net in nets if isinstance(net, Model) for name in net.init(seed_key(0))}
    return {"/".join(path): leaf for path, leaf in named_leaves(tree) if path[-1] in names}


@question(stackable=False, phase="evaluation", key="answers")
def predict_own(algorithm: Algorithm, client: Client, given: Tree, x: Tree) -> dict[str, Tensor]:
    """Outputs of a client's own model for some inputs."""
    return {"output": algorithm.predict(algorithm.personalise(client, given), x)}


def answers(algorithm: Algorithm, fed: Federation, state: Any, x: Tree) -> Tree:
    """Outputs of every client's own model: [clients, n, ...]."""
    ids = fed.everyone()
    with fed.aside():
        return fed.map(Question(predict_own, algorithm), algorithm.deploy(state, ids), x, to=ids)[1]
