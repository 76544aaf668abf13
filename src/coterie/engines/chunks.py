"""Clients as stacks: who runs together, and their data, padded."""

from collections import OrderedDict
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from coterie.core.client import Batch, Source
from coterie.core.model import Model
from coterie.core.random import seed_key
from coterie.core.tree import Ids, Tree, n_bytes, tree_map

MODELS = 16 * 2**20
"""Bytes of parameters in a stack: half of a 32 MB cache; a factor of two changes little."""
DATA = 64 * 2**20
"""Bytes of data in a stack."""


def chunk_size(owner: object, source: Source) -> int:
    """How many clients run as one stack, from the size of a method's models and of the data."""
    models = [
        getattr(owner, field.name)
        for field in (fields(owner) if is_dataclass(owner) else ())
        if isinstance(getattr(owner, field.name), Model)
    ]
    weights = sum(n_bytes(model.init(seed_key(0))) for model in models)
    sizes = source.sizes("train")
    sample = n_bytes(source.gather("train", sizes.argmax().reshape(1)))
    return max(1, min(MODELS // max(weights, 1), DATA // max(sample, 1), 4096))


def chunks(ids: Ids, sizes: Tensor, size: int) -> list[Tensor]:
    """Positions of the clients that run together, those of like size together."""
    order = sizes[ids].argsort(descending=True, stable=True)
    return list(order.split(size))


class Gatherer:
    """Gathers padded batches; keeps the latest ones while they fit."""

    def __init__(self, source: Source, device: torch.device, budget: int = 256 * 2**20) -> None:
        self.source, self.device, self.budget = source, device, budget
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], Batch] = OrderedDict()
        self._bytes = 0

    def batch(self, split: str, ids: Ids) -> Batch:
        """The data of some clients: leaves [m, n, ...]."""
        name = (split, tuple(ids.tolist()))
        if name not in self._kept:
            batch = tree_map(lambda leaf: leaf.to(self.device), self.source.gather(split, ids))
            self._kept[name] = batch
            self._bytes += n_bytes(batch)
            while self._bytes > self.budget and self._kept:
                self._bytes -= n_bytes(self._kept.popitem(last=False)[1])
            return batch
        self._kept.move_to_end(name)
        return self._kept[name]

    def facts(self, ids: Ids) -> Tree:
        """What the clients know of themselves: leaves [m, ...]."""
        return tree_map(lambda leaf: leaf.to(self.device), self.source.facts(ids))
