import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.clustering.hierarchical import ward, ward_path
from coterie.clustering.labels import relabel

# Distinct distances, so that the tree does not depend on the order of rows.
LINE = torch.tensor([[0.0], [1.0], [3.1], [7.3], [12.0], [12.6], [20.2]])


def test_merges_worked_by_hand():
    # {5, 5.5} merges first (height .5), then {0, 1} (height 1), then both.
    points = torch.tensor([[5.0], [0.0], [5.5], [1.0]])
    assert [labels.tolist() for labels in ward_path(points, [4, 3, 2, 1])] == [
        [0, 1, 2, 3],
        [0, 1, 0, 2],
        [0, 1, 0, 1],
        [0, 0, 0, 0],
    ]


def test_centroids_are_the_means_of_the_labels():
    labels, means = ward(LINE, 3)
    for group, mean in enumerate(means):
        assert torch.allclose(mean, LINE[labels == group].double().mean(0))


@given(st.permutations(range(len(LINE))), st.integers(1, len(LINE)))
def test_permuting_points_permutes_the_clusters(order, k):
    labels, _ = ward(LINE, k)
    permuted, _ = ward(LINE[order], k)
    assert torch.equal(permuted, relabel(labels[order]))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 14))
def test_the_number_of_clusters_is_k_or_the_number_of_distinct_rows(values, k):
    # Integers tie heights on purpose.
    labels, means = ward(torch.tensor(values)[:, None], k)
    assert len(means) == int(labels.max()) + 1 == min(k, len(set(values)))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_equal_rows_share_a_cluster(values):
    points = torch.tensor(values)[:, None]
    equal = points == points.mT
    for labels in ward_path(points, range(1, 13)):
        assert (labels[:, None] == labels)[equal].all()


def test_the_path_equals_the_single_cuts_in_any_order():
    ks = [3, 1, 5, 3, 40]
    for k, labels in zip(ks, ward_path(LINE, ks), strict=True):
        assert torch.equal(labels, ward(LINE, k)[0])


@pytest.mark.parametrize("k", [1, 4])
def test_one_point_is_one_cluster(k):
    labels, means = ward(torch.tensor([[2.0, 3.0]]), k)
    assert labels.tolist() == [0]
    assert means.tolist() == [[2.0, 3.0]]


def test_no_cut_wanted_gives_no_labels():
    assert ward_path(LINE, []) == []


def test_many_rows_join_the_centroids_of_a_sample():
    points = torch.cat([torch.linspace(0, 1, 6000), torch.linspace(9, 10, 3000)])[:, None]
    labels, means = ward(points, k=2)
    assert labels.tolist() == [0] * 6000 + [1] * 3000
    assert means.flatten().tolist() == pytest.approx([0.5, 9.5])
