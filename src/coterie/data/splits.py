"""Which rows of a client are for training, for validation and for testing."""

from collections.abc import Sequence

import numpy as np
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import fold, seed_key
from coterie.data.cells import SPLITS, RawTable
from coterie.data.federated import RowIndex

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
    time: Sequence[np.ndarray] | None = None,
    unit: Sequence[np.ndarray] | None = None,
) -> list[list[np.ndarray]]:
    """Rows of each client for "train", "validation" and "test": [split][client].

    Parameters
    ----------
    rule
        "random"; "stratified", every label in the same share as far as whole units allow; "time",
        the latest units last; or a column that says it for each row.
    test_fraction, validation_fraction
        Share of a client's units, and of those that remain. With two units or more, a client has
        at least one on either side.
    labels
        Label codes of each client's rows, for "stratified". The first row of a unit counts.
    time
        Time of each client's rows, for "time".
    unit
        Number of the unit of each client's rows; None: every row is a unit.
    """
    told = None
    if any(table.split is not None for table in tables):
        told = [_given(table) for table in tables]
    elif rule not in RULES:
        told = [_told(table, rule) for table in tables]
    if told is not None:
        if unit is not None:
            _check_whole(tables, told, unit)
        return [list(part) for part in zip(*told, strict=True)]
    if rule == "stratified" and labels is None:
        raise ConfigError("split: 'stratified' needs labels of classes. Use 'random' or 'time'.")
    if rule == "time" and time is None:
        raise ConfigError("split: 'time' needs the column that orders the rows. Give time=COLUMN.")
    rows = RowIndex.blocks([len(table.rows) for table in tables])
    starts = rows.offsets[:-1].numpy()
    units = None if unit is None else torch.as_tensor(np.concatenate(list(unit)))
    times = None
    if rule == "time" and time is not None:
        times = torch.as_tensor(np.concatenate(list(time)))
    parts = {}
    for part, fraction in (("test", test_fraction), ("validation", validation_fraction)):
        key = fold(seed_key(seed), part)
        if rule == "stratified":
            assert labels is not None
            rows, parts[part] = _stratify(rows, names, fraction, key, np.concatenate(labels), units)
        else:
            rows, parts[part] = rows.divide(names, fraction, key, units, times)
    found = (rows, parts["validation"], parts["test"])
    return [
        [own - start for own, start in zip(_by_client(split), starts, strict=True)]
        for split in found
    ]


def _stratify(
    rows: RowIndex,
    names: Sequence[str],
    fraction: float,
    key: torch.Tensor,
    labels: np.ndarray,
    unit: torch.Tensor | None,
) -> tuple[RowIndex, RowIndex]:
    """Part a fraction of every client's units from the rest, each label in its share."""
    units, member = rows, torch.arange(len(rows.index))
    if unit is not None:
        units, member = rows.of_units(unit[rows.index])
        units = units._replace(index=rows.index[units.index])
    chosen = np.zeros(len(units.index), dtype=bool)
    for i, own in enumerate(np.split(np.arange(len(chosen)), units.offsets[1:-1].numpy())):
        count = _count(len(own), fraction)
        draw = fold(key, names[i], torch.arange(len(own))).numpy()
        sort = own[np.lexsort((draw, labels[units.index[own].numpy()]))]
        # Evenly spaced in the order of labels: each label gets its share within one unit.
        chosen[sort[((np.arange(count) + 0.5) * len(own) / max(count, 1)).astype(int)]] = True
    part = torch.as_tensor(chosen)[member]
    return rows.where(~part), rows.where(part)


def _check_whole(
    tables: Sequence[RawTable], told: Sequence[list[np.ndarray]], unit: Sequence[np.ndarray]
) -> None:
    """Refuse a given split that divides a unit."""
    for table, parts, own in zip(tables, told, unit, strict=True):
        place = np.zeros(len(own), dtype=int)
        for number, part in enumerate(parts):
            place[part] = number
        first = np.unique(own, return_index=True)[1]  # units are numbered 0, 1, ...
        bad = place != place[first][own]
        if bad.any():
            row = int(bad.argmax())
            raise DataError(
                f"{table.at(row)}: all rows of a unit must be on one side of the split. This one "
                f"is for {SPLITS[place[row]]}, row {table.rows[first[own[row]]]} of the same unit "
                f"for {SPLITS[place[first[own[row]]]]}. Correct the split, or leave out unit."
            )


def _count(n: int, fraction: float) -> int:
    """How many of n units a fraction is; both sides keep one if they can."""
    return 0 if fraction == 0 or n < 2 else min(max(1, round(n * fraction)), n - 1)


def _by_client(rows: RowIndex) -> list[np.ndarray]:
    return np.split(rows.index.numpy(), rows.offsets[1:-1].numpy())


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
