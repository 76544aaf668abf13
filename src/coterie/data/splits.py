"""Which rows of a client are for training, for validation and for testing."""

from collections.abc import Sequence

import numpy as np
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import fold, seed_key
from coterie.data.federated import RowIndex
from coterie.data.tables import SPLITS, RawTable

RULES = ("random", "stratified", "time")

_SPELLINGS = {"val": "validation", "valid": "validation", "training": "train", "testing": "test"}


def divide(
    tables: Sequence[RawTable],
    names: Sequence[str],
    rule: str,
    *,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
    labels: Sequence[np.ndarray] | None = None,
    time: str | None = None,
) -> list[list[np.ndarray]]:
    """Rows of each client for "train", "validation" and "test": [split][client].

    Parameters
    ----------
    rule
        "random"; "stratified", every label in the same share as far as whole rows allow; "time",
        the latest rows last; or a column that says it for each row.
    test_fraction, validation_fraction
        Share of a client's rows, and of those that remain. With two rows or more, a client has at
        least one on either side.
    labels
        Label codes, for "stratified".
    time
        Column that orders the rows, for "time".
    """
    if any(table.split is not None for table in tables):
        return [list(part) for part in zip(*map(_given, tables), strict=True)]
    if rule not in RULES:
        return [list(part) for part in zip(*(_told(t, rule) for t in tables), strict=True)]
    if rule == "stratified" and labels is None:
        raise ConfigError("split: 'stratified' needs labels of classes. Use 'random' or 'time'.")
    if rule == "time" and time is None:
        raise ConfigError("split: 'time' needs the column that orders the rows. Give time=COLUMN.")
    rows = [np.arange(len(table.rows)) for table in tables]
    order = [time_order(table, time) for table in tables] if rule == "time" and time else rows
    parts = {}
    for part, fraction in (("test", test_fraction), ("validation", validation_fraction)):
        key = fold(seed_key(seed), part)
        if rule == "random":
            blocks = RowIndex.blocks([len(own) for own in rows])
            # Rows of the pool: a client's own, one client after the other.
            pool = np.concatenate(rows)
            rest, gone = blocks.divide(names, fraction, key)
            parts[part] = _by_client(gone, pool)
            rows = _by_client(rest, pool)
            continue
        parts[part] = []
        for i, own in enumerate(rows):
            count = _count(len(own), fraction)
            if rule == "time":
                place = np.empty(len(order[i]), dtype=np.int64)
                place[order[i]] = np.arange(len(order[i]))
                chosen = own[np.argsort(place[own])][len(own) - count :]
            else:
                assert labels is not None
                draw = fold(key, names[i], torch.arange(len(own))).numpy()
                sort = own[np.lexsort((draw, labels[i][own]))]
                # Evenly spaced in the order of labels: each label gets its share within one row.
                chosen = sort[((np.arange(count) + 0.5) * len(own) / max(count, 1)).astype(int)]
            parts[part].append(np.sort(chosen))
            rows[i] = np.setdiff1d(own, chosen)
    return [rows, parts["validation"], parts["test"]]


def _count(n: int, fraction: float) -> int:
    """How many of n rows a fraction is; both sides keep one if they can."""
    return 0 if fraction == 0 or n < 2 else min(max(1, round(n * fraction)), n - 1)


def _by_client(rows: RowIndex, pool: np.ndarray) -> list[np.ndarray]:
    return np.split(pool[rows.index.numpy()], rows.offsets[1:-1].numpy())


def _given(table: RawTable) -> list[np.ndarray]:
    if table.split is None:
        raise DataError(
            f"{table.source}: all clients or none must have test data of their own. This one has "
            f"none."
        )
    return [np.flatnonzero(table.split == part) for part in range(len(SPLITS))]


def _told(table: RawTable, column: str) -> list[np.ndarray]:
    """The split that a column says."""
    if column not in table.cells:
        raise DataError(
            f"{table.source}: split must be 'random', 'stratified', 'time' or a column. Got "
            f"'{column}'. Columns: {', '.join(table.cells)}."
        )
    words = [(word or "").lower() for word in table.cells[column].words]
    parts = [_SPELLINGS.get(word, word) for word in words]
    for i, part in enumerate(parts):
        if part not in SPLITS:
            raise DataError(
                f"{table.at(i)}: column '{column}' must say train, validation or test. Got "
                f"'{words[i]}'."
            )
    return [np.flatnonzero(np.array(parts, dtype=str) == name) for name in SPLITS]


def time_order(table: RawTable, column: str) -> np.ndarray:
    """Rows from the earliest to the latest; rows of one time stay in their order."""
    if column not in table.cells:
        raise DataError(
            f"{table.source}: there must be a time column '{column}'. Got {', '.join(table.cells)}."
        )
    cells = table.cells[column]
    if cells.missing.any():
        raise DataError(
            f"{table.at(int(cells.missing.argmax()))} must have a time in column '{column}'. It "
            f"has none. Fill it or remove the row."
        )
    if cells.values.dtype.kind == "f":
        return np.argsort(cells.values, kind="stable")
    times = np.empty(len(cells.values), dtype="datetime64[us]")
    for i, word in enumerate(cells.values):
        try:
            times[i] = np.datetime64(word.replace("Z", ""), "us")
        except ValueError:
            raise DataError(
                f"{table.at(i)}: times in column '{column}' must be numbers or written as "
                f"2024-12-31 or 2024-12-31T23:59. Got {word!r}."
            ) from None
    return np.argsort(times, kind="stable")
