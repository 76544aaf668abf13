"""The files of public data sets: where they are, where they come from, whether they are complete.

A data set is searched in the given folder; without one, in `COTERIE_DATA` and in the user's cache.
"""

import gzip
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
from torch import Tensor

from coterie.core.errors import DataError

VARIABLE = "COTERIE_DATA"
WITHOUT = "coterie run quickstart"  # works without data files
_BLOCK = 1 << 20


class Pool(NamedTuple):
    """A data set in memory: training rows first, then test rows."""

    x: Tensor  # [rows, ...]  compact
    y: Tensor  # [rows]
    n_train: int
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    owner: Tensor | None = None  # [rows]  the owner of each row, if known
    owners: tuple[str, ...] = ()

    def rows(self, split: str) -> Tensor:
        """Row numbers of "train" or "test"."""
        ends = (0, self.n_train) if split == "train" else (self.n_train, len(self.y))
        return torch.arange(*ends)


@dataclass(frozen=True)
class File:
    """One file of a data set.

    Parameters
    ----------
    path
        Path below the data folder. A file whose name ends in .gz may also be there unpacked.
    md5
        Checksum of the published file; None if there is none.
    url
        Public address; None if the file must be obtained by hand.
    inner
        Checksum of the unpacked content.
    member
        Name of the file inside the zip archive at `url`, if the address is one. An address that
        ends in .Z is unpacked, too.
    """

    path: str
    md5: str | None = None
    url: str | None = None
    inner: str | None = None
    member: str | None = None

    def locate(self, folder: Path) -> Path | None:
        """Find the file in a data folder, packed or unpacked; None if it is missing."""
        for name in (self.path, self.path.removesuffix(".gz")):
            if (folder / name).is_file():
                return folder / name
        return None


@dataclass(frozen=True)
class Layout:
    """A set of files that holds a whole data set or part of it."""

    files: tuple[File, ...]
    read: Callable[[Path], Pool]
    note: str | None = None  # what is missing, if the files hold only part of the data set


@dataclass(frozen=True)
class Source:
    """A public data set and the layouts of its files, in order of preference."""

    name: str
    title: str
    home: str
    licence: str
    layouts: tuple[Layout, ...]
    by_hand: str | None = None  # how to get the files if they cannot be downloaded

    def find(self, data_dir: str | Path | None = None) -> tuple[Path, Layout] | None:
        """Find the folder and the layout of the data set; None if it is missing."""
        for folder in folders(data_dir):
            for layout in self.layouts:
                if all(file.locate(folder) for file in layout.files):
                    return folder, layout
        return None

    def load(self, data_dir: str | Path | None = None) -> Pool:
        """Read the data set; the error for missing files says which are needed and where."""
        found = self.find(data_dir)
        if found is None:
            raise DataError(self.missing(data_dir))
        folder, layout = found
        pool = layout.read(folder)
        return pool._replace(notes=(*pool.notes, *([layout.note] if layout.note else [])))

    def missing(self, data_dir: str | Path | None = None) -> str:
        """The message for missing files."""
        places = " or ".join(str(folder) for folder in folders(data_dir))
        names = ", ".join(file.path for file in self.layouts[0].files)
        some = any(file.url for layout in self.layouts for file in layout.files)
        how = f"Get them with `coterie data get {self.name}`" if some else str(self.by_hand)
        return (
            f"{self.title} was not found. These files must be in {places}: {names}. {how}, or copy "
            f"them there yourself ({self.home}). To try Coterie without data files: {WITHOUT}"
        )


def folders(data_dir: str | Path | None = None) -> list[Path]:
    """The folders in which data sets are searched."""
    if data_dir is not None:
        return [Path(data_dir)]
    named = os.environ.get(VARIABLE)
    return [*([Path(named)] if named else []), cache()]


def cache() -> Path:
    """The user's cache folder for data sets."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie" / "data"


def open_file(folder: Path, path: str) -> IO[bytes]:
    """Open a file of a data folder; a packed file is unpacked while reading."""
    found = File(path).locate(folder)
    if found is None:
        raise DataError(f"{folder / path} is missing. Get it again.")
    return cast(IO[bytes], gzip.open(found) if found.suffix == ".gz" else open(found, "rb"))


def content(folder: Path, path: str) -> bytes:
    """Read the unpacked content of a file; the error for a damaged file names it."""
    try:
        with open_file(folder, path) as file:
            return file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{folder / path} is damaged ({error}). Get it again.") from error


def md5(path: Path, unpacked: bool = False) -> str:
    """Checksum of a file or, with `unpacked`, of the content of a packed file."""
    digest = hashlib.md5(usedforsecurity=False)
    with gzip.open(path, "rb") if unpacked and path.suffix == ".gz" else open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def first_md5(path: Path) -> Path:
    """The file with the checksum of a file's first download, if none is published."""
    return path.with_name(path.name + ".md5")


def verdict(file: File, path: Path) -> str:
    """Compare a file with its checksum: "ok", "damaged" or "unknown" without one.

    If no checksum is published, that of the first download counts.
    """
    try:
        if file.md5 is None and file.inner is None and first_md5(path).is_file():
            return "ok" if md5(path) == first_md5(path).read_text().strip() else "damaged"
        if file.md5 is not None and path.name == Path(file.path).name and md5(path) == file.md5:
            return "ok"
        if file.inner is not None:
            return "ok" if md5(path, unpacked=True) == file.inner else "damaged"
    except (OSError, EOFError):
        return "damaged"
    if file.md5 is None or path.name != Path(file.path).name:
        return "unknown"
    return "damaged"
