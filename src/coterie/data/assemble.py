"""From the tables of all clients to a federation: checks, split, encoding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt
from torch import Tensor

from coterie.core.config import check_fields
from coterie.core.errors import ConfigError, DataError, unknown
from coterie.data.arrays import unit_scale
from coterie.data.cells import Cells, RawTable
from coterie.data.columns import Statistics, fit, merge
from coterie.data.encoder import Encoder
from coterie.data.federated import SPLITS, FederatedData, RowIndex
from coterie.data.formats import Format
from coterie.data.limits import check_names
from coterie.data.repeats import count_repeats, warn_of_repeats
from coterie.data.splits import RULES, divide
from coterie.data.tables import describe_files
from coterie.data.text import FEATURES
from coterie.data.units import number_units, pool_units, read_times
from coterie.data.warnings import warn_of_columns

MAX_LABELS = 20


@dataclass(frozen=True)
class Reading:
    """How data are read; the options of `from_table`, `from_folder` and the other readers.

    Parameters
    ----------
    task
        "classification", "regression" or "reconstruction". If None: text, true and false are
        classes; so are whole numbers, if they are at most 20 different ones or 0..c-1 without a
        gap; other numbers are to be predicted; without a label the inputs are reconstructed.
    test_fraction
        Fraction of each client's rows that are test rows.
    validation_fraction
        Fraction of each client's remaining rows that are validation rows.
    split
        "random", "stratified" (every label in its share), "time" (the latest rows are held back),
        or a column that says train, validation or test.
    unit
        Column that says which rows belong together: a patient, a device, a day. Rows of a unit
        stay on one side of every split and count once where noise is estimated. The fractions are
        then shares of units. Several columns: rows that agree in all of them.
    time
        Column that orders the rows, by numbers or dates; asks for split="time". Several columns of
        numbers, such as year, month and day: the first one decides, then the second, and so on.
    seed
        Seed of the split.
    normalise
        Whether numeric inputs and numbers to predict are standardised, with the mean and variance
        of all training rows. `data.encoder` undoes it.
    names
        Clients to use, in this order. For partitions: their names.
    categorical
        Columns to read as categories.
    text
        Columns to read as text.
    text_features
        Largest number of features that all columns of text together become.
    drop
        Columns to leave out.
    separator
        What separates the cells of text files: ",", ";", a tab, or " " for any number of spaces.
        If None, it is found from the first line.
    header
        Whether the first line of text files names the columns; else they are called column_1,
        column_2, and so on. If None: it does, unless it has numbers where numbers follow.
    encoding
        Encoding of text files. If None: UTF-8, or Windows-1252 (cp1252) if they are not UTF-8.
    na_values
        Values that mean missing, besides empty cells, ?, NA, N/A, NaN, null. Numbers are compared
        as numbers: "-9" is also -9.0.
    """

    task: Literal["classification", "regression", "reconstruction"] | None = None
    test_fraction: Annotated[float, Ge(0), Lt(1)] = 0.2
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    split: str = "random"
    unit: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    seed: int = 0
    normalise: bool = True
    names: tuple[str, ...] | None = None
    categorical: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    text_features: Annotated[int, Ge(1)] = FEATURES
    drop: tuple[str, ...] = ()
    separator: str | None = None
    header: bool | None = None
    encoding: str | None = None
    na_values: tuple[str, ...] = ()

    @property
    def format(self) -> Format:
        """How text files are written."""
        return Format(self.separator, self.header, self.encoding, self.na_values)

    def __post_init__(self) -> None:
        for name in ("unit", "time", "na_values"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                object.__setattr__(self, name, () if value is None else (value,))
        numbers = self.na_values if isinstance(self.na_values, list | tuple) else [self.na_values]
        words = tuple(str(v) if isinstance(v, int | float) else v for v in numbers)
        object.__setattr__(self, "na_values", words)
        check_fields(self)
        if self.time and self.split == "random":
            object.__setattr__(self, "split", "time")

    def changed(self) -> dict[str, Any]:
        """The options that are not the default, as plain data."""
        default = {field.name: field.default for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value != default[name]
        }


@dataclass(frozen=True)
class Target:
    """What there is to predict."""

    task: str
    classes: tuple[str, ...] | None = None
    n_outputs: int = 1
    note: str | None = None


def assemble(
    owner: str,
    tables: Sequence[RawTable],
    names: Sequence[str],
    label: str | None,
    options: Reading,
    *,
    typed: bool = False,
    name: str | None = None,
    record: dict[str, Any] | None = None,
) -> FederatedData:
    """A federation from a table per client.

    Parameters
    ----------
    owner
        Who messages say is speaking.
    typed
        Whether targets have a type of their own: then integers are labels, however many.
    name, record
        By which the data can be made again.
    """
    tables, names = choose_clients(owner, tables, names, options.names)
    n_rows = sum(len(table.rows) for table in tables)
    columns, tables = _columns(owner, tables, label, options)
    labelled = None
    if label is not None and options.task != "reconstruction":
        tables, labelled = _labelled(owner, tables, names, label)
    target = _target(owner, tables, label, options.task, typed)
    encoder = Encoder((), target.task, label, target.classes)
    codes: list[Tensor] | None = None
    if target.task == "classification":
        codes = [encoder.labels(table) for table in tables]
    units, times = read_units(tables, options)
    parts = divide(
        tables,
        names,
        options.split,
        test_fraction=options.test_fraction,
        validation_fraction=options.validation_fraction,
        seed=options.seed,
        labels=None if codes is None else [part.numpy() for part in codes],
        time=times,
        unit=units,
    )
    for client, rows in zip(names, parts[0], strict=True):
        if not len(rows):
            raise DataError(
                f"{owner}: every client must have a training row. Client '{client}' has none. "
                f"Leave it out or change the split."
            )
    if tables[0].x is None:
        rules, notes = fit(
            tables,
            parts[0],
            columns,
            normalise=options.normalise,
            categorical=options.categorical,
            text=options.text,
            text_features=options.text_features,
        )
        if not rules:
            raise DataError(f"{owner}: there must be a column to learn from. None is left.")
        encoder = replace(encoder, rules=rules)
        x = torch.cat([encoder.encode(table) for table in tables])
    else:
        x, notes = _dense(owner, tables, names, columns)
        encoder = Encoder.of_arrays(x, target.task, target.classes, label)
    if target.task == "regression" and options.normalise:
        encoder, note = _scaled(encoder, tables, parts[0])
        notes = (*notes, note)
    if target.task == "reconstruction":
        y = torch.zeros(len(x), dtype=torch.uint8)
    elif codes is not None:
        y = torch.cat(codes)
    else:
        y = torch.cat([encoder.labels(table) for table in tables])
    starts = np.cumsum([0] + [len(table.rows) for table in tables])
    by_split = {
        split: RowIndex.of([torch.as_tensor(own + s) for own, s in zip(part, starts, strict=False)])
        for split, part in zip(SPLITS, parts, strict=True)
    }
    pooled = None if units is None else pool_units(units)
    given = any(table.split is not None for table in tables)
    ordered = given or units is not None or options.split not in ("random", "stratified")
    inputs = columns if tables[0].x is None else []
    warnings = warn_of_columns(tables, names, inputs, label, target.task, ordered)
    if units is None:
        own = zip(
            *(pool.split([len(table.rows) for table in tables]) for pool in (x, y)), strict=True
        )
        warnings += warn_of_repeats([count_repeats(*pair) for pair in own])
    said = [note for table in tables for note in table.notes]
    return FederatedData(
        x,
        y,
        by_split,
        names=tuple(names),
        task=target.task,
        n_outputs=x[0].numel() if target.task == "reconstruction" else target.n_outputs,
        transform=unit_scale if x.dtype == torch.uint8 else None,
        classes=target.classes,
        name=name,
        options=None if record is None else {**record, **options.changed()},
        notes=tuple(dict.fromkeys([*filter(None, (target.note, labelled)), *said, *notes])),
        reading=describe_reading(tables, label, target, encoder, n_rows),
        warnings=tuple(warnings),
        encoder=replace(encoder, files=options.format),
        unit=pooled,
        time=None if times is None else torch.as_tensor(np.concatenate(times)),
    )


def describe_reading(
    tables: Sequence[RawTable], label: str | None, target: Target, encoder: Encoder, n_rows: int
) -> str:
    """What was read, in one line: files, rows, what is predicted, and from what."""
    files = {table.source: table.found for table in tables if table.found is not None}
    kept = sum(len(table.rows) for table in tables)
    text = describe_files(list(files.values())) if files else ""
    x = tables[0].x
    if not text:
        text = "Arrays or images" if x is not None else "A table"
    of = f"{n_rows:,} rows of {len(tables)} client{'s' * (len(tables) > 1)}"
    text = f"{text}: {of}"
    if kept < n_rows:
        text += f", {n_rows - kept:,} without '{label}' left out"
    if target.task == "reconstruction":
        text += ". No label was given: models learn to reconstruct the columns"
    else:
        kind = "numbers" if target.classes is None else f"{len(target.classes)} classes"
        text += f". To predict: '{label}' ({kind})"
    if x is not None:
        return f"{text}. Inputs: arrays of shape {list(x.shape[1:])}."
    words = {"number": "number", "boolean": "yes/no", "category": "category", "hashed": "category"}
    kinds = Counter(words.get(rule.kind, rule.kind) for rule in encoder.rules)
    plural = {"category": "categories", "number": "numbers", "text": "texts"}
    parts = [f"{n} {plural.get(kind, kind) if n > 1 else kind}" for kind, n in kinds.items()]
    return f"{text}. Inputs: {', '.join(parts)}."


def read_units(
    tables: Sequence[RawTable], options: Reading
) -> tuple[list[np.ndarray] | None, list[np.ndarray] | None]:
    """Units and times of each client's rows, where columns for them are named."""
    units = [number_units(table, options.unit) for table in tables] if options.unit else None
    times = [read_times(table, options.time) for table in tables] if options.time else None
    return units, times


