import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.data import from_folder, from_function, from_partitions, from_table, make

HEADER = "age,ward,ill"


def site(folder: Path, name: str, *rows: str, header: str = HEADER) -> Path:
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def sites(tmp_path):
    """Three clients of 10 rows each; site-10 comes after site-2."""
    folder = tmp_path / "sites"
    folder.mkdir()
    for k, name in enumerate(["site-1", "site-2", "site-10"]):
        site(folder, f"{name}.csv", *(f"{20 + 3 * i + k},{'ab'[i % 2]},{i % 2}" for i in range(10)))
    return folder


# Folders of tables


def test_a_folder_of_csv_files_is_a_federation(sites):
    data = from_folder(sites, label="ill")
    assert data.names == ("site-1", "site-2", "site-10")
    assert (data.task, data.n_outputs, data.classes) == ("classification", 2, ("0", "1"))
    assert data.sizes("train").tolist() == [8, 8, 8]
    assert data.sizes("test").tolist() == [2, 2, 2]
    assert data.encoder.features == ["age", "ward=a", "ward=b"]
    assert data.notes[0] == "Column 'ill' holds 2 labels, so the task is classification."
    ages = np.array([20 + 3 * i + k for k in range(3) for i in range(10)], dtype=float)
    train = ages[data.rows["train"].index]
    np.testing.assert_allclose(data.x[:, 0], (ages - train.mean()) / train.std(), rtol=1e-5)


