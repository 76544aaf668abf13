import csv
import io
import math
import sys

import numpy
import pytest

from coterie.core.errors import ConfigError
from coterie.report.table import Table, format_value, html_table, text_table

GROUPS = Table(
    ["client", "group", "accuracy", "fits"],
    [["site-1", 0, 0.9512, True], ["site-10", 12, None, False], ["site-2", 3, math.nan, True]],
    {"accuracy": ".1%"},
)


def test_text_puts_words_left_and_numbers_right_with_gaps_where_nothing_is_known():
    assert str(GROUPS).splitlines() == [
        "client   group  accuracy  fits",
        "-------  -----  --------  ----",
        "site-1       0     95.1%  yes",
        "site-10     12            no",
        "site-2       3            yes",
    ]


def test_wide_letters_keep_columns_aligned():
    lines = text_table(["名", "n"], [["病院", 1], ["ab", 2]]).splitlines()
    assert lines == ["名    n", "----  -", "病院  1", "ab    2"]


def test_a_name_cannot_break_a_line_or_steer_a_terminal():
    text = text_table(["client"], [["a\nb\x1b[31m"]])
    assert text.splitlines()[-1] == "a b [31m"


def test_a_table_without_rows_is_its_head():
    assert text_table(["client", "group"], []).splitlines()[0] == "client  group"
    assert len(Table(["client"], [])) == 0


def test_html_escapes_what_people_name_their_clients():
    text = html_table(["<i>"], [["<script>alert(1)</script>"]])
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;i&gt;" in text


def test_html_shows_formatted_numbers_on_the_right():
    text = GROUPS._repr_html_()
    assert text.startswith("<table")
    assert text.count("<tr>") == 4
    assert 'text-align:right;padding:2px 12px">95.1%<' in text


def test_html_says_how_many_rows_it_leaves_out():
    text = html_table(["n"], [[i] for i in range(1205)], most=5)
    assert text.count("<tr>") == 1 + 5 + 1
    assert "and 1,200 more rows" in text


def test_csv_holds_values_unrounded_and_comes_back_the_same(tmp_path):
    table = Table(["client", "loss", "fits"], [['a "b", c', 1 / 3, True], ["d", None, False]])
    text = table.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == text
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["client", "loss", "fits"], ['a "b", c', repr(1 / 3), "yes"], ["d", "", "no"]]


def test_columns_come_by_name_and_rows_by_turn():
    assert GROUPS["group"] == [0, 12, 3]
    assert [row["client"] for row in GROUPS] == ["site-1", "site-10", "site-2"]
    assert len(GROUPS) == 3
    with pytest.raises(ConfigError, match="Did you mean 'group'"):
        GROUPS["groop"]


def test_pandas_gets_the_same_values():
    pandas = pytest.importorskip("pandas")
    frame = GROUPS.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(GROUPS.columns)
    assert frame["group"].tolist() == [0, 12, 3]


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"coterie\[tables\]"):
        GROUPS.to_pandas()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (1234567.8, "1,234,568"),
        (0.00012346, "0.0001235"),
        (numpy.int64(4), "4"),
        (numpy.float32(0.1), "0.1"),
        (numpy.float32("nan"), ""),
        (float("inf"), "inf"),
        ("", ""),
    ],
)
def test_values_read_as_people_write_them(value, text):
    assert format_value(value) == text
