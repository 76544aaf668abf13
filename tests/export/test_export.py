"""Exported models: the same predictions without Coterie, for every format and kind of column."""

import json
import subprocess
import sys

import numpy as np
import pytest

import coterie
from coterie.core.errors import ConfigError
from coterie.export import sample_inputs, sample_rows
from coterie.export.bundle import Bundle

WORDS = ("rain", "wind", "snow", "sun", "cloud", "storm", "calm", "fog")


def table(i: int, n: int = 40) -> dict[str, list]:
    """Rows of a client: a number, a flag, a category, many categories, a text, and a label."""
    rng = np.random.default_rng(i)
    x = rng.normal(size=n)
    texts = [" ".join(rng.choice(WORDS, 4)) + f" {j} {i}" for j in range(n)]
    return {
        "age": [None if j == 3 else round(v, 3) for j, v in enumerate(50 + 9 * x)],
        "smokes": [["true", "false"][int(v)] for v in rng.integers(0, 2, n)],
        "ward": [["a", "b", "7"][int(v)] for v in rng.integers(0, 3, n)],
        "code": [f"c{v}" for v in rng.integers(0, 90, n)],
        "note": texts,
        "ill": [["no", "yes"][int(v > 0)] for v in x * (1 if i % 2 else -1)],
    }


@pytest.fixture(scope="module")
def fit() -> coterie.Fitted:
    import pandas

    parts = [pandas.DataFrame(table(i)).assign(site=f"site {i}") for i in range(4)]
    data = coterie.from_table(pandas.concat(parts), client="site", label="ill")
    start = {f"site {i}": i % 2 for i in range(4)}
    return coterie.fit(
        data, "ifca", model="linear", n_groups=2, start=start, rounds=2, compare=False
    )


def test_the_columns_have_every_kind(fit):
    kinds = {rule.kind for rule in fit.encoder.rules}
    assert kinds == {"number", "boolean", "category", "hashed", "text"}


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_bundle_predicts_as_the_run_does(fit, tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    fit.export(tmp_path / "models", format, licence="CC-BY-4.0")
    bundle = Bundle(tmp_path / "models")
    rows = table(9)
    for group in range(fit.n_groups):
        assert list(bundle.predict(rows, group)) == list(fit.predict(rows, group=group))
        shares = bundle.probabilities(rows, group)
        raw = fit.predict(rows, group=group, raw=True)
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
        np.testing.assert_array_equal(shares.argmax(1), raw.argmax(1))
    assert bundle.place(rows)["group"] == fit.place(rows).group
    manifest = json.loads((tmp_path / "models" / "manifest.json").read_text())
    assert manifest["licence"] == "CC-BY-4.0"
    assert max(manifest["checked"]["largest_difference"].values()) < 1e-4
    assert {"bundle.py", "encoder.json", "example.py", "group-0/README.md"} <= set(
        manifest["files"]
    )
    card = (tmp_path / "models" / "group-0" / "README.md").read_text()
    assert "CC-BY-4.0" in card
    assert "Trained for" in card


def kinds(seed, kind, n=90):
    """Rows of a client: kind 1 exchanges labels, kind 2 shifts inputs, kind 3 draws labels."""
    rng = np.random.default_rng([seed, kind])
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4)) + np.array([[2.0, 0, 0, 0], [0, 2.0, 0, 0]])[y]
    x[:, 2:] += 2.5 * (kind == 2)
    return x.astype(np.float32), {1: 1 - y, 3: rng.integers(0, 2, n)}.get(kind, y)


