"""Units (rows that belong together) and times, in every loader and every split."""

import numpy as np
import pytest
import torch

from coterie.core import task
from coterie.core.client import Batch
from coterie.core.errors import DataError
from coterie.core.random import seed_key
from coterie.data import (
    DataCard,
    FederatedData,
    RowIndex,
    from_arrays,
    from_folder,
    from_function,
    from_partitions,
    from_table,
)
from coterie.data.clients import one_client
from coterie.data.tables import read
from coterie.data.units import number_units, read_times
from coterie.engines import Simulation

SPLITS = ("train", "validation", "test")


def visits(n_patients=10, per_patient=3, sites=("north", "south")):
    rng = np.random.default_rng(0)
    n = n_patients * per_patient
    columns = {"site": [], "patient": [], "day": [], "age": [], "ill": []}
    for site in sites:
        order = rng.permutation(np.repeat(np.arange(n_patients), per_patient))
        columns["site"] += [site] * n
        columns["patient"] += [f"p{i}" for i in order]
        columns["day"] += [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in rng.permutation(n)]
        columns["age"] += rng.normal(size=n).tolist()
        columns["ill"] += [int(i % 2) for i in order]
    return columns


def assert_whole(data: FederatedData):
    """No unit has rows in two splits."""
    for i in range(len(data)):
        ids = torch.tensor([i])
        found = [
            set(batch.unit[batch.mask].tolist())
            for batch in (data.gather(split, ids) for split in SPLITS)
        ]
        assert not found[0] & found[1]
        assert not found[0] & found[2]
        assert not found[1] & found[2]


@pytest.mark.parametrize("split", ["stratified", "time"])
def test_units_stay_together(split):
    data = from_table(
        visits(), "site", "ill", unit="patient", split=split, time="day", validation_fraction=0.25
    )
    assert_whole(data)
    # 10 units of 3 rows: 2 for testing, a quarter of 8 for validation.
    assert data.sizes("test").tolist() == [6, 6]
    assert data.sizes("validation").tolist() == [6, 6]
    assert [rule.name for rule in data.encoder.rules] == ["age"]


def test_hold_out_moves_whole_units():
    data = from_table(visits(), "site", "ill", unit="patient", drop=["day"])
    held = data.hold_out(0.5, seed=3)
    assert_whole(held)
    assert held.sizes("validation").tolist() == [12, 12]
    assert held.notes[-1] == "0.5 of the training units held out, seed 3."


def test_rows_as_their_own_units_give_the_split_without_units():
    columns = visits()
    columns["row"] = list(range(len(columns["site"])))
    plain = from_table(visits(), "site", "ill", drop=["patient", "day"])
    named = from_table(columns, "site", "ill", unit="row", drop=["patient", "day"])
    assert plain.unit is None
    for split in SPLITS:
        assert torch.equal(plain.rows[split].index, named.rows[split].index)
    assert plain.fingerprint() != named.fingerprint()


def test_stratified_units_keep_the_share_of_labels():
    data = from_table(
        visits(20), "site", "ill", unit="patient", split="stratified", test_fraction=0.5,
        drop=["day"],
    )  # fmt: skip
    for i in range(2):
        batch = data.gather("test", torch.tensor([i]))
        assert float(batch.y[batch.mask].float().mean()) == 0.5


def test_latest_units_are_held_out_first():
    rows = {
        "site": ["a"] * 6,
        "patient": [1, 1, 2, 2, 3, 3],
        "day": [1, 9, 2, 3, 4, 5],
        "x": [0.0, 1, 2, 3, 4, 5],
        "y": [0, 1, 0, 1, 0, 1],
    }
    data = from_table(rows, "site", "y", unit="patient", time="day", test_fraction=0.34)
    # The last row of patient 1 is the latest of all.
    assert data.rows["test"].index.tolist() == [0, 1]
    held = data.hold_out(0.5, seed=0)
    assert held.rows["validation"].index.tolist() == [4, 5]
    assert held.notes[-1] == "The latest 0.5 of the training units held out."


def test_several_columns_name_a_unit_and_a_time():
    rows = {
        "site": ["a"] * 4,
        "year": [2023, 2024, 2024, 2023],
        "month": [12, 1, 1, 12],
        "x": [0.0, 1, 2, 3],
        "y": [0, 1, 0, 1],
    }
    data = from_table(
        rows, "site", "y", unit=["year", "month"], time=["year", "month"], test_fraction=0.5
    )
    assert data.unit.tolist() == [0, 1, 1, 0]
    assert data.rows["test"].index.tolist() == [1, 2]
    assert data.options is None
    assert [rule.name for rule in data.encoder.rules] == ["x"]


