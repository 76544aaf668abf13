"""Files that ask for too much, and names that look alike, are refused before any work."""

import gzip
import io
import os
import struct
import time
import zipfile
import zlib

import numpy as np
import pytest

from coterie.core.errors import DataError
from coterie.data import from_folder, from_table, limits

ROWS = "a,b,y\n" + "".join(f"{i},{2 * i},{i % 2}\n" for i in range(12))


@pytest.fixture
def sites(tmp_path):
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(ROWS)
    return tmp_path


def refused(folder, sentence, label="y", **options):
    with pytest.raises(DataError, match=sentence) as error:
        from_folder(folder, label=label, **options)
    assert "\n" not in str(error.value)


def png(path, width, height, rows=b""):
    def chunk(kind, body):
        sum_ = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + sum_

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows or (b"\0" + bytes(width)) * height))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b""))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [9_500, 50_000])
def test_an_image_is_refused_by_the_size_it_declares(tmp_path, side):
    for client in ("a", "b"):
        for kind in ("cat", "dog"):
            (tmp_path / client / kind).mkdir(parents=True)
            png(tmp_path / client / kind / "0.png", 8, 8)
    assert len(from_folder(tmp_path, test_fraction=0)) == 2
    png(tmp_path / "a" / "cat" / "1.png", side, side, bytes(1000))
    refused(tmp_path, r"a/cat/1\.png: an image must have at most 80,000,000 pixels", None, size=8)


def test_an_array_must_be_as_large_as_it_declares(tmp_path):
    head = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (2**33, 4)}
    np.lib.format.write_array_header_1_0(head, about)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", head.getvalue() + bytes(64))
    refused(tmp_path, r"a\.npz: a \.npz file must hold plain arrays", None)


def test_files_that_unpack_to_far_more_than_their_size_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "UNPACKED", 10_000)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((100_000, 4)), y=np.zeros(100_000, int))
    refused(tmp_path, r"a\.npz: a compressed file may unpack to 200 times its size", None)
    (tmp_path / "a.npz").unlink()
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(ROWS.encode() + b"1,2,0\n" * 200_000))
    refused(tmp_path, r"a\.csv\.gz: a compressed file may unpack")
    (tmp_path / "a.csv.gz").unlink()
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.csv", ROWS + "1,2,0\n" * 200_000)
    (tmp_path / "a.zip").rename(tmp_path / "a.csv.zip")
    refused(tmp_path, r"a\.csv\.zip: a compressed file may unpack")


def test_ordinary_compressed_files_are_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    assert len(from_folder(tmp_path, label="y")) == 2


def test_a_table_of_too_many_columns_is_refused_at_once(sites):
    names = ",".join(f"c{j}" for j in range(100_000))
    (sites / "north.csv").write_text(f"{names}\n{','.join(['1'] * 100_000)}\n")
    began = time.perf_counter()
    refused(sites, r"north\.csv: a table must have at most 20,000 columns\. It has 100,000\.")
    assert time.perf_counter() - began < 10  # 100,000 searches of the header took over a minute


def test_a_link_out_of_the_folder_is_refused(sites, tmp_path_factory):
    away = tmp_path_factory.mktemp("away") / "secret.csv"
    away.write_text(ROWS)
    (sites / "west.csv").symlink_to(sites / "north.csv")
    assert len(from_folder(sites, label="y")) == 3
    (sites / "east.csv").symlink_to(away)
    refused(sites, r"east\.csv: a link must stay in the folder")


def test_a_linked_image_folder_is_refused(tmp_path, tmp_path_factory):
    away = tmp_path_factory.mktemp("away")
    png(away / "0.png", 8, 8)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cat").symlink_to(away)
    refused(tmp_path, "cat: a link must stay in the folder", None)


def test_a_pipe_is_not_waited_for(sites):
    os.mkfifo(sites / "east.csv")
    refused(sites, r"east\.csv: the data must be in a plain file")


@pytest.mark.parametrize(
    "names", [("\u00c5", "A\u030a"), ("\ufb01", "fi"), ("a b", "a  b"), ("a", "a\u00a0")]
)
def test_names_that_look_alike_are_refused(names):
    rows = {"who": [n for n in names for _ in range(4)], "a": [*range(8)], "y": [0, 1] * 4}
    if names[1].strip() == names[0]:
        note = "Names in column 'who' that differ in spaces around them are one client."
        assert note in from_table(rows, client="who", label="y").notes
    else:
        with pytest.raises(DataError, match="client names must differ in more than spaces") as said:
            from_table(rows, client="who", label="y")
        assert str(said.value).isascii()  # or nobody would see the difference


def test_a_name_has_a_length():
    rows = {"who": ["x" * 300] * 4 + ["b"] * 4, "a": [*range(8)], "y": [0, 1] * 4}
    with pytest.raises(DataError, match="a client's name must have 1 to 200 letters"):
        from_table(rows, client="who", label="y")
