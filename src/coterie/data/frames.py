"""Read tables that are in memory: data frames, Hugging Face datasets, dicts of columns, arrays."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.cells import SPLITS, Cells, RawTable, parse, to_cells
from coterie.data.formats import Coded, to_plain
from coterie.data.limits import check_columns


def read_value(value: Any, source: str) -> RawTable:
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
        return from_arrow(value, source)
    if _is_of(value, "pandas") and hasattr(value, "columns"):
        return _frame(value, source)
    if hasattr(value, "column_names"):
        value = _columns(value)
    if isinstance(value, Mapping):
        inputs = value.get("x", value.get("x_train"))
        if inputs is not None and np.ndim(to_array(inputs, source)) > 1:
            return from_parts(value, source)
        return from_columns(value, source)
    array = to_array(value, source)
    if array.ndim != 2:
        raise DataError(
            f"{source}: a table must be a file, a data frame, a dict of columns or a 2-d array. "
            f"Got {type(value).__name__} of shape {list(array.shape)}."
        )
    return from_arrays(array, None, source)


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
    return from_columns(columns, source)


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
        return from_columns(_columns(dataset), source)
    table = from_arrow(dataset.with_format("arrow")[:], source)
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


def from_arrow(table: Any, source: str) -> RawTable:
    """A table of pyarrow; the index that pandas adds to one is left out."""
    names = [str(name) for name in table.column_names]
    if index := pandas_index(table):
        table = table.drop_columns([name for name in index if name in names])
        names = [str(name) for name in table.column_names]
    check_columns(names, source)
    columns = {name: to_plain(table.column(j)) for j, name in enumerate(names)}
    return from_columns(columns, source)


def pandas_index(table: Any) -> list[str]:
    """Columns that are the index of a data frame, if one was written."""
    metadata = table.schema.metadata or {}
    told = json.loads(metadata[b"pandas"]) if b"pandas" in metadata else {}
    return [name for name in told.get("index_columns", ()) if isinstance(name, str)]


def from_columns(columns: Mapping[str, Any], source: str) -> RawTable:
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
            name: parse(coded[name]) if name in coded else to_cells(array)
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


def from_parts(arrays: Mapping[str, Any], source: str) -> RawTable:
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
