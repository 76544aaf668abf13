"""Envelopes as Flower's records."""

import ast
from pathlib import Path

import pytest

import coterie

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'coterie[flower]'")

from coterie.engines.flower import SMALL, from_records, to_records
from coterie.engines.flower_private import check_version
from coterie.engines.relay import Envelope

PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_small_blobs_travel_in_the_head_and_large_ones_are_shared_arrays():
    small, large = b"\x00\xff" * 10, bytes(SMALL + 1)
    asked = Envelope({"round": 1, "calls": []}, {"a1": small, "b2": large, "c3": b""})
    known = {}
    first, second = to_records(asked, known), to_records(asked, known)
    assert list(first.array_records) == ["b2"]
    assert first["b2"] is second["b2"]  # so Flower uploads it once
    assert from_records(first) == asked


def test_only_one_file_uses_what_flower_keeps_private():
    package = Path(coterie.__file__).parent
    for path in package.rglob("*.py"):
        if path.name == "flower_private.py":
            continue
        tree = ast.parse(path.read_text())
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        flower = {name for name in names if name.split(".")[0] == "flwr"}
        assert flower <= PUBLIC, path
        assert not flower or path.name == "flower.py", path


def test_another_version_of_flower_is_refused(monkeypatch):
    check_version()
    monkeypatch.setattr("flwr.__version__", "1.42.0")
    with pytest.raises(coterie.core.errors.ConfigError, match=r"Flower 1\.42\.0 is installed"):
        check_version()
