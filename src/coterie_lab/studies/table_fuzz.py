"""Damage data files at random and read them: every format, damaged bytes and odd content.

    python -m coterie_lab.studies.table_fuzz --tables 20000 --json tables.json

Each folder has two clients with a file each, or images, of which one is damaged: bytes flipped,
cut, removed or put in, before or after packing, and cells and headers replaced. It must be read, or
refused by an error of Coterie, within ten seconds.
"""

import argparse
import contextlib
import gzip
import io
import json
import random
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.errors import CoterieError
from coterie.data import from_folder
from coterie_lab.studies.common import write
from coterie_lab.studies.folder_fuzz import MEMORY_DISK, SECONDS, largest_mb, limit, remove

ROWS = [(i, round(i * 0.37 - 2, 2), "abc"[i % 3], ("yes", "no")[i % 2]) for i in range(24)]
NAMES = ("a", "b", "kind", "y")
CELLS = [
    "", " ", "NA", "-9", "inf", "-inf", "nan", "1e400", "1e-400", "0x10", "1_000", "1,5", "\x00",
    "\x1b[31m", "\ud7ff", "x" * 100_000, '"', "''", "=1+1", "2020-13-45", "True", "é", "\ufeff",
    "9" * 400, "-", "1e", "\r", "\n", "\u2028", "[]", "{}", "null", "\x85",
]  # fmt: skip
_BROKEN = (ValueError, LookupError, TypeError, OverflowError)


# Files that are well


def as_text(rows: list[Any], names: Any, separator: str = ",") -> bytes:
    lines = [separator.join(map(str, line)) for line in [names, *rows]]
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def as_jsonl(rows: list[Any], names: Any) -> bytes:
    lines = [json.dumps(dict(zip(names, row, strict=False))) for row in rows]
    return ("\n".join(lines) + "\n").encode()


def as_arrow(rows: list[Any], names: Any, kind: str) -> bytes:
    import pyarrow
    from pyarrow import feather, parquet

    columns = {str(name): [row[j] for row in rows] for j, name in enumerate(names)}
    try:
        table = pyarrow.table(columns)
    except (pyarrow.ArrowException, *_BROKEN):  # of mixed types
        table = pyarrow.table({name: list(map(str, part)) for name, part in columns.items()})
    out = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, out)
    else:
        feather.write_feather(table, out, compression="uncompressed")
    return out.getvalue()


def as_excel(rows: list[Any], names: Any) -> bytes:
    from openpyxl import Workbook
    from openpyxl.utils.exceptions import IllegalCharacterError

    book, out = Workbook(), io.BytesIO()
    for line in [names, *rows]:
        with contextlib.suppress(IllegalCharacterError, *_BROKEN):
            book.active.append(list(line))
    book.save(out)
    return out.getvalue()


def as_npz(rows: list[Any], names: Any) -> bytes:
    out = io.BytesIO()
    x = np.array([[float(j == 1) + i for j in range(3)] for i in range(len(rows))])
    np.savez(out, x=x, y=np.arange(len(rows)) % 2)
    return out.getvalue()


def as_zip(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.csv", data)
    return out.getvalue()


def as_png() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(out, "PNG")
    return out.getvalue()


KINDS: dict[str, Callable[[list[Any], Any], bytes]] = {
    "csv": as_text,
    "tsv": lambda rows, names: as_text(rows, names, "\t"),
    "data": lambda rows, names: as_text(rows, names, ";"),
    "csv.gz": lambda rows, names: gzip.compress(as_text(rows, names)),
    "csv.zip": lambda rows, names: as_zip(as_text(rows, names)),
    "jsonl": as_jsonl,
    "parquet": lambda rows, names: as_arrow(rows, names, "parquet"),
    "feather": lambda rows, names: as_arrow(rows, names, "feather"),
    "xlsx": as_excel,
    "npz": as_npz,
    "png": lambda rows, names: as_png(),
}


# Damage


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, remove or put in some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out)) if out else 0
        what = rng.random()
        if what < 0.4 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif what < 0.6:
            del out[at:]
        elif what < 0.8:
            del out[at : at + rng.choice((1, 4, 50))]
        else:
            out[at:at] = rng.choice((rng.randbytes(4), b"\0" * 50, b"\xff\xfe", b"\n", b'"', b"PK"))
    return bytes(out)


