"""Damaged run folders are read or refused; no code runs, and nothing outside changes."""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie_lab.studies import folder_fuzz


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small run whose files are put back after every change."""
    return folder_fuzz.Made(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_a_damaged_folder_is_read_or_refused(made, seed):
    old = os.getcwd()
    os.chdir(made.folder)
    try:
        found = folder_fuzz.try_one(made, random.Random(seed))
    finally:
        os.chdir(old)
    assert found["end"] in ("read", "refused"), found


def test_the_changes_are_put_back(made):
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    for seed in range(20):
        folder_fuzz.change(made, random.Random(seed))
        made.restore()
    after = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    assert after == before


def test_code_that_ran_and_a_file_that_changed_are_noticed(made):
    assert made.safe()
    (made.folder / "PWNED").touch()
    assert not made.safe()
    made.restore()
    assert made.safe()
    made.victim.write_text("gone")
    assert not made.safe()
    made.restore()
    assert made.safe()


ONCE = ("0/2665", "0/19478", "0/20616", "0/28688", "0/36863", "7/16995", "7/23980")


@pytest.mark.parametrize("number", ONCE)
def test_what_ended_in_a_foreign_exception_once_is_refused(made, monkeypatch, number):
    monkeypatch.chdir(made.folder)
    found = folder_fuzz.try_one(made, random.Random(number))
    assert found["end"] in ("read", "refused"), found
