"""Balls and merges of components: by hand, invariances, and both routes to the same answer."""

import numpy as np
import pytest

from coterie.clustering import merging
from coterie.clustering.privacy import epsilon, noise_for


def copies(seed, n_clients=12, held=4, n_clusters=8, d=4, spread=6.0, noise=1.0):
    """Components of many clients around common centres: n, centres, variance, clients, truth."""
    rng = np.random.default_rng(seed)
    mu = spread * rng.normal(size=(n_clusters, d))
    truth = np.concatenate([rng.permutation(n_clusters)[:held] for _ in range(n_clients)])
    clients = np.repeat(np.arange(n_clients), held)
    n = rng.integers(20, 80, len(truth)).astype(float)
    centres = mu[truth] + noise * rng.normal(size=(len(truth), d)) / np.sqrt(n)[:, None]
    return n, centres, np.ones(len(truth)), clients, truth


def same_partition(a, b):
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


@pytest.mark.parametrize(
    ("radii", "point"),
    [
        ((1.0, 2.5), (1.0, 0.0)),
        ((2.0, 2.0), (1.5, 0.0)),
        ((1.0, 2.0), (1.0, 0.0)),
        ((1.0, 1.0), None),
    ],
)
def test_common_point_of_two_balls(radii, point):
    found = merging.common_point(np.array([0.0, 0.0]), np.array([3.0, 0.0]), *radii)
    assert (found is None) if point is None else found == pytest.approx(point, abs=1e-12)


def test_common_point_of_equal_centres_is_that_centre():
    centre = np.array([1.0, 2.0])
    assert merging.common_point(centre, centre.copy(), 0.0, 1.0).tolist() == [1.0, 2.0]


def test_consensus_stays_in_the_balls():
    # z = (0 * 1 + 1 * 3) / 4 = 0.75; the first may only go 0.5.
    centres, radii, n = np.array([[0.0], [1.0]]), np.array([0.5, 10.0]), np.array([1.0, 3.0])
    moved = merging.consensus(centres, radii, n, np.array([0, 0]))
    assert moved.ravel() == pytest.approx([0.5, 0.75], abs=1e-12)


def test_a_component_alone_does_not_move():
    centres = np.array([[0.1, 0.7], [3.3, 1.1]])
    moved = merging.consensus(centres, np.ones(2), np.array([3.0, 7.0]), np.array([0, 1]))
    assert (moved == centres).all()


@pytest.mark.parametrize("rule", ["mean", "pairwise"])
def test_nobody_is_pulled_out_of_its_ball(rule):
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=20.0)
        radii = np.random.default_rng(seed).uniform(0, 8, len(n))
        pairs, _ = merging.overlaps(centres, radii, clients)
        labels = merging.connect(pairs, clients)
        if rule == "mean":
            moved = merging.consensus(centres, radii, n, labels)
        else:
            moved = merging.pairwise_means(centres, radii, pairs, labels)
        assert (np.linalg.norm(moved - centres, axis=1) <= radii + 1e-9).all()


@pytest.mark.parametrize(("criterion", "at", "not_at"), [("icl", 3.58, 3.60), ("bic", 0.46, 0.47)])
def test_two_components_merge_up_to_a_distance(criterion, at, not_at):
    n, variance, clients = np.full(2, 100.0), np.ones(2), np.array([0, 1])
    near = merging.merge(n, np.array([[0.0], [at]]), variance, clients, criterion)
    far = merging.merge(n, np.array([[0.0], [not_at]]), variance, clients, criterion)
    assert near.labels.tolist() == [0, 0]
    assert far.labels.tolist() == [0, 1]


def test_components_of_one_client_stay_apart():
    n, variance, one = np.full(2, 100.0), np.ones(2), np.array([0, 0])
    centres = np.array([[0.0], [0.1]])
    assert merging.merge(n, centres, variance, one, tolerance=0.1).labels.tolist() == [0, 1]
    assert merging.merge(n, centres, variance, one, tolerance=1.0).labels.tolist() == [0, 0]


