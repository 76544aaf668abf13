"""What leaves a client: every method is run on a tiny problem, and its replies are listed.

    python -m coterie_lab.leaving          # write docs/what-leaves.md

The page cannot promise more than the code does, because it is made by running it.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import coterie.algorithms  # noqa: F401 - lists the methods
from coterie.checks.problem import Problem
from coterie.checks.trial import states
from coterie.core.algorithm import REGISTRY, Algorithm
from coterie.core.federation import Call
from coterie.core.model import Model
from coterie.core.question import Question
from coterie.core.random import seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import named_leaves
from coterie.data.synthetic import blobs
from coterie.engines.simulation import Simulation
from coterie.models.mlp import MLP
from coterie.running.evaluation import count_labels, evaluate

PAGE = Path("docs/what-leaves.md")
N_INPUTS, N_CLASSES = 6, 7
ROUNDS = 4
OPTIONS: dict[str, dict[str, Any]] = {"census": {"first": "survey"}}
"""Options that make a method send more than by default."""


class Part(NamedTuple):
    """One part of a reply."""

    method: str
    task: str
    phase: str
    name: str
    kind: str  # "model", "per class", "per cluster", "count" or "numbers"
    shape: tuple[int, ...]  # of the largest leaf
    reveals: bool  # something about single classes or rows, so that nodes refuse it


class Listening(Simulation):
    """A simulation that lists what clients reply."""

    def __init__(self, data: Any, weights: set[str], supervised: bool) -> None:
        super().__init__(data)
        self.weights, self.supervised = weights, supervised
        self.parts: dict[tuple[str, str], tuple[str, str, tuple[int, ...], bool]] = {}

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for position, reply in super().exchange(call):
            asked = call.task.function if isinstance(call.task, Question) else call.task
            for name, part in reply.items():
                leaves = named_leaves({name: part})
                if not leaves:
                    continue
                largest = max(leaves, key=lambda leaf: leaf[1][0].numel())[1][0]
                kind = self._kind(name, leaves)
                found = call.phase, kind, tuple(largest.shape), bool(call.info.reveals)
                self.parts[asked.__name__, name] = found
            yield position, reply

    def _kind(self, name: str, leaves: list[tuple[tuple[str, ...], Tensor]]) -> str:
        if any(path[-1] in self.weights for path, _ in leaves):
            return "model"
        if any(N_CLASSES in leaf.shape[1:] for _, leaf in leaves):
            return "per class"
        if not self.supervised and any(leaf.ndim > 1 for _, leaf in leaves):
            return "per cluster"
        return "count" if name == "n" or "count" in name else "numbers"


def list_parts(method: str) -> list[Part]:
    """What the clients of one method send in a few rounds and an evaluation."""
    problem = _problem()
    algorithm: Algorithm = REGISTRY[method].example(problem)
    for name, value in OPTIONS.get(method, {}).items():
        object.__setattr__(algorithm, name, value)
    nets = [value for value in vars(algorithm).values() if isinstance(value, Model)]
    weights = {name for net in nets for name in net.init(seed_key(0))}
    fed = Listening(problem.data, weights, algorithm.supervised)
    *_, state = states(algorithm, fed, ROUNDS)
    evaluate(algorithm, fed, state, problem.data.task)
    return [
        Part(method, task, phase, name, kind, shape, reveals)
        for (task, name), (phase, kind, shape, reveals) in fed.parts.items()
    ]


def _problem() -> Problem:
    """Seven classes: no other size here is seven, so what has seven entries has one per class."""
    data = blobs(2, 3, 40, N_INPUTS, N_CLASSES, test=20)
    model = Model(partial(MLP, N_INPUTS, N_CLASSES, hidden=(9,)), dtype=torch.float64)
    return Problem(data, model, LocalSGD(learning_rate=0.2, epochs=1, batch_size=4), 2)


def write_page(methods: list[str]) -> str:
    """The page, as Markdown."""
    lines = [
        "# What leaves a client",
        "",
        "This page is for owners of data. It lists everything that clients send, for every",
        "method. Rows of data never leave a client, and no reply has an entry per row; the",
        "tests check both for every method. `python -m coterie_lab.leaving` makes this page by",
        "running each method on a tiny problem.",
        "",
        "- **model**: weights of a network, or the change of weights.",
        "- **per class**: has an entry for each class, so it may show how often a class occurs.",
        "- **per cluster**: has an entry for each cluster that a client found in its own rows.",
        "- **count**: a number of rows.",
        "- **numbers**: everything else, such as losses, choices or centres.",
        "",
        "The table shows the simulation. On real clients there are two differences:",
        "",
        "- They refuse questions marked with \\*, which reveal something about single classes,",
        "  unless their owner allows it (`coterie deploy node --answer`). With `--answer` an owner",
        "  can also list the only questions that a client answers, by the names in this table.",
        "- A survey asks another question, which has no label counts, unless a user wants them",
        '  (`lens="conditional"`).',
        "",
        "| method | question to the client | part of the reply | kind | shape here |",
        "|---|---|---|---|---|",
    ]
    for method in methods:
        parts = [part for part in list_parts(method) if part.phase != "evaluation"]
        if not parts:
            lines.append(f"| `{method}` | | nothing | | |")
        for number, part in enumerate(parts):
            first = f"`{method}`" if not number else ""
            shape = " x ".join(map(str, part.shape)) or "one number"
            kind = f"**{part.kind}**" if part.kind.startswith("per ") else part.kind
            mark = " \\*" if part.reveals else ""
            lines.append(f"| {first} | `{part.task}`{mark} | `{part.name}` | {kind} | {shape} |")
    lines += [
        "",
        "All methods: an evaluation sends the loss, the accuracy and the number of rows of every",
        "client, for its test rows and its training rows. The simulation also counts labels",
        f"(`{count_labels.__name__}`) to describe groups; real clients are not asked for them, and",
        "refuse to send them. They also refuse to send the loss of each row.",
        "",
    ]
    return "\n".join(lines)


def known_methods() -> list[str]:
    """Methods of the library, in alphabetical order."""
    own = (name for name, cls in REGISTRY.items() if cls.__module__.startswith("coterie."))
    return sorted(own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args().out.write_text(write_page(known_methods()))
