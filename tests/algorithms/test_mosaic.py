"""Mosaic: a round by hand, what the balls promise, every option, and what leaves a client."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from coterie.algorithms.mosaic import (
    FEEDBACK,
    MERGE,
    REFINEMENT,
    ROUNDS,
    Mosaic,
)
from coterie.algorithms.mosaic import client as local
from coterie.algorithms.mosaic import mixture as mixtures
from coterie.algorithms.mosaic.mixture import Mixture
from coterie.algorithms.mosaic.privacy import noise_for
from coterie.checks.trial import Watched
from coterie.core.algorithm import play
from coterie.core.errors import ConfigError, TaskError
from coterie.core.tree import row
from coterie.data.mixture import federate, mixture_sensitivity, mixture_tight
from coterie.engines import Simulation
from coterie.engines.faults import Faults
from coterie.running.features import with_features
from tiny import points, rounds


def played(algorithm, fed):
    """The state when it is done."""
    return list(play(algorithm, fed))[-1][0]


def labels(algorithm, fed, state, data):
    """Component of every sample and its true group."""
    given, found, truth = algorithm.deploy(state, fed.everyone()), [], []
    for i in range(len(data)):
        own = client(fed, data, i)
        found.append(algorithm.predict(algorithm.personalise(own, given), own.train.x).argmax(1))
        truth.append(own.train.y)
    return torch.cat(found), torch.cat(truth)


def client(fed, data, i):
    from coterie.core.client import Client

    train = row(data.gather("train", torch.tensor([i])), 0)
    key = torch.tensor(0)
    return Client(train, train, {}, fed.memory.get(i), key, key, key, key)


def log_likelihoods(fed, data, state):
    """Of every client's own mixture, with the centres the server returned."""
    values = []
    for i in range(len(data)):
        memory = fed.memory.get(i)
        mixture = Mixture(*(memory[name] for name in Mixture._fields))
        use = (state.radii[i] >= 0)[:, None]
        mixture = mixture._replace(centres=torch.where(use, state.centres[i], mixture.centres))
        batch = row(data.gather("train", torch.tensor([i])), 0)
        x = batch.x.double() @ state.units if state.units.numel() else batch.x.double()
        values.append(float(mixtures.log_likelihood(x, batch.mask, mixture)))
    return np.array(values)


def clouds(seed=0, separation=8.0, **options):
    return mixture_tight(4, 4, 3, 60, separation, 2, 3, seed=seed, **options)


def fit_locally(method, fed):
    """The first state, with clients that begin from their own best fit."""
    state = method.init(fed)._replace(counts=fed.per_client(-1), stage=torch.tensor(MERGE))
    return method.admit(fed, state, fed.everyone())._replace(stage=torch.tensor(ROUNDS))


def test_a_round_by_hand(federate):
    # Two clients with one component each: data -1, 1 and 0, 2. From any seed the step goes to the
    # means 0 and 1, |seed - mean| = 1. Variances: mean squared distance to the seed 2, around the
    # mean 1; so the squared radius is (1 / 2) (1 / 2) 1 = 1/4, and balls of 1/2 touch. The mean of
    # both centres is 0.5, which lies in both balls.
    fed = federate(points([-1.0, 1.0], [0.0, 2.0]))
    method = Mosaic(n_components=1, covariance="tied", min_count=1.0)
    state = rounds(method, fed, 1)
    assert state.radii.flatten().tolist() == pytest.approx([0.5, 0.5])
    assert state.centres.flatten().tolist() == pytest.approx([0.5, 0.5])


def test_one_client_refines_to_its_own_em(federate):
    data = clouds().subset(torch.tensor([0]))
    fed = federate(data)
    state = played(Mosaic(n_components="facts", covariance="tied", refine=40), fed)
    k = int(data.client_facts["n_components"][0])
    assert len(state.groups.n) == k
    x = data.gather("train", torch.tensor([0])).x[0]
    mask = torch.ones(len(x), dtype=torch.bool)
    start = Mixture(state.groups.centres, state.groups.n / len(x), state.groups.variance)
    again, _ = mixtures.em(x, start, "tied", mixtures.variance_floor(x, mask))
    assert torch.allclose(again.centres, state.groups.centres, atol=1e-4)


