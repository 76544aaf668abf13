"""CFL worked out by hand on clients that hold numbers, where updates have cosine 1 or -1."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms import CFL
from coterie.algorithms.cfl import State, find_ways
from coterie.algorithms.vectors import cosines
from coterie.clustering.linkage import agglomerate
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.engines import Faults, Simulation
from coterie.models import LinearRegressor


def weights(state):
    return state.models["weight"].flatten().tolist()


def start_at(first, bank, method, fed, weight):
    return first(method, fed, models=bank(weight))


def test_a_division_by_hand(federate, points, scalar, half, bank, first, play):
    # From 5 half the way to 0, 0, 10, 10: updates -2.5, -2.5, 2.5, 2.5, mean 0 < 0.4, max > 1.6.
    # Both sides go on from 5 with the mean of their own updates.
    method, fed = CFL(scalar, half, min_rounds=0), federate(points([0], [10], [0], [10]))
    [after] = play(method, fed, start_at(first, bank, method, fed, 5), 1)
    group = after.state.assignment
    assert group[0] == group[2] != group[1] == group[3]
    by_group = torch.tensor(weights(after.state))[group]
    assert by_group.tolist() == [2.5, 7.5, 2.5, 7.5]
    assert after.state.tree.tolist() == [[0, 1]]
    assert after.state.ancestors["weight"].flatten().tolist() == [5]
    assert sorted(after.state.sides.flatten().tolist()) == [-1, 1]
    assert after.info["groups_used"] == 2
    assert after.info["participants"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"min_rounds": 1},
        {"min_size": 4},
        {"max_above": 2.5},
        {"thresholds": "relative", "mean_below": 0.1},
        {"noise": 1.0},  # sqrt((1 - -1) / 2) = 1 is not above the noise
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_condition_can_prevent_a_division(points, scalar, half, bank, first, play, options):
    # From 6: updates -3, -3, 2, 2; mean -0.5, which 0.6 allows and 0.1 of the largest does not.
    method = CFL(scalar, half, **{"min_rounds": 0, "mean_below": 0.6, **options})
    fed = Simulation(points([0], [0], [10], [10]))
    if "max_above" in options:  # from 5 the largest update is 2.5
        [after] = play(method, fed, start_at(first, bank, method, fed, 5), 1)
        assert weights(after.state) == [5]
        return
    [after] = play(method, fed, start_at(first, bank, method, fed, 6), 1)
    assert after.state.assignment.tolist() == [0] * 4
    assert weights(after.state) == [5.5]


def test_relative_thresholds_do_not_depend_on_the_scale(points, scalar, half, bank, first, play):
    for scale in (1e-3, 1.0, 1e3):
        method = CFL(scalar, half, 0.2, thresholds="relative", min_rounds=0)
        fed = Simulation(points([0], [0], [10 * scale], [10 * scale]))
        [after] = play(method, fed, start_at(first, bank, method, fed, 6 * scale), 1)
        assert len(after.state.tree) == 1  # 0.5 < 0.2 * 3


def test_nested_divisions_keep_the_ids_of_clients(federate, points, scalar, half, first, play):
    # Three levels, +-16 +-4 +-1, two clients each, in an order in which a position inside a
    # cluster is not a client's id. Public code loses the ids at the second level.
    values = [16 * a + 4 * b + c for a, b, c in itertools.product((1, -1), repeat=3)]
    order = [3, 11, 6, 0, 14, 9, 1, 12, 5, 8, 2, 15, 10, 7, 4, 13]
    fed = federate(points(*([values[i % 8]] for i in order)))
    method = CFL(scalar, half, 0.05, max_above=0.3, min_rounds=0)
    state = play(method, fed, first(method, fed), 40)[-1].state
    assert len(state.tree) == 7
    for i, j in itertools.combinations(range(16), 2):
        same = bool(state.assignment[i] == state.assignment[j])
        assert same == (order[i] % 8 == order[j] % 8)
    by_client = torch.tensor(weights(state))[state.assignment]
    expected = torch.tensor([values[i % 8] for i in order]).float()
    torch.testing.assert_close(by_client, expected, rtol=0, atol=1e-2)  # half the way each round


METHOD = CFL(
    Model(LinearRegressor(1), "squared_error"),
    LocalSGD(),
    1e9,
    thresholds="relative",
    min_rounds=0,
    min_size=1,
)


@settings(max_examples=2000)
@given(
    seed=st.integers(0, 2**31),
    n_clients=st.integers(1, 12),
    divisions=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), max_size=6),
    linkage=st.sampled_from(["single", "complete"]),
)
def test_a_random_tree_is_a_partition_of_the_clients(seed, n_clients, divisions, linkage):
    draw = torch.Generator().manual_seed(seed)
    method = METHOD if linkage == "single" else CFL(**vars(METHOD) | {"linkage": "complete"})
    bank = {"weight": torch.zeros(1, 1)}
    state = State(
        bank,
        torch.zeros(n_clients, dtype=torch.int64),
        torch.zeros(n_clients, dtype=torch.int64),
        torch.zeros(0, 2, dtype=torch.int64),
        {"weight": torch.zeros(0, 1)},
        torch.zeros(0, 2, 3, dtype=torch.float64),
    )
    for choice, absence in divisions:
        k = len(state.models["weight"])
        cluster = choice % k
        members = (state.assignment == cluster).nonzero().flatten()
        here = members[torch.rand(len(members), generator=draw) >= absence / 2]
        here = here[torch.randperm(len(here), generator=draw)]  # any order
        updates = torch.randn(len(here), 3, generator=draw, dtype=torch.float64)
        old, state = state, method.divide(state, cluster, here, updates)
        others = old.assignment != cluster
        assert torch.equal(state.assignment[others], old.assignment[others])
        if len(state.tree) == len(old.tree):
            assert len(here) <= 1
            assert torch.equal(state.assignment, old.assignment)
            continue
        sides = {c: set((state.assignment == c).nonzero().flatten().tolist()) for c in (cluster, k)}
        absent = set(members.tolist()) - set(here.tolist())
        assert sides[cluster]
        assert sides[k]
        assert sides[cluster] | sides[k] == set(here.tolist())
        assert all(state.assignment[i] == -1 for i in absent)
        assert all(state.waiting[i] == len(old.tree) for i in absent)
    k = len(state.tree) + 1
    assert len(state.models["weight"]) == k
    assert set(state.tree[:, 1].tolist()) == set(
        range(1, k)
    )  # every cluster but the root is new once
    assert int(state.assignment.max()) < k


@pytest.mark.parametrize("seed", range(20))
def test_single_linkage_is_the_best_of_all_cuts(seed):
    draw = torch.Generator().manual_seed(seed)
    updates = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    similarity = cosines(updates, updates)

    def across(second):
        return float(similarity[second][:, ~second].max())

    cuts = (torch.tensor([bool(n >> i & 1) for i in range(8)]) for n in range(1, 2**7))
    best = min(across(cut) for cut in cuts)
    found = agglomerate(1 - similarity, "single", k=2) == 1
    assert across(found) == pytest.approx(best, abs=1e-12)


def test_an_absent_member_is_placed_when_it_returns(points, scalar, half, bank, first, play, mute):
    # Client 3 is silent when 0, 10, 0, 10 are divided; from 5 its update is 2.5, as client 1's.
    method, fed = CFL(scalar, half, min_rounds=0, min_size=1), Simulation(points(*[[0], [10]] * 2))
    state = start_at(first, bank, method, fed, 5)
    state = state._replace(assignment=torch.zeros(4, dtype=torch.int64))
    mute(fed, [3])
    # Two at 0 and one at 10: from 10/3 the mean update is 0 and the largest 10/3.
    [after] = play(method, fed, state._replace(models=bank(10 / 3)), 1)
    assert after.state.assignment[3] == -1
    fed.faults = Faults()
    [later] = play(method, fed, after.state, 1, start=1)
    assert later.state.assignment[3] == later.state.assignment[1]


def test_a_newcomer_walks_down_the_tree(points, scalar, half, first, play):
    values = [[16 * a + 4 * b] for a in (1, -1) for b in (1, -1) for _ in range(2)]
    names = [f"client {i}" for i in range(10)]
    data = points(*values, [11.9], [-20.1], names=names)
    fed = Simulation(data, joins=[0] * 8 + [60] * 2)
    method = CFL(scalar, half, 0.05, max_above=0.3, min_rounds=0)
    state = play(method, fed, first(method, fed), 40)[-1].state
    assert len(state.tree) == 3
    [after] = play(method, fed, state, 1, start=60)
    assert after.state.assignment[8] == after.state.assignment[2]
    assert after.state.assignment[9] == after.state.assignment[7]


def test_the_way_up_the_tree():
    assert find_ways(torch.zeros(0, 2, dtype=torch.int64)).tolist() == [[0]]
    tree = torch.tensor([[0, 1], [0, 2], [1, 3]])
    assert find_ways(tree).tolist() == [[0, 5, 4, 0], [1, 6, 4, 1], [2, 5, 4, 2], [3, 6, 4, 3]]


@pytest.mark.parametrize("use", ["leaf", "best"])
def test_a_client_may_use_the_best_model_on_its_way(federate, points, scalar, half, use, bank):
    # The leaf is 2, the model at the division 5. Validation data at 5 prefer the ancestor.
    method = CFL(scalar, half, use=use)
    data = points([5.0] * 8, [2.0] * 8)
    held = data.hold_out(0.5, seed=0)
    tree, group = torch.tensor([[0, 1]]), torch.zeros(2, dtype=torch.int64)
    state = State(bank(2, 8), group, group, tree, bank(5), torch.zeros(1, 2, 1).double())
    given = method.deploy(state, torch.tensor([0, 1]))
    for source, best in ((held, [5, 2]), (data, [2, 2])):  # without validation data, the leaf
        fed = federate(source)
        fed.begin(0)
        _, reply = fed.map(method.personalise, given, to=torch.tensor([0, 1]))
        assert reply["weight"].flatten().tolist() == ([2, 2] if use == "leaf" else best)


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    method, fed = CFL(scalar, half), Simulation(points([0.0, 1.0], [3.0]))
    play(method, fed, first(method, fed), 1)
    assert down_up(fed, 0) == (4, 4)


@pytest.mark.parametrize(
    "wrong", [{"mean_below": 0.0}, {"noise": 2.0}, {"linkage": "ward"}, {"min_size": 0}]
)
def test_options_out_of_range_are_refused(scalar, half, wrong):
    with pytest.raises(ConfigError, match=f"CFL: {next(iter(wrong))} must be"):
        CFL(scalar, half, **wrong)
