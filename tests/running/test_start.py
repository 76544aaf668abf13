"""Initial groups: given by advice, a mapping or a file, saved with the run, and used."""

import json

import pytest

import coterie
from coterie.core.errors import ConfigError, DataError
from coterie.data import blobs
from coterie.fitting import fit_run, resume_run
from coterie.running.build import Settings, build, describe
from coterie.running.start import initial_groups, read_start
from small_runs import StopsAfter, content, described, toml
from small_runs import coterie as command

START = {"client-0": 0, "client-1": 1, "client-2": 0, "client-3": 1}


@pytest.fixture(scope="module")
def data():
    return blobs(n_groups=2, clients_per_group=2, n=24, test=8)


def write(path, start, extra=""):
    lines = [f"{name},{group}{extra}" for name, group in start.items()]
    path.write_text("\n".join([f"client,group{extra and ',margin'}", *lines]) + "\n")
    return path


def test_a_mapping_and_a_file_say_the_same(tmp_path):
    assert read_start(write(tmp_path / "a.csv", START)) == START
    assert read_start(str(write(tmp_path / "b.csv", START, extra=",0.9"))) == START
    assert read_start(START) == START


def test_clients_without_a_group_are_left_out(tmp_path):
    (tmp_path / "a.csv").write_text("client,group\nann,\nbob,-1\ncat,2\n")
    assert read_start(tmp_path / "a.csv") == {"cat": 2}
    assert initial_groups({"cat": 2}, ["ann", "cat"]).tolist() == [-1, 2]
    assert initial_groups(None, ["ann"]) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name,group\nann,0\n", "must have the columns client and group. Got name, group"),
        ("", "must have the columns client and group. Got none"),
        ("client,group\nann,0\nann,1\n", "every client must occur once. 'ann' occurs again"),
        ("client,group\nann,x\n", "a whole number from 0, or -1 for none. Client 'ann' has 'x'"),
        ("client,group\nann,-2\n", "a whole number from 0, or -1 for none. Client 'ann' has '-2'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, sentence):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError) as error:
        read_start(tmp_path / "a.csv")
    assert sentence in str(error.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match=r"start: .*none\.csv cannot be read"):
        read_start(tmp_path / "none.csv")


@pytest.mark.parametrize("method", ["ifca", "clove", "census", "survey"])
def test_a_group_method_begins_with_the_given_groups(data, method):
    # The true groups are the pairs 0, 1 and 2, 3: no method would begin with these by itself.
    fit = coterie.fit(data, method, n_groups=2, start=START, rounds=1, compare=False)
    assert fit.rounds[0]["assignment"] == [0, 1, 0, 1]
    assert fit.description["run"]["start"] == START


def test_the_number_of_groups_is_that_of_the_start(data):
    fit = coterie.fit(data, "ifca", start=START, rounds=1, compare=False)
    assert fit.algorithm.n_groups == 2
    assert fit.notes[-1] == "n_groups=2, as in start."


def test_advice_is_a_start(data):
    advice = coterie.advise(data)
    fit = coterie.fit(data, "ifca", start=advice, rounds=1, compare=False)
    assert fit.description["run"]["start"] == advice.start
    assert fit.rounds[0]["assignment"] == list(advice.start.values())


def test_the_survey_that_counts_the_groups_is_a_start(data):
    fit = coterie.fit(data, "ifca", rounds=1, compare=False)
    assert fit.description["run"]["start"] == coterie.advise(data).start


def test_the_groups_of_one_run_are_the_start_of_the_next(data, tmp_path):
    first = coterie.fit(data, "ifca", n_groups=2, start=START, rounds=1, out=tmp_path / "a")
    path = tmp_path / "a" / "final" / "clients.csv"
    again = coterie.fit(data, "ifca", n_groups=2, start=path, rounds=1, compare=False)
    groups = {row["client"]: row["group"] for row in first.groups}
    assert again.description["run"]["start"] == groups


def test_the_runs_it_is_compared_with_have_no_start(data, tmp_path):
    coterie.fit(data, "ifca", start=START, rounds=1, out=tmp_path / "run")
    for name in ("fedavg", "local_only"):
        made = json.loads((tmp_path / "run" / "baselines" / name / "run.json").read_text())
        assert "start" not in made["run"]


def test_a_stopped_run_continues_with_its_start(tmp_path):
    tables = described("ifca", 3, run={"start": {"client-0": 1, "client-7": 0}})
    fit_run(build(tables), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit_run(build(tables), tmp_path / "run", StopsAfter(1))
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    ready = build({name: table for name, table in kept.items() if isinstance(table, dict)})
    assert ready.settings.start == {"client-0": 1, "client-7": 0}
    resume_run(ready, tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_a_run_file_may_name_a_csv_file(tmp_path):
    path = write(tmp_path / "groups.csv", START)
    ready = build(described("ifca", run={"start": str(path)}))
    assert ready.settings.start == START
    assert describe(ready.algorithm, ready.data, ready.settings)["run"]["start"] == START


def test_the_command_line_has_it_for_run_files(tmp_path):
    (tmp_path / "study.toml").write_text(toml(described("ifca", 1)))
    path = write(tmp_path / "groups.csv", START)
    words = ("run", tmp_path / "study.toml", "--start", path, "--no-compare")
    done = command(*words, "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run"]["start"] == START


def test_clients_that_the_data_do_not_have_are_named(data):
    start = {**START, "dora": 1, **{f"x{i}": 0 for i in range(6)}}
    with pytest.raises(DataError) as error:
        coterie.fit(data, "ifca", start=start, rounds=1)
    text = str(error.value)
    assert "These are not: 'dora', 'x0', 'x1', 'x2', 'x3' and 2 more." in text
    assert "The data have client-0, client-1, client-2, client-3." in text


@pytest.mark.parametrize("method", ["fedavg", "local_only", "fedsoft"])
def test_a_method_that_cannot_use_it_says_so(data, method):
    options = {"n_groups": 2} if method == "fedsoft" else {}
    with pytest.raises(ConfigError, match=f"start: {method} cannot begin with given groups"):
        coterie.fit(data, method, start=START, rounds=1, **options)


def test_a_group_that_does_not_exist_is_refused(data):
    with pytest.raises(ConfigError, match="start: groups must be 0 to 1"):
        coterie.fit(data, "ifca", n_groups=2, start={"client-0": 2}, rounds=1)


def test_settings_refuse_what_is_no_mapping():
    with pytest.raises(ConfigError, match="start must be a valid dictionary"):
        Settings(start=3)