def choose_clients(
    owner: str, tables: Sequence[RawTable], names: Sequence[str], wanted: Sequence[str] | None
) -> tuple[list[RawTable], list[str]]:
    """The clients that are asked for, all with rows and with a name of their own."""
    if not names:
        raise DataError(f"{owner}: there must be at least one client. Got none.")
    check_names(owner, names)
    by_name: dict[str, RawTable] = {}
    for name, table in zip(names, tables, strict=True):
        if name in by_name:
            raise DataError(
                f"{owner}: client names must be unique. '{name}' is the name of "
                f"{by_name[name].source} and of {table.source}. Rename one."
            )
        by_name[name] = table
    for name in wanted or ():
        if name not in by_name:
            raise DataError(f"{owner}: " + unknown("client", name, by_name))
    order = list(wanted or names)
    for name in order:
        if not len(by_name[name].rows):
            raise DataError(
                f"{owner}: every client must have rows. {by_name[name].source} has none. Fill or "
                f"remove it."
            )
    return [by_name[name] for name in order], order


def _columns(
    owner: str, tables: list[RawTable], label: str | None, options: Reading
) -> tuple[list[str], list[RawTable]]:
    """The columns to learn from, which every client must have."""
    first = tables[0]
    for what, asked in (("drop", options.drop), ("categorical", options.categorical)):
        for name in asked:
            if not any(name in table.cells for table in tables):
                raise ConfigError(f"{owner}: {what}: " + unknown("column", name, first.cells))
    for name in options.text:
        if name not in first.cells:
            raise ConfigError(f"{owner}: text: " + unknown("column", name, first.cells))
    if label is not None and label in options.drop:
        raise ConfigError(f"{owner}: the label '{label}' must not be dropped.")
    for what, asked in (("categorical", options.categorical), ("text", options.text)):
        for name in asked:
            if name in options.drop:
                raise ConfigError(
                    f"{owner}: '{name}' is in drop and in {what}. Leave it out of one of them."
                )
    dropped = set(options.drop)
    tables = [
        table._replace(cells={k: v for k, v in table.cells.items() if k not in dropped})
        for table in tables
    ]
    first = tables[0]
    for table in tables:
        if label is not None and label not in table.cells:
            raise DataError(
                f"{owner}: {table.source} must have the label column '{label}'. "
                + unknown("column", label, table.cells)
            )
        for one, other in ((first, table), (table, first)):
            for name in one.cells:
                if name not in other.cells:
                    raise DataError(
                        f"{owner}: all clients must have the same columns. {one.source} has "
                        f"'{name}', {other.source} has not. Add it there, or leave it out: "
                        f"drop=['{name}']."
                    )
    aside = {label, *options.unit, *options.time}
    if options.split not in RULES:
        aside.add(options.split)
    return [name for name in first.cells if name not in aside], tables


