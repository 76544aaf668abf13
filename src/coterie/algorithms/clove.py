"""CLoVE: the server clusters clients by their vectors of losses on all models.

Clients of one group lose alike on every model, even where one model is best for everybody. The
clusters are matched to different models with the least total loss, so that no model starves.

References: Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty: CLoVE: personalized federated learning
through clustering of loss vector embeddings, 2025, arXiv 2506.22427, Algorithm 1.
Departures: fewer participants than groups get a chosen k; k-means starts ten times; newcomers go to
the nearest centroid in units of the members' scatter (`clustering/evidence.py`), which also says
whether they fit anybody; `scale`, `min_group_size` and `elbow` are ours.
Notes: where K is unknown, unmatched models stay and still give a coordinate. The matching cost is
the loss, whatever the embedding. Centroids belong to the bank they were measured on: both are kept.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import groups
from coterie.clustering.evidence import Reference, no_reference, reference, weigh
from coterie.clustering.loss_vectors import cluster, column_unit, embed, match_models
from coterie.clustering.matching import clean_losses
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  model of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  equal entries in a row
    stable: Tensor  # latched: once reached, clustering stops for good
    anchors: dict[str, Params]  # both parts of the bank of the last clustering, for newcomers
    scale: Tensor  # [k]  of that clustering's embedding
    reference: Reference  # its members' loss vectors: centroid of each model, scatter


@register("clove")
@dataclass(frozen=True)
class CLoVE(Algorithm):
    """Cluster clients by their losses on all models, and train a model for each cluster.

    Parameters
    ----------
    n_groups, max_groups
        The number of groups, K, or an upper bound on it: give one.
    embedding, scale, clustering
        Losses or their square roots, perhaps in units of each column's deviation; how clustered.
    choose, tolerance, replicate
        Unknown K: the elbow; or the best silhouette, a larger k only if better by this share, rows
        repeated so often where every client may stand alone.
    matching, min_group_size
        Clusters get models by least total loss, or in order; small ones join the nearest.
    averaging, weights, shared
        As in IFCA; gradients are divided by the weight of the group's members.
    init_models, first, first_bank
        Independent or identical first models; round 1 is dealt at random or clusters; as many
        orthonormal models as inputs (linear models, in theory).
    stable_after, stable_fraction
        Stop clustering once this share of a cohort had the same model so often in a row (R).
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(2)] | None = None
    embedding: Literal["loss", "sqrt"] = "loss"
    scale: Literal["none", "column_std"] = "none"
    clustering: Literal["kmeans", "agglomerative"] = "kmeans"
    choose: Literal["silhouette", "elbow"] = "silhouette"
    tolerance: Annotated[float, Ge(0)] = 0.1
    replicate: Annotated[int, Ge(1)] = 5
    matching: Literal["mincost", "none"] = "mincost"
    min_group_size: Annotated[int, Ge(1)] = 1
    averaging: Literal["model", "gradient"] = "model"
    weights: Literal["samples", "equal"] = "samples"
    shared: Literal["train", "frozen"] = "train"
    init_models: Literal["different", "same"] = "different"
    first: Literal["random", "evaluation"] = "random"
    first_bank: Literal["drawn", "orthonormal"] = "drawn"
    stable_after: Annotated[int, Ge(1)] | None = None
    stable_fraction: Annotated[float, Gt(0), Le(1)] = 1.0

    def check(self) -> None:
        given = self.n_groups, self.max_groups
        if given.count(None) != 1:
            raise ConfigError(f"CLoVE: give n_groups, or max_groups if it is unknown. Got {given}.")

    def init(self, fed: Federation) -> State:
        key, k = fed.key("models"), self.n_groups or self.max_groups or 1
        kind = self.init_models == "same", self.first_bank == "orthonormal"
        shared, models = groups.first_models(self.model, key, k, *kind)
        anchors, k = {"shared": shared, "models": models}, len(next(iter(models.values())))
        start = shared, models, fed.per_client(-1), fed.per_client(0), torch.tensor(False), anchors
        return State(*start, torch.ones(k, dtype=torch.float64), no_reference(k, k))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, vectors = fed.cohort(), None  # line 3
        state = state._replace(stable=groups.settled(self, state, cohort))
        if state.stable:
            state, _ = self.place(fed, state, groups.unplaced(state.assignment, cohort))  # line 15
            cohort = cohort[state.assignment[cohort] >= 0]  # a newcomer that stays silent waits
        else:
            cohort, reply = fed.map(self.losses, state.shared, state.models, to=cohort)  # lines 5-8
            state, vectors = self.recluster(fed, state, cohort, clean_losses(reply["losses"]))
        group = state.assignment[cohort]
        means, own = groups.means(self, state, by=group), rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)  # lines 16-22
        trained = torch.isin(cohort, ids)
        if vectors is not None:
            members = reference(vectors[trained], group[trained], reply["n"], vectors.shape[1])
            state = state._replace(reference=members)
        shared, models = groups.moved(self, fed, state, reply, group[trained], "cluster")
        return state._replace(shared=shared, models=models), groups.info(state, cohort, group)

    def recluster(
        self, fed: Federation, state: State, cohort: Ids, losses: Tensor
    ) -> tuple[State, Tensor | None]:
        """New groups, and the vectors they rest on (none if they were dealt): lines 9-12."""
        if fed.round == 0 and self.first == "random":
            group = groups.random_groups(fed, cohort, losses.shape[1])
            return groups.noted(state, cohort, group, dealt=True), None
        unit = column_unit(embed(losses, self.embedding), self.scale)
        vectors = embed(losses, self.embedding, unit)
        how = self.clustering, self.choose, self.tolerance, self.replicate, self.min_group_size
        labels = cluster(vectors, self.n_groups, *how, seed=int(fed.key("kmeans")) & 0x7FFFFFFF)
        group = match_models(losses, labels, self.matching)  # by losses, whatever the embedding
        anchors = {"shared": state.shared, "models": state.models}
        return groups.noted(state._replace(anchors=anchors, scale=unit), cohort, group), vectors

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        bank = state.anchors["shared"], state.anchors["models"]
        heard, reply = fed.map(self.answer, *bank, to=ids, at_least=0)
        if not len(heard):
            return state, groups.no_evidence(ids, state.assignment)
        vectors = embed(clean_losses(reply["losses"]), self.embedding, state.scale)
        return groups.judged(state, ids, heard, *weigh(state.reference, vectors, reply["n"]))

    @task(phase="cluster")
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return {"losses": groups.bank_losses(self, shared, models, client.train)}  # line 7

    @task(phase="cluster")
    def answer(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return {**self.losses(client, shared, models), "n": client.train.size}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        return {**groups.work(self, client, shared, own), "n": client.train.size}  # lines 17-18

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(groups.bank(state.shared, state.models), state.assignment[ids].clamp(min=0))
