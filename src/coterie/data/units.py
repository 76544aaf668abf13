"""Columns beside the inputs: the unit that a row belongs to, and its time."""

import datetime
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError, unknown
from coterie.data.cells import Cells, RawTable

_DAY_FIRST = re.compile(r"(\d\d?)([./])(\d\d?)[./](\d{4})")
_ISO = re.compile(r"(\d{4})[-/](\d\d?)[-/](\d\d?)")


def number_units(table: RawTable, columns: Sequence[str]) -> np.ndarray:
    """Number of the unit of each row of a client: [n].

    Units are numbered in the order in which they first occur. If several columns are named, rows
    are of one unit if they agree in all of them.

    >>> from coterie.data.tables import read
    >>> number_units(read({"patient": ["p7", "p2", "p7"]}), ["patient"]).tolist()
    [0, 1, 0]
    """
    code = np.zeros(len(table.rows), dtype=np.int64)
    for name in columns:
        values = _complete(table, name, "unit").values
        plain = values if values.dtype.kind == "f" else values.astype(str)
        found, part = np.unique(plain, return_inverse=True)
        _, code = np.unique(code * len(found) + part.reshape(-1), return_inverse=True)
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    return first.argsort().argsort()[code]


def pool_units(units: Sequence[np.ndarray]) -> Tensor:
    """Units of each client, numbered 0, 1, ..., as units of the pool.

    >>> pool_units([np.array([0, 1, 0]), np.array([0, 0])]).tolist()
    [0, 1, 0, 2, 2]
    """
    starts = np.cumsum([0, *(int(own.max(initial=-1)) + 1 for own in units)])
    parts = [own + start for own, start in zip(units, starts, strict=False)]
    return torch.as_tensor(np.concatenate(parts), dtype=torch.int64)


def read_times(table: RawTable, columns: Sequence[str]) -> np.ndarray:
    """Time of each row of a client as a number: [n].

    Parameters
    ----------
    columns
        One column of numbers or dates; or several of numbers, the most important first, such as
        year, month and day. Several give the rank of each row among the client's rows.

    >>> from coterie.data.tables import read
    >>> read_times(read({"year": [2024, 2023, 2024], "month": [1, 12, 1]}), ["year", "month"])
    array([1., 0., 1.])
    """
    parts = []
    for name in columns:
        cells = _complete(table, name, "time")
        numeric = cells.values.dtype.kind == "f"
        parts.append(cells.values if numeric else _dates(table, name, cells))
    if len(parts) == 1:
        return parts[0]
    _, rank = np.unique(np.stack(parts, 1), axis=0, return_inverse=True)
    return rank.reshape(-1).astype(np.float64)


def _complete(table: RawTable, name: str, what: str) -> Cells:
    """A column of a table, with a value in every row."""
    found = {**table.beside, **table.cells}
    if name not in found:
        raise DataError(
            f"{table.source}: there must be a {what} column '{name}'. "
            + unknown("column", name, found)
        )
    cells = found[name]
    if cells.missing.any():
        raise DataError(
            f"{table.at(int(cells.missing.argmax()))} must have a {what} in column '{name}'. It "
            f"has none. Fill it or remove the row."
        )
    return cells


def _dates(table: RawTable, name: str, cells: Cells) -> np.ndarray:
    """Dates as seconds: [n]. In 31/12/2024 the column as a whole says which number is the month."""
    parts = [_DAY_FIRST.match(word) for word in cells.values]
    slashed = [part for part in parts if part and part[2] == "/"]
    month_first = any(int(part[3]) > 12 for part in slashed)
    if slashed and not month_first and all(int(part[1]) <= 12 for part in slashed):
        raise DataError(
            f"{table.source}: dates in column '{name}' must say which number is the month. "
            f"{slashed[0][0]} does not. Write dates as 2024-12-31."
        )
    times = np.empty(len(cells.values))
    for i, (word, part) in enumerate(zip(cells.values, parts, strict=True)):
        if part:
            day, month = (3, 1) if month_first and part[2] == "/" else (1, 3)
            date = f"{part[4]}-{int(part[month]):02d}-{int(part[day]):02d}"
            iso = date + word[part.end() :]
        else:
            iso = _ISO.sub(lambda m: f"{m[1]}-{int(m[2]):02d}-{int(m[3]):02d}", word, count=1)
        try:
            moment = datetime.datetime.fromisoformat(re.sub(r"([T ])(\d:)", r"\g<1>0\2", iso))
        except ValueError:
            raise DataError(
                f"{table.at(i)}: times in column '{name}' must be numbers or dates, written as "
                f"2024-12-31 or 2024-12-31T23:59. Got {word!r}."
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        times[i] = moment.timestamp()
    return times
