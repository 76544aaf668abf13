import json

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data import from_table
from coterie.data.cells import Cells, RawTable
from coterie.data.columns import Statistics, merge, profile, statistics
from coterie.data.encoder import Encoder, Rule, hash_of
from coterie.data.tables import read


def frame(**columns):
    """Two clients, a and b, with a label; everything is for training."""
    n = len(next(iter(columns.values())))
    half = n // 2
    base = {"who": ["a"] * half + ["b"] * (n - half), "y": ["no", "yes"] * half + ["no"] * (n % 2)}
    return base | columns


def fitted(options=None, **columns):
    return from_table(
        frame(**columns), client="who", label="y", **({"test_fraction": 0.0} | (options or {}))
    )


def test_merged_statistics_equal_those_of_the_pool():
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e6, 3.0, n) for n in (1, 7, 40)]  # far from zero: cancellation would show
    found = merge([statistics(Cells("number", part), "number") for part in parts])
    pool = np.concatenate(parts)
    assert found.n == 48
    assert found.mean == pytest.approx(pool.mean(), rel=1e-14)
    assert found.deviations / found.n == pytest.approx(pool.var(), rel=1e-10)


def test_a_client_tells_no_text_and_no_more_than_51_hashes():
    words = np.array([f"a remark {i}" for i in range(90)], dtype=object)
    told = profile(RawTable("t", {"c": Cells("text", words)}, np.arange(90)), "c")
    assert len(told.hashes) == 51
    assert told.n_spaced == 90
    assert statistics(Cells("text", words), "category").categories is None
    assert statistics(Cells("text", words), "text") == Statistics(90, 0)


def test_numbers_are_standardised_by_the_federation():
    age = [20.0, 30, 41, 7, 99, 5]
    data = fitted(age=age)
    expected = (np.array(age) - np.mean(age)) / np.std(age)
    np.testing.assert_allclose(data.x[:, 0], expected, rtol=1e-6)
    assert fitted({"normalise": False}, age=age).x[:, 0].tolist() == age


def test_only_training_rows_enter_the_statistics():
    part = ["train", "train", "test", "train", "train", "test"]
    data = fitted({"split": "part"}, age=[1.0, 2, 1e6, 3, 4, -1e6], part=part)
    (rule,) = data.encoder.rules
    assert rule.shift == 2.5
    assert rule.scale == pytest.approx(np.std([1, 2, 3, 4]))


def test_a_constant_column_becomes_zero():
    assert fitted(age=[0.1] * 4, other=[1, 2, 3, 4]).x[:, 0].tolist() == [0.0] * 4


def test_missing_numbers_take_the_mean_and_are_marked():
    data = fitted(age=["1", "NA", "", "4", "nan", "7"])
    assert data.encoder.features == ["age", "age is missing"]
    assert data.x[:, 1].tolist() == [0, 1, 1, 0, 1, 0]
    assert data.x[[1, 2, 4], 0].tolist() == [0, 0, 0]
    assert any("'age': 3 of 6 training values missing" in note for note in data.notes)
    plain = fitted({"normalise": False}, age=["1", "NA", "", "4", "nan", "7"])
    assert plain.x[:, 0].tolist() == [1, 4, 4, 4, 4, 7]


def test_categories_are_the_union_and_the_unknown_is_all_zeros():
    data = fitted(ward=["x", "z", None, "y"])
    assert data.encoder.features == ["ward=x", "ward=y", "ward=z", "ward is missing"]
    assert data.x.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert data.encoder.encode({"ward": ["y", "new"]}).tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]


def test_a_category_of_test_rows_alone_is_unknown():
    data = fitted({"split": "part"}, ward=list("abac"), part=["train", "train", "train", "test"])
    assert data.encoder.features == ["ward=a", "ward=b"]
    assert data.x[3].tolist() == [0, 0]


