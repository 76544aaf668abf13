import warnings

import pytest
import torch

from coterie.core.aggregate import Mean, RunningMean
from coterie.core.errors import TaskError
from coterie.core.random import normal, seed_key, shuffled
from coterie.core.tree import leaves, take


def reduced(mean, reply, order=None, chunk=100):
    """Fold replies in, some at a time and in some order."""
    order = torch.arange(len(leaves(reply)[0])) if order is None else order
    sums = RunningMean(mean, "M.update")
    for part in order.split(chunk):
        sums.add(take(reply, part), part)
    return sums.result()


def test_a_plain_mean_counts_everybody_alike():
    # Two different updates: neither counts alone.
    assert reduced(Mean("w", torch.tensor(0.0)), {"w": torch.tensor([1.0, 4.0])}).item() == 2.5


def test_weights_weigh():
    # (1 * 1 + 3 * 5) / 4
    reply = {"w": torch.tensor([1.0, 5.0]), "n": torch.tensor([1, 3])}
    assert reduced(Mean("w", torch.tensor(0.0), weight="n"), reply).item() == 4.0


@pytest.mark.parametrize("by", ["group", torch.tensor([0, 2, 0, 2])])
def test_groups_are_averaged_apart_and_an_empty_one_keeps_its_row(by):
    around = torch.tensor([[0.0], [0.1], [0.0]])
    reply = {"w": torch.tensor([[1.0], [10.0], [3.0], [20.0]]), "group": torch.tensor([0, 2, 0, 2])}
    mean = reduced(Mean("w", around, by=by), reply)
    assert mean[:, 0].tolist() == [2.0, around[1, 0].item(), 15.0]  # 0.1 bit for bit


def test_members_without_weight_leave_the_model_as_it_was():
    around = torch.tensor(0.1)
    reply = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([0, 0])}
    assert torch.equal(reduced(Mean("w", around, weight="n"), reply), around)


def test_a_single_member_is_taken_exactly():
    value = normal(seed_key(0), (1, 50))
    reply = {"w": value, "n": torch.tensor([7])}
    assert torch.equal(reduced(Mean("w", torch.zeros(50), weight="n"), reply), value[0])


def test_slots_have_a_value_and_a_weight_per_row():
    # Row 0: only client 0. Row 1: (1 * 2 + 3 * 6) / 4 = 5. Row 2: nobody.
    reply = {
        "w": torch.tensor([[1.0, 2.0, 0.0], [9.0, 6.0, 0.0]]),
        "weight": torch.tensor([[5.0, 1.0, 0.0], [0.0, 3.0, 0.0]]),
    }
    mean = Mean("w", torch.tensor([0.0, 0.0, 0.7]), weight="weight", slots=True)
    for chunk in (1, 2):
        result = reduced(mean, reply, chunk=chunk)
        assert result.tolist() == [1.0, 5.0, torch.tensor(0.7).item()]


def test_slots_with_one_weight_per_client():
    reply = {"w": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "n": torch.tensor([1, 3])}
    mean = Mean("w", torch.zeros(2), weight="n", slots=True)
    assert reduced(mean, reply).tolist() == [2.5, 5.0]


def test_neither_chunks_nor_order_change_a_bit():
    m = 97
    values = normal(seed_key(1), (m, 40)) * 10.0 ** (torch.arange(m) % 7 - 3)[:, None]
    reply = {"w": values, "n": torch.arange(m) % 13 + 1, "group": torch.arange(m) % 3}
    mean = Mean("w", torch.zeros(3, 40), by="group", weight="n")
    whole = reduced(mean, reply)
    for chunk in (1, 3, 8):
        for seed in range(3):
            assert torch.equal(reduced(mean, reply, shuffled(seed_key(seed), m), chunk), whole)


def test_the_mean_of_equal_models_is_that_model():
    value = normal(seed_key(2), (30,))
    reply = {"w": value.expand(11, 30), "n": torch.arange(11) + 1}
    assert torch.equal(reduced(Mean("w", torch.zeros(30), weight="n"), reply), value)


def test_the_type_of_the_models_is_kept():
    for dtype in (torch.float16, torch.float32, torch.float64):
        reply = {"w": torch.tensor([1.0, 2.0], dtype=dtype)}
        assert reduced(Mean("w", torch.tensor(0.0, dtype=dtype)), reply).dtype == dtype


