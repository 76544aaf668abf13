import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import relabel


def test_four_points_worked_by_hand():
    # Cutting the line between 1 and 8 leaves 2 * 0.5^2 + 2 * 1^2 = 2.5, every other cut more.
    labels, means = kmeans(torch.tensor([[8.0], [0.0], [10.0], [1.0]]), 2)
    assert labels.tolist() == [0, 1, 0, 1]
    assert means.flatten().tolist() == [9.0, 0.5]
    assert labels.dtype == torch.int64
    assert means.dtype == torch.float64


@settings(max_examples=20)
@given(st.permutations(range(9)))
def test_permuting_points_permutes_the_clusters(order):
    points = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]).repeat(3, 1)
    points += torch.arange(9)[:, None] / 100
    labels, _ = kmeans(points, 3)
    permuted, _ = kmeans(points[order], 3)
    assert torch.equal(permuted, relabel(labels[order]))


def test_neither_reads_nor_changes_the_global_random_state():
    points = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    np.random.seed(1)
    first = kmeans(points, 5, seed=3)
    after = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    assert (torch.rand(1), np.random.rand()) == after
    second = kmeans(points, 5, seed=3)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("k", [1, 3])
def test_one_point_is_one_cluster(k):
    labels, means = kmeans(torch.tensor([[2.0, 3.0]]), k)
    assert labels.tolist() == [0]
    assert means.tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("k", [2, 3, 7])
def test_fewer_distinct_rows_than_clusters_gives_fewer_clusters_and_no_warning(k):
    points = torch.tensor([[4.0], [1.0], [4.0], [1.0], [1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels, means = kmeans(points, k)
    assert labels.tolist() == [0, 1, 0, 1, 1]
    assert means.flatten().tolist() == [4.0, 1.0]


def test_equal_points_are_one_cluster():
    labels, means = kmeans(torch.full((5, 2), 0.1), 3)
    assert labels.tolist() == [0] * 5
    assert means.shape == (1, 2)


def test_rows_that_differ_by_rounding_only_do_not_warn():
    points = 1.0 + torch.arange(6, dtype=torch.float64)[:, None] * 2**-52
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels, means = kmeans(points, 4)
    assert int(labels.max()) + 1 == len(means) <= 4
