"""Tables of the UCI repository that FedGEM uses: Abalone, Waveform, Anuran calls.

All rows are training rows; a partition splits them. archive.ics.uci.edu, CC BY 4.0.
"""

import csv
import io
from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie_lab.sources.files import File, Layout, Pool, Source, content

RINGS = (6, 7, 8, 9, 10, 11, 13)  # upper ends of FedGEM's classes; the last class has no upper end


def _table(folder: Path, path: str) -> list[list[str]]:
    rows = [row for row in csv.reader(io.StringIO(content(folder, path).decode())) if row]
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise DataError(
            f"{folder / path}: all lines must have the same number of values. Get it again."
        )
    return rows


def _pool(folder: Path, path: str, x: list[list[str]], y: list[int], classes: list[str]) -> Pool:
    try:
        values = torch.from_numpy(np.array(x, dtype=np.float32))
    except ValueError as error:
        raise DataError(f"{folder / path}: {error}. Get it again.") from error
    return Pool(values, torch.tensor(y, dtype=torch.uint8), len(y), tuple(classes))


def _abalone(folder: Path) -> Pool:
    """Read seven measurements; the number of rings, in eight classes, is the label."""
    rows = _table(folder, "uci/abalone.data.gz")
    y = [sum(int(row[-1]) > end for end in RINGS) for row in rows]
    names = ["to 6", "7", "8", "9", "10", "11", "12-13", "14 and more"]
    return _pool(folder, "uci/abalone.data.gz", [row[1:-1] for row in rows], y, names)


def _waveform(folder: Path) -> Pool:
    """Read 21 numbers; the label is one of three classes of waves."""
    rows = _table(folder, "uci/waveform.data.gz")
    y = [int(row[-1]) for row in rows]
    return _pool(folder, "uci/waveform.data.gz", [row[:-1] for row in rows], y, ["0", "1", "2"])


def _anuran(folder: Path, column: int) -> Pool:
    """Read coefficients 2 to 22 of frog calls (the first is constant); species or genus."""
    rows = _table(folder, "uci/Frogs_MFCCs.csv.gz")[1:]
    names = sorted({row[column] for row in rows})
    y = [names.index(row[column]) for row in rows]
    return _pool(folder, "uci/Frogs_MFCCs.csv.gz", [row[1:22] for row in rows], y, names)


def _source(name: str, title: str, number: int, file: File, read: object) -> Source:
    return Source(
        name,
        title,
        f"archive.ics.uci.edu/dataset/{number}",
        "CC BY 4.0",
        (Layout((file,), read),),  # type: ignore[arg-type]
        by_hand="Download the archive from the address below and unpack it into uci/",
    )


# The archive's own file may have other line ends than the copy that the pages used, whose checksum
# this is, so that of the first download counts for it.
_FROGS = File(
    "uci/Frogs_MFCCs.csv.gz",
    "4f96f6ee55e198511316eee61a565dc0",
    "https://archive.ics.uci.edu/static/public/406/anuran+calls+mfccs.zip",
    member="Frogs_MFCCs.csv",
)
ABALONE = _source(
    "abalone",
    "UCI Abalone",
    1,
    File(
        "uci/abalone.data.gz",
        "28dff5498959de5274c59f488e871501",
        "https://archive.ics.uci.edu/ml/machine-learning-databases/abalone/abalone.data",
    ),
    _abalone,
)
WAVEFORM = _source(
    "waveform",
    "UCI Waveform, version 1",
    107,
    File(
        "uci/waveform.data.gz",
        "fe5f1098d545bd46fc9996d6de125d1d",
        "https://archive.ics.uci.edu/ml/machine-learning-databases/waveform/waveform.data.Z",
        inner="f32983d139f94aeed2a103b6d2569d55",
    ),
    _waveform,
)
ANURAN_SPECIES = _source(
    "anuran_species", "UCI Anuran calls, species", 406, _FROGS, lambda folder: _anuran(folder, 24)
)
ANURAN_GENUS = _source(
    "anuran_genus", "UCI Anuran calls, genus", 406, _FROGS, lambda folder: _anuran(folder, 23)
)
