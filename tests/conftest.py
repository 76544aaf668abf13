import signal
import sys
from functools import partial

import pytest
from hypothesis import settings

from coterie.cli import main
from coterie.engines import Simulation
from tiny import ENGINES

# Shells start background jobs with Ctrl-C ignored, which all processes started here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A busy machine is slow, not wrong: no test depends on the clock.
settings.register_profile("coterie", deadline=None)
settings.load_profile("coterie")


@pytest.fixture(params=ENGINES)
def federate(request):
    """`federate(data, **options)`: a federation on every engine in turn."""
    return partial(Simulation, **ENGINES[request.param])


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
