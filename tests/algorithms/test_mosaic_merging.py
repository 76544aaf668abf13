"""Merges of components: by hand, invariances, and both routes to the same answer."""

import numpy as np
import pytest

from copies import copies, same_partition
from coterie.algorithms.mosaic import merging
from coterie.algorithms.mosaic.privacy import epsilon, noise_for
from coterie.clustering import ward


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


def shared_with_pieces(piece, holders):
    """A heap that clients 0, 1 and 2 hold, and another at a distance, held by these."""
    centres = np.array([[0.0], [0.0], [0.0], *[[piece]] * len(holders)])
    return (
        np.full(len(centres), 100.0),
        centres,
        np.ones(len(centres)),
        np.array([0, 1, 2, *holders]),
    )


@pytest.mark.parametrize(("distance", "groups"), [(0.5, 1), (6.0, 2)])
@pytest.mark.parametrize("holders", [[2], [1, 2], [0, 1, 2]])
def test_a_group_nobody_has_without_another_one_is_a_piece_of_it(distance, groups, holders):
    found = merging.merge(*shared_with_pieces(distance, holders), tolerance=0.1)
    assert len(set(found.labels)) == groups
    assert found.curve[found.curve[:, 1].argmin(), 0] == groups
    never = merging.merge(*shared_with_pieces(distance, holders), tolerance=0.0)
    assert len(set(never.labels)) == 2


def test_bic_believes_what_clients_say():
    found = merging.merge(*shared_with_pieces(0.1, [2]), "bic", 0.1)
    assert found.labels.tolist() == [0, 0, 0, 1]


def test_groups_that_are_seen_apart_stay_apart():
    found = merging.merge(*shared_with_pieces(0.5, [2, 3]), tolerance=0.1)  # 3 has it alone
    assert found.labels.tolist() == [0, 0, 0, 1, 1]


def test_ward_merges_go_on_after_a_piece_has_joined():
    n, centres, _, clients = shared_with_pieces(1.0, [2])
    far = np.append(n, 100.0), np.append(centres, [[9.0]], 0), np.ones(5), np.append(clients, 3)
    path, values = merging.merge_path(*far)
    assert path.joins == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert len(values) == 5
    assert values.argmin() == 3
    assert path.costs[2] == pytest.approx(300 * 100 / 400)  # by hand: n m / (n + m) times 1
    assert path.costs[3] == pytest.approx(400 * 100 / 500 * (9 - 0.25) ** 2)


@pytest.mark.parametrize(("x", "joins"), [(2.41, True), (2.42, False)])
def test_what_one_client_has_is_a_copy_up_to_a_distance(x, joins):
    # Ten copies at 1 and -1: t2 = 10 / 21.666 - 0.001 = 0.46055, the variance of a copy 0.46155 and
    # of the middle a tenth of that. With 11 components, joined up to
    # sqrt(0.5077 (2 (11 log 11 - 10 log 10) + 2 log 11)) = 2.416.
    centres = np.array([1.0, -1.0] * 5 + [x])[:, None]
    labels = np.array([0] * 10 + [1])
    found = merging._copy_joins(np.full(11, 1000.0), centres, 1.0, np.arange(11), labels)
    assert [*found] == ([(0, 10)] if joins else [])


