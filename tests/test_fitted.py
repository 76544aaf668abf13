"""From files to groups, places and predictions, on federations made of scikit-learn's tables."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core.errors import ConfigError, DataError
from coterie.core.model import Model
from coterie.data import digits
from coterie.fitted import Spot
from coterie.fitting import fit_run, resume_run
from coterie.running.build import build
from small_runs import StopsAfter, content, described

LOCAL = {"optimizer": "adam", "learning_rate": 0.03, "batch_size": 16}
ROUNDS = 12


def write(path: Path, x: np.ndarray, y: np.ndarray, label: str) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"f{j}" for j in range(x.shape[1])), label])
        table.writerows([*row, target] for row, target in zip(x.tolist(), y.tolist(), strict=True))


def turned(x: np.ndarray, group: int) -> np.ndarray:
    """Features as a group's instruments give them: in another order and moved."""
    return x if group == 0 else x[:, ::-1] + 1.0


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    """Wine in eight sites: even ones measure as they should, odd ones in another order."""
    from sklearn.datasets import load_wine

    source = load_wine()
    x = (source.data - source.data.mean(0)) / source.data.std(0)
    names = np.array(["barolo", "grignolino", "barbera"])[source.target]
    folder = tmp_path_factory.mktemp("wine")
    order = np.random.default_rng(0).permutation(len(x))
    for group in (0, 1):  # every group sees all wines, each site a quarter of them
        for i, rows in enumerate(np.array_split(order, 4)):
            write(folder / f"site-{2 * i + group}.csv", turned(x[rows], group), names[rows], "kind")
    return folder


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory):
    """Diabetes in six sites, half of which measure in another order."""
    from sklearn.datasets import load_diabetes

    source = load_diabetes()
    x = source.data / source.data.std(0)
    folder = tmp_path_factory.mktemp("diabetes")
    order = np.random.default_rng(0).permutation(len(x))
    for group in (0, 1):
        for i, rows in enumerate(np.array_split(order, 3)):
            path = folder / f"site-{2 * i + group}.csv"
            write(path, turned(x[rows], group), source.target[rows], "progression")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Four clients with images of three digits; for two of them upside down."""
    image = pytest.importorskip("PIL.Image")
    from sklearn.datasets import load_digits

    source = load_digits(n_class=3)
    folder = tmp_path_factory.mktemp("pictures")
    for client in range(4):
        for digit in range(3):
            place = folder / f"client-{client}" / f"digit-{digit}"
            place.mkdir(parents=True)
            for number in np.flatnonzero(source.target == digit)[client * 12 :][:12]:
                pixels = (source.images[number] * 15.9).astype(np.uint8)
                pixels = pixels[::-1] if client >= 2 else pixels
                image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def wine_fit(wine):
    data = coterie.from_folder(wine, label="kind")
    return coterie.fit(data, "census", model="mlp", n_groups=2, rounds=ROUNDS, local=LOCAL), data


@pytest.fixture(scope="module")
def diabetes_fit(diabetes):
    data = coterie.from_folder(diabetes, label="progression")
    return coterie.fit(data, "census", model="linear", n_groups=2, rounds=ROUNDS, local=LOCAL), data


def table_of(path: Path, label: str) -> tuple[np.ndarray, np.ndarray]:
    """A file read by hand."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    x = np.array([[float(row[name]) for name in row if name != label] for row in rows])
    return x, np.array([row[label] for row in rows])


def held_rows(data, client: int) -> np.ndarray:
    """Which rows of a client's own file are for testing."""
    start = sum(int(rows.sizes[:client].sum()) for rows in data.rows.values())
    return data.rows["test"].of_clients(torch.tensor([client])).index.numpy() - start


def parity(fit) -> set[tuple[int, int]]:
    return {(int(row["client"].split("-")[1]) % 2, row["group"]) for row in fit.groups}


# The documented lines


def test_wine_goes_from_files_to_groups_places_and_predictions(wine, tmp_path):
    data = coterie.from_folder(str(wine) + "/", label="kind")
    fit = coterie.fit(
        data, "census", model="mlp", n_groups="auto", rounds=ROUNDS, out=tmp_path / "runs/a",
        seed=0, local=LOCAL,
    )  # fmt: skip
    text = str(fit.groups)
    for word in ("client", "group", "margin", "accuracy", "gain over alone", "gain over one model"):
        assert word in text.splitlines()[0]
    x_new, y_new = table_of(wine / "site-3.csv", "kind")
    spot = fit.place(x_new, y_new)
    rows = {row["client"]: row for row in fit.groups}
    assert spot.group == rows["site-3"]["group"]
    assert spot.fits
    y = fit.predict(x_new, client="site-3")
    assert set(y) <= {"barolo", "grignolino", "barbera"}
    assert (y == y_new).mean() > 0.8
    fit.save(tmp_path / "kept")
    again = coterie.load(tmp_path / "kept")
    assert (again.predict(x_new, client="site-3") == y).all()
    assert str(again) == str(fit) == str(coterie.load(tmp_path / "runs/a"))
    assert again.place(x_new, y_new) == spot