def test_large_half_precision_updates_are_no_broken_ones():
    # Their sum leaves the range of float16, the values do not.
    reply = {"w": torch.full((1, 10), 6e4, dtype=torch.float16)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduced(Mean("w", torch.zeros(10, dtype=torch.float16)), reply)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_reply_is_left_out_with_a_warning(broken):
    reply = {"w": torch.tensor([[1.0, 1.0], [1.0, broken], [3.0, 3.0]])}
    with pytest.warns(UserWarning, match=r"M.update: 1 replies were not finite .* mean of 'w'"):
        mean = reduced(Mean("w", torch.zeros(2)), reply)
    assert mean.tolist() == [2.0, 2.0]


def test_a_broken_weight_leaves_its_reply_out():
    reply = {"w": torch.tensor([1.0, 3.0]), "n": torch.tensor([torch.nan, 1.0])}
    with pytest.warns(UserWarning, match=r"not finite"):
        assert reduced(Mean("w", torch.tensor(0.0), weight="n"), reply).item() == 3.0


@pytest.mark.parametrize("slots", [False, True])
def test_only_broken_replies_leave_the_model_as_it_was(slots):
    reply = {"w": torch.full((2, 3), torch.nan), "c": torch.ones(2, 3, dtype=torch.int64)}
    around = torch.tensor([0.1, 0.2, 0.3])
    with pytest.warns(UserWarning, match=r"2 replies"):
        assert torch.equal(reduced(Mean("w", around, slots=slots), reply), around)


def test_a_broken_member_does_not_shift_the_groups_of_the_others():
    reply = {"w": torch.tensor([torch.nan, 5.0, 7.0]), "group": torch.tensor([0, 1, 0])}
    for by in ("group", torch.tensor([0, 1, 0])):
        with pytest.warns(UserWarning, match=r"1 replies"):
            assert reduced(Mean("w", torch.zeros(2), by=by), reply).tolist() == [7.0, 5.0]


# Counters


COUNTERS = {
    "a": torch.tensor([5, 6, 7, 8]),
    "w": torch.ones(4),
    "b": torch.tensor([50, 60, 70, 80]),
}
ZEROS = {"a": torch.tensor(0), "w": torch.tensor(0.0), "b": torch.tensor(0)}


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_integers_are_the_first_contributors(chunk, order):
    # The first one asked has no weight, so the second one counts; every counter of it.
    reply = {"p": COUNTERS, "n": torch.tensor([0, 1, 1, 1])}
    mean = reduced(Mean("p", ZEROS, weight="n"), reply, torch.tensor(order), chunk)
    assert (mean["a"].item(), mean["b"].item()) == (6, 60)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_integers_by_group(chunk):
    reply = {"p": COUNTERS, "g": torch.tensor([2, 0, 0, 2])}
    around = {name: torch.stack([leaf + 1] * 3) for name, leaf in ZEROS.items()}
    mean = reduced(Mean("p", around, by="g"), reply, torch.tensor([3, 2, 1, 0]), chunk)
    assert mean["a"].tolist() == [6, 1, 5]  # nobody in group 1
    assert mean["b"].tolist() == [60, 1, 50]


@pytest.mark.parametrize("chunk", [1, 2])
def test_integers_in_slots_are_those_of_the_first_with_weight_for_the_row(chunk):
    reply = {
        "p": {"c": torch.tensor([[1, 2, 3], [10, 20, 30]])},
        "weight": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
    }
    around = {"c": torch.tensor([7, 7, 7])}
    mean = reduced(Mean("p", around, weight="weight", slots=True), reply, chunk=chunk)
    assert mean["c"].tolist() == [1, 20, 7]


def test_an_empty_tree_averages_to_itself():
    sums = RunningMean(Mean("p", {}, weight="n"), "M.update")
    sums.add({"p": {}, "n": torch.ones(2)}, torch.arange(2))
    assert sums.result() == {}


def test_a_missing_leaf_is_named():
    with pytest.raises(TaskError, match=r"M.update: Mean needs 'm' in the reply. Got: w, n."):
        reduced(Mean("w", torch.tensor(0.0), weight="m"), {"w": torch.ones(1), "n": torch.ones(1)})


def test_merged_sums_give_the_mean_of_all() -> None:
    around = {"w": torch.zeros(2, 3), "steps": torch.zeros(2, dtype=torch.int64)}
    mean = Mean("w", around, by="group", weight="n")
    replies = {
        "w": {"w": torch.arange(12.0).reshape(4, 3), "steps": torch.tensor([7, 8, 9, 10])},
        "group": torch.tensor([0, 1, 0, 1]),
        "n": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    whole, total = RunningMean(mean, "all"), RunningMean(mean, "all")
    whole.add(replies, torch.arange(4))
    for part in (torch.tensor([2, 3]), torch.tensor([0, 1])):  # the later clients come first
        some = RunningMean(mean, "some")
        some.add(take(replies, part), torch.arange(2))
        total.merge(some, part)
    ours, theirs = whole.result(), total.result()
    assert torch.equal(ours["w"], theirs["w"])
    assert theirs["steps"].tolist() == [7, 8]  # of the first contributor


def test_a_mean_of_nothing_can_be_clipped():
    sums = RunningMean(Mean("shared", {}), "M.update", radius=1.0)
    sums.add({"shared": {}}, torch.arange(2))
    assert sums.result() == {}
