"""CIFAR-10: the published binary files, their archive, or strips of lossless images.

Krizhevsky: Learning multiple layers of features from tiny images, 2009. A record is a label byte
and 3,072 bytes: red, green, blue, each 32 x 32.
"""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import ConfigError, DataError
from coterie_lab.sources.files import File, Layout, Pool, Source
from coterie_lab.sources.idx import read_idx

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _records(parts: list[bytes], where: Path) -> Pool:
    """Convert six batches of records; the last one is the test batch."""
    raw = b"".join(parts)
    if len(raw) % 3073:
        raise DataError(
            f"{where} is damaged: its length is not a multiple of a record. Get it again."
        )
    table = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, 3073).copy())
    n_train = sum(len(part) for part in parts[:-1]) // 3073
    return Pool(table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].clone(), n_train, CLASSES)


def _archive(folder: Path) -> Pool:
    path = folder / "cifar-10-binary.tar.gz"
    try:
        with tarfile.open(path) as archive:
            found = {Path(member.name).stem: member for member in archive.getmembers()}
            parts = [archive.extractfile(found[name]) for name in _BATCHES]
            return _records([part.read() for part in parts if part is not None], path)
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}). Get it again.") from error


def _binary(folder: Path) -> Pool:
    below = folder / "cifar-10-batches-bin"
    return _records([(below / f"{name}.bin").read_bytes() for name in _BATCHES], below)


def _strips(folder: Path) -> Pool:
    """Read zip files of WebP strips, 500 images of 32 x 32 each, in the published order."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "CIFAR-10: reading strips of images needs Pillow, which is not installed. "
            "Install it with: pip install 'coterie[images]'"
        ) from error
    images = []
    for name in _BATCHES:
        with zipfile.ZipFile(folder / f"cifar-10/{name}.webp.zip") as archive:
            for strip in sorted(archive.namelist()):
                with Image.open(io.BytesIO(archive.read(strip))) as image:
                    images.append(np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3))
    x = torch.from_numpy(np.concatenate(images)).permute(0, 3, 1, 2).contiguous()
    train = read_idx(folder, "cifar-10/train-labels-idx1-ubyte.gz")
    test = read_idx(folder, "cifar-10/test-labels-idx1-ubyte.gz")
    if len(x) != len(train) + len(test):
        raise DataError(f"{folder / 'cifar-10'}: images and labels do not match. Get them again.")
    return Pool(x, torch.cat([train, test]), len(train), CLASSES)


CIFAR10 = Source(
    "cifar10",
    "CIFAR-10",
    "www.cs.toronto.edu/~kriz/cifar.html",
    "none stated; cite the report",
    (
        Layout(
            (
                File(
                    "cifar-10-binary.tar.gz",
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                ),
            ),
            _archive,
        ),
        Layout(tuple(File(f"cifar-10-batches-bin/{name}.bin") for name in _BATCHES), _binary),
        Layout(
            (
                File("cifar-10/data_batch_1.webp.zip", "74adddb8d21eb3c1f577bbcfe3e7caab"),
                File("cifar-10/data_batch_2.webp.zip", "22aa69a2c6c73332cc4d4eb8c5fca182"),
                File("cifar-10/data_batch_3.webp.zip", "66dc482eaed1b24473acd49b6a3eddb2"),
                File("cifar-10/data_batch_4.webp.zip", "66b260e5849f3ba5b908ce82a3b3b446"),
                File("cifar-10/data_batch_5.webp.zip", "0650811ab0a7083b575b237ea7357fc9"),
                File("cifar-10/test_batch.webp.zip", "295b862f92a39c060c9a2ee93e0405d9"),
                File("cifar-10/train-labels-idx1-ubyte.gz", "19c5ba0d816e4a825bc916426c60b852"),
                File("cifar-10/test-labels-idx1-ubyte.gz", "fcab2b34778585a7cc7eb4e8b591bd03"),
            ),
            _strips,
        ),
    ),
)
