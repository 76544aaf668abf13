"""Predictions as people need them: classes by name, with probabilities and the row they are of."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.algorithm import Algorithm
from coterie.core.errors import ConfigError, DataError, unknown
from coterie.data import DataCard
from coterie.data.cells import RawTable
from coterie.data.formats import Format
from coterie.data.images import read_client
from coterie.data.tables import read
from coterie.report.table import Table


def open_folder(x: Any, card: DataCard) -> Any:
    """The images of one client, if a folder is named; all else as it is."""
    if not (isinstance(x, str | Path) and Path(x).is_dir()):
        return x
    shape = card.sample_shape
    if not isinstance(shape, tuple | list) or len(shape) != 3:
        raise DataError(
            f"{x}: the rows of one client must be in one file, as in training. This is a folder. "
            "Name a file in it. For several clients at once there is recheck."
        )
    height, width = shape[-2:]
    return read_client(Path(x), (height, width), flat=True)


def rows_to_predict(x: Any, card: DataCard) -> Any:
    """Rows to predict: a table or a folder of images as rows; arrays as they are."""
    x = open_folder(x, card)
    if isinstance(x, RawTable | np.ndarray | Tensor | list) or isinstance(card.sample_shape, dict):
        return x
    how = card.encoder.files
    frame = not isinstance(x, str | Path)
    table = read(x, how=Format(na_values=how.na_values) if frame else how)
    index = getattr(x, "index", None)  # of a pandas frame
    return table if index is None or callable(index) else table._replace(rows=np.asarray(index))


def decode(output: Tensor, card: DataCard, algorithm: Algorithm) -> np.ndarray:
    """Outputs of a network as classes by their names, or as numbers in their own unit."""
    if not algorithm.supervised:
        return np.asarray(output.argmax(1))
    if card.task == "classification":
        names = np.asarray(card.encoder.decode(output.argmax(1)))
        whole = all(str(name).lstrip("-").isdigit() for name in card.classes or [])
        return names.astype(np.int64) if whole else names
    output = output.squeeze(1) if output.ndim == 2 and output.shape[1] == 1 else output
    return np.asarray(card.encoder.decode(output))


def to_probabilities(output: Tensor, card: DataCard, algorithm: Algorithm) -> np.ndarray:
    """Outputs of a network as the probability of each class: [n, classes]."""
    if algorithm.supervised and card.task != "classification":
        raise ConfigError(
            f"predict_proba: there must be classes. The task is {card.task}. Use predict."
        )
    return np.asarray(torch.softmax(output.double(), 1))


def tabulate(
    rows: Any, output: Tensor, card: DataCard, algorithm: Algorithm, id: str | None = None
) -> Table:
    """A row per prediction: row or file, prediction, and the probability of each class."""
    columns: dict[str, Any] = {}
    table = rows if isinstance(rows, RawTable) else None
    if id is not None:
        found = {} if table is None else {**table.beside, **table.cells}
        if id not in found:
            raise ConfigError("predict: id: " + unknown("column", id, found))
        columns[id] = found[id].words
    elif table is not None and "file" in table.beside:
        columns["file"] = table.beside["file"].words
    else:
        columns["row"] = (np.arange(len(output)) if table is None else table.rows).tolist()
    columns["prediction"] = decode(output, card, algorithm).tolist()
    if not algorithm.supervised or card.task == "classification":
        chances = to_probabilities(output, card, algorithm)
        names = card.classes if algorithm.supervised else None
        for j in range(chances.shape[1]):
            name = names[j] if names else j
            columns[f"probability of {name}"] = chances[:, j].round(6).tolist()
    return Table(list(columns), list(zip(*columns.values(), strict=True)))
