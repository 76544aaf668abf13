"""Stacks of clients: which clients run together, and their padded data."""

from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from coterie.core.client import Batch, DataSource
from coterie.core.model import Model
from coterie.core.random import seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Tree, n_bytes, tree_map

T = TypeVar("T")

MODELS = 16 * 2**20
"""Bytes of parameters in a stack: half of a 32 MB cache; a factor of two changes little."""
DATA = 64 * 2**20
"""Bytes of data in a stack."""
OUTPUTS = 24 * 2**20
"""Bytes of the outputs of all layers of a stack in one step."""


def chunk_size(owner: object, source: DataSource) -> int:
    """Number of clients in a stack, by the size of a method's models and of the data."""
    models = _parts(owner, Model)
    weights = sum(n_bytes(model.init(seed_key(0))) for model in models)
    sizes = source.sizes("train")
    largest = source.gather("train", sizes.argmax().reshape(1))
    rows = [local.batch_size or largest.mask.shape[1] for local in _parts(owner, LocalSGD)]
    made = max(rows, default=1) * max((_outputs(model, largest) for model in models), default=0)
    room = MODELS // max(weights, 1), DATA // max(n_bytes(largest), 1), OUTPUTS // max(made, 1)
    return max(1, min(*room, 4096))


def _parts(owner: object, kind: type[T]) -> list[T]:
    """The fields of a method that are instances of a class."""
    values = (getattr(owner, f.name) for f in (fields(owner) if is_dataclass(owner) else ()))
    return [value for value in values if isinstance(value, kind)]


def _outputs(model: Model, batch: Batch) -> int:
    """Bytes of the outputs of all layers for one sample; 0 if the network cannot take it."""
    count = 0

    def add(_layer: nn.Module, _inputs: object, output: object) -> None:
        nonlocal count
        count += n_bytes(output) if isinstance(output, Tensor) else 0

    layers = [m for m in model.evaluating_network.modules() if not list(m.children())]
    hooks = [layer.register_forward_hook(add) for layer in layers]
    try:
        with torch.no_grad():
            model.apply(model.init(seed_key(0)), tree_map(lambda leaf: leaf[0, :1], batch.x))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return count


def chunks(ids: Ids, sizes: Tensor, size: int) -> list[Tensor]:
    """Positions of the clients in each stack; stacks have clients of similar size."""
    if not len(ids):
        return []
    order = sizes[ids].argsort(descending=True, stable=True)
    return list(order.tensor_split(-(-len(order) // size)))


class Gatherer:
    """Gathers padded batches, and keeps those used last if the data of all clients fit in memory.

    Cohorts that are drawn anew hardly ever return, so no more is kept than two passes over all
    clients need. Less would be of no use: a pass would drop each batch before it is needed again.
    """

    def __init__(self, source: DataSource, device: torch.device, budget: int = 128 * 2**20) -> None:
        self.source, self.device = source, device
        sizes = source.sizes("train")
        largest = n_bytes(source.gather("train", sizes.argmax().reshape(1)))
        row = largest // max(int(sizes.max()), 1)
        splits = (source.sizes(split) for split in ("train", "validation", "test"))
        passes = sum(row * max(int(own.max()), 1) * len(own) for own in splits)
        self._room = min(budget, 2 * passes) if row * int(sizes.sum()) <= budget else 0
        self._kept: dict[tuple[str, tuple[int, ...]], Batch] = {}
        self._bytes = 0

    def keep_like(self, source: DataSource, share: float) -> None:
        """Keep this share of what could be kept of another source."""
        self._room = int(share * Gatherer(source, self.device)._room)

    def batch(self, split: str, ids: Ids) -> Batch:
        """The data of some clients: leaves [m, n, ...]."""
        if not self._room:
            return self._gather(split, ids)
        name = (split, tuple(ids.tolist()))
        batch = self._kept.pop(name, None)
        if batch is None:
            batch = self._gather(split, ids)
            self._bytes += n_bytes(batch)
        self._kept[name] = batch  # at the end: used last
        while self._bytes > self._room:
            self._bytes -= n_bytes(self._kept.pop(next(iter(self._kept))))
        return batch

    def _gather(self, split: str, ids: Ids) -> Batch:
        return tree_map(lambda leaf: leaf.to(self.device), self.source.gather(split, ids))

    def facts(self, ids: Ids) -> Tree:
        """Facts of the clients: leaves [m, ...]."""
        return tree_map(lambda leaf: leaf.to(self.device), self.source.facts(ids))