def test_plain_csv_needs_no_pandas(sites, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(from_folder(sites, label="ill")) == 3


def test_parquet_without_the_extra_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install 'coterie\[tables\]'"):
        from_folder(tmp_path, label="ill")


def test_a_run_file_can_make_the_same_data_again(sites):
    data = from_folder(
        sites, label="ill", test_fraction=0.3, seed=4, categorical=("ward",), names=["site-2"]
    )
    assert data.name == "folder"
    options = json.loads(json.dumps(data.options))
    assert options["path"] == str(sites.resolve())
    again = make(data.name, **options)
    assert again.fingerprint() == data.fingerprint()
    assert again.options == data.options
    assert make("folder", path=str(sites), label="ill").fingerprint() != data.fingerprint()


def test_unknown_and_missing_options_are_answered(sites):
    with pytest.raises(ConfigError, match="Did you mean 'test_fraction'"):
        from_folder(sites, label="ill", test_fractoin=0.1)
    with pytest.raises(ConfigError, match=r"option of folder 'lable'\. Did you mean 'label'"):
        make("folder", path=str(sites), lable="ill")
    with pytest.raises(ConfigError, match="folder: path must be given"):
        make("folder", label="ill")
    with pytest.raises(ConfigError, match="test_fraction must be"):
        from_folder(sites, label="ill", test_fraction=1.5)
    with pytest.raises(ConfigError, match=r"drop: Unknown column 'agee'\. Did you mean 'age'"):
        from_folder(sites, label="ill", drop=["agee"])
    with pytest.raises(DataError, match=r"Unknown client 'site-3'"):
        from_folder(sites, label="ill", names=["site-1", "site-3"])


def test_clients_can_be_chosen_and_columns_dropped(sites):
    data = from_folder(sites, label="ill", names=["site-10", "site-1"], drop=["ward"])
    assert data.names == ("site-10", "site-1")
    assert data.encoder.features == ["age"]


def test_a_column_that_one_client_lacks_values_of_is_filled(sites):
    site(sites, "z.csv", ",,0", "NA,,1")
    data = from_folder(sites, label="ill", test_fraction=0.0)
    assert data.encoder.features[:2] == ["age", "age is missing"]
    assert data.x[-2:].tolist() == [[0, 1, 0, 0, 1]] * 2


def test_columns_are_matched_by_name(sites):
    site(sites, "z.csv", "1,30,b", "0,31,a", header="ill,age,ward")
    data = from_folder(sites, label="ill", test_fraction=0.0)
    assert data.y[-2:].tolist() == [1, 0]
    assert data.x[-2:, 1:].tolist() == [[0, 1], [1, 0]]


def test_semicolons_tabs_quotes_and_decimal_commas(tmp_path):
    site(tmp_path, "a.csv", '"1,5";"x; y";0', '2;"x; y";1', header="age;ward;ill")
    (tmp_path / "b.tsv").write_text("age\tward\till\n3.5\tz\t0\n\n5\tz\t1\n")
    data = from_folder(tmp_path, label="ill", test_fraction=0, normalise=False)
    assert data.x[:, 0].tolist() == [1.5, 2, 3.5, 5]
    assert data.encoder.features == ["age", "ward=x; y", "ward=z"]


def test_a_column_without_a_name_is_left_out_and_said(tmp_path):
    site(tmp_path, "a.csv", "0,1,a,0", "1,2,b,1", header=",age,ward,ill")
    data = from_folder(tmp_path, label="ill")
    assert "A column without a name was left out." in data.notes
    assert data.encoder.features[0] == "age"


def test_parquet_equals_csv(sites, tmp_path):
    pandas = pytest.importorskip("pandas")
    other = tmp_path / "parquet"
    other.mkdir()
    for path in sites.iterdir():
        pandas.read_csv(path).to_parquet(other / f"{path.stem}.parquet")
    csv, parquet = from_folder(sites, label="ill"), from_folder(other, label="ill")
    assert parquet.fingerprint() == csv.fingerprint()
    assert parquet.encoder == csv.encoder


def test_npz_files_bring_their_labels(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(5, 2, (20, 3)), y=np.arange(20) * 7)
    data = from_folder(tmp_path)
    assert data.task == "classification"  # integers of an array are labels, however many
    assert data.n_outputs == 20
    assert data.encoder.features == ["x0", "x1", "x2"]
    train = data.x[data.rows["train"].index]
    torch.testing.assert_close(train.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std(0, correction=0), torch.ones(3))
    x = np.ones((2, 3))
    assert data.encoder.encode(x).shape == (2, 3)


def test_npz_files_may_bring_their_test_rows(tmp_path):
    x, y = np.arange(6.0)[:, None], np.array([0, 1, 0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    data = from_folder(tmp_path, normalise=False)
    assert data.gather("test", torch.tensor([0])).x.flatten().tolist() == [4, 5]


def test_bytes_and_tokens_of_npz_files_stay_as_they_are(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((4, 1, 2, 2), 255, np.uint8), y=[0, 1, 0, 1])
    data = from_folder(tmp_path)
    assert data.x.dtype == torch.uint8
    assert data.gather("train", torch.tensor([0])).x.unique().tolist() == [1.0]
    np.savez(tmp_path / "a.npz", x=np.arange(8).reshape(4, 2), y=[0, 1, 0, 1])
    assert from_folder(tmp_path).x.dtype == torch.int64


# Splits


def stamped(n=10, **more):
    """One client whose rows carry their number."""
    return {"who": ["a"] * n, "number": np.arange(n, dtype=float), **more}


def rows_of(data, split, client=0):
    return data.gather(split, torch.tensor([client])).x[0, :, 0].tolist()


def test_the_latest_rows_are_the_test_rows():
    days = [f"2024-01-{31 - i:02d}" for i in range(10)]
    data = from_table(
        stamped(day=days), "who", time="day", validation_fraction=0.25, normalise=False
    )
    assert rows_of(data, "test") == [0, 1]
    assert rows_of(data, "validation") == [2, 3]
    assert rows_of(data, "train") == [4, 5, 6, 7, 8, 9]
    assert data.encoder.features == ["number"]
    numbers = from_table(
        stamped(t=np.arange(10) % 5), "who", split="time", time="t", normalise=False
    )
    assert rows_of(numbers, "test") == [4, 9]


def test_a_stratified_split_has_every_label_in_its_share():
    labels = ["x"] * 40 + ["y"] * 10 + ["z"] * 50
    data = from_table(
        stamped(100, label=labels), "who", "label", split="stratified", validation_fraction=0.25
    )
    for split, counts in (("test", [8, 2, 10]), ("validation", [8, 2, 10]), ("train", [24, 6, 30])):
        assert torch.bincount(data.y[data.rows[split].index]).tolist() == counts
    other = from_table(stamped(100, label=labels), "who", "label", split="stratified", seed=1)
    assert not torch.equal(other.rows["test"].index, data.rows["test"].index)


def test_a_column_may_say_the_split():
    part = ["train", "Train", "val", "test", "train", "test", "validation", "train", "test", "test"]
    data = from_table(stamped(part=part), "who", split="part", normalise=False)
    assert rows_of(data, "train") == [0, 1, 4, 7]
    assert rows_of(data, "validation") == [2, 6]
    assert rows_of(data, "test") == [3, 5, 8, 9]
    assert data.encoder.features == ["number"]


def test_a_random_split_uses_every_row_once_and_depends_on_the_seed():
    table = {"who": ["a"] * 30 + ["b"] * 20, "number": np.arange(50.0)}
    one, same, other = (
        from_table(table, "who", validation_fraction=0.25, seed=seed) for seed in (0, 0, 1)
    )
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    together = torch.cat([one.rows[split].index for split in ("train", "validation", "test")])
    assert together.sort().values.tolist() == list(range(50))
    assert one.sizes("test").tolist() == [6, 4]
    assert one.sizes("validation").tolist() == [6, 4]
    alone = from_table({"who": ["b"] * 20, "number": np.arange(20.0)}, "who", seed=0)
    assert (alone.rows["test"].index + 30).tolist() == one.rows["test"].index[6:].tolist()


@pytest.mark.parametrize(
    ("more", "options", "error", "sentence"),
    [
        ({"part": ["tain"] * 10}, {"split": "part"}, DataError, "Row 0 .* 'part' must say train"),
        ({}, {"split": "part"}, DataError, "split must be 'random', 'stratified', 'time' or a col"),
        ({}, {"split": "time"}, ConfigError, "Give time=COLUMN"),
        ({}, {"time": "day"}, DataError, "there must be a time column 'day'"),
        ({"day": ["2024-01-01"] * 9 + [""]}, {"time": "day"}, DataError, "Row 9 .* must have a ti"),
        ({"day": ["31.13.2024"] * 10}, {"time": "day"}, DataError, "Row 0 .*written as 2024-12-31"),
        ({}, {"split": "stratified"}, ConfigError, "'stratified' needs labels"),
        ({"part": ["test"] * 10}, {"split": "part"}, DataError, "Client 'a' has none"),
    ],
)
def test_impossible_splits_are_refused(more, options, error, sentence):
    with pytest.raises(error, match=sentence):
        from_table(stamped(**more), "who", **options)


# Tables


def test_a_table_keeps_clients_in_order_of_appearance(tmp_path):
    rows = ["z,1,no", "b,2,yes", "z,3,no", "b,5,yes", "a,4,no"]
    path = site(tmp_path, "all.csv", *rows, header="who,age,ill")
    data = from_table(path, client="who", label="ill", normalise=False, test_fraction=0)
    assert data.names == ("z", "b", "a")
    assert [rows_of(data, "train", i) for i in range(2)] == [[1, 3], [2, 5]]
    assert data.options["table"] == str(path.resolve())
    assert make(data.name, **data.options).fingerprint() == data.fingerprint()


def test_a_data_frame_is_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "who": [3, 3, 4, 4],
            "age": pandas.array([1, None, 3, 5], dtype="Int64"),
            "ward": pandas.Categorical(["a", "b", None, "a"]),
            "seen": pandas.to_datetime(["2024-01-01"] * 4, utc=True),
            "ok": pandas.array([True, False, None, True], dtype="boolean"),
            "ill": [True, False, True, True],
        }
    )
    data = from_table(frame, client="who", label="ill", test_fraction=0)
    assert data.names == ("3", "4")
    assert data.classes == ("False", "True")
    assert data.options is None
    assert data.encoder.features == [
        *("age", "age is missing", "ward=a", "ward=b", "ward is missing", "ok", "ok is missing")
    ]
    assert torch.equal(data.encoder.encode(frame), data.x)
    assert torch.equal(data.encoder.labels(frame), data.y)


@pytest.mark.parametrize(
    ("labels", "task", "outputs"),
    [
        ([0, 1, 2, 1], "classification", 3),
        (["1.0", "2.0", "1.0", "2.0"], "classification", 2),
        ([0.5, 1, 2, 1], "regression", 1),
        ([True, False, True, True], "classification", 2),
        (["a", "b", "a", "c"], "classification", 3),
        (list(range(62)), "classification", 62),
        ([25 + 7 * i for i in range(40)], "regression", 1),
    ],
)
def test_the_task_is_inferred_and_said(labels, task, outputs):
    table = {"who": ["a"] * len(labels), "age": np.arange(len(labels)), "ill": labels}
    data = from_table(table, client="who", label="ill")
    assert (data.task, data.n_outputs) == (task, outputs)
    assert f"so the task is {task}" in data.notes[0]
    if task == "regression":
        assert from_table(table, "who", "ill", task="regression").n_outputs == 1


def test_the_task_may_be_given():
    table = {"who": ["a"] * 30, "age": np.arange(30), "ill": np.arange(30) * 2}
    assert from_table(table, "who", "ill", task="classification").n_outputs == 30
    assert from_table(table, "who", "ill", task="reconstruction").task == "reconstruction"
    assert "reconstruction" in from_table(table, "who").notes[0]


# Partitions and functions


class Partitions:
    num_partitions = 2

    def __init__(self, load):
        self.load_partition = load


class Dataset:
    """As the datasets package has them: columns by name, labels with names."""

    column_names = ("image", "label")

    class Names:
        names = ("cat", "dog")

    features = {"label": Names}  # noqa: RUF012

    def __getitem__(self, name):
        image = [np.full((1, 2, 2), i, dtype=np.uint8) for i in range(4)]
        return {"image": image, "label": [0, 1, 1, 0]}[name]


def test_partitions_may_be_dicts_frames_or_datasets():
    columns = {"age": [1.0, 2.0, 4.0], "ill": [0, 1, 0]}
    data = from_partitions(Partitions(lambda i: columns), label="ill")
    assert data.names == ("client-0", "client-1")
    assert data.options is None
    named = from_partitions(Partitions(lambda i: columns), label="ill", names=["x", "y"])
    assert named.names == ("x", "y")
    images = from_partitions(Partitions(lambda i: Dataset()), label="label", test_fraction=0)
    assert images.classes == ("cat", "dog")
    assert images.x.shape == (8, 1, 2, 2)
    assert images.y[:4].tolist() == [0, 1, 1, 0]


def test_partitions_may_hold_pillow_images():
    image = pytest.importorskip("PIL.Image")
    column = [image.new("RGB", (4, 3), (i, 0, 0)) for i in range(4)]
    data = from_partitions(
        Partitions(lambda i: {"img": column, "id": [1, 2, 3, 4], "label": [0, 1, 0, 1]}), "label"
    )
    assert data.sample_shape == (3, 3, 4)
    assert "Column 'id' is left out beside inputs that are arrays." in data.notes


def test_a_function_loads_each_client():
    def load(name):
        x = np.arange(8.0).reshape(4, 2) + len(name)
        return {
            "pair": (x, [0, 1, 0, 1]),
            "four": (x[:3], [0, 1, 0], x[3:], [1]),
            "dict": {"x_train": x[:3], "y_train": [0, 1, 0], "x_test": x[3:], "y_test": [1]},
            "none": (x, None),
        }[name]

    assert from_function(load, ["pair"], test_fraction=0.25).sizes("train").tolist() == [3]
    for form in ("four", "dict"):
        data = from_function(load, [form], normalise=False)
        assert data.gather("test", torch.tensor([0])).x.tolist() == [[[10.0, 11.0]]]
    assert from_function(load, ["none"]).task == "reconstruction"
    with pytest.raises(DataError, match=r"all clients or none must have test data of their own"):
        from_function(load, ["four", "pair"])
    with pytest.raises(DataError, match=r"load must return \(x, y\).* Got 3 values"):
        from_function(lambda name: (1, 2, 3), ["a"])
    with pytest.raises(DataError, match=r"x has 4 rows, y has shape \[3\]"):
        from_function(lambda name: (np.ones((4, 2)), [0, 1, 0]), ["a"])


def test_several_numbers_to_predict_keep_their_columns():
    y = np.array([[1.0, 100.0], [2.0, 300.0], [3.0, 500.0]])
    data = from_function(lambda name: (np.ones((3, 1)), y), ["a", "b"], test_fraction=0)
    assert (data.task, data.n_outputs) == ("regression", 2)
    torch.testing.assert_close(data.y[:3, 0], data.y[:3, 1])
    np.testing.assert_allclose(data.encoder.decode(data.y[:3]), y, rtol=1e-6)


# Images


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for client in ("ann", "bob"):
        for k, kind in enumerate(("cat", "dog")):
            folder = tmp_path / "pictures" / client / kind
            folder.mkdir(parents=True)
            for i in range(3):
                mode, colour = ("L", 100 * k + i) if client == "ann" else ("RGB", (255, k, i))
                image.new(mode, (5, 4), colour).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def test_folders_of_images_are_a_federation(pictures):
    data = from_folder(pictures, test_fraction=0)
    assert data.names == ("ann", "bob")
    assert data.classes == ("cat", "dog")
    assert data.x.dtype == torch.uint8
    assert data.sample_shape == (3, 4, 5)  # grey images as colour ones, because bob has those
    assert data.x[3].unique().tolist() == [100]
    batch = data.gather("train", torch.tensor([1]))
    assert batch.x[0, :, 0].unique().tolist() == [1.0]
    assert batch.y.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert make(data.name, **data.options).fingerprint() == data.fingerprint()
    assert from_folder(pictures, names=["ann"]).sample_shape == (1, 4, 5)


def test_images_are_scaled_on_request(pictures):
    image = pytest.importorskip("PIL.Image")
    image.new("L", (9, 9)).save(pictures / "ann" / "cat" / "9.jpg")
    with pytest.raises(
        DataError, match=r"one size. ann/cat/0.png has 4x5, ann/cat/9.jpg 9x9.*size"
    ):
        from_folder(pictures)
    data = from_folder(pictures, size=6)
    assert data.sample_shape == (3, 6, 6)
    assert make(data.name, **json.loads(json.dumps(data.options))).sample_shape == (3, 6, 6)


def test_damaged_and_misplaced_images_are_refused(pictures):
    (pictures / "ann" / "cat" / "7.png").write_text("no image")
    with pytest.raises(DataError, match=r"ann/cat/7.png: a .png file must hold an image"):
        from_folder(pictures)
    (pictures / "ann" / "cat" / "7.png").rename(pictures / "ann" / "7.png")
    with pytest.raises(DataError, match=r"ann/7.png: images must lie in client/class/image"):
        from_folder(pictures)
    (pictures / "ann" / "7.png").rename(pictures / "7.csv")
    with pytest.raises(DataError, match=r"'7.csv' is beside the folder 'ann'"):
        from_folder(pictures)


def test_images_without_the_extra_name_it(pictures, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'coterie\[images\]'"):
        from_folder(pictures)


# Bad input


def damage(folder: Path, how: str) -> None:
    rows = ["30,a,0", "31,b,1"]
    header = HEADER
    match how:
        case "missing column":
            rows, header = ["30,0", "31,1"], "age,ill"
        case "extra column":
            rows, header = ["30,a,0,1", "31,b,1,2"], HEADER + ",height"
        case "short row":
            rows = ["30,a,0", "31,b"]
        case "long row":
            rows = ["30,a,0", "31,b,1,4"]
        case "no label column":
            header = "age,ward,sick"
        case "infinite":
            rows = ["30,a,0", "inf,b,1"]
        case "text among numbers":
            rows = ["30,a,0", "old,b,1"]
        case "other labels":
            rows = ["30,a,no", "31,b,yes"]
        case "twice the header":
            header = "age,age,ill"
        case "no rows":
            rows = []
    site(folder, "site-11.csv", *rows, header=header)
    match how:
        case "empty file":
            (folder / "site-11.csv").write_bytes(b"")
        case "same name":
            site(folder, "site-11.tsv", header=HEADER)
        case "picture":
            (folder / "site-11.csv").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
        case "zeros":
            (folder / "site-11.csv").write_bytes(b"age\0ward\0ill")
        case "garbage parquet":
            (folder / "site-12.parquet").write_bytes(b"PAR1 and so on")
        case "garbage npz":
            (folder / "site-12.npz").write_bytes(b"PK and so on")
        case "pickle":
            np.savez(folder / "site-12.npz", x=np.array([{}, []], dtype=object))
        case "cut npz":
            np.savez_compressed(folder / "site-12.npz", x=np.random.default_rng(0).random((50, 3)))
            whole = bytearray((folder / "site-12.npz").read_bytes())
            whole[60:400] = bytes(340)
            (folder / "site-12.npz").write_bytes(whole)
        case "array named npz":
            with (folder / "site-12.npz").open("wb") as file:
                np.save(file, np.ones((3, 2)))
        case "other names":
            np.savez(folder / "site-12.npz", images=np.ones(3))
        case "unknown ending":
            (folder / "notes.docx").write_text("hello")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("missing column", r"site-1.csv has 'ward', site-11.csv has not.*drop=\['ward'\]"),
        ("extra column", r"site-11.csv has 'height', site-1.csv has not.*drop=\['height'\]"),
        ("short row", "site-11.csv: every row must have 3 cells.* Row 3 has 2"),
        ("long row", "site-11.csv: every row must have 3 cells.* Row 3 has 4"),
        ("no label column", "site-11.csv must have the label column 'ill'"),
        ("infinite", "'age' must hold finite numbers.* Row 3 of site-11.csv has inf"),
        ("text among numbers", "'age' must hold numbers .* Row 3 of site-11.csv has 'old'"),
        ("other labels", "numbers in site-1.csv and 'no' in site-11.csv. Write them alike"),
        ("twice the header", "site-11.csv: columns must have different names. 'age'"),
        ("no rows", "every client must have rows. site-11.csv has none"),
        ("empty file", "site-11.csv: a file must have rows. It is empty"),
        ("same name", "unique. 'site-11' is the name of site-11.csv and of site-11.tsv"),
        ("picture", "site-11.csv: a .csv file must be text.* save it as UTF-8"),
        ("zeros", "site-11.csv: a .csv file must be text.* save it as UTF-8"),
        ("garbage parquet", "site-12.parquet: a .parquet file must hold Parquet data"),
        ("garbage npz", "site-12.npz: a .npz file must hold plain arrays"),
        ("pickle", "site-12.npz: a .npz file must hold plain arrays"),
        ("cut npz", "site-12.npz: a .npz file must hold plain arrays"),
        ("array named npz", "site-12.npz: a .npz file must hold plain arrays"),
        ("other names", "site-12.npz: arrays must be named x and y.* Got images"),
        ("unknown ending", "must end in .csv, .tsv, .data, .*.npz. Got 'notes.docx'"),
    ],
)
def test_unusable_files_are_refused_in_one_sentence(sites, how, sentence):
    if how == "garbage parquet":
        pytest.importorskip("pyarrow")
    damage(sites, how)
    with pytest.raises(DataError, match=sentence) as error:
        from_folder(sites, label="ill")
    assert "\n" not in str(error.value)
    assert str(sites) not in str(error.value)


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"must hold a file or a folder per client. It is empty"):
        from_folder(tmp_path)
    with pytest.raises(DataError, match=r"must be a folder. It does not exist"):
        from_folder(tmp_path / "nowhere")
    path = site(tmp_path, "a.csv", "1,a,0")
    with pytest.raises(DataError, match="It is a file; use from_table"):
        from_folder(path)
    (tmp_path / "other" / "ann").mkdir(parents=True)
    with pytest.raises(DataError, match="ann: a client must have an image"):
        from_folder(tmp_path / "other")


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ({"ill": [1, 1, 1]}, {"label": "ill"}, "at least two classes. Every row has '1'"),
        ({"ill": [0, 1, 2]}, {"label": "il"}, r"Unknown column 'il'\. Did you mean 'ill'"),
        ({"ill": [0.0, np.inf, 0.5]}, {"label": "ill"}, "labels must be finite. Row 1 of"),
        ({"ill": list("abc")}, {"label": "ill", "task": "regression"}, "regression must have num"),
        ({"ill": [0, 0.5, 1]}, {"label": "ill", "task": "classification"}, "has fractions"),
        ({}, {"task": "regression"}, "regression must have a label"),
        ({"age": ["", "", ""]}, {}, "Column 'age' must have a value somewhere"),
        ({}, {"drop": ["age"]}, "there must be a column to learn from"),
        ({"who": ["a", "", "b"]}, {}, "every row must name its client. Row 1 of the table"),
        ({"age": [1, 2]}, {}, "columns must be of one length. 'who' has 3 rows, 'age' has 2"),
        ({}, {"client": "site"}, "must have the client column. Unknown column 'site'"),
    ],
)
def test_unusable_tables_are_refused(columns, options, sentence):
    table = {"who": ["a", "a", "b"], "age": [1, 2, 3]} | columns
    with pytest.raises(DataError, match=sentence):
        from_table(table, **({"client": "who"} | options))


def test_unusable_partitions_are_refused():
    with pytest.raises(DataError, match="list has no num_partitions"):
        from_partitions([])
    with pytest.raises(DataError, match=r"names must be 2, one per partition. Got 1"):
        from_partitions(Partitions(lambda i: {"a": [1]}), names=["x"])
    two = {"a": np.ones((2, 3)), "b": np.ones((2, 3)), "y": [0, 1]}
    with pytest.raises(DataError, match=r"partition 0: at most one column may hold arrays.*drop"):
        from_partitions(Partitions(lambda i: two), label="y")
    ragged = {"a": [np.ones(2), np.ones(3)], "y": [0, 1]}
    with pytest.raises(DataError, match="the entries of 'a' must be of one shape"):
        from_partitions(Partitions(lambda i: ragged), label="y")
    with pytest.raises(DataError, match=r"at least one client\. Got none"):
        from_function(lambda name: None, [])
    with pytest.raises(DataError, match=r"unique. 'a' is the name of"):
        from_function(lambda name: (np.ones((2, 1)), [0, 1]), ["a", "a"])
