"""One-shot clustering worked out by hand on clients that hold numbers."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from coterie.algorithms import CLoVE, OneShot
from coterie.algorithms.oneshot import fit_logistic
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.data import blobs, from_arrays
from coterie.engines import Simulation
from coterie.models import LinearRegressor


def weights(state):
    return state.models["weight"].flatten().tolist()


def test_the_clusters_by_hand(federate, points, scalar, half, first):
    # With inputs 1 the least-squares coefficient is the mean of y: 0, 20, 1 and 21.
    fed = federate(points([-1.0, 1.0], [20.0], [1.0], [21.0]))
    state = first(OneShot(scalar, half, n_groups=2), fed)
    group = state.assignment
    assert group[0] == group[2] != group[1] == group[3]
    assert state.centroids[group[:2]].flatten().tolist() == pytest.approx([0.5, 20.5])
    assert weights(state)[0] == weights(state)[1]  # one initial model


def test_a_round_by_hand(federate, points, scalar, half, bank, first, play):
    # From 4 half the way: 2 (with three samples) and 3, all alike; from 8 to 14.
    fed = federate(points([0.0] * 3, [20.0], [2.0]))
    method = OneShot(scalar, half, n_groups=2)
    state = first(method, fed)
    low = int(state.assignment[0])
    start = bank(4, 8) if low == 0 else bank(8, 4)
    [after] = play(method, fed, state._replace(models=start), 1)
    assert sorted(weights(after.state)) == [2.5, 14.0]
    assert weights(after.state)[low] == 2.5
    assert after.info["groups_used"] == 2


def test_a_shared_body_is_averaged_over_all(points, two_parts, half, first, play):
    fed = Simulation(points([0.0], [0.0], [40.0], [40.0]))
    method = OneShot(two_parts, half, n_groups=2)
    state = first(method, fed)
    assert list(state.shared) == ["body"]
    assert list(state.models) == ["head"]
    zero = {"body": torch.zeros(1)}, {"head": torch.zeros(2, 1)}
    [after] = play(method, fed, state._replace(shared=zero[0], models=zero[1]), 1)
    assert float(after.state.shared["body"]) == 10  # (0 + 0 + 20 + 20) / 4
    assert sorted(after.state.models["head"].flatten().tolist()) == [0, 20]


# the simple model


def test_each_class_against_the_rest():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=draw).double(), torch.arange(40) % 3
    found = fit_logistic(x, y, 5, penalty=2.0)
    for c in range(3):
        fit = LogisticRegression(C=0.5, max_iter=1000).fit(x.numpy(), (y == c).numpy())
        assert found[c].tolist() == pytest.approx(fit.coef_[0].tolist())
    assert not found[3:].any()


def test_two_classes_have_opposite_rows():
    # A library's binary fit has one row; the authors' code looks for two and fails.
    x = torch.tensor([[-1.0, 0.0], [-2.0, 1.0], [1.0, 0.0], [2.0, 1.0]]).double()
    found = fit_logistic(x, torch.tensor([1, 1, 4, 4]), 6, penalty=1.0)
    torch.testing.assert_close(found[1], -found[4], rtol=1e-4, atol=1e-4)  # lbfgs stops at 1e-4
    assert float(found[4, 0]) > 0
    assert not found[[0, 2, 3, 5]].any()


def test_a_client_with_one_class_sends_zeros_and_is_reported(half, first):
    xs = [torch.randn(6, 2, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ys = [torch.tensor([0, 1] * 3), torch.tensor([1, 0] * 3), torch.zeros(6, dtype=torch.int64)]
    data = from_arrays(xs, ys, test_fraction=0.0, n_outputs=2)
    method = OneShot(Model(lambda: torch.nn.Linear(2, 2)), half, n_groups=2)
    fed = Simulation(data)
    with pytest.warns(UserWarning, match="OneShot: clients with one class only: 1"):
        state = first(method, fed)
    fed.begin(0)
    with pytest.warns(UserWarning, match="one class only: 1"):
        _, found = method.place(fed, state, torch.tensor([0, 2]))
    assert found.fits.tolist() == [True, False]


def test_least_squares_finds_the_coefficients(half):
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([1.0, -2.0, 3.0])
    data = from_arrays([x], [x @ truth], test_fraction=0.0)
    fed = Simulation(data)
    fed.begin(-1)
    method = OneShot(Model(LinearRegressor(3), "squared_error"), half, n_groups=1)
    _, reply = fed.map(method.fit_alone, to=fed.everyone())
    torch.testing.assert_close(reply["coefficients"][0], truth)


def test_updates_of_a_network_from_one_start(federate, points, scalar, half, first):
    # After 20 steps half the way each, the change is y - w.
    fed = federate(points([0.0], [20.0], [1.0], [21.0]))
    state = first(OneShot(scalar, half, n_groups=2, stage_one="update"), fed)
    w = weights(state)[0]
    found = state.centroids[state.assignment[:2]].flatten().tolist()
    assert found == pytest.approx([0.5 - w, 20.5 - w], abs=1e-4)


# clusters never change


def test_one_wrong_label_stays_wrong_and_clove_repairs_it(points, scalar, half, first, play):
    data = points(*[[0.0], [20.0]] * 4)
    truth = torch.tensor([0, 1] * 4)
    planted = truth.clone()
    planted[3] = 0
    ends = []
    for method in (OneShot(scalar, half, n_groups=2), CLoVE(scalar, half, n_groups=2)):
        fed = Simulation(data)
        fed.start = planted if isinstance(method, CLoVE) else None
        start = first(method, fed)._replace(assignment=planted)
        found = play(method, fed, start, 4)[-1].state.assignment
        ends.append(bool((found == found[0]).eq(truth == 0).all()))
        if isinstance(method, OneShot):
            assert torch.equal(found, planted)
    assert ends == [False, True]


def test_a_newcomer_joins_the_nearest_centroid(points, scalar, half, first, play):
    data = points([0.0], [20.0], [1.0], [21.0], [8.0], names=list("abcde"))
    fed = Simulation(data, joins=[0, 0, 0, 0, 2])
    method = OneShot(scalar, half, n_groups=2)
    state = play(method, fed, first(method, fed), 2)[-1].state
    fed.begin(2)
    state, found = method.place(fed, grow(state, 5), torch.tensor([4]))
    assert state.assignment[4] == state.assignment[0]
    assert float(found.margin[0]) == pytest.approx((12.5 - 7.5) / 20)


def test_fewer_clients_than_clusters(points, scalar, half, first, play):
    method, fed = OneShot(scalar, half, n_groups=5), Simulation(points([0.0], [20.0]))
    state = play(method, fed, first(method, fed), 2)[-1].state
    assert state.assignment.unique().tolist() == [0, 1]
    assert int(state.centroids.isnan().any(1).sum()) == 3


def test_groups_with_other_labels_are_recovered(first):
    data = blobs(n_groups=2, clients_per_group=4, n=60)
    model = Model(lambda: torch.nn.Linear(data.sample_shape[0], data.n_outputs))
    state = first(OneShot(model, LocalSGD(), n_groups=2), Simulation(data))
    assert torch.equal(
        state.assignment == state.assignment[0], torch.as_tensor(data.truth) == data.truth[0]
    )


def test_messages_are_the_coefficients_once_and_a_model_each_way(
    points, scalar, half, first, play, down_up
):
    method, fed = OneShot(scalar, half, n_groups=2), Simulation(points([0.0, 1.0], [3.0]))
    state = first(method, fed)
    assert down_up(fed, 0) == (0, 4)
    play(method, fed, state, 1)
    assert down_up(fed, 0) == (4, 4)


def test_a_loss_without_a_convex_model_is_refused(half):
    model = Model(LinearRegressor(2), "reconstruction")
    with pytest.raises(ConfigError, match=r"OneShot: stage_one=.convex. needs the loss"):
        OneShot(model, half, n_groups=2)
    OneShot(model, half, n_groups=2, stage_one="update")
