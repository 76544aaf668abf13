import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.evidence.summaries import Summary
from coterie.evidence.why import (
    Sets,
    Statement,
    compare_classes,
    compare_columns,
    compare_errors,
    compare_predictions,
    compare_shares,
    set_intervals,
    share_interval,
)


def sets(*labels, odd=()):
    labels = torch.tensor(labels)
    return Sets(labels, torch.tensor([i in odd for i in range(len(labels))]))


TWO = sets(0, 0, 0, 1, 1, 1)


def moments(x):
    """Count, mean and squared deviations of rows [m, n, d]."""
    mean = x.mean(1)
    count = torch.full(mean.shape, float(x.shape[1]))
    return count, mean, (x - mean[:, None]).square().sum(1)


def rows(seed, shift=0.0, m=6, n=50, d=3, between=0.0):
    """Rows of m clients, which differ by `between`; column 0 of the last three is moved."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, d, generator=g, dtype=torch.float64)
    x += between * torch.randn(m, 1, d, generator=g, dtype=torch.float64)
    x[3:, :, 0] += shift
    return x


def test_a_column_by_hand():
    # Clients with rows 0 and 2 (twice) and with 4 and 6 (twice). Clients of a group are equal, so
    # that rows alone decide. A row's variance is 8 / 4 = 2, and each mean of four rows varies by
    # 2 / 4; within groups rows vary by 8 / 6, the unit of the effect.
    x = torch.tensor([[0.0, 2.0], [0.0, 2.0], [4.0, 6.0], [4.0, 6.0]])[..., None]
    first, second = compare_columns(*moments(x), sets(0, 0, 1, 1))
    assert (first.here, first.elsewhere, second.here, second.elsewhere) == (1, 5, 5, 1)
    unit = math.sqrt(8 / 6)
    assert first.unit == pytest.approx(unit)
    assert first.effect == pytest.approx(-4 / unit)
    assert first.error == pytest.approx(1 / unit)
    # Four clients in two groups are too few to know how clients differ. Eight rows of four clients
    # leave four degrees of freedom. Two statements: each tail has .05 / 4.
    told = set_intervals([first, second])
    assert told[0].high - told[0].effect == pytest.approx(3.4954 / unit, rel=1e-3)


def test_clients_that_differ_among_themselves_make_a_group_less_certain():
    alike, apart = (
        compare_columns(*moments(rows(0, 1.0, between=size)), TWO)[0].error for size in (0.0, 1.0)
    )
    assert apart > 2 * alike


def test_the_moved_column_comes_first():
    told = set_intervals(compare_columns(*moments(rows(0, 5.0)), TWO))
    for group, sign in ((0, -1), (1, 1)):
        best = max((one for one in told if one.group == group), key=lambda one: one.strength)
        assert best.item == (0,)
        assert best.effect == pytest.approx(5 * sign, abs=0.5)
        assert best.low <= 5 * sign <= best.high


def test_an_odd_client_is_compared_with_groups_and_groups_are_not_compared_with_it():
    x = rows(1)
    x[0, :, 1] *= 10
    x[0, :, 1] += 100
    labels = sets(2, 0, 0, 1, 1, 1, odd=[0])
    told = set_intervals(compare_columns(*moments(x), labels))
    strong = [(one.group, one.item) for one in told if one.strength > 0]
    assert strong == [(2, (1,))]
    one = next(one for one in told if one.group == 0 and one.item == (1,))
    assert abs(one.elsewhere) < 1


def test_an_odd_client_among_clients_that_all_differ_is_not_named():
    # The spread among the others is known from five clients: this one is one of them.
    said = 0
    for seed in range(40):
        x = rows(seed, d=8, between=1.0)
        told = set_intervals(compare_columns(*moments(x), sets(1, 0, 0, 0, 0, 0, odd=[0])))
        said += any(one.strength > 0 for one in told)
    assert said <= 6  # 5 % of 40 is 2; three deviations


@pytest.mark.parametrize("between", [0.0, 0.15, 1.0])
def test_where_nothing_differs_little_is_said(between):
    said = 0
    for seed in range(100):
        told = set_intervals(compare_columns(*moments(rows(seed, d=10, between=between)), TWO))
        said += any(one.strength > 0 for one in told)
    assert said <= 11  # at most 5 %; three deviations


def test_a_column_that_is_constant_in_each_group_has_a_finite_effect():
    x = torch.zeros(4, 5, 2)
    x[2:, :, 0] = 7.0
    told = set_intervals(compare_columns(*moments(x), sets(0, 0, 1, 1)))
    assert [one.item for one in told] == [(0,), (0,)]  # the other column never varies
    assert told[1].here == 7
    assert told[1].strength > 1
    assert told[1].effect <= 2 * 10


def test_values_that_are_missing_everywhere_are_not_compared():
    count, mean, square = moments(rows(2))
    count[:3, 1] = 0
    told = compare_columns(count, mean, square, TWO)
    assert {one.item for one in told} == {(0,), (2,)}


def test_shares_by_hand():
    hits = torch.tensor([[50.0], [50.0], [10.0], [10.0]])
    of = torch.full((4, 1), 100.0)
    first = compare_shares(hits, of, sets(0, 0, 1, 1), "label")[0]
    assert (first.kind, first.here, first.elsewhere) == ("label", 0.5, 0.1)
    angles = 2 * math.asin(math.sqrt(100.5 / 201)) - 2 * math.asin(math.sqrt(20.5 / 201))
    assert first.effect == pytest.approx(angles)
    assert first.error == pytest.approx(math.sqrt(2 / 200))  # two sides of 200 rows


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 4))
def test_the_interval_of_a_share_holds_the_difference_and_is_the_same_from_either_side(p, q, width):
    effect = 2 * math.asin(math.sqrt(p)) - 2 * math.asin(math.sqrt(q))
    one = Statement("label", 0, (0,), p, q, effect, 1, 9, 1.0, effect - width, effect + width)
    other = Statement("label", 1, (0,), q, p, -effect, 1, 9, 1.0, -effect - width, width - effect)
    low, high = share_interval(one)
    assert -1 <= low <= p - q + 1e-9
    assert p - q - 1e-9 <= high <= 1
    assert share_interval(other) == pytest.approx((-high, -low))


def test_what_a_model_calls_otherwise():
    # Three labels; in group 1, label 0 is what group 0 calls 2.
    right = 30 * torch.eye(3)
    turned = right[[2, 1, 0]]
    table = torch.stack([torch.stack([right, turned])] * 3 + [torch.stack([turned, right])] * 3)
    told = set_intervals(compare_predictions(table, TWO))
    strong = [one for one in told if one.strength > 0 and one.group == 1]
    assert {one.item for one in strong} == {(0,), (0, 0, 2), (0, 2, 0)}
    wrong = next(one for one in strong if one.kind == "wrong")
    assert (wrong.here, wrong.elsewhere) == (pytest.approx(2 / 3), 0.0)


def test_models_of_odd_clients_need_not_be_given():
    table = torch.full((3, 1, 2, 2), 5.0)  # one model, of group 0
    told = compare_predictions(table, sets(0, 0, 1, odd=[2]))
    assert {(one.group, one.item[0]) for one in told} == {(1, 0)}


def test_errors_of_numbers_are_compared_with_those_at_home():
    g = torch.Generator().manual_seed(0)
    errors = torch.randn(6, 40, 2, 1, generator=g, dtype=torch.float64)
    errors[3:, :, 0] += 5  # the model of group 0 predicts too high in group 1
    both = torch.cat([errors.square(), errors], 3)
    count, mean, square = (part.flatten(1) for part in moments(both.flatten(2)))
    told = set_intervals(
        compare_errors(count[:, 0], mean.reshape(6, 2, 2), square.reshape(6, 2, 2), TWO)
    )
    strong = {(one.kind, one.group, one.item) for one in told if one.strength > 0}
    assert strong == {("error", 1, (0,)), ("bias", 1, (0,))}


def answers(seed, moved):
    """Losses of six clients on two networks, by four folds and two classes, with 20 rows each."""
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(6, 4, 2, 2, generator=g, dtype=torch.float64) / math.sqrt(20)
    mean[3:, :, 1] += moved
    counts = torch.full((6, 4, 2), 20.0, dtype=torch.float64)
    scatter = 6 * 4 * 19 * torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    return Summary(counts, mean, scatter)


def test_the_class_whose_rows_differ_is_named():
    told = set_intervals(compare_classes(answers(0, 1.0), TWO))
    assert {one.item for one in told if one.strength > 0} == {(1,)}
    one = next(one for one in told if one.item == (1,))
    assert one.low < math.sqrt(2) < one.high  # one deviation on each of two networks


def test_classes_that_do_not_differ_are_seldom_named():
    said = sum(
        any(one.strength > 0 for one in set_intervals(compare_classes(answers(seed, 0.0), TWO)))
        for seed in range(100)
    )
    assert said <= 11


def test_one_group_has_nothing_to_be_compared_with():
    assert compare_columns(*moments(rows(0)), sets(*[0] * 6)) == []
    assert set_intervals([]) == []


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(-50, 50))
def test_effects_do_not_depend_on_the_unit_of_a_column(seed, unit, offset):
    x = rows(seed, 1.0)
    first = compare_columns(*moments(x), TWO)
    second = compare_columns(*moments(x * unit + offset), TWO)
    for one, other in zip(first, second, strict=True):
        assert one.effect == pytest.approx(other.effect, rel=1e-6, abs=1e-6)
        assert one.error == pytest.approx(other.error, rel=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.permutations(range(6)))
def test_the_order_of_clients_does_not_matter(seed, order):
    order = torch.tensor(order)
    x = rows(seed, 1.0)
    mixed = Sets(TWO.labels[order], TWO.odd[order])
    first = compare_columns(*moments(x), TWO)
    second = compare_columns(*moments(x[order]), mixed)
    for one, other in zip(first, second, strict=True):
        assert (one.group, one.item) == (other.group, other.item)
        assert (one.effect, one.error) == pytest.approx((other.effect, other.error))