@pytest.mark.parametrize("method", ["census", "survey", "ifca"])
def test_a_dozen_newcomers_are_placed_as_by_the_run(method, tmp_path):
    xs, ys = zip(*(kinds(i, i % 2) for i in range(10)), strict=True)
    data = coterie.from_arrays(xs, ys)
    options = {"n_groups": 2, "start": {f"client-{i}": i % 2 for i in range(10)}}
    fit = coterie.fit(
        data, method, rounds=3, compare=False, quiet=True, **(options if method == "ifca" else {})
    )
    assert fit.n_groups == 2
    fit.export(tmp_path / "models", "torch")
    bundle = Bundle(tmp_path / "models")
    assert "networks that were never trained" in bundle.manifest["router"]["rule"]
    for seed, kind in [*((100 + i, i % 2) for i in range(8)), *((120 + i, 3) for i in range(4))]:
        x, y = kinds(seed, kind)
        found, spot = bundle.place(x, y), fit.place(x, y)
        if method != "ifca":  # its own rule refuses nobody
            assert found["fits"] == spot.fits
            assert found["score"] == pytest.approx(spot.score, abs=0.2)  # folds are drawn again
        if kind != 3:
            assert found["fits"]
            assert found["group"] == spot.group == fit.rows[kind]["group"]
            assert found["model"] == f"group-{spot.group}"
    strangers = [bundle.place(*kinds(120 + i, 3))["fits"] for i in range(4)]
    assert strangers.count(False) >= 2


def test_the_distributions_of_a_bundle_are_those_of_scipy():
    from scipy.stats import pearson3, t

    from coterie.export.bundle_router import gamma_sf, student_sf

    for z in (-3, -0.2, 0, 0.5, 2, 8, 20):
        for skew in (0, 1e-5, 0.01, 0.5, 2.5):
            assert gamma_sf(z, skew) == pytest.approx(pearson3.sf(z, skew), rel=1e-6, abs=1e-300)
        for free in (1, 3.5, 200):
            assert student_sf(z, free) == pytest.approx(t.sf(z, free), rel=1e-6)


def test_the_rows_of_a_unit_count_once():
    from coterie.export.bundle_router import find_group

    y = np.arange(90) % 2
    losses = np.random.default_rng(0).normal(size=(90, 3)) + 0.2
    kept = {
        "losses_mean": np.zeros((1, 1, 3)),
        "losses_weight": np.full((1, 1), 500.0),
        "losses_centre": np.zeros((1, 3)),
        "losses_root": np.eye(3)[None],
        **{
            f"losses_{name}": np.full(1, value)
            for name, value in (("shift", 0.0), ("spread", 1.0), ("members", 9.0))
        },
        "number": np.array([0]),
    }
    single = find_group(losses, y, kept)
    same = find_group(np.repeat(losses, 5, 0), np.repeat(y, 5), kept, np.repeat(np.arange(90), 5))
    assert same["p"] == pytest.approx(single["p"])
    assert (
        find_group(np.repeat(losses, 5, 0), np.repeat(y, 5), kept)["p"][0] < 0.01 * single["p"][0]
    )


def test_the_example_runs_without_coterie(fit, tmp_path):
    import pandas

    fit.export(tmp_path / "models", "torch")
    pandas.DataFrame(table(9)).to_csv(tmp_path / "rows.csv", index=False)
    script = tmp_path / "models" / "example.py"
    assert len([line for line in script.read_text().splitlines() if line]) <= 10
    code = (
        "import sys, runpy; sys.modules['coterie'] = None; sys.argv = ['example.py', "
        f"{str(tmp_path / 'rows.csv')!r}]; sys.path.insert(0, '.'); runpy.run_path('example.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=script.parent, capture_output=True, text=True, check=True
    )
    group = fit.place(tmp_path / "rows.csv").group
    assert f"group-{group}" in done.stdout.splitlines()[0]
    for name in fit.predict(tmp_path / "rows.csv", group=group)[:5]:
        assert str(name) in done.stdout


def test_rows_without_a_header_are_read_as_the_clients_tables_were(tmp_path):
    sites = tmp_path / "sites"
    sites.mkdir()
    rng = np.random.default_rng(0)
    for site in "ab":
        rows = [f"{x:.3f},{z:.3f},{int(x > 0)}" for x, z in rng.normal(size=(30, 2))]
        (sites / f"{site}.csv").write_text("\n".join(rows))
    data = coterie.from_folder(sites, label="column_3")
    fit = coterie.fit(data, "fedavg", model="linear", rounds=2, quiet=True)
    fit.export(tmp_path / "models", "torch")
    bundle = Bundle(tmp_path / "models")
    said = bundle.predict(sites / "a.csv", 0)
    assert list(map(str, said)) == [str(one) for one in fit.predict(sites / "a.csv", group=0)]
    assert len(said) == 30
    with pytest.raises(ValueError, match="must be a column 'column_1'"):
        bundle.predict({"x": [1.0]}, 0)


