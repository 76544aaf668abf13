"""FedProx worked out by hand on clients that hold numbers."""

import pytest
import torch

from coterie.algorithms import FedAvg, FedProx
from coterie.checks import tiny
from coterie.core import LocalSGD
from coterie.engines import Simulation


def test_a_round_by_hand(federate, points, scalar, first, play):
    # Two steps of 1/4 from w = 2 with mu = 2. Gradient: 2 (w - y) + 2 (w - 2).
    # y = 0: 2 - 4/4 = 1, then 1 - (2 - 2)/4 = 1. y = 6: 2 + 8/4 = 4, then 4 - (-4 + 4)/4 = 4.
    # Clients hold three samples and one: (3 * 1 + 1 * 4) / 4 = 1.75.
    fed = federate(points([0, 0, 0], [6]))
    method = FedProx(scalar, LocalSGD(0.25, steps=2), strength=2.0)
    start = first(method, fed, params={"weight": torch.tensor([2.0])})
    (last,) = play(method, fed, start, 1)
    assert float(last.state.params["weight"]) == pytest.approx(1.75)


def test_without_a_pull_it_is_fedavg():
    problem = tiny()
    ends = []
    for method in (
        FedProx(problem.model, problem.local, strength=0.0),
        FedAvg(problem.model, problem.local),
    ):
        fed = Simulation(problem.data, participation=0.5)
        fed.begin(-1)
        state = method.init(fed)
        for number in range(2):
            fed.begin(number)
            state, _ = method.step(fed, state)
        ends.append(state.params)
    for name, leaf in ends[0].items():
        assert torch.allclose(leaf, ends[1][name], atol=1e-12)  # kernels may sum in another order


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    fed = Simulation(points([0.0, 1.0], [3.0]))
    method = FedProx(scalar, half)
    play(method, fed, first(method, fed), 1)
    assert down_up(fed, 0) == (4, 4 + 8)  # one weight; and the number of samples
