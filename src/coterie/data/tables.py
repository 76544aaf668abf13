"""Read tables, from files of any format or from memory (`frames.py`).

Messages number rows as the user sees them: in a CSV file the header is row 1, everywhere else rows
are counted from 0.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError
from coterie.data.cells import Found, RawTable, mark_missing, parse, to_cells
from coterie.data.formats import (
    ENDINGS,
    FOUND,
    PACKED,
    TEXTS,
    Coded,
    Format,
    decode,
    ending_of,
    find_separator,
    has_header,
    read_bytes,
    read_regular,
    split_cells,
)
from coterie.data.frames import from_arrow, from_columns, from_parts, pandas_index, read_value
from coterie.data.limits import check_columns, check_npz, check_parquet, check_workbook

_CONTENTS = {
    ".parquet": "Parquet data",
    ".feather": "Feather data",
}


def read(value: Any, source: str | None = None, how: Format = FOUND) -> RawTable:
    """A table from a file, a data frame, a dict of columns, or a 2-d array of numbers.

    >>> table = read({"age": [31, None], "ward": ["a", "b"]})
    >>> table.cells["age"].kind, table.cells["age"].values
    ('number', array([31., nan]))
    """
    if isinstance(value, str | Path):
        return read_file(Path(value), how)
    source = source or "the table"
    how.refuse(source, "separator", "header", "encoding")
    return mark_missing(read_value(value, source), how.na_values)


def read_file(path: Path, how: Format = FOUND) -> RawTable:
    """A file of any of the formats of ENDINGS, also compressed."""
    if not path.exists():
        raise DataError(f"{path}: the file must exist. It does not. Check the path.")
    ending = ending_of(path)
    if ending not in ENDINGS:
        raise DataError(
            f"{path.name}: a file must end in {', '.join(ENDINGS)}, or in one of these and "
            f"{' or '.join(PACKED)}. Got '{path.suffix}'. Convert or remove it."
        )
    content = read_bytes(path)
    if not content:
        raise DataError(f"{path.name}: a file must have rows. It is empty. Fill or remove it.")
    table = _read_content(content, path.name, ending, how)
    packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    found = table.found or Found(ending)
    table = table._replace(found=found._replace(ending=ending + packed))
    return mark_missing(table, how.na_values)


def _read_content(content: bytes, source: str, ending: str, how: Format) -> RawTable:
    if ending in TEXTS:
        return _csv(content, source, ending, how)
    how.refuse(source, "separator")
    if ending == ".xlsx":
        how.refuse(source, "encoding")
        return _sheet(content, source, how)
    how.refuse(source, "header")
    if ending == ".jsonl":
        return _json_lines(decode(content, source, how.encoding)[0], source)
    how.refuse(source, "encoding")
    if ending == ".npz":
        return _npz(content, source)
    return from_arrow(_read_arrow(content, source, ending), source)


def _csv(content: bytes, source: str, ending: str, how: Format) -> RawTable:
    text, encoding = decode(content, source, how.encoding)
    separator = how.separator or find_separator(text, ending)
    top = text[: text.find("\n", 65536) + 1 or None]
    lines = split_cells(top, separator, source)
    named = has_header(lines, how.missing) if how.header is None else how.header
    first = next((line for line in lines if line), [])
    header = [name.strip() for name in first]
    start = lines.index(first) + 1 if lines else 0
    if not named:
        header, start = [f"column_{j}" for j in range(1, len(first) + 1)], 0
    check_columns(header, source, ", or say that there is no header: header=False")
    columns: Sequence[Any] | None
    columns = read_regular(text, separator, len(header), start, how.missing)
    if columns is not None:
        rows = np.arange(start + 1, start + 1 + _length(columns[0]))
    else:
        columns, rows = _split_rows(text, separator, source, len(header), start, named)
    cells = {
        name: to_cells(column)
        if isinstance(column, np.ndarray)
        else parse(column, separator == ";", how.missing)
        for name, column in zip(header, columns, strict=True)
        if name
    }
    markers = {cell.strip() for cell in set().union(*lines[:1000])} & how.missing
    notes = ("A column without a name was left out.",) if "" in header else ()
    found = Found(ending, separator, named, encoding, frozenset(markers))
    return RawTable(source, cells, rows, notes=notes, found=found)


def _length(column: np.ndarray | Coded) -> int:
    return len(column.codes if isinstance(column, Coded) else column)


def _split_rows(
    text: str, separator: str, source: str, width: int, start: int, named: bool
) -> tuple[Sequence[Sequence[str]], np.ndarray]:
    """The columns of a text file and the number of each row; refuses rows of another length."""
    rows, body = [], []
    for number, line in enumerate(split_cells(text, separator, source)[start:], start=start + 1):
        if not line:
            continue
        if len(line) != width:
            raise DataError(
                f"{source}: every row must have {width} cells, as the "
                f"{'header' if named else 'first row'} has. Row {number} has {len(line)}. Complete "
                f"it, or quote cells that hold a '{separator}'."
            )
        rows.append(number)
        body.append(line)
    columns = list(zip(*body, strict=True)) if body else [() for _ in range(width)]
    return columns, np.array(rows, dtype=np.int64)


def describe_files(found: Sequence[Found]) -> str:
    """How files are written, in a few words.

    >>> describe_files([Found(".csv.gz", ",", True, "utf-8-sig", frozenset({"NA"}))] * 12)
    '12 .csv.gz files separated by commas, with a header, UTF-8, missing values NA'
    """
    words = {" ": "spaces", "\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
    names = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
    kinds = dict.fromkeys(one.ending for one in found)
    said = [f"{len(found)} {' and '.join(kinds)} file{'s' * (len(found) > 1)}"]
    separators = dict.fromkeys(
        words.get(one.separator, one.separator) for one in found if one.separator is not None
    )
    if separators:
        said[0] += f" separated by {' or '.join(separators)}"
    headers = {one.header for one in found} - {None}
    if len(headers) == 1:
        said.append("with a header" if headers == {True} else "without a header")
    elif headers:
        said.append("some with a header")
    encodings = dict.fromkeys(
        names.get(one.encoding, one.encoding) for one in found if one.encoding is not None
    )
    if encodings:
        said.append(" or ".join(encodings))
    markers = sorted({mark or "empty" for one in found for mark in one.missing})
    if markers:
        said.append(f"missing values {' '.join(markers)}")
    return ", ".join(said)


def _json_lines(text: str, source: str) -> RawTable:
    """A JSON object a line; what an object does not have is missing."""
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(
                f"{source}: a .jsonl file must hold a JSON object a line. Row {number} is none. "
                f"Correct it, or give the file the ending of what it is."
            )
        records.append(record)
    names = dict.fromkeys(name for record in records for name in record)
    return from_columns({name: [record.get(name) for record in records] for name in names}, source)


def _read_arrow(content: bytes, source: str, ending: str) -> Any:
    """A table of pyarrow from the content of a Parquet or Feather file."""
    try:
        import pyarrow
        from pyarrow import feather, parquet
    except ImportError:
        raise DataError(
            f"{source}: {ending} files need pyarrow. Install it: pip install 'coterie[tables]'."
        ) from None
    file = pyarrow.BufferReader(content)
    try:
        if ending == ".parquet":
            check_parquet(content, source)
        found = parquet.read_table(file) if ending == ".parquet" else feather.read_table(file)
        found.validate(full=True)  # or damaged lengths would be read beyond the file's end
        pandas_index(found)
        return found
    except (pyarrow.ArrowException, ValueError, OSError, AttributeError, TypeError):
        raise DataError(
            f"{source}: a {ending} file must hold {_CONTENTS[ending]}. Its content is something "
            f"else, or damaged. Give it the ending of what it is, or write it again."
        ) from None


def _sheet(content: bytes, source: str, how: Format) -> RawTable:
    """The first sheet of an Excel file."""
    try:
        from python_calamine import CalamineError, CalamineWorkbook
    except ImportError:
        raise DataError(
            f"{source}: .xlsx files need python-calamine. Install it: pip install "
            f"'coterie[tables]'."
        ) from None
    try:
        check_workbook(content, source)
        book = CalamineWorkbook.from_filelike(io.BytesIO(content))
        name = book.sheet_names[0]
        lines = book.get_sheet_by_index(0).to_python()
    except (
        CalamineError, zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, IndexError,
        RuntimeError,
    ):  # fmt: skip
        raise DataError(
            f"{source}: a .xlsx file must hold an Excel workbook. Its content is something else, "
            f"or damaged. Give it the ending of what it is, or write it again."
        ) from None
    lines = [line for line in lines if any(cell != "" for cell in line)]
    if not lines:
        raise DataError(f"{source}: a sheet must have rows. '{name}' is empty. Fill or remove it.")
    top = [["" if cell is None else str(cell) for cell in line] for line in lines[:50]]
    named = has_header(top, how.missing) if how.header is None else how.header
    header = [cell.strip() for cell in top[0]]
    if not named:
        header = [f"column_{j}" for j in range(1, len(header) + 1)]
    check_columns([name for name in header if name], source)
    body = lines[1:] if named else lines
    columns = {
        column: np.array([*(_cell(line[j], how.missing) for line in body), None], object)[:-1]
        for j, column in enumerate(header)
        if column
    }
    notes = (f"Sheet '{name}', the first of {len(book.sheet_names)}.",)
    table = from_columns(columns, source)
    return table._replace(
        rows=np.arange(len(body)) + 1 + named,
        notes=notes if len(book.sheet_names) > 1 else (),
        found=Found(".xlsx", header=named),
    )


def _cell(value: Any, missing: frozenset[str]) -> Any:
    return None if isinstance(value, str) and value.strip() in missing else value


def _npz(content: bytes, source: str) -> RawTable:
    try:
        check_npz(content, source)
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError):
        raise DataError(
            f"{source}: a .npz file must hold plain arrays. Its content is something else. "
            f"Write it with numpy.savez(file, x=..., y=...)."
        ) from None
    return from_parts(arrays, source)
