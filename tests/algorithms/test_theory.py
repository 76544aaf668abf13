"""What the papers prove, as experiments small enough to be tests."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chi2, norm

from coterie import metrics, models
from coterie.algorithms import IFCA, CLoVE, clove, common
from coterie.clustering.labels import relabel
from coterie.core import LocalSGD, Model, task
from coterie.core.random import fold, normal, seed_key
from coterie.core.tree import take
from coterie.data import from_arrays, linear_groups
from coterie.engines import Simulation

STILL = LocalSGD(learning_rate=0.0)


def regressor(data):
    return Model(models.make("linear_regressor", data), "squared_error")


def ari(state, data):
    return metrics.adjusted_rand(state.assignment, data.truth)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def targets_apart(key, k, d, separation):
    """Unit vectors, all pairs at least so far apart; drawn until they are."""
    for draw in range(1000):
        targets = unit(normal(fold(key, draw), (k, d), torch.float64))
        if torch.pdist(targets).min() >= separation:
            return targets
    raise AssertionError("no such targets")


def orthonormal(key, d):
    """As many models as inputs, orthonormal: [d, d]."""
    return torch.linalg.qr(normal(fold(key, "orthonormal"), (d, d), torch.float64))[0]


def with_bank(state, bank):
    """A state of CLoVE with these models."""
    k, models = len(bank), {"weight": bank.float()}
    nothing = torch.full((k, k), torch.nan, dtype=torch.float64)
    return state._replace(models=models, saved={"shared": {}, "models": models}, centroids=nothing)


def exact(targets, clients_per_group, noise=0.0):
    """Clients whose mean losses are exactly |w - target|^2 + noise^2.

    Inputs sqrt(d) e_i, each with noise up and noise down: their second moment is the identity.
    """
    d = targets.shape[1]
    x = (math.sqrt(d) * torch.eye(d)).repeat(2, 1)
    sign = torch.cat([torch.ones(d), -torch.ones(d)])
    truth = torch.arange(len(targets)).repeat_interleave(clients_per_group)
    ys = [x @ targets[g].float() + noise * sign for g in truth]
    return from_arrays([x] * len(truth), ys, test_fraction=0.0, truth=truth)


# one round on exact losses


@pytest.mark.parametrize("seeds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_one_round_of_clove_recovers_the_groups_from_exact_losses(first, play, seeds):
    for seed in range(seeds):
        targets = targets_apart(seed_key(seed), 4, 6, 0.5)
        data = exact(targets, clients_per_group=3, noise=0.1)
        algorithm = CLoVE(regressor(data), STILL, n_groups=4)
        fed = Simulation(data, seed=seed)
        assert ari(play(algorithm, fed, first(algorithm, fed), 1)[0].state, data) == 1.0


@pytest.mark.parametrize("seeds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_ifca_recovers_from_within_half_the_separation(first, play, seeds):
    # Sufficient, not necessary: other starts may recover too.
    for seed in range(seeds):
        key = seed_key(seed)
        targets = targets_apart(key, 4, 6, 0.5)
        away = unit(normal(fold(key, "away"), (4, 6), torch.float64))
        separation = float(torch.pdist(targets).min())
        data = exact(targets, clients_per_group=3, noise=0.1)
        algorithm = IFCA(regressor(data), LocalSGD(learning_rate=0.25), n_groups=4)
        fed = Simulation(data, seed=seed)
        start = (targets + 0.499 * separation * away).float()
        rounds = play(algorithm, fed, first(algorithm, fed, models={"weight": start}), 12)
        assert all(torch.equal(r.state.assignment, data.truth) for r in rounds)
        end = rounds[-1].state.models["weight"]
        # Half the way to the target each round.
        assert metrics.parameter_distance(end, targets) < separation * 0.5**12


# 21


@settings(max_examples=200)
@given(st.data())
def test_rows_that_prefer_different_models_lie_apart(data):
    k = data.draw(st.integers(2, 6))
    number = st.floats(0, 10, allow_nan=False)
    rows = torch.tensor(
        data.draw(st.lists(st.lists(number, min_size=k, max_size=k), min_size=2, max_size=2)),
        dtype=torch.float64,
    )
    a, b = data.draw(st.permutations(range(k)))[:2]
    gap = data.draw(st.floats(0.01, 5))
    # Row 0 prefers a to anything else by the gap, row 1 prefers b.
    rows[0, a] = rows[0].min() - gap
    rows[1, b] = rows[1].min() - gap
    assert (rows[0] - rows[1]).norm() >= math.sqrt(2) * gap - 1e-9


# 22


def root_losses(bank, targets, noise):
    """Exact square roots of losses: targets in rows, models in columns."""
    return (torch.cdist(targets, bank).square() + noise**2).sqrt()


@pytest.mark.parametrize("trials", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_an_orthonormal_bank_keeps_groups_apart(trials):
    d, k, noise = 20, 5, 0.1
    for trial in range(trials):
        key = seed_key(trial)
        bank = orthonormal(key, d)
        targets = unit(normal(fold(key, "targets"), (k, d), torch.float64))
        separation = torch.pdist(targets).min()
        apart = torch.pdist(root_losses(bank, targets, noise)).min()
        assert apart >= separation / math.sqrt(4 + noise**2) - 1e-12


@pytest.mark.parametrize("trials", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_models_near_their_targets_keep_groups_apart(trials):
    d, k = 20, 5
    for trial in range(trials):
        key = seed_key(trial)
        targets = unit(normal(fold(key, "targets"), (k, d), torch.float64))
        separation = torch.pdist(targets).min()
        away = unit(normal(fold(key, "away"), (k, d), torch.float64))
        vectors = root_losses(targets + separation / 4 * away, targets, float(separation) / 4)
        assert torch.pdist(vectors).min() > separation / 2


# 23


@pytest.mark.parametrize("seed", range(3))
def test_one_round_recovers_five_groups_from_samples(first, play, seed):
    data = linear_groups(n=1000, test=0, noise=0.01, seed=seed)  # 5 x 5 clients, d = 20
    algorithm = CLoVE(regressor(data), STILL, n_groups=5, embedding="sqrt")
    fed = Simulation(data, seed=seed)
    start = with_bank(first(algorithm, fed), orthonormal(seed_key(seed), 20))
    assert ari(play(algorithm, fed, start, 1)[0].state, data) == 1.0


# 24


def part(data, n, number):
    """The same clients with the samples of one round only."""
    rows = data.rows["train"]
    return replace(data, rows={"train": rows.where(rows.position // n == number)})


@pytest.mark.parametrize("seed", range(3))
def test_clove_converges_exponentially(play, first, seed):
    n, members, d, noise, rounds = 1000, 5, 20, 0.01, 5
    data = linear_groups(
        n_groups=5,
        clients_per_group=members,
        n=n * rounds,
        test=0,
        d=d,
        noise=noise,
        targets="orthonormal",
        seed=seed,
    )
    separation = math.sqrt(2)
    step = 0.5 * (1 - separation / 12)
    floor = 2 * step * noise * math.sqrt(d / (n * members))
    algorithm = CLoVE(
        regressor(data),
        LocalSGD(learning_rate=step),
        n_groups=5,
        averaging="gradient",
        embedding="sqrt",
        stable_after=0,
    )
    state, distances = first(algorithm, Simulation(data, seed=seed)), []
    state = with_bank(state, orthonormal(seed_key(seed), d))
    for number in range(rounds):
        fed = Simulation(part(data, n, number), seed=seed)  # fresh samples
        state = play(algorithm, fed, state, 1, start=number)[0].state
        assert ari(state, data) == 1.0
        own = state.models["weight"][state.assignment]
        distances.append(float((own - data.extra["targets"][data.truth]).norm(dim=1).max()))
    assert distances[0] <= separation / 4
    for before, after in pairwise(distances):
        assert after <= max(0.3 * before, 2 * floor), distances


# 25


class Resampled(IFCA):
    """Every round has fresh samples to choose by and fresh samples to train with (section 5)."""

    parts = 12  # two for each of six rounds

    @task
    def choose(self, client, shared, models):
        part = torch.arange(len(client.train.mask)) * self.parts // client.train.size
        now = 2 * client.round
        chooses, trains = (client.train.where(part == p) for p in (now, now + 1))
        nearest = self.model.probe(common.whole_models(shared, models), chooses).argmin()
        own = take(models, nearest)
        return {**self.train(client._replace(train=trains), shared, own), "group": nearest}


def test_fresh_samples_choose_and_others_train(federate, points, scalar, half, bank, first, play):
    # Six rounds, twelve parts of one sample: 0 chooses model 0 and 8 trains it to 4; then 9
    # chooses model 1 at 10 and 20 trains it to 15.
    algorithm, fed = Resampled(scalar, half, n_groups=2), federate(points([0.0, 8, 9, 20] * 3))
    one, two = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 2)
    assert one.state.models["weight"].flatten().tolist() == [4.0, 10.0]
    assert two.state.models["weight"].flatten().tolist() == [4.0, 15.0]


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4])
def test_ifca_halves_the_distance_every_round(play, first, alpha):
    m, n, d, noise, rounds = 40, 200, 20, 0.1, 6
    data = linear_groups(
        n_groups=2, clients_per_group=m // 2, n=n * 2 * rounds, test=0, d=d, noise=noise, seed=1
    )
    targets = data.extra["targets"].double()
    separation = float((targets[0] - targets[1]).norm())
    local = LocalSGD(learning_rate=1 / (4 * 0.5))  # a group has half of the clients
    algorithm = Resampled(regressor(data), local, n_groups=2, averaging="gradient")
    away = unit(normal(fold(seed_key(7), "away"), (2, d), torch.float64))
    start = targets + (0.5 - alpha) * separation * away
    fed = Simulation(data)
    last, ratios = (0.5 - alpha) * separation, []
    floor = noise * math.sqrt(d / (n * m / 2))
    for after in play(
        algorithm, fed, first(algorithm, fed, models={"weight": start.float()}), rounds
    ):
        assert torch.equal(after.state.assignment, data.truth)  # nobody is misled
        own = (after.state.models["weight"].double() - targets).norm(dim=1).max()
        if last > 5 * floor:
            ratios.append(float(own) / last)
        last = float(own)
    assert len(ratios) >= 2
    assert all(0.4 <= ratio <= 0.6 for ratio in ratios), ratios


# 26


def wrong_choice(n):
    """Probability of the wrong choice between exact models, separation and noise both 1.

    The difference of the sums of losses is sum z^2 + 2 e z with z, e standard normal: given
    S = sum z^2 it is normal with mean S and variance 4 S, so wrong with probability
    Phi(-sqrt(S) / 2), S being chi-squared with n degrees of freedom.
    """
    return quad(lambda s: norm.cdf(-math.sqrt(s) / 2) * chi2.pdf(s, n), 0, math.inf)[0]


def share_wrong(n, clients, first, play):
    data = linear_groups(
        n_groups=2, clients_per_group=clients // 2, n=n, test=0, d=20, noise=1.0, targets="chain"
    )
    targets = data.extra["targets"].double()
    # Exactly one apart: the second is moved along the line through both.
    line = unit(targets[1] - targets[0])
    moved = targets.clone()
    moved[1] = targets[0] + line
    shift = (moved - targets)[data.truth].repeat_interleave(n, 0)  # [rows, d]
    y = data.y + (data.x.double() * shift).sum(1).to(data.y.dtype)
    data = replace(data, y=y)
    algorithm = IFCA(regressor(data), STILL, n_groups=2, averaging="gradient")
    fed = Simulation(data)
    state = first(algorithm, fed, models={"weight": moved.float()})
    found = play(algorithm, fed, state, 1)[0].state.assignment
    return float((found != data.truth).double().mean())


@pytest.mark.parametrize("clients", [600, pytest.param(6000, marks=pytest.mark.slow)])
def test_wrong_choices_fall_exponentially_with_the_samples(first, play, clients):
    for n in (10, 20, 40, 80):
        share, expected = share_wrong(n, clients, first, play), wrong_choice(n)
        # Phi(-x) <= exp(-x^2 / 2) / 2 and E exp(-S / 8) = 1.25^(-n / 2): straight in a log plot.
        assert expected <= 0.5 * 1.25 ** (-n / 2)
        deviation = math.sqrt(expected / clients)
        assert abs(share - expected) <= 4 * deviation + 1 / clients


# 27


def mixed_up(data, order):
    """The same clients under other numbers."""
    rows = data.rows["train"].of_clients(order)
    return replace(data, rows={"train": rows}, truth=data.truth[order])


@pytest.mark.parametrize(("matching", "low", "high"), [("mincost", 0, 0), ("none", 0.35, 0.65)])
def test_matching_keeps_identities_when_half_of_the_clients_are_away(
    first, play, monkeypatch, matching, low, high
):
    data = linear_groups(n_groups=2, clients_per_group=10, n=60, test=0, d=5, noise=0.01)
    # Without matching the group of the smallest participating number gets model 0. Numbers go to
    # groups 0 1 1 0, 0 1 1 0, ...: group 0 has the smallest with probability 0.59, and a client
    # changes between two of its rounds with probability 2 * 0.59 * 0.41 = 0.48.
    order = (torch.arange(20).reshape(2, 10).T.reshape(-1, 4)[:, [0, 1, 3, 2]]).flatten()
    data = mixed_up(data, order)
    local = LocalSGD(learning_rate=0.05, steps=3)
    algorithm = CLoVE(regressor(data), local, n_groups=2, matching=matching, stable_after=0)
    changes = seen = 0
    for seed in range(6):
        fed = Simulation(data, seed=seed, participation=0.5)
        monkeypatch.setattr(  # the labels are given; only the matching is at stake
            clove, "kmeans", lambda *_, fed=fed: (relabel(data.truth[fed.cohort()]), None)
        )
        last = torch.full((20,), -1)
        for number, after in enumerate(play(algorithm, fed, first(algorithm, fed), 23)):
            now = after.state.assignment
            if number >= 3:
                old = after.info["participants"]
                old = old[last[old] >= 0]
                changes += int((now[old] != last[old]).sum())
                seen += len(old)
            last = now
    assert low <= changes / seen <= high, (changes, seen)
