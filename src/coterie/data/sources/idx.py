"""Grey images in the IDX format: MNIST, Fashion-MNIST, EMNIST.

IDX is a big-endian header (two zero bytes, the type, the number of axes, their lengths), then the
values. LeCun, Cortes, Burges: the MNIST database. Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017,
arXiv:1708.07747. Cohen, Afshar, Tapson, van Schaik: EMNIST, 2017, arXiv:1702.05373.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.sources.files import File, Layout, Pool, Source, content


def read_idx(folder: Path, path: str) -> Tensor:
    """An IDX file of bytes as a tensor."""
    raw = content(folder, path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"{folder / path} is no IDX file of bytes. Get it again.")
    axes = raw[3]
    head = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", raw[4:head])
    if len(raw) - head != int(np.prod(shape)):
        raise DataError(
            f"{folder / path} is damaged: {len(raw) - head} values for shape {list(shape)}. "
            "Get it again."
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=head).reshape(shape).copy())


_PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _digits(folder: str, base: str, checksums: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(
        File(f"{folder}/{part}.gz", checksum, f"{base}/{part}.gz")
        for part, checksum in zip(_PARTS, checksums, strict=True)
    )


def _reader(name: str, classes: tuple[str, ...]) -> Callable[[Path], Pool]:
    def read(folder: Path) -> Pool:
        x, y, test_x, test_y = (read_idx(folder, f"{name}/{part}.gz") for part in _PARTS)
        for images, labels in ((x, y), (test_x, test_y)):
            if len(images) != len(labels) or int(labels.max()) >= len(classes):
                raise DataError(f"{folder / name}: images and labels do not belong together.")
        return Pool(torch.cat([x, test_x])[:, None], torch.cat([y, test_y]), len(y), classes)

    return read


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
_LETTERS = (*_DIGITS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")

MNIST = Source(
    "mnist",
    "MNIST",
    "yann.lecun.com/exdb/mnist",
    "usually given as CC BY-SA 3.0",
    (
        Layout(
            _digits(
                "mnist",
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
            ),
            _reader("mnist", _DIGITS),
        ),
    ),
)

FASHION_MNIST = Source(
    "fashion_mnist",
    "Fashion-MNIST",
    "github.com/zalandoresearch/fashion-mnist",
    "MIT",
    (
        Layout(
            _digits(
                "fashion-mnist",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            _reader("fashion-mnist", _CLOTHES),
        ),
    ),
)
