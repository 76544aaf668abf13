"""Measure from which size on convolutional networks train faster one client at a time.

The rule `CROWDED` in `coterie.engines.stacking.kernels` rests on this table.

    python benchmarks/kernel_rule.py

Processor time of one core is compared, so that other work on the machine matters little.
"""

import functools
import time

import torch
from torch import nn

from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.ops import Fit, Kernel, Loop
from coterie.core.random import fold, seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import leaves, stack
from coterie.engines.stacking.kernels import CROWDED, Stacked

STACK = 16 * 2**20  # bytes of weights, as in `chunks.MODELS`


def network(channels: int, first: int, second: int, size: int, hidden: int, side: int) -> nn.Module:
    """Two convolutions with pooling, two linear layers."""
    left = ((side - size + 1) // 2 - size + 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels, first, size),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, size),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * left * left, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


SHAPES = [
    (3, 6, 16, 5, 120, 32),
    (1, 16, 32, 5, 128, 28),
    (1, 32, 64, 5, 512, 28),
    (3, 64, 64, 5, 500, 32),
    (3, 32, 64, 5, 1024, 32),
    (1, 32, 64, 3, 1024, 28),
]


def convolved(shape: tuple[int, ...]) -> int:
    """Numbers that the two convolutions put out for one image."""
    _, first, second, size, _, side = shape
    one = side - size + 1
    return int(first * one**2 + second * (one // 2 - size + 1) ** 2)


def seconds(kernels: dict[str, Kernel], fit: Fit, stacked: tuple[object, ...]) -> dict[str, float]:
    """The least processor time of each kernel in four turns."""
    best = dict.fromkeys(kernels, float("inf"))
    for turn in range(5):
        for name, kernel in kernels.items():
            began = time.process_time()
            kernel.fit(fit, stacked)
            if turn:  # the first turn chooses
                best[name] = min(best[name], time.process_time() - began)
    return best


def main() -> None:
    """Print a table: how much longer single clients take than a stack, and what the rule picks."""
    torch.set_num_threads(1)
    print("| weights | rows a step | put out a step | clients | single / stack | the rule picks |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        model = Model(functools.partial(network, *shape))
        one = model.init(seed_key(0))
        weights = sum(leaf.numel() for leaf in leaves(one))
        for size, samples in ((10, 40), (20, 40), (50, 100), (None, 100)):
            for clients in (2, 5, 10):
                if clients * weights * 4 > STACK:
                    continue
                x = torch.randn(clients, samples, shape[0], shape[-1], shape[-1])
                y = torch.randint(0, 10, (clients, samples))
                mask = torch.ones(clients, samples, dtype=torch.bool)
                batch = Batch(x, y, mask, torch.ones(clients, samples))
                local = LocalSGD(0.01, batch_size=size, epochs=1 if size else 3)
                key = fold(seed_key(0), torch.arange(clients))
                zero = torch.zeros(1, dtype=torch.int64)
                stacked = stack([one] * clients), batch, key, zero, ()
                fit = Fit(local, model.losses, None, None)
                with torch.no_grad():
                    took = seconds({"twins": Stacked("twins"), "loop": Loop()}, fit, stacked)
                out = (size or samples) * convolved(shape)
                picked = "loop" if out > CROWDED else "twins"
                ratio = took["loop"] / took["twins"]
                print(
                    f"| {weights:,} | {size or samples} | {out:,} | {clients} | {ratio:.2f} | "
                    f"{picked} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
