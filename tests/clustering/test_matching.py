import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.clustering.matching import clean_losses, match_clusters


@st.composite
def costs(draw):
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(rows, 5))
    values = st.lists(st.integers(0, 50), min_size=rows * columns, max_size=rows * columns)
    return torch.tensor(draw(values), dtype=torch.float32).view(rows, columns)


def match(cost):
    """One client in each cluster."""
    return match_clusters(cost, torch.arange(len(cost)))


def total(cost, columns):
    return cost[torch.arange(len(cost)), torch.as_tensor(columns)].sum().item()


def test_figure_1_of_the_clove_paper():
    cost = torch.tensor([[1.0, 5.1], [2.1, 3.5]])
    assert cost.argmin(dim=1).tolist() == [0, 0]
    assert match(cost).tolist() == [0, 1]


def test_the_losses_of_a_cluster_are_added_up():
    # (1 + 2, 3 + 3) = (3, 6) and (2, 4): 3 + 4 > 6 + 2 is false, so 0 -> 0; without client 1 the
    # costs are (1, 3) and (2, 4), and both ways cost 5.
    losses = torch.tensor([[1.0, 3.0], [2.0, 3.0], [2.0, 4.0]])
    assert match_clusters(losses, torch.tensor([0, 0, 1])).tolist() == [0, 1]


@given(costs())
def test_columns_are_distinct_and_no_other_choice_is_cheaper(cost):
    columns = match(cost)
    assert columns.dtype == torch.int64
    assert len(set(columns.tolist())) == len(cost)
    choices = itertools.permutations(range(cost.shape[1]), len(cost))
    assert total(cost, columns) == min(total(cost, choice) for choice in choices)


@given(st.permutations(range(5)), st.integers(0, 100))
def test_permuting_columns_permutes_the_matching(order, seed):
    # Continuous costs: the best matching is unique.
    cost = torch.rand(3, 5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.tensor(order)[match(cost[:, order])], match(cost))


def test_finite_losses_come_back_unchanged_and_unannounced(recwarn):
    losses = torch.tensor([[1.0, -2.0]])
    assert clean_losses(losses) is losses
    assert not recwarn


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([[1.0, math.nan], [math.inf, 4.0]], [[1.0, 40.0], [40.0, 4.0]]),
        ([[1.0, -math.inf]], [[1.0, 10.0]]),
        ([[-3.0, math.nan]], [[-3.0, 30.0]]),
        ([[0.0, math.nan]], [[0.0, 1.0]]),
        ([[math.nan, math.inf]], [[0.0, 0.0]]),
    ],
)
def test_losses_that_are_not_finite_become_the_worst(losses, expected):
    with pytest.warns(UserWarning, match="not finite"):
        assert clean_losses(torch.tensor(losses)).tolist() == expected


def test_the_replacement_is_finite_in_the_type_of_the_losses():
    with pytest.warns(UserWarning, match="not finite"):
        assert clean_losses(torch.tensor([[3e38, math.nan]])).isfinite().all()


@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=6),
    st.lists(st.floats(0, 100), min_size=6, max_size=6),
)
def test_rows_with_different_best_columns_are_far_apart(first, second):
    # With gap d between best and second best of each, the two columns alone differ by a and b
    # with a + b >= 2 d, hence a^2 + b^2 >= 2 d^2.
    one = torch.tensor(first, dtype=torch.float64)
    two = torch.tensor(second[: len(first)], dtype=torch.float64)
    if one.argmin() == two.argmin():
        two = two.roll(1)
    gap = min((row.sort()[0][1] - row.min()).item() for row in (one, two))
    if one.argmin() != two.argmin():
        assert (one - two).norm().item() >= math.sqrt(2) * gap - 1e-9
