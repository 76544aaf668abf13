"""Files as they come: compressed, without a header, with any separator, marker or encoding."""

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data import DataCard, from_folder, from_function, from_table
from coterie.data.clients import client_file, one_client, read_options
from coterie.data.formats import MISSING, find_separator, has_header, stem_of
from coterie.data.tables import describe_files, read_file

TABLE = "age,ward,ill\n30,a,0\n41,b,1\n?,a,1\n25,b,0\n"


def same(left, right):
    assert list(left.cells) == list(right.cells)
    for name, cells in left.cells.items():
        assert cells.kind == right.cells[name].kind
        np.testing.assert_array_equal(cells.values, right.cells[name].values)


def write(path: Path, text: str, encoding="utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.fixture
def plain(tmp_path):
    return read_file(write(tmp_path / "plain.csv", TABLE))


def test_compressed_files(tmp_path, plain):
    packed = tmp_path / "north.csv.gz"
    packed.write_bytes(gzip.compress(TABLE.encode()))
    same(read_file(packed), plain)
    with zipfile.ZipFile(tmp_path / "south.csv.zip", "w") as archive:
        archive.writestr("whatever.csv", TABLE)
    same(read_file(tmp_path / "south.csv.zip"), plain)
    assert stem_of(packed) == "north"
    (tmp_path / "plain.csv").unlink()
    data = from_folder(tmp_path, label="ill")
    assert data.names == ("north", "south")


def test_damaged_archives(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv\.gz: a \.gz file must hold compressed data"):
        read_file(write(tmp_path / "a.csv.gz", TABLE))
    with pytest.raises(DataError, match=r"b\.csv\.zip: a \.zip file must hold compressed data"):
        read_file(write(tmp_path / "b.csv.zip", TABLE))
    with zipfile.ZipFile(tmp_path / "c.csv.zip", "w") as archive:
        archive.writestr("one.csv", TABLE)
        archive.writestr("two.csv", TABLE)
    with pytest.raises(DataError, match=r"must hold one file\. It holds 2"):
        read_file(tmp_path / "c.csv.zip")


@pytest.mark.parametrize(
    ("ending", "separator", "said"),
    [
        (".csv", ";", "1 .csv file separated by semicolons, with a header, UTF-8"),
        (".csv", "|", "1 .csv file separated by bars, with a header, UTF-8"),
        (".txt", "\t", "1 .txt file separated by tabs, with a header, UTF-8"),
        (".data", "   ", "1 .data file separated by spaces, with a header, UTF-8"),
        (".tsv", "\t", "1 .tsv file separated by tabs, with a header, UTF-8"),
        (".csv", ",", "1 .csv file separated by commas, with a header, UTF-8"),
    ],
)
def test_separators_are_found_and_said(tmp_path, plain, ending, separator, said):
    table = read_file(write(tmp_path / f"a{ending}", TABLE.replace(",", separator)))
    same(table, plain)
    assert describe_files([table.found]) == said + ", missing values ?"


def test_decimal_commas_with_an_exponent_are_numbers(tmp_path):
    table = read_file(write(tmp_path / "a.csv", "age;dose\n1,5;-8,1e-05\n2;3,5E+2\n"))
    assert table.cells["dose"].kind == "number"
    assert table.cells["dose"].values.tolist() == [-8.1e-05, 350.0]


def test_pyarrow_reads_no_file_of_python(tmp_path, monkeypatch):
    # Its thread would close such a file, perhaps when Python ends, and the process would abort.
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import csv

    seen = []
    read = csv.read_csv
    monkeypatch.setattr(csv, "read_csv", lambda file, *how: seen.append(file) or read(file, *how))
    read_file(write(tmp_path / "a.csv", TABLE))
    assert [type(file) for file in seen] == [arrow.BufferReader]


def test_one_column_of_text_is_no_table_of_spaces():
    assert find_separator("remark\nall is well\nno\n", ".txt") == ","
    assert find_separator("remark of the day\nall is well now\n", ".csv") == ","


def test_files_without_a_header(tmp_path):
    table = read_file(write(tmp_path / "va.data", "63,1,?\n44,0,2\n60,1,?\n"))
    assert list(table.cells) == ["column_1", "column_2", "column_3"]
    assert table.rows.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(table.cells["column_3"].values, [np.nan, 2, np.nan])
    assert "without a header" in describe_files([table.found])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["age,ill", "3,1"], True),
        (["3,1", "4,0"], False),
        (["2,Wall St. falls", "3,Rain in June"], False),
        (["name,topic", "ann,sport"], True),
        (["ann,a", "bob,b"], True),  # nothing says otherwise
        (["a,a", "b,b", "c,c"], False),  # the same word twice names no columns
        (["?,1", "4,0"], False),
        (["age,ill"], True),
        ([",age", "0,3"], True),
    ],
)
def test_headers(lines, expected):
    assert has_header([line.split(",") for line in lines], MISSING) is expected


