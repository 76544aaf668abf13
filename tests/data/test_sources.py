"""Excel files, polars, Arrow and Hugging Face tables are read as the CSV file of the same rows."""

import gzip

import numpy as np
import pytest

from coterie.core.errors import ConfigError, DataError
from coterie.data import from_folder, from_table
from coterie.data.assemble import Reading
from coterie.data.formats import Format
from coterie.data.tables import read, read_file

TABLE = "site,age,ward,ill\na,30,x,0\na,41,y,1\nb,,x,1\nb,25.5,,0\n"
COLUMNS = {
    "site": ["a", "a", "b", "b"],
    "age": [30.0, 41.0, None, 25.5],
    "ward": ["x", "y", "x", None],
    "ill": [0, 1, 1, 0],
}


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text(TABLE)
    return read_file(path)


def same(left, right):
    assert list(left.cells) == list(right.cells)
    for name, cells in left.cells.items():
        assert cells.kind == right.cells[name].kind
        np.testing.assert_array_equal(cells.values, right.cells[name].values)
        np.testing.assert_array_equal(cells.missing, right.cells[name].missing)


def test_excel(tmp_path, plain):
    openpyxl = pytest.importorskip("openpyxl")
    pytest.importorskip("python_calamine")
    book = openpyxl.Workbook()
    book.active.title = "visits"
    for line in [list(COLUMNS), *zip(*COLUMNS.values(), strict=True)]:
        book.active.append(line)
    path = tmp_path / "visits.xlsx"
    book.save(path)
    table = read_file(path)
    same(table, plain)
    assert table.rows.tolist() == [2, 3, 4, 5]  # as Excel numbers them
    packed = tmp_path / "visits.xlsx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    same(read_file(packed), plain)
    data = from_table(path, client="site", label="ill", test_fraction=0)
    assert data.reading.startswith("1 .xlsx file, with a header: 4 rows of 2 clients.")
    book.create_sheet("more")
    book.save(path)
    assert read_file(path).notes == ("Sheet 'visits', the first of 2.",)
    path.write_text("no workbook")
    with pytest.raises(DataError, match=r"a \.xlsx file must hold an Excel workbook"):
        read_file(path)


def test_excel_without_a_header(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    pytest.importorskip("python_calamine")
    book = openpyxl.Workbook()
    for line in ([1, 0.5], [2, "?"], [3, 1.5]):
        book.active.append(line)
    book.save(tmp_path / "a.xlsx")
    table = read_file(tmp_path / "a.xlsx")
    assert table.cells["column_1"].values.tolist() == [1, 2, 3]
    assert table.cells["column_2"].missing.tolist() == [False, True, False]
    with pytest.raises(ConfigError, match="separator is an option of text files"):
        read_file(tmp_path / "a.xlsx", Format(separator=";"))


def test_polars_and_arrow(plain):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(COLUMNS)
    same(read(frame), plain)
    same(read(frame.to_arrow()), plain)
    data = from_table(frame, client="site", label="ill", test_fraction=0)
    assert data.names == ("a", "b")
    with pytest.raises(DataError, match=r"must be a DataFrame. Got LazyFrame"):
        read(frame.lazy())


def test_hugging_face(plain):
    datasets = pytest.importorskip("datasets")
    same(read(datasets.Dataset.from_dict(COLUMNS)), plain)
    label = datasets.ClassLabel(names=["no", "yes"])
    named = datasets.Dataset.from_dict(COLUMNS).cast_column("ill", label)
    some = named.select([1, 0, 2])
    data = from_table(some, client="site", label="ill", test_fraction=0)
    assert data.classes == ("no", "yes")
    assert data.y.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"Got a DatasetDict of train"):
        read(datasets.DatasetDict(train=named))
    with pytest.raises(DataError, match=r"Got IterableDataset"):
        read(named.to_iterable_dataset())


def test_markers_count_in_every_source(tmp_path):
    pandas = pytest.importorskip("pandas")
    columns = {"site": ["a", "a", "b"], "age": [1.0, -9.0, 3.0], "ward": ["x", "none", "y"]}
    expected = [False, True, False]
    pandas.DataFrame(columns).to_csv(tmp_path / "a.csv", index=False)
    markers = Format(na_values=("-9", "none"))
    for source in (columns, pandas.DataFrame(columns), str(tmp_path / "a.csv")):
        table = read(source, how=markers)
        assert table.cells["age"].missing.tolist() == expected
        assert table.cells["ward"].missing.tolist() == expected
        assert not read(source).cells["age"].missing.any()  # -9 only if told
    assert Reading(na_values=-9).na_values == ("-9",)


def test_options_of_text_files_are_refused_elsewhere():
    with pytest.raises(ConfigError, match="header is an option of text files"):
        from_table(COLUMNS, client="site", label="ill", header=False)


def test_one_line_says_what_was_read(tmp_path):
    (tmp_path / "a.data").write_text("1,?,0\n2,1,1\n3,4,?\n")
    (tmp_path / "b.data").write_text("1,2,0\n2,1,1\n")
    assert from_folder(tmp_path, label="column_3").reading == (
        "2 .data files separated by commas, without a header, UTF-8, missing values ?: 5 rows of "
        "2 clients, 1 without 'column_3' left out. To predict: 'column_3' (2 classes). "
        "Inputs: 2 numbers."
    )
