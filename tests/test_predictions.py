"""Predictions have the row or file they are of, and probabilities; objects have a short repr."""

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError
from coterie.data import blobs


@pytest.fixture(scope="module")
def table():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    return pandas.DataFrame(
        {
            "site": np.repeat(["a", "b", "c"], 30),
            "age": x[:, 0],
            "dose": x[:, 1],
            "ill": np.where(x[:, 0] > 0, "yes", "no"),
        },
        index=[f"p{i}" for i in range(90)],
    )


@pytest.fixture(scope="module")
def fit(table):
    data = coterie.from_table(table, client="site", label="ill")
    return coterie.fit(data, "fedavg", rounds=5, quiet=True)


def test_probabilities_are_those_of_the_outputs(fit, table):
    chances = fit.predict_proba(table, client="a")
    raw = torch.tensor(fit.predict(table, client="a", raw=True)).double()
    np.testing.assert_allclose(chances, raw.softmax(1))
    names = np.array(fit.card.classes)[chances.argmax(1)]
    assert (names == fit.predict(table, client="a")).all()


def test_a_table_has_rows_predictions_and_probabilities(fit, table, tmp_path):
    frame = fit.predict_table(table, client="a")
    columns = ["row", "prediction", "probability of no", "probability of yes"]
    assert list(frame.columns) == columns
    assert frame["row"].tolist() == table.index.tolist()
    assert (frame["prediction"] == fit.predict(table, client="a")).all()
    named = fit.predict_table(table.assign(patient=range(90)), client="a", id="patient")
    assert [int(one) for one in named["patient"]] == list(range(90))
    with pytest.raises(ConfigError, match="Unknown column 'patien'"):
        fit.predict_table(table, client="a", id="patien")
    table.to_csv(tmp_path / "new.csv", index=False)
    assert fit.predict_table(tmp_path / "new.csv", client="a")["row"].tolist()[:2] == [2, 3]


def test_numbers_have_no_probabilities(table):
    data = coterie.from_table(table, client="site", label="age")
    fit = coterie.fit(data, "fedavg", rounds=1, quiet=True)
    with pytest.raises(ConfigError, match=r"there must be classes\. The task is regression"):
        fit.predict_proba(table, client="a")
    assert list(fit.predict_table(table, client="a").columns) == ["row", "prediction"]


def test_images_have_their_file_names_and_need_no_class(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for client in ("a", "b"):
        for kind in ("cat", "dog"):
            folder = tmp_path / "train" / client / kind
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 255, (8, 8)).astype("uint8")
                image.fromarray(pixels).save(folder / f"{i}.png")
    fit = coterie.fit(coterie.from_folder(tmp_path / "train"), "fedavg", rounds=1, quiet=True)
    found = fit.predict_table(tmp_path / "train" / "a", client="a")
    assert found["file"].tolist()[0] == "cat/0.png"
    new = tmp_path / "new"
    new.mkdir()
    image.fromarray(rng.integers(0, 255, (9, 9)).astype("uint8")).save(new / "x.png")
    assert fit.predict_table(new, client="a")["file"].tolist() == ["x.png"]


def test_objects_are_short_in_a_console_and_rich_in_a_notebook(fit, table):
    data = coterie.from_table(table, client="site", label="ill")
    advice = coterie.advise(data)
    both = coterie.fit(blobs(n_groups=2, clients_per_group=3, n=30), "ifca", rounds=2, quiet=True)
    everything = [data, advice, fit, both, both.verdict, fit.groups, fit.encoder, fit.card]
    assert [one for one in everything if len(repr(one)) > 200] == []
    assert repr(fit).startswith("Fitted(fedavg, 3 clients, 1 group, 5 rounds, accuracy ")
    for one in (data, advice, fit, both, both.verdict):
        assert one._repr_html_().startswith("<")
    for one in (both, both.verdict):
        assert one._repr_html_().count("<li>") == len(both.verdict.points)
    assert f"<b>{both.verdict.headline}</b>" in both.verdict._repr_html_()
    evil = coterie.from_table(
        {"s": ["<script>"] * 4, "x": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]}, client="s", label="y"
    )
    assert "<script>" not in evil._repr_html_()
