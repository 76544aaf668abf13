"""FeSEM: k-means of the clients' models, one model for each centre.

Every client trains the model of its centre. The server then gives it the centre nearest to what it
trained, and moves each centre to the mean of its members' models. Local training and k-means so
take turns.

References
----------
Long, Xie, Shen, Zhou, Wang, Jiang: Multi-center federated learning: clients clustering for better
personalization, World Wide Web 2023, arXiv 2108.08647, Algorithm 1 (FeSEM).

Departures
----------
- The first centres: all clients train a common initial model once, and k-means++ of what they send
  gives the centres. The paper leaves the beginning open. From identical models, as in public code,
  all clients join one centre.
- A centre without members keeps its model.
- An unassigned client trains the initial model as the others did before the first round, and joins
  the centre that is nearest among those of that time. The paper has no rule.

Faults of public code that are avoided: a "simple average" with a list of one weight, which applies
the update of one client only; a first assignment where the models of all clients are equal.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.finite import find_finite
from coterie.algorithms.vectors import order_by_name, vectors
from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import centroids
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.random import initial_key, seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, tree_map


class State(NamedTuple):
    models: Params  # [k, ...]  the centres
    assignment: PerClient  # [clients]  centre of each client, -1 until first contact
    start: Params  # the initial model
    first: Tensor  # [k, p]  the first centres, as vectors; nan where there was no member


@register("fesem")
@dataclass(frozen=True)
class FeSEM(Algorithm):
    """Cluster clients by their weights while they train.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training.
    n_groups
        Number of centres, K.
    layers
        Names of the layers, or beginnings of names, whose weights the distance compares, such as
        ("output",). None: all weights.
    """

    starts: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    layers: tuple[str, ...] | None = None

    def check(self) -> None:
        names = self.model.init(seed_key(0))
        for layer in self.layers or ():
            if not any(name.startswith(layer) for name in names):
                raise ConfigError(
                    f"FeSEM: layers must be beginnings of the names {', '.join(names)}. Got "
                    f"'{layer}'."
                )

    # server

    def init(self, fed: Federation) -> State:
        start = self.model.init(initial_key(fed.run_key))
        everyone = order_by_name(fed, fed.everyone())
        ids, reply = fed.map(self.update, start, to=everyone)
        good = find_finite("FeSEM", "replies", vectors(reply["params"]))
        ids, trained = ids[good], tree_map(lambda leaf: leaf[good], reply["params"])
        x = self.compared(trained)
        seed = int(fed.key("kmeans")) & 0x7FFFFFFF
        group = kmeans(x, self.n_groups, seed)[0] if len(ids) else ids
        group = common.follow_start(fed, ids, group, self.n_groups)
        bank = tree_map(lambda leaf: leaf.expand(self.n_groups, *leaf.shape).clone(), start)
        assignment = put(fed.per_client(-1), ids, group)
        models = average(fed, bank, {"params": trained}, group)
        return State(models, assignment, start, centroids(x, group, self.n_groups))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = order_by_name(fed, fed.cohort())
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that did not answer wait
        own = rows(state.models, state.assignment[cohort])
        ids, reply = fed.map(self.update, own, to=cohort)
        x = self.compared(reply["params"])
        good = find_finite("FeSEM", "replies", x)
        nearest = distances(x, self.compared(state.models)).argmin(1)
        group = torch.where(good, nearest, state.assignment[ids])  # E-step
        models = average(fed, state.models, reply, group)  # M-step
        state = state._replace(models=models, assignment=put(state.assignment, ids, group))
        info = {"assignment": state.assignment, "participants": ids.sort().values}
        return state, info | {"groups_used": len(group.unique())}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = fed.map(self.update, state.start, to=ids, at_least=0)
        distance = torch.zeros(0, self.n_groups)
        if len(heard):
            x = self.compared(reply["params"])
            good = find_finite("FeSEM", "replies", x)
            empty = state.first.isnan().any(1)
            distance = distances(x[good], state.first.nan_to_num()).masked_fill(empty, torch.inf)
            heard = heard[good]
        nearest = common.choose_nearest(distance)
        assignment, found = common.place_clients(state.assignment, ids, heard, *nearest)
        return state._replace(assignment=assignment), found

    def compared(self, bank: Params) -> Tensor:
        """The weights that the distance compares, of each row of a bank: [m, p]."""
        if self.layers is not None:
            bank = {name: leaf for name, leaf in bank.items() if name.startswith(self.layers)}
        return vectors(bank)

    # client

    @task
    def update(self, client: Client, params: Params) -> dict[str, Tree]:
        return {"params": self.local(client, params, self.model.losses)}

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(state.models, state.assignment[ids].clamp(min=0))


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """Euclidean distances [m, k]."""
    return torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist")


def average(fed: Federation, models: Params, reply: dict[str, Tree], group: Tensor) -> Params:
    """The mean of each group's members, all alike; a group without members keeps its model."""
    means = fed.average(Mean("params", models, by=group), "FeSEM")
    means.add(reply, torch.arange(len(group)))
    result: Params = means.result()
    return result
