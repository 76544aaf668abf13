"""The studies can still be started; what they find is not tested here."""

import runpy
import sys
from pathlib import Path

import pytest

from coterie_lab import studies
from coterie_lab.studies import memory

SHARED = ("common", "evidence_cases", "thorough_kfed")  # used by studies, no studies themselves
NAMES = sorted(
    path.stem for path in Path(studies.__file__).parent.glob("[a-z]*.py") if path.stem not in SHARED
)


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"coterie_lab.studies.{name}", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"coterie_lab.studies.{name}", run_name="__main__")
    assert not stopped.value.code
    assert "usage:" in capsys.readouterr().out


def test_the_memory_study_runs_on_a_few_clients():
    found = memory.one(3)
    assert found["clients"] == 3
    assert found["peak_mb"] >= found["before_mb"] > 0
