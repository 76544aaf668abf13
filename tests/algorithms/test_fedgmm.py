"""FedGMM worked out by hand: inputs are single numbers, predictors one weight."""

import math

import pytest
import torch

from coterie.algorithms import FedEM, FedGMM
from coterie.algorithms.fedgmm import gaussians, log_density, projection, weighted_moments
from coterie.checks.trial import answers
from coterie.core import LocalSGD, Model
from coterie.core.random import seed_key
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.models import LinearRegressor

STILL = LocalSGD(0.0)


def clients(*pairs):
    """Clients from lists of (x, y)."""
    xs = [torch.tensor([[float(x)] for x, _ in rows]) for rows in pairs]
    ys = [torch.tensor([float(y) for _, y in rows]) for rows in pairs]
    return from_arrays(xs, ys, test_fraction=0.0)


def moments(means, variances):
    """Moments of Gaussians of one feature."""
    first = torch.tensor(means).double()[:, None]
    return {
        "first": first,
        "second": first[:, :, None] ** 2 + torch.tensor(variances)[:, None, None],
    }


@pytest.fixture
def weight():
    return Model(LinearRegressor(1), "squared_error", dtype=torch.float64)


def test_densities_are_those_of_torch():
    spread = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    mean = torch.tensor([1.0, -1.0]).double()
    given = gaussians(
        {"first": mean[None], "second": (spread + mean[:, None] * mean)[None]}, torch.tensor(0.0)
    )
    z = torch.tensor([[0.0, 0.0], [1.0, -1.0]]).double()
    expected = torch.distributions.MultivariateNormal(mean, spread).log_prob(z)
    assert torch.allclose(log_density(z, given)[:, 0], expected)


def test_first_gaussians_follow_the_moments_of_all_data(federate, weight, first):
    # Values 0, 2 and 4, 4, 5: mean 3, mean square (0 + 4 + 16 + 16 + 25) / 5 = 12.2, variance 3.2.
    fed = federate(clients([(0, 0), (2, 0)], [(4, 0), (4, 0), (5, 0)]))
    method = FedGMM(weight, STILL, n_gaussians=2, ridge=1e-6)
    state = first(method, fed)
    means = state.moments["first"]
    spread = state.moments["second"] - means[:, :, None] * means[:, None, :]
    assert spread.flatten().tolist() == pytest.approx([3.2, 3.2])
    assert float(state.floor) == pytest.approx(3.2e-6)
    assert float((means[0] - means[1]).abs()) > 0  # drawn apart


def test_a_round_by_hand(federate, weight, first, play):
    # Gaussians at 0 and 10 with variance 1; predictors 0 and 1: y = 0 or y = x.
    # Client 0: (0, 0), where predictors agree, and (10, 10): the second Gaussian and the second
    # predictor, whose losses are 100 and 0. Pairs (Gaussian, predictor): 00, 01, 10, 11.
    # Sample 1: 1/2, 1/2, 0, 0. Sample 2: 0, 0, 0, 1 (to e^-50). Shares: 1/4, 1/4, 0, 1/2.
    # Client 1: (10, 0) and (12, 0): the second Gaussian, the first predictor: 0, 0, 1, 0.
    fed = federate(clients([(0, 0), (10, 10)], [(10, 0), (12, 0)]))
    method = FedGMM(weight, STILL, n_components=2, n_gaussians=2)
    start = first(
        method,
        fed,
        models={"weight": torch.tensor([[0.0], [1.0]]).double()},
        moments=moments([0.0, 10.0], [1.0, 1.0]),
        floor=torch.tensor(1e-3).double(),
    )
    (last,) = play(method, fed, start, 1)
    assert last.state.shares[0].tolist() == pytest.approx([0.25, 0.25, 0.0, 0.5], abs=1e-9)
    assert last.state.shares[1].tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0], abs=1e-9)
    # The second Gaussian: samples 10 (client 0), 10 and 12 (client 1): mean 32/3, and the variance
    # of all three, 8/9: averaging the clients' variances 0 and 1 by 1 to 2 would give 2/3.
    mean, square = last.state.moments["first"][1, 0], last.state.moments["second"][1, 0, 0]
    assert float(mean) == pytest.approx(32 / 3)
    assert float(square - mean**2) == pytest.approx(8 / 9)
    assert float(last.state.moments["first"][0, 0]) == pytest.approx(0.0, abs=1e-9)
    # By predictor: client 0 has 1/4 and 3/4, client 1 all of the first.
    found = method.mixture(last.state, fed.everyone())
    assert found.shares.flatten().tolist() == pytest.approx([0.25, 0.75, 1.0, 0.0], abs=1e-9)


def test_predictors_are_averaged_by_what_they_explain(federate, weight, first, play):
    # One Gaussian; predictors 0 and 4 at x = 1. Client 0 holds y = 1 three times, client 1 y = 5
    # once, so client 0 explains by the first alone and client 1 by the second (to e^-8).
    # One step of 1/4 goes half the way: 0.5 and 4.5, each from one client alone.
    fed = federate(clients([(1, 1), (1, 1), (1, 1)], [(1, 5)]))
    method = FedGMM(weight, LocalSGD(0.25), n_components=2, n_gaussians=1)
    start = first(
        method,
        fed,
        models={"weight": torch.tensor([[0.0], [4.0]]).double()},
        moments=moments([1.0], [1.0]),
        floor=torch.tensor(1.0).double(),
    )
    (last,) = play(method, fed, start, 1)
    assert last.state.models["weight"].flatten().tolist() == pytest.approx([0.5, 4.5], abs=2e-3)


