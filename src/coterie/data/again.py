"""New rows of many clients, prepared by the rules of a finished run."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.config import construct
from coterie.core.errors import ConfigError, DataError
from coterie.data.assemble import Reading, choose_clients, drop_unlabelled
from coterie.data.card import DataCard
from coterie.data.cells import Cells, RawTable
from coterie.data.encoder import Encoder
from coterie.data.federated import SPLITS, FederatedData, RowIndex
from coterie.data.readers import as_table, read_folder, split_table
from coterie.data.units import number_units, pool_units

OF_NEW_ROWS = {"unit", "names", "separator", "header", "encoding", "na_values"}
"""Options of `Reading` that new rows have of their own. The others are those of the run."""


def settle_options(given: Mapping[str, Any], trained: Mapping[str, Any], card: DataCard) -> Reading:
    """How new rows are read: as in training, unless it is said.

    Parameters
    ----------
    given
        Options of `Reading`, label and size. Those that the run has settled may be repeated; other
        values of them are an error.
    trained
        The table [data] of the run.
    card
        What the run knows of its data.

    >>> card = DataCard("regression", 1, None, (2,), Encoder(label="cost"))
    >>> settle_options({"label": "cost", "na_values": "-9"}, {"drop": ["id"]}, card).na_values
    ('-9',)
    """
    known = {field.name for field in fields(Reading)}
    before = construct(Reading, {k: v for k, v in trained.items() if k in known})
    before = replace(before, names=None, **vars(card.encoder.files))
    asked = {name: value for name, value in given.items() if name not in ("label", "size")}
    new = construct(Reading, {**vars(before), **asked})
    shape = list(card.encoder.shape[1:])
    settled = {name: getattr(before, name) for name in known - OF_NEW_ROWS}
    settled |= {"label": card.encoder.label, "size": shape if len(shape) == 2 else None}
    for name in given:
        if name not in settled:
            continue
        value = given[name] if name in ("label", "size") else getattr(new, name)
        value = [value] * 2 if name == "size" and isinstance(value, int) else value
        value = list(value) if name == "size" and value is not None else value
        # The task may have been found from the labels.
        same = card.task if name == "task" and settled[name] is None else settled[name]
        if value != same:
            raise ConfigError(
                f"{name} must be that of the run, {_say(same)}: new rows are read as the rows that "
                f"trained. Got {_say(value)}. Leave it out."
            )
    return new


def _say(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def prepare_again(
    given: Any,
    card: DataCard,
    client: str | None = None,
    trained: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[FederatedData, bool]:
    """New data as the models of a run know them, and whether they have labels.

    All rows are training rows of the result. Rows without a label are left out if others have one.

    Parameters
    ----------
    given
        A folder with a file, or a folder of images, per client; a table, with `client`; rows, or
        (x, y), of each client by name; or data that were made by `from_folder` and the like.
    card
        What the run knows of its data.
    client
        Column with the name of the client, if `given` is one table.
    trained
        The table [data] of the run.
    options
        How the new data are read, see `settle_options`.
    """
    if isinstance(given, FederatedData):
        if options or client is not None:
            name = next(iter(options), "client")
            raise ConfigError(
                f"{name} says how data are read, and these are read already. Leave it out, or give "
                "the folder or the table itself."
            )
        return _convert(given, card)
    if client is None and not isinstance(given, str | Path | Mapping):
        raise DataError(
            f"Got new rows as one {type(given).__name__}. Name the column that says which client a "
            "row belongs to: client=COLUMN. Or give a dict with the rows of each client."
        )
    reading = settle_options(options, trained, card)
    how = reading.format
    if client is not None:
        tables, names = split_table(given, client, how)
    elif isinstance(given, Mapping):
        names = [str(name) for name in given]
        tables = [as_table(value, f"client '{name}'", how) for name, value in given.items()]
    elif Path(given).is_dir():
        shape = card.encoder.shape
        size = (shape[1], shape[2]) if len(shape) == 3 else None
        found = read_folder(given, size, how, reading.names)
        tables, names = found.tables, found.names
    else:
        raise DataError(
            f"{given} must be a folder with a file per client, or a table. For a table, name the "
            "column that says which client a row belongs to: client=COLUMN."
        )
    tables, names = choose_clients("The new data", tables, names, reading.names)
    unit = reading.unit
    if "unit" not in options and not all(_has(table, unit) for table in tables):
        unit = ()
    return _from_tables(tables, names, card, unit)


def _has(table: RawTable, columns: Sequence[str]) -> bool:
    return all(name in table.cells or name in table.beside for name in columns)


def _from_tables(
    tables: Sequence[RawTable], names: Sequence[str], card: DataCard, unit: Sequence[str]
) -> tuple[FederatedData, bool]:
    encoder, label = card.encoder, card.encoder.label or "y"
    has = [label in table.cells for table in tables]
    labelled = any(has) and card.task != "reconstruction"
    if labelled and not all(has):
        raise DataError(
            f"Either all clients must have the label column '{label}', or none. "
            f"{tables[has.index(False)].source} has none. Add it there, or leave it out everywhere."
        )
    if labelled:
        tables = [drop_unlabelled(table, label)[0] for table in tables]
    for table, name in zip(tables, names, strict=True):
        if not len(table.rows):
            what = "rows with a label" if labelled else "rows"
            raise DataError(f"Every client must have {what}. '{name}' has none. Leave it out.")
    x = [encoder.encode(table) for table in tables]
    y = torch.cat([encoder.labels(table) for table in tables]) if labelled else None
    units = pool_units([number_units(table, unit) for table in tables]) if unit else None
    rows = {"train": RowIndex.blocks([len(part) for part in x])}
    return _federation(torch.cat(x), y, rows, names, card, units), labelled


def _federation(
    x: Tensor,
    y: Tensor | None,
    rows: Mapping[str, RowIndex],
    names: Sequence[str],
    card: DataCard,
    unit: Tensor | None,
) -> FederatedData:
    if y is None and card.task == "classification":
        y = torch.zeros(len(x), dtype=torch.int64)
    elif y is None:
        shape = (card.n_outputs,) if card.task == "regression" and card.n_outputs > 1 else ()
        y = torch.zeros(len(x), *shape)
    known = {"task": card.task, "n_outputs": card.n_outputs, "classes": card.classes}
    return FederatedData(x, y, rows, names=tuple(names), unit=unit, **known)  # type: ignore[arg-type]


def _convert(data: FederatedData, card: DataCard) -> tuple[FederatedData, bool]:
    """Data that were prepared by rules of their own, prepared by those of the run."""
    labelled = data.task != "reconstruction" and card.task != "reconstruction"
    if labelled and data.task != card.task:
        raise DataError(
            f"The new data must be of the kind that was trained on: {card.task}. Got {data.task}."
        )
    own = data.encoder or Encoder(task=data.task, classes=data.classes)
    parts = [
        torch.cat([data.rows[split].index[_of(data.rows[split], i)] for split in SPLITS])
        for i in range(len(data))
    ]
    rows = {"train": RowIndex.of(parts)}
    if not own.rules and not card.encoder.rules:
        if data.sample_shape != card.sample_shape:
            raise DataError(
                f"The new inputs must have the shape {card.sample_shape}, as in training. Got "
                f"{data.sample_shape}."
            )
        same = replace(data, rows=rows, name=None, options=None)
        if not labelled:
            empty = _federation(torch.zeros(len(data.y)), None, rows, data.names, card, None)
            return replace(same, y=empty.y, task=card.task, n_outputs=card.n_outputs), False
        return replace(same, y=_targets(data, own, card), n_outputs=card.n_outputs), True
    if not (own.rules and card.encoder.rules):
        raise DataError(
            "The new data must be a table if the models were trained on a table, and arrays if "
            "they were trained on arrays."
        )
    assert isinstance(data.x, Tensor)
    x = data.x if own.rules == card.encoder.rules else card.encoder.encode(undo(own, data.x))
    y = _targets(data, own, card) if labelled else None
    return _federation(x, y, rows, data.names, card, data.unit), labelled


def _of(rows: RowIndex, client: int) -> slice:
    return slice(int(rows.offsets[client]), int(rows.offsets[client + 1]))


def _targets(data: FederatedData, own: Encoder, card: DataCard) -> Tensor:
    if data.classes == card.classes and own.target_mean == card.encoder.target_mean:
        return data.y
    values = replace(own, classes=data.classes).decode(data.y)
    return card.encoder.labels(np.asarray(values))


def undo(encoder: Encoder, x: Tensor) -> RawTable:
    """The columns that features were made from.

    >>> from coterie.data.encoder import Rule
    >>> encoder = Encoder((Rule("age", "number", 30.0, 30.0, 10.0),))
    >>> undo(encoder, torch.tensor([[-1.0], [0.5]])).cells["age"].values.tolist()
    [20.0, 35.0]
    """
    cells, start = {}, 0
    for rule in encoder.rules:
        part = x[:, start : start + len(rule.features)].double().numpy()
        start += len(rule.features)
        gone = part[:, -1] > 0.5 if rule.missing else np.zeros(len(x), dtype=bool)
        if rule.kind in ("number", "boolean"):
            values = np.where(gone, np.nan, part[:, 0] * rule.scale + rule.shift)
            cells[rule.name] = Cells(rule.kind, values)
        elif rule.kind == "category":
            shares = part[:, : len(rule.categories)]
            words = np.array([*rule.categories, None], dtype=object)
            chosen = np.where(shares.max(1, initial=0) > 0.5, shares.argmax(1), len(words) - 1)
            cells[rule.name] = Cells("text", words[chosen])
        else:
            raise DataError(
                f"Column '{rule.name}' cannot be read back from data that are prepared already. "
                "Give the folder or the table itself instead."
            )
    return RawTable("the new data", cells, np.arange(len(x)))
