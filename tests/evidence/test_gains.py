import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from coterie.evidence.gains import holm, interval, p_better, satterthwaite

SMALL = settings(deadline=None, max_examples=30)


def drawn(seed, t, m):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(t, m, generator=g, dtype=torch.float64)


def test_one_training_is_students_interval():
    gain = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])  # not skew
    found = interval(gain)
    half = (2.5 / 5) ** 0.5 * student.ppf(0.975, 4)
    assert found[:3] == pytest.approx((3.0, 3 - half, 3 + half))
    assert not found.training


def test_training_that_moves_all_clients_by_hand():
    # Replicates give everybody 1 and 3: mean 2, no difference between clients, and the variance of
    # the mean of two is 2 / 2 = 1, with one degree of freedom.
    found = interval(torch.tensor([[1.0] * 4, [3.0] * 4]))
    assert found[:3] == pytest.approx((2.0, 2 - student.ppf(0.975, 1), 2 + student.ppf(0.975, 1)))
    assert found.training


def test_a_long_tail_lengthens_its_side_only():
    gain = torch.tensor([[0.0] * 9 + [10.0]])
    found = interval(gain)
    half = float(gain.double().std()) / 10**0.5 * student.ppf(0.975, 9)
    assert found.mean - found.low == pytest.approx(half)
    assert found.high - found.mean > 1.2 * half


def test_a_client_without_weight_does_not_count():
    gain = torch.tensor([[1.0, 2.0, 4.0, 99.0]])
    assert interval(gain, torch.tensor([1.0, 1.0, 1.0, 0.0])) == interval(gain[:, :3])


def test_equal_ways_of_training_have_no_interval_and_one_client_has_no_limits():
    assert interval(torch.zeros(1, 5))[:3] == (0.0, 0.0, 0.0)
    assert interval(torch.ones(1, 1))[:3] == (1.0, -math.inf, math.inf)


@SMALL
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 20), st.floats(0.1, 10))
def test_intervals_move_and_stretch_with_gains(seed, t, m, factor):
    gain = drawn(seed, t, m)
    found, moved = interval(gain), interval(gain * factor + 1)
    assert found.low <= found.mean <= found.high
    assert moved[:3] == pytest.approx([v * factor + 1 for v in found[:3]], rel=1e-6, abs=1e-9)
    turned = interval(-gain)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.parametrize(
    ("t", "m", "client", "run", "rest"),
    [(1, 5, 1, 0, 0), (1, 40, 1, 0, 1), (2, 40, 1, 0.3, 0.3), (3, 10, 0.3, 1, 0.3)],
)
def test_intervals_cover(t, m, client, run, rest):
    hits = 0
    for seed in range(400):
        parts = (client * drawn(3 * seed, 1, m), run * drawn(3 * seed + 1, t, 1))
        found = interval(sum(parts) + rest * drawn(3 * seed + 2, t, m))
        hits += found.low <= 0 <= found.high
    assert 0.92 <= hits / 400 <= 0.99  # 95 %, give or take 1.1


def test_degrees_of_freedom():
    variance, free = satterthwaite([(3.0, 6.0), (1.0, 1.0)])
    assert variance == 4.0
    assert free == pytest.approx(16 / (9 / 6 + 1))


def test_p_values_are_students_test():
    rows = drawn(0, 12, 3) + torch.tensor([0.0, 0.5, 1.0])
    p = p_better(rows.mean(0)[None], rows.var(0)[None], torch.full((3,), 12))
    expected = [ttest_1samp(rows[:, i], 0, alternative="greater").pvalue for i in range(3)]
    assert p.tolist() == pytest.approx(expected)


def test_clients_of_one_row_and_rows_without_spread():
    p = p_better(torch.tensor([[5.0, 5.0, 0.0]]), torch.zeros(1, 3), torch.tensor([1, 4, 4]))
    assert p.tolist() == [1.0, 0.5**4, 1.0]  # four rows of one sign


@SMALL
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_rejects_what_bonferroni_does_and_no_more_than_one_by_one(values):
    p = torch.tensor(values, dtype=torch.float64)
    found = holm(p, 0.05)
    assert bool((found >= (p <= 0.05 / len(p))).all())
    assert bool((found <= (p <= 0.05)).all())
    assert bool((p[found].max() <= p[~found].min()) if found.any() and (~found).any() else True)
