import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.random import seed_key
from coterie.evidence.replication import (
    best_split,
    compare,
    contrast,
    in_units,
    noise_units,
    remaining,
    repeated,
    residuals,
)
from coterie.evidence.summaries import Summary
from evidence.made import make

SMALL = settings(deadline=None, max_examples=20)


def one(m):
    return torch.zeros(m, dtype=torch.int64)


def test_units_by_hand():
    # Two clients, one fold and class, two rows each: losses 0, 2 and 4, 6. Around the common mean:
    # 9 + 1 + 1 + 9 = 20 over 3 degrees of freedom. Around their own means: 4 over 2.
    mean = torch.tensor([1.0, 5.0]).double().reshape(2, 1, 1, 1)
    answers = Summary(
        torch.full((2, 1, 1), 2.0).double(), mean, torch.full((1, 1, 1), 4.0).double()
    )
    together = in_units(answers, noise_units(answers, one(2), ridge=0))
    assert together.flatten().abs().tolist() == pytest.approx([2 / (20 / 3) ** 0.5] * 2)
    apart = in_units(answers, noise_units(answers, torch.arange(2), ridge=0))
    assert apart.flatten().abs().tolist() == pytest.approx([2 / 2**0.5] * 2)


def test_residuals_by_hand():
    # In fold 0 both have rows (3 and 1 of them): the mean of 0 and 4 is 1. Fold 1 has one client
    # only and does not count.
    x = torch.tensor([[0.0, 5.0], [4.0, 0.0]]).double().reshape(2, 2, 1, 1)
    count = torch.tensor([[3.0, 2.0], [1.0, 0.0]]).double().reshape(2, 2, 1)
    r, there = residuals(x, count, one(2))
    assert r.flatten().tolist() == pytest.approx([-(3**0.5), 0, 3, 0])
    assert there.flatten().tolist() == [True, False, True, False]


def test_a_class_that_does_not_vary_is_not_used():
    answers = make(0, [0] * 4)
    still = answers._replace(mean=answers.mean.clone(), scatter=answers.scatter.clone())
    still.mean[:, :, 1], still.scatter[1] = 2.0, 0.0
    x = in_units(still, noise_units(still, one(4)))
    assert x[:, :, 0].abs().sum() > 0
    assert x[:, :, 1].abs().sum() == 0


@SMALL
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 4))
def test_the_best_split_is_the_largest_eigenvalue(seed, m, folds):
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(m, folds, 2, 3, generator=g, dtype=torch.float64)
    side = r.reshape(m, folds, -1)
    whole = side.sum(1)
    full = whole @ whole.T - torch.einsum("ifd,jfd->ij", side, side)
    found = best_split(r[None], torch.randn(m, generator=g, dtype=torch.float64))
    largest = torch.linalg.eigvalsh(full)[-1].clamp(min=0)
    assert float(found.clamp(min=0)) == pytest.approx(float(largest), rel=1e-2, abs=1e-6)
    assert torch.allclose(repeated(r), full.diagonal())


@SMALL
@given(st.integers(0, 10**6), st.permutations(range(6)))
def test_the_order_of_clients_does_not_matter(seed, order):
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    answers = make(seed, labels.tolist(), n=20)
    order = torch.tensor(order)
    moved = Summary(answers.counts[order], answers.mean[order], answers.scatter)
    there = in_units(answers, noise_units(answers, labels))
    here = in_units(moved, noise_units(moved, labels[order]))
    before = remaining(there, answers.counts, labels)
    assert remaining(here, moved.counts, labels[order]) == pytest.approx(before, rel=1e-6, abs=1e-6)


def test_differences_are_seen_and_chance_is_not():
    labels = one(12)
    x = make(3, [0] * 6 + [1] * 6)
    found = compare(in_units(x, noise_units(x, labels)), x.counts, labels, seed_key(0))
    assert found.split == pytest.approx(1 / 200)
    halves = torch.tensor([0] * 6 + [1] * 6)
    inside = compare(in_units(x, noise_units(x, halves)), x.counts, halves, seed_key(0))
    assert min(inside.split, inside.odd, inside.total) > 0.01


def test_the_p_values_are_even_without_differences():
    p = torch.tensor(
        [
            compare(in_units(x, noise_units(x, one(8))), x.counts, one(8), seed_key(seed), 39)[:3]
            for seed in range(150)
            for x in [make(seed, [0] * 8, n=16, r=3)]
        ]
    )
    # 150 draws of a uniform number: below .2 in 30, give or take 4.9; four of these is unheard of.
    assert ((p <= 0.2).sum(0) - 30).abs().max() <= 20


def test_known_sets_are_contrasted():
    halves, crossed = torch.tensor([0] * 6 + [1] * 6), torch.tensor([0, 1] * 6)
    found = []
    for seed in range(12):
        x = make(seed, halves.tolist(), apart=0.3)
        units, key = in_units(x, noise_units(x, one(12))), seed_key(seed)
        found.append([contrast(units, x.counts, labels, key) for labels in (halves, crossed)])
    right, wrong = (torch.tensor(found) <= 0.02).sum(0).tolist()
    assert right >= 10  # the right sets
    assert wrong <= 1  # sets that cross them


def test_a_contrast_by_hand():
    # Two clients of one row in each of two folds, sets of one: residuals -1 and 1 in both folds.
    # What repeats itself is 2 for each set, 4 together, and no permutation gives more; those that
    # exchange the second fold alone give -4. Half of 199 draws is expected to leave it as it is.
    x = torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double().reshape(2, 2, 1, 1)
    count = torch.ones(2, 2, 1, dtype=torch.float64)
    p = contrast(x, count, torch.tensor([0, 1]), seed_key(0))
    assert p == pytest.approx(0.5, abs=0.15)


def test_a_contrast_is_even_without_differences():
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    p = torch.tensor(
        [
            contrast(in_units(x, noise_units(x, one(8))), x.counts, labels, seed_key(seed), 39)
            for seed in range(150)
            for x in [make(seed, [0] * 8, n=16, r=3)]
        ]
    )
    assert abs(int((p <= 0.2).sum()) - 30) <= 20  # as above


def test_nobody_to_compare_with():
    x = make(0, [0, 0])
    found = compare(x.mean, x.counts, torch.arange(2), seed_key(0))
    assert found[:3] == (1.0, 1.0, 1.0)
