import pytest
import torch

from coterie.core.random import bits, fold, normal, permutation, seed_key, shuffled, uniform

KEY = seed_key(5)


def test_seeds_and_labels_give_different_keys():
    keys = {int(seed_key(s)) for s in range(1000)}
    keys |= {int(fold(KEY, i)) for i in range(1000)}
    keys |= {int(fold(KEY, str(i))) for i in range(1000)}
    assert len(keys) == 3000


def test_the_order_of_labels_matters():
    assert fold(KEY, 1, 2) != fold(KEY, 2, 1)
    assert fold(KEY, 1, 2) == fold(fold(KEY, 1), 2)


def test_a_number_and_a_tensor_are_the_same_label():
    assert fold(KEY, 7) == fold(KEY, torch.tensor(7))
    assert fold(KEY, torch.arange(3)).tolist() == [int(fold(KEY, i)) for i in range(3)]


def test_negative_and_huge_labels_are_taken():
    assert fold(KEY, -1) != fold(KEY, 1)
    assert fold(KEY, 2**63) == fold(KEY, -(2**63))  # the same 64 bits


def test_numbers_of_a_draw_do_not_depend_on_how_many_are_drawn():
    assert torch.equal(uniform(KEY, (3, 4)), uniform(KEY, (5, 4))[:3])
    assert torch.equal(normal(KEY, (3,)), normal(KEY, (9,))[:3])


def test_uniform_numbers_are_uniform():
    draw = uniform(KEY, (100_000,), torch.float64)
    assert float(draw.min()) >= 0.0
    assert float(draw.max()) < 1.0
    # Standard errors: mean 0.0009, variance 0.0002; five of them allowed.
    assert abs(float(draw.mean()) - 1 / 2) < 0.005
    assert abs(float(draw.var()) - 1 / 12) < 0.0012
    # Chi-square with 99 degrees of freedom: mean 99, deviation 14.
    counts = torch.histc(draw, 100, 0, 1)
    assert 30 < float(((counts - 1000) ** 2 / 1000).sum()) < 170


def test_first_numbers_of_neighbouring_keys_are_independent():
    # Each client draws from its own key; across clients the draws must look random, too.
    keys = fold(KEY, torch.arange(100_000))
    draw = torch.vmap(lambda k: uniform(k, (2,), torch.float64))(keys)  # [m, 2]
    cells = (draw[:, 0] * 10).long() * 10 + (draw[:, 1] * 10).long()
    counts = torch.bincount(cells, minlength=100).double()
    assert 30 < float(((counts - 1000) ** 2 / 1000).sum()) < 170
    # Correlation of neighbours has deviation 0.003.
    assert abs(float(torch.corrcoef(torch.stack([draw[1:, 0], draw[:-1, 0]]))[0, 1])) < 0.016


def test_every_bit_is_fair():
    draw = bits(KEY, (20_000,))
    ones = torch.stack([((draw >> b) & 1).double().mean() for b in range(64)])
    assert float((ones - 0.5).abs().max()) < 0.02  # deviation 0.0035


def test_normal_numbers_are_normal():
    draw = normal(KEY, (100_000,), torch.float64)
    # Moments 0, 1, 0, 3; standard errors 0.003, 0.0045, 0.012, 0.03.
    assert abs(float(draw.mean())) < 0.016
    assert abs(float(draw.var()) - 1) < 0.025
    assert abs(float((draw**3).mean())) < 0.06
    assert abs(float((draw**4).mean()) - 3) < 0.16


def test_a_permutation_has_the_real_rows_first():
    mask = torch.tensor([True, False, True, True, False])
    order = permutation(KEY, mask)
    assert sorted(order[:3].tolist()) == [0, 2, 3]
    assert sorted(order[3:].tolist()) == [1, 4]


def test_padding_does_not_change_the_order_of_real_rows():
    short = permutation(KEY, torch.ones(6, dtype=torch.bool))
    long = permutation(KEY, torch.arange(9) < 6)
    assert torch.equal(short, long[:6])


def test_permutations_are_uniform():
    # 6 orders of 3 rows, 6000 draws: chi-square with 5 degrees of freedom, deviation 3.2.
    orders = [tuple(shuffled(fold(KEY, i), 3).tolist()) for i in range(3000)]
    counts = torch.tensor([orders.count(order) for order in set(orders)], dtype=torch.float64)
    assert len(counts) == 6
    assert float(((counts - 500) ** 2 / 500).sum()) < 21


@pytest.mark.parametrize("draw", [uniform, normal])
def test_draws_stack(draw):
    keys = fold(KEY, torch.arange(4))
    stacked = torch.vmap(lambda k: draw(fold(k, "x"), (3,)))(keys)
    assert torch.equal(stacked, torch.stack([draw(fold(k, "x"), (3,)) for k in keys]))


def test_permutations_stack():
    keys, masks = fold(KEY, torch.arange(3)), torch.arange(5) < torch.tensor([[5], [2], [0]])
    stacked = torch.vmap(permutation)(keys, masks)
    assert torch.equal(stacked, torch.stack([*map(permutation, keys, masks)]))


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    uniform(KEY, (3,)), normal(KEY, (3,)), shuffled(KEY, 3)
    assert torch.equal(before, torch.get_rng_state())
