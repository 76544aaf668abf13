import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.clustering import choose_k as module
from coterie.clustering.choose_k import Choice, choose_k, silhouette
from coterie.core.errors import ConfigError

CORNERS = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0]])


def blobs(spread, per_corner=5):
    noise = torch.randn(4 * per_corner, 2, generator=torch.Generator().manual_seed(0))
    return CORNERS.repeat(per_corner, 1) + spread * noise


def test_silhouette_worked_by_hand():
    # a = 1 for all; b = 9.5, 8.5, 8.5, 9.5; alone would count 0.
    points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    expected = (8.5 / 9.5 + 7.5 / 8.5) / 2
    assert silhouette(points, torch.tensor([0, 0, 1, 1])) == pytest.approx(expected)
    # {0}: 0; {1}: 0; 9: a 1, b 8; 10: a 1, b 9.
    expected = (7 / 8 + 8 / 9) / 4
    assert silhouette(points, torch.tensor([0, 1, 2, 2])) == pytest.approx(expected)


def test_silhouette_of_many_points_is_sampled_and_repeatable(monkeypatch):
    points = blobs(2.0, per_corner=100)
    labels = torch.arange(4).repeat(100)
    exact = silhouette(points, labels)
    monkeypatch.setattr(module, "SILHOUETTE_ROWS", 200)
    sampled = silhouette(points, labels)
    assert sampled == silhouette(points, labels) != exact
    assert sampled == pytest.approx(exact, abs=0.1)  # 200 scores of deviation 0.3: 5 errors


@pytest.mark.parametrize("rule", ["silhouette", "elbow"])
def test_four_corners_are_four_groups(rule):
    assert choose_k(blobs(0.3), max_k=12, rule=rule).k == 4


def test_the_curve_covers_what_was_scored():
    choice = choose_k(blobs(0.3), max_k=6)
    assert choice.ks == (2, 3, 4, 5, 6)
    assert choice.scores[2] == max(choice.scores)
    assert choose_k(blobs(0.3), max_k=6, rule="elbow").ks == (1, 2, 3, 4, 5, 6)


@settings(max_examples=20)
@given(st.permutations(range(12)))
def test_the_order_of_points_does_not_matter(order):
    points = blobs(0.3, per_corner=3)
    assert choose_k(points[order], max_k=8).k == choose_k(points, max_k=8).k == 4


def test_the_margin_prefers_fewer_clusters():
    # Pairs at 0, 3 and 30: three groups score about 3 % more than two.
    points = torch.tensor([[0.0], [0.04], [3.0], [3.04], [30.0], [30.04]])
    choice = choose_k(points, max_k=3)
    assert choice.scores[0] < choice.scores[1] < 1.1 * choice.scores[0]
    assert choice.k == 2
    assert choose_k(points, max_k=3, tolerance=0.0).k == 3


def test_a_negative_best_score_asks_for_more_not_less(monkeypatch):
    # From -0.50 the bar is -0.45; the form best * 1.1 would put it at -0.55.
    scores = iter([-0.50, -0.52, -0.44])
    monkeypatch.setattr(module, "silhouette", lambda points, labels: next(scores))
    assert choose_k(torch.arange(9.0)[:, None], max_k=4).k == 4


def test_repeated_points_let_everyone_alone_score_one():
    choice = choose_k(CORNERS, max_k=4)
    assert choice.scores[-1] == pytest.approx(1.0)
    assert choice.k == 4
    assert choose_k(CORNERS, max_k=4, replicate=1).ks == (2, 3)


def test_repeated_points_still_prefer_groups_that_nearly_coincide():
    points = torch.tensor([[0.0], [0.01], [5.0], [5.01]])
    assert choose_k(points, max_k=4).k == 2
    assert choose_k(points, max_k=4, tolerance=0.0).k == 4


@pytest.mark.parametrize("rule", ["silhouette", "elbow"])
@pytest.mark.parametrize("points", [torch.zeros(1, 2), torch.ones(2, 2), torch.full((6, 1), 0.1)])
def test_one_point_or_equal_points_are_one_group(points, rule):
    assert choose_k(points, max_k=5, rule=rule).k == 1


def test_nothing_scored_leaves_an_empty_curve():
    assert choose_k(torch.zeros(1, 2), max_k=3) == Choice(1, (), (), 1)
    assert choose_k(CORNERS, max_k=1) == Choice(1, (), (), len(CORNERS))


def test_two_points_are_two_groups_only_if_they_differ():
    assert choose_k(torch.tensor([[0.0], [1.0]]), max_k=3).k == 2
    assert choose_k(torch.tensor([[1.0], [1.0]]), max_k=3).k == 1
    assert choose_k(torch.tensor([[0.0], [1.0]]), max_k=1).k == 1


def test_a_weak_best_score_can_mean_one_group():
    points = blobs(8.0)
    choice = choose_k(points, max_k=6)
    assert choice.k > 1
    single = choose_k(points, max_k=6, single_if_below=0.9)
    assert single.k == 1
    assert single.scores == choice.scores
    assert choose_k(blobs(0.3), max_k=6, single_if_below=0.5).k == 4


def test_elbow_worked_by_hand():
    # Pairs at -10.5, -9.5 and 9.5, 10.5: sums of squares 401, 1, .5, 0.
    # Depths below the chord: 0, 1 - 1/3 - 1/401, 1 - 2/3 - .5/401, 0.
    choice = choose_k(torch.tensor([[-10.5], [-9.5], [9.5], [10.5]]), max_k=4, rule="elbow")
    assert choice.scores == pytest.approx((401, 1, 0.5, 0))
    assert choice.k == 2


def test_a_straight_curve_has_no_elbow():
    # Unit vectors: k clusters leave exactly n - k.
    assert choose_k(torch.eye(6), max_k=6, rule="elbow").k == 1


def test_an_unknown_rule_is_named():
    with pytest.raises(ConfigError, match="'gap'"):
        choose_k(CORNERS, max_k=3, rule="gap")


def test_many_points_are_judged_by_a_sample_that_is_said():
    points = torch.arange(3.0).repeat(4000)[:, None] * 10 + torch.linspace(0, 1, 12000)[:, None]
    choice = choose_k(points, max_k=4)
    assert (choice.k, choice.rows) == (3, 5000)
