"""FeSEM worked out by hand on clients that hold numbers."""

import pytest
import torch

from coterie.algorithms import FeSEM
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.algorithm import play as run_all
from coterie.core.errors import ConfigError
from coterie.data import blobs, from_arrays
from coterie.engines import Simulation
from coterie.models import MLP, LinearRegressor


def weights(state):
    return state.models["weight"].flatten().tolist()


def test_a_round_by_hand(federate, points, scalar, half, bank, first, play):
    # Clients at 0, 2, 10 with centres 1, 1, 8. Half the way: 0.5, 1.5, 9. Nearest of 1 and 8:
    # 0, 0, 1. Means: 1 and 9.
    method, fed = FeSEM(scalar, half, n_groups=2), federate(points([0], [2], [10]))
    start = first(method, fed, models=bank(1, 8), assignment=torch.tensor([0, 0, 1]))
    [after] = play(method, fed, start, 1)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [1.0, 9.0]
    assert after.info["groups_used"] == 2


def test_a_client_changes_to_the_nearest_centre(federate, points, scalar, half, bank, first, play):
    # Client 1 (at 10) begins at centre 1, trains to 5.5, and is nearer to 8: mean of 5.5 and 9.
    method, fed = FeSEM(scalar, half, n_groups=2), federate(points([0], [10], [10]))
    start = first(method, fed, models=bank(1, 8), assignment=torch.tensor([0, 0, 1]))
    [after] = play(method, fed, start, 1)
    assert after.state.assignment.tolist() == [0, 1, 1]
    assert weights(after.state) == [0.5, 7.25]


def test_the_first_centres_come_from_k_means(federate, points, scalar, half, first):
    # One step from w goes half the way, so clients at 0, 1, 20, 21 form two clusters.
    method, fed = FeSEM(scalar, half, n_groups=2), federate(points([0], [20], [1], [21]))
    state = first(method, fed)
    w = float(state.start["weight"])
    group = state.assignment
    assert group[0] == group[2] != group[1] == group[3]
    low, high = int(group[0]), int(group[1])
    assert weights(state)[low] == pytest.approx((w + 0.5) / 2)
    assert weights(state)[high] == pytest.approx((w + 20.5) / 2)


def test_the_average_counts_every_member(federate, points, scalar, half, bank, first, play):
    # A published baseline applied the update of one client only: 4 -> 2 instead of (2 + 6) / 2.
    method, fed = FeSEM(scalar, half, n_groups=1), federate(points([0, 0, 0], [8]))
    start = first(method, fed, models=bank(4))
    [after] = play(method, fed, start, 1)
    assert weights(after.state) == [4.0]  # all alike, whatever their number of samples


def test_clients_do_not_all_join_one_centre_at_first(points, scalar, half, first):
    # Public code compares identical models in the first assignment.
    method, fed = FeSEM(scalar, half, n_groups=3), Simulation(points(*[[0], [50], [90]] * 3))
    assert len(first(method, fed).assignment.unique()) == 3


def test_a_centre_without_members_keeps_its_model(points, scalar, half, bank, first, play):
    method, fed = FeSEM(scalar, half, n_groups=3), Simulation(points([0], [2], [10]))
    start = first(method, fed, models=bank(1, 8, 99), assignment=torch.tensor([0, 0, 1]))
    [after] = play(method, fed, start, 1)
    assert weights(after.state)[2] == 99


def test_absent_clients_keep_their_centre(points, scalar, half, bank, first, play, mute):
    method, fed = FeSEM(scalar, half, n_groups=2), Simulation(points([0], [10], [10]))
    start = first(method, fed, models=bank(1, 8), assignment=torch.tensor([0, 0, 1]))
    mute(fed, [1])
    [after] = play(method, fed, start, 1)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [0.5, 9.0]


def test_the_distance_may_compare_chosen_layers(points, half):
    data = blobs(n_groups=1, clients_per_group=2, n=6)
    model = Model(lambda: MLP(data.sample_shape[0], data.n_outputs, hidden=(3,)))
    bank = model.init_many(torch.tensor(0), 2)
    names = [name for name in bank if not name.startswith("buffer:")]
    last = names[-1].rpartition(".")[0]
    whole = FeSEM(model, half, n_groups=1).compared(bank)
    part = FeSEM(model, half, n_groups=1, layers=(last,)).compared(bank)
    size = sum(bank[name][0].numel() for name in names if name.startswith(last))
    assert part.shape[1] == size < whole.shape[1]
    with pytest.raises(ConfigError, match=r"FeSEM: layers must be beginnings .* Got 'nothing'"):
        FeSEM(model, half, n_groups=1, layers=("nothing",))


def test_given_groups_replace_the_first_clusters(points, scalar, half, first):
    method, fed = FeSEM(scalar, half, n_groups=2), Simulation(points([0], [1], [20], [21]))
    fed.start = torch.tensor([1, 0, 1, 0])
    state = first(method, fed)
    w = float(state.start["weight"])
    assert state.assignment.tolist() == [1, 0, 1, 0]
    assert weights(state) == pytest.approx([(w + 11) / 2, (w + 10) / 2])


def test_a_newcomer_joins_the_nearest_of_the_first_centres(points, scalar, half, first, play):
    data = points(*[[0], [20], [1], [21], [19]], names=list("abcde"))
    fed = Simulation(data, joins=[0, 0, 0, 0, 3])
    method = FeSEM(scalar, half, n_groups=2)
    state = play(method, fed, first(method, fed), 3)[-1].state
    fed.begin(3)
    state, found = method.place(fed, grow(state, 5), torch.tensor([4]))
    assert state.assignment[4] == state.assignment[1] == found.group[0]
    assert 0 < float(found.margin[0]) <= 1


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    method, fed = FeSEM(scalar, half, n_groups=2), Simulation(points([0.0, 1.0], [3.0]))
    state = first(method, fed)
    assert down_up(fed, 0) == (4, 4)  # before the first round
    play(method, fed, state, 1)
    assert down_up(fed, 0) == (4, 4)


def test_linear_clients_are_recovered():
    # Two groups of linear regressions with opposite weights; the distance of weights shows them.
    x = torch.randn(8, 30, 3, generator=torch.Generator().manual_seed(0))
    sign = torch.tensor([1.0, -1.0] * 4)

    y = sign[:, None] * x.sum(2)
    data = from_arrays(list(x), list(y), test_fraction=0.0)
    method = FeSEM(Model(LinearRegressor(3), "squared_error"), LocalSGD(0.1), n_groups=2)
    states = run_all(method, Simulation(data))
    for _ in range(10):
        state, _ = next(states)
    assert torch.equal(state.assignment == state.assignment[0], sign > 0)
