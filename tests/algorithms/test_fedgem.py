"""FedGEM: each step by hand, and what the balls promise."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from copies import copies
from coterie.algorithms.fedgem import ETA, FedGEM, balls, responsibilities
from coterie.checks.trial import Watched
from coterie.core.algorithm import grow, play
from coterie.core.errors import TaskError
from coterie.core.random import seed_key, uniform
from coterie.data.mixture import federate, mixture_tight
from coterie.engines import Simulation
from coterie.engines.faults import Faults
from coterie.running.evaluation import components
from tiny import points, rounds


def played(algorithm, fed):
    """The state when it is done."""
    return list(play(algorithm, fed))[-1][0]


def clouds(seed=0, separation=8.0):
    return mixture_tight(4, 4, 3, 60, separation, 2, 3, seed=seed)


# the client: EM step and ball


def test_responsibilities_by_hand():
    # Centres 0 and 2, sigma 2, sample 2: exp(-4/8) against exp(0); the second row is padding.
    x = torch.tensor([[2.0], [5.0]]).double()
    centres, mask = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([True, False])
    share = responsibilities(x, mask, centres, torch.ones(2).double() / 2, 2.0)
    wanted = np.exp(-0.5) / (1 + np.exp(-0.5))
    assert share.tolist() == [pytest.approx([wanted, 1 - wanted]), [0.0, 0.0]]


def test_a_round_by_hand(federate):
    # Two clients with one component each: data -1, 1 and 0, 2. From any seed the EM step goes to
    # the means 0 and 1, at distance 1 from the seed, so the radii are sqrt(1/2) and the balls
    # overlap. Their common point is 0.5; new centres are (0 + 0.5) / 2 and (1 + 0.5) / 2.
    fed = federate(points([-1.0, 1.0], [0.0, 2.0]))
    state = rounds(FedGEM(n_components=1), fed, 1)
    assert state.radii.flatten().tolist() == pytest.approx([0.5**0.5] * 2)
    assert state.centres.flatten().tolist() == pytest.approx([0.25, 0.75])


def test_the_next_round_begins_where_the_server_left_off(federate):
    # From 0.25 and 0.75 the steps go to 0 and 1 again: radii sqrt(1/2) / 4 do not reach each other.
    fed = federate(points([-1.0, 1.0], [0.0, 2.0]))
    state = rounds(FedGEM(n_components=1), fed, 2)
    assert state.radii.flatten().tolist() == pytest.approx([0.5**0.5 / 4] * 2)
    assert state.centres.flatten().tolist() == pytest.approx([0.0, 1.0])


def test_the_ball_is_the_largest_in_which_q_does_not_fall():
    # Q(mu) = -sum gamma ||x - mu||^2 / 2; at eta times the radius, 1 - eta^2 of EM's gain is left.
    rng = np.random.default_rng(0)
    x, gamma, old = rng.normal(size=(40, 3)), rng.uniform(size=40), rng.normal(size=3)
    mean = gamma @ x / gamma.sum()

    def q(mu):
        return -(gamma * ((x - mu) ** 2).sum(1)).sum() / 2

    radius = np.linalg.norm(mean - old)
    for way in rng.normal(size=(30, 3)):
        way = way / np.linalg.norm(way)
        assert q(mean + 0.999 * radius * way) > q(old) > q(mean + 1.001 * radius * way)
        kept = (q(mean + ETA * radius * way) - q(old)) / (q(mean) - q(old))
        assert kept == pytest.approx(0.5)


def test_the_dual_of_the_papers_problem_factors():
    # eps lam² + (A - B - n eps) lam + n (B - A) = (lam - n)(eps lam - n ||d0||²), B = A + n ||d0||²
    a, n, moved, eps, lam = uniform(seed_key(0), (5, 100), torch.float64) * 10
    b = a + n * moved
    left = eps * lam**2 + (a - b - n * eps) * lam + n * (b - a)
    assert torch.allclose(left, (lam - n) * (eps * lam - n * moved), atol=1e-9)


def test_nobodys_likelihood_falls_in_the_rounds():
    data = clouds(separation=3.0)
    method = FedGEM(n_components="facts", rounds=26)
    for seed in range(3):
        fed, last = Simulation(data, seed), -np.inf
        for state, info in play(method, fed):
            if info.get("stage") != "rounds":
                continue
            now = []
            for i, k in enumerate(data.client_facts["n_components"].tolist()):
                own = {"centres": state.centres[i, :k], "weights": torch.ones(k) / k}
                x = data.gather("train", torch.tensor([i])).x[0]
                now.append(-float(method.surprise(method.predict(own, x)).sum()))
            assert (np.array(now) >= last - 1e-8).all()
            last = np.array(now)


def test_rounds_stop_when_no_centre_moves(federate):
    # One client, one component: the first step reaches the mean, the second does not move; the
    # third exchange is the final aggregation.
    fed = federate(points([-1.0, 1.0]))
    seen = [info.get("stage") for _, info in play(FedGEM(n_components=1), fed)]
    assert seen == [None, "rounds", "rounds", "aggregation"]


# the server: common points and final balls


@pytest.mark.parametrize(
    ("radii", "point"),
    [((1.0, 2.5), (1.0, 0.0)), ((2.0, 2.0), (1.5, 0.0)), ((1.0, 2.0), (1.0, 0.0))],
)
def test_common_point_of_two_balls(radii, point):
    found = balls.common_point(np.array([0.0, 0.0]), np.array([3.0, 0.0]), *radii)
    assert found == pytest.approx(point, abs=1e-12)


def test_common_point_of_equal_centres_is_that_centre():
    centre = np.array([1.0, 2.0])
    assert balls.common_point(centre, centre.copy(), 0.0, 1.0).tolist() == [1.0, 2.0]


def test_balls_that_do_not_overlap_stay():
    centres = np.array([[0.0, 0.0], [3.0, 0.0]])
    assert (balls.move(centres, np.ones(2), np.arange(2)) == centres).all()


def test_no_centre_leaves_its_ball():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=20.0)
        radii = np.random.default_rng(seed).uniform(0, 8, len(n))
        moved = balls.move(centres, radii, clients)
        assert (np.linalg.norm(moved - centres, axis=1) <= radii + 1e-9).all()


def test_final_radii_have_the_uniform_weights_of_the_mixture():
    # Two components: pi = 1/2 whatever their counts. r^2 = c R / (pi sqrt(N)) = 4 / (0.5 * 10);
    # with sigma 2 and c 3 six times that.
    centres, clients, n = np.array([[0.0], [4.0]]), np.zeros(2, dtype=int), np.full(2, 100.0)
    assert balls.final_radii(centres, clients, n, 1.0, 1.0) ** 2 == pytest.approx([0.8, 0.8])
    assert balls.final_radii(centres, clients, n, 3.0, 2.0) ** 2 == pytest.approx([4.8, 4.8])


def test_a_client_with_one_component_gets_the_mean_distance_of_the_others():
    centres, clients = np.array([[0.0], [4.0], [0.1]]), np.array([0, 0, 1])
    radii = balls.final_radii(centres, clients, np.array([100.0, 100.0, 25.0]), 1.0, 1.0)
    assert radii**2 == pytest.approx([0.8, 0.8, 4 / 5])
    alone = balls.final_radii(centres[:2], np.arange(2), np.ones(2), 1.0, 1.0)
    assert alone.tolist() == [0.0, 0.0]


def test_the_centre_of_a_group_is_the_plain_mean_of_its_members():
    # Clients of 400 and 25 samples, both with components at 0 and 8 (the second at 1 and 9): r^2 =
    # c 8 2 / sqrt(N) = 0.8 c and 3.2 c. With c = 1 balls of 0.89 and 1.79 overlap; means 0.5, 8.5.
    centres, clients = np.array([[0.0], [8.0], [1.0], [9.0]]), np.array([0, 0, 1, 1])
    n = np.array([400.0, 400.0, 25.0, 25.0])
    labels, found = balls.final_groups(centres, clients, n, 1.0, 1.0)
    assert labels.tolist() == [0, 1, 0, 1]
    assert found.ravel().tolist() == pytest.approx([0.5, 8.5])


def test_aggregation_takes_the_centres_as_the_rounds_left_them():
    data = clouds()
    fed = Simulation(data, 0)
    states = [state for state, _ in play(FedGEM(n_components="facts", factor=1.0), fed)]
    assert torch.equal(states[-1].centres, states[-2].centres)
    real = states[-1].radii >= 0
    members, own = states[-1].members[real], states[-1].centres[real]
    for k, centre in enumerate(states[-1].groups):
        assert torch.allclose(own[members == k].mean(0), centre)


def test_a_small_group_is_not_dropped():
    # Groups of 3 samples each at two clients: three components in all.
    rng = np.random.default_rng(0)
    xs = [
        np.concatenate([rng.normal(size=(40, 2)) + 40 * i, 0.1 * rng.normal(size=(3, 2)) - 40])
        for i in (0, 1)
    ]
    data = federate(xs, [np.repeat([i, 2], [40, 3]) for i in (0, 1)], [2, 2], 3)
    state = played(FedGEM(n_components="facts", factor=1.0), Simulation(data, 0))
    assert len(state.groups) == 3


# choice of the factor


def test_silhouettes_by_hand():
    # Samples 0 and 4, centres 1 and 7: 1 - 1/7 and 1 - 3/3; the third row is padding. A single
    # centre has no silhouette.
    x, mask = torch.tensor([[0.0], [4.0], [9.0]]).double(), torch.tensor([True, True, False])
    banks = torch.tensor([[[1.0], [7.0]], [[1.0], [torch.inf]]]).double()
    assert balls.silhouettes(x, mask, banks).tolist() == pytest.approx([3 / 7, 0.0])


def test_every_factor_has_a_bank_from_the_other_folds():
    n, centres, _, clients, _ = copies(3)
    fold = clients % balls.FOLDS
    banks = balls.factor_banks(centres, clients, np.full(len(n), 100.0), fold, 1.0)
    assert banks.shape[:2] == (balls.FOLDS, len(balls.FACTORS))
    counts = np.isfinite(banks).all(3).sum(2)
    assert (np.diff(counts, axis=1) <= 0).all()  # larger balls, fewer groups
    assert (counts[:, 0] <= (fold[None] != np.arange(3)[:, None]).sum(1)).all()


# whole runs


@pytest.mark.parametrize("options", [{}, {"factor": 1.0}, {"sigma": 1.5}], ids=str)
def test_every_option_finds_clear_groups(options):
    data = clouds(1)
    method = FedGEM(n_components="facts", **options)
    fed = Simulation(data, 0)
    found, truth = components(method, fed, played(method, fed), data)
    # A bad initial centre is never mended, so less than everything is found.
    assert adjusted_rand_score(np.concatenate(truth), np.concatenate(found)) > 0.6


def test_only_what_is_listed_leaves_a_client():
    allowed = {
        "count": {"count", "features"},
        "seed": {"count", "size"},
        "update": {"centres", "radii"},
        "silhouette": {"score"},
        "note": set(),
    }
    fed = Watched(clouds(), "loop")
    played(FedGEM(n_components="facts"), fed)
    assert {seen.task for seen in fed.log} == set(allowed)
    for seen in fed.log:
        assert set(seen.sizes) <= allowed[seen.task]


def test_a_new_client_has_all_groups():
    data = mixture_tight(6, 4, 3, 80, 8.0, 2, 3, seed=3)
    method = FedGEM(n_components="facts", factor=1.0)
    fed = Simulation(data, 0, joins=[0] * 5 + [50])
    state = played(method, fed)
    fed.begin(50)
    state = grow(state, 6)
    given, two = method.deploy(state, fed.everyone()), torch.tensor([0, 5])
    with fed.aside():
        weights = fed.map(method.personalise, given, to=two)[1]["weights"]
    assert int((weights[0] > 0).sum()) == int(data.client_facts["n_components"][0])
    assert weights[1].tolist() == pytest.approx([1 / len(state.groups)] * len(state.groups))
    _, evidence = method.place(fed, state, torch.tensor([5]))
    nearest = torch.cdist(data.gather("train", torch.tensor([5])).x[0], state.groups).argmin(1)
    assert int(evidence.group[0]) == int(nearest.bincount().argmax())


def test_lost_replies_do_not_stop_it():
    data = mixture_tight(12, 4, 3, 80, 8.0, 2, 3, seed=3)
    method = FedGEM(n_components="facts", factor=1.0)
    fed = Simulation(data, 0, faults=Faults(drop=0.3))
    found, truth = components(method, fed, played(method, fed), data)
    assert adjusted_rand_score(np.concatenate(truth), np.concatenate(found)) > 0.6


def test_mistakes_name_the_client():
    with pytest.raises(TaskError, match=r"'client-1'.*between 1 and 2.*got 3"):
        played(FedGEM(n_components=3), Simulation(points([0.0, 1.0, 2.0], [0.0, 1.0]), 0))
    with pytest.raises(TaskError, match="must have a fact 'n_components'"):
        played(FedGEM(), Simulation(points([0.0, 1.0]), 0))