def drop_unlabelled(table: RawTable, label: str) -> tuple[RawTable, int]:
    """The rows of a client that have a label, and how many have none."""
    if label not in table.cells:  # the encoder says what is wrong
        return table, 0
    missing = table.cells[label].missing
    n = int(missing.sum())
    return (table.take(np.flatnonzero(~missing)) if n else table), n


def _labelled(
    owner: str, tables: Sequence[RawTable], names: Sequence[str], label: str
) -> tuple[list[RawTable], str | None]:
    """The rows of all clients that have a label, and what to say of the others."""
    found = [drop_unlabelled(table, label) for table in tables]
    for (table, _), name in zip(found, names, strict=True):
        if not len(table.rows):
            raise DataError(
                f"{owner}: every client must have rows with a label. Client '{name}' has none in "
                f"column '{label}'. Fill or remove it."
            )
    dropped, n = sum(gone for _, gone in found), sum(len(table.rows) for table in tables)
    note = f"{dropped:,} of {n:,} rows have no label in column '{label}' and are left out."
    return [table for table, _ in found], note if dropped else None


def _target(
    owner: str, tables: Sequence[RawTable], label: str | None, task: str | None, typed: bool
) -> Target:
    """What to predict, inferred if it is not given."""
    if label is None or task == "reconstruction":
        if task not in (None, "reconstruction"):
            raise DataError(f"{owner}: {task} must have a label. Give label=COLUMN.")
        note = "No label is given, so the task is reconstruction of the inputs."
        return Target("reconstruction", note=note if task is None else None)
    numeric = [table for table in tables if table.cells[label].kind == "number"]
    other = [table for table in tables if table.cells[label].kind != "number"]
    if numeric and other:
        raise DataError(
            f"{owner}: labels must be numbers everywhere or nowhere. Column '{label}' has numbers "
            f"in {numeric[0].source} and {other[0].cells[label].words[0]!r} in {other[0].source}. "
            f"Write them alike."
        )
    if other:
        if task == "regression":
            raise DataError(
                f"{owner}: regression must have numbers as labels. {other[0].at(0)} has "
                f"{other[0].cells[label].words[0]!r} in column '{label}'."
            )
        found = {word for table in tables for word in table.cells[label].words}
        return _classes(owner, label, sorted(map(str, found)), task)
    return _numeric_target(owner, tables, label, task, typed)


