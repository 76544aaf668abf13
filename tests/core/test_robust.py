"""Robust means against worked examples, NumPy and ByzFL."""

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.aggregate import HeldMean, Mean, RunningMean
from coterie.core.policy import Policy
from coterie.core.random import normal, seed_key, shuffled
from coterie.core.robust import combine, count_liars
from coterie.core.tree import take

RULES = ["clipped", "trimmed", "median", "geometric_median", "krum", "centred_clipping"]


def one(x, rule, liars=0.2, radius=None, around=None, weight=None):
    """The rule on rows of a matrix."""
    x = torch.as_tensor(x, dtype=torch.float64)
    around = torch.zeros(x.shape[1], dtype=torch.float64) if around is None else around
    weight = torch.ones(len(x)) if weight is None else torch.as_tensor(weight)
    return combine([x], [around], weight, rule, liars, radius)[0]


def byzfl():
    """ByzFL's aggregators alone: the package also imports torchvision, which needs another torch.

    `make` installs it without its dependencies.
    """
    if "byzfl" not in sys.modules:
        found = find_spec("byzfl")
        if found is None or found.origin is None:
            pytest.skip("ByzFL is not installed: pip install --no-deps byzfl")
        package = types.ModuleType("byzfl")
        package.__path__ = [str(Path(found.origin).parent)]
        sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators.aggregators")


def points(seed, m=11, d=7, far=2):
    """Replies around a centre, of which some are far away."""
    x = normal(seed_key(seed), (m, d), torch.float64) + 3
    x[:far] *= -20
    return x


@pytest.mark.parametrize("seed", range(5))
def test_the_rules_are_those_of_byzfl(seed):
    library = byzfl()
    for m, f in ((11, 2), (10, 3), (5, 1)):
        x = points(seed, m, far=f)
        as_array, share = x.numpy(), f / m
        pairs = {
            "median": library.Median()(as_array),
            "trimmed": library.TrMean(f)(as_array),
            "krum": library.Krum(f)(as_array),
            "geometric_median": library.GeometricMedian(1e-9, 2000)(as_array),
        }
        for rule, expected in pairs.items():
            # ByzFL's Weiszfeld steps are still under way, the others are exact.
            close = 1e-6 if rule == "geometric_median" else 1e-9
            torch.testing.assert_close(
                one(x, rule, share), torch.as_tensor(expected), rtol=close, atol=close
            )
        clipping = library.CenteredClipping(L=10, tau=2.5)(as_array)
        torch.testing.assert_close(
            one(x, "centred_clipping", share, radius=2.5), torch.as_tensor(clipping)
        )


@pytest.mark.parametrize("seed", range(5))
def test_median_and_trimmed_mean_are_those_of_numpy(seed):
    x = points(seed, 10)
    np.testing.assert_allclose(one(x, "median"), np.median(x.numpy(), 0), rtol=1e-12)
    middle = np.sort(x.numpy(), 0)[2:-2].mean(0)
    np.testing.assert_allclose(one(x, "trimmed", 0.2), middle, rtol=1e-12)


def test_worked_examples():
    x = [[0.0], [1.0], [2.0], [3.0], [100.0]]
    assert one(x, "median").item() == 2.0
    assert one(x, "trimmed", 0.2).item() == 2.0  # of 1, 2, 3
    # Neighbours of 1: 0, 2, 3 at 1, 1, 4; of 2: 1, 3, 0 at 1, 1, 4. The first wins the tie.
    assert one(x, "krum", 0.2).item() == 1.0
    assert one(x, "geometric_median").item() == pytest.approx(2.0, abs=1e-6)
    # Median length 2: 0, 1, 2, 2, 2.
    assert one(x, "clipped").item() == pytest.approx(1.4)
    assert one(x, "clipped", radius=3.0).item() == pytest.approx(9 / 5)


def test_weights_count():
    x = [[0.0], [1.0], [2.0]]
    assert one(x, "median", weight=[5.0, 1.0, 1.0]).item() == 0.0
    assert one(x, "median", weight=[1.0, 1.0, 2.0]).item() == 1.5  # half below 2, half above 1
    assert one(x, "clipped", radius=9.0, weight=[1.0, 0.0, 3.0]).item() == 1.5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_a_minority_cannot_move_the_result_far(rule, size):
    # All honest replies lie within 1 of (3, ..., 3).
    x = 3 + normal(seed_key(0), (10, 20), torch.float64).clamp(-1, 1)
    lied = x.clone()
    lied[:3] = -size
    around = torch.full((20,), 3.0, dtype=torch.float64)
    result = one(lied, rule, 0.3, around=around)
    assert (result - 3).abs().max() < 2.5
    assert (one(lied, "clipped", radius=torch.inf, around=around) + size * 0.3).abs().max() < size


