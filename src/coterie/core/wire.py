"""Trees of tensors as bytes: one format for loopback, network and checkpoints. No pickle.

The bytes are a safetensors file. Its metadata contain the structure of the tree as JSON, in which a
leaf is a number, the name of its array. 0-d tensors stay 0-d.
"""

import hashlib
import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from coterie.core.errors import DataError
from coterie.core.tree import Tree, leaves, like_sequence


def dump(tree: Tree, note: dict[str, str] | None = None) -> bytes:
    """A tree as bytes.

    >>> import torch
    >>> load(dump({"a": torch.tensor(3), "b": (torch.ones(1),)}))
    {'a': tensor(3), 'b': [tensor([1.])]}
    """
    arrays = {str(i): leaf.detach().cpu().contiguous() for i, leaf in enumerate(leaves(tree))}
    # Arrays that share memory (stride-0 views, tied weights) are written as copies.
    arrays = {name: leaf.clone() for name, leaf in arrays.items()}
    about = {"tree": _shape(tree, iter(arrays)), "note": note or {}}
    # One entry: safetensors writes several in no fixed order.
    return save_tensors(arrays, {"coterie": json.dumps(about)})


DEEP = 32
"""Levels that a tree may have."""
PER_LEAF = 512
"""Bytes of the header for each leaf, at most; its name, type, shape and place take about 150."""


def load(data: bytes, like: Tree = None, leaves: int | None = None) -> Tree:
    """The tree in some bytes; named tuples become dicts unless `like` has their types.

    `leaves`: the largest number of leaves; a longer tree is refused before it is parsed.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("the header is longer than the data")
        if leaves is not None and size > PER_LEAF * (leaves + 2):
            raise ValueError(f"a header of {size} bytes is too long for {leaves} tensors")
        header = json.loads(data[8 : 8 + size])
        shape = json.loads(header["__metadata__"]["coterie"])["tree"]
        arrays = load_tensors(data)
        tree = _build(shape, arrays)
        if arrays:
            raise ValueError(f"{len(arrays)} tensors have no place in the tree")
        return _restore(tree, like)
    except (
        SafetensorError, ValueError, KeyError, IndexError, TypeError, AttributeError,
        RecursionError, OverflowError,
    ) as error:  # fmt: skip
        raise DataError(
            f"The data must be a tree of tensors that Coterie wrote. They are damaged, or another "
            f"program wrote them ({_brief(error)})."
        ) from error


def _brief(error: Exception) -> str:
    """The text of an error; a stranger's data may be in it, so it is cut short."""
    text = str(error)
    return text if len(text) <= 200 else text[:197] + "..."


def _shape(tree: Tree, names: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": [[str(key), _shape(value, names)] for key, value in tree.items()]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        parts = zip(tree._fields, tree, strict=True)
        return {"dict": [[key, _shape(value, names)] for key, value in parts]}
    if isinstance(tree, tuple | list):
        return {"list": [_shape(value, names) for value in tree]}
    return next(names)


def _build(shape: Any, arrays: dict[str, Tensor], level: int = 0) -> Tree:
    """The tree of a shape; every array is taken out of `arrays`, so that each is used once."""
    if isinstance(shape, str):
        return arrays.pop(shape)
    if level >= DEEP:
        raise ValueError(f"a tree has at most {DEEP} levels")
    if not isinstance(shape, dict) or len(shape) != 1:
        raise ValueError("a part of a tree is a tensor, a dict or a list")
    if "dict" in shape:
        pairs = [(key, value) for key, value in shape["dict"]]
        if not all(isinstance(key, str) for key, _ in pairs) or len(dict(pairs)) < len(pairs):
            raise ValueError("the names in a tree must be different texts")
        return {key: _build(value, arrays, level + 1) for key, value in pairs}
    return [_build(value, arrays, level + 1) for value in shape["list"]]


def _restore(tree: Tree, like: Any) -> Tree:
    """Restore the types of the parts of a tree."""
    if isinstance(like, type) and hasattr(like, "_fields"):  # a NamedTuple class
        hints = getattr(like, "__annotations__", {})
        # A field with a default may have been added after the file was written.
        known = [key for key in like._fields if key in tree or key not in like._field_defaults]  # type: ignore[attr-defined]
        return like(**{key: _restore(tree[key], hints.get(key)) for key in known})
    if isinstance(like, tuple | list) and isinstance(tree, dict | list):
        values = list(tree.values()) if isinstance(tree, dict) else tree
        return like_sequence(like, [_restore(v, k) for v, k in zip(values, like, strict=True)])
    if isinstance(like, dict) and isinstance(tree, dict):
        return {key: _restore(value, like.get(key)) for key, value in tree.items()}
    return tree


def checksum(data: bytes) -> str:
    """SHA-256 of some bytes, as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
