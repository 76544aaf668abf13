"""Federations from arrays in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError, unknown
from coterie.core.random import fold, seed_key
from coterie.core.tree import Tree
from coterie.data.cells import RawTable, to_cells
from coterie.data.encoder import Encoder
from coterie.data.federated import TASKS, FederatedData, RowIndex
from coterie.data.frames import to_array
from coterie.data.repeats import count_repeats, warn_of_repeats
from coterie.data.units import number_units, pool_units, read_times
from coterie.data.warnings import DataWarning


def from_arrays(
    xs: Sequence[Any],
    ys: Sequence[Any] | None = None,
    *,
    test: tuple[Sequence[Any], Sequence[Any] | None] | None = None,
    test_fraction: float = 0.2,
    names: Sequence[str] | None = None,
    unit: Sequence[Any] | None = None,
    time: Sequence[Any] | None = None,
    truth: Sequence[int] | Tensor | None = None,
    task: str | None = None,
    seed: int = 0,
    n_outputs: int | None = None,
) -> FederatedData:
    """Data in memory: an array or tensor of inputs for each client, and one of targets.

    Floating inputs take torch's default type. Bytes stay bytes and are gathered as floats in
    [0, 1]; other integers, such as tokens, stay as they are.

    Parameters
    ----------
    xs
        Inputs [n, ...] of each client.
    ys
        Targets [n, ...] of each client. Integers and text are labels, floats are numbers to
        predict; None asks for reconstruction of the inputs.
    test
        Inputs and targets for testing. Without it a fraction of every client's rows is set aside.
    test_fraction
        That fraction; a client with two rows or more has at least one on either side.
    unit
        For each client, the unit of each of its rows (a patient, a device), as numbers or text.
        Rows of a unit stay on one side of every split and count once where noise is estimated.
        With `test`, those of the rows of `xs` come first, then those of the test rows.
    time
        For each client, the time of each of its rows, as numbers or dates. The latest rows are
        then held back for testing. With `test`, in the same order as `unit`.
    truth
        Group of each client, for metrics alone.
    task
        For integer targets that are numbers: "regression".
    n_outputs
        Number of classes when the labels are 0..n_outputs-1 and some may not occur.

    >>> data = from_arrays([[[0.0], [1.0]], [[2.0], [3.0], [4.0]]], [["no", "yes"], ["no"] * 3])
    >>> data.classes, data.sizes("train"), data.sizes("test")
    (('no', 'yes'), tensor([1, 2]), tensor([1, 1]))
    """
    names = tuple(map(str, names)) if names is not None else _default_names(len(xs))
    _same_length("names", len(names), len(xs))
    xs_test, ys_test = ([], None) if test is None else test
    if test is not None:
        _same_length("the test xs", len(xs_test), len(xs))
    if (ys_test is None) != (ys is None or test is None):
        raise DataError(
            "from_arrays: train and test must both have targets or both have none. "
            "Give test=(xs_test, ys_test)."
        )
    owners = [*names, *names][: len(xs) + len(xs_test)]
    inputs = [_input(x, name) for x, name in zip([*xs, *xs_test], owners, strict=True)]
    for x, name in zip(inputs, owners, strict=True):
        if x.shape[1:] != inputs[0].shape[1:]:
            raise DataError(
                f"from_arrays: all clients must have samples of one shape. '{names[0]}' has "
                f"{list(inputs[0].shape[1:])}, '{name}' has {list(x.shape[1:])}."
            )
        if x.dtype != inputs[0].dtype:
            raise DataError(
                f"from_arrays: all clients must have inputs of one type. '{names[0]}' has "
                f"{inputs[0].dtype}, '{name}' has {x.dtype}. Convert one of them."
            )
    if not inputs:
        raise DataError("from_arrays: xs must hold at least one client. Got none.")
    sizes = [len(x) for x in inputs]
    x = torch.cat(inputs)

    if ys is None:
        if task not in (None, "reconstruction"):
            raise DataError(f"from_arrays: {task} must have targets. Give ys.")
        task, classes, y = "reconstruction", None, torch.zeros(len(x), dtype=torch.uint8)
        n_outputs = n_outputs or x[0].numel()
    else:
        _same_length("ys", len(ys), len(xs))
        if ys_test is not None:
            _same_length("the test ys", len(ys_test), len(xs))
        targets = [
            _target(y, name) for y, name in zip([*ys, *(ys_test or [])], owners, strict=True)
        ]
        for y_of, size, name in zip(targets, sizes, owners, strict=True):
            if len(y_of) != size:
                raise DataError(
                    f"from_arrays: x and y must have one row per sample each. Client '{name}' "
                    f"has {size} rows of x and {len(y_of)} of y."
                )
        task, y, n_outputs, classes = _targets(targets, owners, task, n_outputs)

    beside = _beside({"unit": unit, "time": time}, names, sizes, len(xs_test) > 0)
    repeats: list[DataWarning] = []
    if unit is None:
        own = zip(x.split(sizes), y.split(sizes), strict=True)
        repeats = warn_of_repeats([count_repeats(*pair) for pair in own])
    data = FederatedData(
        x,
        y,
        {
            "train": RowIndex.blocks(sizes[: len(xs)]),
            "test": RowIndex.blocks(sizes[len(xs) :] or [0] * len(xs), start=sum(sizes[: len(xs)])),
        },
        names=names,
        task=task,
        n_outputs=n_outputs,
        transform=unit_scale if x.dtype == torch.uint8 else None,
        truth=None if truth is None else _groups(truth),
        classes=classes,
        encoder=Encoder.of_arrays(x, task, classes),
        warnings=tuple(repeats),
        unit=beside["unit"],
        time=beside["time"],
    )
    if test is not None:
        _check_apart(data)
        return data
    key = fold(seed_key(seed), "test")
    train, tested = data.rows["train"].divide(names, test_fraction, key, data.unit, data.time)
    return replace(data, rows={"train": train, "test": tested})


def _beside(
    columns: Mapping[str, Sequence[Any] | None],
    names: Sequence[str],
    sizes: Sequence[int],
    tested: bool,
) -> dict[str, Tensor | None]:
    """Units and times of the rows of the pool, where they are given for each client."""
    out: dict[str, Tensor | None] = {}
    m = len(names)
    for what, column in columns.items():
        out[what] = None
        if column is None:
            continue
        _same_length(what, len(column), m)
        parts: list[np.ndarray] = []
        for i, (value, name) in enumerate(zip(column, names, strict=True)):
            array = to_array(value, f"client '{name}'", what)
            n = sizes[i] + (sizes[m + i] if tested else 0)
            if array.shape != (n,):
                raise DataError(
                    f"from_arrays: {what} must have a value for each row. Client '{name}' has {n} "
                    f"rows and {what} of shape {list(array.shape)}."
                )
            table = RawTable(f"client '{name}'", {what: to_cells(array)}, np.arange(n))
            parts.append((number_units if what == "unit" else read_times)(table, [what]))
        if what == "unit":
            flat = pool_units(parts).split([len(part) for part in parts])
            pieces = [part.numpy() for part in flat]
        else:
            pieces = parts
        ends = [part[:n] for part, n in zip(pieces, sizes, strict=False)]
        ends += [part[n:] for part, n in zip(pieces, sizes, strict=False)]
        out[what] = torch.as_tensor(np.concatenate(ends))
    return out


def _check_apart(data: FederatedData) -> None:
    """Refuse units that have rows for training and for testing."""
    if data.unit is None:
        return
    train, test = (data.unit[data.rows[split].index] for split in ("train", "test"))
    both = torch.isin(test, train)
    if both.any():
        name = data.names[int(data.rows["test"].owner[both][0])]
        raise DataError(
            f"from_arrays: all rows of a unit must be on one side of the split. Client '{name}' "
            f"has a unit with rows in xs and in test. Move them to one side."
        )


def unit_scale(x: Tensor, facts: Tree) -> Tensor:
    """Bytes as floats in [0, 1]."""
    return x.to(torch.get_default_dtype()) / 255


unit_scale.batched = True  # type: ignore[attr-defined]


def _default_names(n_clients: int) -> tuple[str, ...]:
    return tuple(f"client-{i}" for i in range(n_clients))


def _same_length(what: str, length: int, wanted: int) -> None:
    if length != wanted:
        raise DataError(
            f"from_arrays: {what} must have one entry for each of {wanted} clients. Got {length}."
        )


def _array(value: Any, what: str, name: str) -> np.ndarray:
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"from_arrays: {what} of a client must be one array. Client '{name}' has none: {error}."
        ) from error


def _input(value: Any, name: str) -> Tensor:
    array = _array(value, "x", name)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"from_arrays: x must hold numbers. Client '{name}' has x of type {array.dtype}."
        )
    if array.ndim < 2:
        raise DataError(
            f"from_arrays: x must have a row per sample and a column per feature. Client '{name}' "
            f"has x of shape {list(array.shape)}. For a single feature use x[:, None]."
        )
    if array.dtype.kind in "bf":
        return torch.tensor(array, dtype=torch.get_default_dtype())
    return torch.tensor(array, dtype=torch.uint8 if array.dtype == np.uint8 else torch.int64)


def _target(value: Any, name: str) -> np.ndarray:
    array = _array(value, "y", name)
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"from_arrays: y must hold numbers or text. Client '{name}' has y of type "
            f"{array.dtype}."
        )
    if array.ndim < 1:
        raise DataError(
            f"from_arrays: y must have a row per sample. Client '{name}' has one value."
        )
    return array


def _targets(
    targets: list[np.ndarray], owners: list[str], task: str | None, n_outputs: int | None
) -> tuple[str, Tensor, int, tuple[str, ...] | None]:
    """Task, pool of targets, number of outputs and label names."""
    kinds = {y.dtype.kind for y in targets if len(y)}
    numeric, text = bool(kinds - {"U"}), "U" in kinds
    if numeric and text:
        raise DataError("from_arrays: y must be numbers for all clients or text for all. Got both.")
    task = task or ("regression" if "f" in kinds else "classification")
    shape = targets[0].shape[1:]
    for y, name in zip(targets, owners, strict=True):
        if y.shape[1:] != shape or (task == "classification" and shape):
            wanted = "one label per sample" if task == "classification" else f"rows {list(shape)}"
            raise DataError(
                f"from_arrays: y must hold {wanted} for {task}. Client '{name}' has y of shape "
                f"{list(y.shape)}."
            )
    pool = np.concatenate([y for y in targets if len(y)] or targets)
    if task == "regression":
        if text:
            raise DataError("from_arrays: y must hold numbers for regression. Got text.")
        y_pool = torch.tensor(pool, dtype=torch.get_default_dtype())
        return task, y_pool, n_outputs or max(1, y_pool[:1].numel()), None
    if task != "classification":
        if task == "reconstruction":
            raise DataError("from_arrays: reconstruction takes no targets. Leave ys out.")
        raise DataError(unknown("task", task, TASKS))
    if "f" in kinds:
        raise DataError(
            "from_arrays: y must hold integers or text for classification. Got floats. "
            "Convert them, or use task='regression'."
        )
    if n_outputs is not None and not text:
        return task, torch.tensor(pool, dtype=torch.int64), n_outputs, None
    labels, codes = np.unique(pool, return_inverse=True)
    if n_outputs is not None and len(labels) > n_outputs:
        raise DataError(
            f"from_arrays: there must be at most n_outputs = {n_outputs} labels. "
            f"There are {len(labels)}."
        )
    classes = tuple(str(label) for label in labels)
    return task, torch.tensor(codes, dtype=torch.int64), n_outputs or len(labels), classes


def _groups(truth: Sequence[int] | Tensor) -> Tensor:
    array = _array(truth, "truth", "all")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(
            f"from_arrays: truth must be one integer per client. Got type {array.dtype} and "
            f"shape {list(array.shape)}."
        )
    return torch.tensor(array, dtype=torch.int64)