def test_what_is_found_can_be_said_otherwise(tmp_path):
    path = write(tmp_path / "all.csv", "site,2019,2020\na,1,-9\na,2,5\nb,3,6\nb,4,-9\n")
    data = from_table(
        path, client="site", label="2019", na_values="-9", header=True, test_fraction=0
    )
    assert "Column '2020': " in " ".join(data.notes)
    how = read_options({"header": False, "separator": ";", "na_values": ["-"]}).format
    table = read_file(write(tmp_path / "b.csv", "1,5;-\n2,5;7\n"), how)
    assert table.cells["column_1"].values.tolist() == [1.5, 2.5]
    assert table.cells["column_2"].missing.tolist() == [True, False]


def test_encodings(tmp_path):
    text = "ward,ill\nKöln,0\nMünchen,1\n"
    tables = [
        read_file(write(tmp_path / f"{encoding}.csv", text, encoding))
        for encoding in ("utf-8", "utf-8-sig", "cp1252", "utf-16")
    ]
    for table in tables:
        same(table, tables[0])
    said = [describe_files([table.found]).rpartition(", ")[2] for table in tables]
    assert said == ["UTF-8", "UTF-8", "Windows-1252", "UTF-16"]
    how = read_options({"encoding": "cp437"}).format
    same(read_file(write(tmp_path / "dos.csv", text, "cp437"), how), tables[0])
    with pytest.raises(DataError, match="something else than ascii"):
        read_file(tmp_path / "cp1252.csv", read_options({"encoding": "ascii"}).format)


@pytest.mark.parametrize("ending", [".parquet", ".feather", ".jsonl"])
def test_frames(tmp_path, ending, plain):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {"age": [30, 41, None, 25], "ward": ["a", "b", "a", "b"], "ill": [0, 1, 1, 0]}
    )
    path = tmp_path / f"a{ending}"
    match ending:
        case ".parquet":
            frame.to_parquet(path)
        case ".feather":
            frame.to_feather(path)
        case _:
            frame.to_json(path, orient="records", lines=True)
    same(read_file(path), plain)
    packed = tmp_path / f"b{ending}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    same(read_file(packed), plain)
    with pytest.raises(DataError, match=f"c{ending}: a {ending} file must hold"):
        read_file(write(tmp_path / f"c{ending}", "neither nor"))


def test_rows_without_a_label_are_left_out_and_counted(tmp_path):
    write(tmp_path / "a.csv", "age,ill\n1,0\n2,1\n3,?\n4,1\n")
    write(tmp_path / "b.csv", "age,ill\n1,0\n2,1\n3,0\n")
    data = from_folder(tmp_path, label="ill")
    assert "1 of 7 rows have no label in column 'ill' and are left out." in data.notes
    assert len(data.y) == 6
    own = one_client(tmp_path / "a.csv", "a", DataCard.of(data))
    assert torch.equal(own.x, data.x[:3])
    write(tmp_path / "c.csv", "age,ill\n1,\n2,\n")
    with pytest.raises(DataError, match=r"Client 'c' has none in column 'ill'\. Fill or remove it"):
        from_folder(tmp_path, label="ill")
    missing = from_function(lambda name: ([[1.0], [2.0], [3.0]], [0.5, np.nan, 1.5]), ["ann"])
    assert len(missing.y) == 2