def test_more_than_fifty_categories_are_hashed():
    codes = [f"c{i}" for i in range(60)]
    data = fitted(code=codes)
    assert data.x.shape == (60, 32)
    assert data.x.argmax(1).tolist() == [hash_of(code) % 32 for code in codes]
    assert (data.x.sum(1) == 1).all()
    assert "more than 50 categories, hashed to 32" in " ".join(data.notes)
    assert fitted(code=codes[:50]).x.shape == (50, 50)


def test_few_texts_are_weighted_words():
    remarks = ["He slept well", "no pain", "well, well", "pain and pain again"]
    data = fitted(remark=remarks)
    # Two words occur in two texts, "well" and "pain"; the others are left out.
    assert data.x.shape == (4, 2)
    well = data.x[2].argmax()
    one = torch.zeros(4, 2)
    one[[0, 2], well] = 1
    one[[1, 3], 1 - well] = 1
    torch.testing.assert_close(data.x, one)  # length one, whatever the counts
    assert data.notes[-1] == (
        "Column 'remark': text as weighted words (TF-IDF of 2 word hashes, SVD to 2 features), "
        "fitted without pooling any text."
    )


def test_few_repeated_values_with_spaces_are_categories():
    assert fitted(city=["New York", "Los Angeles"] * 4).x.shape == (8, 2)
    assert fitted({"text": ["city"]}, city=["New York", "Los Angeles"] * 4).x.shape == (8, 4)


def test_true_and_false_are_one_and_zero():
    for values in (["True", "false", "TRUE", ""], [True, False, True, None]):
        data = fitted(smokes=values)
        assert data.encoder.rules[0].kind == "boolean"
        torch.testing.assert_close(data.x[:, 0], torch.tensor([1, 0, 1, 2 / 3]))
        assert data.x[:, 1].tolist() == [0, 0, 0, 1]


def test_dates_are_left_out_and_said():
    data = fitted(day=["2024-01-31", "2024-02-01", "", "2023-05-06 10:30"], age=[1, 2, 3, 4])
    assert data.encoder.features == ["age"]
    assert "Column 'day' holds dates and is left out." in data.notes
    days = np.array(["2024-01-31"] * 4, dtype="datetime64[D]")
    assert fitted(day=days, age=[1, 2, 3, 4]).encoder.features == ["age"]


def test_columns_can_be_taken_as_categories():
    data = fitted({"categorical": ["ward"]}, ward=[1, 2, 12, 2])
    assert data.encoder.features == ["ward=1", "ward=12", "ward=2"]


@pytest.mark.parametrize("form", ["dict", "array", "frame", "csv"])
def test_new_rows_are_encoded_alike_from_any_form(form, tmp_path):
    encoder = Encoder((Rule("a", "number", 1.0, 1.0, 2.0), Rule("b", "number", 0.0, 0.0, 1.0)))
    rows = {"b": [7.0, 8.0], "a": [3.0, 5.0], "more": ["x", "y"]}
    if form == "array":
        given = np.array([[3.0, 7], [5, 8]])
    elif form == "frame":
        given = pytest.importorskip("pandas").DataFrame(rows)
    elif form == "csv":
        given = tmp_path / "new.csv"
        given.write_text("b,a,more\n7,3,x\n8,5,y\n")
    else:
        given = rows
    assert encoder.encode(given).tolist() == [[1, 7], [2, 8]]


def test_an_encoder_survives_json():
    data = fitted(
        age=[1.5, None, 3, 4], ward=list("abca"), remark=["so it is", "no", "a b", "c d e"]
    )
    again = Encoder.from_dict(json.loads(json.dumps(data.encoder.to_dict())))
    assert again == data.encoder
    table = {"age": [9.0], "ward": ["b"], "remark": ["so be it"]}
    assert torch.equal(again.encode(table), data.encoder.encode(table))


def test_labels_and_their_names():
    encoder = fitted(age=[1, 2, 3, 4]).encoder
    assert encoder.labels(["yes", "no"]).tolist() == [1, 0]
    assert encoder.labels({"y": ["no"], "age": [3]}).tolist() == [0]
    assert encoder.decode(torch.tensor([1, 0, 0])) == ["yes", "no", "no"]
    with pytest.raises(DataError, match=r"Row 1 of labels: Unknown label 'yess'\. Did you mean"):
        encoder.labels(["yes", "yess"])