def _numeric_target(
    owner: str, tables: Sequence[RawTable], label: str, task: str | None, typed: bool
) -> Target:
    shape = tables[0].cells[label].values.shape[1:]
    for table in tables:
        values = table.cells[label].values
        if values.shape[1:] != shape:
            raise DataError(
                f"{owner}: labels must be of one shape. {tables[0].source} has {list(shape)} per "
                f"row, {table.source} has {list(values.shape[1:])}."
            )
        infinite = np.isinf(values.reshape(len(values), -1)).any(1)
        if infinite.any():
            raise DataError(
                f"{owner}: labels must be finite. {table.at(int(infinite.argmax()))} is infinite "
                f"in column '{label}'. Correct it or remove the row."
            )
    found = np.unique(np.concatenate([np.unique(table.cells[label].values) for table in tables]))
    whole = not shape and bool((found == np.round(found)).all())
    no_gap = found[0] in (0, 1) and bool((np.diff(found) == 1).all())
    if task is None:
        labels = whole and (typed or len(found) <= MAX_LABELS or no_gap)
    else:
        labels = task == "classification"
    if not labels:
        note = (
            f"Column '{label}' holds {len(found)} different numbers, so the task is regression. If "
            f"they are labels: task='classification'."
        )
        return Target("regression", None, int(np.prod(shape)), note if task is None else None)
    if not whole:
        raise DataError(
            f"{owner}: classification must have whole numbers or text as labels. Column '{label}' "
            f"has fractions. Use task='regression'."
        )
    return _classes(owner, label, [word or "" for word in Cells("number", found).words], task)