def test_a_deployed_client_reads_its_file_in_the_same_way(tmp_path):
    for name in ("a", "b"):
        content = f"{name};1,5;0\n{name};2,5;1\n{name};-;1\n"
        (tmp_path / f"{name}.data.gz").write_bytes(gzip.compress(content.encode()))
    data = from_folder(tmp_path, label="column_3", na_values=["-"], drop=["column_1"])
    how = read_options(data.options)
    table = client_file(tmp_path, "b", how=how.format)
    own = one_client(table, "b", DataCard.of(data), data.options)
    assert torch.equal(own.x, data.x[3:])


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        TABLE.rstrip("\n"),
        TABLE.replace("\n", "\r\n"),
        "a,b\n1e-3,true\n0.1,false\n+5,TRUE\n",
        "a,b\n0.30000000000000004,NA\n123456789012345678,null\n",
        "a,b\n 1 , x\n2, NA \n,y\n",
        'a,b\n"1","x ""y"""\n"2","z"\n',
        'a,b\n1,"x, y"\n2,z\n',
        'a,b\n1,"x\ny"\n2,z\n',
        "a,b\n007,2024-01-02\n1_000,2024-02-03\n",
        "a;b\n1,5;x\n2;y\n",
        "a,b\ntrue,1\n?,2\n",
        "a,b\n99999999999999999999,1\n2,\n",
        "a,b\n\n1,2\n\n3,4\n",
        "a,b\ninf,nan\n1,2\n",
    ],
)
def test_pyarrow_reads_what_we_read(tmp_path, monkeypatch, text):
    pytest.importorskip("pyarrow")
    path = write(tmp_path / "a.csv", text)
    fast = read_file(path)
    monkeypatch.setattr("coterie.data.tables.read_regular", lambda *_: None)
    slow = read_file(path)
    same(fast, slow)
    assert fast.rows.tolist() == slow.rows.tolist()


def test_a_short_row_is_found_in_either_way(tmp_path):
    for text in ('a,b\n1,"x, y"\n2\n', "a,b\n1,2\n3\n"):
        with pytest.raises(DataError, match=r"every row must have 2 cells.*Row 3 has 1"):
            read_file(write(tmp_path / "a.csv", text))


def test_new_files_are_read_as_the_first_ones(tmp_path):
    path = write(tmp_path / "a.csv", "1,0\n-9,1\n3,0\n5,1\n")
    data = from_folder(tmp_path, label="column_2", na_values="-9", test_fraction=0)
    again = DataCard.from_dict(DataCard.of(data).to_dict()).encoder
    assert again.files.na_values == ("-9",)
    assert torch.equal(again.encode(path), data.x)
    assert torch.equal(again.labels(path), data.y)


def data_folder() -> Path:
    folder = Path(os.environ.get("COTERIE_DATA", "data"))
    if not (folder / "heart-disease").is_dir():
        pytest.skip("the public files are not here")
    return folder


def test_hospitals_as_they_were_published(tmp_path):
    for path in (data_folder() / "heart-disease").glob("processed.*.data"):
        (tmp_path / path.name.removeprefix("processed.")).write_bytes(path.read_bytes())
    data = from_folder(tmp_path, label="column_14")
    assert data.names == ("cleveland", "hungarian", "switzerland", "va")
    assert len(data.y) == 920
    assert data.n_outputs == 5


def test_a_station_as_it_was_published(tmp_path):
    for path in sorted((data_folder() / "beijing-air").glob("*.csv.gz"))[:1]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = from_folder(
        tmp_path, label="PM2.5", unit=["year", "month", "day"],
        time=["year", "month", "day", "hour"], drop=["No", "station"],
    )  # fmt: skip
    assert data.task == "regression"
    assert any("rows have no label in column 'PM2.5'" in note for note in data.notes)
    # The latest fifth of the days is held back.
    assert data.time[data.rows["train"].index].max() < data.time[data.rows["test"].index].min()
