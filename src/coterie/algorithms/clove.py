"""CLoVE: the server clusters clients by their vectors of losses on all models.

Clients of one group have similar losses on every model, even where one model is best for everybody.
The clusters are matched to different models with the least total loss, so that no model is left
without training data.

References
----------
Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty: CLoVE: personalized federated learning through
clustering of loss vector embeddings, 2025, arXiv 2506.22427: Algorithms 1 and 2, the choices of
section 5.2, the ablations of Table 17. Line numbers in the code are those of Algorithm 1.

Departures
----------
- Line 10: Algorithm 2 cannot score as many clusters as participants, since a silhouette needs fewer
  clusters than points. It also serves if there are fewer participants than K (not in the paper).
- Line 11: k-means keeps the best of ten starts; the paper does not give a number.
- Line 12: clusters may be matched to any of the max_groups models. The text names the first K of
  them, the authors' code all.
- Lines 13-16: the server counts how often each client got the same model; in the paper clients
  count and report it. The decision and the messages are the same.
- Line 15: a newcomer evaluates the models that the centroids were measured on, not the current
  ones. If nothing has been clustered yet, it gets the model of smallest loss.
- Losses that are not finite count as ten times the largest (with a warning).
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.clustering.hierarchical import choose_k, ward_path
from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import centroids
from coterie.clustering.matching import clean_losses, match_clusters
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD, descend
from coterie.core.tree import Ids, Params, Tree


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  model of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  the same model this many times in a row
    stable: Tensor  # once true, nothing is clustered any more
    saved: dict[str, Params]  # both parts of the models of the last clustering
    centroids: Tensor  # [k, k]  its centroids, by model; nan where there was no cluster
    scores: Tensor  # [j, 2]  its numbers of clusters and their silhouettes; empty if K was known


@register("clove")
@dataclass(frozen=True)
class CLoVE(Algorithm):
    """Cluster clients by their losses on all models, and train a model for each cluster.

    Parameters
    ----------
    model
        The network. If it has a head, the groups share everything else.
    local
        Local training: the number of epochs, the optimiser and its step size.
    n_groups
        The number of groups, K, if it is known.
    max_groups
        An upper bound on K if it is unknown; Algorithm 2 then chooses K in every round.
    clustering
        "kmeans", or "agglomerative" with Ward's criterion.
    embedding
        A client's vector holds its losses ("loss") or their square roots ("sqrt").
    matching
        Clusters get models by the least total loss ("mincost"), or in their order ("none").
    averaging
        "model" averages the members' trained models, weighted by samples. "gradient" takes one
        step along the mean of their gradients.
    init_models
        Independent ("different") or identical ("same") initial models.
    first
        The first round clusters ("evaluation") or assigns clients at random ("random").
    stable_after
        Stop clustering once every participant has had the same model this many times in a row.
        0: never stop.
    """

    starts: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(2)] | None = None
    clustering: Literal["kmeans", "agglomerative"] = "kmeans"
    embedding: Literal["loss", "sqrt"] = "loss"
    matching: Literal["mincost", "none"] = "mincost"
    averaging: Literal["model", "gradient"] = "model"
    init_models: Literal["different", "same"] = "different"
    first: Literal["evaluation", "random"] = "evaluation"
    stable_after: Annotated[int, Ge(0)] = 3

    def check(self) -> None:
        given = self.n_groups, self.max_groups
        if given.count(None) != 1:
            raise ConfigError(f"CLoVE: give n_groups, or max_groups if it is unknown. Got {given}.")

    def init(self, fed: Federation) -> State:
        k, same = self.n_groups or self.max_groups or 1, self.init_models == "same"
        shared, models = common.draw_models(self.model, fed.key("models"), k, same)  # line 1
        saved = {"shared": shared, "models": models}
        empty = torch.full((k, k), torch.nan, dtype=torch.float64), torch.zeros(0, 2).double()
        counts = fed.per_client(-1), fed.per_client(0), torch.tensor(False)
        return State(shared, models, *counts, saved, *empty)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()  # line 3: M_t
        stable = common.is_stable(state.stable, state.repeats, cohort, self.stable_after)
        state = state._replace(stable=stable)
        if not stable:  # line 4
            cohort, reply = fed.map(self.losses, state.shared, state.models, to=cohort)  # 5-8
            state = self.cluster(fed, state, cohort, clean_losses(reply["losses"]))
        else:  # lines 13-16
            state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
            cohort = cohort[state.assignment[cohort] >= 0]  # a silent newcomer waits
        group, gradients = state.assignment[cohort], self.averaging == "gradient"
        means = common.means_of(state.shared, state.models, group, "n", gradients)
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)  # 17-19
        shared, models = reply["shared"], reply["models"]  # line 22: mean by samples
        group = state.assignment[ids]
        if gradients:  # line 23: a step along the members' mean gradient
            rate = self.local.rate(torch.tensor(fed.round))
            trained = torch.bincount(group, minlength=len(state.centroids)).clamp(max=1)
            shared = descend(state.shared, shared, rate)
            models = descend(state.models, models, rate * trained)
        state = state._replace(shared=shared, models=models)
        return state, common.report_round(state.assignment, cohort, group, stable)

    def cluster(self, fed: Federation, state: State, cohort: Ids, losses: Tensor) -> State:
        """Lines 9-12: the model of each participant, by its losses [m, k]."""
        limit = losses.shape[1]
        if fed.round == 0 and (self.first == "random" or fed.start is not None):
            group = common.assign_at_random(fed, cohort, limit)
            group = common.follow_start(fed, cohort, group, limit)
            places = common.count_repeats(state.assignment, state.repeats, cohort, group, False)
            return state._replace(assignment=places[0], repeats=places[1])
        vectors, k, scores = self.embed(losses), self.n_groups, state.scores[:0]
        if k is None or k > len(vectors):
            k, found = choose_k(vectors, limit)  # line 10: Algorithm 2
            scores = torch.tensor(list(found.items())).double().reshape(-1, 2)
        if self.clustering == "kmeans":  # line 11
            labels, _ = kmeans(vectors, k, int(fed.key("kmeans")) & 0x7FFFFFFF)
        else:
            [labels] = ward_path(vectors, [k])
        matched = self.matching == "mincost"
        group = match_clusters(losses, labels)[labels] if matched else labels  # line 12
        places = common.count_repeats(state.assignment, state.repeats, cohort, group)
        saved = {"shared": state.shared, "models": state.models}
        means = centroids(vectors, group, limit)
        return State(state.shared, state.models, *places, state.stable, saved, means, scores)

    def embed(self, losses: Tensor) -> Tensor:
        """Vectors [m, k] of clients."""
        vectors = losses.double()
        return vectors.clamp(min=0).sqrt() if self.embedding == "sqrt" else vectors

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        saved, means = state.saved, state.centroids
        heard, reply = fed.map(self.losses, saved["shared"], saved["models"], to=ids, at_least=0)
        vectors = self.embed(clean_losses(reply["losses"]) if len(heard) else means[:0])
        known = means.isfinite().all(1)
        cost = vectors
        if known.any():  # line 15: the nearest centroid
            cost = torch.cdist(vectors, means.nan_to_num()).masked_fill(~known, torch.inf)
        nearest = common.choose_nearest(cost)
        assignment, found = common.place_clients(state.assignment, ids, heard, *nearest)
        return state._replace(assignment=assignment), found

    def curves(self, state: State) -> list[Curve]:
        if self.n_groups is not None or not len(state.scores):
            return []
        ks, values = tuple(state.scores[:, 0].long().tolist()), tuple(state.scores[:, 1].tolist())
        best, *others = sorted(ks, key=lambda k: -values[ks.index(k)])
        note = "a silhouette cannot say that there is one group"
        second = others[0] if others else None
        return [Curve("losses", "silhouette", ks, values, best, second, (), note=note)]

    def profiles(self, state: State) -> Tensor:
        return state.centroids

    @task(phase="cluster", losses=("losses",))
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return {"losses": self.model.probe(common.whole_models(shared, models), client.train)}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        learn = self.local if self.averaging == "model" else self.local.gradient  # lines 18, 19
        trained = common.train_own(self.model, learn, client, shared, own)
        return {**trained, "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        return rows(bank, state.assignment[ids].clamp(min=0))