def test_numbers_to_predict_are_standardised_and_come_back():
    y = [100.5, 300.25, 250.0, 151.0]
    table = {"who": list("aabb"), "age": [1, 2, 3, 4], "y": y}
    data = from_table(table, client="who", label="y", test_fraction=0.0)
    assert data.task == "regression"
    np.testing.assert_allclose(data.y, (np.array(y) - np.mean(y)) / np.std(y), rtol=1e-6)
    np.testing.assert_allclose(data.encoder.decode(data.y), y, rtol=1e-6)
    torch.testing.assert_close(data.encoder.labels(y), data.y)
    plain = from_table(table, client="who", label="y", test_fraction=0.0, normalise=False)
    assert plain.y.tolist() == y
    assert plain.encoder.decode(plain.y).tolist() == y


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"age": ["1", "2", "x", "4"]}, r"'age' must hold numbers .* Row 2 of the table has 'x'"),
        ({"age": ["", "NA", "", ""]}, r"'age' must have a value somewhere.*drop=\['age'\]"),
        (
            {"age": [1, np.inf, 2, 3]},
            r"'age' must hold finite numbers.* Row 1 of the table has inf",
        ),
        ({"age": ["1", "2", "-inf", "3"]}, r"finite numbers.* Row 2 of the table has -inf"),
        ({"age": ["True", "False", "3", "4"]}, "must hold numbers everywhere or nowhere"),
        ({"age": [1, 2, 1e308, 1]}, r"finite numbers, at most 1e\+30. Row 2 of the table has 1e"),
    ],
)
def test_unusable_columns_are_refused(columns, sentence):
    with pytest.raises(DataError, match=sentence):
        fitted(**columns)


def test_numbers_in_one_client_and_text_in_another_are_refused():
    with pytest.raises(DataError, match=r"'sex' must hold numbers .*categorical=\['sex'\]"):
        fitted(sex=["0", "1", "f", "m"])
    assert fitted({"categorical": ["sex"]}, sex=["0", "1", "f", "m"]).x.shape == (4, 4)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"ward": ["a"]}, "there must be a column 'age', as in training. Got ward"),
        ({"age": ["3", "old"], "ward": ["a", "b"]}, "Row 1 of the table has 'old'"),
        ({"age": [np.inf], "ward": ["a"]}, "must hold finite numbers.* Row 0"),
        ([[1.0, 2.0, 3.0]], r"must have 2 columns: age, ward. It has shape \[1, 3\]"),
    ],
)
def test_unusable_new_rows_are_refused(rows, sentence):
    encoder = fitted(age=[1, 2, 3, 4], ward=list("abab")).encoder
    with pytest.raises(DataError, match=sentence):
        encoder.encode(rows)


def test_cells_are_read_as_what_all_of_them_can_be():
    table = read(
        {
            "whole": ["1", " 2 ", ""],
            "grouped": ["1_000", "2", "3"],
            "mixed": [1, "2", None],
            "none": [None, None, None],
        }
    )
    assert {name: cells.kind for name, cells in table.cells.items()} == {
        "whole": "number",
        "grouped": "text",
        "mixed": "number",
        "none": "nothing",
    }


def test_an_encoder_of_arrays_keeps_shape_and_type():
    images = Encoder.of_arrays(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), "classification", None)
    assert images.encode(np.full((1, 1, 2, 2), 255, dtype=np.uint8)).unique().tolist() == [1.0]
    with pytest.raises(DataError, match=r"samples must be numbers of shape \[1, 2, 2\]"):
        images.encode(np.zeros((1, 4)))
    tokens = Encoder.of_arrays(torch.zeros(2, 3, dtype=torch.int64), "classification", None)
    assert tokens.encode([[1, 2, 3]]).dtype == torch.int64
    assert Encoder.from_dict(json.loads(json.dumps(images.to_dict()))) == images
