import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.clustering import hierarchical
from coterie.clustering.hierarchical import choose_k, ward_path
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


@given(st.permutations(range(len(LINE))), st.integers(1, len(LINE)))
def test_permuting_points_permutes_the_clusters(order, k):
    [labels] = ward_path(LINE, [k])
    [permuted] = ward_path(LINE[order], [k])
    assert torch.equal(permuted, relabel(labels[order]))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 14))
def test_the_number_of_clusters_is_k_or_the_number_of_distinct_rows(values, k):
    # Integers tie heights on purpose.
    [labels] = ward_path(torch.tensor(values)[:, None], [k])
    assert int(labels.max()) + 1 == min(k, len(set(values)))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_equal_rows_share_a_cluster(values):
    points = torch.tensor(values)[:, None]
    equal = points == points.mT
    for labels in ward_path(points, range(1, 13)):
        assert (labels[:, None] == labels)[equal].all()


def test_the_path_equals_the_single_cuts_in_any_order():
    ks = [3, 1, 5, 3, 40]
    for k, labels in zip(ks, ward_path(LINE, ks), strict=True):
        assert torch.equal(labels, ward_path(LINE, [k])[0])


@pytest.mark.parametrize("k", [1, 4])
def test_one_point_is_one_cluster(k):
    assert ward_path(torch.tensor([[2.0, 3.0]]), [k])[0].tolist() == [0]


def test_no_cut_wanted_gives_no_labels():
    assert ward_path(LINE, []) == []


# number of clusters

CORNERS = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0]])


def blobs(spread, per_corner=5):
    noise = torch.randn(4 * per_corner, 2, generator=torch.Generator().manual_seed(0))
    return CORNERS.repeat(per_corner, 1) + spread * noise


def test_four_corners_are_four_groups():
    k, scores = choose_k(blobs(0.3), max_k=6)
    assert k == 4
    assert list(scores) == [2, 3, 4, 5, 6]
    assert scores[4] == max(scores.values())


@settings(max_examples=20)
@given(st.permutations(range(12)))
def test_the_order_of_points_does_not_matter(order):
    points = blobs(0.3, per_corner=3)
    assert choose_k(points[order], max_k=8)[0] == choose_k(points, max_k=8)[0] == 4


def test_the_largest_silhouette_wins_by_any_margin():
    # Algorithm 2 of the CLoVE paper. Pairs at 0, 3 and 30: three groups score 3 % more than two.
    points = torch.tensor([[0.0], [0.04], [3.0], [3.04], [30.0], [30.04]])
    k, scores = choose_k(points, max_k=3)
    assert scores[2] < scores[3] < 1.1 * scores[2]
    assert k == 3


def test_equal_silhouettes_go_to_the_smaller_number(monkeypatch):
    scores = iter([-0.50, 0.1, 0.1])
    monkeypatch.setattr(hierarchical, "silhouette", lambda points, labels: next(scores))
    assert choose_k(torch.arange(9.0)[:, None], max_k=4)[0] == 3


@pytest.mark.parametrize("points", [torch.zeros(1, 2), torch.ones(2, 2), torch.full((6, 1), 0.1)])
def test_one_point_or_equal_points_are_one_group(points):
    assert choose_k(points, max_k=5) == (1, {})


def test_as_many_clusters_as_points_cannot_be_scored():
    assert list(choose_k(CORNERS, max_k=4)[1]) == [2, 3]
    assert choose_k(CORNERS, max_k=1) == (1, {})
    assert choose_k(torch.tensor([[0.0], [1.0]]), max_k=3) == (1, {})


def test_many_points_are_judged_by_a_sample(monkeypatch):
    points = torch.arange(3.0).repeat(400)[:, None] * 10 + torch.linspace(0, 1, 1200)[:, None]
    monkeypatch.setattr(hierarchical, "WARD_ROWS", 500)
    seen = []
    monkeypatch.setattr(
        hierarchical, "silhouette", lambda points, labels: seen.append(len(points)) or -len(seen)
    )
    assert choose_k(points, max_k=4)[0] == 2
    assert seen == [500] * 3
