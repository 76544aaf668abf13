"""Overlapping balls: invariances, and both ways to the same answer."""

import numpy as np
import pytest

from copies import copies, same_partition
from coterie.clustering import overlap


def joined(centres, radii, clients):
    """Groups of components whose balls overlap."""
    return overlap.connect(overlap.overlaps(centres, radii, clients)[0], clients)


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


def test_numbering_does_not_matter():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(n))
        renamed = rng.permutation(clients.max() + 1)[clients]
        radii = 2 * np.ones(len(n))
        one = joined(centres, radii, clients)
        other = joined(centres[order], radii, renamed[order])
        assert same_partition(one[order], other)


def test_units_do_not_matter():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        radii = rng.uniform(0, 2, len(n))
        rotation = np.linalg.qr(rng.normal(size=(centres.shape[1],) * 2))[0]
        moved = 50 * centres @ rotation + 1000
        first = joined(centres, radii, clients)
        assert same_partition(first, joined(moved, 50 * radii, clients))
