import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.random import seed_key
from coterie.evidence.grouping import (
    Grouping,
    agree,
    distances,
    divide,
    find_groups,
    halves,
    settle,
    strange_classes,
    ward,
)
from evidence.made import make, pick


def same_sets(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


def column(*values):
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


def test_wards_cuts_by_hand():
    cuts = ward(column(0.0, 1.0, 5.0, 9.0), torch.ones(4, 1).double())
    # 0 and 1 merge first (cost 1/2), then 5 and 9 (8), not 5 and the first two (2/3 x 20.25 = 13.5)
    assert same_sets(cuts[3], [0, 0, 1, 2])
    assert same_sets(cuts[2], [0, 0, 1, 1])
    assert cuts[1].tolist() == [0, 0, 0, 0]


def test_distances_by_hand():
    # Weights 1, 3 and 1 at 0, 4 and 10; the first two are a set. Client 0 from client 1:
    # 1 x 3 / 4 x 16 = 12; from client 2: 1 x 1 / 2 x 100 = 50.
    weight = torch.tensor([[1.0], [3.0], [1.0]]).double()
    far = distances(column(0.0, 4.0, 10.0), weight, torch.tensor([0, 0, 1]))
    assert far[0].tolist() == pytest.approx([12, 50])
    assert far[2, 1] == torch.inf  # nobody else is there


def test_clients_settle_where_they_differ_least():
    x = column(0.0, 0.1, 0.2, 9.0, 9.1, 9.2)
    found = settle(x, torch.ones(6, 1).double(), torch.tensor([0, 0, 1, 1, 1, 1]))
    assert same_sets(found, [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("truth", "n_groups", "odd"),
    [
        ([0] * 10, 1, []),
        ([0] * 6 + [1] * 6, 2, []),
        ([0] * 5 + [1] * 5 + [2] * 5, 3, []),
        ([0] * 11 + [1], 1, [11]),
        ([0] * 6 + [1] * 5 + [2], 2, [11]),
        ([0] * 10 + [1, 2], 1, [10, 11]),
    ],
)
def test_groups_and_odd_clients_are_found(truth, n_groups, odd):
    found = find_groups(make(1, truth, apart=2.0), seed_key(0))
    assert found.n_groups == n_groups
    assert found.odd == odd
    assert same_sets(found.labels, truth)
    assert n_groups == 1 or found.explained > 0.9


def test_clients_that_differ_one_by_one_are_no_groups():
    assert find_groups(make(1, list(range(12)), apart=3.0), seed_key(0)).n_groups is None


def test_a_proposal_keeps_to_the_largest_number():
    # Forty clients one by one: the search goes beyond four sets before it gives up.
    found = find_groups(make(1, list(range(40)), apart=3.0), seed_key(0), max_groups=4)
    assert found.n_groups is None
    assert len(found.labels.unique()) == 4
    assert 0 < found.explained < 1


def test_degenerate_federations():
    assert find_groups(make(0, [0]), seed_key(0)).n_groups == 1
    assert find_groups(make(0, [0, 0]), seed_key(0)).odd == []
    empty = make(0, [0] * 4)
    empty.counts[0], empty.mean[0] = 0.0, 0.0  # a client without rows
    assert find_groups(empty, seed_key(0)).n_groups == 1


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6), st.permutations(range(9)))
def test_permuting_clients_permutes_the_answer(seed, order):
    truth = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    answers = make(seed, truth, apart=4.0)
    found = find_groups(answers, seed_key(0))
    moved = find_groups(pick(answers, order), seed_key(0))
    last = min(len(found.steps), len(moved.steps)) - 1  # by chance, one may go a step further
    assert same_sets(moved.steps[last].labels, found.steps[last].labels[torch.tensor(order)])


def test_halves_of_the_networks_agree_on_clear_groups():
    answers = make(2, [0] * 5 + [1] * 5, apart=2.0, r=8)
    first, second = halves(answers)
    assert agree(find_groups(first, seed_key(0)), find_groups(second, seed_key(1))) == 1.0
    assert torch.equal(first.mean, answers.mean[..., [0, 2, 4, 6]])
    assert torch.equal(second.scatter[0], answers.scatter[0][1::2, 1::2])


def test_agreement_of_two_answers():
    def answer(n_groups, *labels):
        return Grouping(torch.tensor(labels), n_groups, [], 0.0, [])

    two, renamed, one = answer(2, 0, 0, 1, 1), answer(2, 1, 1, 0, 0), answer(1, 0, 0, 0, 0)
    nobody = answer(None, 0, 1, 1, 0)
    assert agree(two, renamed) == 1.0
    assert agree(two, one) == 0.0
    assert agree(nobody, answer(None, 0, 0, 1, 1)) == 1.0  # both: one by one
    assert agree(nobody, answer(2, 0, 1, 1, 0)) == 0.0
    assert 0 < agree(two, answer(3, 0, 0, 1, 2)) < 1


def test_a_known_number_of_sets():
    answers = make(2, [0] * 4 + [1] * 4 + [2] * 4, apart=3.0)
    assert same_sets(divide(answers, 3), [0] * 4 + [1] * 4 + [2] * 4)
    assert len(divide(answers, 2).unique()) == 2


def test_what_is_strange_about_an_odd_client():
    answers = make(4, [0] * 9, classes=3)
    answers.mean[5, :, 1] += 3.0  # class 1 of client 5
    found = find_groups(answers, seed_key(0))
    assert found.odd == [5]
    deviation = strange_classes(answers, found.labels, 5)
    assert deviation.argmax() == 1
    assert deviation[1] > 5 > deviation[[0, 2]].abs().max()
