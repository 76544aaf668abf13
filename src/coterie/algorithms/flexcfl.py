"""FlexCFL: groups from the directions of a short first training.

Before the first round some clients train a common initial model for a few batches. The server
clusters them by the directions of their updates. Every other client does the same when it first
takes part, and joins the group of the nearest direction. Inside each group the clients run FedAvg.

References
----------
Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren: Flexible clustered federated learning for client-level
data distribution shift, IEEE TPDS 2022, arXiv 2108.09749, Algorithms 1 and 2. It continues
FedGroup, arXiv 2010.06870.

Departures
----------
- k-means takes the best of ten starts and runs until it converges (the authors' code: 20 steps).
- Migration compares the counts of labels class by class: it happens if the sum of the absolute
  differences exceeds `migration` times the number of samples.
- A group that nobody joined in the clustering begins with the initial model, and no client joins it
  later.

Faults of public code that are avoided: an average with a list of one weight, which applies one
client's update only; a small constant added to the sums of weights, so that models shrink; a
distance of counts that sorts them first and does not notice that two classes were exchanged.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.algorithms.vectors import cosines, order_by_name, vectors
from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import centroids
from coterie.clustering.linkage import agglomerate
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD, trainable
from coterie.core.tree import Ids, Params, Tree, put, tree_map


class State(NamedTuple):
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  group of each client, -1 until it has one
    directions: Tensor  # [k, p]  mean update of the first members; nan where there are none
    start: Params  # the initial model


@register("flexcfl")
@dataclass(frozen=True)
class FlexCFL(Algorithm):
    """Group clients by the directions of their first updates.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training.
    n_groups
        Number of groups, m in the paper.
    measure
        "edc" clusters the cosines between the updates and their leading singular vectors by
        k-means. "madc" clusters by the mean absolute difference of the cosines with all other
        updates, with complete linkage; its cost grows with the cube of the number of clients.
    pretrain_steps
        Number of batches of the first training.
    pretrain_clients
        Number of clients for each group that take part in the clustering, alpha.
    mixing
        Weight with which each group's model is mixed with those of the other groups after a round,
        eta_g. 0: not at all.
    migration
        A client whose counts of labels changed by more than this share of its samples since it was
        grouped is grouped anew. The authors take 0.2. None: groups never change.
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    measure: Literal["edc", "madc"] = "edc"
    pretrain_steps: Annotated[int, Ge(1)] = 50
    pretrain_clients: Annotated[int, Ge(1)] = 20
    mixing: Annotated[float, Ge(0)] = 0.0
    migration: Annotated[float, Ge(0)] | None = None

    def check(self) -> None:
        if self.migration is not None and self.model.loss != "cross_entropy":
            raise ConfigError(
                "FlexCFL: migration needs labels, that is a model with the loss cross_entropy. Got "
                f"{self.model.loss!r}. Leave migration out."
            )

    # server

    def init(self, fed: Federation) -> State:
        start = self.model.init(initial_key(fed.run_key))
        some = order_by_name(fed, fed.everyone())[: self.pretrain_clients * self.n_groups]
        ids, reply = fed.map(self.pretrain, start, to=some)
        updates = vectors(reply["params"]) - vectors(tree_map(lambda leaf: leaf[None], start))
        good = find_finite("FlexCFL", "replies", updates)
        ids, updates = ids[good], updates[good]
        trained = tree_map(lambda leaf: leaf[good], reply["params"])
        group = ids
        if len(ids) and self.measure == "edc":
            seed = int(fed.key("kmeans")) & 0x7FFFFFFF
            group, _ = kmeans(edc(updates, self.n_groups), self.n_groups, seed)
        elif len(ids):
            group = agglomerate(madc(updates), "complete", self.n_groups)
        bank = tree_map(lambda leaf: leaf.expand(self.n_groups, *leaf.shape).clone(), start)
        mean = fed.average(Mean("params", bank, by=group), "FlexCFL")  # all members alike
        mean.add({"params": trained}, torch.arange(len(ids)))
        directions = centroids(updates, group, self.n_groups)
        return State(mean.result(), put(fed.per_client(-1), ids, group), directions, start)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = order_by_name(fed, fed.cohort())
        if self.migration is not None:
            known = cohort[state.assignment[cohort] >= 0]
            heard, reply = fed.map(self.shifted, to=known, at_least=0)
            moved = heard[reply["moved"]] if len(heard) else heard
            state = state._replace(assignment=put(state.assignment, moved, -1))
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that did not answer wait
        group = state.assignment[cohort]
        mean = Mean("params", state.models, by=group, weight="n")
        ids, reply = fed.map(self.update, rows(state.models, group), to=cohort, reduce=mean)
        models = mix(reply["params"], self.mixing) if self.mixing else reply["params"]
        info = {"assignment": state.assignment, "participants": ids.sort().values}
        used = len(state.assignment[ids].unique())
        return state._replace(models=models), info | {"groups_used": used}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = fed.map(self.pretrain, state.start, to=ids, at_least=0)
        margin, assignment = fed.per_client(torch.nan).double(), state.assignment
        if len(heard):
            start = tree_map(lambda leaf: leaf[None], state.start)
            updates = vectors(reply["params"]) - vectors(start)
            good = find_finite("FlexCFL", "replies", updates)
            heard = heard[good]
            distance = (1 - cosines(updates[good], state.directions.nan_to_num())) / 2  # [m, k]
            distance = distance.masked_fill(state.directions.isnan().any(1), 1.0)
            known = assignment[heard]
            group = torch.where(known >= 0, known, distance.argmin(1))
            assignment = put(assignment, heard, group)
            ordered = torch.cat([distance, torch.ones(len(heard), 1)], 1).sort(1).values
            margin = put(margin, heard, ordered[:, 1] - ordered[:, 0])
        nan = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        fits = torch.ones(len(ids), dtype=torch.bool)
        found = Evidence(assignment[ids], margin[ids], nan, fits)
        return state._replace(assignment=assignment), found

    # client

    def client_init(self, client: Client) -> Tree:
        return {} if self.migration is None else {"counts": torch.zeros_like(self.count(client))}

    @task(phase="cluster")
    def pretrain(self, client: Client, params: Params) -> Reply:
        local = replace(self.local, steps=self.pretrain_steps, epochs=None)
        trained = local(client, params, self.model.losses)
        keep = None if self.migration is None else {"counts": self.count(client)}
        return Reply({"params": trained}, keep=keep)

    @task(phase="cluster")
    def shifted(self, client: Client) -> dict[str, Tensor]:
        change = (self.count(client) - client.state["counts"]).abs().sum()
        return {"moved": change > (self.migration or 0) * client.train.size}

    @task
    def update(self, client: Client, params: Params) -> dict[str, Tree]:
        return {"params": self.local(client, params, self.model.losses), "n": client.train.size}

    def count(self, client: Client) -> Tensor:
        """Number of samples of each class, [c]."""
        batch = client.train
        is_class = batch.y[:, None] == torch.arange(self.model.n_outputs(batch.x))
        return (is_class & batch.mask[:, None]).sum(0)

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(state.models, state.assignment[ids].clamp(min=0))