def test_the_groups_of_wine_are_found(wine_fit):
    fit, _ = wine_fit
    assert fit.n_groups == 2
    assert len(parity(fit)) == 2
    assert "2 groups among 8 clients (4 and 4 clients)" in fit.sentence


def test_the_groups_of_diabetes_are_found_and_predictions_are_in_their_own_unit(diabetes_fit):
    fit, data = diabetes_fit
    assert data.task == "regression"
    assert len(parity(fit)) == 2
    numbers = (
        fit.predict(data.x[:5] * 0, client="site-0")
        if False
        else fit.predict(np.zeros((3, 10)), client="site-0")
    )
    assert numbers.shape == (3,)
    assert 50 < numbers.mean() < 350  # progression lies between 25 and 346
    assert "error" in fit.groups.columns


def test_digits_as_image_folders_go_all_the_way(pictures, tmp_path):
    data = coterie.from_folder(pictures)
    fit = coterie.fit(data, "census", n_groups=2, rounds=6, local=LOCAL, compare=False)
    assert "cnn" in json.dumps(fit.description["model"])  # chosen from the kind of data
    found = [row["group"] for row in fit.groups]
    assert found[0] == found[1] != found[2] == found[3]
    own = data.gather("train", torch.tensor([2]))
    x, y = own.x[0].numpy(), np.array([data.classes[code] for code in own.y[0].tolist()])
    spot = fit.place(x, y)
    assert spot.group == found[2]
    assert (
        fit.place((x * 255).round().astype(np.uint8), y) == spot
    )  # bytes are scaled as in training
    assert fit.predict(x, client="client-2").shape == y.shape
    assert fit.place(pictures / "client-2").group == found[2]  # a folder of class/image files
    assert len(fit.predict(pictures / "client-2", client="client-2")) == 36
    fit.save(tmp_path / "kept")
    assert (coterie.load(tmp_path / "kept").predict(x, group=0) == fit.predict(x, group=0)).all()


# The gain, by hand


def test_the_printed_gain_in_accuracy_is_right(wine, wine_fit):
    fit, data = wine_fit
    alone = coterie.fit(data, "local_only", model="mlp", rounds=ROUNDS, local=LOCAL)
    one = coterie.fit(data, "fedavg", model="mlp", rounds=ROUNDS, local=LOCAL)
    for number, row in enumerate(fit.groups):
        x, y = table_of(wine / f"{row['client']}.csv", "kind")
        held = held_rows(data, number)
        scores = [
            (f.predict(x[held], client=row["client"]) == y[held]).mean() for f in (fit, alone, one)
        ]
        assert row["accuracy"] == pytest.approx(scores[0])
        assert row["gain over alone"] == pytest.approx(scores[0] - scores[1])
        assert row["gain over one model"] == pytest.approx(scores[0] - scores[2])
        assert f"{row['gain over alone']:+z.3f}" in str(fit.groups).splitlines()[2 + number]


def test_the_printed_gain_in_error_is_right(diabetes, diabetes_fit):
    fit, data = diabetes_fit
    alone = coterie.fit(data, "local_only", model="linear", rounds=ROUNDS, local=LOCAL)
    for number, row in enumerate(fit.groups):
        x, y = table_of(diabetes / f"{row['client']}.csv", "progression")
        held = held_rows(data, number)
        errors = [
            np.sqrt(
                ((f.predict(x[held], client=row["client"]) - y[held].astype(float)) ** 2).mean()
            )
            for f in (fit, alone)
        ]
        # float32 sums in another order
        assert row["error"] == pytest.approx(errors[0], rel=1e-5)
        assert row["gain over alone"] == pytest.approx(errors[1] - errors[0], abs=1e-3)


def test_a_comparison_that_was_stopped_goes_on_from_the_runs_own_folder(wine_fit, tmp_path):
    _, data = wine_fit
    tables = described("clove", 3) | {"data": {}, "model": {"name": "linear"}}
    tables["run"]["compare"] = True
    one = build(tables, data=data)
    fit_run(one, tmp_path / "whole")
    stops = StopsAfter(2, attempt=2)  # in the first baseline
    with pytest.raises(KeyboardInterrupt):
        fit_run(one, tmp_path / "run", stops)
    assert stops.said[0].endswith(f"coterie resume {tmp_path / 'run'}")
    assert "gain over alone" in resume_run(one, tmp_path / "run").groups.columns
    assert content(tmp_path / "run") == content(tmp_path / "whole")


