"""New rows against the groups of a run: who stays, who moved, who fits nowhere, who is new."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError, DataError
from coterie.data.again import prepare_again, undo
from coterie.data.card import DataCard
from coterie.evidence.placing import Place
from coterie.report.recheck import Recheck
from coterie.running.reference import describe_changes

CENTRES = np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])


def rows(seed: int, kind: int, n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Two classes; kind 1 has labels exchanged, kind 2 its inputs shifted, kind 3 labels at random.

    Kinds 0 and 1 have the same inputs.
    """
    rng = np.random.default_rng([seed, kind])
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4)) + CENTRES[y]
    if kind == 2:
        x[:, 2:] += 2.5
    label = {1: 1 - y, 3: rng.integers(0, 2, n)}.get(kind, y)
    return x.astype(np.float32), label


KINDS = [0, 1, 2] * 4


@pytest.fixture(scope="module")
def fit():
    xs, ys = zip(*(rows(i, kind) for i, kind in enumerate(KINDS)), strict=True)
    return coterie.fit(coterie.from_arrays(xs, ys), "survey", rounds=2, compare=False)


def later(changes=None, guests=()) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    kinds = {f"client-{i}": kind for i, kind in enumerate(KINDS)} | (changes or {}) | dict(guests)
    return {name: rows(100 + i, kind) for i, (name, kind) in enumerate(kinds.items())}


def test_nothing_has_changed(fit):
    found = fit.recheck(later())
    assert not found.changed
    assert len(found.stays) == 12
    assert found.sentence == "All 12 clients still fit the group of the run."
    assert [line["now"] for line in found.clients] == [line["group"] for line in fit.rows]


def test_who_moved_who_fits_nowhere_and_who_is_new(fit):
    group = {kind: fit.rows[kind]["group"] for kind in range(3)}
    guests = {"guest": 1, "stranger": 3}
    found = fit.recheck(later({"client-0": 1, "client-4": 3}, guests))
    assert found.moved == {"client-0": group[1]}
    assert found.nowhere == ["client-4", "stranger"]
    assert found.new == {"guest": group[1]}
    assert found.changed
    line = next(line for line in found.clients if line["client"] == "client-0")
    assert line["before"] == group[0]
    assert line["p"] < 1e-3
    assert line["accuracy before"] - line["accuracy"] > 0.3
    text = str(found)
    assert "10 of 12 clients still fit the group they were in." in text
    assert f"client-0 was in group {group[0]} and now fits group {group[1]}." in text
    assert "client-4 fits no group any more." in text
    assert f"New: guest fits group {group[1]}." in text
    assert "New: stranger fits no group." in text
    assert json.loads(found.to_json())["clients"][0]["change"] == "moved"
    assert "<table" in found._repr_html_()


def test_without_labels_only_inputs_count(fit):
    group = {kind: fit.rows[kind]["group"] for kind in range(3)}
    pairs = later({"client-0": 1, "client-3": 2}, {"same": 1, "shifted": 2})
    found = fit.recheck({name: {"x": x} for name, (x, _) in pairs.items()})
    assert found.moved == {"client-3": group[2]}  # client-0 has new labels, which are not seen
    assert found.new == {"shifted": group[2]}
    assert found.need_labels == ["same"]
    assert "Labels are needed for same" in found.sentence
    assert "a change in what a label means cannot be seen" in found.limits


def test_a_newcomer_without_labels(fit):
    group = {kind: fit.rows[kind]["group"] for kind in range(3)}
    spot = fit.place(rows(200, 2)[0])
    assert (spot.group, spot.fits, spot.needs_labels) == (group[2], True, False)
    spot = fit.place(rows(201, 1)[0])
    assert (spot.group, spot.needs_labels) == (-1, True)
    assert set(spot.candidates) == {group[0], group[1]}
    assert "labels are needed" in str(spot)
    assert not fit.place(rows(202, 0)[0] * 6).fits


def test_a_client_in_a_wrong_group_has_not_changed():
    # Client 3 is of kind 1 and was put into the group of kind 0.
    xs, ys = zip(*(rows(i, kind) for i, kind in enumerate(KINDS)), strict=True)
    start = {f"client-{i}": 0 if i == 4 else kind for i, kind in enumerate(KINDS)}
    data = coterie.from_arrays(xs, ys)
    options = {"n_groups": 3, "rounds": 1, "compare": False, "start": start}
    wrong = coterie.fit(data, "ifca", local={"learning_rate": 0.0}, **options)
    assert wrong.rows[4]["group"] == wrong.rows[0]["group"]  # not corrected by the method
    found = wrong.recheck(later())
    assert "client-4" in found.stays


