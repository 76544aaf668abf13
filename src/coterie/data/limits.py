"""Bounds on data files, checked before they are read, and on the names of clients.

A small file can ask for any amount of memory: an image that declares a huge size, an archive that
unpacks to a thousand times its size, an array with a false shape.
"""

import gzip
import io
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError, printable

PIXELS = 80_000_000
"""Pixels of an image: 240 MB in colour, and less than what Pillow warns of."""
UNPACKED = 256 * 2**20
"""Bytes that a compressed file may unpack to, however small it is."""
RATIO = 200
"""How many times its size a larger one may unpack to."""
COLUMNS = 20_000
"""Columns of a table. Wider data are read faster as arrays."""
NAME = 200
"""Letters of a client's name."""


def check_file(path: Path) -> None:
    """Refuse what is no plain file, such as a pipe."""
    if not path.is_file():
        raise DataError(f"{path.name}: the data must be in a plain file. It is none. Remove it.")


def refuse_links_out(folder: Path, entries: Iterable[Path]) -> None:
    """Refuse links in a folder of data that lead out of it."""
    root = folder.resolve()
    for entry in entries:
        if entry.is_symlink() and root not in _resolve(entry).parents:
            raise DataError(
                f"{entry.name}: a link must stay in the folder {folder}. It leads to "
                f"{_resolve(entry)}. Copy the file there, or remove the link."
            )


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop
        return path


def check_pixels(size: tuple[int, int], source: str) -> None:
    """Refuse an image by the size it declares."""
    if prod(size) > PIXELS:
        raise DataError(
            f"{source}: an image must have at most {PIXELS:,} pixels. It declares {size[0]:,} x "
            f"{size[1]:,}. Scale it down or remove it."
        )


def check_unpacked(packed: int, unpacked: int, source: str) -> None:
    """Refuse what unpacks to far more than its size."""
    if unpacked > max(UNPACKED, RATIO * packed):
        raise DataError(
            f"{source}: a compressed file may unpack to {RATIO} times its size. This one has "
            f"{packed:,} bytes and unpacks to {unpacked:,} or more. Unpack it yourself, if you "
            "trust it."
        )


def unpack_gzip(data: bytes, source: str) -> bytes:
    """The content of a .gz file."""
    most = max(UNPACKED, RATIO * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        content = file.read(most + 1)
    check_unpacked(len(data), len(content), source)
    return content


def unpack_zip(path: Path) -> bytes:
    """The one file in a .zip file."""
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        if len(files) != 1:
            raise DataError(
                f"{path.name}: a .zip file must hold one file. It holds {len(files)}. Unpack it."
            )
        check_unpacked(path.stat().st_size, files[0].file_size, path.name)
        return archive.read(files[0])


def check_npz(content: bytes, source: str) -> None:
    """Refuse arrays that are not as large as they declare, or that unpack to far too much."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        check_unpacked(len(content), sum(info.file_size for info in members), source)
        for info in members:
            with archive.open(info) as file:
                shape, dtype, start = _header(file)
            if dtype.hasobject or prod(shape) * dtype.itemsize > info.file_size - start:
                raise ValueError(f"{info.filename} holds objects, or less than it declares")


def check_workbook(content: bytes, source: str) -> None:
    """Refuse an Excel file that unpacks to far too much."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_unpacked(len(content), sum(one.file_size for one in archive.infolist()), source)


def check_parquet(content: bytes, source: str) -> None:
    """Refuse a Parquet file by the number of cells it declares."""
    from pyarrow import parquet

    about = parquet.read_metadata(io.BytesIO(content))
    check_unpacked(len(content), 8 * about.num_rows * about.num_columns, source)


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and length of the header of an array in a .npy file."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError("an array of an unknown version")
    one = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype, file.tell()


def check_columns(names: Sequence[str], source: str, hint: str = "") -> None:
    """Refuse tables that are too wide, and columns of the same name."""
    if len(names) > COLUMNS:
        raise DataError(
            f"{source}: a table must have at most {COLUMNS:,} columns. It has {len(names):,}. "
            "Save such data as arrays: numpy.savez(file, x=..., y=...)."
        )
    for name, times in Counter(names).items():
        if name and times > 1:
            raise DataError(
                f"{source}: columns must have different names. '{name}' occurs {times} times. "
                f"Rename one{hint}."
            )


def check_names(owner: str, names: Sequence[str]) -> None:
    """Refuse names of clients that look alike, though they differ, or that are too long.

    >>> check_names("from_folder", ["site 1", "site 2"])
    """
    seen: dict[str, str] = {}
    for name in names:
        if len(name) > NAME or not name.strip():
            raise DataError(
                f"{owner}: a client's name must have 1 to {NAME} letters. "
                f"'{printable(name[:40])}...' has {len(name.strip())}. Rename it."
            )
        alike = " ".join(unicodedata.normalize("NFKC", name).split())
        other = seen.setdefault(alike, name)
        if other != name:
            raise DataError(
                f"{owner}: client names must differ in more than spaces and Unicode forms. "
                f"{other!a} and {name!a} look alike. Rename one, or give both one name."
            )
