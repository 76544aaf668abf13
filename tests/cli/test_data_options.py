"""The options of data have the same names in Python, on the command line and in run files."""

import inspect
from dataclasses import fields

import pytest

from coterie.catalogue import describe_data
from coterie.cli.advise import advise
from coterie.cli.options import READING
from coterie.cli.run import run
from coterie.data import from_folder, from_table
from coterie.data.assemble import Reading

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


@pytest.mark.parametrize("command", [run, advise])
def test_commands_that_read_data_have_all_of_them(command):
    assert set(inspect.signature(command).parameters) >= set(READING)


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
    ],
)
def test_what_has_no_use_is_an_error(call, sites, words, sentence):
    code, _, said = call(*(str(sites) if word == "SITES" else word for word in words))
    assert code == 2
    assert sentence in said