def test_identical_clients_have_as_many_groups_as_one():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(40, 2)) + 12 * i for i in range(3)])
    y = np.repeat(np.arange(3), 40)
    data = federate([x] * 5, [y] * 5, [3] * 5, 3)
    state = played(Mosaic(n_components="facts"), Simulation(data, 0))
    assert len(state.groups.n) == 3
    assert (state.members.sort(1).values == torch.arange(3)).all()


def test_disjoint_clients_have_as_many_groups_as_all_together():
    rng = np.random.default_rng(0)
    xs = [
        np.concatenate([rng.normal(size=(40, 2)) + 15 * (2 * i + j) for j in (0, 1)])
        for i in range(4)
    ]
    data = federate(xs, [np.repeat([2 * i, 2 * i + 1], 40) for i in range(4)], [2] * 4, 8)
    state = played(Mosaic(n_components="facts"), Simulation(data, 0))
    assert len(state.groups.n) == 8


@pytest.mark.parametrize("covariance", ["tied", "spherical"])
def test_nobodys_likelihood_falls_in_the_rounds(covariance):
    data = clouds(separation=3.0)
    method = Mosaic(n_components="facts", covariance=covariance, rounds=26, min_count=0.0)
    for seed in range(3):
        fed = Simulation(data, seed)
        fed.begin(-1)
        state, last = method.init(fed), None
        fed.commit()
        for number in range(25):
            fed.begin(number)
            state, _ = method.step(fed, state)
            fed.commit()
            if int(state.stage) != ROUNDS:
                break
            now = log_likelihoods(fed, data, state)
            assert last is None or (now >= last - 1e-8).all()
            last = now


def test_pulling_does_not_move_fixed_points():
    # From local fits, 60 rounds with the server end where 60 steps of local EM do.
    data = mixture_tight(6, 5, 5, 100, 5.0, 2, 4, seed=1)
    method = Mosaic(n_components="facts", covariance="tied", min_count=0.0)
    fed = Simulation(data, 0)
    fed.begin(-1)
    state = fit_locally(method, fed)
    starts = [client(fed, data, i) for i in range(6)]
    for _ in range(60):
        state, _ = method.pull(fed, state, fed.everyone())
    for i, own in enumerate(starts):
        k = int(own.state["count"])
        mixture = Mixture(*(own.state[name][:k] for name in Mixture._fields))
        floor = mixtures.variance_floor(own.train.x, own.train.mask)
        alone, _ = mixtures.em(own.train.x, mixture, "tied", floor, steps=60, tolerance=0.0)
        assert (alone.centres - state.centres[i][:k]).abs().max() < 1e-5


def test_rounds_converge_linearly_where_groups_are_apart():
    data = mixture_tight(8, 5, 4, 200, 8.0, 2, 4, seed=3)
    method = Mosaic(n_components="facts", rounds=60, min_count=0.0)
    fed = Simulation(data, 0)
    fed.begin(-1)
    state, path = fit_locally(method, fed), []
    for number in range(12):
        fed.begin(number)
        state, _ = method.step(fed, state)
        fed.commit()
        path.append(state.centres)
        if int(state.stage) != ROUNDS:
            break
    gaps = [float((centres - path[-1]).norm()) for centres in path[:-1]]
    gaps = [gap for gap in gaps if gap > 1e-9]
    assert all(b < 0.6 * a for a, b in itertools.pairwise(gaps))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounds": 0},
        {"criterion": "bic"},
        {"n_clusters": 4},
        {"n_components": "auto"},
        {"n_components": "bic"},
        {"covariance": "tied"},
        {"covariance": "spherical"},
        {"covariance": "diagonal"},
        {"covariance": "full"},
        {"feedback": 0, "refine": 0},
        {"exclusivity": 0.0},
        {"exclusivity": 1.0},
        {"noise": 1.0, "clip": 30.0},
    ],
    ids=str,
)
def test_every_option_finds_clear_groups(options):
    data = clouds(1)
    method = Mosaic(**{"n_components": "facts", **options})
    fed = Simulation(data, 0)
    state = played(method, fed)
    found, truth = labels(method, fed, state, data)
    assert adjusted_rand_score(truth, found) > 0.95
    assert len(state.groups.n) == 4


