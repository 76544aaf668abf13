"""CLoVE: the server clusters clients by their vectors of losses on all models.

Clients of one group lose alike on every model, even where one model is best for everybody. The
server clusters the vectors and gives different clusters different models, by the matching with the
least total loss, so that no model starves.

References
----------
Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty: CLoVE: personalized federated learning through
clustering of loss vector embeddings, 2025, arXiv 2506.22427, Algorithm 1.

Departures: fewer participants than groups are clustered with a chosen k; k-means starts ten times;
newcomers go to the nearest centroid in units of the members' scatter (`clustering/evidence.py`),
which also says whether they fit anybody; `scale`, `min_group_size` and `elbow` are options of ours.

Notes: with K unknown the bank keeps all `max_groups` models, and unmatched ones still give a
coordinate. The matching cost is the loss itself, whatever the embedding. Centroids belong to the
bank they were measured on, so both are kept.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import groups
from coterie.clustering.choose_k import choose_k
from coterie.clustering.evidence import Reference, no_reference, reference, weigh
from coterie.clustering.hierarchical import ward
from coterie.clustering.kmeans import kmeans
from coterie.clustering.matching import clean_losses, merge_small, min_cost_matching
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put


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
    embedding, scale
        Vectors of losses or of their square roots; divided by each column's deviation or not.
    clustering, choose, tolerance, replicate
        How vectors are clustered; how k is chosen where it is unknown: best silhouette, a larger k
        only if better by this share, rows repeated so often where every client may stand alone.
    matching
        Which cluster gets which model: least total loss, or in order (an ablation).
    min_group_size
        Smaller clusters join the nearest one; a group of one shows its model to everybody.
    averaging, weights, shared
        As in IFCA; gradients are divided by the weight of the group's members.
    init_models, first
        Independent or identical first models; round 1 is dealt at random or clusters their losses.
    first_bank
        `orthonormal`: as many models as inputs, at right angles; for linear models, in theory.
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
        if (self.n_groups is None) == (self.max_groups is None):
            got = f"n_groups={self.n_groups}, max_groups={self.max_groups}"
            raise ConfigError(
                f"CLoVE: give n_groups, or max_groups where it is unknown. Got {got}."
            )

    def init(self, fed: Federation) -> State:
        key, k = fed.key("models"), self.n_groups or self.max_groups or 1
        shared, models = groups.first_models(self.model, key, k, self.init_models == "same")
        if self.first_bank == "orthonormal":
            models = groups.orthonormal(models, key)
        k = len(next(iter(models.values())))
        nobody, never, anchors = (
            fed.per_client(-1),
            fed.per_client(0),
            {"shared": shared, "models": models},
        )
        unit, judge = torch.ones(k, dtype=torch.float64), no_reference(k, k)
        return State(shared, models, nobody, never, torch.tensor(False), anchors, unit, judge)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()  # line 3
        settled = groups.settled(state.repeats, cohort, self.stable_after, self.stable_fraction)
        state = state._replace(stable=state.stable | settled)
        vectors = None
        if state.stable:
            state, _ = self.place(fed, state, groups.unplaced(state.assignment, cohort))  # line 15
            cohort = cohort[state.assignment[cohort] >= 0]  # a newcomer that stays silent waits
        else:
            cohort, reply = fed.map(self.losses, state.shared, state.models, to=cohort)  # lines 5-8
            state, vectors = self.recluster(fed, state, cohort, clean_losses(reply["losses"]))
        group = state.assignment[cohort]
        means = groups.means(self, state.shared, state.models, by=group)
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)  # lines 16-22
        heard = torch.isin(cohort, ids)
        if vectors is not None:
            members = reference(vectors[heard], group[heard], reply["n"], vectors.shape[1])
            state = state._replace(reference=members)
        shared, models = groups.moved(self, fed, state, reply, group[heard], "cluster")
        return state._replace(shared=shared, models=models), groups.info(state, cohort, group)

    def recluster(
        self, fed: Federation, state: State, cohort: Ids, losses: Tensor
    ) -> tuple[State, Tensor | None]:
        """New groups, and the vectors they rest on (none if they were dealt): lines 9-12."""
        if fed.round == 0 and self.first == "random":
            vectors, group = None, groups.random_groups(fed, cohort, losses.shape[1])
        else:
            unit = torch.ones(losses.shape[1], dtype=torch.float64)
            raw = self.embed(losses, unit)
            if self.scale == "column_std" and len(raw) > 1:
                unit = torch.where(raw.std(0) > 0, raw.std(0), 1.0)
            vectors = raw / unit
            labels = self.cluster(fed, vectors)
            cost = torch.zeros(int(labels.max()) + 1, losses.shape[1], dtype=torch.float64)
            cost.index_add_(0, labels, losses.double())  # [k', k]  losses, not the embedding
            column = (
                min_cost_matching(cost) if self.matching == "mincost" else torch.arange(len(cost))
            )
            group = column[labels]
            anchors = {"shared": state.shared, "models": state.models}
            state = state._replace(anchors=anchors, scale=unit)
        repeats = groups.run_lengths(state.assignment, state.repeats, cohort, group)
        assignment = put(state.assignment, cohort, group)
        repeats = put(state.repeats, cohort, repeats)
        return state._replace(assignment=assignment, repeats=repeats), vectors

    def cluster(self, fed: Federation, vectors: Tensor) -> Tensor:
        """Cluster of each row."""
        k = self.n_groups
        if k is None or k > len(vectors):  # unknown, or fewer participants than groups
            most = min(vectors.shape[1], len(vectors))
            rule = self.choose, self.tolerance, self.replicate
            k = choose_k(vectors, most, 2, *rule).k
        if self.clustering == "kmeans":
            labels, _ = kmeans(vectors, k, seed=int(fed.key("kmeans")) & 0x7FFFFFFF)
        else:
            labels, _ = ward(vectors, k)
        return merge_small(vectors, labels, self.min_group_size)

    def embed(self, losses: Tensor, scale: Tensor) -> Tensor:
        losses = losses.double()
        return (losses.clamp(min=0).sqrt() if self.embedding == "sqrt" else losses) / scale

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        anchors = state.anchors["shared"], state.anchors["models"]
        heard, reply = fed.map(self.answer, *anchors, to=ids, at_least=0)
        if not len(heard):
            return state, groups.no_evidence(ids, state.assignment)
        vectors = self.embed(clean_losses(reply["losses"]), state.scale)
        nearest, margin, score = weigh(state.reference, vectors, reply["n"])
        known = state.assignment[heard]
        group = torch.where(known >= 0, known, nearest)
        state = state._replace(assignment=put(state.assignment, heard, group))
        return state, groups.evidence(ids, heard, group, margin, score, state.assignment)

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

    def predict(self, personal: Params, x: Any) -> Tensor:
        return self.model.apply(personal, x)

    @classmethod
    def example(cls, problem: Any) -> "CLoVE":
        return cls(problem.model, problem.local, n_groups=problem.n_groups)
