import pytest
import torch

from coterie import models
from coterie.algorithms import FedAvg
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError, FederationError
from coterie.data import blobs
from coterie.engines import Simulation


def test_one_round_by_hand(federate, points, scalar, half, first, play):
    # From 0 half the way: client 0 (y = 2, one sample) to 1, client 1 (y = 8, three) to 4.
    data = points([2.0], [8.0, 8.0, 8.0])
    for weights, expected in {"samples": (1 + 3 * 4) / 4, "equal": (1 + 4) / 2}.items():
        algorithm = FedAvg(scalar, half, weights=weights)
        fed = federate(data)
        state = first(algorithm, fed, params={"weight": torch.zeros(1)})
        [after] = play(algorithm, fed, state, 1)
        assert after.state.params["weight"].tolist() == [expected]


def test_a_client_that_stays_silent_is_absent_from_the_mean(
    federate, points, scalar, half, first, play, mute
):
    algorithm, fed = FedAvg(scalar, half), federate(points([2.0], [8.0], [-4.0]))
    state = first(algorithm, fed, params={"weight": torch.zeros(1)})
    mute(fed, [2])
    [after] = play(algorithm, fed, state, 1)
    assert after.state.params["weight"].tolist() == [(1 + 4) / 2]
    mute(fed, [0, 1, 2])
    with pytest.raises(FederationError, match="at least 1 of 3 clients must answer in round 2"):
        play(algorithm, fed, state, 1, start=1)


def test_a_diverged_client_is_left_out_with_a_warning(federate, points, scalar, first, play):
    # Client 1: 10 * 2 * 3e38 is beyond float32. Client 0: 0 - 10 * 2 * (0 - 1) = 20.
    algorithm, fed = FedAvg(scalar, LocalSGD(learning_rate=10.0)), federate(points([1.0], [3e38]))
    state = first(algorithm, fed, params={"weight": torch.zeros(1)})
    with pytest.warns(UserWarning, match=r"FedAvg.update: 1 replies were not finite"):
        [after] = play(algorithm, fed, state, 1)
    assert after.state.params["weight"].tolist() == [20.0]


def test_bytes_are_one_model_down_and_one_model_and_a_count_up(federate, first, play, down_up):
    data = blobs(n_groups=1, clients_per_group=2, n=8)
    model = Model(models.make("mlp", data, hidden=(5,)))
    weights = 2 * 5 + 5 + 5 * 3 + 3
    algorithm, fed = FedAvg(model, LocalSGD()), federate(data)
    play(algorithm, fed, first(algorithm, fed), 1)
    assert down_up(fed, 0) == (4 * weights, 4 * weights + 8)


def test_everybody_is_handed_the_same_model(points, scalar, half, first):
    algorithm, fed = FedAvg(scalar, half), Simulation(points([1.0], [2.0]))
    state = first(algorithm, fed)
    assert algorithm.deploy(state, fed.everyone()) is state.params
    assert algorithm.predict({"weight": torch.tensor([3.0])}, torch.ones(2, 1)).tolist() == [3, 3]
    state, evidence = algorithm.place(fed, state, torch.tensor([1, 0]))
    assert evidence.group.tolist() == [0, 0]
    assert evidence.fits.all()


def test_the_order_of_clients_does_not_matter(points, scalar, first, play):
    local = LocalSGD(learning_rate=0.25, batch_size=1)
    ends = []
    for names in (["a", "b", "c"], ["c", "a", "b"]):
        values = {"a": [1.0, 5.0], "b": [2.0, -3.0, 4.0], "c": [8.0, 0.0]}
        algorithm = FedAvg(scalar, local)
        fed = Simulation(points(*(values[n] for n in names), names=names), seed=3)
        ends.append(play(algorithm, fed, first(algorithm, fed), 3)[-1].state.params["weight"])
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)  # sums in another order


def test_the_step_shrinks_by_the_round(federate, points, scalar, first, play):
    # Steps 1/4, then 1/8: 0 -> 4 -> 4 + (8 - 4) / 4.
    algorithm = FedAvg(scalar, LocalSGD(learning_rate=0.25, decay=0.5))
    fed = federate(points([8.0]))
    state = first(algorithm, fed, params={"weight": torch.zeros(1)})
    assert play(algorithm, fed, state, 2)[-1].state.params["weight"].tolist() == [5.0]


def test_weights_must_be_known(scalar, half):
    with pytest.raises(ConfigError, match="FedAvg: weights must be"):
        FedAvg(scalar, half, weights="size")
