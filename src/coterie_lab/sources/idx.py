"""Grey images in the IDX format: MNIST, Fashion-MNIST, EMNIST.

IDX is a big-endian header (two zero bytes, the type, the number of axes, their lengths), then the
values. LeCun, Cortes, Burges: the MNIST database. Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017,
arXiv:1708.07747. Cohen, Afshar, Tapson, van Schaik: EMNIST, 2017, arXiv:1702.05373.
"""

import gzip
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie_lab.sources.files import File, Layout, Pool, Source, content


def read_idx(folder: Path, path: str) -> Tensor:
    """Read an IDX file of bytes as a tensor."""
    return parse_idx(content(folder, path), str(folder / path))


def parse_idx(raw: bytes, name: str) -> Tensor:
    """Convert the content of an IDX file of bytes to a tensor."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"{name} is not an IDX file of bytes. Get it again.")
    axes = raw[3]
    head = 4 + 4 * axes
    if len(raw) < head:
        raise DataError(f"{name} is damaged: its header is incomplete. Get it again.")
    shape = struct.unpack(f">{axes}I", raw[4:head])
    if len(raw) - head != int(np.prod(shape)):
        raise DataError(
            f"{name} is damaged: it has {len(raw) - head} values for shape {list(shape)}. "
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
                raise DataError(f"{folder / name}: images and labels do not match. Get them again.")
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
    "usually stated as CC BY-SA 3.0",
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


def _emnist(folder: Path) -> Pool:
    """Read the ByClass split, whose images are stored with rows and columns swapped."""
    parts = []
    for split in ("train", "test"):
        name = f"emnist/emnist-byclass-{split}"
        if File(f"{name}-images-idx3-ubyte.gz").locate(folder) is not None:
            images = read_idx(folder, f"{name}-images-idx3-ubyte.gz")
            parts.append((images, read_idx(folder, f"{name}-labels-idx1-ubyte.gz")))
        else:
            parts.append((torch.zeros(0, 28, 28, dtype=torch.uint8), torch.zeros(0).byte()))
    x = torch.cat([images for images, _ in parts]).transpose(1, 2).contiguous()
    return Pool(x[:, None], torch.cat([y for _, y in parts]), len(parts[0][1]), _LETTERS)


def _emnist_archive(folder: Path) -> Pool:
    """Read the published archive without unpacking it."""
    pools = []
    for split in ("train", "test"):
        pair = []
        for kind in ("images-idx3", "labels-idx1"):
            name = f"gzip/emnist-byclass-{split}-{kind}-ubyte.gz"
            with zipfile.ZipFile(folder / "emnist/gzip.zip") as archive:
                pair.append(parse_idx(gzip.decompress(archive.read(name)), name))
        pools.append(pair)
    x = torch.cat([images for images, _ in pools]).transpose(1, 2).contiguous()
    return Pool(x[:, None], torch.cat([y for _, y in pools]), len(pools[0][1]), _LETTERS)


def _byclass(*splits: str) -> tuple[File, ...]:
    known = {
        "test-images-idx3": (
            "8d73181fe11c121b03f71647518fdeb3",
            "5c0133f95f77ae69d867e4dc268094ed",
        ),
        "test-labels-idx1": ("3424df1563e7350ea9fc437cd43be05f", None),
    }
    out = []
    for split in splits:
        for kind in ("images-idx3", "labels-idx1"):
            packed, inner = known.get(f"{split}-{kind}", (None, None))
            name = f"emnist/emnist-byclass-{split}-{kind}-ubyte.gz"
            out.append(File(name, packed, inner=inner))
    return tuple(out)


EMNIST = Source(
    "emnist",
    "EMNIST, all classes",
    "nist.gov/itl/products-and-services/emnist-dataset",
    "work of the US government",
    (
        Layout(
            (
                File(
                    "emnist/gzip.zip",
                    "58c8d27c78d21e728a6bc7b3cc06412e",
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                ),
            ),
            _emnist_archive,
        ),
        Layout(_byclass("train", "test"), _emnist),
        Layout(
            _byclass("test"),
            _emnist,
            "EMNIST: only the test split was found, 116,323 of 814,255 images.",
        ),
    ),
)
