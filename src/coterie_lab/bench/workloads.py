"""The workloads: network, data, amount of work, and goals.

All variants of a workload use the same initial models and the same batches. Times are per round,
with the data in memory and without evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithms.clove import CLoVE
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ifca import IFCA
from coterie.core.algorithm import Algorithm
from coterie.core.client import Batch
from coterie.core.errors import ConfigError, unknown
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.partitions import rotation
from coterie.models import MLP
from coterie_lab.bench import networks
from coterie_lab.bench.images import images


@dataclass(frozen=True)
class Goal:
    """A goal of a workload: speed-up over the plain loop, and share of the machine's peak."""

    threads: int
    ratio: float
    variants: tuple[str, ...]  # any of these may meet the goal
    kind: str = "general"
    peak: float | None = None


@dataclass(frozen=True)
class Workload:
    """One workload of the benchmark.

    Parameters
    ----------
    network
        Builds the network.
    local
        Local training of each client.
    clients
        Number of clients.
    samples
        Number of samples per client.
    timed
        Number of clients that are timed, if the time is linear in it; None for all.
    inputs
        "flat" or "image" digits, "turned" digits in four rotations, "noise" images or "normal"
        numbers.
    groups
        Number of models; with more than one, `method` is IFCA or CLoVE.
    tolerance
        Largest allowed difference of a weight from the plain loop after a round.
    exact
        Builds the network for the comparison, if `network` draws random numbers.
    """

    name: str
    title: str
    network: Callable[[], nn.Module]
    local: LocalSGD
    clients: int
    samples: int
    timed: int | None = None
    inputs: str = "flat"
    loss: Any = "cross_entropy"
    method: type[Algorithm] = FedAvg
    groups: int = 1
    threads: tuple[int, ...] = (2, 1)
    kernels: tuple[str, ...] = ("loop", "vmap", "twins")
    goals: tuple[Goal, ...] = ()
    tolerance: float = 1e-4
    exact: Callable[[], nn.Module] | None = None

    def scale(self, scale: float) -> "Workload":
        """The same workload with fewer clients, for a trial."""
        if scale == 1:
            return self
        count = max(self.groups, 2, round((self.timed or self.clients) * scale))
        return replace(self, clients=count // self.groups * self.groups, timed=None)


@dataclass(frozen=True)
class Problem:
    """A prepared workload: everything that is not part of the timing."""

    work: Workload
    data: FederatedData
    model: Model
    method: Any
    state: Any
    batch: Batch = field(repr=False)  # leaves [m, n, ...]
    steps: Tensor = field(repr=False)  # [m, t, b]  rows of every step
    gflop: float = 0.0

    def loss(self, output: Any, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss, as the plain loop computes it."""
        name = self.work.loss
        if name == "cross_entropy":
            return nn.functional.cross_entropy(output, y)
        if name == "reconstruction":
            return nn.functional.mse_loss(output, x)
        return name(output, Batch(x, y, x, x)).mean()  # these losses only read x and y


def mlp() -> nn.Module:
    """784-200-10 with rectifiers."""
    return MLP(784, 10, hidden=(200,))


def tiny_mlp() -> nn.Module:
    """64-32-10."""
    return MLP(64, 10, hidden=(32,))


def _sgd(epochs: int = 1, batch_size: int = 20, **options: Any) -> LocalSGD:
    options = {"learning_rate": 0.05, **options}
    return LocalSGD(epochs=epochs, batch_size=batch_size, **options)


# A general goal does not count the Gram form, which only some workloads can use.
STACKED, TWINS, GRAM = ("twins",), ("twins", "ours"), ("gram", "ours")
ALL = ("loop", "vmap", "twins", "gram")
WORKLOADS = (
    Workload(
        "W1",
        "MLP 784-200-10, 100 clients of 200 samples, one epoch of batches of 20",
        mlp,
        _sgd(),
        clients=100,
        samples=200,
        kernels=ALL,
        goals=(
            Goal(2, 4.0, STACKED),
            Goal(1, 2.5, STACKED, peak=0.45),
            Goal(2, 5.5, GRAM, "special", peak=0.6),
            Goal(1, 3.5, GRAM, "special"),
        ),
    ),
    Workload(
        "W2",
        "as W1, five epochs",
        mlp,
        _sgd(epochs=5),
        clients=100,
        samples=200,
        kernels=ALL,
        goals=(
            Goal(2, 4.0, STACKED, peak=0.42),
            Goal(2, 12.0, GRAM, "special", peak=1.3),
            Goal(1, 9.0, GRAM, "special"),
        ),
    ),
    Workload(
        "W3",
        "two 5 x 5 convolutions and two linear layers, 20 clients of 200 samples, one epoch",
        networks.small_cnn,
        _sgd(),
        clients=20,
        samples=200,
        timed=12,
        inputs="image",
        goals=(
            Goal(2, 1.4, TWINS, peak=0.45),
            Goal(2, 1.8, TWINS, "special"),
            Goal(1, 1.9, TWINS, "special", peak=0.65),
        ),
    ),
    Workload(
        "W4",
        "IFCA round: 4 rotations, 1,200 clients of 200 samples, losses of 4 models, then 10 "
        "full-batch steps of the best",
        mlp,
        LocalSGD(learning_rate=0.1, steps=10),
        clients=1200,
        samples=200,
        timed=120,
        inputs="turned",
        method=IFCA,
        groups=4,
        kernels=ALL,
        goals=(Goal(2, 1.35, STACKED, peak=0.73), Goal(2, 3.5, GRAM, "special")),
    ),
    Workload(
        "W5",
        "CLoVE round: 4 rotations, 100 clients of 200 samples, losses of 4 models, clustering, "
        "then one epoch of batches of 20",
        mlp,
        _sgd(),
        clients=100,
        samples=200,
        inputs="turned",
        method=CLoVE,
        groups=4,
        kernels=ALL,
        goals=(Goal(2, 2.5, STACKED, peak=0.55), Goal(2, 2.8, GRAM, "special")),
    ),
    Workload(
        "W6",
        "three 3 x 3 convolutions with batch norm and dropout on 3 x 32 x 32, 4 clients of 100",
        networks.cifar_net,
        _sgd(),
        clients=4,
        samples=100,
        inputs="noise",
        exact=lambda: networks.cifar_net(dropout=False),
        # Batch norm on noise amplifies rounding: the plain loop differs from itself by 5e-3 in
        # another memory layout, where weights moved by 0.8.
        tolerance=2e-2,
        goals=(
            Goal(2, 1.15, ("loop", "twins", "ours")),
            Goal(2, 1.25, ("loop", "twins", "ours"), "special"),
        ),
    ),
    Workload(
        "W7-ae",
        "autoencoder 784-128-32-128-784, 50 clients of 200 samples, SGD",
        networks.autoencoder,
        _sgd(),
        clients=50,
        samples=200,
        loss="reconstruction",
        threads=(1,),
    ),
    Workload(
        "W7-vae",
        "VAE 784-256-16-256-784, 50 clients of 200 samples, SGD",
        networks.VAE,
        _sgd(),
        clients=50,
        samples=200,
        loss=networks.vae_losses,
        goals=(Goal(2, 2.5, TWINS),),
    ),
    Workload(
        "W7-vae-adam",
        "as W7-vae, Adam",
        networks.VAE,
        _sgd(learning_rate=0.001, optimizer="adam"),
        clients=50,
        samples=200,
        loss=networks.vae_losses,
        threads=(1,),
        goals=(Goal(1, 2.2, TWINS),),
        tolerance=2e-3,  # Adam moves a weight with almost no gradient by the full rate
    ),
    Workload(
        "W7-vae-5",
        "as W7-vae, five epochs",
        networks.VAE,
        _sgd(epochs=5),
        clients=50,
        samples=200,
        loss=networks.vae_losses,
        threads=(2,),
        kernels=ALL,
        goals=(Goal(2, 3.5, GRAM, "special"),),
    ),
    Workload(
        "W1-adam",
        "MLP as W1, 50 clients, Adam",
        mlp,
        _sgd(learning_rate=0.001, optimizer="adam"),
        clients=50,
        samples=200,
        threads=(1,),
        goals=(Goal(1, 3.5, TWINS),),
        tolerance=2e-3,
    ),
    Workload(
        "W1-custom",
        "MLP as W1 with a user-defined loss",
        mlp,
        _sgd(),
        clients=100,
        samples=200,
        loss=networks.focal_losses,
        threads=(2,),
        goals=(Goal(2, 1.5, ("vmap", "ours")),),
    ),
    Workload(
        "W9",
        "MLP 64-32-10, 1,000 clients of 40 samples, one epoch of batches of 10",
        tiny_mlp,
        _sgd(batch_size=10),
        clients=1000,
        samples=40,
        inputs="normal",
        goals=(
            Goal(1, 35.0, TWINS),
            Goal(1, 25.0, ("vmap",), "path 2"),
        ),
    ),
    Workload(
        "usernet",
        "user-defined network (own forward, residual connections, layer norm, own loss), "
        "100 clients",
        networks.UserNet,
        _sgd(),
        clients=100,
        samples=200,
        loss=networks.focal_losses,
    ),
)
NAMES = {work.name: work for work in WORKLOADS}
FLOOR = 0.95  # smallest speed-up over the plain loop that our engine must reach everywhere


def select(names: list[str], extra: tuple[str, ...] = ()) -> tuple[list[Workload], list[str]]:
    """Select workloads and further measurements by name; `W7` selects all that start with it.

    >>> [work.name for work in select(["W1", "W7"])[0]]
    ['W1', 'W7-ae', 'W7-vae', 'W7-vae-adam', 'W7-vae-5']
    """
    works: list[Workload] = []
    others: list[str] = []
    for name in names:
        family = [work for work in WORKLOADS if work.name.startswith(f"{name}-")]
        if name in NAMES:
            works.append(NAMES[name])
        elif name in extra:
            others.append(name)
        elif family:
            works += family
        else:
            raise ConfigError(unknown("workload", name, [*NAMES, *extra]))
    return works, others


def federation_of(work: Workload) -> FederatedData:
    """The clients of a workload that are timed."""
    m, n = work.timed or work.clients, work.samples
    generator = torch.Generator().manual_seed(1)
    if work.inputs == "turned":
        return rotate_digits(m, n, work.groups)
    if work.inputs in ("flat", "image"):
        found = images()
        x, y = found.x[: m * n].float() / 255, found.y[: m * n]
        x = x.flatten(1) if work.inputs == "flat" else x[:, None]
    elif work.inputs == "noise":
        x = torch.rand(m * n, 3, 32, 32, generator=generator)
        y = torch.randint(10, (m * n,), generator=generator)
    else:
        x = torch.randn(m * n, 64, generator=generator)
        y = torch.randint(10, (m * n,), generator=generator)
    return FederatedData(
        x,
        y,
        {"train": RowIndex.blocks([n] * m)},
        names=_names(m),
        task="classification",
        n_outputs=10,
    )


def rotate_digits(m: int, n: int, groups: int) -> FederatedData:
    """Rotated digits, stored once as bytes; a client has row numbers and a rotation."""
    found = images(60_000)
    each = m // groups * n
    x, y = found.x[:each], found.y[:each]
    return rotation(x, y, n_clients=m, n_groups=groups, reuse=True, test_fraction=0.0)


def _names(m: int) -> tuple[str, ...]:
    return tuple(f"client{i}" for i in range(m))


def method_of(work: Workload, model: Model) -> Any:
    """The method that is timed."""
    if work.method is FedAvg:
        return FedAvg(model, work.local)
    if work.method is IFCA:
        return IFCA(model, work.local, n_groups=work.groups)
    return CLoVE(model, work.local, n_groups=work.groups, stable_after=0)


def gflop(work: Workload, model: Model, sample: Tensor, clients: int) -> float:
    """Floating point operations of a round, in 1e9; a multiply-add counts as two.

    Forward pass, gradient of the weights, and gradient of the inputs except for the first layer.
    Gram kernels need fewer operations, so their share of the peak can exceed 1.
    """
    forward: list[int] = []

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        places = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        forward.append(2 * layer.weight.numel() * places)

    network = work.network().eval()
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(sample[:2])
    for hook in hooks:
        hook.remove()
    passes = work.local.total_steps(work.samples) * min(
        work.local.batch_size or work.samples, work.samples
    )
    each = passes * (3 * sum(forward) - forward[0])
    if work.groups > 1:
        each += work.samples * work.groups * sum(forward)
    return clients * each / 1e9
