"""FEMNIST: handwritten characters by writer: Parquet, LEAF's JSON, or IDX and a list of writers.

Caldas et al.: LEAF, a benchmark for federated settings, 2018, arXiv:1812.01097. Black ink on white.
LEAF's grouping step stores the first image of almost every writer twice; both copies are kept.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import ConfigError, DataError
from coterie_lab.sources.files import File, Layout, Pool, Source, content
from coterie_lab.sources.idx import _LETTERS as LETTERS
from coterie_lab.sources.idx import read_idx

WRITERS = 3597
_JSON = 36  # files that LEAF writes


def _pool(x: torch.Tensor, y: torch.Tensor, writers: list[str], counts: list[int]) -> Pool:
    owner = torch.arange(len(writers)).repeat_interleave(torch.tensor(counts))
    return Pool(x, y, len(y), LETTERS, (), owner, tuple(writers))


def _idx(folder: Path) -> Pool:
    x = read_idx(folder, "femnist/femnist-images-idx3-ubyte.gz")
    y = read_idx(folder, "femnist/femnist-labels-idx1-ubyte.gz")
    text = content(folder, "femnist/femnist-writers.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    counts = [int(row["num_samples"]) for row in rows]
    if sum(counts) != len(y) or len(x) != len(y):
        raise DataError(
            f"{folder / 'femnist'}: images, labels and writers do not match. Get them again."
        )
    return _pool(x[:, None], y, [row["writer"] for row in rows], counts)


def _json(folder: Path) -> Pool:
    """Read LEAF's files: pixels are floats in [0, 1], that is, bytes divided by 255."""
    xs, ys, writers, counts = [], [], [], []
    below = folder / "femnist"
    names = {path.name.removesuffix(".gz") for path in below.glob("all_data_*.json*")}
    for name in sorted(names, key=lambda n: (len(n), n)):
        try:
            found = json.loads(content(folder, f"femnist/{name}.gz"))
            for user in found["users"]:
                own = found["user_data"][user]
                pixels = np.asarray(own["x"], dtype=np.float64).reshape(-1, 28, 28)
                xs.append(np.rint(pixels * 255).astype(np.uint8))
                ys.append(np.asarray(own["y"], dtype=np.uint8))
                writers.append(user)
                counts.append(len(ys[-1]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{below / name} must be a file written by LEAF ({error}). Get it again."
            ) from error
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    return _pool(x[:, None], y, writers, counts)


def _parquet(folder: Path) -> Pool:
    """Read the columns `image` (a PNG), `writer_id` and `character` (the number of the class)."""
    try:
        import pyarrow
        from PIL import Image
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "FEMNIST: reading Parquet needs pyarrow and Pillow, which are not installed. "
            "Install them with: pip install 'coterie[tables,images]'"
        ) from error
    path = folder / PARQUET
    try:
        table = parquet.read_table(path, columns=["image", "writer_id", "character"])
        names = np.asarray(table["writer_id"].to_pylist())
        order = names.argsort(kind="stable")
        writers, counts = np.unique(names, return_counts=True)
        y = torch.tensor(table["character"].to_pylist(), dtype=torch.uint8)[order]
        x = torch.empty(len(y), 28, 28, dtype=torch.uint8)
        place = iter(order.argsort().tolist())
        for batch in table.select(["image"]).to_batches():
            for picture in batch["image"].field("bytes"):
                with Image.open(io.BytesIO(picture.as_py())) as image:
                    x[next(place)] = torch.from_numpy(np.array(image.convert("L")))
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{path} must be a Parquet file with the columns image, writer_id and character "
            f"({error}). Get it again."
        ) from error
    return _pool(x[:, None], y, writers.tolist(), counts.tolist())


PARQUET = "femnist/femnist.parquet"
# The version that Hugging Face converted on 24 June 2024; its checksum is not published.
_ADDRESS = (
    "https://huggingface.co/datasets/flwrlabs/femnist/resolve/"
    "e3219ce09911a0053b27146284f7c5414a7efeec/default/train/0000.parquet"
)
FEMNIST = Source(
    "femnist",
    "FEMNIST by writer",
    "huggingface.co/datasets/flwrlabs/femnist, or github.com/TalwalkarLab/leaf",
    "BSD 2-clause; images: US government",
    (
        Layout((File(PARQUET, None, _ADDRESS),), _parquet),
        Layout(tuple(File(f"femnist/all_data_{i}.json.gz") for i in range(_JSON)), _json),
        Layout(
            (
                File("femnist/femnist-images-idx3-ubyte.gz", "2a37cdd1a349237bc326f3391fdcd32a"),
                File("femnist/femnist-labels-idx1-ubyte.gz", "e99e50d762e6b4a5a9c8135488086edd"),
                File("femnist/femnist-writers.csv", "e380fc59cb189f4633bc61e7d99b19dd"),
            ),
            _idx,
            f"FEMNIST: only 720 of {WRITERS:,} writers were found.",
        ),
        Layout(
            (File("femnist/all_data_0.json.gz"),),
            _json,
            f"FEMNIST: some of LEAF's {_JSON} files were not found.",
        ),
    ),
)
