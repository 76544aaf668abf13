"""k-FED: one-shot federated k-means.

Every client clusters its own samples and sends the centres, once; the server picks k of them that
lie far apart, and each client's cluster belongs to the nearest of these.

References: Dennis, Li, Smith: Heterogeneity for the win: one-shot federated clustering, ICML 2021,
arXiv 2103.00697, Algorithms 1 and 2.
Departures: an empty set of core samples falls back to its seed; with as few samples as clusters the
samples are the centres.
Notes: `start="k-means"` and `passes=100` make a stronger rival than the paper's one pass. Whose
centres come first is left open by the paper, and decides much where clusters are of unequal size.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import centres as shared
from coterie.clustering import mixtures
from coterie.core.algorithm import Algorithm, Evidence, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.tree import Ids, Tree, put


class State(NamedTuple):
    centres: Tensor  # [k, d]
    members: PerClient  # [clients, slots]  group of each client's cluster
    turn: Tensor  # rounds done; the first only shows what came of the start


@register("kfed")
@dataclass(frozen=True)
class KFed(Algorithm):
    """Cluster everybody's samples in one exchange.

    Parameters
    ----------
    n_clusters
        Groups in all, k.
    n_components
        Clusters of each client: a number for all, or "facts" (its own fact `n_components`).
    max_components
        Room for the clusters of a client; default: `n_clusters`.
    start
        Local k-means from the paper's projected seeds ("spectral"), or the best of ten k-means.
    passes
        Assignments of centres to groups on the server; the paper has one.
    first
        Whose centres come first: "any" client's, drawn by name, or one's with the "most" of them.
    """

    title: ClassVar[str] = "One-shot federated k-means"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.5  # agreement with the labels, from a single exchange

    n_clusters: Annotated[int, Ge(1)]
    n_components: Annotated[int, Ge(1)] | Literal["facts"] = "facts"
    max_components: Annotated[int, Ge(1)] | None = None
    start: Literal["spectral", "k-means"] = "spectral"
    passes: Annotated[int, Ge(1)] = 1
    first: Literal["any", "most"] = "any"

    @property
    def slots(self) -> int:
        """Room for a client's clusters."""
        return self.max_components or self.n_clusters

    def init(self, fed: Federation) -> State:
        nobody = State(torch.zeros(0), torch.full((fed.n_clients, self.slots), -1), torch.tensor(0))
        return self._asked(fed, nobody, fed.everyone())

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()
        new = cohort[(state.members[cohort] < 0).all(1)]
        state = self._asked(fed, state, new) if len(new) else state
        return state._replace(turn=state.turn + 1), {"components": len(state.centres)}

    def done(self, state: State) -> bool:
        return int(state.turn) > 0 and not bool((state.members < 0).all(1).any())

    def _asked(self, fed: Federation, state: State, ids: Ids) -> State:
        ids, reply = shared.finite(self, *fed.map(self.cluster, to=ids))
        state = self._placed(fed, state, ids, reply)
        fed.map(self.note, state.centres, to=ids, at_least=0)
        return state

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        ids, reply = shared.finite(self, *fed.map(self.cluster, to=ids))
        state = self._placed(fed, state, ids, reply)
        held = state.members[ids][:, :, None] == torch.arange(self.n_clusters)
        share = (held * reply["n"][:, :, None]).sum(1) / reply["n"].sum(1, keepdim=True)
        return state, shared.everywhere(ids, share)

    def _placed(self, fed: Federation, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        real = reply["n"] > 0  # [m, slots]
        points = reply["centres"][real]
        found = state.centres
        if not len(found):
            turns = fed.turns(ids, "first")
            if self.first == "most":
                turns = turns - real.sum(1) * len(turns)  # more before fewer, then by turn
            turn = turns.argmin()
            found = self._spread_out(points, reply["centres"][turn][real[turn]])
            for _ in range(self.passes):
                nearest = mixtures.squared_distances(points, found).argmin(1)
                sums = torch.zeros_like(found).index_add(0, nearest, points)
                size = torch.bincount(nearest, minlength=len(found))[:, None]
                moved = torch.where(size > 0, sums / size.clamp(min=1), found)
                if torch.equal(moved, found):
                    break
                found = moved
        nearest = mixtures.squared_distances(points, found).argmin(1)
        members = torch.full(real.shape, -1)
        members[real] = nearest
        return state._replace(centres=found, members=put(state.members, ids, members))

    def _spread_out(self, points: Tensor, first: Tensor) -> Tensor:
        """Farthest first, by the distance to the nearest one chosen."""
        if len(points) < self.n_clusters:
            raise ConfigError(
                f"KFed: clients must send at least n_clusters={self.n_clusters} centres together. "
                f"They sent {len(points)}."
            )
        chosen = first[: self.n_clusters]
        while len(chosen) < self.n_clusters:
            apart = mixtures.squared_distances(points, chosen).min(1).values
            chosen = torch.cat([chosen, points[apart.argmax()][None]])
        return chosen

    @task(stackable=False, phase="cluster")
    def cluster(self, client: Client) -> Reply:
        if "centres" in client.state:  # what was sent once is said again
            return Reply({name: client.state[name] for name in ("centres", "n")})
        x, _ = shared.samples(client)
        k = shared.known_count(client, self.n_components)
        if k > self.slots:
            raise ValueError(f"it has {k} components, and max_components is {self.slots}")
        if len(x) <= k:
            labels, found = torch.arange(len(x)), x
        elif self.start == "k-means":
            labels, found, _ = mixtures.kmeans(client.key, x, k)
        else:
            labels, found, _ = mixtures.lloyd(x, self._core_means(client, x, k)[None])
        n = torch.bincount(labels, minlength=self.slots).double()
        own = shared.padded(found, self.slots)
        return Reply(
            {"centres": own, "n": n},
            keep={"centres": own, "n": n, "members": -torch.ones_like(n).long()},
        )

    def _core_means(self, client: Client, x: Tensor, k: int) -> Tensor:
        """Means of samples three times nearer to a seed than to any other, after projection."""
        basis = torch.linalg.svd(x, full_matrices=False).Vh[:k]
        flat = x @ basis.T @ basis
        seeds = mixtures.plus_plus(client.key, flat, k)[0]
        distance = mixtures.squared_distances(flat, seeds).sqrt()  # [n, k]
        means = []
        for r in range(k):
            others = torch.cat([distance[:, :r], distance[:, r + 1 :]], 1)
            core = (3 * distance[:, r : r + 1] <= others).all(1)
            means.append(x[core].mean(0) if bool(core.any()) else seeds[r])
        return torch.stack(means)

    @task(phase="cluster")
    def note(self, client: Client, found: Tensor) -> Reply:
        """Remember which group each of one's clusters is nearest to."""
        nearest = mixtures.squared_distances(client.state["centres"], found).argmin(1)
        return Reply({}, keep={"members": torch.where(client.state["n"] > 0, nearest, -1)})

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.centres}

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """One's own centres with their groups; for others, the groups' means."""
        members = client.state.get("members")
        if members is not None and bool((members >= 0).any()):
            real = client.state["n"] > 0
            return {
                "centres": client.state["centres"][real],
                "group": client.state["members"][real],
            }
        return {"centres": given["centres"], "group": torch.arange(len(given["centres"]))}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distance to the nearest centre of each group: [n, k]."""
        near = shared.closeness(personal["centres"], x)
        own = personal["group"] == torch.arange(self.n_clusters)[:, None]  # [k, centres]
        return torch.where(own, near[:, None, :], -torch.inf).max(2).values

    def surprise(self, output: Tensor) -> Tensor:
        """Squared distance to the nearest centre."""
        return -output.max(1).values

    @classmethod
    def example(cls, problem: Any) -> "KFed":
        return cls(n_clusters=4, n_components=min(4, int(problem.data.sizes("train").min())))
