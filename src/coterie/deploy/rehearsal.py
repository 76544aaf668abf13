"""A client on made-up data: it shows the server which form a reply has before one is read."""

from typing import Any

import torch

from coterie.core.federation import BankRows, Call, Each
from coterie.core.random import normal, seed_key
from coterie.core.tree import Tree, row, tree_map
from coterie.data import FederatedData, from_arrays
from coterie.data.card import DataCard
from coterie.engines.simulation import Simulation

ROWS = 32
"""Made-up rows, at least; there are four of each class."""


class Rehearsal:
    """Does calls as one client does, in the order in which they are made."""

    def __init__(self, card: DataCard, seed: int = 0) -> None:
        self.fed = Simulation(make_up(card), seed, stack=False, chunk=1)
        self.fed.begin(0)

    def __call__(self, call: Call) -> Tree:
        """The reply to a call of the first client asked."""
        first = torch.tensor([0])
        given = tuple(_first(part) for part in call.given)
        for _, sent in self.fed.exchange(call._replace(given=given, ids=first)):
            self.fed.commit()
            return row(sent, 0)
        raise LookupError("nobody answered")


def _first(given: Any) -> Any:
    if isinstance(given, BankRows):
        return BankRows(given.bank, given.index[:1])
    return Each(tree_map(lambda leaf: leaf[:1], given.tree)) if isinstance(given, Each) else given


def make_up(card: DataCard) -> FederatedData:
    """Data of one client of the kind that a card describes."""
    n = max(ROWS, 4 * card.n_outputs)
    key = seed_key(0)
    if isinstance(card.sample_shape, dict):
        raise TypeError("samples of several parts are not made up")
    x = normal(key, (n, *card.sample_shape))
    y: Any = None
    if card.task == "classification":
        y = torch.arange(n) % card.n_outputs
    elif card.task == "regression":
        y = normal(key, (n, card.n_outputs))
    options: dict[str, Any] = {"names": ["rehearsal"], "test_fraction": 0.25}
    if y is None:
        return from_arrays([x], None, **options)
    return from_arrays([x], [y], task=card.task, n_outputs=card.n_outputs, **options)
