import pytest
import torch

from coterie.core.errors import TaskError
from coterie.core.memory import Memory


def one(value):
    return {"a": torch.tensor(value)}


def test_memory_is_tentative_until_committed():
    memory = Memory()
    memory.keep(0, one(1.0))
    assert memory.get(0) == one(1.0)
    memory.rollback()
    assert not memory.knows(0)
    memory.keep(0, one(2.0))
    memory.commit()
    memory.keep(0, one(3.0))
    memory.rollback()
    assert memory.get(0) == one(2.0)


def test_names_not_kept_stay():
    memory = Memory()
    memory.keep(0, {"a": torch.tensor(1), "b": torch.tensor(2)})
    memory.commit()
    memory.keep(0, {"b": torch.tensor(3)})
    assert {name: leaf.item() for name, leaf in memory.get(0).items()} == {"a": 1, "b": 3}
    assert memory.committed[0]["b"].item() == 2


def test_samples_are_kept_without_padding_and_given_with_it():
    memory = Memory()
    stacked = {"samples": {"z": torch.tensor([[1, 2, 3], [4, 0, 0]])}, "n": torch.tensor([3, 1])}
    memory.keep_stacked([7, 2], stacked, torch.tensor([3, 1]))
    assert memory.get(2)["samples"]["z"].tolist() == [4]
    back = memory.stack([2, 7], 5)
    assert back["samples"]["z"].tolist() == [[4, 4, 4, 4, 4], [1, 2, 3, 1, 1]]  # repeats, no zeros
    assert back["n"].tolist() == [1, 3]


def test_nothing_kept_is_nothing_stored():
    memory = Memory()
    memory.keep_stacked([0, 1], {}, torch.tensor([1, 1]))
    assert not memory.knows(0)


def test_changed_clients_are_marked_for_the_next_checkpoint():
    memory = Memory()
    memory.keep(0, one(1.0))
    memory.keep(1, {})  # remembers nothing: nothing to save
    assert memory.unsaved == set()
    memory.commit()
    assert memory.unsaved == {0}


def test_empty_memories_stack():
    memory = Memory()
    memory.keep(0, {}), memory.keep(1, {})
    assert memory.stack([0, 1], 3) == {}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_different_memories_do_not_stack(order):
    memory = Memory()
    memory.keep(0, {})
    memory.keep(1, one(1.0))
    with pytest.raises(TaskError, match="must have the same names"):
        memory.stack(order, 1)
