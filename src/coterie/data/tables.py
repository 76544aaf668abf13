"""Read tables: files, data frames, Hugging Face datasets, dicts of columns, NPZ arrays.

Every column becomes `Cells`: numbers, true or false, dates or text, with missing values marked.
Messages number rows as the user sees them: in a CSV file the header is row 1, everywhere else rows
are counted from 0.
"""

import datetime
import io
import json
import numbers
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.formats import (
    ENDINGS,
    FOUND,
    MISSING,
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
    to_plain,
)
from coterie.data.limits import check_columns, check_npz, check_parquet, check_workbook

SPLITS = ("train", "validation", "test")

_CONTENTS = {
    ".parquet": "Parquet data",
    ".feather": "Feather data",
}
_DATE = re.compile(r"(\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{4})([T ]\d\d?:\d\d.*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")


class Cells(NamedTuple):
    """A column of one client: floats (nan where missing), or objects (None where missing)."""

    kind: str  # "number", "boolean", "date", "text"; "nothing" if every cell is missing
    values: np.ndarray  # [n], or [n, outputs] for numbers to predict
    coded: Coded | None = None  # text: the same, if it is known
    trimmed: bool = False  # whether texts that differ in spaces around them have become one

    @property
    def missing(self) -> np.ndarray:
        """Which cells have no value."""
        if self.values.dtype.kind == "f":
            if self.values.ndim == 1:
                return np.isnan(self.values)
            return np.isnan(self.values.reshape(len(self.values), -1)).any(1)
        words, codes = self.code()
        return np.array([word is None for word in words], dtype=bool)[codes]

    @property
    def words(self) -> list[str | None]:
        """The values as text, whole numbers without a point."""
        if self.values.dtype.kind != "f":
            return list(self.values)
        if self.kind == "boolean":
            return [None if v != v else str(bool(v)) for v in self.values.tolist()]
        return [
            None if v != v else str(int(v)) if v.is_integer() else repr(v)
            for v in self.values.tolist()
        ]

    def code(self) -> tuple[list[str | None], np.ndarray]:
        """The different values as text, in the order of their first rows, and the one of each row.

        None is missing.
        """
        if self.values.dtype.kind == "f":
            numbers, first, codes = np.unique(self.values, return_index=True, return_inverse=True)
            order = first.argsort()
            return Cells(self.kind, numbers[order]).words, order.argsort()[codes.reshape(-1)]
        if self.coded is not None:
            return self.coded.words, self.coded.codes
        places: dict[str | None, int] = {}
        found = [places.setdefault(value, len(places)) for value in self.values]
        return list(places), np.array(found, dtype=np.int64)

    def take(self, index: np.ndarray) -> "Cells":
        """Some of the rows."""
        if self.coded is None:
            return Cells(self.kind, self.values[index])
        words, codes = self.coded
        codes = codes[index]
        first = np.full(len(words), len(codes))
        first[codes[::-1]] = np.arange(len(codes))[::-1]  # the earliest row is written last
        order = first.argsort(kind="stable")[: int((first < len(codes)).sum())]
        place = np.zeros(len(words), dtype=np.int64)
        place[order] = np.arange(len(order))
        own = [words[code] for code in order.tolist()]
        return Cells(self.kind, self.values[index], Coded(own, place[codes]))


class Found(NamedTuple):
    """How a file is written."""

    ending: str  # of the file, with that of its compression
    separator: str | None = None
    header: bool | None = None
    encoding: str | None = None
    missing: frozenset[str] = frozenset()  # markers of missing values in the first lines


class RawTable(NamedTuple):
    """The rows of one client, or of all."""

    source: str  # what messages call it
    cells: dict[str, Cells]
    rows: np.ndarray  # [n]  what messages call each row
    x: np.ndarray | None = None  # [n, ...]  inputs that are no columns: images, tokens
    split: np.ndarray | None = None  # [n]  place in SPLITS, where the source says it
    notes: tuple[str, ...] = ()
    beside: Mapping[str, Cells] = MappingProxyType({})  # columns that are never inputs
    found: Found | None = None  # how its file is written

    def take(self, index: np.ndarray) -> "RawTable":
        """Some of the rows."""
        return self._replace(
            cells={name: cells.take(index) for name, cells in self.cells.items()},
            rows=self.rows[index],
            x=None if self.x is None else self.x[index],
            split=None if self.split is None else self.split[index],
            beside={name: cells.take(index) for name, cells in self.beside.items()},
        )

    def at(self, position: int) -> str:
        """What a message calls a row."""
        return f"Row {self.rows[position]} of {self.source}"


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
    return mark_missing(_read_value(value, source), how.na_values)