def test_stretched_groups_are_found_in_units_in_which_they_are_round():
    # Four clouds eight deviations apart, then one direction is stretched twenty times.
    turn = torch.linalg.qr(torch.arange(9.0).double().reshape(3, 3).cos())[0]
    stretch = turn @ torch.diag(torch.tensor([1.0, 1.0, 20.0]).double()) @ turn.T
    data = with_features(clouds(2), lambda x: x.double() @ stretch)
    scores = {}
    for covariance in ("tied", "tied_full"):
        method = Mosaic(n_components="facts", covariance=covariance)
        fed = Simulation(data, 0)
        state = played(method, fed)
        found, truth = labels(method, fed, state, data)
        scores[covariance] = adjusted_rand_score(truth, found)
    assert len(state.groups.n) == 4
    assert scores["tied"] < 0.9 < 0.99 < scores["tied_full"]
    # Stretched 20 times, covariances have eigenvalues 400 times apart; local fits cut the long
    # groups, so that one pass does not make them round, but at least ten times rounder.
    x = data.x @ state.units
    within = torch.cov(torch.cat([x[data.y == k] - x[data.y == k].mean(0) for k in range(4)]).T)
    spread = torch.linalg.eigvalsh(within)
    assert spread[-1] / spread[0] < 40


def units(data, n_components="facts"):
    """Units in which everybody's components are round."""
    fed = Simulation(data, 0)
    fed.begin(-1)
    return Mosaic(n_components=n_components, covariance="tied_full").init(fed).units


def test_white_components_are_round():
    data = mixture_tight(5, 3, 2, 200, 15.0, 2, 3, seed=3)
    turn = torch.tensor([[1.0, 1.0], [0.0, 2.0]]).double()
    skewed = with_features(data, lambda x: x @ turn)
    back = torch.linalg.inv(units(skewed))
    assert (back.T @ back).numpy() == pytest.approx((turn.T @ turn).numpy(), rel=0.15)
    for k in range(3):
        own = (skewed.x @ units(skewed))[skewed.y == k]
        assert torch.cov(own.T).numpy() == pytest.approx(np.eye(2), abs=0.3)


def test_white_units_do_not_depend_on_the_units_before():
    data = mixture_tight(4, 3, 3, 60, 6.0, 2, 3, seed=4)
    ours = data.x @ units(data, "auto")
    theirs = 100 * data.x @ units(with_features(data, lambda x: 100 * x), "auto")
    # Units shift the likelihood, and EM stops by its relative change.
    assert ours.numpy() == pytest.approx(theirs.numpy(), abs=0.05)


def test_constant_features_keep_their_units():
    data = with_features(mixture_tight(3, 2, 2, 20, 6.0, 2, 2), torch.ones_like)
    assert torch.equal(units(data, 1), torch.eye(2).double())


def test_refinement_never_lowers_the_pooled_likelihood():
    data = clouds(2, separation=3.0)
    method = Mosaic(n_components="facts", rounds=3, refine=8, criterion="bic")
    fed = Simulation(data, 0)
    fed.begin(-1)
    state, values, number = method.init(fed), [], 0
    while not method.done(state):
        fed.begin(number)
        state, _ = method.step(fed, state)
        fed.commit()
        number += 1
        if int(state.stage) == REFINEMENT and int(state.turn) > 0:
            given = method.deploy(state, fed.everyone())
            total = 0.0
            for i in range(len(data)):
                own = client(fed, data, i)
                output = method.predict(method.personalise(own, given), own.train.x)
                total -= float(method.surprise(output).sum())
            values.append(total)
    assert len(values) == 8
    assert all(b >= a - 1e-8 for a, b in itertools.pairwise(values))


def test_feedback_costs_a_client_at_most_its_price():
    data = clouds(4, separation=3.0)
    method = Mosaic(n_components="facts", rounds=3, feedback=2)
    fed = Simulation(data, 0)
    fed.begin(-1)
    state, number = method.init(fed), 0
    price = (3 + 1) / 2 * np.log(60)
    while int(state.stage) != REFINEMENT:
        before = log_likelihoods(fed, data, state._replace(radii=state.radii * 0 - 1))
        stage = int(state.stage)
        fed.begin(number)
        state, _ = method.step(fed, state)
        fed.commit()
        number += 1
        after = log_likelihoods(fed, data, state._replace(radii=state.radii * 0 - 1))
        if stage == FEEDBACK:
            assert (after >= before - price - 1e-8).all()


