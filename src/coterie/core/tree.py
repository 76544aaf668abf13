"""Trees of tensors: nested dicts and tuples, named ones included, whose leaves are tensors.

A *bank* is a tree whose leaves have a leading row per model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

Tree: TypeAlias = Any
"""A tensor, or a dict, tuple or list of trees. (Type checkers do not support this recursion.)"""
Params: TypeAlias = dict[str, Tensor]
"""One model's weights and buffers by name, or a bank of them."""
Ids: TypeAlias = Tensor
"""Integer tensor of client ids."""

T = TypeVar("T")


def tree_map(function: Callable[..., Any], tree: T, *others: Tree) -> T:
    """Apply a function to the leaves of one or several trees of the same shape.

    >>> tree_map(lambda a, b: a + b, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    if isinstance(tree, dict):
        return {k: tree_map(function, v, *(o[k] for o in others)) for k, v in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, tuple | list):
        parts = [tree_map(function, v, *(o[i] for o in others)) for i, v in enumerate(tree)]
        return like_sequence(tree, parts)  # type: ignore[return-value]
    return function(tree, *others)  # type: ignore[no-any-return]


def like_sequence(model: Sequence[Any], parts: list[Any]) -> Sequence[Any]:
    """A sequence of the same kind (list, tuple, named tuple) with other parts."""
    if hasattr(model, "_fields"):
        return type(model)(*parts)
    return type(model)(parts)  # type: ignore[call-arg]


def leaves(tree: Tree) -> list[Tensor]:
    """The leaves in a fixed order."""
    return [leaf for _, leaf in named_leaves(tree)]


def named_leaves(tree: Tree, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Tensor]]:
    """The leaves, each with its path of keys.

    >>> [path for path, _ in named_leaves({"a": {"b": torch.ones(1)}, "c": torch.ones(1)})]
    [('a', 'b'), ('c',)]
    """
    if isinstance(tree, dict):
        items: Iterable[tuple[str, Any]] = tree.items()
    elif isinstance(tree, tuple | list):
        items = zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True)
    else:
        return [(path, tree)]
    return [pair for key, value in items for pair in named_leaves(value, (*path, str(key)))]


def rebuild(tree: T, new: Iterable[Any]) -> T:
    """A tree of the same shape with other leaves, given in order."""
    rest = iter(new)
    return tree_map(lambda _: next(rest), tree)


def stack(trees: Sequence[T]) -> T:
    """Stack trees of one shape to one tree with a leading axis."""
    return tree_map(lambda *parts: torch.stack(parts), trees[0], *trees[1:])


def row(tree: T, index: int) -> T:
    """One row of a bank, by a plain number (server and engine side)."""
    return tree_map(lambda leaf: leaf[index], tree)


def take(bank: T, index: Tensor) -> T:
    """One row of a bank (0-d index) or several rows (1-d index); allowed in stacked tasks.

    >>> take({"w": torch.tensor([1.0, 2.0, 3.0])}, torch.tensor(1))
    {'w': tensor(2.)}
    """
    if index.ndim:
        return tree_map(lambda leaf: leaf.index_select(0, index), bank)
    return tree_map(lambda leaf: leaf.index_select(0, index.reshape(1)).squeeze(0), bank)


def n_rows(bank: Tree) -> int:
    """Number of rows of a bank.

    >>> n_rows({"w": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    return len(leaves(bank)[0])


def put(values: Tensor, ids: Ids, new: Tensor | float) -> Tensor:
    """A copy of a per-client tensor with new values at some ids.

    >>> put(torch.tensor([-1, -1, -1]), torch.tensor([2]), torch.tensor([7]))
    tensor([-1, -1,  7])
    """
    out = values.clone()
    if len(ids):
        out[ids] = torch.as_tensor(new, dtype=values.dtype, device=values.device)
    return out


def flat(tree: Tree) -> Tensor:
    """All floating leaves of one model as one vector.

    >>> flat({"w": torch.ones(2, 2), "b": torch.zeros(1)})
    tensor([1., 1., 1., 1., 0.])
    """
    return torch.cat([leaf.reshape(-1) for leaf in leaves(tree) if leaf.is_floating_point()])


def n_bytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


BUFFER = "buffer:"


def is_buffer(path: tuple[str, ...]) -> bool:
    """Whether a leaf is a buffer (running statistics, frozen weights), which is never trained."""
    return bool(path) and path[-1].startswith(BUFFER)
