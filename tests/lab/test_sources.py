"""Public data sets: formats as published, damaged and missing files, downloads."""

import gzip
import hashlib
import http.server
import io
import json
import os
import random
import struct
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import ConfigError, DataError
from coterie_lab import sources
from coterie_lab.sources import SOURCES, cifar, femnist, idx, text, uci
from coterie_lab.sources.files import File, Layout, Pool, Source, cache, folders, verdict
from coterie_lab.sources.get import get
from coterie_lab.sources.lzw import unpack_z

real = pytest.mark.skipif(
    "COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set: needs the data sets"
)


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes as the IDX format has it."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def put(folder: Path, name: str, content: bytes, pack: bool = True) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if pack and name.endswith(".gz") else content)
    return path


def mnist(folder: Path, packed: bool = True) -> None:
    """Three training images and two test images."""
    x = np.arange(5 * 784).reshape(5, 28, 28) % 256
    y = np.array([3, 1, 4, 1, 5])
    parts = (x[:3], y[:3], x[3:], y[3:])
    for name, part in zip(idx._PARTS, parts, strict=True):
        put(folder, f"mnist/{name}" + (".gz" if packed else ""), idx_bytes(part))


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path, packed):
    mnist(tmp_path, packed)
    pool = SOURCES["mnist"].load(tmp_path)
    assert pool.x.shape == (5, 1, 28, 28)
    assert pool.y.tolist() == [3, 1, 4, 1, 5]
    assert pool.rows("test").tolist() == [3, 4]
    assert pool.x[0, 0, 0, :3].tolist() == [0, 1, 2]


def test_damaged_files_are_named(tmp_path):
    mnist(tmp_path)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged"):
        SOURCES["mnist"].load(tmp_path)
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((3, 28, 28)))[:-1]))
    with pytest.raises(DataError, match="values for shape"):
        SOURCES["mnist"].load(tmp_path)
    path.write_bytes(gzip.compress(b"not this"))
    with pytest.raises(DataError, match="not an IDX file"):
        SOURCES["mnist"].load(tmp_path)


def test_missing_files_are_named_with_the_way_out(tmp_path):
    with pytest.raises(DataError) as raised:
        sources.load("cifar10", tmp_path)
    text_ = str(raised.value)
    for part in ("cifar-10-binary.tar.gz", str(tmp_path), "coterie data get cifar10", "quickstart"):
        assert part in text_
    with pytest.raises(DataError, match="coterie data get femnist"):
        sources.load("femnist", tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'mnist'"):
        sources.load("mnits")


def test_folders_are_the_named_one_or_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert folders() == [tmp_path / "a", tmp_path / "b" / "coterie" / "data"]
    assert folders(tmp_path) == [tmp_path]
    mnist(cache())
    found = SOURCES["mnist"].find()
    assert found is not None
    assert found[0] == cache()


def test_cifar_is_the_same_from_archive_and_files(tmp_path):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6, 2, 3073)).astype(np.uint8)
    records[:, :, 0] %= 10
    for name, part in zip(cifar._BATCHES, records, strict=True):
        put(tmp_path, f"cifar-10-batches-bin/{name}.bin", part.tobytes())
    first = SOURCES["cifar10"].load(tmp_path)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    second = SOURCES["cifar10"].load(tmp_path)
    assert first.n_train == 10
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.y, second.y)
    # A record is the label, then all red, all green, all blue values.
    assert first.x[0, 1, 0, 0] == records[0, 0, 1 + 1024]


def test_emnist_is_turned_upright_and_says_what_is_missing(tmp_path):
    x = np.zeros((2, 28, 28))
    x[:, 3, 7] = 9
    for kind, part in (("images-idx3", x), ("labels-idx1", np.array([61, 0]))):
        put(tmp_path, f"emnist/emnist-byclass-test-{kind}-ubyte.gz", idx_bytes(part))
    pool = SOURCES["emnist"].load(tmp_path)
    assert (pool.n_train, pool.x[0, 0, 7, 3]) == (0, 9)
    assert pool.classes[61] == "z"
    assert "116,323 of 814,255" in pool.notes[0]
    with zipfile.ZipFile(tmp_path / "emnist" / "gzip.zip", "w") as archive:
        for split in ("train", "test"):
            for kind, part in (("images-idx3", x), ("labels-idx1", np.array([61, 0]))):
                name = f"gzip/emnist-byclass-{split}-{kind}-ubyte.gz"
                archive.writestr(name, gzip.compress(idx_bytes(part)))
    pool = SOURCES["emnist"].load(tmp_path)
    assert (pool.n_train, len(pool.y), pool.notes) == (2, 4, ())


