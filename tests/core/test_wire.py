from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.core.wire import dump, load


class Inner(NamedTuple):
    w: Tensor


class State(NamedTuple):
    models: dict[str, Tensor]
    inner: Inner
    stable: Tensor


STATE = State({"w": torch.ones(2, 3)}, Inner(torch.tensor(2.5)), torch.tensor(True))


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.zeros(0, 3),
        torch.tensor([[1.5]], dtype=torch.bfloat16),
        torch.tensor([7], dtype=torch.uint8),
        torch.tensor(float("nan")),
    ],
)
def test_a_leaf_keeps_type_shape_and_value(leaf):
    back = load(dump({"x": leaf}))["x"]
    assert back.dtype == leaf.dtype
    assert back.shape == leaf.shape  # 0-d stays 0-d
    assert torch.equal(back, leaf) or bool(leaf.isnan())


def test_views_are_written_as_what_they_show():
    tied = torch.arange(6.0).reshape(2, 3)
    tree = {"a": tied, "b": tied, "turned": tied.T, "wide": torch.tensor(1.0).expand(4)}
    back = load(dump(tree))
    assert torch.equal(back["b"], tied)
    assert torch.equal(back["turned"], tied.T)
    assert back["wide"].tolist() == [1.0] * 4


def test_empty_trees_stay_empty():
    assert load(dump({})) == {}
    assert load(dump({"a": {}, "b": ()}), like={"a": {}, "b": ()}) == {"a": {}, "b": ()}


def test_a_lone_tensor_is_a_tree():
    assert load(dump(torch.tensor(4))).item() == 4


def test_named_tuples_come_back_by_example():
    back = load(dump(STATE), like=STATE)
    assert isinstance(back, State)
    assert isinstance(back.inner, Inner)
    assert back.inner.w.item() == 2.5


def test_named_tuples_come_back_by_class():
    back = load(dump(STATE), like=State)
    assert isinstance(back, State)
    assert isinstance(back.inner, Inner)


def test_nested_tuples_and_lists_come_back_by_example():
    tree = {"a": (torch.ones(1), [Inner(torch.ones(2)), {}]), "b": [torch.ones(1)]}
    back = load(dump(tree), like=tree)
    assert isinstance(back["a"], tuple)
    assert isinstance(back["a"][1], list)
    assert isinstance(back["a"][1][0], Inner)
    assert isinstance(back["b"], list)


def test_a_state_without_fields_comes_back():
    class Nothing(NamedTuple):
        pass

    assert load(dump(Nothing()), like=Nothing) == Nothing()


def test_equal_trees_give_equal_bytes():
    notes = {name: name for name in "abcdefgh"}
    assert len({dump(STATE, notes) for _ in range(10)}) == 1


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"{}", b"\x02" + b"\0" * 7 + b"[]", b"x" * 99])
def test_foreign_bytes_are_refused(data):
    with pytest.raises(DataError, match="damaged"):
        load(data)


def test_bytes_cut_anywhere_are_refused():
    whole = dump(STATE)
    for end in range(len(whole)):
        with pytest.raises(DataError, match="damaged"):
            load(whole[:end])


def test_a_damaged_byte_gives_a_tree_or_one_kind_of_error():
    whole = dump(STATE)
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 0x15
        with suppress(DataError):
            load(bytes(broken), like=State)


def test_another_state_is_refused():
    with pytest.raises(DataError, match="damaged"):
        load(dump({"models": torch.ones(1)}), like=State)
