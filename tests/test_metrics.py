"""Measures, checked against values worked out by hand and against their own symmetries."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.metrics import (
    accuracy,
    adjusted_rand,
    first_round,
    identity_accuracy,
    mixture_error,
    normalized_mutual_info,
    parameter_distance,
    spread,
)

GROUPINGS = [adjusted_rand, normalized_mutual_info, identity_accuracy]


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# Groupings


def test_adjusted_rand_by_hand():
    # Pairs together in both: 1 + 3 = 4; in the found: 3 + 3 = 6; in the truth: 1 + 6 = 7; of 15.
    # Expected 6 * 7 / 15 = 2.8, at most (6 + 7) / 2 = 6.5: (4 - 2.8) / (6.5 - 2.8).
    found, truth = labels(0, 0, 0, 1, 1, 1), labels(0, 0, 1, 1, 1, 1)
    assert adjusted_rand(found, truth) == pytest.approx(1.2 / 3.7)


def test_normalized_mutual_info_by_hand():
    # Singletons tell the truth exactly (ln 2), but have entropy ln 4: ln 2 / ((ln 2 + ln 4) / 2).
    assert normalized_mutual_info(labels(0, 1, 2, 3), labels(0, 0, 1, 1)) == pytest.approx(2 / 3)


def test_identity_accuracy_by_hand():
    # Found 7 -> true 1 (two clients), found 3 -> true 0 (one client); the other two are wrong.
    assert identity_accuracy(labels(7, 7, 7, 3, 3), labels(1, 1, 0, 0, 1)) == pytest.approx(3 / 5)


def test_a_surplus_group_is_wrong_throughout():
    assert identity_accuracy(labels(0, 0, 1, 2), labels(0, 0, 0, 0)) == pytest.approx(2 / 4)


def test_one_group_for_all_is_as_accurate_as_the_largest_true_group():
    assert identity_accuracy(labels(4, 4, 4, 4), labels(0, 0, 0, 1)) == pytest.approx(3 / 4)


@pytest.mark.parametrize("measure", [adjusted_rand, normalized_mutual_info])
def test_one_true_group_is_undefined(measure):
    assert measure(labels(0, 1, 0), labels(2, 2, 2)) is None


@pytest.mark.parametrize("measure", [adjusted_rand, normalized_mutual_info])
def test_one_true_group_among_the_judged_is_undefined(measure):
    assert measure(labels(0, 1, 1), labels(0, 0, 1), on=labels(0, 1)) is None
    assert measure(labels(0, 1, -1), labels(0, 0, 1)) is None


@pytest.mark.parametrize("measure", GROUPINGS)
def test_clients_without_a_group_are_left_out(measure):
    found, truth = labels(0, -1, 1, -1, 1), labels(0, 0, 1, 1, 1)
    assert measure(found, truth) == 1.0


@pytest.mark.parametrize("measure", GROUPINGS)
def test_only_the_clients_asked_for_are_judged(measure):
    found, truth = labels(0, 1, 1, 0, -1), labels(0, 0, 1, 1, 1)
    assert measure(found, truth, on=labels(0, 2, 4)) == 1.0
    assert measure(found, truth) < 1.0


@pytest.mark.parametrize("measure", GROUPINGS)
def test_nobody_placed_is_undefined(measure):
    assert measure(labels(-1, -1), labels(0, 1)) is None


@pytest.mark.parametrize("measure", GROUPINGS)
def test_labels_that_do_not_belong_together_are_refused(measure):
    with pytest.raises(ValueError, match=r"one label per client.*\(2,\) and \(3,\)"):
        measure(labels(0, 1), labels(0, 1, 1))


@pytest.mark.parametrize("measure", GROUPINGS)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=12),
    names=st.permutations(range(4)),
)
def test_names_of_groups_do_not_matter(measure, pairs, names):
    found, truth = (torch.tensor(side) for side in zip(*pairs, strict=True))
    value = measure(found, truth)
    renamed = measure(torch.tensor(names)[found], truth)
    if value is None:
        assert renamed is None
    else:
        # Sums are taken in another order.
        assert renamed == pytest.approx(value, abs=1e-12)
    assert measure(torch.tensor(names)[truth], truth) in (None, pytest.approx(1.0))


# Rounds


def test_first_round_counts_from_one():
    assert first_round([0.9, 1.0], at_least=0.9) == 1
    assert first_round(torch.tensor([0.5, 0.25, 1.0]), at_least=1.0) == 3


def test_a_level_never_reached_has_no_round():
    assert first_round([0.1, 0.8], at_least=0.9) is None
    assert first_round([], at_least=0.9) is None


def test_undefined_values_reach_nothing():
    assert first_round([None, math.nan, 0.0], at_least=0.0) == 3


# Parameters


def test_parameter_distance_pairs_one_to_one():
    # Both models are nearest to 0, but one of them must stand for 10: (1 + 8) / 2, not (1 + 2) / 2.
    models, truth = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [10.0]])
    assert parameter_distance(models, truth) == pytest.approx(4.5)
    assert parameter_distance(models, truth, nearest=True) == pytest.approx(1.5)


def test_parameter_distance_is_euclidean_and_ignores_the_order():
    truth = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    moved = truth + torch.tensor([3.0, 4.0])
    assert parameter_distance(moved[[2, 0, 1]], truth) == pytest.approx(5.0)


def test_small_distances_between_long_vectors_are_exact():
    # By inner products, 1e8 + 1e8 - 2e8 would leave nothing of 1e-5.
    truth = torch.full((30, 1000), 300.0, dtype=torch.float64)
    truth += torch.arange(30.0, dtype=torch.float64)[:, None]
    moved = truth.clone()
    moved[:, 0] += 1e-5
    assert parameter_distance(moved, truth) == pytest.approx(1e-5, rel=1e-6)


def test_surplus_models_do_not_count():
    models, truth = torch.tensor([[0.0], [7.0], [99.0]]), torch.tensor([[8.0], [0.0]])
    assert parameter_distance(models, truth) == pytest.approx(0.5)


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_is_infinitely_far(nearest, value):
    models = torch.tensor([[value], [0.0]])
    assert parameter_distance(models, torch.zeros(2, 1), nearest=nearest) == math.inf


def test_parameters_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"number of columns\. Got shapes \(2, 3\) and \(2, 4\)"):
        parameter_distance(torch.zeros(2, 3), torch.zeros(2, 4))


# Mixtures


def test_mixture_error_by_hand():
    # Estimated columns stand for components 2, 0, 1. Errors: one client off by .1 in two of them.
    true = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]], dtype=torch.float64)
    estimated = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]], dtype=torch.float64)
    error = mixture_error(estimated, true)
    assert error["mae"] == pytest.approx(0.2 / 6)
    assert error["maximum"] == pytest.approx(0.1)
    assert error["spearman"] == pytest.approx([1.0, 1.0, 1.0])


def test_rank_correlation_is_given_per_true_component():
    # Component 0 is ranked 1, 3, 2 for 1, 2, 3: 1 - 6 * 2 / (3 * 8) = 0.5. Component 1 is constant.
    true = torch.tensor([[0.1, 0.5, 0.4], [0.2, 0.5, 0.3], [0.3, 0.5, 0.2]])
    estimated = torch.tensor([[0.1, 0.5, 0.4], [0.25, 0.45, 0.3], [0.2, 0.5, 0.3]])
    first, second, _ = mixture_error(estimated, true)["spearman"]
    assert first == pytest.approx(0.5)
    assert second is None


def test_exact_shares_have_no_error_whatever_their_order():
    true = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    error = mixture_error(true[:, [3, 1, 0, 2]], true)
    assert error["mae"] == error["maximum"] == 0.0
    assert error["spearman"] == pytest.approx([1.0] * 4)


def test_one_client_has_no_rank_correlation():
    error = mixture_error(torch.tensor([[0.25, 0.75]]), torch.tensor([[1.0, 0.0]]))
    assert error == {"mae": 0.25, "maximum": 0.25, "spearman": [None, None], "slope": None}


def test_shares_of_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"same shape\. Got shapes \(5, 2\) and \(5, 3\)"):
        mixture_error(torch.zeros(5, 2), torch.zeros(5, 3))


# Scores over clients


def test_spread_by_hand():
    # 0, .05, ..., .95: the worst two of twenty are 0 and .05.
    values = torch.arange(20) / 20
    # The variance of n equal steps h is h^2 (n^2 - 1) / 12.
    std = 0.05 * math.sqrt((20**2 - 1) / 12)
    expected = {"mean": 0.475, "std": std, "worst_decile": 0.025, "min": 0.0, "median": 0.475}
    # The values come in single precision.
    assert spread(values.flip(0)) == pytest.approx(expected, abs=1e-7)


def test_the_worst_decile_of_few_clients_is_the_worst_client():
    assert spread([0.75, 0.5, 1.0])["worst_decile"] == 0.5


def test_one_client_has_no_spread():
    value = spread([0.5])
    assert value == {"mean": 0.5, "std": 0.0, "worst_decile": 0.5, "min": 0.5, "median": 0.5}


def test_a_missing_score_is_not_lost_silently():
    assert all(math.isnan(figure) for figure in spread([0.5, math.nan]).values())


def test_no_scores_are_refused():
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_accuracy_ignores_padding():
    outputs = torch.eye(4)
    y = labels(0, 1, 3, 3)
    assert accuracy(outputs, y, torch.ones(4, dtype=torch.bool)).item() == 0.75
    assert accuracy(outputs, y, torch.tensor([True, False, True, False])).item() == 0.5


def test_accuracy_of_nothing_is_undefined():
    assert accuracy(torch.eye(2), labels(0, 1), torch.zeros(2, dtype=torch.bool)).isnan()


def test_accuracy_can_be_stacked():
    outputs, y = torch.eye(2).expand(3, 2, 2), torch.tensor([[0, 1], [0, 0], [1, 0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    assert torch.func.vmap(accuracy)(outputs, y, mask).tolist() == [1.0, 0.5, 0.0]


def test_slope_shows_shares_drawn_to_the_middle():
    true = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    # half of the way to the middle, and components swapped
    estimated = (0.5 + 0.5 * (true - 0.5)).flip(1)
    assert mixture_error(estimated, true)["slope"] == pytest.approx(0.5)
    assert mixture_error(true[:1], true[:1])["slope"] is None
