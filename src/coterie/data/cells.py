"""What every table becomes: columns of cells, with missing values marked."""

import datetime
import numbers
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from coterie.data.formats import MISSING, Coded

SPLITS = ("train", "validation", "test")
_DATE = re.compile(r"(\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{4})([T ]\d\d?:\d\d.*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


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


def mark_missing(table: RawTable, markers: Sequence[str]) -> RawTable:
    """The table without the values that the user says mean missing; -9 is also -9.0.

    >>> from coterie.data.tables import read
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
            cells[name] = parse(
                ["" if v is None else v for v in values], missing=MISSING | set(markers)
            )
        else:
            cells[name] = column
    return table._replace(cells=cells)


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
    return parse(["" if v is None else str(v) for v in entries])


def parse(
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
