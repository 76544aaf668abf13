import math

import numpy as np
import pytest
import torch

from coterie.clustering import noise
from coterie.clustering.hierarchical import ward_path
from coterie.clustering.noise import between, choose_by_noise, distances, pooled, weighted_ward


def drawn(m, d, seed=0):
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_ratio_by_hand():
    # -1.1, -.9, .9, 1.1: within one group 2 (1.21 + .81) = 4.04 over 3; within two 2 x .02 over 2;
    # the first merge of two at distance .2 leaves .02 over 1.
    tree = weighted_ward(torch.tensor([[-1.1], [-0.9], [0.9], [1.1]]), torch.ones(4, 1))
    assert tree.ratio[:3].tolist() == pytest.approx([4.04 / 3, 0.04 / 2, 0.02])
    assert tree.ratio[3].isnan()
    assert tree.labels(2).tolist() == [0, 0, 1, 1]
    assert tree.labels(1).tolist() == [0] * 4
    assert tree.labels(9).tolist() == [0, 1, 2, 3]


def test_the_first_cost_by_hand():
    # Weights 3 and 1 at 0 and 4: 3 x 1 / 4 x 16 = 12. A second column, where one is missing, adds
    # nothing, whatever stands there.
    x = torch.tensor([[0.0, 9.0], [4.0, -7.0]])
    tree = weighted_ward(x, torch.tensor([[3.0, 1.0], [1.0, 0.0]]))
    assert tree.cost.tolist() == [12.0]
    assert tree.ratio[0] == 12.0  # one column with two clients and one group


def test_equal_weights_are_wards_method():
    x = drawn(40, 5)
    tree = weighted_ward(x, torch.full((40, 5), 7.0))
    ks = [1, 2, 3, 7, 20, 39, 40]
    for k, labels in zip(ks, ward_path(x, ks), strict=True):
        assert torch.equal(tree.labels(k), labels)
    within = sum((x - x.mean(0)).square().sum(0))
    assert float(tree.cost.sum()) == pytest.approx(7 * float(within))


def test_costs_add_up_to_the_chi_square_within():
    x, weight = drawn(12, 4), torch.rand(12, 4, generator=torch.Generator().manual_seed(1)) * 9
    weight[2, 1] = weight[7, 3] = weight[7, 0] = 0
    tree = weighted_ward(x, weight)
    for k in (1, 3, 6):
        labels = tree.labels(k)
        means, total = pooled(x, weight, labels)
        chi = (weight * (x - means[labels]) ** 2).sum()
        free = (weight > 0).sum() - (total > 0).sum()
        assert float(tree.ratio[k - 1]) == pytest.approx(float(chi / free))


def test_every_merge_is_the_cheapest():
    # Against the definition itself, all pairs at every step.
    x, weight = (
        drawn(15, 3),
        torch.randint(0, 5, (15, 3), generator=torch.Generator().manual_seed(4)),
    )
    weight[:, 0] += 1  # every pair has a column in common
    tree = weighted_ward(x, weight)
    sets = {i: (x[i].clone(), weight[i].double()) for i in range(15)}
    for (i, j), cost in zip(tree.pairs.tolist(), tree.cost.tolist(), strict=True):
        costs = {}
        for a in sets:
            for b in (b for b in sets if b > a):
                (p, v), (q, w) = sets[a], sets[b]
                both = v * w / (v + w).clamp(min=1e-300)
                costs[a, b] = float((both * (p - q) ** 2).sum())
        cheapest = min(costs, key=lambda pair: (costs[pair], pair))
        assert cheapest == (i, j)
        assert costs[cheapest] == pytest.approx(cost)
        (p, v), (q, w) = sets[i], sets.pop(j)
        sets[i] = (torch.where(v + w > 0, (v * p + w * q) / (v + w).clamp(min=1e-300), 0.0), v + w)


def test_a_client_split_in_two_changes_no_other_merge():
    # Client 3 as two clients of half the size with the same means.
    x, weight = drawn(9, 4), torch.arange(1.0, 10.0)[:, None].expand(9, 4).clone()
    twice = torch.cat([x, x[3:4]])
    halves = torch.cat([weight, weight[3:4] / 2])
    halves[3] /= 2
    whole, split = weighted_ward(x, weight), weighted_ward(twice, halves)
    assert float(split.cost[0]) == pytest.approx(0.0, abs=1e-20)
    assert split.pairs[0].tolist() == [3, 9]
    assert torch.allclose(split.cost[1:], whole.cost)
    for k in range(1, 9):
        assert torch.equal(split.labels(k)[:9], whole.labels(k))


def test_ties_go_to_the_smallest_pair():
    tree = weighted_ward(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.ones(4, 1))
    assert tree.pairs[0].tolist() == [0, 1]
    assert tree.pairs[1].tolist() == [2, 3]


def test_rows_without_a_common_column_merge_last():
    # 0 and 1 share a column and differ, 2 shares none with them.
    x = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 1.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    tree = weighted_ward(x, weight)
    assert tree.pairs.tolist() == [[0, 1], [0, 2]]
    assert tree.cost.tolist() == [12.5, 0.0]
    assert tree.ratio[:2].tolist() == [12.5, 12.5]