def test_femnist_is_the_same_from_json_and_idx(tmp_path):
    x = np.random.default_rng(1).integers(0, 256, (3, 28, 28))
    y = np.array([5, 10, 61])
    data = {
        "users": ["ann", "bob"],
        "num_samples": [1, 2],
        "user_data": {
            "ann": {"x": (x[:1].reshape(1, -1) / 255).tolist(), "y": [5]},
            "bob": {"x": (x[1:].reshape(2, -1) / 255).tolist(), "y": [10, 61]},
        },
    }
    put(tmp_path / "a", "femnist/all_data_0.json.gz", json.dumps(data).encode())
    put(tmp_path / "b", "femnist/femnist-images-idx3-ubyte.gz", idx_bytes(x))
    put(tmp_path / "b", "femnist/femnist-labels-idx1-ubyte.gz", idx_bytes(y))
    put(tmp_path / "b", "femnist/femnist-writers.csv", b"writer,num_samples\nann,1\nbob,2\n")
    one, other = SOURCES["femnist"].load(tmp_path / "a"), SOURCES["femnist"].load(tmp_path / "b")
    assert torch.equal(one.x, other.x)
    assert one.y.tolist() == other.y.tolist() == [5, 10, 61]
    assert one.owners == other.owners == ("ann", "bob")
    assert one.owner.tolist() == [0, 1, 1]
    assert "of 3,597 writers" in other.notes[0]


