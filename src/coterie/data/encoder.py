"""Encoders: how rows as a user has them become the inputs and targets of a model.

The rules
---------
numbers
    Standardised by the mean and variance of the federation; a constant column becomes zero.
true and false
    1 and 0.
categories
    One feature for each value seen in training; an unknown value is all zeros. With more than 50
    values: 32 features, the value's hash says which.
text
    Column of words: more than half of the values have a space, and they are more than 50 or mostly
    different. All columns of text are read as one. Weighted words (TF-IDF) in at most 100
    directions (SVD), see `coterie.data.text`.
dates
    Left out, unless they order the split.
missing values
    Numbers: the federation's mean. True and false: its share of true. Categories and text: zeros.
    If a training row lacks a value, one more feature says where it is missing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.config import check_fields
from coterie.core.errors import DataError, unknown
from coterie.data.cells import Cells, RawTable, as_number, to_cells
from coterie.data.formats import FOUND, Format
from coterie.data.frames import to_array
from coterie.data.tables import read
from coterie.data.text import Words, hash_words, unpack, weigh

CATEGORY_BUCKETS = 32
LARGEST = 1e30  # its square fits in float64, itself in float32


@dataclass(frozen=True)
class Rule:
    """How one column becomes features."""

    name: str
    kind: str  # "number", "boolean", "category", "hashed", "text"
    fill: float = 0.0  # stands for a missing number
    shift: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    missing: bool = False  # whether a last feature marks missing values
    with_columns: tuple[str, ...] = ()  # text: columns whose words are added
    buckets: tuple[int, ...] = ()  # text: hashes of the words that count
    weights: tuple[float, ...] = ()  # text: weight of each bucket
    n_directions: int = 0  # text: features
    directions: str = ""  # text: features as combinations of buckets, packed

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        if self.kind == "category":
            names = [f"{self.name}={category}" for category in self.categories]
        elif self.kind in ("hashed", "text"):
            n = CATEGORY_BUCKETS if self.kind == "hashed" else self.n_directions
            names = [f"{self.name}#{bucket}" for bucket in range(n)]
        else:
            names = [self.name]
        return [*names, f"{self.name} is missing"] if self.missing else names

    def encode(self, table: RawTable, out: np.ndarray) -> None:
        """Write the features of every row to zeros [n, features]."""
        cells = table.cells[self.name]
        gone = cells.missing
        if self.missing:
            out[:, -1] = gone
        if self.kind in ("number", "boolean"):
            values = self._numbers(table, cells)
            out[:, 0] = (np.where(gone, self.fill, values) - self.shift) / self.scale
        elif self.kind == "text":
            if self.n_directions:
                texts = join_texts([table.cells[name] for name in (self.name, *self.with_columns)])
                words = Words(np.array(self.buckets, dtype=np.int64), np.array(self.weights))
                directions = unpack(self.directions, self.n_directions)
                out[:, : self.n_directions] = weigh(hash_words(texts), words) @ directions
        else:
            places = {category: j for j, category in enumerate(self.categories)}
            different, codes = cells.code()
            hashed = self.kind == "hashed"
            found = []
            for value in different:
                if value is None:
                    found.append(-1)
                else:
                    found.append(
                        hash_of(value) % CATEGORY_BUCKETS if hashed else places.get(value, -1)
                    )
            place = np.array(found, dtype=np.int64)[codes]
            known = np.flatnonzero(place >= 0)
            out[known, place[known]] = 1

    def _numbers(self, table: RawTable, cells: Cells) -> np.ndarray:
        if cells.values.dtype.kind != "f":
            bad = next(i for i, w in enumerate(cells.words) if w and as_number(w) is None)
            raise DataError(
                f"Column '{self.name}' must hold numbers, as in training. {table.at(bad)} has "
                f"{cells.words[bad]!r}. Correct it or leave it empty."
            )
        check_finite(table, self.name)
        return cells.values


@dataclass(frozen=True, repr=False)
class Encoder:
    """How rows as the user has them become inputs and targets; plain data.

    Parameters
    ----------
    rules
        One for each column that is an input, in the order of the features. Empty for inputs that
        are arrays, of which `shape` and `dtype` speak.
    label
        Column of the target.
    classes
        Names of the labels in the order of their codes; None if the codes are the labels.
    target_mean, target_scale
        What was taken from numbers to predict, and what they were divided by.
    files
        How text files are written; new files are read in the same way.

    >>> table = {"age": [20, 40], "ward": ["a", "b"]}
    >>> encoder = Encoder((Rule("age", "number", 30.0, 30.0, 10.0), Rule("ward", "category",
    ...     categories=("a", "b"))), label="ill", classes=("no", "yes"))
    >>> encoder.encode(table)
    tensor([[-1.,  1.,  0.],
            [ 1.,  0.,  1.]])
    >>> encoder.labels(["yes", "no"]), encoder.decode(torch.tensor([1, 0]))
    (tensor([1, 0]), ['yes', 'no'])
    >>> Encoder.from_dict(encoder.to_dict()) == encoder
    True
    """

    rules: tuple[Rule, ...] = ()
    task: str = "classification"
    label: str | None = None
    classes: tuple[str, ...] | None = None
    target_mean: tuple[float, ...] = ()
    target_scale: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    files: Format = FOUND

    @classmethod
    def of_arrays(
        cls, x: Tensor, task: str, classes: tuple[str, ...] | None, label: str | None = None
    ) -> "Encoder":
        """For inputs that are taken as they are, bytes as floats in [0, 1]."""
        dtype = str(x.dtype).removeprefix("torch.")
        return cls((), task, label, classes, shape=tuple(x.shape[1:]), dtype=dtype)

    @property
    def features(self) -> list[str]:
        """Names of the inputs; none for arrays."""
        return [feature for rule in self.rules for feature in rule.features]

    def encode(self, rows: Any) -> Tensor:
        """Inputs for a model from new rows.

        Parameters
        ----------
        rows
            A data frame, a dict of columns, a CSV or Parquet file; further columns are ignored.
            Or an array with a column for each column of the training data, label left out, in
            its order; for data that were arrays, an array of that shape.
        """
        if not self.rules:
            return self._array(rows)
        if isinstance(rows, RawTable):
            table = rows
        else:
            array = None if _is_table(rows) else to_array(rows, "encode")
            if array is not None and (array.ndim != 2 or array.shape[1] != len(self.rules)):
                raise DataError(
                    f"encode: an array must have {len(self.rules)} columns: {self._names()}. It "
                    f"has shape {list(array.shape)}."
                )
            table = read(rows if array is None else self._columns(array), how=self.files)
        for rule in self.rules:
            if rule.name not in table.cells:
                raise DataError(
                    f"{table.source}: there must be a column '{rule.name}', as in training. Got "
                    f"{', '.join(table.cells)}. Add it; its cells may be empty."
                )
        ends = np.cumsum([len(rule.features) for rule in self.rules])
        out = torch.zeros(len(table.rows), int(ends[-1]), dtype=torch.get_default_dtype())
        for rule, block in zip(self.rules, np.split(out.numpy(), ends[:-1], axis=1), strict=True):
            rule.encode(table, block)
        return out

    def labels(self, values: Any) -> Tensor:
        """Targets for a model: from values, or from the label column of a table."""
        if isinstance(values, RawTable):
            table = values
        elif _is_table(values):
            table = read(values, how=self.files)
        else:
            array = to_array(values, "labels")
            table = RawTable("labels", {self.label or "y": to_cells(array)}, np.arange(len(array)))
        name = self.label or "y"
        if name not in table.cells:
            raise DataError(
                f"{table.source}: there must be a label column '{name}'. Got "
                f"{', '.join(table.cells)}."
            )
        cells = table.cells[name]
        if cells.missing.any():
            raise DataError(
                f"{table.at(int(cells.missing.argmax()))} must have a label in column '{name}'. "
                f"It has none. Fill it or remove the row."
            )
        if self.task == "classification":
            return self._codes(table, name)
        if cells.values.dtype.kind != "f":
            raise DataError(f"{table.source}: label column '{name}' must hold numbers. Got text.")
        if self.target_mean:
            scaled = (cells.values - np.array(self.target_mean)) / np.array(self.target_scale)
            return torch.tensor(scaled, dtype=torch.get_default_dtype())
        return torch.tensor(cells.values, dtype=torch.get_default_dtype())

    def decode(self, y: Tensor) -> Any:
        """Targets as the user has them: class names for codes [n], numbers in their own unit."""
        if self.task == "classification":
            codes = y.tolist()
            return codes if self.classes is None else [self.classes[code] for code in codes]
        if not self.target_mean:
            return y
        mean, scale = (
            torch.tensor(v, dtype=y.dtype) for v in (self.target_mean, self.target_scale)
        )
        return y * scale + mean

    def __repr__(self) -> str:
        inputs = f"{len(self.rules)} columns" if self.rules else f"arrays {list(self.shape)}"
        return f"Encoder({inputs}, {self.task}, label {self.label!r})"

    def to_dict(self) -> dict[str, Any]:
        """The encoder as plain data, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Encoder":
        """The encoder from plain data."""
        rules = tuple(Rule(**_tuples(rule)) for rule in plain["rules"])
        files = Format(**_tuples(plain.get("files", {})))
        encoder = cls(**{**_tuples(plain), "rules": rules, "files": files})
        for part in (encoder, files, *rules):
            check_fields(part)
        return encoder

    def _names(self) -> str:
        return ", ".join(rule.name for rule in self.rules)

    def _columns(self, array: np.ndarray) -> dict[str, np.ndarray]:
        return {rule.name: array[:, j] for j, rule in enumerate(self.rules)}

    def _array(self, rows: Any) -> Tensor:
        if isinstance(rows, RawTable) or _is_table(rows):
            table = rows if isinstance(rows, RawTable) else read(rows, how=self.files)
            if table.x is None:
                columns = [c.values for name, c in table.cells.items() if name != "y"]
                rows = np.stack(columns, axis=1) if columns else np.zeros((0, 0))
            else:
                rows = table.x
        array = to_array(rows, "encode")
        if array.shape[1:] != self.shape or array.dtype.kind not in "biuf":
            raise DataError(
                f"encode: samples must be numbers of shape {list(self.shape)}, as in training. "
                f"Got {array.dtype} of shape {list(array.shape[1:])}."
            )
        if self.dtype == "uint8":
            scale = 255 if array.dtype == np.uint8 else 1
            return torch.tensor(array, dtype=torch.get_default_dtype()) / scale
        if self.dtype.startswith("int"):
            return torch.tensor(array, dtype=torch.int64)
        return torch.tensor(array, dtype=torch.get_default_dtype())

    def _codes(self, table: RawTable, name: str) -> Tensor:
        cells = table.cells[name]
        if self.classes is None:
            return torch.tensor(cells.values.astype(np.int64))
        places = {label: code for code, label in enumerate(self.classes)}
        words, codes = cells.code()
        for i, word in enumerate(words):
            if str(word) not in places:
                first = int((codes == i).argmax())
                raise DataError(f"{table.at(first)}: " + unknown("label", str(word), self.classes))
        return torch.tensor([places[str(word)] for word in words], dtype=torch.int64)[codes]


def join_texts(columns: Sequence[Cells]) -> list[str]:
    """The text of every row in all of some columns."""
    texts = zip(*(cells.words for cells in columns), strict=True)
    return [" ".join(word for word in row if word is not None) for row in texts]


def _tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}


def _is_table(value: Any) -> bool:
    """Whether a value has named columns, or is a path."""
    return (
        isinstance(value, str | Mapping)
        or hasattr(value, "columns")
        or hasattr(value, "column_names")
        or hasattr(value, "__fspath__")
    )


def check_finite(table: RawTable, name: str) -> None:
    """Refuse a column of numbers in which one is infinite, or too large to compute with."""
    large = np.abs(table.cells[name].values) > LARGEST
    if large.any():
        row = int(large.argmax())
        raise DataError(
            f"Column '{name}' must hold finite numbers, at most {LARGEST:g}. {table.at(row)} has "
            f"{table.cells[name].values[row]:g}. Correct it or leave it empty."
        )


def hash_of(value: str) -> int:
    """A number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
