"""FedEM: each client's data are a mixture of a few components, in shares of its own.

All clients share the predictors of the components. A client computes how likely each component is
for each of its samples, takes the mean as its shares, and trains every predictor with the samples
weighted by these chances. The server averages each predictor. A client predicts with the mixture of
all predictors by its shares.

References
----------
Marfoq, Neglia, Bellet, Kameni, Vidal: Federated multi-task learning under a mixture of
distributions, NeurIPS 2021, arXiv 2108.10252, Algorithm 1.

Departures: clients also send their shares, which the report shows. A client that has not taken part
yet finds its shares with the predictors as they are. With a loss other than cross-entropy the
predictions are averaged.

Notes: losses are weighted and divided by the number of samples, not by the sum of the weights, as
in the authors' code: a component that explains little of a client's data moves little there.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from coterie.algorithms.components import evidence_of, note_shares
from coterie.algorithms.experts import (
    fit_shares,
    mean_share,
    mix_outputs,
    responsibilities,
    train_experts,
    weight_of_batch,
)
from coterie.core.aggregate import Mean
from coterie.core.algorithm import (
    Algorithm,
    ComponentShares,
    Evidence,
    Fill,
    Info,
    PerClient,
    register,
)
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree


class State(NamedTuple):
    models: Params  # [k, ...]  predictors of the components
    shares: Annotated[Tensor, Fill(-1)]  # [clients, k]  as clients report them, -1: not yet
    assignment: PerClient  # [clients]  component of the largest share


@register("fedem")
@dataclass(frozen=True)
class FedEM(Algorithm):
    """Share the predictors of a few components, and mix them for each client.

    Parameters
    ----------
    model
        The network and its loss, taken as minus the logarithm of a likelihood.
    local
        Local training, of each predictor.
    n_components
        Number of components, M in the paper, which takes 3.
    smoothing
        Part of the shares that is spread evenly over the components in every round. 0, as in the
        paper, lets a client's shares settle on one component early.
    """

    model: Model
    local: LocalSGD
    n_components: Annotated[int, Ge(1)] = 3
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0

    # server

    def init(self, fed: Federation) -> State:
        models = self.model.init_many(fed.key("models"), self.n_components)
        shares = torch.full((fed.n_clients, self.n_components), -1.0, dtype=torch.float64)
        return State(models, shares, torch.full((fed.n_clients,), -1))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("models", state.models, weight="n", slots=True)
        ids, reply = fed.map(self.update, state.models, to=fed.cohort(), reduce=mean)
        state = note_shares("FedEM", state._replace(models=reply["models"]), ids, reply)
        return state, {"assignment": state.assignment, "participants": ids}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        new = ids[state.assignment[ids] < 0]
        if len(new):
            asked = fed.map(self.weigh, state.models, to=new, at_least=0)
            state = note_shares("FedEM", state, *asked)
        return state, evidence_of(state.shares[ids])

    # client

    def client_init(self, client: Client) -> Tree:
        k = self.n_components
        return {"share": torch.full((k,), 1 / k, dtype=torch.float64)}

    @task(phase="cluster")
    def weigh(self, client: Client, models: Params) -> Reply:
        share = fit_shares(
            -self.model.probe_each(models, client.train).mT, client.train, self.smoothing
        )
        share = torch.where(client.train.size > 0, share, client.state["share"])
        return Reply({"share": share}, keep={"share": share})

    @task
    def update(self, client: Client, models: Params) -> Reply:
        batch, old = client.train, client.state["share"]
        chances = responsibilities(-self.model.probe_each(models, batch).mT, old)  # E-step: [n, k]
        share = mean_share(chances, batch, self.smoothing)  # M-step
        share = torch.where(batch.size > 0, share, old)
        trained = train_experts(client, self.local, self.losses, models, chances.mT)
        return Reply({"models": trained, "share": share, "n": batch.size}, keep={"share": share})

    def losses(self, params: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        """Losses of samples whose weights do not add up to one."""
        return self.model.losses(params, batch, key) * weight_of_batch(batch)

    # use

    def deploy(self, state: State, ids: Ids) -> Tree:
        return {"models": state.models}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        k = self.n_components
        even = torch.full((k,), 1 / k, dtype=torch.float64)
        return {**given, "share": client.state["share"] if client.state else even}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """The mixture of all predictors by the client's shares."""
        return mix_outputs(self.model, personal["models"], x, personal["share"].log())

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        shares = torch.where(state.shares[ids] < 0, torch.nan, state.shares[ids])
        evidence = {"n_components": self.n_components, "estimate": "em"}
        return ComponentShares(shares, torch.full_like(shares, torch.nan), {}, evidence)

    @classmethod
    def example(cls, problem: Any) -> "FedEM":
        return cls(problem.model, problem.local, n_components=problem.n_groups)
