"""Exact repeats are found and said, unless they come about by chance or units are named."""

import numpy as np
import pytest
import torch

from coterie.data import from_arrays, from_table
from coterie.data.repeats import count_repeats


def rows(times, n=40, sites=("a", "b")):
    rng = np.random.default_rng(0)
    pick = np.arange(n).repeat(times)
    columns = {"site": [], "case": [], "x": [], "z": [], "y": []}
    for site in sites:
        x, z = rng.normal(size=n), rng.normal(size=n)
        columns["site"] += [site] * len(pick)
        columns["case"] += pick.tolist()
        columns["x"] += x[pick].tolist()
        columns["z"] += z[pick].tolist()
        columns["y"] += (x[pick] > 0).astype(int).tolist()
    return columns


def said(data):
    return [str(warning) for warning in data.warnings if warning.kind == "repeats"]


def test_repeats_are_said_with_figures():
    note = said(from_table(rows(3), "site", "y", drop=["case"]))
    assert len(note) == 1
    assert note[0].startswith("160 of 240 rows (67 %) repeat another row of their client exactly,")
    assert note[0].endswith("(unit=COLUMN).")


def test_silence_without_repeats_and_with_units():
    assert not said(from_table(rows(1), "site", "y", drop=["case"]))
    assert not said(from_table(rows(3), "site", "y", unit="case"))


def test_equal_rows_of_different_clients_are_no_repeats():
    columns = rows(1, sites=("a",))
    both = {name: values * 2 for name, values in columns.items()}
    both["site"] = ["a"] * 40 + ["b"] * 40
    assert not said(from_table(both, "site", "y", drop=["case"]))


def test_rows_of_a_few_categories_agree_by_chance():
    rng = np.random.default_rng(0)
    columns = {
        "site": ["a"] * 200 + ["b"] * 200,
        "sex": rng.choice(["f", "m"], 400).tolist(),
        "ward": rng.choice(["x", "y", "z"], 400).tolist(),
        "y": rng.integers(0, 2, 400).tolist(),
    }
    assert not said(from_table(columns, "site", "y"))


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, torch.int64])
def test_arrays(kind):
    x = torch.arange(200).reshape(20, 10).to(kind)
    ys = [[0, 1] * 20]
    assert not said(from_arrays([x], [[0, 1] * 10]))
    assert said(from_arrays([torch.cat([x, x])], ys))
    assert not said(from_arrays([torch.cat([x, x])], ys, unit=[list(range(20)) * 2]))


def test_counts_by_hand():
    x = torch.tensor([[0.0], [-0.0], [1.0], [0.0], [2.0]])
    y = torch.tensor([0, 0, 0, 1, 0])
    told = count_repeats(x, y)
    assert told[:2] == (5, 1)
    assert told.pairs == 1
    # Three zeros of five in x: 3 of 10 pairs agree; four of five in y: 6 of 10 pairs.
    assert told.chance == pytest.approx(10 * 0.3 * 0.6)
