"""k-FED: one-shot federated k-means.

Every client clusters its own samples and sends the centres once. The server chooses k of all these
centres that are far apart, and each cluster of a client joins the nearest chosen centre.

References: Dennis, Li, Smith: Heterogeneity for the win: one-shot federated clustering, ICML 2021,
arXiv 2103.00697, Algorithm 1 (client) and Algorithm 2 (server).
Departures: an empty set of core samples is replaced by its seed. A client with no more samples than
clusters sends its samples.
Notes: Algorithm 2 starts with the centres of any one client. Here this client is drawn at random.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms.components import place_heard
from coterie.algorithms.samples import (
    closeness,
    keep_finite,
    known_count,
    pad_rows,
    samples,
)
from coterie.clustering.lloyd import lloyd, plus_plus, squared_distances
from coterie.core.algorithm import Algorithm, Evidence, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.tree import Ids, Tree, put


class State(NamedTuple):
    centres: Tensor  # [k, d]
    members: PerClient  # [clients, k]  group of each client's cluster, -1 where there is none
    turn: Tensor  # rounds done; all work is in `init`, and one round reports it


@register("kfed")
@dataclass(frozen=True)
class KFed(Algorithm):
    """Cluster the samples of all clients in one exchange.

    Parameters
    ----------
    n_clusters
        Number of groups in all, k.
    n_components
        Number of clusters of each client, k' of the paper, at most `n_clusters`: one number for all
        clients, or "facts" (each client's own fact `n_components`).
    """

    title: ClassVar[str] = "One-shot federated k-means"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.5  # agreement with the labels, from a single exchange

    n_clusters: Annotated[int, Ge(1)]
    n_components: Annotated[int, Ge(1)] | Literal["facts"] = "facts"

    def init(self, fed: Federation) -> State:
        members = torch.full((fed.n_clients, self.n_clusters), -1)
        return self.ask(fed, State(torch.zeros(0), members, torch.tensor(0)), fed.everyone())

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()
        new = cohort[(state.members[cohort] < 0).all(1)]
        state = self.ask(fed, state, new) if len(new) else state
        return state._replace(turn=state.turn + 1), {"components": len(state.centres)}

    def done(self, state: State) -> bool:
        return int(state.turn) > 0 and not bool((state.members < 0).all(1).any())

    def ask(self, fed: Federation, state: State, ids: Ids) -> State:
        """Collect the centres of some clients, group them, and send the groups' means back."""
        ids, reply = keep_finite("KFed", *fed.map(self.cluster, to=ids))
        state = self.group(fed, state, ids, reply)
        fed.map(self.note, state.centres, to=ids, at_least=0)
        return state

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = keep_finite("KFed", *fed.map(self.cluster, to=ids))
        state = self.group(fed, state, heard, reply)
        held = state.members[heard][:, :, None] == torch.arange(self.n_clusters)
        share = (held * reply["n"][:, :, None]).sum(1) / reply["n"].sum(1, keepdim=True)
        return state, place_heard(ids, heard, share)

    def group(self, fed: Federation, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        """Algorithm 2; clusters of clients that join later are added to the nearest group."""
        real = reply["n"] > 0  # [m, slots]
        points, found = reply["centres"][real], state.centres
        if not len(found):
            first = fed.turns(ids, "first").argmin()
            found = farthest_first(points, reply["centres"][first][real[first]], self.n_clusters)
            nearest = squared_distances(points, found).argmin(1)  # one pass of Lloyd
            sums = torch.zeros_like(found).index_add(0, nearest, points)
            size = torch.bincount(nearest, minlength=len(found))[:, None]
            found = torch.where(size > 0, sums / size.clamp(min=1), found)
        members = torch.full(real.shape, -1)
        members[real] = squared_distances(points, found).argmin(1)
        return state._replace(centres=found, members=put(state.members, ids, members))

    @task(stackable=False, phase="cluster")
    def cluster(self, client: Client) -> Reply:
        """Algorithm 1; a client that is asked again repeats its first answer."""
        if "centres" in client.state:
            return Reply({name: client.state[name] for name in ("centres", "n")})
        (x, _), k = samples(client), known_count(client, self.n_components)
        if k > self.n_clusters:
            raise ValueError(f"n_components must be at most n_clusters={self.n_clusters}, got {k}")
        if len(x) <= k:
            labels, found = torch.arange(len(x)), x
        else:
            labels, found, _ = lloyd(x, core_means(client.key, x, k)[None])
        n = torch.bincount(labels, minlength=self.n_clusters).double()
        own = pad_rows(found, self.n_clusters)
        return Reply(
            {"centres": own, "n": n},
            keep={"centres": own, "n": n, "members": -torch.ones_like(n).long()},
        )

    @task(phase="cluster")
    def note(self, client: Client, found: Tensor) -> Reply:
        """Remember the group nearest to each of the client's clusters."""
        nearest = squared_distances(client.state["centres"], found).argmin(1)
        return Reply({}, keep={"members": torch.where(client.state["n"] > 0, nearest, -1)})

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.centres}

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """A client's own centres with their groups; for other clients, the groups' means."""
        members = client.state.get("members")
        if members is not None and bool((members >= 0).any()):
            real = client.state["n"] > 0
            return {"centres": client.state["centres"][real], "group": members[real]}
        return {"centres": given["centres"], "group": torch.arange(len(given["centres"]))}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distance to the nearest centre of each group: [n, k]."""
        near = closeness(personal["centres"], x)
        own = personal["group"] == torch.arange(self.n_clusters)[:, None]  # [k, centres]
        return torch.where(own, near[:, None, :], -torch.inf).max(2).values

    def surprise(self, output: Tensor) -> Tensor:
        """Squared distance to the nearest centre."""
        return -output.max(1).values

    @classmethod
    def example(cls, problem: Any) -> "KFed":
        return cls(n_clusters=4, n_components=min(4, int(problem.data.sizes("train").min())))


def core_means(key: Tensor, x: Tensor, k: int) -> Tensor:
    """Algorithm 1, start: means of the samples three times closer to a seed than to any other."""
    basis = torch.linalg.svd(x, full_matrices=False).Vh[:k]
    flat = x @ basis.T @ basis  # projected on the top k singular directions
    seeds = plus_plus(key, flat, k)[0]
    distance = squared_distances(flat, seeds).sqrt()  # [n, k]
    means = []
    for r in range(k):
        others = torch.cat([distance[:, :r], distance[:, r + 1 :]], 1)
        core = (3 * distance[:, r : r + 1] <= others).all(1)
        means.append(x[core].mean(0) if bool(core.any()) else seeds[r])
    return torch.stack(means)


def farthest_first(points: Tensor, first: Tensor, k: int) -> Tensor:
    """Algorithm 2, start: add the centre farthest from those chosen until there are k."""
    if len(points) < k:
        raise ConfigError(
            f"KFed: clients must send at least n_clusters={k} centres together. "
            f"They sent {len(points)}."
        )
    chosen = first[:k]
    while len(chosen) < k:
        apart = squared_distances(points, chosen).min(1).values
        chosen = torch.cat([chosen, points[apart.argmax()][None]])
    return chosen
