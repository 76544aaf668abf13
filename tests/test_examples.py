"""The scripts in examples/ run as they are."""

import runpy
from pathlib import Path

import pytest

from coterie.core.algorithm import REGISTRY

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = dict(REGISTRY)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)
    assert capsys.readouterr().out.strip()


def test_a_method_of_ones_own_fits_on_a_page():
    path = next(path for path in EXAMPLES if path.stem == "own_method")
    assert len(path.read_text().splitlines()) < 80
