import torch

from coterie.algorithms import LocalOnly
from coterie.core import Model
from coterie.core.random import initial_key
from coterie.engines import Simulation
from coterie.models import LinearRegressor


def own_models(algorithm, fed, state):
    ids = fed.everyone()
    _, reply = fed.map(algorithm.personalise, algorithm.deploy(state, ids), to=ids)
    return reply["weight"]


def test_two_rounds_by_hand(federate, points, scalar, half, first, play):
    # Both start at the same w of +1 or -1 and go half the way to their own y, twice.
    algorithm, fed = LocalOnly(scalar, half), federate(points([5.0], [-7.0, -9.0]))
    state = first(algorithm, fed)
    [_, after] = play(algorithm, fed, state, 2)
    w = scalar.init(initial_key(fed.run_key))["weight"]
    expected = torch.stack([5 + (w - 5) / 4, -8 + (w + 8) / 4])
    torch.testing.assert_close(own_models(algorithm, fed, after.state), expected)


def test_everybody_trains_whoever_is_in_the_cohort(points, scalar, half, first, play):
    fed = Simulation(points([5.0], [5.0], [5.0], [5.0]), participation=0.25)
    algorithm = LocalOnly(scalar, half)
    state = play(algorithm, fed, first(algorithm, fed), 3)[-1].state
    w = scalar.init(initial_key(fed.run_key))["weight"]
    torch.testing.assert_close(own_models(algorithm, fed, state), (5 + (w - 5) / 8).expand(4, 1))


def test_nothing_is_sent(federate, points, scalar, half, first, play, down_up):
    algorithm, fed = LocalOnly(scalar, half), federate(points([5.0], [1.0]))
    play(algorithm, fed, first(algorithm, fed), 2)
    assert down_up(fed, 0) == down_up(fed, 1) == (0, 0)


def test_all_clients_begin_with_the_same_model(federate, points, half, first):
    algorithm = LocalOnly(Model(LinearRegressor(1), "squared_error"), half)
    names = [f"c{i}" for i in range(12)]  # unit vectors in one dimension: +1 or -1
    fed = federate(points(*[[0.0]] * 12, names=names))
    fed.begin(0)
    weights = own_models(algorithm, fed, first(algorithm, fed))
    assert len(weights.unique()) == 1


def test_a_round_that_is_rolled_back_leaves_no_trace(points, scalar, half, first, play):
    algorithm, fed = LocalOnly(scalar, half), Simulation(points([5.0], [-7.0]))
    state = play(algorithm, fed, first(algorithm, fed), 1)[-1].state
    before = own_models(algorithm, fed, state)
    fed.begin(1)
    algorithm.step(fed, state)
    fed.rollback()
    assert torch.equal(own_models(algorithm, fed, state), before)
