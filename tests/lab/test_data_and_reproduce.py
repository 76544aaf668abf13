"""`coterie data` and `coterie reproduce` as people type them."""

import gzip
import json
import struct
import urllib.error

import numpy as np
import pytest

from coterie_lab.sources import idx


@pytest.fixture
def folder(tmp_path):
    """A data folder with a hundred images under the name of MNIST."""
    x = np.random.default_rng(0).integers(0, 256, (100, 28, 28)).astype(np.uint8)
    y = np.arange(100).astype(np.uint8) % 10
    (tmp_path / "mnist").mkdir()
    for name, part in zip(idx._PARTS, (x, y, x, y), strict=True):
        head = struct.pack(f">BBBB{part.ndim}I", 0, 0, 8, part.ndim, *part.shape)
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(head + part.tobytes()))
    return tmp_path


def test_the_list_says_what_is_here(call, folder):
    code, out, _ = call("data", "list", "--data-dir", folder, "--json")
    found = {row["name"]: row["state"] for row in json.loads(out)}
    assert code in (0, None)
    assert found["mnist"] == "found"
    assert found["cifar10"] == "missing"


def test_files_that_are_not_the_published_ones_fail_the_check(call, folder):
    code, out, _ = call("data", "check", "mnist", "--data-dir", folder)
    assert code == 1
    assert out.count("damaged") == 4
    code, _, err = call("data", "check", "cifar10", "--data-dir", folder)
    assert code == 2
    assert "cifar-10-binary.tar.gz" in err


def test_a_partition_is_drawn(call, folder, tmp_path):
    out_file = tmp_path / "a.png"
    options = ("--set", "clients_per_group=2", "--set", "n=5", "--data-dir", folder)
    code, out, _ = call("data", "show", "published_label_skew", *options, "--out", out_file)
    assert code in (0, None)
    assert "10 clients" in out
    assert out_file.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_downloaded_says_how_to_get_it(call, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    code, _, err = call("data", "get", "femnist", "--data-dir", tmp_path)
    assert code == 2
    assert "github.com/TalwalkarLab/leaf" in err.replace("\n", "")


def test_recipes_are_listed_with_their_hours(call):
    code, out, _ = call("reproduce", "--list")
    assert code in (0, None)
    for name in ("clove-table1", "clove-fig3a", "ifca-table2", "ifca-fig3d", "hours"):
        assert name in out
    code, out, _ = call("explain", "clove-table14")
    assert "coterie reproduce clove-table14" in out


def test_a_table_must_be_named(call):
    code, _, err = call("reproduce")
    assert code == 2
    assert "clove-table1" in err
    code, _, err = call("reproduce", "clove-tabel1")
    assert code == 2
    assert "Did you mean 'clove-table1" in err


def test_a_figure_without_data_runs_at_once(call, tmp_path):
    options = ("--scale", "quick", "--cells", "linear/1/", "--out", tmp_path, "--json")
    code, out, _ = call("reproduce", "clove-fig3a", *options)
    assert code in (0, None)
    (ran,) = [one for one in json.loads(out)["entries"] if one["seeds"] != "0"]
    assert ran["row"] == "distance 1"
    assert (tmp_path / "tables" / "clove-fig3a-quick.png").exists()
