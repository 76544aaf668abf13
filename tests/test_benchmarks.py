"""The studies can still be started; what they find is not tested here."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[1] / "benchmarks" / "studies"


@pytest.mark.parametrize(
    "script", sorted(path.name for path in STUDIES.glob("*.py") if path.stem != "common")
)
def test_a_study_says_what_it_does(script):
    done = subprocess.run(
        [sys.executable, STUDIES / script, "--help"], capture_output=True, text=True, check=True
    )
    assert "usage:" in done.stdout


def test_the_memory_study_runs_on_a_few_clients():
    found = runpy.run_path(str(STUDIES / "memory.py"))["one"](3)
    assert found["clients"] == 3
    assert found["peak_mb"] >= found["before_mb"] > 0