def test_arrays():
    xs, ys = [torch.randn(6, 2), torch.randn(4, 2)], [[0, 1] * 3, [0, 1] * 2]
    unit = [["u", "u", "v", "v", "w", "w"], [5, 5, 9, 9]]
    data = from_arrays(xs, ys, unit=unit, test_fraction=0.4)
    assert data.unit.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert_whole(data)
    timed = from_arrays(xs, ys, time=[range(6), ["2024-01-0" + d for d in "4231"]])
    assert timed.rows["test"].index.tolist() == [5, 6]
    test = [x[:1] for x in xs], [[1], [0]]
    own = from_arrays(xs, ys, test=test, unit=[[0, 0, 1, 1, 2, 2, 7], [0, 1, 1, 1, 3]])
    assert own.unit.tolist() == [0, 0, 1, 1, 2, 2, 4, 5, 5, 5, 3, 6]
    with pytest.raises(DataError, match="Client 'client-0' has a unit with rows in xs and in test"):
        from_arrays(xs, ys, test=test, unit=[[0, 0, 1, 1, 2, 2, 1], [0, 1, 1, 1, 3]])
    with pytest.raises(DataError, match="'client-1' has 4 rows and unit of shape"):
        from_arrays(xs, ys, unit=[range(6), range(3)])


def test_folder_function_and_partitions(tmp_path):
    columns = visits(sites=("north",))
    columns.pop("site")
    names = list(columns)
    for site in ("north", "south"):
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (tmp_path / f"{site}.csv").write_text("\n".join([",".join(names), *lines]))
    options = {"label": "ill", "unit": "patient", "time": "day"}

    class Partitions:
        num_partitions = 2

        def load_partition(self, i):
            return columns

    federations = [
        from_folder(tmp_path, **options),
        from_function(lambda name: columns, ["north", "south"], **options),
        from_partitions(Partitions(), names=("north", "south"), **options),
    ]
    for data in federations:
        assert_whole(data)
        assert torch.equal(data.rows["test"].index, federations[0].rows["test"].index)
        assert torch.equal(data.unit, federations[0].unit)
    assert federations[0].options["unit"] == ["patient"]


def test_arrays_by_name_have_their_unit_beside_them(tmp_path):
    def load(name):
        x = np.random.default_rng(1).normal(size=(8, 3))
        return {"x": x, "y": [0, 1] * 4, "patient": [0, 0, 1, 1, 2, 2, 3, 3]}

    data = from_function(load, ["ann"], unit="patient")
    assert_whole(data)
    assert data.sample_shape == (3,)
    np.savez(tmp_path / "ann.npz", **load("ann"))
    assert torch.equal(from_folder(tmp_path, unit="patient").unit, data.unit)
    halves = {
        "x_train": np.ones((2, 3)), "y_train": [0, 1], "patient_train": [4, 4],
        "x_test": np.ones((1, 3)), "y_test": [0], "patient_test": [5],
    }  # fmt: skip
    assert from_function(lambda name: halves, ["ann"], unit="patient").unit.tolist() == [0, 0, 1]


def test_a_given_split_must_not_divide_a_unit():
    rows = {
        "site": ["a"] * 4, "patient": [1, 1, 2, 2], "part": ["train", "test", "train", "train"],
        "x": [0.0, 1, 2, 3], "y": [0, 1, 0, 1],
    }  # fmt: skip
    with pytest.raises(DataError, match="Row 1 of the table: all rows of a unit"):
        from_table(rows, "site", "y", unit="patient", split="part")
    rows["part"] = ["train", "train", "test", "test"]
    assert_whole(from_table(rows, "site", "y", unit="patient", split="part"))


def test_errors_name_the_column_and_the_row():
    rows = {"site": ["a", "a"], "who": ["p", None], "x": [1.0, 2.0], "y": [0, 1]}
    with pytest.raises(DataError, match="there must be a unit column 'patient'"):
        from_table(rows, "site", "y", unit="patient")
    with pytest.raises(DataError, match="Row 1 of the table must have a unit in column 'who'"):
        from_table(rows, "site", "y", unit="who")


def test_a_client_with_one_unit_keeps_it_for_training():
    rows = {
        "site": ["a"] * 3 + ["b"] * 2, "who": [1, 1, 1, 2, 3], "x": [1.0, 2, 3, 4, 5],
        "y": [0, 1, 0, 1, 0],
    }  # fmt: skip
    data = from_table(rows, "site", "y", unit="who")
    assert data.sizes("train").tolist() == [3, 1]
    assert data.sizes("test").tolist() == [0, 1]