# Models


def test_the_model_of_a_group_is_a_plain_module_that_agrees_with_predict(wine, wine_fit):
    fit, data = wine_fit
    x, _ = table_of(wine / "site-1.csv", "kind")
    for card in fit.cards:
        module = fit.model(card["group"])
        assert isinstance(module, nn.Module)
        assert not module.training
        with torch.no_grad():
            output = module(data.encoder.encode(x))
        raw = fit.predict(x, group=card["group"], raw=True)
        np.testing.assert_allclose(output.numpy(), raw, rtol=1e-5, atol=1e-6)
        names = np.array(data.classes)[output.argmax(1)]
        assert (names == fit.predict(x, client=card["clients"][0])).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "mlp"),
        ("linear", "linear"),
        ({"name": "mlp", "hidden": [5]}, "mlp"),
        (Net(), "Net"),
        (Model(Net(), "cross_entropy"), "Net"),
    ],
)
def test_a_model_may_be_a_name_a_module_or_nothing(wine_fit, model, name):
    _, data = wine_fit
    fit = coterie.fit(data, "ifca", model=model, n_groups=2, rounds=1, compare=False)
    table = fit.description["model"]
    assert table.get("name", table.get("given")) == name


def test_a_users_module_is_passed_again_on_load(wine, wine_fit, tmp_path):
    _, data = wine_fit
    fit = coterie.fit(data, "clove", model=Net(), n_groups=2, rounds=2, compare=False)
    fit.save(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"model Net was given as a module.* Pass it: model="):
        coterie.load(tmp_path / "kept")
    with pytest.raises(ConfigError, match="weights have other names or shapes"):
        coterie.load(tmp_path / "kept", model=nn.Linear(13, 3))
    again = coterie.load(tmp_path / "kept", model=Net())
    path = str(wine / "site-0.csv")
    raw = (f.predict(path, client="site-0", raw=True) for f in (fit, again))
    assert np.array_equal(*raw)


def test_an_algorithm_may_be_given_as_an_instance(wine_fit):
    _, data = wine_fit
    method = coterie.IFCA(Model(Net, "cross_entropy"), coterie.LocalSGD(0.1), n_groups=2)
    fit = coterie.fit(data, method, rounds=1, compare=False)
    assert fit.algorithm is method
    assert fit.summary["algorithm"] == "ifca"


# Places


def test_data_for_place_and_predict_may_be_arrays_frames_or_files(wine, wine_fit):
    pandas = pytest.importorskip("pandas")
    fit, _ = wine_fit
    path = wine / "site-5.csv"
    x, y = table_of(path, "kind")
    frame = pandas.read_csv(path)
    spots = [
        fit.place(x, y),
        fit.place(torch.tensor(x), y),
        fit.place(frame),
        fit.place(frame.drop(columns="kind"), frame["kind"]),
        fit.place(path),
        fit.place(str(path)),
    ]
    for spot in spots:
        assert spot.margin == pytest.approx(spots[0].margin, rel=1e-5)
        assert (spot.group, spot.fits) == (spots[0].group, True)
    asked = [fit.predict(rows, client="site-5") for rows in (x, frame, path, str(path))]
    assert all((one == asked[0]).all() for one in asked)


def test_a_stranger_fits_nobody(wine, wine_fit):
    fit, _ = wine_fit
    x, y = table_of(wine / "site-0.csv", "kind")
    spot = fit.place(-3 * x, y)
    assert not spot.fits
    assert "fits no group" in str(spot)
    assert str(Spot(2, 0.95, True, 0.5)) == "group 2, clearly (margin 0.95)"
    assert "another group is almost as near" in str(Spot(2, 0.1, True, 0.5))


def test_placing_refuses_bad_rows_and_labels(wine, wine_fit):
    fit, _ = wine_fit
    x, y = table_of(wine / "site-0.csv", "kind")
    with pytest.raises(DataError, match=r"Unknown label 'barol'\. Did you mean 'barolo'"):
        fit.place(x[:1], ["barol"])
    with pytest.raises(DataError, match="one row per sample"):
        fit.place(x, y[:-1])
    with pytest.raises(DataError, match="an array must have 13 columns"):
        fit.place(x[:, :5], y)
    with pytest.raises(DataError, match="an array must have 13 columns"):
        fit.place(x[:, :5])


