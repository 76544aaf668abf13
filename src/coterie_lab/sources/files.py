"""Public data sets as files: where they lie, where they come from, whether they are whole.

A data set is looked for in the folder that is named, in `COTERIE_DATA`, then in the user's cache.
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
WITHOUT = "coterie run quickstart"  # works without any file
_BLOCK = 1 << 20


class Pool(NamedTuple):
    """A data set in memory: training rows first, then test rows."""

    x: Tensor  # [rows, ...]  compact
    y: Tensor  # [rows]
    n_train: int
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    owner: Tensor | None = None  # [rows]  who a row comes from, where that is known
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
        Where it lies below the data folder. A name that ends in .gz may also lie there unpacked.
    md5
        Checksum of the file as published; None if none was.
    url
        Public address; None if it is to be had by hand only.
    inner
        Checksum of the unpacked content.
    member
        Name inside the archive at `url`, if that is one.
    """

    path: str
    md5: str | None = None
    url: str | None = None
    inner: str | None = None
    member: str | None = None

    def found(self, folder: Path) -> Path | None:
        """The file in a data folder, packed or not; None if it is not there."""
        for name in (self.path, self.path.removesuffix(".gz")):
            if (folder / name).is_file():
                return folder / name
        return None


@dataclass(frozen=True)
class Layout:
    """A set of files that is the whole data set, or a part of it that is said to be one."""

    files: tuple[File, ...]
    read: Callable[[Path], Pool]
    note: str | None = None  # what is missing, if it is a part


@dataclass(frozen=True)
class Source:
    """A public data set: the forms it comes in, best first."""

    name: str
    title: str
    home: str
    licence: str
    layouts: tuple[Layout, ...]
    by_hand: str | None = None  # what to do where nothing can be downloaded

    def find(self, data_dir: str | Path | None = None) -> tuple[Path, Layout] | None:
        """The folder that has the data set and the form it is in; None if there is none."""
        for folder in folders(data_dir):
            for layout in self.layouts:
                if all(file.found(folder) for file in layout.files):
                    return folder, layout
        return None

    def load(self, data_dir: str | Path | None = None) -> Pool:
        """Read the data set, or say which files are wanted, where, and what works without."""
        found = self.find(data_dir)
        if found is None:
            raise DataError(self.missing(data_dir))
        folder, layout = found
        pool = layout.read(folder)
        return pool._replace(notes=(*pool.notes, *([layout.note] if layout.note else [])))

    def missing(self, data_dir: str | Path | None = None) -> str:
        """What to do when the files are not there."""
        places = " or ".join(str(folder) for folder in folders(data_dir))
        names = ", ".join(file.path for file in self.layouts[0].files)
        some = any(file.url for layout in self.layouts for file in layout.files)
        how = f"Get them with `coterie data get {self.name}`" if some else str(self.by_hand)
        return (
            f"{self.title} is not here. Wanted in {places}: {names}. {how}, or put them there by "
            f"hand ({self.home}). Without any data: {WITHOUT}"
        )


def folders(data_dir: str | Path | None = None) -> list[Path]:
    """Where data sets are looked for."""
    if data_dir is not None:
        return [Path(data_dir)]
    named = os.environ.get(VARIABLE)
    return [*([Path(named)] if named else []), cache()]


def cache() -> Path:
    """The user's own folder for data sets."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie" / "data"


def opened(folder: Path, path: str) -> IO[bytes]:
    """A file of a data folder, unpacked on the way if need be."""
    found = File(path).found(folder)
    if found is None:
        raise DataError(f"{folder / path} is missing.")
    return cast(IO[bytes], gzip.open(found) if found.suffix == ".gz" else open(found, "rb"))


def content(folder: Path, path: str) -> bytes:
    """The unpacked content of a file; a torn one is named."""
    try:
        with opened(folder, path) as file:
            return file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{folder / path} is damaged ({error}). Get it again.") from error


def md5(path: Path, unpacked: bool = False) -> str:
    """Checksum of a file or, of a packed one, of what is inside."""
    digest = hashlib.md5(usedforsecurity=False)
    with gzip.open(path, "rb") if unpacked and path.suffix == ".gz" else open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def verdict(file: File, path: Path) -> str:
    """Whether a file is what was published: "ok", "damaged", or "unknown" without a checksum."""
    try:
        if file.md5 is not None and path.name == Path(file.path).name and md5(path) == file.md5:
            return "ok"
        if file.inner is not None:
            return "ok" if md5(path, unpacked=True) == file.inner else "damaged"
    except (OSError, EOFError):
        return "damaged"
    if file.md5 is None or path.name != Path(file.path).name:
        return "unknown"
    return "damaged"
