"""coterie plan, as a user types it."""

import json

import pytest

from small_runs import described, toml


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(toml(described("ifca", 5)))
    return path


def test_a_plan_for_all_three_places(call, study):
    words = ("--shards", 2, "--clients", 10, "--link", 1, "--latency", 100)
    code, out, _ = call("plan", study, *words)
    assert code == 0
    for part in ("one process", "2 processes (Ray)", "10 real clients", "What limits first"):
        assert part in out
    code, out, _ = call("plan", study, *words, "--json")
    found = json.loads(out)
    one, shards, deployment = found["forecasts"]
    assert found["sampled"][-1] == found["clients"]
    assert one["bytes_a_round"] > 0
    assert set(shards["memory"]) == {"main process", "each shard", "Ray"}
    assert deployment["seconds"]["transfer"] > deployment["bytes_a_round"] / 125_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "give either a run file or --data. Got neither"),
        (("plan", "STUDY", "--shards", 0), "--shards must be at least 1. Got 0"),
        (("plan", "STUDY", "--shards", 1000), "--shards must be at most the number of clients"),
        (("plan", "STUDY", "--link", 10), "--link is for a deployment"),
        (("plan", "STUDY", "--clients", 3, "--link", -1), "--link must be above 0. Got -1"),
        (("plan", "STUDY", "--groups", 3), "--groups has no use with"),
        (("plan", "no-such.toml"), "Run file no-such.toml does not exist"),
        (("plan", "STUDY", "--set", "run.round=5"), "Did you mean 'rounds'"),
    ],
)
def test_mistakes_are_explained(call, study, words, said):
    code, _, err = call(*(study if word == "STUDY" else word for word in words))
    assert code != 0
    assert said in err


def test_own_data_are_planned_without_a_run_file(call, tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    for i in range(5):
        rows = "\n".join(f"{(i + j) % 7},{j % 3},{'yes' if j % 2 else 'no'}" for j in range(20))
        (folder / f"site-{i}.csv").write_text(f"a,b,ill\n{rows}\n")
    code, out, _ = call("plan", "--data", folder, "--label", "ill", "--algorithm", "fedavg")
    assert code == 0
    assert "fedavg with 5 clients, 30 rounds" in out
