import pytest
import torch

from coterie.algorithms import common
from coterie.algorithms.finite import find_finite
from coterie.core import Model
from coterie.core.errors import ConfigError
from coterie.core.random import seed_key
from coterie.core.tree import take
from coterie.engines import Simulation
from coterie.models import MLP

NOT_YET = torch.tensor(False)


@pytest.fixture
def crowd(points):
    def make(m, seed=0, names=None):
        fed = Simulation(points(*[[0.0]] * m, names=names), seed=seed)
        fed.begin(0)
        return fed

    return make


@pytest.mark.parametrize("m", [4, 5, 13])
def test_random_groups_leave_no_group_empty(crowd, m):
    for seed in range(20):
        fed = crowd(m, seed)
        dealt = common.assign_at_random(fed, fed.everyone(), 4)
        assert dealt.unique().tolist() == [0, 1, 2, 3]


def test_random_groups_of_few_clients_are_all_different(crowd):
    fed = crowd(6)
    dealt = common.assign_at_random(fed, torch.tensor([1, 4, 5]), 4)
    assert len(dealt.unique()) == 3


def test_random_groups_follow_the_names_not_the_numbers(crowd):
    names = [f"n{i}" for i in range(9)]
    dealt = common.assign_at_random(crowd(9, names=names), torch.arange(9), 3)
    turned = common.assign_at_random(crowd(9, names=names[::-1]), torch.arange(9), 3)
    assert torch.equal(dealt, turned.flip(0))


def test_random_groups_beyond_the_first_are_spread_evenly(crowd):
    fed = crowd(3000)
    count = torch.bincount(common.assign_at_random(fed, fed.everyone(), 3))
    assert (count - 1000).abs().max() < 130  # five deviations: 5 sqrt(3000 * 2 / 9)


def test_equal_entries_in_a_row_are_counted_by_client():
    # Last groups 0, 1, none, 2; now 0, 2 and 2 for the first three.
    old = torch.tensor([0, 1, -1, 2]), torch.tensor([4, 4, 0, 7])
    assignment, repeats = common.count_repeats(*old, torch.arange(3), torch.tensor([0, 2, 2]))
    assert assignment.tolist() == [0, 2, 2, 2]
    assert repeats.tolist() == [5, 1, 1, 7]


def test_random_groups_do_not_count_as_entries():
    old = torch.tensor([-1, 1]), torch.tensor([0, 0])
    assignment, repeats = common.count_repeats(*old, torch.arange(2), torch.tensor([0, 1]), False)
    assert assignment.tolist() == [0, 1]
    assert repeats.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("entries", "stable"),
    [
        ([0, 1, 0], False),  # the ends agree; the authors' code took that for stable
        ([0, 0, 0], True),
        ([1, 0, 0, 0], True),
        ([0, 0], False),
        ([0, 0, 0, 1], False),
    ],
)
def test_stable_means_the_last_three_entries_are_all_equal(entries, stable):
    one = torch.zeros(1, dtype=torch.int64)
    assignment, repeats = one - 1, one
    for group in entries:
        assignment, repeats = common.count_repeats(assignment, repeats, one, one + group)
    assert bool(common.is_stable(NOT_YET, repeats, one, 3)) is stable


def test_every_participant_must_be_stable():
    repeats = torch.tensor([3, 3, 1, 0])
    assert common.is_stable(NOT_YET, repeats, torch.tensor([0, 1]), 3)
    assert not common.is_stable(NOT_YET, repeats, torch.tensor([0, 1, 2]), 3)
    assert not common.is_stable(NOT_YET, repeats, torch.tensor([0]), None)
    assert not common.is_stable(NOT_YET, repeats, torch.tensor([0]), 0)
    assert not common.is_stable(NOT_YET, repeats, torch.arange(0), 3)


def test_stability_stays_once_reached():
    assert common.is_stable(torch.tensor(True), torch.tensor([1]), torch.tensor([0]), 3)


def test_evidence_comes_in_the_order_asked_and_does_not_judge_the_silent():
    asked, heard = torch.tensor([5, 0, 3, 1]), torch.tensor([5, 3])
    old, nearest = torch.tensor([2, -1, -1, 1, -1, -1]), torch.tensor([0, 0])
    margin, score = torch.tensor([0.5, 0.25]), torch.tensor([3.0, 1.0])
    new, found = common.place_clients(old, asked, heard, nearest, margin, score, refusal=1.5)
    assert found.group.tolist() == [0, 2, 1, -1]  # client 3 keeps its group
    assert new.tolist() == [2, -1, -1, 1, -1, 0]
    assert found.margin.nan_to_num(-9).tolist() == [0.5, -9, 0.25, -9]
    assert found.score.nan_to_num(-9).tolist() == [3.0, -9, 1.0, -9]
    assert found.fits.tolist() == [False, True, True, True]


def test_whole_models_repeat_the_shared_part_without_copying():
    shared, models = {"a": torch.ones(3)}, {"b": torch.ones(2, 5)}
    whole = common.whole_models(shared, models)
    assert whole["a"].shape == (2, 3)
    assert whole["a"].data_ptr() == shared["a"].data_ptr()
    assert take(whole, torch.tensor(1))["b"].shape == (5,)


def test_first_models_are_drawn_apart_or_copied_and_share_one_body():
    model = Model(MLP(4, 2, hidden=(3,)), head="output")
    shared, apart = common.draw_models(model, seed_key(0), 3, same=False)
    assert shared.keys() == {"body.0.weight", "body.0.bias"}
    assert shared["body.0.weight"].shape == (3, 4)
    assert len(apart["output.weight"].unique(dim=0)) == 3
    _, copies = common.draw_models(model, seed_key(0), 3, same=True)
    assert len(copies["output.weight"].unique(dim=0)) == 1
    assert torch.equal(copies["output.weight"][0], apart["output.weight"][0])


def test_the_nearest_group_and_its_margin():
    cost = torch.tensor([[1.0, 3.0, 2.0], [2.0, 2.0, torch.inf], [torch.inf, 4.0, torch.inf]])
    nearest, margin = common.choose_nearest(cost)
    assert nearest.tolist() == [0, 0, 1]
    torch.testing.assert_close(margin, torch.tensor([1 / 3, 0.0, 1.0], dtype=torch.float64))
    assert common.choose_nearest(cost[:, :1])[1].tolist() == [1.0, 1.0, 0.0]
    assert common.choose_nearest(cost[:0])[0].tolist() == []


def test_given_groups_and_others(crowd):
    fed, ids, own = crowd(4), torch.tensor([3, 1, 0]), torch.tensor([2, 2, 2])
    assert common.follow_start(fed, ids, own, 3).tolist() == [2, 2, 2]
    fed.start = torch.tensor([0, -1, 5, 1])
    assert common.follow_start(fed, ids, own, 3).tolist() == [1, 2, 0]
    with pytest.raises(ConfigError, match="groups must be 0 to 2, because there are 3 models"):
        common.follow_start(fed, torch.arange(4), own, 3)


def test_replies_that_are_not_finite_are_counted():
    values, table = torch.tensor([1.0, torch.inf, 2.0]), torch.tensor([[1.0, torch.nan]] * 3)
    with pytest.warns(UserWarning, match="M: 1 shares were not finite and were left out"):
        assert find_finite("M", "shares", values).tolist() == [True, False, True]
    with pytest.warns(UserWarning, match="M: 3 shares"):
        assert not find_finite("M", "shares", values, table).any()
    assert find_finite("M", "shares", values[:0], table[:0]).tolist() == []