def test_feedback_shows_a_client_more_groups_than_it_counted():
    # It has three components for four heaps on a square; others know all four, and a fifth.
    heaps = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0], [40.0, 0.0]]).double()
    rng = np.random.default_rng(0)
    x = heaps[:4].numpy().repeat(40, axis=0) + rng.normal(size=(160, 2))
    data = federate([x], [np.repeat(np.arange(4), 40)], [3], 4)
    middle = torch.stack([heaps[0], heaps[1], (heaps[2] + heaps[3]) / 2])
    own = Mixture(middle, torch.full((3,), 1 / 3).double(), torch.full((3,), 8.0).double())
    fed = Simulation(data, 0)
    fed.memory.keep(0, local.remember(own, 6))
    fed.memory.commit()
    told, none = (heaps, torch.ones(5).double()), torch.zeros(0, 0).double()
    more = local.take_feedback(client(fed, data, 0), none, *told, "tied", counted=True)
    assert torch.cdist(more.centres, heaps[:4]).min(0).values.max() < 0.5
    assert len(more.centres) == 4
    known = local.take_feedback(client(fed, data, 0), none, *told, "tied", counted=False)
    assert len(known.centres) == 3


def test_clients_that_know_their_number_keep_it():
    data = clouds(2)
    fed = Simulation(data, 0)
    state = played(Mosaic(n_components="facts"), fed)
    assert torch.equal((state.members >= 0).sum(1), data.client_facts["n_components"])


def test_clients_tell_the_variance_of_their_model():
    data = clouds(1)
    for covariance, shared in (("tied", True), ("spherical", False)):
        fed = Simulation(data, 0)
        state = played(Mosaic(n_components="facts", covariance=covariance), fed)
        for told, n in zip(state.variances, state.sizes, strict=True):
            assert (len(told[n > 0].unique()) == 1) is shared


def test_only_what_is_listed_leaves_a_client():
    allowed = {
        "count": {"count", "features"},
        "scatter": {"within", "n"},
        "seed": {"count"},
        "update": {"centres", "radii", "n", "still"},
        "summarise": {"n", "centres", "variance"},
        "adopt": {"n", "centres", "variance"},
        "note": set(),
        "sums": {"sums"},
    }
    fed = Watched(clouds(), "loop")
    played(Mosaic(n_components="facts"), fed)
    assert {seen.task for seen in fed.log} == set(allowed)
    for seen in fed.log:
        assert set(seen.sizes) <= allowed[seen.task]


def test_small_components_never_leave_a_client():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(40, 2)), rng.normal(size=(3, 2)) + 30])
    data = federate([x, x[:40]], [np.repeat([0, 1], [40, 3]), np.zeros(40, dtype=int)], [2, 1], 2)
    for minimum, sent in ((5.0, 2), (1.0, 3)):
        fed = Simulation(data, 0)
        state = played(Mosaic(n_components="facts", min_count=minimum), fed)
        sizes = state.sizes[state.sizes > 0]
        assert len(sizes) == sent
        assert bool((sizes >= minimum).all())
    # Seeds are samples; they stay at home, too.
    fed = Simulation(data, 0)
    fed.begin(-1)
    assert bool((Mosaic(n_components="facts").init(fed).centres == 0).all())


def test_noise_on_refinement_is_accounted_for():
    data = mixture_tight(30, 10, 10, 200, 4.0, seed=12)
    clip = float(data.x.norm(dim=1).max())
    method = Mosaic(n_components="facts", refine=5, noise=noise_for(2.0, 5), clip=clip)
    fed = Simulation(data, 0)
    fed.begin(-1)
    state, number, spent = method.init(fed), 0, 0.0
    while not method.done(state):
        fed.begin(number)
        state, info = method.step(fed, state)
        fed.commit()
        number, spent = number + 1, info.get("epsilon", 0.0)
    assert spent == pytest.approx(2.0)
    found, truth = labels(method, fed, state, data)
    assert adjusted_rand_score(truth, found) > 0.94


