from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.algorithms import groups
from coterie.clustering.evidence import REFUSAL
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.core.random import seed_key
from coterie.core.tree import take
from coterie.engines import Simulation
from coterie.models import MLP, Linear, LinearRegressor


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
        dealt = groups.random_groups(fed, fed.everyone(), 4)
        assert dealt.unique().tolist() == [0, 1, 2, 3]


def test_random_groups_of_few_clients_are_all_different(crowd):
    fed = crowd(6)
    dealt = groups.random_groups(fed, torch.tensor([1, 4, 5]), 4)
    assert len(dealt.unique()) == 3


def test_random_groups_follow_the_names_not_the_numbers(crowd):
    names = [f"n{i}" for i in range(9)]
    dealt = groups.random_groups(crowd(9, names=names), torch.arange(9), 3)
    turned = groups.random_groups(crowd(9, names=names[::-1]), torch.arange(9), 3)
    assert torch.equal(dealt, turned.flip(0))


def test_random_groups_beyond_the_first_are_spread_evenly(crowd):
    fed = crowd(3000)
    count = torch.bincount(groups.random_groups(fed, fed.everyone(), 3))
    assert (count - 1000).abs().max() < 130  # five deviations: 5 sqrt(3000 * 2 / 9)


def test_equal_groups_have_equal_sizes_and_stay(crowd):
    fed = crowd(11)
    whole = groups.equal_groups(fed, fed.everyone(), 3)
    assert torch.bincount(whole).tolist() == [4, 4, 3]
    fed.begin(7)
    some = torch.tensor([9, 2, 5])
    assert torch.equal(groups.equal_groups(fed, some, 3), whole[some])


class History(NamedTuple):
    """The part of a state that stability reads."""

    assignment: Tensor
    repeats: Tensor
    stable: Tensor


def history(assignment, repeats, stable=False):
    return History(torch.tensor(assignment), torch.tensor(repeats), torch.tensor(stable))


def until(stable_after, fraction=1.0):
    return SimpleNamespace(stable_after=stable_after, stable_fraction=fraction)


def test_equal_entries_in_a_row_are_counted_by_client():
    # Last groups 0, 1, none, 2; now 0, 2 and 2 for the first three.
    old = history([0, 1, -1, 2], [4, 4, 0, 7])
    new = groups.noted(old, torch.arange(3), torch.tensor([0, 2, 2]))
    assert new.assignment.tolist() == [0, 2, 2, 2]
    assert new.repeats.tolist() == [5, 1, 1, 7]


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
    one, state = torch.zeros(1, dtype=torch.int64), history([-1], [0])
    for group in entries:
        state = groups.noted(state, one, one + group)
    assert bool(groups.settled(until(3), state, one)) is stable


def test_a_share_of_the_cohort_may_be_enough():
    state, cohort = history([0, 0, 0, -1], [3, 3, 1, 0]), torch.tensor([0, 1, 2])
    assert not groups.settled(until(3), state, cohort)
    assert groups.settled(until(3, 2 / 3), state, cohort)
    assert not groups.settled(until(None, 0.1), state, cohort)
    assert not groups.settled(until(3, 0.1), state, cohort[:0])


def test_stability_stays_once_reached():
    state = history([0], [1], stable=True)
    assert groups.settled(until(3), state, torch.tensor([0]))


def test_evidence_comes_in_the_order_asked_and_does_not_judge_the_silent():
    asked, heard = torch.tensor([5, 0, 3, 1]), torch.tensor([5, 3])
    state = history([2, -1, -1, 1, -1, -1], [0] * 6)
    margin, score = torch.tensor([0.5, 0.25]), torch.tensor([2 * REFUSAL, 1.0])
    state, found = groups.judged(state, asked, heard, torch.tensor([0, 0]), margin, score)
    assert found.group.tolist() == [0, 2, 1, -1]  # client 3 keeps its group
    assert state.assignment.tolist() == [2, -1, -1, 1, -1, 0]
    assert found.margin.nan_to_num(-9).tolist() == [0.5, -9, 0.25, -9]
    assert found.score.nan_to_num(-9).tolist() == [3.0, -9, 1.0, -9]
    assert found.fits.tolist() == [False, True, True, True]


def test_no_evidence_leaves_groups_as_they_were():
    found = groups.no_evidence(torch.tensor([2, 0]), torch.tensor([4, 5, -1]))
    assert found.group.tolist() == [-1, 4]
    assert found.margin.isnan().all()
    assert found.fits.all()


def test_those_without_a_group_are_found_in_the_order_given():
    assignment = torch.tensor([0, -1, 2, -1])
    assert groups.unplaced(assignment, torch.tensor([3, 2, 1])).tolist() == [3, 1]


def test_whole_models_repeat_the_shared_part_without_copying():
    shared, models = {"a": torch.ones(3)}, {"b": torch.ones(2, 5)}
    whole = groups.bank(shared, models)
    assert whole["a"].shape == (2, 3)
    assert whole["a"].data_ptr() == shared["a"].data_ptr()
    assert take(whole, torch.tensor(1))["b"].shape == (5,)


def test_first_models_are_drawn_apart_or_copied_and_share_one_body():
    model = Model(MLP(4, 2, hidden=(3,)), head="output")
    shared, apart = groups.first_models(model, seed_key(0), 3, same=False)
    assert shared.keys() == {"body.0.weight", "body.0.bias"}
    assert shared["body.0.weight"].shape == (3, 4)
    assert len(apart["output.weight"].unique(dim=0)) == 3
    _, copies = groups.first_models(model, seed_key(0), 3, same=True)
    assert len(copies["output.weight"].unique(dim=0)) == 1
    assert torch.equal(copies["output.weight"][0], apart["output.weight"][0])


def test_an_orthonormal_bank_has_as_many_models_as_inputs():
    models = Model(LinearRegressor(7), "squared_error").init_many(seed_key(1), 2)
    weight = groups.orthonormal(models, seed_key(1))["weight"]
    torch.testing.assert_close(weight @ weight.T, torch.eye(7), rtol=0, atol=1e-6)
    row = Model(Linear(7, 1, bias=False), "squared_error").init_many(seed_key(1), 2)
    assert groups.orthonormal(row, seed_key(1))["output.weight"].shape == (7, 1, 7)
    with pytest.raises(ConfigError, match="needs a linear model"):
        groups.orthonormal(Model(Linear(7, 1)).init_many(seed_key(1), 2), seed_key(1))


@pytest.mark.parametrize(
    ("divisor", "models", "shared"),
    [
        # Mean gradients 8 and 4 of groups with 3 and 1 of 4 who answered, 8 clients in all; rate 1.
        ("cluster", [-8.0, -4.0, 0.0], -6.0),
        ("participants", [-6.0, -1.0, 0.0], -6.0),
        ("all", [-3.0, -0.5, 0.0], -3.0),
    ],
)
def test_a_gradient_step_by_each_divisor(crowd, divisor, models, shared):
    method = SimpleNamespace(averaging="gradient", local=LocalSGD(learning_rate=1.0))
    state = SimpleNamespace(shared={"a": torch.zeros(1)}, models={"b": torch.zeros(3, 1)})
    reply = {"shared": {"a": torch.tensor([6.0])}, "models": {"b": torch.tensor([[8.0], [4], [0]])}}
    group = torch.tensor([0, 0, 1, 0])
    new_shared, new_models = groups.moved(method, crowd(8), state, reply, group, divisor)
    assert new_models["b"].flatten().tolist() == models
    assert new_shared["a"].tolist() == [shared]
