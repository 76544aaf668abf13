"""The data card: what must be known of a federation's data in order to use its models."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from coterie.core.config import check_fields
from coterie.data.encoder import Encoder
from coterie.data.federated import FederatedData
from coterie.data.warnings import DataWarning


@dataclass(frozen=True, repr=False)
class DataCard:
    """The kind of data a federation has, and how new rows are prepared. It holds no data.

    Parameters
    ----------
    task
        "classification", "regression" or "reconstruction".
    n_outputs
        Number of classes, or of values to predict.
    classes
        Names of the labels; None if labels are numbers from 0.
    sample_shape
        Shape of one input; for a dict of inputs, a dict of shapes.
    encoder
        How rows become inputs and targets.
    names
        Names of the clients.
    truth
        True group of each client, where it is known.
    notes
        What was decided while the data were read.
    reading
        What was read, in one line.
    warnings
        What may be wrong with the data.

    >>> from coterie.data import from_arrays
    >>> card = DataCard.of(from_arrays([[[1.0], [2.0]]], [["no", "yes"]], names=["ann"]))
    >>> card.task, card.classes, card.names
    ('classification', ('no', 'yes'), ('ann',))
    >>> DataCard.from_dict(card.to_dict()) == card
    True
    """

    task: str
    n_outputs: int
    classes: tuple[str, ...] | None
    sample_shape: Any
    encoder: Encoder
    names: tuple[str, ...] = ()
    truth: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    reading: str = ""
    warnings: tuple[DataWarning, ...] = ()

    extra: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # only simulated data have more truth

    @classmethod
    def of(cls, data: FederatedData) -> "DataCard":
        """The card of some data."""
        return cls(
            data.task,
            data.n_outputs,
            data.classes,
            data.sample_shape,
            _encoder(data),
            data.names,
            None if data.truth is None else tuple(data.truth.tolist()),
            data.notes,
            data.reading,
            data.warnings,
        )

    def __repr__(self) -> str:
        return f"DataCard({len(self.names)} clients, {self.task}, {self.n_outputs} outputs)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `final/data.json` holds them."""
        return {
            "task": self.task,
            "n_outputs": self.n_outputs,
            "classes": None if self.classes is None else list(self.classes),
            "sample_shape": self.sample_shape,
            "names": list(self.names),
            "truth": None if self.truth is None else list(self.truth),
            "encoder": self.encoder.to_dict(),
            "notes": list(self.notes),
            "reading": self.reading,
            "warnings": [warning._asdict() for warning in self.warnings],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "DataCard":
        """The card that `to_dict` wrote."""
        shape, classes, truth = plain["sample_shape"], plain["classes"], plain["truth"]
        if isinstance(shape, dict):
            shape = {name: tuple(part) for name, part in shape.items()}
        card = cls(
            plain["task"],
            plain["n_outputs"],
            None if classes is None else tuple(classes),
            shape if isinstance(shape, dict) else tuple(shape),
            Encoder.from_dict(plain["encoder"]),
            tuple(plain["names"]),
            None if truth is None else tuple(truth),
            tuple(plain["notes"]),
            plain.get("reading", ""),
            tuple(DataWarning(**warning) for warning in plain.get("warnings", [])),
        )
        check_fields(card)
        return card


def _encoder(data: FederatedData) -> Encoder:
    """The rules for new rows; synthetic problems have none and take arrays as they are."""
    if data.encoder is not None:
        return data.encoder
    if isinstance(data.sample_shape, dict):
        return Encoder(task=data.task, classes=data.classes)
    sample = data.gather("train", torch.tensor([0])).x[0]
    return Encoder.of_arrays(sample, data.task, data.classes)