def test_newcomers_get_the_groups_they_hold():
    data = mixture_tight(31, 10, 10, 200, 5.0, seed=21)
    method = Mosaic(n_components="facts")
    fed = Simulation(data.subset(torch.arange(30)), 0)
    state = played(method, fed)
    last = Simulation(data, 0)
    last.memory = fed.memory
    last.begin(99)
    from coterie.core.algorithm import grow

    state = grow(state, 31)
    placed, evidence = method.place(last, state, torch.tensor([30]))
    assert int((placed.members[30] >= 0).sum()) == int(data.client_facts["n_components"][30])
    assert bool(evidence.fits[0])
    assert float(evidence.score[0]) * 0.05 < 0.02


def test_an_unseen_group_is_noticed():
    data = mixture_tight(11, 5, 5, 200, 5.0, 2, 4, seed=21)
    xs = [row(data.gather("train", torch.tensor([i])), 0) for i in range(11)]
    far = np.random.default_rng(0).normal(size=(60, 5)) + 40
    x = [batch.x.numpy() for batch in xs[:10]] + [np.concatenate([xs[10].x.numpy(), far])]
    y = [batch.y.numpy() for batch in xs[:10]] + [
        np.concatenate([xs[10].y.numpy(), np.full(60, 5)])
    ]
    counts = [*data.client_facts["n_components"].tolist()[:10], 5]
    data = federate(x, y, counts, 6)
    method = Mosaic(n_components="facts", max_components=6)
    fed = Simulation(data, 0, joins=[0] * 10 + [50])
    state = played(method, fed)
    assert len(state.groups.n) == 5
    fed.begin(50)
    from coterie.core.algorithm import grow

    state = grow(state, 11)
    _, evidence = method.place(fed, state, torch.tensor([10]))
    assert not bool(evidence.fits[0])
    assert float(evidence.score[0]) * 0.05 == pytest.approx(60 / 260, abs=0.01)


def test_lost_replies_do_not_stop_it():
    data = mixture_tight(12, 4, 3, 80, 8.0, 2, 3, seed=3)
    method = Mosaic(n_components="facts")
    fed = Simulation(data, 0, faults=Faults(drop=0.3))
    state = played(method, fed)
    found, truth = labels(method, fed, state, data)
    assert adjusted_rand_score(truth, found) > 0.9


def test_stages_follow_one_another():
    method = Mosaic(n_components="facts", rounds=2, feedback=1, refine=1)
    fed = Simulation(clouds(), 0)
    fed.begin(-1)
    state, seen = method.init(fed), []
    while not method.done(state):
        seen.append(int(state.stage))
        fed.begin(len(seen))
        state, info = method.step(fed, state)
        fed.commit()
    assert seen == [ROUNDS, ROUNDS, MERGE, FEEDBACK, REFINEMENT]
    assert info == {"stage": "refinement", "components": 4}


def test_too_few_samples_name_the_client():
    with pytest.raises(TaskError, match=r"'client-1'.*between 1 and its 2 samples"):
        played(Mosaic(n_components=3), Simulation(points([0.0, 1.0, 2.0], [0.0, 1.0]), 0))


def test_facts_must_be_there():
    with pytest.raises(TaskError, match="must have a fact 'n_components'"):
        played(Mosaic(n_components="facts"), Simulation(points([0.0, 1.0]), 0))


def test_options_that_need_each_other():
    with pytest.raises(ConfigError, match="noise and clip must be given together"):
        Mosaic(noise=1.0)


def test_constant_data_are_one_group():
    data = points([1.0] * 20, [1.0] * 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = played(Mosaic(), Simulation(data, 0))
    assert len(state.groups.n) == 1
    assert state.groups.centres.item() == pytest.approx(1.0)


def test_sensitivity_problem_has_its_separation():
    data = mixture_sensitivity(3.0, n=2000, seed=5)
    means = torch.stack([data.x[data.y == k].mean(0) for k in range(10)])
    gaps = torch.cdist(means, means) + 1e9 * torch.eye(10)
    assert float(gaps.min()) == pytest.approx(3.0, abs=0.3)
    assert gaps.argmin().item() in (1, 10)