def test_femnist_is_read_from_parquet_in_the_layout_of_its_public_address(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = pytest.importorskip("PIL.Image")
    x = np.random.default_rng(1).integers(0, 256, (4, 28, 28), dtype=np.uint8)

    def png(pixels):
        out = io.BytesIO()
        pictures.fromarray(pixels).save(out, "PNG")
        return {"bytes": out.getvalue(), "path": None}

    table = pyarrow.table(
        {
            "image": [png(each) for each in x],
            "writer_id": ["f1_02", "f0_14", "f1_02", "f0_14"],
            "hsf_id": [0, 0, 4, 0],
            "character": [61, 10, 5, 0],
        }
    )
    out = io.BytesIO()
    parquet.write_table(table, out, row_group_size=3)  # in several pieces
    put(tmp_path, femnist.PARQUET, out.getvalue())
    pool = SOURCES["femnist"].load(tmp_path)
    assert pool.owners == ("f0_14", "f1_02")
    assert pool.owner.tolist() == [0, 0, 1, 1]
    assert pool.y.tolist() == [10, 0, 61, 5]
    assert [pool.classes[i] for i in pool.y.tolist()] == ["A", "0", "z", "5"]
    assert torch.equal(pool.x[:, 0], torch.from_numpy(x[[1, 3, 0, 2]]))
    assert pool.notes == ()
    put(tmp_path, femnist.PARQUET, b"PAR1 and nothing else")
    with pytest.raises(DataError, match="columns image, writer_id and character"):
        SOURCES["femnist"].load(tmp_path)


def test_news_become_numbered_words(tmp_path):
    put(tmp_path, "ag_news_csv/train_subset.csv.gz", b'"1","Oil up","oil again"\n"4","A","b"\n')
    put(tmp_path, "ag_news_csv/test.csv.gz", b'"2","Oil","unheard"\n')
    pool = SOURCES["ag_news"].load(tmp_path)
    assert pool.y.tolist() == [0, 3, 1]
    # "oil" is most frequent: 2; then a, again, b, up in order: 3, 4, 5, 6. Not known: 1, padding 0.
    assert pool.x[0, :5].tolist() == [2, 6, 2, 4, 0]
    assert pool.x[2, :3].tolist() == [2, 1, 0]
    assert "38,678 of 120,000" in pool.notes[0]
    put(tmp_path, "ag_news_csv/test.csv.gz", b'"7","Oil","unheard"\n')
    with pytest.raises(DataError, match="line 1 must have a class"):
        SOURCES["ag_news"].load(tmp_path)


def test_reviews_are_the_same_from_both_forms(tmp_path):
    lines = {"train": "1 0:2 4999:1\n", "test": "-1 3:1 7000:4\n"}
    for name in text.DOMAINS:
        for part, line in lines.items():
            put(tmp_path / "a", f"amazon/{name}_{part}.svmlight.gz", line.encode())
    (tmp_path / "b" / "amazon").mkdir(parents=True)
    np.savez(
        tmp_path / "b" / "amazon" / "amazon.npz",
        xx_data=np.array([2, 1, 1, 4] * 4, np.uint8),
        xx_row=np.array([0, 4999, 3, 7000] * 4),
        xx_col=np.repeat(np.arange(8), 2),
        xx_shape=np.array([8000, 8]),
        yy=np.array([1, -1] * 4).reshape(-1, 1),
        offset=np.arange(0, 9, 2).reshape(-1, 1),
    )
    one, other = SOURCES["amazon"].load(tmp_path / "a"), SOURCES["amazon"].load(tmp_path / "b")
    assert torch.equal(one.x, other.x)
    assert one.y.tolist() == other.y.tolist() == [1, 0] * 4
    assert one.owner.tolist() == other.owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (one.x[0, 0], one.x[0, 4999], one.x[1].sum()) == (2, 1, 1)


def test_uci_tables(tmp_path):
    put(
        tmp_path,
        "uci/abalone.data.gz",
        b"M,1,2,3,4,5,6,7,15\nI,1,2,3,4,5,6,7,6\nF,1,2,3,4,5,6,7,12\n",
    )
    pool = SOURCES["abalone"].load(tmp_path)
    assert pool.x.shape == (3, 7)
    assert pool.y.tolist() == [7, 0, 6]  # 14 and more; up to 6; 12 to 13
    assert uci.RINGS[-1] == 13
    put(tmp_path, "uci/waveform.data.gz", b"1,2,0\n1,2\n")
    with pytest.raises(DataError, match="same number of values"):
        SOURCES["waveform"].load(tmp_path)


def test_every_source_says_where_it_comes_from():
    for source in SOURCES.values():
        assert source.home
        assert source.licence
        public = any(file.url for layout in source.layouts for file in layout.files)
        assert public or source.by_hand
    assert femnist.WRITERS == 3597


class Shop(http.server.BaseHTTPRequestHandler):
    """Serves one file on this machine; `cut` ends the first answer early."""

    content, asked, cut, ranges = b"", [], 0, True

    def do_GET(self):
        begun = 0
        if "Range" in self.headers and type(self).ranges:
            begun = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        type(self).asked.append(begun)
        if begun >= len(self.content) > 0:
            self.send_error(416)
            return
        rest = self.content[begun:]
        self.send_response(206 if begun else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if type(self).cut:
            rest, type(self).cut = rest[: type(self).cut], 0
        self.wfile.write(rest)

    def log_message(self, *words):
        pass


@pytest.fixture
def shop(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    Shop.content, Shop.asked, Shop.cut, Shop.ranges = os.urandom(300_000), [], 0, True
    server = http.server.HTTPServer(("127.0.0.1", 0), Shop)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/thing.bin"
    server.shutdown()
    server.server_close()


def bought(url: str, md5: str | None) -> Source:
    def read(folder: Path) -> Pool:
        raise AssertionError

    file = File("set/thing.bin", md5, url)
    return Source("thing", "A thing", "nowhere", "none", (Layout((file,), read),))


def test_a_download_is_whole_checked_and_not_repeated(shop, tmp_path):
    told = []
    thing = bought(shop, hashlib.md5(Shop.content).hexdigest())
    (path,) = get(thing, tmp_path, lambda *what: told.append(what))
    assert path.read_bytes() == Shop.content
    assert told[-1] == ("set/thing.bin", 300_000, 300_000)
    get(thing, tmp_path)
    assert Shop.asked == [0]
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_goes_on_where_it_stopped(shop, tmp_path, ranges):
    Shop.cut, Shop.ranges = 100_000, ranges
    thing = bought(shop, hashlib.md5(Shop.content).hexdigest())
    with pytest.raises(DataError, match="next attempt continues"):
        get(thing, tmp_path)
    assert not (tmp_path / "set" / "thing.bin").exists()
    (path,) = get(thing, tmp_path)
    assert path.read_bytes() == Shop.content
    assert (Shop.asked[1] > 0) == ranges


def test_without_a_published_checksum_that_of_the_first_download_counts(shop, tmp_path):
    thing = bought(shop, None)
    (path,) = get(thing, tmp_path)
    assert verdict(thing.layouts[0].files[0], path) == "ok"
    path.write_bytes(path.read_bytes()[:-1])
    assert verdict(thing.layouts[0].files[0], path) == "damaged"
    get(thing, tmp_path)  # the same file again
    assert path.read_bytes() == Shop.content
    Shop.content = b"something else"
    path.unlink()
    with pytest.raises(DataError, match="another checksum than the first download"):
        get(thing, tmp_path)
    assert not path.exists()


def test_a_wrong_file_is_not_kept(shop, tmp_path):
    with pytest.raises(DataError, match="another checksum"):
        get(bought(shop, "0" * 32), tmp_path)
    assert not list(tmp_path.rglob("thing*"))


def pack_z(content: bytes, most: int = 16) -> bytes:
    """A small packer: codes in groups of eight, padded when the width changes."""
    table = {bytes([i]): i for i in range(256)}
    width, bits, place, start, word, free = 9, 0, 0, 0, b"", 257
    for i in range(len(content)):
        letter = content[i : i + 1]
        if word + letter in table:
            word += letter
            continue
        bits |= table[word] << place
        place += width
        if free < 1 << most:
            table[word + letter] = free
            free += 1
        if free - 1 > (1 << width) - 1 and width < most:  # the reader is one entry behind
            place = start + -(-(place - start) // (8 * width)) * 8 * width
            width, start = width + 1, place
        word = letter
    if word:
        bits |= table[word] << place
        place += width
    return b"\x1f\x9d" + bytes([most | 128]) + bits.to_bytes(-(-place // 8), "little")


@pytest.mark.parametrize("size", [0, 1, 5, 3000, 60_000])
@pytest.mark.parametrize("most", [10, 16])
def test_what_was_packed_is_unpacked(size, most):
    draw = random.Random(size)
    content = bytes(draw.choice(b"0123456789.,-\n") for _ in range(size))
    assert unpack_z(pack_z(content, most)) == content


def test_a_repeated_letter_uses_the_entry_that_is_being_made():
    assert unpack_z(pack_z(b"a" * 1000)) == b"a" * 1000


def test_other_files_and_damaged_ones_are_refused():
    with pytest.raises(DataError, match="written by compress"):
        unpack_z(b"\x1f\x8b\x08", "waveform.data.Z")
    with pytest.raises(DataError, match="damaged"):
        unpack_z(b"\x1f\x9d\x90" + b"\xff" * 4)


def test_a_table_is_taken_out_of_its_archive(shop, tmp_path):
    rows = b"1.0,2.0,0\n3.0,4.0,2\n"
    content = hashlib.md5(rows).hexdigest()

    def wanted(name: str, member: str | None) -> Source:
        address = shop.replace("thing.bin", name)
        file = File("uci/rows.csv.gz", None, address, content, member)
        return Source("rows", "Rows", "nowhere", "none", (Layout((file,), bought),))

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.csv", rows)
    for folder, body, source in (
        ("zip", packed.getvalue(), wanted("rows.zip", "rows.csv")),
        ("z", pack_z(rows), wanted("rows.data.Z", None)),
    ):
        Shop.content = body
        (path,) = get(source, tmp_path / folder)
        assert (path.name, path.read_bytes()) == ("rows.csv", rows)
        Shop.content = b"<html>gone</html>"
        with pytest.raises(DataError, match="expected archive"):
            get(source, tmp_path / f"{folder}-again")
        assert not list((tmp_path / f"{folder}-again").rglob("*.*"))


def test_offline_says_what_is_wanted(tmp_path):
    with pytest.raises(DataError, match=r"could not be downloaded.*set/thing.bin"):
        get(bought("http://127.0.0.1:9/thing.bin", None), tmp_path)


def test_a_damaged_file_is_told_from_one_without_checksum(tmp_path):
    path = put(tmp_path, "a.bin", b"abc")
    assert verdict(File("a.bin", hashlib.md5(b"abc").hexdigest()), path) == "ok"
    assert verdict(File("a.bin", "0" * 32), path) == "damaged"
    assert verdict(File("a.bin"), path) == "unknown"


@real
@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"cifar10", "ag_news"}))
def test_real_files_are_whole(name):
    source = SOURCES[name]
    found = source.find()
    if found is None:
        pytest.skip(f"{name} is not in COTERIE_DATA")
    pool = source.load()
    assert len(pool.x) == len(pool.y)
    assert int(pool.y.max()) < len(pool.classes)
    sizes = {"mnist": 70_000, "fashion_mnist": 70_000, "emnist": 116_323, "femnist": 164_192}
    if name in sizes and (found[1].note or name.endswith("mnist")):
        assert len(pool.y) in (sizes[name], 814_255, 817_851)
