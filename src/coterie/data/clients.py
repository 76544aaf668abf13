"""The data of one real client, read on its own machine by rules that all clients share."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from coterie.core.config import construct
from coterie.core.errors import DataError
from coterie.data.assemble import Reading, drop_unlabelled, read_units
from coterie.data.card import DataCard
from coterie.data.cells import RawTable
from coterie.data.federated import SPLITS, FederatedData, RowIndex
from coterie.data.formats import ENDINGS, FOUND, PACKED, Format
from coterie.data.images import read_client
from coterie.data.readers import as_table
from coterie.data.splits import divide
from coterie.data.tables import read_file
from coterie.data.units import pool_units


def client_file(path: Path, name: str, sample_shape: Any = None, how: Format = FOUND) -> RawTable:
    """A client's file, its folder of images, or its entry in a folder that has one per client."""
    if path.is_file():
        return read_file(path, how)
    if not path.is_dir():
        raise DataError(f"The data of client '{name}' must be in {path}. It does not exist.")
    own = [path / name, *(path / f"{name}{e}{p}" for e in ENDINGS for p in ("", *PACKED))]
    own = [entry for entry in own if entry.exists()] or [path]
    if own[0].is_file():
        return read_file(own[0], how)
    if not any(entry.is_dir() for entry in own[0].iterdir()):
        endings = ", ".join(ENDINGS)
        raise DataError(
            f"The data of client '{name}' must be a file {path / name} that ends in {endings}, or "
            f"a folder of class/image files. {own[0]} is neither."
        )
    size = tuple(sample_shape[-2:]) if sample_shape is not None else None
    return read_client(own[0], size)


def read_options(options: Mapping[str, Any]) -> Reading:
    """How one client reads its rows, from the table [data] of a run file."""
    known = {field.name for field in fields(Reading)} - {"names", "task"}
    return construct(Reading, {name: value for name, value in options.items() if name in known})


def one_client(
    value: Any, name: str, card: DataCard, options: Mapping[str, Any] | None = None
) -> FederatedData:
    """A federation of one from a client's own rows.

    Parameters
    ----------
    value
        A table, arrays (x, y) or (x_train, y_train, x_test, y_test), or the path of a file.
    card
        What all clients share: task, classes and the encoder.
    options
        How rows are split, see `Reading`. Other names are ignored.

    >>> from coterie.data import from_arrays
    >>> card = DataCard.of(from_arrays([[[1.0], [2.0]]], [["no", "yes"]]))
    >>> one_client(([[1.0], [2.0], [3.0]], ["yes", "no", "no"]), "ann", card)
    FederatedData(1 clients, 2 train + 1 test samples, classification, x [1], 2 outputs)
    """
    reading = read_options(options or {})
    table = value
    if not isinstance(value, RawTable):
        table = as_table(value, f"client '{name}'", reading.format)
    if card.task != "reconstruction":
        table, _ = drop_unlabelled(table, card.encoder.label or "y")
    x = card.encoder.encode(table)
    if card.task == "reconstruction":
        y = torch.zeros(len(x), dtype=torch.uint8)
    else:
        y = card.encoder.labels(table)
    labels = [y.numpy()] if card.task == "classification" else None
    units, times = read_units([table], reading)
    parts = divide(
        [table],
        [name],
        reading.split,
        test_fraction=reading.test_fraction,
        validation_fraction=reading.validation_fraction,
        seed=reading.seed,
        labels=labels,
        time=times,
        unit=units,
    )
    rows = {
        split: RowIndex.of([torch.as_tensor(p[0])]) for split, p in zip(SPLITS, parts, strict=True)
    }
    return FederatedData(
        x,
        y,
        rows,
        names=(name,),
        task=card.task,
        n_outputs=card.n_outputs,
        classes=card.classes,
        encoder=card.encoder,
        unit=None if units is None else pool_units(units),
        time=None if times is None else torch.as_tensor(times[0]),
    )
