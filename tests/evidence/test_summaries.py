import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.random import fold, seed_key
from coterie.evidence.summaries import (
    Rows,
    assign_folds,
    average_units,
    number_distinct,
    repeated_share,
    share_rows,
    summarise,
)

SMALL = settings(deadline=None, max_examples=30)


def rows_of(values, label, unit=None, mask=None):
    n = len(label)
    unit = torch.arange(n) if unit is None else torch.tensor(unit)
    mask = torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Rows(torch.tensor(values, dtype=torch.float64), torch.tensor(label), unit, mask)


def draw(seed, n, classes, units, r=3):
    g = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(r, n, generator=g, dtype=torch.float64),
        torch.randint(classes, (n,), generator=g),
        torch.randint(units, (n,), generator=g),
        torch.rand(n, generator=g) < 0.8,
    )


def test_a_unit_of_two_classes_is_two_observations():
    # unit 5: loss 1 of class 0, losses 2 and 4 of class 1; unit 3: loss 7; the 100 is padding
    rows = rows_of([[2.0, 1.0, 7.0, 4.0, 100.0]], [1, 0, 0, 1, 0], [5, 5, 3, 5, 3], [1, 1, 1, 1, 0])
    out = average_units(rows._replace(mask=rows.mask.bool()))
    assert out.values[0, :3].tolist() == [7.0, 1.0, 3.0]
    assert out.label[:3].tolist() == [0, 0, 1]
    assert out.unit[:3].tolist() == [3, 5, 5]
    assert out.mask.tolist() == [True, True, True, False, False]


@SMALL
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
def test_averaging_units_keeps_sums_of_units(seed, n, classes, units):
    rows = draw(seed, n, classes, units)
    out = average_units(rows)
    for unit in range(units):
        for label in range(classes):
            before = rows.mask & (rows.unit == unit) & (rows.label == label)
            after = out.mask & (out.unit == unit) & (out.label == label)
            assert int(after.sum()) == int(before.any())
            if before.any():
                expected = rows.values[:, before].mean(1)
                assert torch.allclose(out.values[:, after][:, 0], expected)


def test_folds_are_even_within_a_class_and_begin_at_the_same_fold():
    rows = rows_of([[0.0] * 11], [0] * 8 + [1] * 3)
    fold_of = assign_folds(seed_key(0), rows, n_classes=2, folds=4)
    assert fold_of[:8].bincount(minlength=4).tolist() == [2, 2, 2, 2]
    assert fold_of[8:].bincount(minlength=4).tolist() == [0, 1, 1, 1]  # class 1 begins with fold 1


@SMALL
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
def test_a_unit_stays_in_one_fold_and_padding_changes_nothing(seed, n, classes, units):
    rows = average_units(draw(seed, n, classes, units))
    fold_of = assign_folds(seed_key(seed), rows, classes)
    for unit in range(units):
        assert len(fold_of[rows.mask & (rows.unit == unit)].unique()) <= 1
    longer = Rows(*(torch.cat([part, torch.zeros_like(part)], -1) for part in rows))
    again = assign_folds(seed_key(seed), longer, classes)[:n]
    assert torch.equal(again[rows.mask], fold_of[rows.mask])
    first = summarise(rows, fold_of, classes)
    second = summarise(longer, assign_folds(seed_key(seed), longer, classes), classes)
    assert all(torch.allclose(a, b) for a, b in zip(first, second, strict=True))


@SMALL
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 4))
def test_a_summary_adds_up(seed, n, classes):
    rows = draw(seed, n, classes, n)
    out = summarise(rows, assign_folds(seed_key(seed), rows, classes), classes)
    assert out.counts.sum() == rows.mask.sum()
    for c in range(classes):
        chosen = rows.values[:, rows.mask & (rows.label == c)]
        total = torch.einsum("f,fr,fs->rs", out.counts[:, c], out.mean[:, c], out.mean[:, c])
        assert torch.allclose(out.scatter[c] + total, chosen @ chosen.T)


def test_clients_may_be_stacked():
    many = [draw(seed, 12, 3, 5) for seed in range(4)]
    keys = torch.stack([fold(seed_key(0), i) for i in range(4)])

    def answer(key, *rows):
        own = average_units(Rows(*rows))
        return tuple(summarise(own, assign_folds(key, own, 3), 3))

    stacked = torch.vmap(answer)(keys, *(torch.stack(part) for part in zip(*many, strict=True)))
    for i, rows in enumerate(many):
        for a, b in zip(answer(keys[i], *rows), stacked, strict=True):
            assert torch.allclose(a, b[i])


def test_shares_by_hand():
    rows = share_rows(torch.tensor([2, 0, 2]), torch.arange(3), torch.ones(3).bool(), 3)
    out = summarise(rows, torch.zeros(3, dtype=torch.int64), n_classes=1, folds=1)
    assert out.mean.flatten().tolist() == pytest.approx([1 / 3, 0, 2 / 3])


def test_repeats_are_found():
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [-0.0, 2.0], [0.0, 2.0], [1.0, 2.0]])
    y = torch.tensor([0, 0, 1, 1, 1])
    number = number_distinct(x, y)
    assert number.tolist() == [0, 0, 1, 1, 2]
    assert float(repeated_share(number, torch.ones(5).bool())) == pytest.approx(0.4)
    real = torch.tensor([True, False, True, False, True])
    assert float(repeated_share(number, real)) == 0


@SMALL
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=20))
def test_equal_rows_have_equal_numbers(rows):
    number = number_distinct(torch.tensor(rows).double())
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            assert (number[i] == number[j]) == (a == b)
    assert int(number.max()) + 1 == len(set(rows))
