"""A run as its folder tells it: the rounds, and the truth where it is known."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, DataError
from coterie.running.folder import RunFolder, read_json

# Names as the papers spell them, where capitals alone do not give them.
SPELLED = {
    "local_only": "Local only",
    "fedavg": "FedAvg",
    "ifca": "IFCA",
    "clove": "CLoVE",
    "census": "Census",
}
LABEL = 28  # letters of a label before it is cut


@dataclass(frozen=True)
class Record:
    """One run, to be drawn or tabulated."""

    folder: Path
    label: str
    rounds: list[dict[str, Any]]
    truth: list[int] | None = None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The rounds that have a figure, and the figure."""
        pairs = [(line["round"], line[name]) for line in self.rounds if line.get(name) is not None]
        return [number for number, _ in pairs], [value for _, value in pairs]

    def assignments(self) -> dict[int, list[int]]:
        """Groups of the clients by round; empty for a method without groups."""
        return {line["round"]: line["assignment"] for line in self.rounds if "assignment" in line}


def read(folders: Sequence[str | Path]) -> list[Record]:
    """The runs in these folders, each with a label no other has."""
    if not folders:
        raise ConfigError("Report: at least one run folder must be named. Got none.")
    records = [_read(Path(folder)) for folder in folders]
    labels = [record.label for record in records]
    for parts in (1, 2, None):  # as much of the path as it takes to tell runs apart
        twice = {label for label, times in Counter(labels).items() if times > 1}
        labels = [
            _longer(record, parts) if label in twice else label
            for record, label in zip(records, labels, strict=True)
        ]
    return [replace(r, label=_cut(label)) for r, label in zip(records, labels, strict=True)]


def _read(path: Path) -> Record:
    folder = RunFolder(path)
    name = str(folder.description().get("algorithm", {}).get("name", path.name))
    rounds = folder.lines()
    if not rounds:
        raise DataError(f"{path}: no round is finished yet. Continue with: coterie resume {path}")
    truth = None
    if (folder.final / "data.json").exists():
        truth = read_json(folder.final / "data.json").get("truth")
    return Record(path, SPELLED.get(name, name), rounds, truth)


def _longer(record: Record, parts: int | None) -> str:
    path = record.folder.resolve()
    end = path.parts if parts is None else path.parts[-parts:]
    return f"{record.label} ({Path(*end)})"


def _cut(label: str) -> str:
    """Keep the end of a long label, which tells runs apart."""
    return label if len(label) <= LABEL else f"{label[:9]}…{label[10 - LABEL :]}"
