"""Balls of uncertainty: by hand, invariances, and both routes to the same answer."""

import numpy as np
import pytest
import torch

from copies import copies, same_partition
from coterie.clustering import overlap


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
    found = overlap.common_point(np.array([0.0, 0.0]), np.array([3.0, 0.0]), *radii)
    assert (found is None) if point is None else found == pytest.approx(point, abs=1e-12)


def test_common_point_of_equal_centres_is_that_centre():
    centre = np.array([1.0, 2.0])
    assert overlap.common_point(centre, centre.copy(), 0.0, 1.0).tolist() == [1.0, 2.0]


def test_consensus_stays_in_the_balls():
    # z = (0 * 1 + 1 * 3) / 4 = 0.75; the first may only go 0.5.
    centres, radii, n = np.array([[0.0], [1.0]]), np.array([0.5, 10.0]), np.array([1.0, 3.0])
    moved = overlap.consensus(centres, radii, n, np.array([0, 0]))
    assert moved.ravel() == pytest.approx([0.5, 0.75], abs=1e-12)


def test_a_component_alone_does_not_move():
    centres = np.array([[0.1, 0.7], [3.3, 1.1]])
    moved = overlap.consensus(centres, np.ones(2), np.array([3.0, 7.0]), np.array([0, 1]))
    assert (moved == centres).all()


@pytest.mark.parametrize("rule", ["mean", "pairwise"])
def test_nobody_is_pulled_out_of_its_ball(rule):
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=20.0)
        radii = np.random.default_rng(seed).uniform(0, 8, len(n))
        pairs, _ = overlap.overlaps(centres, radii, clients)
        labels = overlap.connect(pairs, clients)
        if rule == "mean":
            moved = overlap.consensus(centres, radii, n, labels)
        else:
            moved = overlap.pairwise_means(centres, radii, pairs, labels)
        assert (np.linalg.norm(moved - centres, axis=1) <= radii + 1e-9).all()


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
        pairs, _ = overlap.overlaps(mu[truth] + way, np.full(18, eps), clients)
        assert same_partition(overlap.connect(pairs, clients), truth)


@pytest.mark.parametrize("d", [2, 10, 20])
def test_overlaps_are_those_of_brute_force(d, monkeypatch):
    n, centres, _, clients, _ = copies(d, d=d, noise=8.0)
    radii = np.random.default_rng(d).uniform(-0.5, 4, len(n)) * np.sqrt(d)
    pairs, closeness = overlap.overlaps(centres, radii, clients)
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


def test_a_client_with_one_component_gets_a_usual_radius():
    n, clients = np.full(3, 50.0), np.array([0, 0, 1])
    radii = overlap.published_radii(n, np.array([[0.0], [4.0], [0.1]]), clients, 1.0)
    # 1 * 4 / (0.5 * sqrt(100)) = 0.8; alone: 4 / sqrt(50).
    assert radii**2 == pytest.approx([0.8, 0.8, 4 / np.sqrt(50)])


def test_numbering_does_not_matter():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(n))
        renamed = rng.permutation(clients.max() + 1)[clients]
        radii = 2 * np.ones(len(n))
        one = overlap.joined(centres, radii, clients)
        other = overlap.joined(centres[order], radii, renamed[order])
        assert same_partition(one[order], other)


def test_units_do_not_matter():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        radii = rng.uniform(0, 2, len(n))
        rotation = np.linalg.qr(rng.normal(size=(centres.shape[1],) * 2))[0]
        moved = 50 * centres @ rotation + 1000
        first = overlap.joined(centres, radii, clients)
        assert same_partition(first, overlap.joined(moved, 50 * radii, clients))
        pulled = overlap.pulled(centres, radii, n, clients, "mean")
        again = overlap.pulled(moved, 50 * radii, n, clients, "mean")
        assert again == pytest.approx(50 * pulled @ rotation + 1000, abs=1e-8)


def test_what_is_nobodys_is_not_pulled():
    # 0 and 1 meet at their mean 0.75 (counts 1 and 3), as far as the first ball goes: 0.5; the
    # third has no ball and stays, although it lies between them.
    centres, radii = np.array([[0.0], [1.0], [0.6]]), np.array([0.5, 10.0, -1.0])
    n, clients = np.array([1.0, 3.0, 100.0]), np.array([0, 1, 2])
    assert overlap.pulled(centres, radii, n, clients, "mean").ravel().tolist() == [0.5, 0.75, 0.6]
    assert (overlap.pulled(centres, -np.ones(3), n, clients, "mean") == centres).all()


def test_silhouettes_by_hand():
    # Samples 0 and 4, centres 1 and 7: 1 - 1/7 and 1 - 3/3, the third row does not count. A single
    # centre has no silhouette.
    x, mask = torch.tensor([[0.0], [4.0], [9.0]]).double(), torch.tensor([True, True, False])
    inf = torch.inf
    banks = torch.tensor([[[1.0], [7.0]], [[1.0], [inf]]]).double()
    assert overlap.silhouettes(x, mask, banks).tolist() == pytest.approx([3 / 7, 0.0])


def test_every_factor_has_a_bank_from_the_other_folds():
    n, centres, _, clients, _ = copies(3)
    fold = clients % overlap.FOLDS
    banks = overlap.factor_banks(n, centres, clients, fold, 1.0)
    assert banks.shape[:2] == (overlap.FOLDS, len(overlap.FACTORS))
    counts = np.isfinite(banks).all(3).sum(2)
    assert (np.diff(counts, axis=1) <= 0).all()  # larger balls, fewer groups
    assert (counts[:, 0] <= (fold[None] != np.arange(3)[:, None]).sum(1)).all()
