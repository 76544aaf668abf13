"""What clients remember: tentative until the round is accepted."""

import torch
from torch import Tensor

from coterie.core.errors import TaskError
from coterie.core.tree import Tree, leaves, row, tree_map


class Memory:
    """The memory of all clients. `samples` has a row per training sample and is kept unpadded."""

    def __init__(self) -> None:
        self.committed: dict[int, Tree] = {}
        self.tentative: dict[int, Tree] = {}
        self.unsaved: set[int] = set()  # changed since the last checkpoint

    def knows(self, client: int) -> bool:
        """Whether a client has been asked before."""
        return client in self.tentative or client in self.committed

    def get(self, client: int) -> Tree:
        """What a client remembers now."""
        found = self.tentative.get(client)
        return self.committed[client] if found is None else found

    def keep(self, client: int, tree: Tree) -> None:
        """Remember, until the round is rolled back; keys not named stay as they were."""
        old = self.get(client) if self.knows(client) else {}
        self.tentative[client] = {**old, **tree}

    def keep_stacked(self, clients: list[int], kept: Tree, sizes: Tensor) -> None:
        """Remember the rows of a stacked tree, without the padding of samples."""
        if not leaves(kept):
            return
        for i, client in enumerate(clients):
            own = tree_map(torch.clone, row(kept, i))
            if "samples" in own:
                n = int(sizes[i])
                own["samples"] = tree_map(lambda leaf, n=n: leaf[:n].clone(), own["samples"])
            self.keep(client, own)

    def stacked(self, clients: list[int], length: int) -> Tree:
        """What some clients remember, on a leading axis; samples padded to a length."""
        trees = [self.get(client) for client in clients]
        first = trees[0]
        if any(tree.keys() != first.keys() for tree in trees):
            raise TaskError(
                "client.state: all clients must remember the same names to be stacked. Set them "
                "up in client_init, or mark the task @task(stackable=False)."
            )
        out = {}
        for name in first:
            parts = [tree[name] for tree in trees]
            if name == "samples":
                parts = [tree_map(lambda leaf: _pad(leaf, length), part) for part in parts]
            out[name] = tree_map(lambda *leaf: torch.stack(leaf), parts[0], *parts[1:])
        return out

    def commit(self) -> None:
        """Accept the round."""
        self.committed |= self.tentative
        self.unsaved |= {client for client, tree in self.tentative.items() if leaves(tree)}
        self.tentative = {}

    def rollback(self) -> None:
        """Drop the round."""
        self.tentative = {}


def _pad(leaf: Tensor, length: int) -> Tensor:
    missing = length - len(leaf)
    return leaf if missing <= 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])