def _read_value(value: Any, source: str) -> RawTable:
    if _is_of(value, "datasets"):
        return _dataset(value, source)
    if _is_of(value, "polars"):
        if not hasattr(value, "to_arrow"):
            raise DataError(
                f"{source}: a polars table must be a DataFrame. Got {type(value).__name__}. Use "
                f".collect() or .to_frame()."
            )
        value = value.to_arrow()
    if _is_of(value, "pyarrow"):
        return _arrow(value, source)
    if _is_of(value, "pandas") and hasattr(value, "columns"):
        return _frame(value, source)
    if hasattr(value, "column_names"):
        value = _columns(value)
    if isinstance(value, Mapping):
        inputs = value.get("x", value.get("x_train"))
        if inputs is not None and np.ndim(to_array(inputs, source)) > 1:
            return _arrays(value, source)
        return _dict(value, source)
    array = to_array(value, source)
    if array.ndim != 2:
        raise DataError(
            f"{source}: a table must be a file, a data frame, a dict of columns or a 2-d array. "
            f"Got {type(value).__name__} of shape {list(array.shape)}."
        )
    return from_arrays(array, None, source)


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
    return _arrow(_read_arrow(content, source, ending), source)


def mark_missing(table: RawTable, markers: Sequence[str]) -> RawTable:
    """The table without the values that the user says mean missing; -9 is also -9.0.

    >>> table = mark_missing(read({"age": [31, -9.0], "ward": ["a", "-"]}), ["-9", "-"])
    >>> table.cells["age"].values, table.cells["ward"].values
    (array([31., nan]), array(['a', None], dtype=object))
    """
    if not markers:
        return table
    numbers = [number for number in map(as_number, markers) if number is not None]
    cells = {}
    for name, column in table.cells.items():
        values = column.values
        if values.dtype.kind == "f" and values.ndim == 1:
            gone = np.isin(values, numbers) & (column.kind == "number")
            kept = np.where(gone, np.nan, values)
            cells[name] = Cells("nothing" if np.isnan(kept).all() else column.kind, kept)
        elif values.dtype.kind == "O" and np.isin(values, list(markers)).any():
            cells[name] = _parse(
                ["" if v is None else v for v in values], missing=MISSING | set(markers)
            )
        else:
            cells[name] = column
    return table._replace(cells=cells)


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
        else _parse(column, separator == ";", how.missing)
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
    return _dict({name: [record.get(name) for record in records] for name in names}, source)


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
        return parquet.read_table(file) if ending == ".parquet" else feather.read_table(file)
    except (pyarrow.ArrowException, ValueError, OSError):
        raise DataError(
            f"{source}: a {ending} file must hold {_CONTENTS[ending]}. Its content is something "
            f"else, or damaged. Give it the ending of what it is, or write it again."
        ) from None


def _arrow(table: Any, source: str) -> RawTable:
    """A table of pyarrow; the index that pandas adds to one is left out."""
    names = [str(name) for name in table.column_names]
    if b"pandas" in (table.schema.metadata or {}):
        told = json.loads(table.schema.metadata[b"pandas"])
        index = [name for name in told.get("index_columns", ()) if isinstance(name, str)]
        table = table.drop_columns([name for name in index if name in names])
        names = [str(name) for name in table.column_names]
    check_columns(names, source)
    columns = {name: to_plain(table.column(j)) for j, name in enumerate(names)}
    return _dict(columns, source)


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
    except (CalamineError, zipfile.BadZipFile, OSError, ValueError, IndexError):
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
    table = _dict(columns, source)
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
    return _arrays(arrays, source)