def test_data_may_be_tables_or_prepared(fit, tmp_path):
    pairs = later({"client-0": 1})
    names = [name for name, (x, _) in pairs.items() for _ in x]
    data = coterie.from_arrays(*zip(*pairs.values(), strict=True), names=list(pairs))
    assert fit.recheck(data).moved == fit.recheck(pairs).moved
    loaded = tmp_path / "run"
    fit.save(loaded)
    assert coterie.load(loaded).recheck(pairs).moved == fit.recheck(pairs).moved
    assert len(names) == 12 * 80
    with pytest.raises(DataError, match="client=COLUMN"):
        fit.recheck([[1.0, 2.0]])
    with pytest.raises(DataError, match="must have the shape"):
        fit.recheck(coterie.from_arrays([np.zeros((4, 3), dtype=np.float32)], [[0, 1, 0, 1]]))


def table(kinds: dict[str, int], seed: int) -> dict[str, list]:
    out: dict[str, list] = {"site": [], "a": [], "b": [], "c": [], "ward": [], "ill": []}
    for i, (name, kind) in enumerate(kinds.items()):
        x, y = rows(seed + i, kind)
        for row, label in zip(x, y, strict=True):
            ward = "north" if row[3] > 0 else "south"
            values = (name, 10 * row[0] + 5, row[1], row[2], ward, "yes" if label else "no")
            for column, value in zip(out.values(), values, strict=True):
                column.append(value)
    return out


def test_new_tables_are_prepared_by_the_rules_of_the_run():
    kinds = {f"site-{i}": i % 2 for i in range(8)}
    data = coterie.from_table(table(kinds, 0), client="site", label="ill")
    fit = coterie.fit(data, "survey", rounds=1, compare=False)
    new = table(kinds | {"site-2": 1}, 50)
    direct = fit.recheck(new, client="site")
    assert list(direct.moved) == ["site-2"]
    # The same rows, scaled by statistics of their own.
    other = fit.recheck(coterie.from_table(new, client="site", label="ill"))
    assert other.moved == direct.moved
    card = DataCard.of(data)
    mine, labelled = prepare_again(new, card, "site")
    theirs, _ = prepare_again(coterie.from_table(new, client="site", label="ill"), card)
    assert labelled
    batch = mine.gather("train", torch.tensor([2])), theirs.gather("train", torch.tensor([2]))
    mean = [one.x[0].mean(0) for one in batch]
    torch.testing.assert_close(*mean, rtol=1e-4, atol=1e-4)
    blind = {name: column for name, column in new.items() if name != "ill"}
    assert fit.recheck(blind, client="site").labelled is False


def test_undo_restores_missing_values_and_categories():
    columns = {"age": [1.0, None, 3.0], "ward": ["a", "b", None], "site": ["x", "x", "x"]}
    data = coterie.from_table(columns, client="site", test_fraction=0.0)
    cells = undo(data.encoder, data.x).cells
    assert cells["age"].missing.tolist() == [False, True, False]
    assert cells["age"].values[[0, 2]].tolist() == pytest.approx([1.0, 3.0])
    assert cells["ward"].words == ["a", "b", None]


def test_changes_by_hand():
    p = torch.tensor([[0.5, 1e-6], [1e-6, 0.5], [1e-6, 1e-6], [0.5, 0.4], [1e-9, 1e-9]])
    found = Place(torch.tensor([0, 1, 0, 0, 0]), torch.ones(5), p.double())
    before = {"a": 7, "b": 7, "c": 7, "e": "apart"}
    names = ["a", "b", "c", "d", "e"]
    same = torch.tensor([1e-6, 1e-6, 1e-6, torch.nan, 1e-6])
    lines = describe_changes(found, same, [7, 9], names, before, labelled=False)
    assert [line["change"] for line in lines] == ["stays", "moved", "nowhere", "labels", "stays"]
    assert [line["now"] for line in lines] == [7, 9, None, None, None]


def test_who_is_like_before_has_not_changed():
    # b and c do not fit their group, and never did; d was apart and fits a group by chance.
    p = torch.tensor([[0.5, 1e-6], [1e-6, 0.5], [1e-6, 1e-6], [0.5, 1e-6]])
    found = Place(torch.tensor([0, 1, 0, 0]), torch.ones(4), p.double())
    before = {"a": 7, "b": 7, "c": 7, "d": "apart"}
    same = torch.tensor([0.5, 0.5, 0.5, 0.5])
    lines = describe_changes(found, same, [7, 9], ["a", "b", "c", "d"], before, labelled=True)
    assert [line["change"] for line in lines] == ["stays"] * 4
    assert [line["now"] for line in lines] == [7, 7, 7, None]
    assert lines[1]["p"] == 0.5


def test_a_run_that_kept_no_groups_says_so(fit):
    files = {name: part for name, part in fit.files.items() if name != "reference.safetensors"}
    with pytest.raises(ConfigError, match="did not save the losses"):
        replace(fit, files=files).recheck(later())


def test_an_odd_client_is_said_to_be_still_apart():
    lines = [
        {"client": "a", "rows": 9, "before": 0, "now": 0, "change": "stays", "p": 0.5},
        {"client": "b", "rows": 9, "before": "apart", "now": None, "change": "stays", "p": 0.001},
    ]
    found = Recheck(lines, labelled=True, level=0.05)
    assert found.sentence == "The client still fits the group of the run. b is still apart."
    assert list(found.table["change"]) == ["fits its group", "still apart"]
