"""The options of data have the same names in Python, on the command line and in run files."""

import inspect
import json
from dataclasses import fields

import numpy as np
import pytest

import coterie
from coterie.catalogue import describe_data
from coterie.cli.advise import advise
from coterie.cli.compare import compare
from coterie.cli.options import READING, as_options
from coterie.cli.recheck import recheck
from coterie.cli.run import run
from coterie.data import from_folder, from_table
from coterie.data.assemble import Reading
from coterie.data.formats import Format

OF_READERS = {"label", "client", "size"}


@pytest.fixture
def sites(tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("north", "south"):
        (folder / f"{name}.csv").write_text("age,risk\n" + "31,low\n62,high\n45,low\n" * 4)
    return folder


def test_every_option_of_reading_is_a_flag_and_the_other_way_round():
    # The seed of the split is data.seed: --seed is the seed of what a command does.
    assert set(READING) == {field.name for field in fields(Reading)} - {"seed"} | OF_READERS
    parameters = {*inspect.signature(from_folder).parameters}
    assert {*inspect.signature(from_table).parameters, *parameters} >= OF_READERS


@pytest.mark.parametrize("command", [run, advise, compare, recheck])
def test_commands_that_read_data_have_all_of_them(command, call):
    parameters = inspect.signature(command).parameters
    assert set(parameters) >= set(READING)
    for name in READING:
        mine, of_run = (inspect.signature(one).parameters[name] for one in (command, run))
        kind, option = mine.annotation.__args__[0], mine.annotation.__metadata__[0]
        assert kind == of_run.annotation.__args__[0]
        assert vars(option) == vars(of_run.annotation.__metadata__[0])
    code, said, _ = call(command.__name__, "--help")
    assert code == 0
    for name in READING:
        assert f"--{name.replace('_', '-')}" in said, name


@pytest.fixture
def trained(sites, tmp_path):
    data = coterie.from_folder(sites, "risk", na_values="-9", validation_fraction=0.1)
    coterie.fit(data, "fedavg", rounds=2, out=tmp_path / "a", compare=False, quiet=True)
    coterie.fit(data, "local_only", rounds=2, out=tmp_path / "b", compare=False, quiet=True)
    return tmp_path


SAME = ("--label", "risk", "--na-values", "-9", "--validation-fraction", "0.1", "--normalise")


def test_compare_scores_runs_on_the_same_new_rows(call, sites, trained):
    folders = [str(trained / name) for name in "ab"]
    code, said, _ = call("compare", *folders, "--data", sites, *SAME, "--names", "north", "--json")
    assert code == 0
    lines = json.loads(said)
    assert [line["run"] for line in lines] == folders
    assert [line["clients"] for line in lines] == [1, 1]
    assert [line["rows"] for line in lines] == [12, 12]
    fit = coterie.load(folders[0])
    rows = {"age": [31, 62, 45], "risk": ["low", "high", "low"]}
    own = (fit.predict(rows, client="north") == np.array(rows["risk"])).mean()
    assert lines[0]["accuracy"] == pytest.approx(own)


def test_new_rows_are_read_as_in_training_unless_it_is_said(call, sites, trained, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "north.csv").write_text("31|low\n-9|high\n-8|low\n" * 4)
    words = ["recheck", str(trained / "a"), "--data", str(new), "--separator", "|"]
    code, _, said = call(*words, "--header")
    assert code == 2  # there is none
    (new / "north.csv").write_text("age|risk\n31|low\n-9|high\n-8|low\n" * 1)
    code, said, _ = call(*words, *SAME, "--json")
    assert code == 0
    assert json.loads(said)["clients"][0]["rows"] == 3


@pytest.mark.parametrize("command", ["recheck", "compare"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--label", "age"), "label must be that of the run, risk"),
        (("--no-normalise",), "normalise must be that of the run, True"),
        (("--drop", "age"), "drop must be that of the run, none"),
        (("--test-fraction", "0.5"), "test_fraction must be that of the run, 0.2"),
        (("--names", "nobody"), "Unknown client 'nobody'"),
        (("--client", "age"), "--client is for one table"),
        (("--unit", "nothing"), "'nothing'"),
    ],
)
def test_what_the_run_settled_cannot_be_changed(call, sites, trained, command, words, sentence):
    code, _, said = call(command, trained / "a", "--data", sites, *words)
    assert code == 2
    assert sentence in said


def test_options_without_new_data_are_an_error(call, trained):
    code, _, said = call("compare", trained / "a", trained / "b", "--drop", "age")
    assert code == 2
    assert "--drop says how new data are read" in said


def test_the_readers_of_python_take_the_same_options(sites):
    values = {"na_values": "-9", "header": True, "separator": ",", "encoding": "utf-8"}
    assert {field.name for field in fields(Format)} == set(values)
    whole = dict(vars(Reading())) | values
    assert coterie.from_folder(sites, "risk", **whole).names == ("north", "south")
    table = sites / "all.csv"
    table.write_text("site,age,risk\n" + "a,31,low\nb,62,high\na,45,high\nb,40,low\n" * 3)
    assert coterie.from_table(table, "site", "risk", **whole).names == ("a", "b")


def test_explain_data_has_an_entry_for_each():
    lines = describe_data().splitlines()
    for name in READING:
        assert name in lines, name


def test_the_options_reach_the_reader(call, sites):
    code, _, said = call("advise", sites, "--label", "risk", "--drop", "nothing")
    assert code == 2
    assert "drop: Unknown column 'nothing'" in said


def test_a_run_file_takes_them_too(call, sites, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(
        f"[algorithm]\nname = 'fedavg'\n[data]\nname = 'folder'\npath = '{sites}'\n"
        "label = 'risk'\n[run]\nrounds = 1\n"
    )
    code, _, said = call("run", str(file), "--drop", "nothing")
    assert code == 2
    assert "drop: Unknown column 'nothing'" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "quickstart", "--drop", "x"), "--drop has no use with quickstart"),
        (("run", "quickstart", "--groups", "3"), "--groups has no use with quickstart"),
        (("run", "--data", "SITES", "--client", "x"), "--client is for one table"),
        (("run", "--data", "SITES", "--size", "3x4x5"), "HEIGHTxWIDTH"),
        (("advise", "SITES", "--set", "run.rounds=3"), "Unknown table 'run'"),
        (("advise", "SITES", "--size", "32"), "size is for folders of images"),
        (("advise", "SITES", "--drop", "age", "--text", "age"), "in drop and in text"),
        (("run", "--data", "SITES", "--set", "algorithm.model=cnn"), "model is no option of a"),
    ],
)
def test_what_has_no_use_is_an_error(call, sites, words, sentence):
    code, _, said = call(*(str(sites) if word == "SITES" else word for word in words))
    assert code == 2
    assert sentence in said


def test_client_and_label_are_different_columns(call, tmp_path):
    (tmp_path / "all.csv").write_text("age,site\n31,a\n62,b\n")
    code, _, said = call("advise", tmp_path / "all.csv", "--client", "site", "--label", "site")
    assert code == 2
    assert "client and label must be different columns" in said


def test_remedies_are_written_as_on_the_command_line(call, tmp_path):
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text("age,empty,risk\n" + "31,,low\n62,,high\n" * 6)
    code, _, said = call("advise", tmp_path, "--label", "risk")
    assert code == 2
    assert "leave it out: --drop empty." in said


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ("drop=['a', 'b c']", "--drop a --drop 'b c'"),
        ("header=False", "--no-header"),
        ("Give time=COLUMN.", "Give --time COLUMN."),
        ("try model='linear'.", "try --set model.name=linear."),
        ("settings={'replicates': 3}.", "--set run.replicates=3."),
        ("the client 'drop=1' and run.rounds=3", "the client 'drop=1' and run.rounds=3"),
    ],
)
def test_options_of_python_are_said_as_options_of_the_command_line(python, command):
    assert as_options(python) == command
