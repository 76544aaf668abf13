"""The command line in a test."""

import sys

import pytest

from coterie.cli import main


@pytest.fixture
def call(capsys, monkeypatch):
    """`call("list", "--json")`: exit code, what was printed, what was complained about."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return call
