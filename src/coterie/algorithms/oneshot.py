"""One-shot clustering: cluster what clients learn alone, once, and train a model for each cluster.

Before the first round every client fits a simple model to its own data and sends the coefficients.
The server clusters them by k-means. The clusters never change; inside each, clients train and the
server averages.

References
----------
Ghosh, Chung, Yin, Ramchandran: An efficient framework for clustered federated learning, NeurIPS
2020, arXiv 2006.04088, Algorithm 1. The simple model is that of the authors' code for FEMNIST.

Departures
----------
- The paper allows any convex model. Here it is a logistic regression, one class against the rest,
  or a linear regression, by the loss of `model`.
- `stage_one="update"` is not in the paper: coefficients of networks cannot be compared, so all
  clients begin with one network, and their updates are clustered.
- The second stage is open in the paper. Here it is model averaging, all members alike.
- A client that comes later fits the simple model, too, and joins the nearest centroid.

Faults of public code that are avoided: a client with two classes has one row of coefficients, for
which the table of the authors' code has no place. A client with one class sends zeros, with a
warning.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.finite import find_finite
from coterie.algorithms.vectors import order_by_name, vectors
from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import centroids
from coterie.core.algorithm import Algorithm, Evidence, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, tree_map


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  cluster of each client, -1 until first contact
    centroids: Tensor  # [k, p]  of the coefficients; nan where there is no cluster


@register("oneshot")
@dataclass(frozen=True)
class OneShot(Algorithm):
    """Cluster clients once by models that they fit alone.

    Parameters
    ----------
    model
        The network of the second stage. If it has a head, the groups share everything else.
    local
        Local training in the second stage.
    n_groups
        Number of clusters, k.
    stage_one
        What clients send: the coefficients of a convex model of the raw inputs ("convex"), or the
        change of `model` in a training that all begin with the same weights ("update").
    penalty
        Weight of half the squared norm of the coefficients of a logistic regression, beside the
        sum of the losses. The authors' code has 1.
    fit_epochs
        Passes over a client's data in the first stage. Used with "update" only.
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    stage_one: Literal["convex", "update"] = "convex"
    penalty: Annotated[float, Gt(0)] = 1.0
    fit_epochs: Annotated[int, Ge(1)] = 20

    def check(self) -> None:
        if self.stage_one == "convex" and self.model.loss not in ("cross_entropy", "squared_error"):
            raise ConfigError(
                'OneShot: stage_one="convex" needs the loss cross_entropy or squared_error. Got '
                f'{self.model.loss!r}. Use stage_one="update".'
            )

    def init(self, fed: Federation) -> State:
        k = self.n_groups
        shared, models = common.draw_models(self.model, fed.key("models"), k, same=True)
        ids, found, _ = self.ask(fed, order_by_name(fed, fed.everyone()), 1)
        group = kmeans(found, k, int(fed.key("kmeans")) & 0x7FFFFFFF)[0] if len(ids) else ids
        assignment = put(fed.per_client(-1), ids, group)
        return State(shared, models, assignment, centroids(found, group, k))

    def ask(self, fed: Federation, ids: Ids, at_least: int) -> tuple[Ids, Tensor, Tensor]:
        """Clients that answered with numbers, their coefficients [m, p], and who could not fit."""
        ids, reply = fed.map(self.fit_alone, to=ids, at_least=at_least)
        found = reply["coefficients"].double() if len(ids) else torch.zeros(0, 1).double()
        good = find_finite("OneShot", "replies", found)
        ids, found = ids[good], found[good]
        zero = ~found.any(1) & (self.model.loss == "cross_entropy")  # a slope may well be 0
        if bool(zero.any()):
            warnings.warn(f"OneShot: clients with one class only: {int(zero.sum())}.", stacklevel=3)
        return ids, found, zero

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = order_by_name(fed, fed.cohort())
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that did not answer wait
        group = state.assignment[cohort]
        means = common.means_of(state.shared, state.models, group, None)
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)
        state = state._replace(shared=reply["shared"], models=reply["models"])
        info = {"assignment": state.assignment, "participants": ids.sort().values}
        return state, info | {"groups_used": len(state.assignment[ids].unique())}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, found, zero = self.ask(fed, ids, 0)
        centres = state.centroids.nan_to_num()
        distance = torch.cdist(found, centres) if len(heard) else torch.zeros(0, self.n_groups)
        distance = distance.masked_fill(state.centroids.isnan().any(1), torch.inf)
        score = torch.where(zero, torch.inf, torch.nan)
        nearest = common.choose_nearest(distance)
        places = common.place_clients(state.assignment, ids, heard, *nearest, score, 1.0)
        return state._replace(assignment=places[0]), places[1]

    @task(stackable=False, phase="cluster")
    def fit_alone(self, client: Client) -> dict[str, Tensor]:
        """The client's own model, as a vector [p]."""
        if self.stage_one == "update":
            start = self.model.init(initial_key(client.run_key))
            local = replace(self.local, epochs=self.fit_epochs, steps=None)
            trained = local(client, start, self.model.losses)
            change = tree_map(lambda new, old: (new - old)[None], trained, start)
            return {"coefficients": vectors(change)[0].to(self.model.dtype)}
        batch = client.train
        x, y = batch.x[batch.mask].flatten(1).double(), batch.y[batch.mask]
        if self.model.loss == "cross_entropy":
            found = fit_logistic(x, y, self.model.n_outputs(batch.x), self.penalty)
        else:
            found = torch.linalg.pinv(x) @ y.double().reshape(len(x), -1)
        return {"coefficients": found.flatten().to(self.model.dtype)}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        return common.train_own(self.model, self.local, client, shared, own)

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        return rows(bank, state.assignment[ids].clamp(min=0))


def fit_logistic(x: Tensor, y: Tensor, n_classes: int, penalty: float) -> Tensor:
    """Coefficients (no intercepts) of each class against the rest, [c, d]; 0 for absent classes."""
    found, present = x.new_zeros(n_classes, x.shape[1]), y.unique()
    for c in present if len(present) > 1 else ():
        fit = LogisticRegression(C=1 / penalty, max_iter=1000).fit(x.numpy(), (y == c).numpy())
        found[c] = torch.from_numpy(fit.coef_[0])
    return found
