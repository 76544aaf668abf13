"""The memory of clients; changes are tentative until the round is accepted."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.core.errors import TaskError
from coterie.core.tree import Tree, leaves, row, tree_map


class Memory:
    """The memory of all clients. `samples` has a row per training sample, without padding."""

    def __init__(self) -> None:
        self.committed: dict[int, Tree] = {}
        self.tentative: dict[int, Tree] = {}
        self.unsaved: set[int] = set()  # changed since the last checkpoint

    @classmethod
    def of(cls, saved: Mapping[str, Tree]) -> "Memory":
        """Memory as it was saved: the number of each client, as text, and its tree."""
        memory = cls()
        memory.committed = {int(client): tree for client, tree in saved.items()}
        return memory

    def knows(self, client: int) -> bool:
        """Whether a client has been asked before."""
        return client in self.tentative or client in self.committed

    def get(self, client: int) -> Tree:
        """The present memory of a client."""
        found = self.tentative.get(client)
        return self.committed[client] if found is None else found

    def keep(self, client: int, tree: Tree) -> None:
        """Change the memory, unless the round is rolled back; keys not in `tree` are unchanged."""
        old = self.get(client) if self.knows(client) else {}
        self.tentative[client] = {**old, **tree}

    def keep_stacked(self, clients: list[int], kept: Tree, sizes: Tensor) -> None:
        """Keep the rows of a stacked tree, without the padding of samples."""
        if not leaves(kept):
            return
        for i, client in enumerate(clients):
            own = tree_map(torch.clone, row(kept, i))
            if "samples" in own:
                n = int(sizes[i])
                own["samples"] = tree_map(lambda leaf, n=n: leaf[:n].clone(), own["samples"])
            self.keep(client, own)

    def stack(self, clients: list[int], length: int) -> Tree:
        """Stack the memory of some clients on a leading axis; samples are padded to a length."""
        trees = [self.get(client) for client in clients]
        first = trees[0]
        if any(tree.keys() != first.keys() for tree in trees):
            raise TaskError(
                "client.state: all clients must have the same names in their memory to be stacked. "
                "Set all names in client_init, or mark the task @task(stackable=False)."
            )
        out = {}
        for name in first:
            parts = [tree[name] for tree in trees]
            if name == "samples":
                parts = [tree_map(lambda leaf: _pad(leaf, length), part) for part in parts]
            out[name] = tree_map(lambda *leaf: torch.stack(leaf), parts[0], *parts[1:])
        return out

    def commit(self) -> None:
        """Accept the changes of the round."""
        self.committed |= self.tentative
        self.unsaved |= {client for client, tree in self.tentative.items() if leaves(tree)}
        self.tentative = {}

    def rollback(self) -> None:
        """Drop the changes of the round."""
        self.tentative = {}


def _pad(leaf: Tensor, length: int) -> Tensor:
    missing = length - len(leaf)
    return leaf if missing <= 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])