def test_a_deployed_client_has_the_units_and_split_of_the_simulation():
    columns = visits()
    data = from_table(columns, "site", "ill", unit="patient", time="day", validation_fraction=0.2)
    card = DataCard.of(data)
    south = read(columns).take(np.flatnonzero(np.array(columns["site"]) == "south"))
    options = {"unit": ["patient"], "time": ["day"], "validation_fraction": 0.2}
    own = one_client(south, "south", card, options)
    for split in SPLITS:
        ours, theirs = own.gather(split, torch.tensor([0])), data.gather(split, torch.tensor([1]))
        assert torch.equal(ours.x, theirs.x)
        assert torch.equal(ours.y, theirs.y)
        assert torch.equal(ours.unit - ours.unit.min(), theirs.unit - theirs.unit.min())


def test_units_are_numbered_as_they_occur():
    unit = torch.tensor([3, 3, 1, 3, 1, 1])
    units, member = RowIndex.blocks([4, 0, 2]).of_units(unit)
    assert units.sizes.tolist() == [2, 0, 1]
    assert units.index.tolist() == [0, 2, 4]
    assert member.tolist() == [0, 0, 1, 0, 2, 2]
    table = read({"a": ["x", "x", "y"], "b": [1, 2, 1]})
    assert number_units(table, ["a", "b"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "words",
    [
        ["2024-01-02", "2024-01-01", "2024-10-01"],
        ["2024-1-2 5:00", "2024-1-2 4:59", "2024-1-2 15:00"],
        ["02.01.2024", "01.01.2024", "01.10.2024"],
        ["1/31/2024", "1/5/2024", "2/1/2024"],
        ["31/1/2024", "30/1/2024", "1/2/2024"],
        ["2024-01-01T12:00Z", "2024-01-01T13:00+02:00", "2024-01-01T14:00Z"],
        [20.5, 3.0, 100.0],
    ],
)
def test_times(words):
    assert read_times(read({"when": words}), ["when"]).argsort().tolist() == [1, 0, 2]


def test_times_that_cannot_be_read():
    with pytest.raises(DataError, match=r"must say which number is the month\. 1/2/2024 does not"):
        read_times(read({"when": ["1/2/2024", "3/4/2024"]}), ["when"])
    with pytest.raises(DataError, match=r"Row 1 of the table: times in column 'when' .* 'soon'"):
        read_times(read({"when": ["2024-01-01", "soon"]}), ["when"])


def test_batch_units():
    x = torch.zeros(3, 1)
    batch = Batch(x, torch.zeros(3), torch.ones(3).bool(), torch.ones(3))
    assert batch.units().tolist() == [0, 1, 2]
    named = batch._replace(unit=torch.tensor([4, 4, 7]))
    assert named.units().tolist() == [4, 4, 7]
    assert named.part(1, 2).units().tolist() == [4, 7]
    assert named.first_of(torch.tensor([2, 0, 1]), 2).units().tolist() == [7, 4]
    assert named.rows(torch.tensor([2, 1]), torch.tensor([True, False])).units().tolist() == [7, 4]


@task
def count_units(client):
    sort = torch.where(client.train.mask, client.train.units(), -1).sort().values
    return {"n": ((sort[1:] != sort[:-1]) & (sort[1:] >= 0)).sum() + (sort[0] >= 0)}


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(("unit", "expected"), [("patient", [10, 10]), (None, [30, 25])])
def test_tasks_see_units(stack, unit, expected):
    columns = visits()
    # Clients of unequal size are padded.
    columns = {name: values[:-5] for name, values in columns.items()}
    data = from_table(columns, "site", "ill", unit=unit, drop=["day"], test_fraction=0)
    fed = Simulation(data, stack=stack)
    assert len(set(columns["patient"][30:])) == 10
    assert fed.map(count_units, to=fed.everyone())[1]["n"].tolist() == expected


def test_key_is_not_used_where_times_are_given():
    rows = RowIndex.blocks([5])
    time = torch.tensor([5.0, 1.0, 4.0, 4.0, 2.0])
    for seed in (0, 1):
        rest, part = rows.divide(["a"], 0.4, seed_key(seed), time=time)
        assert part.index.tolist() == [0, 3]
        assert rest.index.tolist() == [1, 2, 4]
