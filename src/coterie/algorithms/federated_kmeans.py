"""Federated k-means: many rounds of local means, clustered on the server.

In every round each client divides its samples among the common centres and sends the means and
sizes of the parts; the server clusters these means, weighted by size, into the next centres.

References: Garst, Reinders: Federated k-means clustering, 2023, arXiv 2310.01195.
Departures: none that matter; `server="mean"` averages each centre's own means instead, which is
Lloyd's algorithm on the pooled data.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import centres as shared
from coterie.core.aggregate import Mean
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
    """Cluster everybody's samples around k common centres.

    Parameters
    ----------
    n_clusters
        Number of centres, k.
    rounds
        Rounds after the start, which is local k-means of every client, clustered.
    server
        Next centres: weighted "k-means" of all local means, or the weighted "mean" of each
        centre's.
    """

    title: ClassVar[str] = "Federated k-means"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.5  # agreement with the labels of clouds

    n_clusters: Annotated[int, Ge(1)]
    rounds: Annotated[int, Ge(0)] = 10
    server: Literal["k-means", "mean"] = "k-means"

    def init(self, fed: Federation) -> State:
        start = shared.first_centres(self, fed, self.first, self.n_clusters)
        return State(start, torch.tensor(0))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        if self.server == "mean":
            mean = Mean("centres", around=state.centres, weight="n", slots=True)
            _, reply = fed.map(self.divide, state.centres, to=fed.cohort(), reduce=mean)
            found = reply["centres"]
        else:
            asked = fed.map(self.divide, state.centres, to=fed.cohort())
            reply = shared.finite(self, *asked)[1]
            found = shared.clustered(fed, reply, self.n_clusters)
        moved = float((found - state.centres).norm(dim=1).max())
        return State(found, state.turn + 1), {"components": self.n_clusters, "moved": moved}

    def done(self, state: State) -> bool:
        return int(state.turn) >= self.rounds

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        return state, shared.by_shares(fed, self.divide, state.centres, ids)

    @task(stackable=False, phase="cluster")
    def first(self, client: Client) -> dict[str, Tensor]:
        return shared.local_start(client, self.n_clusters)

    @task
    def divide(self, client: Client, centres: Tensor) -> dict[str, Tensor]:
        return shared.divided(*shared.samples(client), centres)

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.centres}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distance to each centre: [n, k]."""
        return shared.closeness(personal["centres"], x)

    def surprise(self, output: Tensor) -> Tensor:
        """Squared distance to the nearest centre."""
        return -output.max(1).values

    @classmethod
    def example(cls, problem: Any) -> "FederatedKMeans":
        return cls(n_clusters=4)