def test_the_readme_of_a_bundle_of_arrays_names_an_array(tmp_path):
    data = coterie.from_arrays([np.zeros((6, 2)), np.ones((6, 2))], [[0, 1] * 3] * 2)
    fit = coterie.fit(data, "fedavg", model="linear", rounds=1, quiet=True)
    fit.export(tmp_path / "models", "torch")
    assert "example.py rows.npy" in (tmp_path / "models" / "README.md").read_text()


def test_safetensors_hold_the_weights(fit, tmp_path):
    from safetensors.numpy import load_file

    fit.export(tmp_path / "models", "safetensors")
    weights = load_file(tmp_path / "models" / "group-1" / "model.safetensors")
    own = {name: value.numpy() for name, value in fit.model(1).state_dict().items()}
    assert {v.shape for v in weights.values()} == {v.shape for v in own.values()}
    with pytest.raises(ValueError, match="weights only"):
        Bundle(tmp_path / "models").predict(table(9), 1)


def test_a_damaged_file_is_refused(fit, tmp_path):
    fit.export(tmp_path / "models", "safetensors")
    (tmp_path / "models" / "encoder.json").write_text("{}")
    with pytest.raises(ValueError, match=r"encoder\.json is damaged"):
        Bundle(tmp_path / "models")


@pytest.mark.parametrize("method", ["fedavg", "local_only", "fedsoft"])
def test_every_kind_of_method_is_exported(method, tmp_path):
    xs = [np.random.default_rng(i).normal(size=(20, 3)) for i in range(3)]
    data = coterie.from_arrays(xs, [x[:, 0] > 0 for x in xs])
    options = {"n_groups": 2} if method == "fedsoft" else {}
    fit = coterie.fit(data, method, rounds=2, compare=False, **options)
    fit.export(tmp_path / "models", "torch")  # refuses models that predict something else
    bundle = Bundle(tmp_path / "models")
    x = sample_inputs(fit, 8).numpy()
    name = next(iter(bundle.models))
    assert name == ("group-0" if method == "fedavg" else "client-0")
    assert list(bundle.predict(x, name)) == list(fit.predict(x, client=fit.names[0]))


def test_what_is_no_network_is_refused(tmp_path):
    xs = [np.random.default_rng(i).normal(size=(20, 3)) for i in range(3)]
    fit = coterie.fit(coterie.from_arrays(xs), "mosaic", rounds=2, compare=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        fit.export(tmp_path / "torch", "torch")
    fit.export(tmp_path / "models", "safetensors")
    assert (tmp_path / "models" / "client-2" / "model.safetensors").exists()


def test_numbers_to_predict_keep_their_unit(tmp_path):
    rows = [table(i) for i in range(2)]
    for row in rows:
        row["cost"] = [1000 + 5 * (age or 50) for age in row["age"]]
    import pandas

    parts = [
        pandas.DataFrame(row)[["age", "ward", "cost"]].assign(site=i) for i, row in enumerate(rows)
    ]
    data = coterie.from_table(pandas.concat(parts), client="site", label="cost")
    fit = coterie.fit(data, "fedavg", rounds=2, compare=False)
    fit.export(tmp_path / "models", "torch")
    made = sample_rows(fit, 10)
    got = Bundle(tmp_path / "models").predict(made, 0)
    np.testing.assert_allclose(got, fit.predict(made, group=0), rtol=1e-4)
    assert got.mean() > 100


def test_a_folder_that_is_not_empty_is_refused(fit, tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        fit.export(tmp_path)
    with pytest.raises(ConfigError, match="format must be"):
        fit.export(tmp_path / "new", "pickle")