def _is_of(value: Any, package: str) -> bool:
    """Whether a value is of a class of this package, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)


def _frame(frame: Any, source: str) -> RawTable:
    names = [str(name) for name in frame.columns]
    check_columns(names, source)
    columns = {}
    for name, (_, series) in zip(names, frame.items(), strict=True):
        gone = series.isna().to_numpy(dtype=bool)
        kind = getattr(series.dtype, "kind", "O")
        if kind in "biuf" and not gone.any():
            columns[name] = series.to_numpy(dtype=bool if kind == "b" else np.float64)
        elif kind in "iuf":
            columns[name] = series.to_numpy(dtype=np.float64, na_value=np.nan)
        elif kind == "M":
            columns[name] = series.to_numpy(dtype="datetime64[ns]")
        else:
            columns[name] = series.to_numpy(dtype=object, copy=True)
            columns[name][gone] = None
    return _dict(columns, source)


def _dataset(dataset: Any, source: str) -> RawTable:
    """A Hugging Face dataset, labels by their names where it has them."""
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "num_rows"):
        raise DataError(
            f"{source}: a Hugging Face data set must be a Dataset. Got {type(dataset).__name__}. "
            f"Of an IterableDataset, take rows: Dataset.from_list(list(rows))."
        )
    if isinstance(dataset, Mapping):
        parts = ", ".join(map(str, dataset))
        raise DataError(
            f"{source}: a Hugging Face data set must be one Dataset. Got a DatasetDict of {parts}. "
            f"Choose one, e.g. dataset['train']."
        )
    if any(
        type(kind).__name__ not in ("Value", "ClassLabel") for kind in dataset.features.values()
    ):
        return _dict(_columns(dataset), source)
    table = _arrow(dataset.with_format("arrow")[:], source)
    for name, kind in dataset.features.items():
        named = getattr(kind, "names", None)
        if named:
            values = table.cells[name].values
            words = [None if v != v or v < 0 else named[int(v)] for v in values]
            table.cells[name] = to_cells(np.array([*words, None], dtype=object)[:-1])
    return table


def _columns(dataset: Any) -> dict[str, Any]:
    """Columns of a dataset in the manner of Hugging Face, labels by their names."""
    columns = {}
    for name in dataset.column_names:
        values = dataset[name]
        values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        named = getattr((getattr(dataset, "features", None) or {}).get(name), "names", None)
        columns[name] = [named[v] for v in values] if named else values
    return columns


def _dict(columns: Mapping[str, Any], source: str) -> RawTable:
    """A dict of columns; one of them may hold an image or an array per row, which is then x."""
    if not columns:
        raise DataError(f"{source}: a table must have columns. It has none.")
    coded = {name: value for name, value in columns.items() if isinstance(value, Coded)}
    arrays = {
        str(name): value.codes if isinstance(value, Coded) else to_array(value, source, f"'{name}'")
        for name, value in columns.items()
    }
    sizes = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first] or size < 0:
            raise DataError(
                f"{source}: columns must be of one length. '{first}' has {sizes[first]} rows, "
                f"'{name}' has {max(size, 1)}."
            )
    x = [name for name, array in arrays.items() if array.ndim > 1]
    if len(x) > 1:
        raise DataError(
            f"{source}: at most one column may hold arrays or images. '{x[0]}' and '{x[1]}' do. "
            f"Leave one out: drop=['{x[1]}']."
        )
    return RawTable(
        source,
        {
            name: _parse(coded[name]) if name in coded else to_cells(array)
            for name, array in arrays.items()
            if array.ndim == 1
        },
        np.arange(sizes[first]),
        x=arrays[x[0]] if x else None,
    )


def to_array(value: Any, source: str, what: str = "the value") -> np.ndarray:
    """Lists, tensors and series as an array; objects where the entries are of several kinds."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return value
    entries = list(value) if isinstance(value, Iterable) else []
    try:
        if entries and hasattr(entries[0], "getbands"):  # pillow images
            images = np.stack([np.asarray(image) for image in entries])
            return images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
        if entries and isinstance(entries[0], np.ndarray | list | tuple | Tensor):
            return np.stack([np.asarray(entry) for entry in entries])
        if any(entry is None or isinstance(entry, str) for entry in entries):
            return np.array(entries, dtype=object)
        return np.asarray(value)
    except ValueError:
        raise DataError(
            f"{source}: the entries of {what} must be of one shape. They are not. Bring them to "
            f"one size."
        ) from None


def _arrays(arrays: Mapping[str, Any], source: str) -> RawTable:
    """Arrays x and y, or x_train, y_train, x_test and y_test (and x_validation, y_validation).

    Other arrays with a value per row stand beside them, for `unit` and `time`.
    """
    if "x" in arrays:
        table = from_arrays(arrays["x"], arrays.get("y"), source)
        rest = {name: value for name, value in arrays.items() if name not in ("x", "y")}
        return table._replace(beside=_beside(rest, len(table.rows), source))
    if "x_train" not in arrays:
        raise DataError(
            f"{source}: arrays must be named x and y, or x_train, y_train, x_test and y_test. "
            f"Got {', '.join(arrays) or 'none'}."
        )
    parts = [name for name in SPLITS if f"x_{name}" in arrays]
    xs = [to_array(arrays[f"x_{name}"], source) for name in parts]
    ys = [arrays.get(f"y_{name}") for name in parts]
    if len({x.shape[1:] for x in xs}) > 1 or len({y is None for y in ys}) > 1:
        raise DataError(
            f"{source}: {' and '.join(parts)} must be alike. They differ in the shape of a sample "
            f"or in having targets."
        )
    y = None if ys[0] is None else np.concatenate([to_array(part, source) for part in ys])
    split = np.repeat([SPLITS.index(name) for name in parts], [len(x) for x in xs])
    rest = {
        name: np.concatenate([to_array(arrays[f"{name}_{part}"], source) for part in parts])
        for name in sorted({name.rpartition("_")[0] for name in arrays} - {"x", "y"})
        if all(f"{name}_{part}" in arrays for part in parts)
    }
    beside = _beside(rest, len(split), source)
    return from_arrays(np.concatenate(xs), y, source)._replace(split=split, beside=beside)


