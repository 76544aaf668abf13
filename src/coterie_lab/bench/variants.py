"""The same round computed in different ways: by a plain loop and by our engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ifca import IFCA
from coterie.core.model import Model
from coterie.core.random import fold, seed_key
from coterie.core.tree import BUFFER, Params, n_rows, row, stack
from coterie.engines import Simulation
from coterie_lab.bench.workloads import Problem, Workload, federation_of, gflop, method_of

Round = Callable[[], Params]
"""Runs one round of a problem; returns the new models, each leaf [k, ...]."""

TASKS = {"FedAvg": "update", "IFCA": "choose", "CLoVE": "update"}
PLAIN, LAYOUT, OURS = "plain", "channels_last", "ours"
WHAT = {
    PLAIN: "the plain loop: one client after the other, with torch.optim",
    LAYOUT: "the plain loop with a memory layout that suits convolutions",
    OURS: "our engine, which chooses the kernel itself",
    "loop": "our engine, forced to train one client after the other",
    "vmap": "our engine, forced to use vmap of the gradient",
    "twins": "our engine, forced to stack layers",
    "gram": "our engine, forced to use the Gram form of the first layer",
}


class Unavailable(Exception):
    """Raised for a variant that does not exist in this version."""


def prepare(work: Workload) -> Problem:
    """Prepare the data, models, initial state and batches of a workload."""
    data = federation_of(work)
    model = Model(work.network, loss=work.loss)
    method = method_of(work, model)
    fed = Simulation(data, seed=0)
    batch = data.gather("train", fed.everyone())
    fed.begin(-1)
    state = method.init(fed)
    if work.groups > 1:
        state = state._replace(models=_warm_up(state.models, model, batch, data.truth))
    problem = Problem(work, data, model, method, state, batch, torch.empty(0))
    steps = _steps(problem, fed) if work.local.batch_size else torch.empty(0)
    return replace(problem, steps=steps, gflop=gflop(work, model, batch.x[0], len(data)))


def _warm_up(models: Params, model: Model, batch: Any, truth: Tensor | None) -> Params:
    """Train each model a little on the data of one group, as in the middle of a run."""
    assert truth is not None
    warm = []
    for group in range(n_rows(models)):
        own = (truth == group).nonzero()[:10, 0]
        x, y = batch.x[own].flatten(0, 1), batch.y[own].flatten(0, 1)
        network = model.plain(row(models, group)).train()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
        warm.append(_params(model, network))
    return stack(warm)


def _params(model: Model, network: nn.Module) -> Params:
    values = dict(network.named_parameters())
    found = {name: leaf.detach().clone() for name, leaf in values.items()}
    return found | {BUFFER + name: leaf.clone() for name, leaf in network.named_buffers()}


def _steps(problem: Problem, fed: Simulation) -> Tensor:
    """The rows of every step of each client, as the engine draws them in round 0."""
    task = TASKS[type(problem.method).__name__]
    key = fold(fed.run_key, "client", 0, task, 0)
    names = torch.stack([fold(seed_key(0), name) for name in fed.names])
    keys = fold(fold(key, names), "local", 0)  # [m]
    local = problem.work.local
    pairs = zip(problem.batch.mask, keys, strict=True)
    return torch.stack([local.schedule(mask, own)[0] for mask, own in pairs])


class Variant(NamedTuple):
    """One way to compute a round, and the plan of the engine for it."""

    name: str
    run: Round
    fed: Simulation | None = None

    @property
    def plan(self) -> dict[str, Any] | None:
        """The choices of the engine, as plain data."""
        return None if self.fed is None else {k: _plain(v) for k, v in self.fed.plan.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def names_of(work: Workload) -> list[str]:
    """The variants of a workload, starting with the plain loop."""
    convolves = any(isinstance(layer, nn.Conv2d) for layer in work.network().modules())
    return [PLAIN, *([LAYOUT] if convolves else []), OURS, *work.kernels]


def make(name: str, problem: Problem, exact: bool = False) -> Variant:
    """Make a variant by name; `exact` makes one without random numbers, for comparisons."""
    if exact and problem.work.exact is not None:
        model = Model(problem.work.exact, loss=problem.work.loss)
        problem = replace(problem, model=model, method=method_of(problem.work, model))
    if name in (PLAIN, LAYOUT):
        return Variant(name, plain_loop(problem, name == LAYOUT))
    fed = federation(problem, "auto" if name == OURS else name)

    def run() -> Params:
        fed.begin(0)
        state, _ = problem.method.step(fed, problem.state)
        fed.commit()
        if problem.work.groups > 1:
            return dict(state.models)
        return {leaf: value[None] for leaf, value in state.params.items()}

    return Variant(name, run, fed)


def federation(problem: Problem, kernel: str) -> Simulation:
    """A simulated federation with a given kernel, or with the one the engine chooses."""
    return simulate(problem.data, kernel)


def simulate(data: Any, kernel: str = "auto", **options: Any) -> Simulation:
    """A simulation with a given kernel."""
    return Simulation(data, seed=0, kernel=kernel, **options)  # type: ignore[arg-type]


def plain_loop(problem: Problem, channels_last: bool) -> Round:
    """The plain loop: for each client copy the model, train it and add it to the mean."""
    work, model, batch = problem.work, problem.model, problem.batch
    bank = problem.state.models if work.groups > 1 else stack([problem.state.params])
    starts = [model.plain(row(bank, j)) for j in range(work.groups)]
    network = model.plain(row(bank, 0)).train()
    x = batch.x
    if channels_last:
        for net in (network, *starts):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        m = len(x)
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (m, -1))
    losses = [] if work.method is FedAvg else starts

    def tensors(net: nn.Module) -> list[Tensor]:
        return [*net.parameters(), *net.buffers()]

    def train(i: int, start: nn.Module) -> None:
        with torch.no_grad():
            for own, first in zip(tensors(network), tensors(start), strict=True):
                own.copy_(first)
        optimizer = optimizer_of(work, network)
        steps = problem.steps[i] if len(problem.steps) else [None] * (work.local.steps or 1)
        for rows in steps:
            picked, labels = (x[i], batch.y[i]) if rows is None else (x[i][rows], batch.y[i][rows])
            if channels_last and rows is not None:
                picked = picked.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            problem.loss(network(picked), picked, labels).backward()
            optimizer.step()

    @torch.no_grad()
    def group_of_each() -> list[int]:
        m = len(x)
        if not losses:
            return [0] * m
        table = torch.zeros(m, work.groups)
        for i in range(m):
            for j, net in enumerate(losses):
                table[i, j] = problem.loss(net(x[i]), x[i], batch.y[i])
        if work.method is IFCA:
            return table.argmin(1).tolist()
        server.begin(0)
        state = problem.method.cluster(server, problem.state, server.everyone(), table)
        return state.assignment.tolist()

    server = Simulation(problem.data, seed=0)  # only provides the key for the clustering

    def run() -> Params:
        group = group_of_each()
        sums = [[torch.zeros_like(leaf) for leaf in tensors(network)] for _ in starts]
        counts = [group.count(j) for j in range(work.groups)]
        for i, j in enumerate(group):
            train(i, starts[j])
            with torch.no_grad():
                for total, leaf in zip(sums[j], tensors(network), strict=True):
                    if leaf.is_floating_point():
                        total.add_(leaf, alpha=1 / counts[j])
        names = [n for n, _ in network.named_parameters()]
        names += [BUFFER + n for n, _ in network.named_buffers()]
        kept = [s if c else tensors(net) for s, c, net in zip(sums, counts, starts, strict=True)]
        return stack(
            [{n: leaf.detach() for n, leaf in zip(names, row_, strict=True)} for row_ in kept]
        )

    return run


def optimizer_of(work: Workload, network: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of the plain loop, with the defaults of torch."""
    rate = work.local.learning_rate
    if work.local.optimizer == "adam":
        return torch.optim.Adam(network.parameters(), lr=rate)
    return torch.optim.SGD(network.parameters(), lr=rate)


class Agreement(NamedTuple):
    """The difference between the models of a variant and those of the plain loop after a round."""

    largest: float  # difference of any weight
    relative: float  # norm of the difference over the norm of the change
    moved: float  # change of any weight in the round
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within both tolerances; False for nan."""
        return self.largest <= self.tolerance and self.relative <= RELATIVE


RELATIVE = 0.02  # with Adam, rounding matters where a gradient is almost zero; otherwise 1e-4


def agreement(problem: Problem, ours: Params, plain: Params) -> Agreement:
    """Compare the models of two variants; only floating point leaves count."""
    bank = problem.state.models if problem.work.groups > 1 else stack([problem.state.params])
    largest = difference = change = moved = 0.0
    for leaf, start in bank.items():
        if not start.is_floating_point():
            continue
        apart = (ours[leaf].double() - plain[leaf].double()).abs()
        step = (plain[leaf].double() - start.double()).abs()
        largest = max(largest, float(apart.max())) if not apart.isnan().any() else float("nan")
        moved = max(moved, float(step.max()))
        difference += float(apart.square().sum())
        change += float(step.square().sum())
    relative = (difference / change) ** 0.5 if change else float(difference > 0)
    return Agreement(largest, relative, moved, problem.work.tolerance)
