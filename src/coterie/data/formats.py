"""How a text file is written: compression, encoding, separator, header, markers of missing values.

Each of them is found from the file, unless the user says it.
"""

import codecs
import csv
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError

MISSING = frozenset({"", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "NAN", "null", "NULL"})
"""How an empty cell is written."""
TEXTS = (".csv", ".tsv", ".data", ".txt")
ENDINGS = (*TEXTS, ".jsonl", ".parquet", ".feather", ".npz")
PACKED = (".gz", ".zip")

_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Format:
    """How text files are written; what is None is found from the file."""

    separator: str | None = None
    header: bool | None = None
    encoding: str | None = None
    na_values: tuple[str, ...] = ()  # besides those of MISSING

    @property
    def missing(self) -> frozenset[str]:
        """How an empty cell is written."""
        return MISSING | frozenset(self.na_values)


FOUND = Format()
"""Everything is found from the file."""


def ending_of(path: Path) -> str:
    """The ending of a file, without that of its compression.

    >>> ending_of(Path("north.CSV.gz"))
    '.csv'
    """
    return Path(stem_of(path, keep=1)).suffix.lower()


def stem_of(path: Path, keep: int = 0) -> str:
    """The name of a file without its endings: that of its compression and, unless kept, its own.

    >>> stem_of(Path("data/north.csv.gz")), stem_of(Path("north.v2.csv"))
    ('north', 'north.v2')
    """
    name = path.stem if path.suffix.lower() in PACKED else path.name
    return name if keep else Path(name).stem


def read_bytes(path: Path) -> bytes:
    """The content of a file; of a compressed one, what is in it."""
    ending = path.suffix.lower()
    try:
        if ending == ".gz":
            return gzip.decompress(path.read_bytes())
        if ending == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [info.filename for info in archive.infolist() if not info.is_dir()]
                if len(names) == 1:
                    return archive.read(names[0])
            raise DataError(
                f"{path.name}: a .zip file must hold one file. It holds {len(names)}. Unpack it."
            )
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError):
        raise DataError(
            f"{path.name}: a {ending} file must hold compressed data. Its content is something "
            f"else, or damaged. Give it the ending of what it is, or write it again."
        ) from None
    return path.read_bytes()


def decode(content: bytes, name: str, encoding: str | None) -> tuple[str, str]:
    """The text of a file and its encoding: UTF-8, UTF-16 with its mark, or else Windows-1252."""
    if encoding is not None:
        tries = [encoding]
    elif content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        tries = ["utf-16"]
    else:
        tries = ["utf-8-sig", "cp1252"]
    for one in tries:
        try:
            text = content.decode(one)
        except (UnicodeError, LookupError):
            continue
        if not any(mark in text for mark in ("\0", "\x01", "\x02", "\x03")):
            return text, one
    raise DataError(
        f"{name}: a {Path(name).suffix} file must be text. Its content is something else"
        + (f" than {encoding}" if encoding else "")
        + ". Give it the ending of what it is, save it as UTF-8, or name its encoding: encoding=..."
    )


def find_separator(text: str, ending: str) -> str:
    """The separator of cells: a comma, a semicolon, a tab, a bar; else spaces (" ").

    Spaces separate cells in files without any of the others, if all first lines have as many.

    >>> find_separator("age;ward\\n1,5;a", ".csv"), find_separator("1  2.5 a\\n3 4 b\\n", ".data")
    (';', ' ')
    """
    lines = [line for line in text[:65536].splitlines()[:20] if line.strip()]
    first = lines[0] if lines else ""
    best = max(",;\t|", key=first.count)
    if best in first:
        return best
    sizes = {len(line.split()) for line in lines}
    return " " if ending in (".data", ".txt") and len(sizes) == 1 and sizes != {1} else ","


def split_cells(text: str, separator: str, name: str) -> list[list[str]]:
    """The cells of every line."""
    if separator == " ":
        return [line.split() for line in text.splitlines()]
    try:
        return list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except (csv.Error, TypeError) as error:
        raise DataError(f"{name}: the file cannot be read as CSV: {error}.") from None


def has_header(lines: Sequence[Sequence[str]], missing: frozenset[str]) -> bool:
    """Whether the first line names the columns: not if it has a number where numbers follow.

    >>> has_header([["age", "ill"], ["3", "1"]], MISSING)
    True
    >>> has_header([["4", "?"], ["3", "1"]], MISSING)
    False
    """
    rows = [line for line in lines[:50] if line]
    if len(rows) < 2 or not all(rows[0]):
        return True
    names = len(set(rows[0])) == len(rows[0])
    for first, *rest in zip(*(row for row in rows if len(row) == len(rows[0])), strict=True):
        present = [cell.strip() for cell in rest if cell.strip() not in missing]
        if not present or not all(_NUMBER.fullmatch(cell) for cell in present):
            continue
        if first.strip() not in missing and not _NUMBER.fullmatch(first.strip()):
            return True
        names = False
    return names


def read_regular(
    text: str, separator: str, width: int, start: int
) -> list[np.ndarray | list[str]] | None:
    """The columns of a text file by pandas, which is much faster: numbers, or a list of text.

    None if pandas is not installed, or if some line does not have as many separators as the
    others. Then rows are read one by one, and a wrong one is found.

    Parameters
    ----------
    width
        Number of columns.
    start
        Number of lines before the first row.
    """
    try:
        import pandas
    except ImportError:
        return None
    content = text.encode()
    if width < 2 or separator == " " or len(separator.encode()) != 1:
        return None
    data = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if not content.endswith(b"\n"):
        ends = np.append(ends, len(data))
    before = np.searchsorted(np.flatnonzero(data == ord(separator)), ends)
    if len(ends) <= start or (np.diff(before, prepend=0) != width - 1).any():
        return None
    # Since version 3.1 numbers are always read exactly, and the option is going away.
    old = tuple(map(int, pandas.__version__.split(".")[:2])) < (3, 1)
    exact: dict[str, Any] = {"float_precision": "round_trip"} if old else {}
    try:
        frame = pandas.read_csv(
            io.BytesIO(content),
            sep=separator,
            header=None,
            skiprows=start,
            na_values=sorted(MISSING),
            keep_default_na=False,
            index_col=False,
            low_memory=False,
            **exact,
        )
    except (ValueError, OverflowError):
        return None
    if frame.shape != (len(ends) - start, width):
        return None
    return [_plain(series) for _, series in frame.items()]


def _plain(series: Any) -> np.ndarray | list[str]:
    kind = getattr(series.dtype, "kind", "O")
    if kind in "biuf":
        return np.asarray(series, dtype=bool if kind == "b" else np.float64)
    missing = series.isna().tolist()
    return ["" if gone else str(v) for v, gone in zip(series.tolist(), missing, strict=True)]
