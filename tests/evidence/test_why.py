import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.evidence.why import (
    Statement,
    column_statements,
    label_statements,
    most_telling,
    prediction_statements,
)

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def tables(seed, shift, n=50, d=3):
    """Counts, sums and squares of six clients; column 0 of the last three is moved."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(6, n, d, generator=g, dtype=torch.float64)
    x[3:, :, 0] += shift
    return torch.full((6, d), float(n)).double(), x.sum(1), x.square().sum(1)


def test_a_column_by_hand():
    # Clients of two rows: 0 and 2 in group 0 (twice), 4 and 6 in group 1 (twice). A row's variance
    # is 8 / 4 = 2; the difference of means -4, or -4 / sqrt 2 standard deviations.
    rows = torch.tensor([[0.0, 2.0], [0.0, 2.0], [4.0, 6.0], [4.0, 6.0]])[..., None]
    count = torch.full((4, 1), 2.0)
    found = column_statements(count, rows.sum(1), rows.square().sum(1), torch.tensor([0, 0, 1, 1]))
    assert [(line.group, line.here, line.elsewhere) for line in found] == [(0, 1, 5), (1, 5, 1)]
    assert found[0].effect == pytest.approx(-4 / 2**0.5)
    # clients of a group are equal, so rows decide: each mean has variance 2 / 4, in units 1 / 4
    assert found[0].high - found[0].effect == pytest.approx(2.4469 * 0.5**0.5, rel=1e-3)


def test_the_moved_column_comes_first():
    statements = column_statements(*tables(0, 5.0), GROUPS)
    top = most_telling(statements)
    assert all(lines[0].item == (0,) for lines in top.values())
    assert top[1][0].effect == pytest.approx(5, abs=0.5)
    assert top[0][0].effect == pytest.approx(-5, abs=0.5)


def test_where_nothing_differs_little_is_said():
    said = sum(
        any(most_telling(column_statements(*tables(seed, 0.0), GROUPS)).values())
        for seed in range(100)
    )
    assert said <= 18  # at most 10 %, since two groups have 5 % each; three deviations


def test_labels_by_hand():
    count = torch.tensor([[50.0, 50.0], [50.0, 50.0], [10.0, 90.0], [10.0, 90.0]])
    found = label_statements(count, torch.tensor([0, 0, 1, 1]))
    first = found[0]
    assert (first.here, first.elsewhere) == (0.5, 0.1)
    angles = 2 * math.asin(0.5**0.5) - 2 * math.asin((20.5 / 201) ** 0.5)
    assert first.effect == pytest.approx(angles)
    assert first.low > 0


def test_what_a_model_calls_otherwise():
    # Three labels; in group 1, label 0 is what group 0 calls 2.
    right = 30 * torch.eye(3)
    turned = right[[2, 1, 0]]
    table = torch.stack([torch.stack([right, turned])] * 3 + [torch.stack([turned, right])] * 3)
    top = most_telling(prediction_statements(table, GROUPS), per_group=2)
    assert {line.item for line in top[1]} == {(0, 0, 2), (0, 2, 0)}
    assert top[1][0].here == 1.0
    assert top[1][0].elsewhere == 0.0


def test_at_most_so_many_a_group_and_none_by_chance():
    lines = [Statement("column", 0, (j,), 0, 0, 1, 1 - j / 4, 2) for j in range(8)]
    top = most_telling(lines)
    assert [line.item for line in top[0]] == [(0,), (1,), (2,), (3,)]  # the fifth begins at zero
    assert lines[1].strength == 0.75
    assert lines[5].strength == 0


def test_one_group_has_nothing_to_say():
    assert column_statements(*tables(0, 0.0), torch.zeros(6, dtype=torch.int64)) == []


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(-50, 50))
def test_effects_do_not_depend_on_the_unit_of_a_column(seed, unit, offset):
    count, total, square = tables(seed, 1.0)
    moved = total * unit + count * offset
    squares = square * unit**2 + 2 * unit * offset * total + count * offset**2
    first = column_statements(count, total, square, GROUPS)
    second = column_statements(count, moved, squares, GROUPS)
    assert [line.effect for line in first] == pytest.approx(
        [line.effect for line in second], rel=1e-3, abs=1e-3
    )
