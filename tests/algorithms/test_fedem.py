"""FedEM worked out by hand on clients that hold numbers."""

import math

import pytest
import torch

from coterie.algorithms import FedAvg, FedEM
from coterie.checks.trial import answers
from coterie.core import LocalSGD
from coterie.engines import Simulation


def test_a_round_by_hand(federate, points, scalar, bank, first, play):
    # Models 0 and 2. Sample 0: losses 0 and 4. Sample 2: losses 4 and 0. Even shares at first.
    # q = 1 / (1 + e^-4) for the near model. Client 0 holds 0, 0, 2; client 1 holds 2.
    q = 1 / (1 + math.exp(-4))
    fed = federate(points([0, 0, 2], [2]))
    method = FedEM(scalar, LocalSGD(0.25), n_components=2)
    (last,) = play(method, fed, first(method, fed, models=bank(0.0, 2.0)), 1)
    near = (2 * q + (1 - q)) / 3
    assert last.state.shares[0].tolist() == pytest.approx([near, 1 - near])
    assert last.state.shares[1].tolist() == pytest.approx([1 - q, q])
    assert last.state.assignment.tolist() == [0, 1]
    # One step of 1/4: w - (1/4) 2 sum of q (w - y) / n, divided by n, not by the sum of q.
    # Client 0: model 0 moves by (1 - q) 2 / 3 / 2; model 2 by -(2 (1 - q) 2) / 3 / 2.
    # Client 1: model 0 moves by (1 - q) 2 / 2; model 2 stays. Averages 3 to 1.
    low = (3 * (1 - q) / 3 + 1 * (1 - q)) / 4
    high = 2 - 3 * (4 * (1 - q) / 6) / 4
    assert last.state.models["weight"].flatten().tolist() == pytest.approx([low, high], abs=1e-6)


def test_shares_carry_over_to_the_next_round(points, scalar, bank, first, play):
    # Without training: after two rounds the odds of the near model are e^4 twice over.
    fed = Simulation(points([0.0]))
    method = FedEM(scalar, LocalSGD(0.0), n_components=2)
    rounds = play(method, fed, first(method, fed, models=bank(0.0, 2.0)), 2)
    assert float(rounds[1].state.shares[0, 0]) == pytest.approx(1 / (1 + math.exp(-8)))


def test_smoothing_keeps_every_component_alive(points, scalar, bank, first, play):
    method = FedEM(scalar, LocalSGD(0.0), n_components=2, smoothing=0.2)
    fed = Simulation(points([0.0]))
    last = play(method, fed, first(method, fed, models=bank(0.0, 9.0)), 5)[-1]
    assert float(last.state.shares[0, 1]) == pytest.approx(0.1)


def test_one_component_is_fedavg(federate, points, scalar, first, play):
    data = points([0, 1, 5], [4, 6], [8])
    local = LocalSGD(0.1, epochs=2, batch_size=2)
    fed = federate(data)
    method = FedEM(scalar, local, n_components=1)
    start = first(method, fed, models={"weight": torch.tensor([[3.0]])})
    one = play(method, fed, start, 2)[-1].state.models["weight"]
    fed = federate(data)
    average = FedAvg(scalar, local)
    start = first(average, fed, params={"weight": torch.tensor([3.0])})
    other = play(average, fed, start, 2)[-1].state.params["weight"]
    assert float(one) == pytest.approx(float(other), abs=1e-6)


def test_a_newcomer_finds_its_shares_while_the_predictors_stay(points, scalar, bank, first):
    fed = Simulation(points([0, 0, 0, 9]))
    method = FedEM(scalar, LocalSGD(0.25), n_components=2)
    state = first(method, fed, models=bank(0.0, 9.0))
    fed.begin(0)
    placed, evidence = method.place(fed, state, fed.everyone())
    assert placed.shares[0].tolist() == pytest.approx([0.75, 0.25])
    assert evidence.margin.tolist() == pytest.approx([0.5])
    assert torch.equal(placed.models["weight"], state.models["weight"])
    mixture = method.mixture(placed, fed.everyone())
    assert mixture.shares.tolist() == [pytest.approx([0.75, 0.25])]
    fed.commit()
    said = answers(method, fed, placed, torch.ones(1, 1))["output"]
    assert float(said) == pytest.approx(0.25 * 9)


def test_messages_are_all_predictors_each_way(points, scalar, first, play, down_up):
    fed = Simulation(points([0.0, 1.0], [3.0]))
    method = FedEM(scalar, LocalSGD(0.25), n_components=3)
    play(method, fed, first(method, fed), 1)
    model, k = 4, 3
    assert down_up(fed, 0) == (k * model, k * model + k * 8 + 8)  # and shares, and the size