def edc(updates: Tensor, k: int) -> Tensor:
    """Cosines of updates [n, p] with their k leading singular vectors: [n, k].

    From the products of updates with each other, because p is large and n is small.
    """
    values, vectors = torch.linalg.eigh(updates @ updates.mT)
    sizes = values.clamp(min=0).sqrt().flip(0)[:k]  # singular values, the largest first
    return vectors.flip(1)[:, :k] * sizes / updates.norm(dim=1, keepdim=True).clamp(min=1e-12)


def madc(updates: Tensor) -> Tensor:
    """Mean absolute difference of the cosines of two updates with all others: [n, n]."""
    cosine = cosines(updates, updates)
    own = cosine.diagonal()
    both = (own[:, None] - cosine).abs() + (own - cosine).abs()  # the two updates themselves
    total = torch.cdist(cosine, cosine, p=1) - both
    return total.clamp(min=0).fill_diagonal_(0) / max(len(updates) - 2, 1)


def mix(models: Params, strength: float) -> Params:
    """Mix each row of a bank with the others, scaled to norm 1; the weights add up to one."""
    norm = vectors(models).norm(dim=1)
    weight = torch.where(norm > 0, strength / norm.clamp(min=1e-12), 0.0)  # [k]
    share = weight.expand(len(weight), -1).clone().fill_diagonal_(1)  # [k, k]
    share = share / share.sum(1, keepdim=True)
    return {
        name: torch.einsum("kl,l...->k...", share, leaf.double()).to(leaf.dtype)
        if trainable((name,), leaf)
        else leaf
        for name, leaf in models.items()
    }