def test_a_gaussian_nobody_has_keeps_its_place_and_the_silent_do_not_count(
    weight, first, play, mute
):
    fed = Simulation(clients([(0, 0), (1, 0)], [(50, 0)]))
    method = FedGMM(weight, STILL, n_components=1, n_gaussians=2)
    start = first(method, fed, moments=moments([0.0, 50.0], [1.0, 1.0]))
    mute(fed, [1])
    (last,) = play(method, fed, start, 1)
    assert float(last.state.moments["first"][0, 0]) == pytest.approx(0.5)
    assert float(last.state.moments["first"][1, 0]) == pytest.approx(50.0)  # e^-1200 of weight
    assert last.state.shares[1].tolist() == [-1.0, -1.0]


def test_prediction_takes_the_logarithm_of_the_shares(weight, first):
    # One client, Gaussians at 0 and 2 with variance 1, x = 1: both densities are equal, so the
    # shares decide: pair (0, 0) has 0.9, pair (1, 1) has 0.1. Predictors 0 and 10.
    # Added without a logarithm, e^0.9 against e^0.1 (and e^0 for the empty pairs) would decide.
    fed = Simulation(clients([(1, 0)]))
    method = FedGMM(weight, STILL, n_components=2, n_gaussians=2)
    state = first(
        method,
        fed,
        models={"weight": torch.tensor([[0.0], [10.0]]).double()},
        moments=moments([0.0, 2.0], [1.0, 1.0]),
        floor=torch.tensor(0.0).double(),
    )
    fed.memory.committed[0] = {"share": torch.tensor([0.9, 0.0, 0.0, 0.1]).double()}
    said = answers(method, fed, state, torch.ones(1, 1))["output"]
    assert float(said) == pytest.approx(1.0)
    # At x = 0 the first Gaussian is e^2 times as dense: 0.1 / (0.9 e^2 + 0.1) of the second; its
    # prediction there is 0, so look at x = 2, where it is the other way round.
    said = answers(method, fed, state, torch.full((1, 1), 2.0))["output"]
    share = 0.1 * math.exp(2) / (0.9 + 0.1 * math.exp(2))
    assert float(said) == pytest.approx(20 * share)


def test_one_gaussian_is_fedem_but_for_the_weights_of_the_average(weight, first, play):
    data = clients([(1, 0), (1, 2)], [(1, 2)])
    ends = []
    for method in (
        FedGMM(weight, STILL, n_components=2, n_gaussians=1),
        FedEM(weight, STILL, n_components=2),
    ):
        fed = Simulation(data)
        bank = {"weight": torch.tensor([[0.0], [2.0]]).double()}
        ends.append(play(method, fed, first(method, fed, models=bank), 2)[-1].state.shares)
    assert torch.allclose(ends[0], ends[1], atol=1e-12)


def test_a_newcomer_finds_its_shares_while_all_components_stay(weight, first):
    fed = Simulation(clients([(0, 0), (10, 10), (10, 10), (10, 0)]))
    method = FedGMM(weight, STILL, n_components=2, n_gaussians=2)
    state = first(
        method,
        fed,
        models={"weight": torch.tensor([[0.0], [1.0]]).double()},
        moments=moments([0.0, 10.0], [1.0, 1.0]),
    )
    fed.begin(0)
    placed, evidence = method.place(fed, state, fed.everyone())
    assert placed.shares[0, 2:].tolist() == pytest.approx([0.25, 0.5])
    assert int(evidence.group) == 3
    assert torch.equal(placed.moments["first"], state.moments["first"])


def test_the_projection_is_the_same_for_all_and_plain_for_few_inputs():
    assert torch.equal(projection(seed_key(1), 3, 8), torch.eye(3).double())
    wide = projection(seed_key(1), 400, 8)
    assert torch.equal(wide, projection(seed_key(1), 400, 8))
    assert wide.square().sum(0).tolist() == pytest.approx([1.0] * 8, abs=0.3)


def test_moments_without_weight_are_zeros():
    found = weighted_moments(torch.ones(3, 2).double(), torch.zeros(3).double())
    assert float(found["first"].abs().sum() + found["second"].abs().sum()) == 0.0


def test_messages_by_hand(weight, first, play, down_up):
    fed = Simulation(clients([(0, 0), (2, 0)], [(4, 0)]))
    method = FedGMM(weight, STILL, n_components=3, n_gaussians=2)
    state = first(method, fed)
    d, model, a, b = 1, 1, 2, 3
    assert down_up(fed, 0) == (0, 8 * (d + d * d + 1 + 1))  # moments, size, number of inputs
    play(method, fed, state, 1)
    both = b * model + a * (d + d * d)
    assert down_up(fed, 0) == (8 * both, 8 * (both + a * b + a + b))  # and shares and weights
