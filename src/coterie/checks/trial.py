"""Trials: short runs that are recorded and can be disturbed, and comparisons of their results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from coterie.checks.problem import Problem
from coterie.core.aggregate import Mean, as_means
from coterie.core.algorithm import Algorithm, grow
from coterie.core.client import Client, DataSource
from coterie.core.errors import FederationError
from coterie.core.federation import Call, Federation
from coterie.core.model import Model
from coterie.core.question import Question, info_of, question
from coterie.core.random import seed_key
from coterie.core.tree import Ids, Tree, n_bytes, named_leaves, tree_map
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


class Watched(Simulation):
    """A simulation that records its exchanges, and can disturb them."""

    def __init__(self, source: DataSource, engine: str, seed: int = 0, **options: Any) -> None:
        kind, _, kernel = engine.partition(":")
        options = {"kernel": kernel or "auto", **options}
        super().__init__(source, seed, stack=kind == "stacked", wire=kind == "wire", **options)
        self.log: list[Exchange] = []
        self.silent: int | None = None  # number of an exchange that no client answers
        self.poisoned: int | None = None  # client whose replies are nan
        self._number = 0
        self._last: dict[str, int] = {}

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
        self._last = {}
        ids, reply = super().map(task, *given, to=to, reduce=reduce, at_least=at_least)
        reduced = frozenset(mean.leaf for mean in as_means(reduce))
        held = sum(n_bytes(part) for name, part in reply.items() if name not in reduced)
        self.log.append(Exchange(info_of(task).name, self.round, ids, self._last, reduced, held))
        return ids, reply

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        number, self._number = self._number, self._number + 1
        if number == self.silent:
            return
        for position, reply in super().exchange(call):
            if self.poisoned is not None and call.phase != "evaluation":
                reply = _poison(reply, call.ids[position] == self.poisoned)
            for name, part in reply.items():
                size = n_bytes(part) // len(position)
                self._last[name] = max(size, self._last.get(name, 0))
            yield position, reply


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
    fed = Watched(problem.data, engine, seed, **options)
    *_, state = states(make(problem), fed, rounds)
    return traces(fed, state)


def traces(fed: Simulation, state: Any) -> dict[str, Tree]:
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
