"""A stronger k-FED than in the paper: the best of ten local k-means, and k-means on the server.

It is a rival of mosaic that knows K. The method of the paper is `coterie.algorithms.KFed`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from coterie.algorithms.kfed import KFed, State, farthest_first
from coterie.algorithms.samples import known_count, pad_rows, samples
from coterie.clustering.lloyd import kmeans, lloyd, squared_distances
from coterie.core.algorithm import register
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.tree import Ids, put


@register("thorough_kfed")
@dataclass(frozen=True)
class ThoroughKFed(KFed):
    """k-FED with k-means instead of one pass, on both sides.

    Parameters
    ----------
    most_first
        Start with the centres of the client that has the most, instead of those of any client.
    """

    most_first: bool = False

    def group(self, fed: Federation, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        """Group the centres by k-means from the farthest ones; later clients join the nearest."""
        real = reply["n"] > 0  # [m, slots]
        points, found = reply["centres"][real], state.centres
        if not len(found):
            turns = fed.turns(ids, "first")
            if self.most_first:  # clients with more centres first
                turns = turns - real.sum(1) * len(turns)
            first = turns.argmin()
            found = farthest_first(points, reply["centres"][first][real[first]], self.n_clusters)
            found = lloyd(points, found[None])[1]
        members = torch.full(real.shape, -1)
        members[real] = squared_distances(points, found).argmin(1)
        return state._replace(centres=found, members=put(state.members, ids, members))

    @task(stackable=False, phase="cluster")
    def cluster(self, client: Client) -> Reply:
        """The best of ten k-means of a client's samples."""
        if "centres" in client.state:
            return Reply({name: client.state[name] for name in ("centres", "n")})
        (x, _), k = samples(client), known_count(client, self.n_components)
        labels, found, _ = kmeans(client.key, x, min(k, len(x)))
        n = torch.bincount(labels, minlength=self.n_clusters).double()
        own = pad_rows(found, self.n_clusters)
        return Reply(
            {"centres": own, "n": n},
            keep={"centres": own, "n": n, "members": -torch.ones_like(n).long()},
        )
