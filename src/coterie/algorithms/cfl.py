"""CFL: one model for all, divided in two where clients pull it in different directions.

All clients begin in one cluster. Where a cluster's mean update is small, its model has converged as
a compromise. If some of its members still make large updates, they disagree: the cluster is divided
so that the largest similarity (cosine) between updates across the cut is as small as possible. Both
parts go on from the same model, and may be divided again.

References
----------
Sattler, Müller, Samek: Clustered federated learning: model-agnostic distributed multi-task
optimization under privacy constraints, IEEE TNNLS 2021, arXiv 1910.01991: Algorithms 1 to 4.
Called CFL-S in comparisons.

Departures
----------
- The defaults of the thresholds are those of the authors' notebook; the paper tunes them.
- Made for full participation. With less, a cluster is divided by the updates of this round; members
  that were absent are placed when they return.
- An unassigned client walks down the tree, as in Algorithm 4. At a division it trains the model of
  that time and takes the side of larger mean similarity (the paper: of the largest similarity), so
  that the server keeps two directions for each division instead of all updates.
- `thresholds="relative"` is not in the paper. Norms depend on the step size and the network.

Faults of public code that are avoided: positions inside a cluster taken for client ids, so that
clients are lost or doubled from the second division on; complete linkage, which does not give the
best cut; evaluation in training mode.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.algorithms.vectors import cosines, order_by_name, vectors
from coterie.clustering.linkage import agglomerate
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation, each, rows
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, take, tree_map


class State(NamedTuple):
    models: Params  # [k, ...]  one for each cluster
    assignment: PerClient  # [clients]  cluster of each client, -1 until it is placed
    waiting: Annotated[Tensor, Fill(0)]  # [clients]  division where an unassigned client goes on
    tree: (
        Tensor  # [s, 2]  each division: the cluster divided, which keeps one side, and the new one
    )
    ancestors: Params  # [s, ...]  model at each division
    sides: Tensor  # [s, 2, p]  mean direction of the updates on both sides


@register("cfl")
@dataclass(frozen=True)
class CFL(Algorithm):
    """Divide clusters whose members' updates point in different directions.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training.
    mean_below
        Norm of the mean update below which a cluster may be divided.
    max_above
        Norm that the largest update must exceed. Used with absolute thresholds only.
    thresholds
        "absolute": both norms as they are. "relative": the norm of the mean update must be below
        `mean_below` times the norm of the largest.
    min_rounds
        Number of rounds before the first division.
    min_size
        Clusters of this size or smaller are not divided.
    linkage
        "single" finds the best cut. "complete" is what the authors' code does.
    noise
        Bound on the noise of updates inside a true cluster, gamma_max. A division is accepted only
        if the noise is below sqrt((1 - s) / 2), where s is the largest similarity across the cut.
        None: every division is accepted, as in the authors' code.
    use
        Model of a client: "leaf", that of its cluster, or "best", the one on its way down the tree
        with the smallest loss on its validation data; without validation data, the leaf.
    """

    model: Model
    local: LocalSGD
    mean_below: Annotated[float, Gt(0)] = 0.4
    max_above: Annotated[float, Ge(0)] = 1.6
    thresholds: Literal["absolute", "relative"] = "absolute"
    min_rounds: Annotated[int, Ge(0)] = 20
    min_size: Annotated[int, Ge(1)] = 2
    linkage: Literal["single", "complete"] = "single"
    noise: Annotated[float, Ge(0), Le(1)] | None = None
    use: Literal["leaf", "best"] = "leaf"

    # server

    def init(self, fed: Federation) -> State:
        models = tree_map(lambda leaf: leaf[None], self.model.init(initial_key(fed.run_key)))
        none = tree_map(lambda leaf: leaf[:0], models)
        sides = torch.zeros(0, 2, vectors(models).shape[1], dtype=torch.float64)
        places = fed.per_client(-1), fed.per_client(0)
        return State(models, *places, torch.zeros(0, 2, dtype=torch.int64), none, sides)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = order_by_name(fed, fed.cohort())
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that did not answer wait
        own = rows(state.models, state.assignment[cohort])
        ids, reply = fed.map(self.update, own, to=cohort)
        updates = vectors(reply["params"]) - vectors(take(state.models, state.assignment[ids]))
        good = find_finite("CFL", "replies", updates)
        if fed.round >= self.min_rounds:
            for cluster in range(len(state.sides) + 1):  # clusters made below have to wait
                members = good & (state.assignment[ids] == cluster)
                state = self.divide(state, cluster, ids[members], updates[members])
        mean = Mean("params", state.models, by=state.assignment[ids])
        average = fed.average(mean, "CFL")
        average.add(reply, torch.arange(len(ids)))
        state = state._replace(models=average.result())
        info = {"assignment": state.assignment, "participants": ids.sort().values}
        return state, info | {"groups_used": len(state.sides) + 1}

    def divide(self, state: State, cluster: int, ids: Ids, updates: Tensor) -> State:
        """Divide a cluster by the updates of its present members, if they disagree."""
        if len(ids) <= self.min_size or not self.disagree(updates):
            return state
        similarity = cosines(updates, updates)
        second = agglomerate(1 - similarity, self.linkage, k=2) == 1
        across = float(similarity[second][:, ~second].max())
        if self.noise is not None and self.noise >= max((1 - across) / 2, 0) ** 0.5:
            return state
        number, new = len(state.tree), len(state.sides) + 1
        absent = state.assignment == cluster
        assignment = put(torch.where(absent, -1, state.assignment), ids, cluster)
        directions = torch.nn.functional.normalize(updates)
        sides = torch.stack([directions[~second].mean(0), directions[second].mean(0)])
        parent = tree_map(lambda leaf: leaf[cluster : cluster + 1], state.models)
        return State(
            tree_map(lambda *leaf: torch.cat(leaf), state.models, parent),
            put(assignment, ids[second], new),
            torch.where(absent, number, state.waiting),
            torch.cat([state.tree, torch.tensor([[cluster, new]])]),
            tree_map(lambda *leaf: torch.cat(leaf), state.ancestors, parent),
            torch.cat([state.sides, sides[None]]),
        )

    def disagree(self, updates: Tensor) -> bool:
        """Whether the mean update is small and some update is large."""
        mean, largest = float(updates.mean(0).norm()), float(updates.norm(dim=1).max())
        if self.thresholds == "relative":
            return mean < self.mean_below * largest
        return mean < self.mean_below and largest > self.max_above

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        new = ids[state.assignment[ids] < 0]
        margin = fed.per_client(torch.nan).double()
        if not len(state.tree):
            state = state._replace(assignment=put(state.assignment, new, 0))
        while len(state.tree) and len(new):  # one level of the tree at a time
            at = state.waiting[new]
            heard, reply = fed.map(self.update, rows(state.ancestors, at), to=new, at_least=0)
            if not len(heard):
                break
            at = state.waiting[heard]
            updates = vectors(reply["params"]) - vectors(take(state.ancestors, at))
            good = find_finite("CFL", "replies", updates)
            heard, at, updates = heard[good], at[good], updates[good]
            fit = torch.einsum("mp,msp->ms", updates, state.sides[at])
            fit = fit / updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
            cluster = state.tree[at, fit.argmax(1)]
            least = torch.minimum(margin[heard].nan_to_num(1.0), (fit[:, 0] - fit[:, 1]).abs() / 2)
            margin = put(margin, heard, least)
            later = torch.arange(len(state.tree)) > at[:, None]
            ahead = later & (state.tree[:, 0] == cluster[:, None])  # [m, s]
            going = ahead.any(1)
            waiting = put(state.waiting, heard[going], ahead[going].int().argmax(1))
            assignment = put(state.assignment, heard[~going], cluster[~going])
            state = state._replace(waiting=waiting, assignment=assignment)
            new = heard[going]
        group = state.assignment[ids]
        nan = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        return state, Evidence(group, margin[ids], nan, torch.ones(len(ids), dtype=torch.bool))

    # client

    @task
    def update(self, client: Client, params: Params) -> dict[str, Tree]:
        return {"params": self.local(client, params, self.model.losses)}

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        group = state.assignment[ids].clamp(min=0)
        if self.use == "leaf":
            return rows(state.models, group)
        bank = tree_map(lambda *leaf: torch.cat(leaf), state.models, state.ancestors)
        ways = find_ways(state.tree)[group]  # [m, s + 1]
        return each(tree_map(lambda leaf: leaf[ways], bank))

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        if self.use == "leaf":
            return given
        losses = self.model.probe(given, client.validation)  # all 0 without samples: the leaf
        return take(given, losses.nan_to_num(torch.inf, torch.inf).argmin())

    @classmethod
    def example(cls, problem: Any) -> "CFL":
        return cls(problem.model, problem.local, 0.8, thresholds="relative", min_rounds=1)


def find_ways(tree: Tensor) -> Tensor:
    """The models on the way from each cluster up to the root, [k, s + 1]; the rest repeats its own.

    Models are numbered 0 to k - 1 for the clusters, and from k on for the divisions.

    >>> find_ways(torch.tensor([[0, 1], [1, 2]]))
    tensor([[0, 3, 0],
            [1, 4, 3],
            [2, 4, 3]])
    """
    k = len(tree) + 1
    ways = torch.arange(k)[:, None].repeat(1, k)
    for leaf in range(k):
        cluster, place = leaf, 1
        for number, (divided, new) in reversed(list(enumerate(tree.tolist()))):
            if cluster in (divided, new):
                ways[leaf, place], cluster, place = k + number, divided, place + 1
    return ways
