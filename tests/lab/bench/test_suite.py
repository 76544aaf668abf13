"""The whole run, shrunken; what fails in a process of its own is reported by name."""

import json

import numpy as np
import pytest

from coterie.cli.app import app
from coterie.core.errors import ConfigError
from coterie_lab.bench import explain, growth, peers, suite
from coterie_lab.bench.block import Failed, ask

FIGURES = {"seconds", "ratio", "peak_fraction", "gflops", "spread", "foreign", "agreement"}


def command(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.slow
def test_a_shrunken_run_writes_all_figures(tmp_path):
    path = tmp_path / "out" / "bench.json"
    few = ("--only", "W9", "--threads", "1", "--repeats", "1", "--scale", "0.004", "--no-memory")
    done = command(*few, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "| plain |" in done.output
    found = json.loads(path.read_text())
    work = found["workloads"]["W9"]
    assert work["threads"] == 1
    assert work["clients"] == 4
    assert set(work["variants"]["ours"]) >= FIGURES
    assert work["variants"]["ours"]["plan"]["threads"] == 1
    assert work["variants"]["plain"]["ratio"] == 1.0
    assert {line["where"] for line in found["goals"]} == {"W9"}
    assert path.with_suffix(".md").exists()
    again = command("--from", str(path), "--docs", str(tmp_path / "performance.md"))
    assert again.exit_code == 0, again.output
    page = (tmp_path / "performance.md").read_text()
    assert "loop, 1 thread" in page
    assert "| W9 | MLP" in page


def test_an_interrupted_run_is_continued(monkeypatch):
    asked = []

    def attempt(job, seconds=0.0):
        asked.append((job["name"], job["threads"]))
        return {"error": "broken"} if job["name"] == "W2" else {"title": "", "n": len(asked)}

    monkeypatch.setattr(suite, "attempt", attempt)
    first = suite.run(["W1", "W2"], threads=1, repeats=1, memory=False)
    again = suite.run(["W1", "W2", "W9"], threads=1, repeats=1, memory=False, before=first)
    assert asked == [("W1", 1), ("W2", 1), ("W2", 1), ("W9", 1)]  # what failed is tried again
    assert again["workloads"]["W1"]["n"] == 1
    with pytest.raises(ConfigError, match="another file"):
        suite.run(["W1"], threads=1, repeats=2, memory=False, before=first)


@pytest.mark.slow
def test_a_block_that_fails_says_why():
    assert "no-such" in suite.attempt({"kind": "no-such"})["error"]


def test_a_block_that_takes_too_long_is_ended():
    with pytest.raises(Failed, match="did not finish"):
        ask({"name": "W2", "repeats": 50}, seconds=0.05)


def test_growth_that_is_not_straight_is_seen():
    # 1, 4, 9: no straight line comes nearer than a few tenths.
    assert growth.fit_line([1, 2, 3], [1.0, 4.0, 9.0])[2] > 0.2
    assert growth.fit_line([1, 2, 3], [1.0, 2.0, 3.0])[2] < 1e-9


def test_the_problem_for_other_packages_is_plain_arrays(tmp_path):
    path = tmp_path / "problem.npz"
    peers.export("W1", 0.02, path)
    with np.load(path, allow_pickle=False) as file:
        assert file["x"].shape == (2, 200, 784)
        assert sorted(file["order"][0].tolist()) == list(range(200))
        assert file["start/output.weight"].shape == file["mean/output.weight"].shape
        assert not np.array_equal(file["start/output.weight"], file["mean/output.weight"])


def test_a_package_that_cannot_be_had_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    found = peers.measure_peer("pfl", {"workloads": {}}, {"scale": 1.0})
    assert "pfl.txt" in found["error"]


def test_a_package_that_fails_or_disagrees_is_named(monkeypatch, tmp_path):
    (tmp_path / "pfl_peer.py").write_text(
        "import json; print(json.dumps({'seconds': [1.0, 2.0], 'apart': 0.5}))"
    )
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    monkeypatch.setattr(peers, "export", lambda *_: None)
    import sys
    from pathlib import Path

    with pytest.raises(Failed, match="differs from the plain loop"):
        peers._one("pfl", Path(sys.executable), "W1", 1, 1.0)
    (tmp_path / "pfl_peer.py").write_text("raise SystemExit('no luck')")
    with pytest.raises(Failed, match="no luck"):
        peers._one("pfl", Path(sys.executable), "W1", 1, 1.0)


def test_a_network_is_explained_layer_by_layer(tmp_path):
    assert "stacked" in explain.explain_name("mlp")
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.cell = nn.GRUCell(4, 4)\n"
        "        self.output = nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.output(self.cell(x))\n"
    )
    text = explain.explain_name(f"{path}:Net")
    assert "GRUCell" in text
    done = command("--explain", "cnn")
    assert done.exit_code == 0
    assert "Conv2d" in done.output


@pytest.mark.parametrize("name", ["mpl", "no.such.module:Net", "missing.py:Net", "math:pi"])
def test_what_is_no_network_is_an_error(name):
    with pytest.raises(ConfigError):
        explain.network(name)