def test_noise_alone_has_ratio_one():
    # Gaussian rows of variance 1 / n with sizes of 50 to 500: expectation 1, 200 draws of 25
    # clients and 10 columns, so the mean has a standard error of about .0065.
    generator = torch.Generator().manual_seed(7)
    ratios = []
    for _ in range(200):
        n = torch.randint(50, 501, (25, 1), generator=generator).double()
        x = torch.randn(25, 10, generator=generator, dtype=torch.float64) / n.sqrt()
        ratios.append(float(weighted_ward(x, n).ratio[0]))
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.05)


def test_doubling_all_weights_doubles_the_ratio():
    x, weight = drawn(10, 3), torch.rand(10, 3) + 0.5
    once, twice = weighted_ward(x, weight).ratio, weighted_ward(x, 2 * weight).ratio
    assert torch.allclose(twice[:-1], 2 * once[:-1])


def test_renumbering_rows_renumbers_groups():
    x, weight = drawn(20, 3), torch.rand(20, 3) + 0.5
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    a, b = (
        weighted_ward(x, weight).labels(4)[order],
        weighted_ward(x[order], weight[order]).labels(4),
    )
    assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == 4


def test_many_rows_are_grouped_by_a_sample(monkeypatch):
    monkeypatch.setattr(noise, "TREE_ROWS", 20)
    centre = torch.tensor([0.0, 10.0, 20.0]).repeat(20)[:, None]
    x = centre + 0.01 * drawn(60, 1)
    tree = weighted_ward(x, torch.ones(60, 1))
    assert len(tree.rows) == 20
    assert torch.equal(tree.labels(3), torch.arange(3).repeat(20))


def test_degenerate_trees():
    one = weighted_ward(torch.zeros(1, 2), torch.ones(1, 2))
    assert one.labels(1).tolist() == [0]
    assert choose_by_noise(one.ratio, 10, 1.3).k == 1
    blind = weighted_ward(torch.zeros(3, 2), torch.zeros(3, 2))  # nothing was measured
    assert choose_by_noise(blind.ratio, 10, 1.3).k == 1
    equal = weighted_ward(torch.ones(4, 2), torch.ones(4, 2))
    assert choose_by_noise(equal.ratio, 10, 1.3).k == 1
    assert equal.ratio[0] == 0


def test_the_choice_and_its_neighbours():
    clear = choose_by_noise(torch.tensor([20.0, 8.0, 1.05, 1.0, math.nan]), 10, 1.3)
    assert (clear.k, clear.clear, clear.close) == (3, True, ())
    # 8 is six times the threshold; 1.05 would need it lowered by a fifth.
    assert clear.runner_up == 4
    faint = choose_by_noise(torch.tensor([3.0, 1.4, 1.2, 1.0, math.nan]), 10, 1.3)
    # 1.4 / 1.2 is no cliff; twice the samples would lift the .2 above 1 to .4.
    assert (faint.k, faint.clear, faint.close, faint.runner_up) == (3, False, (2, 4), 2)
    one = choose_by_noise(torch.tensor([1.0, 0.9, math.nan]), 10, 1.3)
    assert (one.k, one.clear, one.close, one.runner_up) == (1, True, (), 2)
    none = choose_by_noise(torch.tensor([9.0, 8.0, 7.0, 0.5, math.nan]), 3, 1.3)
    assert (none.k, none.clear) == (None, False)
    assert len(none.ratio) == 3
    last = choose_by_noise(
        torch.tensor([9.0, 8.0, 1.0]), 10, 1.3
    )  # three groups of three say nothing
    assert last.k is None


def test_distance_from_a_group_by_hand():
    # (3 - 1)^2 / (1/1 + 1/3) = 3 in the first column; the second is not common.
    x, weight = torch.tensor([[3.0, 5.0]]), torch.tensor([[1.0, 0.0]])
    assert between(x, weight, torch.tensor([1.0, 0.0]), torch.tensor([3.0, 9.0])).item() == 3.0
    assert between(x, 0 * weight, torch.zeros(2), torch.ones(2)).item() == math.inf


def test_distances_agree_with_and_without_one_weight_per_row():
    x, n = drawn(6, 3), torch.arange(1.0, 7.0)[:, None]
    plain = distances(x, n)
    weight = n.expand(6, 3).clone()
    weight[0, 2] = 0
    partial = distances(x, weight)
    assert torch.allclose(plain[1:, 1:], partial[1:, 1:])
    by_hand = (x[1] - x[2]).square().sum() / 3 * (2 * 3 / 5)
    assert float(plain[1, 2]) == pytest.approx(math.sqrt(by_hand))


@pytest.mark.slow
def test_two_thousand_rows_take_seconds():
    x, weight = drawn(2000, 60), torch.rand(2000, 1) + 0.5
    assert len(weighted_ward(x, weight).cost) == 1999
