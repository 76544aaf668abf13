import math

import pytest
import torch

from coterie.core.errors import ConfigError
from coterie.core.random import fold, seed_key
from coterie.engines import Faults

KEY = seed_key(0)
NAMES = fold(seed_key(1), torch.arange(20_000))


def share(mask):
    return float(mask.double().mean())


@pytest.mark.parametrize("drop", [0.0, 0.3, 1.0])
def test_the_stated_share_is_dropped(drop):
    dropped, late = Faults(drop=drop).lost(KEY, NAMES)
    assert abs(share(dropped) - drop) < 0.017  # five deviations
    assert share(late) == 0.0


def test_who_takes_longer_than_the_deadline_is_late():
    # Exponential times of mean 2, deadline 3: exp(-3/2) of them.
    dropped, late = Faults(delay=2.0, deadline=3.0).lost(KEY, NAMES)
    assert share(dropped) == 0.0
    assert abs(share(late) - math.exp(-1.5)) < 0.015


def test_who_does_not_answer_is_not_late():
    dropped, late = Faults(drop=0.5, delay=2.0, deadline=1.0).lost(KEY, NAMES)
    assert not bool((dropped & late).any())


def test_faults_are_a_function_of_seed_exchange_and_client():
    some = NAMES[:50]
    base = Faults(drop=0.5).lost(KEY, some)[0]
    assert torch.equal(base, Faults(drop=0.5).lost(KEY, some)[0])
    assert torch.equal(base.flip(0), Faults(drop=0.5).lost(KEY, some.flip(0))[0])
    assert not torch.equal(base, Faults(drop=0.5, seed=1).lost(KEY, some)[0])
    assert not torch.equal(base, Faults(drop=0.5).lost(fold(KEY, 1), some)[0])


@pytest.mark.parametrize("options", [{"drop": 1.5}, {"drop": -0.1}, {"delay": -1}, {"deadline": 0}])
def test_impossible_faults_are_refused(options):
    with pytest.raises(ConfigError, match=r"^Faults: "):
        Faults(**options)


def test_the_line_of_a_round_names_who_did_not_answer():
    from coterie.running.loop import begin
    from small_runs import ready

    result = begin(ready("ifca", 3, run={"drop": 0.5, "participation": 1.0}))
    missing = [set(line.get("missing", [])) for line in result.rounds]
    assert any(missing)
    assert all(names <= set(result.fed.names) for names in missing)
    assert not any("missing" in line for line in begin(ready("ifca", 2)).rounds)
