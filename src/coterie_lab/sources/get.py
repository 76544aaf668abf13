"""Download data sets: interrupted downloads continue, and checksums are compared."""

import contextlib
import os
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from coterie.core.errors import DataError
from coterie_lab.sources.files import File, Layout, Source, first_md5, folders, md5, verdict
from coterie_lab.sources.lzw import unpack_z

Report = Callable[[str, int, int | None], None]
"""Receives the name of a file, the bytes so far, and the total number of bytes."""
_BLOCK = 1 << 16
_TIMEOUT = 30


def get(
    source: Source, data_dir: str | Path | None = None, report: Report | None = None
) -> list[Path]:
    """Download the missing files of a data set; return the paths of all files.

    If no checksum is published, that of the first download is kept beside the file.
    """
    layout = _public(source)
    folder = folders(data_dir)[0]
    paths = []
    for file in layout.files:
        there = file.locate(folder)
        if there is None or verdict(file, there) == "damaged":
            there = _fetch(source, file, folder, report or (lambda name, done, whole: None))
        paths.append(there)
    return paths


def _public(source: Source) -> Layout:
    for layout in source.layouts:
        if all(file.url is not None for file in layout.files):
            return layout
    raise DataError(f"{source.title} has no public address. {source.missing()}")


def _fetch(source: Source, file: File, folder: Path, report: Report) -> Path:
    assert file.url is not None
    packed = file.url.endswith(Path(file.path).suffix)
    path = folder / (file.path if packed else file.path.removesuffix(".gz"))
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "ab") as out:
            for done, whole in _blocks(file.url, out.tell(), out):
                report(file.path, done, whole)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{file.url} could not be downloaded ({reason}). The next attempt continues where this "
            f"one stopped. {source.missing(folder)}"
        ) from error
    if file.member is not None or file.url.endswith(".Z"):
        aside.write_bytes(_unpack(aside, file))
    wanted = File(path.name, file.md5 if packed else file.inner, inner=None)
    found = verdict(wanted, _rename(aside, path))
    if found == "damaged":
        path.unlink()
        known = "published file" if wanted.md5 else "first download"
        raise DataError(
            f"{file.url} returned a file with another checksum than the {known}. The file was "
            f"deleted. {source.missing(folder)}"
        )
    if found == "unknown":
        first_md5(path).write_text(md5(path) + "\n")
    return path


def _unpack(aside: Path, file: File) -> bytes:
    """The file inside a downloaded archive; an archive that cannot be read is deleted."""
    try:
        if file.member is None:
            return unpack_z(aside.read_bytes(), str(file.url))
        with zipfile.ZipFile(aside) as archive:
            return archive.read(file.member)
    except (zipfile.BadZipFile, KeyError, DataError) as error:
        aside.unlink()
        raise DataError(
            f"{file.url} did not return the expected archive ({error}). It was deleted; try again."
        ) from error


def _rename(aside: Path, path: Path) -> Path:
    os.replace(aside, path)
    return path


def _blocks(url: str, begun: int, out: object) -> Iterator[tuple[int, int | None]]:
    """Download the rest of a file; yield the bytes so far and the total."""
    request = urllib.request.Request(url, headers={"User-Agent": "coterie"})
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the file is already complete
            return
        raise
    with contextlib.closing(answer):
        if begun and answer.status != 206:  # the server sends the whole file again
            begun = 0
            out.truncate(0)  # type: ignore[attr-defined]
        length = answer.headers.get("Content-Length")
        whole = begun + int(length) if length else None
        while block := answer.read(_BLOCK):
            out.write(block)  # type: ignore[attr-defined]
            begun += len(block)
            yield begun, whole
    if whole is not None and begun < whole:
        raise OSError(f"the connection ended after {begun:,} of {whole:,} bytes")
