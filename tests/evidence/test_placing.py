import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.evidence.placing import Groups, Place, keep_groups, place, recheck
from coterie.evidence.replication import Units
from coterie.evidence.summaries import Summary
from evidence.made import make, pick

GROUPS = torch.tensor([0] * 8 + [1] * 8)


def split(seed, truth, **options):
    """Members of two groups, and others of the same federation."""
    answers = make(seed, [*GROUPS.tolist(), *truth], **options)
    members = pick(answers, range(16))
    return keep_groups(members, GROUPS), pick(answers, range(16, 16 + len(truth)))


def test_placing_by_hand():
    # One class and network, in units already; groups at 0 and 10 of very many rows.
    units = Units(torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double())
    mean = torch.tensor([0.0, 10.0]).double().reshape(2, 1, 1)
    ones = torch.ones(2).double()
    known = Groups(units, mean, torch.full((2, 1), 1e12).double(), 0 * ones, ones, 0 * ones)
    x = torch.tensor([[1.0, -1.0], [8.0, 8.0]]).double().reshape(2, 2, 1, 1)
    found = place(Summary(torch.ones(2, 2, 1).double(), x, units.root), known)
    assert found.group.tolist() == [0, 1]
    # means 0 and 8, two rows each: squared distances 2 x 100 and 0; 2 x 4 and 2 x 64
    assert found.margin.tolist() == pytest.approx([1.0, (128 - 8) / (128 + 8)])
    # what repeats itself: 2 x 1 x -1 = -2 against 0, and 2 x -2 x -2 = 8, each with variance 4
    assert found.p[0, 0] > 0.5
    assert found.p[1, 1] < found.p[0, 0]


def test_newcomers_find_their_group_and_strangers_are_refused():
    known, others = split(1, [0, 0, 1, 1, 2, 3], apart=2.0)
    found = place(others, known)
    assert found.group[:4].tolist() == [0, 0, 1, 1]
    assert found.fits.tolist() == [True] * 4 + [False] * 2
    assert found.margin[:4].min() > 0.5


def test_few_of_the_right_kind_are_refused():
    refused = total = 0
    for seed in range(40):
        known, others = split(seed, [0, 1] * 5)
        refused += int((~place(others, known).fits).sum())
        total += 10
    assert refused <= 0.03 * total  # 1 % are allowed


def test_members_that_changed():
    known, others = split(2, [0, 0, 1, 2], apart=2.0)
    labels = torch.tensor([0, 1, 1, 0])
    assert recheck(place(others, known), labels) == ["stays", "moved", "stays", "nowhere"]


def test_no_class_in_common():
    known, others = split(3, [0])
    others.counts[:], others.mean[:] = 0.0, 0.0
    found = place(others, known)
    assert found.margin.tolist() == [0.0]
    assert found.p.isfinite().all()


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6))
def test_groups_may_be_numbered_otherwise(seed):
    answers = make(seed, [*GROUPS.tolist(), 0, 1, 2], apart=1.0)
    members, others = pick(answers, range(16)), pick(answers, range(16, 19))
    first = place(others, keep_groups(members, GROUPS))
    second = place(others, keep_groups(members, 1 - GROUPS))
    assert torch.equal(first.group, 1 - second.group)
    assert torch.allclose(first.p, second.p.flip(1))
    assert bool(((first.p >= 0) & (first.p <= 1)).all())
    assert isinstance(first, Place)
