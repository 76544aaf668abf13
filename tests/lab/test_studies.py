"""The studies can still be started; what they find is not tested here."""

import runpy
import sys
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

import coterie
from coterie_lab import studies
from coterie_lab.studies import evidence_cases, memory
from coterie_lab.studies.evidence_cases import federation

SHARED = (
    "common",
    "evidence_answers",
    "evidence_cases",
    "evidence_cover",
    "thorough_kfed",
)  # used by studies, no studies themselves
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


def test_the_table_of_operating_characteristics_counts(tmp_path):
    from coterie_lab.studies import evidence_rows

    lines = [{"row": "odd-20", "seed": i, "odd_found": i != 3} for i in range(20)]
    table = {line[0]: line[1:] for line in evidence_rows.measure(lines)}
    assert table["one relabelled client of 20: found"][2:] == [
        "19 of 20", "75.1% to 99.9%", "yes",
    ]  # fmt: skip
    assert table["one of 60: found"][2:] == ["not run", "", ""]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{evidence_rows.START}\nold\n{evidence_rows.END}\nafter\n")
    evidence_rows.write_page(page, lines)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "19 of 20" in text
    assert "old" not in text


def test_the_coverage_of_intervals_is_counted_by_federation():
    from coterie_lab.studies.evidence_cover import count_covered

    # Models of the first training gain 0, 2 and 1 on fresh rows, all trainings 1, 3 and 2: mean 2.
    lines = [
        {"a over b": {"once": [x, x - 1, x + y], "often": [x, x - y, x], "fresh": [x, x + 2]}}
        for x, y in ((0.0, 1.0), (2.0, 1.0), (1.0, -0.5))
    ]
    share, low, high, n = count_covered(lines, "once")
    assert (share, n) == (pytest.approx(2 / 3), 3)  # the last interval is 0 to 0.5
    assert low == pytest.approx(2 / 3 - 1.96 / 3)
    assert high == 1.0
    assert count_covered(lines, "often")[0] == pytest.approx(1 / 3)  # only 1 to 2 has 2
    assert count_covered(lines[:1], "once")[3] == 0


def test_clients_of_ten_rows_are_believed():
    # With a limit of 2 for the size of differences, three of these clients were set aside.
    rng = np.random.default_rng([30064, crc32(b"null-60-tiny")])
    advice = coterie.advise(federation(evidence_cases.nothing(60, 10, 2)(rng)), seed=30064)
    assert advice.n_groups == 1
    assert not advice.odd
