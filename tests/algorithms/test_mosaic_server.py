"""Mosaic's server: where centres are pulled."""

import numpy as np
import pytest

from copies import copies
from coterie.algorithms.mosaic.server import pull


def test_centres_stay_in_their_balls():
    # z = (0 * 1 + 1 * 3) / 4 = 0.75; the first may only go 0.5.
    centres, radii, n = np.array([[0.0], [1.0]]), np.array([0.5, 10.0]), np.array([1.0, 3.0])
    assert pull(centres, radii, n, np.arange(2)).ravel() == pytest.approx([0.5, 0.75], abs=1e-12)
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=20.0)
        radii = np.random.default_rng(seed).uniform(0, 8, len(n))
        moved = pull(centres, radii, n, clients)
        assert (np.linalg.norm(moved - centres, axis=1) <= radii + 1e-9).all()


def test_a_component_alone_does_not_move():
    centres = np.array([[0.1, 0.7], [3.3, 1.1]])
    assert (pull(centres, np.ones(2), np.array([3.0, 7.0]), np.arange(2)) == centres).all()


def test_a_slot_without_a_component_does_not_move():
    # 0 and 1 meet at their mean 0.75 (counts 1 and 3), as far as the first ball goes: 0.5; the
    # third has no ball and stays, although it lies between them.
    centres, radii = np.array([[0.0], [1.0], [0.6]]), np.array([0.5, 10.0, -1.0])
    n, clients = np.array([1.0, 3.0, 100.0]), np.arange(3)
    assert pull(centres, radii, n, clients).ravel().tolist() == [0.5, 0.75, 0.6]
    assert (pull(centres, -np.ones(3), n, clients) == centres).all()


def test_units_do_not_matter():
    for seed in range(10):
        n, centres, _, clients, _ = copies(seed, noise=6.0)
        rng = np.random.default_rng(seed)
        radii = rng.uniform(0, 2, len(n))
        rotation = np.linalg.qr(rng.normal(size=(centres.shape[1],) * 2))[0]
        moved = pull(centres, radii, n, clients)
        again = pull(50 * centres @ rotation + 1000, 50 * radii, n, clients)
        assert again == pytest.approx(50 * moved @ rotation + 1000, abs=1e-8)
