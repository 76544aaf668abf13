"""Federated k-means: rounds of local means that the server clusters.

In every round each client assigns its samples to the nearest common centre and sends the mean and
the number of samples of each centre. The server clusters these means, weighted by the numbers of
samples, to get the next centres.

References: Garst, Reinders: Federated k-means clustering, 2023, arXiv 2310.01195.
Departures: every client sends as many local centres as there are common ones (fewer if it has fewer
samples); k-means on the server is the best of ten starts.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import centres as shared
from coterie.algorithms.samples import closeness, keep_finite, samples
from coterie.clustering.lloyd import squared_distances
from coterie.core.algorithm import Algorithm, Evidence, Info, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation
from coterie.core.tree import Ids, Tree


class State(NamedTuple):
    centres: Tensor  # [k, d]
    turn: Tensor  # rounds done


@register("federated_kmeans")
@dataclass(frozen=True)
class FederatedKMeans(Algorithm):
    """Cluster the samples of all clients around k common centres.

    Parameters
    ----------
    n_clusters
        Number of centres, k.
    rounds
        Number of rounds after the initial centres, which the server finds by clustering the k-means
        centres of all clients.
    """

    title: ClassVar[str] = "Federated k-means"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.5  # agreement with the labels of clouds

    n_clusters: Annotated[int, Ge(1)]
    rounds: Annotated[int, Ge(0)] = 10

    def init(self, fed: Federation) -> State:
        start = shared.initial_centres("FederatedKMeans", fed, self.first, self.n_clusters)
        return State(start, torch.tensor(0))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        asked = fed.map(self.divide, state.centres, to=fed.cohort())
        _, reply = keep_finite("FederatedKMeans", *asked)
        key = fed.key("server")
        found = shared.cluster_centres(reply["centres"], reply["n"], self.n_clusters, key)
        moved = float((found - state.centres).norm(dim=1).max())
        return State(found, state.turn + 1), {"components": self.n_clusters, "moved": moved}

    def done(self, state: State) -> bool:
        return int(state.turn) >= self.rounds

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        return state, shared.place_by_shares(fed, self.divide, state.centres, ids)

    @task(stackable=False, phase="cluster")
    def first(self, client: Client) -> dict[str, Tensor]:
        return shared.local_centres(client, self.n_clusters)

    @task
    def divide(self, client: Client, centres: Tensor) -> dict[str, Tensor]:
        """Mean and number of the samples nearest to each centre; without samples, the centre."""
        x, mask = samples(client)
        nearest = squared_distances(x, centres).argmin(1)
        member = (nearest[:, None] == torch.arange(len(centres))) & mask[:, None]  # [n, k]
        n = member.double().sum(0)
        means = member.double().T @ x / n.clamp(min=1)[:, None]
        return {"centres": torch.where(n[:, None] > 0, means, centres), "n": n}

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.centres}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distance to each centre: [n, k]."""
        return closeness(personal["centres"], x)

    def surprise(self, output: Tensor) -> Tensor:
        """Squared distance to the nearest centre."""
        return -output.max(1).values

    @classmethod
    def example(cls, problem: Any) -> "FederatedKMeans":
        return cls(n_clusters=4)
