"""Downloads: resumed where they stopped, checked against the published sum, never half-written."""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from coterie.core.errors import DataError
from coterie_lab.sources.files import File, Layout, Source, folders, verdict

Told = Callable[[str, int, int | None], None]
"""Is told a file's name, the bytes that are there, and how many there will be."""
_BLOCK = 1 << 16
_TIMEOUT = 30


def get(source: Source, data_dir: str | Path | None = None, told: Told | None = None) -> list[Path]:
    """Fetch the files of a data set that are not there; where they lie."""
    layout = _public(source)
    folder = folders(data_dir)[0]
    paths = []
    for file in layout.files:
        there = file.found(folder)
        if there is None or verdict(file, there) == "damaged":
            there = _fetch(source, file, folder, told or (lambda name, done, whole: None))
        paths.append(there)
    return paths


def _public(source: Source) -> Layout:
    for layout in source.layouts:
        if all(file.url is not None for file in layout.files):
            return layout
    raise DataError(f"{source.title} cannot be downloaded. {source.missing()}")


def _fetch(source: Source, file: File, folder: Path, told: Told) -> Path:
    assert file.url is not None
    packed = file.url.endswith(Path(file.path).suffix)
    path = folder / (file.path if packed else file.path.removesuffix(".gz"))
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "ab") as out:
            for done, whole in _blocks(file.url, out.tell(), out):
                told(file.path, done, whole)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{file.url} could not be fetched ({reason}). What came is kept, and the next try goes "
            f"on from there. {source.missing(folder)}"
        ) from error
    wanted = File(path.name, file.md5 if packed else file.inner, inner=None)
    if verdict(wanted, _renamed(aside, path)) == "damaged":
        path.unlink()
        raise DataError(
            f"{file.url} gave a file that is not the published one: its checksum differs. Nothing "
            f"was kept. {source.missing(folder)}"
        )
    return path


def _renamed(aside: Path, path: Path) -> Path:
    os.replace(aside, path)
    return path


def _blocks(url: str, begun: int, out: object) -> Iterator[tuple[int, int | None]]:
    """Append what is still missing; the bytes that are there, and of how many."""
    request = urllib.request.Request(url, headers={"User-Agent": "coterie"})
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing
            return
        raise
    with contextlib.closing(answer):
        if begun and answer.status != 206:  # the whole file again
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