def test_the_effective_radius_is_where_equal_components_merge():
    # d = 1, n = 100 each, one variance: 2 sqrt((2 log 200 + 400 log 2) / 200) = 2.3994. (The
    # criterion re-estimates the variance of what it merges, and so goes on to 3.58.)
    radii = merging.effective_radii(np.full(2, 100.0), 1.0, 1)
    assert radii.sum() == pytest.approx(2.3994, abs=1e-4)
    assert merging.effective_radii(np.full(2, 100.0), 1.0, 1, False).sum() == pytest.approx(
        0.46, abs=0.01
    )


def test_resolution():
    found = [merging.resolution(d) for d in (1, 2, 4, 10)]
    assert found == pytest.approx([3.464, 2.828, 2.574, 2.439], abs=5e-4)


def test_close_estimates_of_separate_centres_are_grouped_exactly():
    # Every centre within R/4 of the truth, balls of that radius.
    for seed in range(200):
        rng = np.random.default_rng(seed)
        mu = rng.normal(size=(5, 3))
        gaps = np.linalg.norm(mu[:, None] - mu, axis=2)[np.triu_indices(5, 1)]
        eps = gaps.min() / 4.0001
        truth = np.concatenate([rng.permutation(5)[:3] for _ in range(6)])
        clients = np.repeat(np.arange(6), 3)
        way = rng.normal(size=(18, 3))
        way *= eps * rng.uniform(size=(18, 1)) / np.linalg.norm(way, axis=1, keepdims=True)
        pairs, _ = merging.overlaps(mu[truth] + way, np.full(18, eps), clients)
        assert same_partition(merging.connect(pairs, clients), truth)


@pytest.mark.parametrize("criterion", ["icl", "bic", "random_effects"])
def test_merging_recovers_well_separated_groups(criterion):
    for seed in range(5):
        n, centres, variance, clients, truth = copies(seed, spread=10.0)
        found = merging.merge(n, centres, variance, clients, criterion)
        assert same_partition(found.labels, truth)


def test_numbering_does_not_matter():
    for seed in range(10):
        n, centres, variance, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(n))
        renamed = rng.permutation(clients.max() + 1)[clients]
        radii = 2 * np.ones(len(n))
        one = merging.connect(merging.overlaps(centres, radii, clients)[0], clients)
        other = merging.connect(
            merging.overlaps(centres[order], radii, renamed[order])[0], renamed[order]
        )
        assert same_partition(one[order], other)
        whole = merging.merge(n, centres, variance, clients)
        again = merging.merge(n[order], centres[order], variance, renamed[order])
        assert same_partition(whole.labels[order], again.labels)


def test_units_do_not_matter():
    n, centres, variance, clients, _ = copies(3, noise=6.0)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    first = merging.merge(n, centres, variance, clients)
    moved = merging.merge(n, 50 * centres @ rotation + 1000, 2500 * variance, clients)
    assert same_partition(first.labels, moved.labels)


def test_sparse_and_dense_merges_agree(monkeypatch):
    for seed in range(10):
        n, centres, variance, clients, _ = copies(seed, 40, 5, 12, noise=4.0)
        dense = merging.merge(n, centres, variance, clients)
        monkeypatch.setattr(merging, "DENSE", 20)
        sparse = merging.merge(n, centres, variance, clients)
        monkeypatch.undo()
        assert same_partition(dense.labels, sparse.labels)


@pytest.mark.parametrize("d", [2, 10, 20])
def test_overlaps_are_those_of_brute_force(d, monkeypatch):
    n, centres, _, clients, _ = copies(d, d=d, noise=8.0)
    radii = np.random.default_rng(d).uniform(-0.5, 4, len(n)) * np.sqrt(d)
    pairs, closeness = merging.overlaps(centres, radii, clients)
    wanted = {
        (a, b)
        for a in range(len(n))
        for b in range(a + 1, len(n))
        if clients[a] != clients[b]
        and min(radii[a], radii[b]) >= 0
        and np.linalg.norm(centres[a] - centres[b]) <= radii[a] + radii[b]
    }
    assert {tuple(pair) for pair in pairs.tolist()} == wanted
    assert len(wanted) > 10
    assert (np.diff(closeness) >= 0).all()


