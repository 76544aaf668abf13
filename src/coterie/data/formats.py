"""How a text file is written: compression, encoding, separator, header, markers of missing values.

Each of them is found from the file, unless the user says it.
"""

import codecs
import csv
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.core.errors import ConfigError, DataError
from coterie.data.limits import check_file, unpack_gzip, unpack_zip

MISSING = frozenset({"", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "NAN", "null", "NULL"})
"""How an empty cell is written."""
TEXTS = (".csv", ".tsv", ".data", ".txt")
ENDINGS = (*TEXTS, ".jsonl", ".parquet", ".feather", ".xlsx", ".npz")
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

    def refuse(self, source: str, *names: str) -> None:
        """Refuse options that say how text is written, where there is none."""
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{source}: {name} is an option of text files (.csv, .tsv, .data, .txt). This "
                    f"is none. Leave it out."
                )


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
    check_file(path)
    ending = path.suffix.lower()
    try:
        if ending == ".gz":
            return unpack_gzip(path.read_bytes(), path.name)
        if ending == ".zip":
            return unpack_zip(path)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, ValueError):
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


class Coded(NamedTuple):
    """A column of text: the different values, and which of them each row has."""

    words: list[Any]  # "" is missing; in `Cells`, None
    codes: np.ndarray  # [n]


def read_regular(
    text: str, separator: str, width: int, start: int, missing: frozenset[str]
) -> list[np.ndarray | Coded] | None:
    """The columns of a text file by pyarrow, which is much faster: numbers, or text.

    None if pyarrow is not installed, or if some line is not like the others. Then rows are read
    one by one, and a wrong one is found.

    Parameters
    ----------
    width
        Number of columns.
    start
        Number of lines before the first row.
    missing
        How an empty cell is written.
    """
    try:
        from pyarrow import ArrowException, BufferOutputStream, BufferReader, csv
    except ImportError:
        return None
    if separator == " ":
        text = "\n".join(" ".join(line.split()) for line in text.splitlines())
    content = text.rstrip("\r\n").encode()
    if width < 2 or len(separator.encode()) != 1 or b"\n" not in content:
        return None
    if any(blank in content for blank in (b"\n\n", b"\n\r\n", b"\r\r")):
        return None  # rows are numbered with empty lines
    names = [str(j) for j in range(width)]
    quoted = separator != " " and b'"' in content
    parse = csv.ParseOptions(
        delimiter=separator,
        quote_char='"' if quoted else False,
        newlines_in_values=quoted,
    )
    read = csv.ReadOptions(column_names=names, skip_rows=start, block_size=1 << 24)

    def convert(**options: Any) -> csv.ConvertOptions:
        return csv.ConvertOptions(
            null_values=sorted(missing),
            strings_can_be_null=True,
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
            **options,
        )

    # A thread of pyarrow lets go of the content, perhaps when Python ends. Were it an object of
    # Python's, the process would then abort.
    sink = BufferOutputStream()
    sink.write(content)
    copied = sink.getvalue()
    try:
        table = csv.read_csv(BufferReader(copied), read, parse, convert())
        # Times would lose the way they are written.
        again = [name for name in names if _is_time(table.column(name).type)]
        if again:
            as_text = convert(column_types=dict.fromkeys(again, "string"), include_columns=again)
            texts = csv.read_csv(BufferReader(copied), read, parse, as_text)
            for name in again:
                table = table.set_column(int(name), name, texts.column(name))
    except (ArrowException, ValueError, OverflowError):
        return None
    return [to_plain(table.column(name)) for name in names]


def _is_time(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_temporal(kind))


def to_plain(column: Any) -> np.ndarray | Coded:
    """A column of pyarrow as an array, or as coded text."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_null(kind):
        return np.full(len(column), np.nan)
    if types.is_boolean(kind) and not column.null_count:
        return np.asarray(column.to_numpy(), dtype=bool)
    if types.is_integer(kind) or types.is_floating(kind):
        return np.asarray(column.cast(pyarrow.float64(), safe=False).to_numpy())
    if types.is_decimal(kind):
        return np.asarray(column.cast(pyarrow.float64()).to_numpy())
    if types.is_date(kind) or types.is_timestamp(kind):
        return np.asarray(column.to_numpy(), dtype="datetime64[us]")
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        return to_plain(column)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        coded = column.dictionary_encode(null_encoding="encode")
        coded = coded.combine_chunks() if isinstance(coded, pyarrow.ChunkedArray) else coded
        words = ["" if word is None else word for word in coded.dictionary.to_pylist()]
        return Coded(words, np.asarray(coded.indices.to_numpy(zero_copy_only=False), np.int64))
    return np.array([*column.to_pylist(), None], dtype=object)[:-1]  # lists stay lists