def _classes(owner: str, label: str, classes: list[str], task: str | None) -> Target:
    if len(classes) < 2:
        raise DataError(
            f"{owner}: there must be at least two classes. Every row has '{classes[0]}' in column "
            f"'{label}'. Add clients that have another, or choose another label."
        )
    note = f"Column '{label}' holds {len(classes)} labels, so the task is classification."
    return Target("classification", tuple(classes), len(classes), note if task is None else None)


def _dense(
    owner: str, tables: Sequence[RawTable], names: Sequence[str], columns: Sequence[str]
) -> tuple[Tensor, tuple[str, ...]]:
    """Inputs that are arrays, taken as they are."""
    first = tables[0].x
    assert first is not None
    for table in tables:
        if table.x is None or table.x.shape[1:] != first.shape[1:]:
            has = "columns" if table.x is None else list(table.x.shape[1:])
            raise DataError(
                f"{owner}: all clients must have samples of one shape. {tables[0].source} has "
                f"{list(first.shape[1:])}, {table.source} has {has}."
            )
        if table.x.dtype.kind != first.dtype.kind or (table.x.dtype == np.uint8) != (
            first.dtype == np.uint8
        ):
            raise DataError(
                f"{owner}: all clients must have inputs of one type. {tables[0].source} has "
                f"{first.dtype}, {table.source} has {table.x.dtype}. Convert one of them."
            )
        if table.x.dtype.kind == "f":
            bad = ~np.isfinite(table.x.reshape(len(table.x), -1)).all(1)
            if bad.any():
                raise DataError(
                    f"{owner}: every value of x must be finite. {table.at(int(bad.argmax()))} "
                    f"holds nan or an infinite one. Remove or fill it."
                )
    pool = np.concatenate([table.x for table in tables if table.x is not None])
    notes = [f"Column '{name}' is left out beside inputs that are arrays." for name in columns]
    if pool.dtype == np.uint8:
        return torch.tensor(pool), (*notes, "Bytes are scaled to [0, 1].")
    if pool.dtype.kind in "iu":
        return torch.tensor(pool.astype(np.int64)), (*notes, "Integers are taken as they are.")
    return torch.tensor(pool, dtype=torch.get_default_dtype()), tuple(notes)


def _scaled(
    encoder: Encoder, tables: Sequence[RawTable], train: Sequence[np.ndarray]
) -> tuple[Encoder, str]:
    """The encoder that standardises numbers to predict, by what the clients tell of them."""
    told = []
    for table, rows in zip(tables, train, strict=True):
        values = table.cells[encoder.label or "y"].values[rows].reshape(len(rows), -1)
        mean = values.mean(0)
        spread = ((values - mean) ** 2).sum(0)
        told.append([Statistics(len(rows), 0, *pair) for pair in zip(mean, spread, strict=True)])
    merged = [merge(output) for output in zip(*told, strict=True)]
    means = tuple(float(output.mean) for output in merged)
    scales = tuple(float(np.sqrt(output.deviations / output.n)) or 1.0 for output in merged)
    note = "Numbers to predict are standardised by the federation's statistics; "
    note += f"mean {means[0]:.4g}, standard deviation {scales[0]:.4g}" + (
        "." if len(means) == 1 else ", ..."
    )
    return replace(encoder, target_mean=means, target_scale=scales), note