def damage_rows(rng: random.Random) -> tuple[list[list[Any]], list[Any]]:
    """Rows and names with odd cells, of other lengths, or none at all."""
    rows, names = [list(row) for row in ROWS], list(NAMES)
    for _ in range(rng.choice((1, 1, 2, 5))):
        what, row = rng.random(), rng.choice(rows) if rows else []
        if what < 0.5 and row:
            row[rng.randrange(len(row))] = rng.choice(CELLS)
        elif what < 0.6:
            row.append(rng.choice(CELLS))
        elif what < 0.7:
            names[rng.randrange(len(names))] = rng.choice([*CELLS, "a", "y"])
        elif what < 0.8:
            rows = rows[: rng.randrange(len(rows) + 1)]
        elif what < 0.9:
            column, cell = rng.randrange(4), rng.choice(CELLS)
            for line in rows:
                line[column : column + 1] = [cell]
        else:
            rows += [row] * rng.choice((1, 300))
    return rows, names


def make(folder: Path, kind: str, rng: random.Random) -> None:
    """Two clients; the file of the first is damaged."""
    rows, names = ([list(row) for row in ROWS], list(NAMES))
    odd_rows = rng.random() < 0.5 and kind not in ("png", "npz")
    first = damage_rows(rng) if odd_rows else (rows, names)
    try:
        data = KINDS[kind](*first)
    except (IndexError, *_BROKEN):  # rows that this format cannot hold
        data, odd_rows = KINDS[kind](rows, names), False
    if not odd_rows or rng.random() < 0.3:
        if kind == "csv.gz" and rng.random() < 0.5:
            data = gzip.compress(damage_bytes(gzip.decompress(data), rng))
        else:
            data = damage_bytes(data, rng)
    good = KINDS[kind](rows, names)
    if kind != "png":
        (folder / f"north.{kind}").write_bytes(data)
        (folder / f"south.{kind}").write_bytes(good)
        return
    for client in ("north", "south"):
        for label in ("cat", "dog"):
            (folder / client / label).mkdir(parents=True)
            for number in range(2):
                (folder / client / label / f"{number}.png").write_bytes(good)
    (folder / "north" / "cat" / "0.png").write_bytes(data)


def try_one(folder: Path, rng: random.Random) -> dict[str, Any]:
    """Make a folder, read it; what happened."""
    kind = rng.choice(list(KINDS))
    make(folder, kind, rng)
    label = None if kind in ("png", "npz") else "y"
    began, said = time.perf_counter(), ""
    try:
        with warnings.catch_warnings(), limit(SECONDS):
            warnings.simplefilter("ignore")
            data = from_folder(folder, label=label)
            str(data)
            data.gather("train", torch.arange(len(data)))
        end = "read"
    except CoterieError as error:
        end = "refused"
        if not str(error).strip() or len(str(error)) > 2000:
            end, said = "foreign", f"an error of {len(str(error))} letters"
    except Exception as error:
        end, said = "foreign", f"{type(error).__name__}: {str(error)[:150]}"
    seconds = time.perf_counter() - began
    for path in list(folder.iterdir()):
        remove(path)
    return {"kind": kind, "end": end, "said": said, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ends: dict[str, int] = {}
    odd: dict[str, Any] = {}
    slowest: dict[str, Any] = {"seconds": 0.0}
    foreign = 0
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as place:
        try_one(Path(place), random.Random(0))  # what is imported late is no growth
        before = largest_mb()
        for number in range(options.tables):
            found = try_one(Path(place), random.Random(f"{options.seed}/{number}"))
            name = f"{found['kind']} {found['end']}"
            ends[name] = ends.get(name, 0) + 1
            if found["end"] == "foreign":
                foreign += 1
                kind = f"{found['kind']} {found['said'][:60]}"
                odd.setdefault(kind, {"number": number, **found})
            slowest = max(slowest, {"number": number, **found}, key=lambda one: one["seconds"])
    figures = {
        "tables": options.tables,
        "seed": options.seed,
        "foreign": foreign,
        "ends": dict(sorted(ends.items())),
        "largest_mb": largest_mb(),
        "growth_mb": round(largest_mb() - before, 1),
        "slowest": slowest,
        "odd": odd,
    }
    write(options.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
