"""Federated fuzzy c-means: every sample belongs to every centre, with fuzzy memberships.

In every round each client computes the memberships of its samples to the common centres and sends
the weighted means; the server averages them. That is fuzzy c-means on the pooled data.

References: Stallmann, Wilbik: Towards federated clustering: a federated fuzzy c-means algorithm,
2022, arXiv 2201.07316; Bezdek: Pattern recognition with fuzzy objective function algorithms, 1981.
Departures: the server averages clients' centres by their summed memberships, which is the exact
step of fuzzy c-means, instead of clustering them; the initial centres come from clients' k-means.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms import centres as shared
from coterie.algorithms.samples import closeness, samples
from coterie.clustering.lloyd import squared_distances
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Info, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation
from coterie.core.tree import Ids, Tree


class State(NamedTuple):
    centres: Tensor  # [k, d]
    turn: Tensor  # rounds done
    moved: Tensor  # largest distance that a centre moved in the last round


@register("federated_cmeans")
@dataclass(frozen=True)
class FederatedCMeans(Algorithm):
    """Cluster the samples of all clients around k common centres, with fuzzy memberships.

    Parameters
    ----------
    n_clusters
        Number of centres, c.
    fuzzifier
        Exponent m of the memberships; near 1 the clusters become hard. With many features 2 is
        too soft: the centres become equal.
    rounds
        Largest number of rounds.
    tolerance
        Stop earlier when no centre moves farther than this.
    """

    title: ClassVar[str] = "Federated fuzzy c-means"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.5  # agreement with the labels of clouds

    n_clusters: Annotated[int, Ge(1)]
    fuzzifier: Annotated[float, Gt(1)] = 2.0
    rounds: Annotated[int, Ge(0)] = 30
    tolerance: Annotated[float, Ge(0)] = 1e-6

    def init(self, fed: Federation) -> State:
        start = shared.initial_centres("FederatedCMeans", fed, self.first, self.n_clusters)
        return State(start, torch.tensor(0), torch.tensor(torch.inf, dtype=torch.float64))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("centres", around=state.centres, weight="n", slots=True)
        _, reply = fed.map(self.belong, state.centres, to=fed.cohort(), reduce=mean)
        moved = (reply["centres"] - state.centres).norm(dim=1).max()
        info = {"components": self.n_clusters, "moved": float(moved)}
        return State(reply["centres"], state.turn + 1, moved), info

    def done(self, state: State) -> bool:
        return int(state.turn) >= self.rounds or float(state.moved) <= self.tolerance

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        return state, shared.place_by_shares(fed, self.belong, state.centres, ids)

    @task(stackable=False, phase="cluster")
    def first(self, client: Client) -> dict[str, Tensor]:
        return shared.local_centres(client, self.n_clusters)

    @task
    def belong(self, client: Client, centres: Tensor) -> dict[str, Tensor]:
        x, mask = samples(client)
        member = self.memberships(x, centres) ** self.fuzzifier
        member = torch.where(mask[:, None], member, 0.0)
        n = member.sum(0)
        return {"centres": member.T @ x / n.clamp(min=1e-300)[:, None], "n": n}

    def memberships(self, x: Tensor, centres: Tensor) -> Tensor:
        """u_ik = 1 / sum_j (d_ik / d_ij)^(2 / (m - 1)): [n, k], rows sum to one."""
        squared = squared_distances(x, centres).clamp(min=1e-300)
        return (-squared.log() / (self.fuzzifier - 1)).softmax(1)

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.centres}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distance to each centre: [n, k]."""
        return closeness(personal["centres"], x)

    def surprise(self, output: Tensor) -> Tensor:
        """Squared distance to the nearest centre."""
        return -output.max(1).values

    @classmethod
    def example(cls, problem: Any) -> "FederatedCMeans":
        return cls(n_clusters=4)
