"""Damaged files of every format: read, or refused by an error of ours."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data import from_folder
from coterie.data.columns import Profile, decide
from coterie_lab.studies import table_fuzz

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("openpyxl", reason="openpyxl is not installed")
pytest.importorskip("python_calamine", reason="python-calamine is not installed")

ROWS, NAMES = [list(row) for row in table_fuzz.ROWS], list(table_fuzz.NAMES)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, seed):
    found = table_fuzz.try_one(tmp_path_factory.mktemp("sites"), random.Random(seed))
    assert found["end"] in ("read", "refused"), found


def refused(folder, data, kind, sentence):
    (folder / f"north.{kind}").write_bytes(data)
    (folder / f"south.{kind}").write_bytes(table_fuzz.KINDS[kind](ROWS, NAMES))
    with pytest.raises(DataError, match=sentence) as error:
        from_folder(folder, label="y")
    assert len(str(error.value)) < 2000


def test_feather_data_with_damaged_text_are_refused(tmp_path):
    data = table_fuzz.KINDS["feather"]([[i, 0.5, "\u00e9", "yes"] for i in range(12)], NAMES)
    data = data.replace("\u00e9".encode(), b"\xe9\xe9")
    refused(tmp_path, data, "feather", "its content is something else|Its content is something")


def test_text_without_a_word_that_can_be_shown_is_named():
    """The only word may be in a row that was left out, because it has no label."""
    told = [Profile(kind, 8, 8, 0, frozenset(), "") for kind in ("number", "text")]
    with pytest.raises(DataError, match=r"numbers in south\.csv, but north\.csv has text"):
        decide("a", told, ["south.csv", "north.csv"])


def test_an_archive_of_another_version_is_refused(tmp_path):
    data = bytearray(table_fuzz.KINDS["xlsx"](ROWS, NAMES))
    at = data.rindex(b"PK\x01\x02")  # the last entry of the directory; needs version 8.4
    data[at + 6] = 84
    refused(tmp_path, bytes(data), "xlsx", "must hold an Excel workbook")


def test_a_long_cell_is_quoted_in_part(tmp_path):
    rows = [["x" * 30_000, *row[1:]] if not i else row for i, row in enumerate(ROWS)]
    refused(tmp_path, table_fuzz.KINDS["csv"](rows, NAMES), "csv", r"\[\.\.\.\]")
