"""The same request gives the same run, whether it comes from Python or from the command line."""

from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie import algorithms  # noqa: F401 - lists the methods
from coterie.core.algorithm import REGISTRY
from coterie.core.errors import ConfigError
from coterie.data import readers
from coterie.running.request import LOCAL, Request, change, resolve

METHODS = [name for name, cls in REGISTRY.items() if cls.__module__.startswith("coterie.")]
OPTIONS = {
    "fedgem": {"n_components": 2},
    "fedgmi": {"n_components": 2},
    "kfed": {"n_clusters": 2, "n_components": 2},
    "federated_kmeans": {"n_clusters": 2},
    "federated_cmeans": {"n_clusters": 2},
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> Path:
    """Six files with two numbers and a label, which depends on the first number or the second."""
    folder = tmp_path_factory.mktemp("sites")
    for i in range(6):
        x = np.random.default_rng(i).normal(size=(30, 2)) + 4 * (i % 2)
        label = np.where(x[:, i % 2] > 4 * (i % 2), "yes", "no")
        lines = [f"{a:.3f},{b:.3f},{c}" for (a, b), c in zip(x, label, strict=True)]
        (folder / f"site-{i}.csv").write_text("\n".join(["age,dose,ill", *lines]) + "\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Everything a run leaves except the time it took."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "timings.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("method", METHODS)
def test_both_doors_give_the_same_bytes_for_every_method(method, sites, tmp_path, call):
    label = "ill" if REGISTRY[method].supervised else None
    options = OPTIONS.get(method, {})
    data = coterie.from_folder(sites, label=label)
    fit = coterie.fit(data, method, rounds=2, out=tmp_path / "python", **options, quiet=True)
    words = ["--data", sites, "--algorithm", method, "--out", tmp_path / "command"]
    words += ["--label", label] if label else []
    words += [part for name, v in options.items() for part in ("--set", f"algorithm.{name}={v}")]
    code, out, err = call("run", *words, "--set", "run.rounds=2")
    assert (code, err) == (0, "")
    assert files(tmp_path / "command") == files(tmp_path / "python")
    assert data.reading in out
    assert all(f"Warning: {warning}" in out for warning in fit.warnings)


def test_the_default_method_is_the_same_through_both_doors(sites, tmp_path, call):
    coterie.fit(
        coterie.from_folder(sites, label="ill"), rounds=1, out=tmp_path / "python", quiet=True
    )
    words = ["--data", sites, "--label", "ill", "--out", tmp_path / "command"]
    assert call("run", *words, "--set", "run.rounds=1")[0] == 0
    assert files(tmp_path / "command") == files(tmp_path / "python")


def test_one_option_of_local_training_changes_and_nothing_else(sites, tmp_path, call):
    data = coterie.from_folder(sites, label="ill")
    change_one = {"local": {"learning_rate": 0.5}, "n_groups": 2, "compare": False}
    fit = coterie.fit(data, "ifca", rounds=1, out=tmp_path / "python", **change_one, quiet=True)
    assert fit.description["local"] == {**LOCAL, "learning_rate": 0.5}
    words = ["--data", sites, "--label", "ill", "--algorithm", "ifca", "--groups", "2"]
    words += ["--set", "local.learning_rate=0.5", "--set", "run.rounds=1", "--no-compare"]
    assert call("run", *words, "--out", tmp_path / "command")[0] == 0
    assert files(tmp_path / "command") == files(tmp_path / "python")


def test_the_survey_uses_the_network_and_the_seed_that_were_set(sites, tmp_path, call):
    data = coterie.from_folder(sites, label="ill")
    coterie.fit(data, "ifca", model="linear", seed=3, rounds=1, out=tmp_path / "python", quiet=True)
    words = [
        "--data",
        sites,
        "--label",
        "ill",
        "--algorithm",
        "ifca",
        "--out",
        tmp_path / "command",
    ]
    words += ["--set", "model.name=linear", "--set", "run.seed=3", "--set", "run.rounds=1"]
    assert call("run", *words)[0] == 0
    notes = " ".join(coterie.load(tmp_path / "command").notes)
    assert "found by a survey before training" in notes
    assert "chosen from the kind of data" not in notes
    assert files(tmp_path / "command") == files(tmp_path / "python")


def test_clients_send_as_little_through_either_door(sites, tmp_path, call):
    data = coterie.from_folder(sites, label="ill")
    options = {"n_groups": 2, "rounds": 1, "compare": False, "settings": {"why": ["labels"]}}
    fit = coterie.fit(data, "ifca", out=tmp_path / "python", **options, quiet=True)
    words = ["--data", sites, "--label", "ill", "--algorithm", "ifca", "--groups", "2"]
    words += ["--why", "labels", "--set", "run.rounds=1", "--no-compare"]
    assert call("run", *words, "--out", tmp_path / "command")[0] == 0
    assert files(tmp_path / "command") == files(tmp_path / "python")
    code, out, _ = call("why", tmp_path / "command")
    assert (code, out.strip()) == (0, str(fit.why))
    assert "- labels: number of its test rows" in out
    assert "- columns" not in out


def test_the_command_line_reads_the_data_once(sites, call, monkeypatch):
    read = []
    real = readers.read_file
    monkeypatch.setattr(
        readers, "read_file", lambda path, *more: read.append(path.name) or real(path, *more)
    )
    words = ["--data", sites, "--label", "ill", "--set", "run.rounds=1", "--no-compare"]
    assert call("run", *words)[0] == 0
    assert sorted(read) == [f"site-{i}.csv" for i in range(6)]


def test_an_option_of_the_model_keeps_the_network_that_is_chosen(sites):
    data = coterie.from_folder(sites, label="ill")
    ready = resolve(change(Request(data, "fedavg"), {"model": {"hidden": [3]}}))
    assert ready.description["model"] == {"name": "mlp", "hidden": [3]}
    assert ready.data.notes[-1] == "Model 'mlp', chosen from the kind of data."


def test_options_of_further_networks_and_training_are_mappings(sites):
    data = coterie.from_folder(sites, label="ill")
    request = Request(data, "fedgmi", options={"vae": {"latent": 3}, "n_components": 2})
    request = change(request, {"local_vae": {"epochs": 2}, "vae": {"hidden": [5]}})
    tables = resolve(request).description
    assert tables["vae"]["latent"] == 3
    assert tables["vae"]["hidden"] == [5]
    assert tables["local_vae"]["epochs"] == 2


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("fedavg", {"n_groups": 3}, "fedavg has no option n_groups"),
        ("kfed", {"model": "mlp", "n_clusters": 2}, "kfed has no option model. Leave model out"),
        ("kfed", {"local": {"epochs": 2}, "n_clusters": 2}, "kfed has no option local"),
        ("ifca", {"n_groups": 2, "local": {"epoch": 2}}, "Unknown option 'epoch'"),
        ("ifca", {"n_groups": 2, "settings": {"round": 2}}, "Unknown option 'round'"),
    ],
)
def test_an_option_that_a_method_lacks_is_refused(sites, method, given, sentence):
    label = "ill" if REGISTRY[method].supervised else None
    with pytest.raises(ConfigError, match=sentence):
        coterie.fit(coterie.from_folder(sites, label=label), method, rounds=1, **given, quiet=True)


def test_an_instance_has_its_options_already(sites):
    data = coterie.from_folder(sites, label="ill")
    method = resolve(Request(data, "fedavg")).algorithm
    assert coterie.fit(data, method, rounds=1, quiet=True).algorithm is method
    for given in (
        {"model": "mlp"},
        {"local": {"epochs": 2}},
        {"n_groups": 2},
        {"weights": "equal"},
    ):
        with pytest.raises(ConfigError, match=f"so {next(iter(given))} must be set there"):
            coterie.fit(data, method, rounds=1, **given, quiet=True)


def test_data_must_be_a_federation(sites):
    with pytest.raises(TypeError, match=r"Got PosixPath\. Make one with coterie\.from_table"):
        coterie.fit(sites, quiet=True)