def test_unknown_names_offer_the_nearest(wine, wine_fit):
    fit, _ = wine_fit
    x, _ = table_of(wine / "site-0.csv", "kind")
    with pytest.raises(ConfigError, match=r"Unknown client 'sit-3'\. Did you mean 'site-3'"):
        fit.predict(x, client="sit-3")
    with pytest.raises(ConfigError, match=r"Unknown group '7'.* Known: 0, 1"):
        fit.predict(x, group=7)
    with pytest.raises(ConfigError, match="name whose model to use"):
        fit.predict(x)
    with pytest.raises(ConfigError, match="Did you mean 'clove'"):
        coterie.fit(wine_fit[1], "clowe")
    with pytest.raises(ConfigError, match="Did you mean 'max_groups'"):
        coterie.fit(wine_fit[1], "clove", max_group=2)


def test_a_method_that_must_be_told_the_number_is_told_by_a_survey():
    data = digits(n_clients=12, n_groups=3)
    fit = coterie.fit(data, "ifca", rounds=1, compare=False)
    assert fit.algorithm.n_groups == 3
    assert fit.summary["ari"] == 1  # the groups of the survey are those of the first round
    assert "n_groups=3, found by a survey before training" in fit.notes[-1]


def test_a_run_that_chooses_the_number_keeps_the_evidence(tmp_path):
    data = digits(n_clients=12, n_groups=3)
    fit = coterie.fit(data, "survey", rounds=1, compare=False, out=tmp_path / "run")
    [curve] = fit.summary["evidence"]
    assert (curve["name"], curve["chosen"]) == ("conditional", 3)
    assert coterie.load(tmp_path / "run").summary["evidence"] == fit.summary["evidence"]
    given = coterie.fit(data, "survey", n_groups=3, rounds=1, compare=False)
    assert "evidence" not in given.summary


def test_an_odd_client_is_named_and_no_group():
    data = digits(n_clients=12, n_groups=2)
    rows = data.rows["train"].of_clients(torch.tensor([5])).index
    data.y[rows] = (data.y[rows] + 3) % 10
    for method in ("survey", "census"):
        fit = coterie.fit(data, method, rounds=2, compare=False)
        assert fit.odd == [data.names[5]]
        assert fit.n_groups == 2
        assert f"{data.names[5]} is unlike all others" in fit.sentence
        own = next(card for card in fit.cards if "odd" in card)
        assert own["clients"] == [data.names[5]]
        assert fit.predict(data.gather("test", torch.tensor([5])).x[0], client=fit.odd[0]).size


# What is kept


def test_the_history_is_a_frame_with_a_row_per_round(wine_fit, monkeypatch):
    pandas = pytest.importorskip("pandas")
    fit, _ = wine_fit
    assert isinstance(fit.history, pandas.DataFrame)
    assert fit.history["round"].tolist() == list(range(1, ROUNDS + 1))
    assert {"loss", "accuracy", "bytes"} <= set(fit.history.columns)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [line["round"] for line in fit.history] == list(range(1, ROUNDS + 1))


def test_notebooks_get_html(wine_fit):
    fit, _ = wine_fit
    html = fit._repr_html_()
    assert html.startswith("<p><b>2 groups among 8 clients")
    assert "<table" in html
    assert "site-7" in html


def test_a_folder_is_never_overwritten_and_a_missing_one_is_named(wine_fit, tmp_path):
    fit, _ = wine_fit
    fit.save(tmp_path / "kept")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        fit.save(tmp_path / "kept")
    with pytest.raises(DataError, match="is not a run folder"):
        coterie.load(tmp_path / "nowhere")
    (tmp_path / "kept" / "summary.json").unlink()
    with pytest.raises(DataError, match=r"not finished\. Continue it with `coterie resume"):
        coterie.load(tmp_path / "kept")


ELSEWHERE = """
import sys, numpy, coterie
fit = coterie.load(sys.argv[1])
raw = fit.predict(sys.argv[2], client="site-3", raw=True)
numpy.save(sys.argv[3], raw)
print(repr(fit.place(sys.argv[2])))
"""


@pytest.mark.parametrize("which", ["wine", "diabetes"])
def test_what_is_loaded_in_another_process_predicts_the_same_bits(which, request, tmp_path):
    folder, (fit, _) = (request.getfixturevalue(name) for name in (which, f"{which}_fit"))
    fit.save(tmp_path / "kept")
    path, out = str(folder / "site-3.csv"), str(tmp_path / "raw.npy")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "kept"), path, out],
        capture_output=True,
        text=True,
        check=True,
    )
    assert np.array_equal(np.load(out), fit.predict(path, client="site-3", raw=True))
    assert done.stdout.strip() == repr(fit.place(path))
