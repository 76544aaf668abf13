import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.evidence.placing import (
    LEVEL,
    Groups,
    Known,
    Place,
    choose_by_loss,
    compare_one,
    keep_groups,
    learn_groups,
    no_groups,
    place,
    place_in,
    recheck,
)
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


def test_groups_keep_their_numbers_and_odd_clients_are_in_none():
    answers = {"conditional": make(4, [0, 0, 0, 1, 1, 1, 2], apart=2.0)}
    labels = torch.tensor([5, 5, 5, 9, 9, 9, -1])
    known = learn_groups(answers, labels, by_shares=False)
    assert known.number.tolist() == [5, 9]
    assert known.losses.members.tolist() == [3.0, 3.0]
    assert len(known.shares.mean) == 0
    found = place_in(answers, known)
    assert known.number[found.group[:6]].tolist() == [5, 5, 5, 9, 9, 9]
    assert not found.fits[6]
    assert learn_groups(answers, torch.full((7,), -1), False).number.tolist() == []


def test_both_losses_and_shares_must_fit():
    # Losses of one kind, shares of two.
    losses = make(5, [0] * 12 + [3], apart=3.0)
    shares = make(6, [0] * 6 + [1] * 6 + [0], classes=1, apart=2.0)
    labels = torch.tensor([0] * 6 + [1] * 6 + [-1])
    known = learn_groups({"conditional": losses, "shares": shares}, labels, by_shares=True)
    found = place_in({"conditional": losses, "shares": shares}, known)
    assert found.group[:12].tolist() == labels[:12].tolist()
    assert found.fits.tolist() == [True] * 12 + [False]  # its shares fit, its losses do not
    alone = learn_groups({"conditional": losses, "shares": shares}, labels, by_shares=False)
    p = place(losses, alone.losses).p, place(shares, known.shares).p
    assert torch.allclose(found.p, (2 * torch.minimum(*p)).clamp(max=1))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6))
def test_one_group_for_each_client_is_what_placing_says(seed):
    answers = {"joint": make(seed, [*GROUPS.tolist(), 0, 1, 2], classes=1)}
    labels = torch.tensor([*GROUPS.tolist(), -1, -1, -1])
    known = learn_groups(answers, labels, by_shares=False)
    group = torch.randint(2, (19,), generator=torch.Generator().manual_seed(seed))
    one = compare_one(answers, known, group)
    assert torch.allclose(one, place_in(answers, known).p[torch.arange(19), group])


def test_rows_of_the_same_client_are_like_its_former_ones():
    # Every client has its own rule; rows 0 to 9 and 10 to 19 are of the same clients.
    wrong = 0
    for seed in range(20):
        kinds = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:10].tolist()
        both = make(seed, [*kinds, *kinds], apart=1.0)
        former, later = pick(both, range(10)), pick(both, range(10, 20))
        known = learn_groups({"conditional": former}, torch.arange(10), by_shares=False)
        same = compare_one({"conditional": later}, known, torch.arange(10))
        other = compare_one({"conditional": later}, known, torch.arange(10).roll(1))
        wrong += int((same < 0.05).sum())
        assert float(other.max()) < 0.05
    assert wrong <= 0.09 * 200  # 5 % are expected, 9 % are two standard errors more


def test_the_models_of_groups_choose_among_those_that_fit():
    p = torch.tensor([[0.9, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.3, 0.2]])
    found = Place(torch.tensor([0, 2, 1]), torch.tensor([0.1, 0.2, 0.3]), p.double())
    loss = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 4.0, 1.0]])
    chosen = choose_by_loss(found, loss)
    assert chosen.group.tolist() == [1, 2, 2]
    assert chosen.margin.tolist() == pytest.approx([0.5, 0.2, 0.6])
    assert torch.equal(chosen.p, found.p)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_losses_never_choose_a_group_that_does_not_fit(seed, k):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(8, k, generator=g, dtype=torch.float64) ** 6
    found = Place(p.argmax(1), torch.rand(8, generator=g), p)
    chosen = choose_by_loss(found, torch.rand(8, k, generator=g))
    fits = (p > LEVEL).any(1)
    assert bool((chosen.p.gather(1, chosen.group[:, None])[fits] > LEVEL).all())
    assert torch.equal(chosen.group[~fits], found.group[~fits])
    assert bool(((chosen.margin >= 0) & (chosen.margin <= 1)).all())


def test_a_change_is_a_difference_from_the_group_and_from_before():
    p = torch.tensor([[1e-9, 0.5]]).repeat(5, 1).double()
    found = Place(torch.ones(5).long(), torch.ones(5), p)
    labels = torch.tensor([0, 0, 0, -1, -1])
    same = torch.tensor([1e-9, 0.4, torch.nan, 1e-9, 0.4])
    assert recheck(found, labels, same) == ["moved", "stays", "moved", "moved", "stays"]
    assert recheck(found, labels) == ["moved"] * 3 + ["new"] * 2


def test_nothing_is_known_before_there_are_groups():
    known = no_groups()
    assert isinstance(known, Known)
    assert len(known.number) == len(known.losses.mean) == len(known.shares.mean) == 0