def test_a_path_stops_where_exclusivity_forbids_more():
    n, centres, variance, clients, _ = copies(0)
    found = merging.merge(n, centres, variance, clients, tolerance=0.0)
    assert found.curve[0, 0] == len(n)
    assert found.curve[-1, 0] >= 4  # a client's four stay four
    assert np.diff(found.curve[:, 0]).tolist() == [-1.0] * (len(found.curve) - 1)


def test_a_given_number_is_cut_from_the_same_path():
    n, centres, variance, clients, _ = copies(1)
    for k in (8, 10, 20):
        found = merging.merge(n, centres, variance, clients, "given", k_given=k)
        assert found.labels.max() + 1 == k


def test_the_criterion_is_the_formula():
    # ICL of a partition, computed afresh from its groups.
    n, centres, variance, clients, _ = copies(2)
    d, found = centres.shape[1], merging.merge(n, centres, variance, clients)
    total = 0.0
    for group in range(found.labels.max() + 1):
        own = found.labels == group
        size = n[own].sum()
        mu = (n[own, None] * centres[own]).sum(0) / size
        squares = (d * n[own] * variance[own] + n[own] * ((centres[own] - mu) ** 2).sum(1)).sum()
        total += d * size * np.log(squares / (d * size)) - 2 * size * np.log(size)
    total += (found.labels.max() + 1) * (d + 1) * np.log(n.sum())
    at = found.curve[found.curve[:, 0] == found.labels.max() + 1][0]
    assert at[1] == pytest.approx(total, rel=1e-12)
    assert found.gap > 0


@pytest.mark.parametrize("ndim", [2, 3])
def test_other_structures_find_the_same_clear_groups(ndim):
    n, centres, _, clients, truth = copies(4, spread=10.0)
    variance = np.ones((len(n), 4)) if ndim == 2 else np.tile(np.eye(4), (len(n), 1, 1))
    assert same_partition(merging.merge(n, centres, variance, clients).labels, truth)


def test_random_effects_allow_copies_to_differ():
    # Copies scatter by 1 within-standard-deviation; balls of the statistical size would not meet.
    n, centres, variance, clients, truth = copies(5, 30, 4, 8, 6, 6.0, noise=0.0)
    centres = centres + np.random.default_rng(0).normal(size=centres.shape)
    found = merging.merge(n, centres, variance, clients, "random_effects")
    assert same_partition(found.labels, truth)
    assert found.shift == pytest.approx(1.0, rel=0.35)  # a grid of geometric steps


def test_a_client_with_one_component_gets_a_usual_radius():
    n, clients = np.full(3, 50.0), np.array([0, 0, 1])
    radii = merging.published_radii(n, np.array([[0.0], [4.0], [0.1]]), clients, 1.0)
    # 1 * 4 / (0.5 * sqrt(100)) = 0.8; alone: 4 / sqrt(50).
    assert radii**2 == pytest.approx([0.8, 0.8, 4 / np.sqrt(50)])


def test_flat_curves_are_named():
    curve = np.array([[3.0, 5.0, 0.0], [2.0, 1.0, 1.0], [1.0, 90.0, 2.0]])
    assert merging.near_best(curve) == [2, 3]


def test_noise_buys_privacy():
    assert noise_for(2.0, rounds=5) > noise_for(4.0, rounds=5)
    assert epsilon(5.0, rounds=10) > epsilon(5.0, rounds=5)


@pytest.mark.slow
def test_ten_thousand_components_are_merged_in_seconds():
    import time

    n, centres, variance, clients, truth = copies(0, 2000, 5, 100, 10)
    began = time.perf_counter()
    found = merging.merge(n, centres, variance, clients)
    assert same_partition(found.labels, truth)
    assert time.perf_counter() - began < 20  # 2 s on an idle core; others may be at work