def far_copy(at, client, seed=0):
    """Ten groups that ten clients have each, copies half a deviation apart, and one farther off."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(10), 10)
    centres = 20 * np.eye(10)[truth] + 0.5 * rng.normal(size=(100, 10))
    centres = np.append(centres, (20 + at) * np.eye(10)[:1], 0)
    clients = np.append(np.arange(100) % 20, client)  # group 0: clients 0 to 9
    return np.full(101, 100.0), centres, np.ones(101), clients


@pytest.mark.parametrize(("at", "groups"), [(3.5, 10), (8.0, 11)])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 1.0])
def test_a_far_copy_joins_its_group_and_a_group_of_its_own_does_not(at, groups, tolerance):
    found = merging.merge(*far_copy(at, client=20), tolerance=tolerance)
    assert len(set(found.labels)) == groups
    assert found.curve[found.curve[:, 1].argmin(), 0] == groups
    assert found.gap > 0


def test_samples_alone_would_take_the_far_copy_for_a_group(monkeypatch):
    monkeypatch.setattr(merging, "_copy_joins", lambda *_: {})
    assert len(set(merging.merge(*far_copy(3.5, client=20)).labels)) == 11


def test_a_client_that_has_the_group_has_no_far_copy_of_it():
    assert len(set(merging.merge(*far_copy(3.5, client=0)).labels)) == 11


def test_of_two_components_of_a_client_one_is_the_copy():
    n, centres, variance, clients = far_copy(3.5, client=20)
    other = np.append(centres, (20 - 3.5) * np.eye(10)[:1], 0)
    two = np.append(n, 100.0), other, np.append(variance, 1.0), np.append(clients, 20)
    labels = merging.merge(*two).labels
    assert len(set(labels)) == 11
    assert (labels[100:] == labels[0]).sum() == 1


def test_two_copies_prove_nothing_of_how_copies_scatter():
    n, centres = np.full(3, 100.0), np.array([[0.0], [3.0], [9.0]])
    found = merging.merge(n, centres, np.ones(3), np.arange(3))
    assert found.labels.tolist() == [0, 0, 1]


def test_clients_that_differ_by_whole_deviations_still_share_groups():
    rng = np.random.default_rng(0)
    n, centres, variance, clients, truth = copies(0, 30, 4, 8, d=10)
    moved = centres + rng.normal(size=centres.shape)
    found = merging.merge(n, moved, variance, clients)
    assert same_partition(found.labels, truth)


@pytest.mark.parametrize(("d", "distance"), [(1, 3.464), (2, 2.828), (4, 2.574), (10, 2.439)])
def test_two_large_equal_groups_merge_below_the_resolution(d, distance):
    # In the limit of many samples: 2 sqrt(d (4^(1/d) - 1)) standard deviations.
    assert 2 * np.sqrt(d * (4 ** (1 / d) - 1)) == pytest.approx(distance, abs=5e-4)
    n, clients = np.full(2, 1e7), np.arange(2)
    for factor, groups in ((0.999, 1), (1.001, 2)):
        centres = np.zeros((2, d))
        centres[1, 0] = factor * distance
        assert len(set(merging.merge(n, centres, np.ones(2), clients).labels)) == groups


@pytest.mark.parametrize("criterion", ["icl", "bic"])
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
        monkeypatch.setattr(ward, "DENSE", 20)
        sparse = merging.merge(n, centres, variance, clients)
        monkeypatch.undo()
        assert same_partition(dense.labels, sparse.labels)


def test_a_path_stops_where_exclusivity_forbids_more():
    n, centres, variance, clients, _ = copies(0)
    found = merging.merge(n, centres, variance, clients, tolerance=0.0)
    assert found.curve[0, 0] == len(n)
    assert found.curve[-1, 0] >= 4  # a client's four stay four
    assert np.diff(found.curve[:, 0]).tolist() == [-1.0] * (len(found.curve) - 1)


@pytest.mark.parametrize(("holders", "groups"), [(19, 2), (20, 1)])
def test_a_stray_second_component_joins_a_group_of_twenty_clients(holders, groups):
    # One client has two components of a heap that many share: a twentieth of its clients may.
    clients = np.array([*range(holders), 0])
    centres = np.array([*np.linspace(0, 1e-3, holders), 1.0])[:, None]
    path = ward.ward_path(np.ones(holders + 1), centres, ward.holder_bits(clients))
    assert holders + 1 - len(path.joins) == groups


def test_a_given_number_is_cut_from_the_same_path():
    n, centres, variance, clients, _ = copies(1)
    for k in (8, 10, 20):
        found = merging.merge(n, centres, variance, clients, k_given=k)
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
