"""Models of clients that are unlike all others: each trains its own, and nothing is averaged.

They are held as two banks, "shared" and "models", as the groups' are; here both have a row for each
client.
"""

import torch
from torch import Tensor

from coterie.core.tree import Params


def no_models(shared: Params, models: Params) -> dict[str, Params]:
    """Banks without a row, of the right shapes."""
    none = {name: leaf.new_zeros(0, *leaf.shape) for name, leaf in shared.items()}
    return {"shared": none, "models": {name: leaf[:0] for name, leaf in models.items()}}


def add_models(
    alone: dict[str, Params], shared: Params, models: Params, group: Tensor
) -> dict[str, Params]:
    """Add a copy of the model of each of some groups.

    Examples
    --------
    >>> models = {"w": torch.tensor([[1.0], [2.0]])}
    >>> add_models(no_models({}, models), {}, models, torch.tensor([1]))["models"]["w"]
    tensor([[2.]])
    """
    new = {
        "shared": {name: leaf.expand(len(group), *leaf.shape) for name, leaf in shared.items()},
        "models": {name: leaf[group] for name, leaf in models.items()},
    }
    return {
        part: {name: torch.cat([leaf, new[part][name]]) for name, leaf in bank.items()}
        for part, bank in alone.items()
    }
