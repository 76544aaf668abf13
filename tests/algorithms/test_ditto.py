"""Ditto worked out by hand on clients that hold numbers."""

import pytest
import torch

from coterie.algorithms import Ditto, FedAvg
from coterie.checks.trial import answers
from coterie.core import LocalSGD
from coterie.engines import Simulation


def weight(tree):
    return float(tree["weight"])


def test_two_rounds_by_hand(federate, points, scalar, half, first, play):
    # Common model: from 2, half the way to the clients' means 0 and 6 (one sample each).
    # Round 1: (1 + 4) / 2 = 2.5. Round 2: (1.25 + 4.25) / 2 = 2.75.
    # Personal models, lambda = 1, step 1/4: v - (2 (v - y) + (v - w)) / 4, w as received.
    # Round 1, v = w = 2: client 0: 2 - 4/4 = 1; client 1: 2 + 8/4 = 4.
    # Round 2, w = 2.5: client 0: 1 - (2 - 1.5)/4 = 0.875; client 1: 4 - (-4 + 1.5)/4 = 4.625.
    fed = federate(points([0], [6]))
    method = Ditto(scalar, half, strength=1.0)
    start = first(method, fed, params={"weight": torch.tensor([2.0])})
    rounds = play(method, fed, start, 2)
    assert [weight(r.state.params) for r in rounds] == pytest.approx([2.5, 2.75])
    own = [weight(fed.memory.get(i)["params"]) for i in range(2)]
    assert own == pytest.approx([0.875, 4.625])


def test_the_common_model_is_that_of_fedavg(points, scalar, half, first, play):
    ends = []
    for method in (Ditto(scalar, half), FedAvg(scalar, half)):
        fed = Simulation(points([0, 1], [6]))
        start = first(method, fed, params={"weight": torch.tensor([2.0])})
        ends.append(weight(play(method, fed, start, 3)[-1].state.params))
    assert ends[0] == ends[1]


def test_personal_epochs_are_the_personal_models_alone(points, scalar, half, first, play):
    fed = Simulation(points([0]))
    method = Ditto(scalar, half, strength=0.0, personal_epochs=3)
    start = first(method, fed, params={"weight": torch.tensor([8.0])})
    (last,) = play(method, fed, start, 1)
    assert weight(last.state.params) == 4.0
    assert weight(fed.memory.get(0)["params"]) == 1.0  # halved three times


def test_who_never_took_part_predicts_with_the_common_model(points, scalar, first, play):
    data = points(*([float(i)] for i in range(6)))
    fed = Simulation(data, participation=0.5)
    method = Ditto(scalar, LocalSGD(0.25))
    (last,) = play(method, fed, first(method, fed), 1)
    absent = sorted(set(range(6)) - set(fed.memory.committed))
    assert len(absent) == 3
    given = method.deploy(last.state, fed.everyone())
    said = answers(method, fed, last.state, torch.ones(1, 1))["output"].flatten()
    assert said[absent].tolist() == [weight(given)] * 3
    # Who comes new starts its own model at the common one, not at the initial weights.
    fed.begin(1)
    fed.map(method.update, given, to=torch.tensor(absent[:1]))
    own, w, y = weight(fed.memory.get(absent[0])["params"]), weight(given), float(absent[0])
    assert own == pytest.approx(w - 2 * (w - y) / 4)  # v = w, so no pull in the first step


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    fed = Simulation(points([0.0, 1.0], [3.0]))
    method = Ditto(scalar, half)
    play(method, fed, first(method, fed), 1)
    assert down_up(fed, 0) == (4, 4 + 8)  # the personal model stays at home
