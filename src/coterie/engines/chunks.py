"""Clients as stacks: who runs together, and their data, padded."""

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
    """Positions of the clients that run together, those of like size together, evenly."""
    if not len(ids):
        return []
    order = sizes[ids].argsort(descending=True, stable=True)
    return list(order.tensor_split(-(-len(order) // size)))


class Gatherer:
    """Gathers padded batches, and keeps them if those of all clients fit.

    Keeping some of them only would pin the memory freed around them, and a scan over more clients
    than fit never meets a batch again before it is dropped.
    """

    def __init__(self, source: Source, device: torch.device, budget: int = 128 * 2**20) -> None:
        self.source, self.device = source, device
        sizes = source.sizes("train")
        largest = n_bytes(source.gather("train", sizes.argmax().reshape(1)))
        total = largest // max(int(sizes.max()), 1) * int(sizes.sum())
        self._left = budget if total <= budget else 0
        self._kept: dict[tuple[str, tuple[int, ...]], Batch] = {}

    def batch(self, split: str, ids: Ids) -> Batch:
        """The data of some clients: leaves [m, n, ...]."""
        if not self._left:
            return self._gathered(split, ids)
        name = (split, tuple(ids.tolist()))
        if name not in self._kept:
            batch = self._gathered(split, ids)
            self._left -= n_bytes(batch)
            if self._left <= 0:  # cohorts differ, so more was kept than one pass needs
                self._left += sum(n_bytes(kept) for kept in self._kept.values()) + n_bytes(batch)
                self._kept.clear()
                return batch
            self._kept[name] = batch
        return self._kept[name]

    def _gathered(self, split: str, ids: Ids) -> Batch:
        return tree_map(lambda leaf: leaf.to(self.device), self.source.gather(split, ids))

    def facts(self, ids: Ids) -> Tree:
        """What the clients know of themselves: leaves [m, ...]."""
        return tree_map(lambda leaf: leaf.to(self.device), self.source.facts(ids))
