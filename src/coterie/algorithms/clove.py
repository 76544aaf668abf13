"""CLoVE: the server clusters clients by their vectors of losses on all models.

Clients of one group lose alike on every model, even where one model is best for everybody. The
clusters are matched to different models with the least total loss, so that no model starves.

References: Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty: CLoVE: personalized federated learning
through clustering of loss vector embeddings, 2025, arXiv 2506.22427, Algorithm 1.
Departures: `published=True` is the method as printed, but for ten starts of k-means. Ours: losses
in noise units, added up (`clustering/accumulate.py`), K by the noise (`noise.py`), a guard against
lies (`guard.py`), newcomers by members' scatter, `scale`, `min_group_size` and `elbow`.
Notes: where K is unknown, unmatched models stay and still give a coordinate. The matching cost is
the loss, whatever the embedding. Centroids belong to the bank they were measured on: both are kept.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import groups, loss_groups
from coterie.algorithms.loss_groups import NOTHING
from coterie.clustering.evidence import Reference, no_reference, weigh
from coterie.clustering.loss_vectors import embed
from coterie.clustering.matching import clean_losses
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, grow, register
from coterie.core.client import Client, task
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
    anchors: dict[str, Params]  # both parts of the bank of the snapshot, for newcomers
    scale: Tensor  # [k]  of that clustering's embedding
    reference: Reference  # its members' loss vectors: centroid of each model, scatter
    units: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  losses in units of noise
    counts: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  samples behind; 0: none
    aside: Annotated[Tensor, Fill(0)] = NOTHING.flatten()  # [clients]  1: a loner, not averaged
    curve: Tensor = NOTHING  # [j, 3]  number of groups, criterion, 1 if chosen: last clustering
    apart: Tensor = torch.tensor(torch.nan)  # how clear the snapshot's groups were


@register("clove")
@dataclass(frozen=True)
class CLoVE(Algorithm):
    """Cluster clients by their losses on all models, and train a model for each cluster.

    Parameters
    ----------
    n_groups, max_groups
        The number of groups, K, or an upper bound on it: give one.
    embedding, accumulate, scale, clustering
        Losses in units of noise, added up over rounds; losses; or their roots, perhaps in units of
        each column's deviation. Clustered by Ward, weighted by precision or not, or by k-means.
    choose, threshold, tolerance, replicate
        Unknown K: the fewest groups that scatter at most so often the noise; the elbow; or the best
        silhouette, a larger k only if better by this share, rows repeated if all may stand alone.
    guard, snapshot
        Clip losses, set loners aside (`guard.py`). Newcomers meet the best grown bank, or the last.
    matching, min_group_size, averaging, weights, shared
        Clusters get models by least total loss, or in order; small ones join the nearest. The rest
        as in IFCA; gradients are divided by the weight of the group's members.
    init_models, first, first_bank
        Independent or identical first models; round 1 is dealt at random, clusters, or takes groups
        from untrained networks; as many orthonormal models as inputs (linear models, in theory).
    stable_after, stable_fraction, published
        Stop clustering once this share of a cohort had the same model so often in a row (R = 3).
        The method as printed: options left at their default take the paper's values.
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(2)] | None = None
    embedding: Literal["noise", "loss", "sqrt"] = "noise"
    accumulate: bool = True
    scale: Literal["none", "column_std"] = "none"
    clustering: Literal["weighted", "kmeans", "agglomerative"] = "weighted"
    choose: Literal["noise", "silhouette", "elbow"] = "noise"
    threshold: Annotated[float, Gt(0)] = 2.5
    tolerance: Annotated[float, Ge(0)] = 0.1
    replicate: Annotated[int, Ge(1)] = 5
    guard: bool = True
    snapshot: Literal["best", "last"] = "best"
    matching: Literal["mincost", "none"] = "mincost"
    min_group_size: Annotated[int, Ge(1)] = 1
    averaging: Literal["model", "gradient"] = "model"
    weights: Literal["samples", "equal"] = "samples"
    shared: Literal["train", "frozen"] = "train"
    init_models: Literal["different", "same"] = "different"
    first: Literal["random", "evaluation", "survey"] = "random"
    first_bank: Literal["drawn", "orthonormal"] = "drawn"
    stable_after: Annotated[int, Ge(0)] | None = None  # None: 3, or as published never (0)
    stable_fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    published: bool = False

    def check(self) -> None:
        loss_groups.check(self)

    def init(self, fed: Federation) -> State:
        key, k = fed.key("models"), self.n_groups or self.max_groups or 1
        kind = self.init_models == "same", self.first_bank == "orthonormal"
        shared, models = groups.first_models(self.model, key, k, *kind)
        anchors, k = {"shared": shared, "models": models}, len(next(iter(models.values())))
        start = shared, models, fed.per_client(-1), fed.per_client(0), torch.tensor(False), anchors
        first = State(*start, torch.ones(k, dtype=torch.float64), no_reference(k, k))
        return grow(first, fed.n_clients)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, vectors = fed.cohort(), None  # line 3
        state = state._replace(stable=groups.settled(self, state, cohort))
        if state.stable:
            state, _ = self.place(fed, state, groups.unplaced(state.assignment, cohort))  # line 15
            cohort = cohort[state.assignment[cohort] >= 0]  # a newcomer that stays silent waits
        else:
            cohort, reply = fed.map(self.losses, state.shared, state.models, to=cohort)  # lines 5-8
            state, vectors = loss_groups.recluster(self, fed, state, cohort, reply)  # lines 9-12
        cohort = cohort[state.aside[cohort] == 0]
        group = state.assignment[cohort]
        means, own = groups.means(self, state, by=group), rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)  # lines 16-22
        group = state.assignment[ids]
        state = loss_groups.remembered(state, vectors, ids, group, reply["n"])
        shared, models = groups.moved(self, fed, state, reply, group, "cluster")
        return state._replace(shared=shared, models=models), groups.info(state, cohort, group)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        bank = state.anchors["shared"], state.anchors["models"]
        heard, reply = fed.map(self.answer, *bank, to=ids, at_least=0)
        if not len(heard):
            return state, groups.no_evidence(ids, state.assignment)
        vectors = embed(clean_losses(reply["losses"]), self.embedding, state.scale)
        return groups.judged(state, ids, heard, *weigh(state.reference, vectors, reply["n"]))

    def curves(self, state: State) -> list[Curve]:
        return loss_groups.curves(self, state)

    @task(phase="cluster")
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return loss_groups.measured(self, shared, models, client.train)  # line 7

    @task(phase="cluster")
    def answer(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        losses = groups.bank_losses(self, shared, models, client.train)
        return {"losses": losses, "n": client.train.size}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        return {**groups.work(self, client, shared, own), "n": client.train.size}  # lines 17-18

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(groups.bank(state.shared, state.models), state.assignment[ids].clamp(min=0))
