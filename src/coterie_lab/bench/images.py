"""The images of the workloads."""

import gzip
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

DIGITS = 5_000  # number of real digits


class Images(NamedTuple):
    """Small images of digits, as bytes."""

    x: Tensor  # [n, 28, 28]  uint8
    y: Tensor  # [n]
    source: str


@cache
def images(n: int = 60_000) -> Images:
    """Images like MNIST: real digits with a random shift of at most one pixel.

    The digits are from MNIST if it is in COTERIE_DATA, otherwise from scikit-learn, enlarged.
    """
    folder = Path(os.environ.get("COTERIE_DATA", "")) / "mnist"
    if os.environ.get("COTERIE_DATA") and (folder / "train-images-idx3-ubyte.gz").exists():
        x = _idx(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:DIGITS]
        y = _idx(folder / "train-labels-idx1-ubyte.gz", 8)[:DIGITS].long()
        source = f"{len(x):,} MNIST digits, shifted by up to one pixel"
    else:
        from sklearn.datasets import load_digits

        found = load_digits()
        small = torch.from_numpy(found.images).float()[:, None] / 16  # [1797, 1, 8, 8]
        large = functional.interpolate(small, size=(20, 20), mode="bilinear")
        x = (functional.pad(large, (4, 4, 4, 4))[:, 0] * 255).round().to(torch.uint8)
        y = torch.from_numpy(found.target).long()
        source = (
            f"{len(x):,} of scikit-learn's digits, enlarged to 28 x 28 and shifted by up to one "
            f"pixel (MNIST was not found: COTERIE_DATA)"
        )
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(x), (n,), generator=generator)
    shift = torch.randint(-1, 2, (n, 2), generator=generator)
    out = torch.empty(n, 28, 28, dtype=torch.uint8)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            chosen = (shift[:, 0] == dy) & (shift[:, 1] == dx)
            out[chosen] = torch.roll(x[pick[chosen]], (dy, dx), (1, 2))
    return Images(out, y[pick], source)


def _idx(path: Path, header: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())
