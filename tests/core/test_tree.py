from typing import NamedTuple

import pytest
import torch

from coterie.core.tree import (
    flat,
    is_buffer,
    leaves,
    n_bytes,
    named_leaves,
    put,
    rebuild,
    row,
    stack,
    take,
    tree_map,
)


class Pair(NamedTuple):
    a: torch.Tensor
    b: dict[str, torch.Tensor]


PAIR = Pair(torch.tensor([1.0, 2.0]), {"c": torch.tensor([3, 4])})


def test_a_map_keeps_dicts_lists_tuples_and_named_tuples():
    tree = {"x": [PAIR, (torch.ones(1),)], "empty": {}}
    doubled = tree_map(lambda leaf: leaf * 2, tree)
    assert isinstance(doubled["x"], list)
    assert isinstance(doubled["x"][0], Pair)
    assert isinstance(doubled["x"][1], tuple)
    assert doubled["x"][0].b["c"].tolist() == [6, 8]
    assert doubled["empty"] == {}


def test_leaves_come_in_a_fixed_order_with_their_paths():
    assert [path for path, _ in named_leaves(PAIR)] == [("a",), ("b", "c")]
    assert [path for path, _ in named_leaves((torch.ones(1), [torch.ones(1)]))] == [
        ("0",),
        ("1", "0"),
    ]
    again = rebuild(PAIR, leaves(PAIR))
    assert again.a is PAIR.a
    assert again.b["c"] is PAIR.b["c"]


def test_a_stack_has_its_members_as_rows():
    other = tree_map(lambda leaf: leaf + 1, PAIR)
    both = stack([PAIR, other])
    assert both.a.shape == (2, 2)
    assert row(both, 1).b["c"].tolist() == [4, 5]


def test_take_picks_one_row_or_several():
    bank = {"w": torch.tensor([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]])}
    assert take(bank, torch.tensor(2))["w"].tolist() == [3.0, 3.5]
    assert take(bank, torch.tensor([2, 0]))["w"].tolist() == [[3.0, 3.5], [1.0, 1.5]]


def test_take_by_a_stacked_index_picks_each_clients_row():
    bank = {"w": torch.tensor([1.0, 2.0, 3.0])}
    picked = torch.vmap(lambda i: take(bank, i))(torch.tensor([2, 0, 2]))
    assert picked["w"].tolist() == [3.0, 1.0, 3.0]


def test_put_copies_and_keeps_the_type():
    old = torch.tensor([-1, -1, -1])
    assert put(old, torch.tensor([2, 0]), torch.tensor([7.0, 5.0])).tolist() == [5, -1, 7]
    assert put(old, torch.tensor([1]), 3).tolist() == [-1, 3, -1]
    assert old.tolist() == [-1, -1, -1]


def test_put_at_no_ids_changes_nothing():
    old = torch.tensor([1.0, 2.0])
    new = put(old, torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert torch.equal(new, old)
    assert new is not old


def test_flat_leaves_integers_out():
    assert flat({"w": torch.ones(2), "n": torch.tensor(3)}).tolist() == [1.0, 1.0]


def test_bytes_count_every_leaf_with_its_type():
    # 3 float32 + 2 int64 + 1 bool = 12 + 16 + 1.
    tree = {"a": torch.ones(3), "b": (torch.zeros(2, dtype=torch.int64), torch.tensor(True))}
    assert n_bytes(tree) == 29


@pytest.mark.parametrize(
    ("path", "answer"),
    [(("model", "buffer:bn.mean"), True), (("bn.mean",), False), ((), False)],
)
def test_a_buffer_is_known_by_the_last_part_of_its_path(path, answer):
    assert is_buffer(path) is answer
