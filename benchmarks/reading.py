"""How long Coterie takes to read a folder of tables, beside pyarrow, polars and pandas alone.

    python benchmarks/reading.py FOLDER LABEL [REPEATS]

Every way reads every file of the folder, one after the other, in the same process; repeats are
interleaved. The libraries give tables as they stand in the files. `read_file` also decides what
each column is, and `from_folder` gives a federation: split, encoded, checked, with warnings.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas
import polars
from pyarrow import csv

from coterie.data import from_folder
from coterie.data.tables import read_file

MISSING = ["", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "NAN", "null", "NULL"]


def ways(folder: Path, label: str) -> dict[str, Callable[[], object]]:
    """What is measured."""
    files = sorted(folder.iterdir())
    convert = csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
    return {
        "pyarrow": lambda: [csv.read_csv(file, convert_options=convert) for file in files],
        "polars": lambda: [
            polars.read_csv(file, null_values=MISSING, infer_schema_length=None) for file in files
        ],
        "pandas": lambda: [pandas.read_csv(file) for file in files],
        "read_file": lambda: [read_file(file) for file in files],
        "from_folder": lambda: from_folder(folder, label),
    }


def main() -> None:
    """Print the median seconds of each way, by the clock and of the processors."""
    folder, label = Path(sys.argv[1]), sys.argv[2]
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    wall: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, read in ways(folder, label).items():
            start, before = time.perf_counter(), time.process_time()
            read()
            if repeat:  # the first one warms up
                wall.setdefault(name, []).append(time.perf_counter() - start)
                busy.setdefault(name, []).append(time.process_time() - before)
    print("             seconds   of processors   times pyarrow (clock, processors)")
    clock, used = statistics.median(wall["pyarrow"]), statistics.median(busy["pyarrow"])
    for name in wall:
        a, b = statistics.median(wall[name]), statistics.median(busy[name])
        print(f"{name:12} {a:7.3f}   {b:13.3f}   {a / clock:5.2f} {b / used:6.2f}")


if __name__ == "__main__":
    main()
