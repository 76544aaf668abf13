"""Clients' weights and updates as vectors that the server compares."""

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.training import trainable
from coterie.core.tree import Ids, Params


def order_by_name(fed: Federation, ids: Ids) -> Ids:
    """Clients in a random order that depends on their names, not on their numbers."""
    return ids[fed.turns(ids, "order", every_round=True).argsort()]


def vectors(bank: Params) -> Tensor:
    """The trained weights of each row of a bank, [m, p], in double precision."""
    parts = [leaf.flatten(1) for name, leaf in bank.items() if trainable((name,), leaf)]
    return torch.cat(parts, 1).double()


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of every row of x with every row of y, [m, k]; 0 where a row is zero.

    >>> cosines(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor([[ 1., -1.],
            [ 0.,  0.]])
    """
    unit_x, unit_y = torch.nn.functional.normalize(x), torch.nn.functional.normalize(y)
    return (unit_x @ unit_y.mT).clamp(-1, 1)