@pytest.mark.parametrize("rule", RULES)
def test_order_and_chunks_do_not_matter(rule):
    bank = {"w": normal(seed_key(1), (2, 3)), "c": torch.tensor([5, 6])}
    group = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1])
    reply = {
        "p": {"w": normal(seed_key(2), (8, 3)), "c": torch.arange(8)},
        "n": torch.tensor([3, 9, 4, 5, 6, 7, 2, 1]),
    }
    mean = Mean("p", bank, by=group, weight="n")

    def run(order, chunk):
        held = Policy(mean=rule).average(mean, "M.update")
        for part in order.split(chunk):
            held.add(take(reply, part), part)
        return held.result()

    first = run(torch.arange(8), 8)
    for chunk in (1, 3):
        again = run(shuffled(seed_key(3), 8), chunk)
        assert torch.equal(first["w"], again["w"])
    assert first["c"].tolist() == [2, 4]  # the middle ones, the lower of two


@pytest.mark.parametrize("rule", RULES)
def test_parts_of_several_processes_are_merged(rule):
    reply = {"w": normal(seed_key(2), (7, 3)), "n": torch.arange(1, 8)}
    mean = Mean("w", torch.zeros(3), weight="n")
    whole = Policy(mean=rule).average(mean, "M.update")
    whole.add(reply, torch.arange(7))
    total = Policy(mean=rule).average(mean, "M.update")
    for part in (torch.tensor([4, 5, 6]), torch.tensor([0, 1, 2, 3])):
        shard = Policy(mean=rule).average(mean, "M.update")
        shard.add(take(reply, part), torch.arange(len(part)))
        total.merge(shard, part)
    assert torch.equal(total.result(), whole.result())


def test_a_radius_is_folded_and_gives_what_holding_gives():
    reply = {"w": 5 * normal(seed_key(2), (7, 3)), "group": torch.tensor([0, 1, 0, 1, 1, 0, 0])}
    mean = Mean("w", torch.ones(2, 3), by="group")
    policy = Policy(mean="clipped", radius=2.0)
    folded = policy.average(mean, "M.update")
    assert isinstance(folded, RunningMean)
    held = HeldMean(mean, "M.update", "clipped", 0.3, radius=2.0)
    for average in (folded, held):
        average.add(reply, torch.arange(7))
    torch.testing.assert_close(folded.result(), held.result())


def test_slots_are_combined_row_by_row():
    reply = {
        "w": torch.tensor([[1.0, 9.0], [2.0, 0.0], [3.0, 0.0], [90.0, 0.0]]),
        "k": torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]),
    }
    mean = Mean("w", torch.tensor([0.0, 0.0]), weight="k", slots=True)
    held = Policy(mean="median").average(mean, "M.update")
    held.add(reply, torch.arange(4))
    assert held.result().tolist() == [2.5, 9.0]  # a single member is taken as it is


def test_two_members_are_too_few_and_it_is_said():
    mean = Mean("w", torch.zeros(2, 1), by=torch.tensor([0, 0, 1, 1, 1]))
    held = Policy(mean="median").average(mean, "M.update")
    held.add({"w": torch.tensor([[1.0], [3.0], [1.0], [2.0], [9.0]])}, torch.arange(5))
    with pytest.warns(UserWarning, match=r"'median' needs 3 replies.* of group 0 .*plain mean"):
        assert held.result()[:, 0].tolist() == [2.0, 2.0]


def test_nobody_counts_more_than_the_cap():
    mean = Mean("w", torch.tensor(0.0), weight="n")
    reply = {"w": torch.tensor([0.0, 9.0]), "n": torch.tensor([10, 10_000])}
    plain = Policy(cap=20).average(mean, "M.update")
    plain.add(reply, torch.arange(2))
    assert plain.result().item() == 6.0  # 9 * 20 / 30


def test_the_number_of_liars_is_below_half():
    assert [count_liars(0.49, m) for m in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]