def _beside(arrays: Mapping[str, Any], n: int, source: str) -> dict[str, Cells]:
    """The arrays that have one value for each of n rows."""
    columns = {name: to_array(value, source) for name, value in arrays.items()}
    return {name: to_cells(c) for name, c in columns.items() if c.shape == (n,)}


def from_arrays(x: Any, y: Any, source: str) -> RawTable:
    """Inputs and targets; a 2-d array of floats becomes columns x0, x1, ..., targets column y."""
    x = to_array(x, source, "x")
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise DataError(
            f"{source}: x must hold numbers, a row per sample. It has type {x.dtype} and shape "
            f"{list(x.shape)}."
        )
    dense = x.ndim > 2 or x.dtype.kind in "iu"
    cells = {} if dense else {f"x{j}": to_cells(x[:, j]) for j in range(x.shape[1])}
    if y is not None:
        y = to_array(y, source, "y")
        if y.ndim < 1 or len(y) != len(x):
            raise DataError(
                f"{source}: x and y must have one row per sample each. x has {len(x)} rows, y has "
                f"shape {list(y.shape)}."
            )
        cells["y"] = to_cells(y)
    return RawTable(source, cells, np.arange(len(x)), x=x if dense else None)


def to_cells(array: np.ndarray) -> Cells:
    """A column of any type."""
    kind = array.dtype.kind
    if kind == "b":
        return Cells("boolean", array.astype(np.float64))
    if kind in "iuf":
        values = array.astype(np.float64)
        return Cells("nothing" if np.isnan(values).all() else "number", values)
    if kind == "M":
        texts = [None if np.isnat(v) else str(v) for v in array.astype("datetime64[us]")]
        return Cells("date" if any(texts) else "nothing", np.array(texts, dtype=object))
    entries = [None if v is None or v != v else v for v in array.tolist()]
    present = [v for v in entries if v is not None]
    if present and all(isinstance(v, bool) for v in present):
        return Cells("boolean", np.array([np.nan if v is None else v for v in entries], float))
    if present and all(isinstance(v, numbers.Number) for v in present):
        return Cells("number", np.array([np.nan if v is None else v for v in entries], float))
    if present and all(isinstance(v, datetime.date) for v in present):
        return Cells(
            "date", np.array([None if v is None else v.isoformat() for v in entries], object)
        )
    return _parse(["" if v is None else str(v) for v in entries])


def _parse(
    texts: Sequence[str] | Coded, decimal_comma: bool = False, missing: frozenset[str] = MISSING
) -> Cells:
    """A column of text: what all of its values can be read as."""
    if not isinstance(texts, Coded):
        places: dict[str, int] = {}
        codes = [places.setdefault(text, len(places)) for text in texts]
        texts = Coded(list(places), np.array(codes, dtype=np.int64))
    # Values repeat, so each is read once.
    found = [None if (text := raw.strip()) in missing else text for raw in texts.words]
    present = [value for value in found if value is not None]
    if not present:
        return Cells("nothing", np.full(len(texts.codes), np.nan))
    first = as_number(present[0], decimal_comma)
    numbers = [] if first is None else [as_number(value, decimal_comma) for value in found]
    if numbers and all(number is not None for number in numbers):
        return Cells("number", np.array(numbers, dtype=np.float64)[texts.codes])
    if all(value.lower() in ("true", "false") for value in present):
        flags = [np.nan if value is None else float(value.lower() == "true") for value in found]
        return Cells("boolean", np.array(flags, dtype=np.float64)[texts.codes])
    kind = "date" if all(_DATE.fullmatch(value) for value in present) else "text"
    values = np.array(found, dtype=object)[texts.codes]
    # Two ways to write a value, such as with and without a space, are one word.
    distinct = len(set(found)) == len(found)
    coded = Coded(found, texts.codes) if distinct else None
    return Cells(kind, values, coded, len(set(present)) < len(present))


def as_number(value: str | None, decimal_comma: bool = False) -> float | None:
    """The number a text stands for, nan for a missing one, None if it is no number."""
    if value is None:
        return float("nan")
    if decimal_comma and _DECIMAL_COMMA.fullmatch(value):
        value = value.replace(",", ".")
    try:
        return None if "_" in value else float(value)  # Python reads 1_000
    except ValueError:
        return None
