"""FedGMM: components of the inputs and of the labels, in joint shares of each client's own.

The inputs come from a mixture of Gaussians, the labels from a mixture of predictors, and all
clients share both. A client has a share for each pair of a Gaussian and a predictor. It estimates
them by expectation-maximisation, sends moments for the Gaussians, and trains the predictors as
FedEM does. At prediction the inputs tell which predictors to trust.

References
----------
Wu, Zhang, Yu, Liu, Gu, Zhou, Chen, Cheng: Personalized federated learning under mixture of
distributions, ICML 2023, arXiv 2305.01068, Algorithm 1.

Departures: Gaussians are fitted to a random projection of the inputs that all clients draw from the
run's seed (the authors: codes of an autoencoder). They begin with the covariance of all data, at
means drawn from it. Clients also send their shares, which the report shows. A client that has not
taken part yet finds its shares with all components as they are.

Faults of public code that are avoided: shares that are added to log-densities without a logarithm;
averages over all clients instead of those who took part; covariances averaged without the spread of
the clients' means.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt, Lt
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
from coterie.algorithms.finite import find_finite
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
from coterie.core.random import fold, normal
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, leaves


class State(NamedTuple):
    models: Params  # [b, ...]  predictors
    moments: Params  # of the Gaussians: first [a, d], second [a, d, d]
    floor: Tensor  # added to variances
    projection: Tensor  # [inputs, d]
    shares: Annotated[Tensor, Fill(-1)]  # [clients, a * b]  as clients report them, -1: not yet
    assignment: PerClient  # [clients]  pair of the largest share


@register("fedgmm")
@dataclass(frozen=True)
class FedGMM(Algorithm):
    """Share Gaussians of the inputs and predictors of the labels, and mix them for each client.

    Parameters
    ----------
    model
        The network and its loss, taken as minus the logarithm of a likelihood.
    local
        Local training, of each predictor.
    n_components
        Number of predictors; the authors take 3.
    n_gaussians
        Number of Gaussians; the authors take 3.
    n_features
        Number of features that the Gaussians are fitted to. Inputs that have no more are taken as
        they are.
    ridge
        Part of the mean variance of the features that is added to the variances of each Gaussian.
    smoothing
        Part of the shares that is spread evenly over the pairs in every round.
    """

    model: Model
    local: LocalSGD
    n_components: Annotated[int, Ge(1)] = 3
    n_gaussians: Annotated[int, Ge(1)] = 3
    n_features: Annotated[int, Ge(1)] = 8
    ridge: Annotated[float, Gt(0)] = 1e-3
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0

    # server

    def init(self, fed: Federation) -> State:
        _, reply = fed.map(self.describe, to=fed.everyone())
        first, second, n = (reply[name].double() for name in ("first", "second", "n"))
        fine = find_finite("FedGMM", "moments", first, second, n)
        part = torch.where(fine, n, 0.0) / n[fine].sum()
        first, second = (leaf.nan_to_num(0.0, 0.0, 0.0) for leaf in (first, second))
        mean, square = torch.einsum("m,md->d", part, first), torch.einsum("m,mde->de", part, second)
        spread = square - mean[:, None] * mean
        floor = self.ridge * spread.diagonal().mean().clamp(min=1e-12)
        factor = torch.linalg.cholesky(spread + floor * torch.eye(len(mean)))
        drawn = normal(fed.key("means"), (self.n_gaussians, len(mean)), torch.float64)
        means = mean + drawn @ factor.mT
        moments = {"first": means, "second": spread + means[:, :, None] * means[:, None, :]}
        inputs = int(reply["inputs"].max())
        pairs = self.n_gaussians * self.n_components
        return State(
            self.model.init_many(fed.key("models"), self.n_components),
            moments,
            floor,
            projection(fed.run_key, inputs, self.n_features),
            torch.full((fed.n_clients, pairs), -1.0, dtype=torch.float64),
            torch.full((fed.n_clients,), -1),
        )

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        means = [
            Mean("models", state.models, weight="n_model", slots=True),
            Mean("moments", state.moments, weight="n_gaussian", slots=True),
        ]
        given = state.models, gaussians(state.moments, state.floor)
        ids, reply = fed.map(self.update, *given, to=fed.cohort(), reduce=means)
        state = state._replace(models=reply["models"], moments=reply["moments"])
        state = note_shares("FedGMM", state, ids, reply)
        return state, {"assignment": state.assignment, "participants": ids}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        new = ids[state.assignment[ids] < 0]
        if len(new):
            given = state.models, gaussians(state.moments, state.floor)
            asked = fed.map(self.weigh, *given, to=new, at_least=0)
            state = note_shares("FedGMM", state, *asked)
        return state, evidence_of(state.shares[ids])

    # client

    def client_init(self, client: Client) -> Tree:
        pairs = self.n_gaussians * self.n_components
        return {"share": torch.full((pairs,), 1 / pairs, dtype=torch.float64)}

    @task(phase="cluster")
    def describe(self, client: Client) -> dict[str, Tensor]:
        z, inputs = self.encode(client)
        return {
            **weighted_moments(z, client.train.share()),
            "n": client.train.size,
            "inputs": inputs,
        }

    @task(phase="cluster")
    def weigh(self, client: Client, models: Params, given: Params) -> Reply:
        fit = self.fit(client.train, self.encode(client)[0], models, given)
        share = fit_shares(fit, client.train, self.smoothing)
        share = torch.where(client.train.size > 0, share, client.state["share"])
        return Reply({"share": share}, keep={"share": share})

    @task
    def update(self, client: Client, models: Params, given: Params) -> Reply:
        batch, old = client.train, client.state["share"]
        z, _ = self.encode(client)
        chances = responsibilities(self.fit(batch, z, models, given), old)  # E-step: [n, a * b]
        share = mean_share(chances, batch, self.smoothing)  # M-step
        share = torch.where(batch.size > 0, share, old)
        pairs = chances.unflatten(1, (self.n_gaussians, self.n_components))
        by_gaussian, by_model = pairs.sum(2), pairs.sum(1)  # [n, a], [n, b]
        weights = by_gaussian * batch.share()[:, None]
        moments = torch.vmap(weighted_moments, (None, 1))(z, weights)
        trained = train_experts(client, self.local, self.losses, models, by_model.mT)
        sent = {"models": trained, "moments": moments, "share": share}
        sent["n_model"] = batch.size * mean_share(by_model, batch)
        sent["n_gaussian"] = batch.size * weights.sum(0)
        return Reply(sent, keep={"share": share})

    def encode(self, client: Client) -> tuple[Tensor, Tensor]:
        """Features of the client's samples, and the number of inputs."""
        rows = flat_inputs(client.train.x)
        z = rows @ projection(client.run_key, rows.shape[1], self.n_features)
        return z, torch.tensor(rows.shape[1])

    def fit(self, batch: Batch, z: Tensor, models: Params, given: Params) -> Tensor:
        """Log-likelihood of each sample under each pair: [n, a * b]."""
        density = log_density(z, given)  # [n, a]
        label = -self.model.probe_each(models, batch).mT.double()  # [n, b]
        return (density[:, :, None] + label[:, None, :]).flatten(1)

    def losses(self, params: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        """Losses of samples whose weights do not add up to one."""
        return self.model.losses(params, batch, key) * weight_of_batch(batch)

    # use

    def deploy(self, state: State, ids: Ids) -> Tree:
        given = gaussians(state.moments, state.floor)
        return {"models": state.models, "gaussians": given, "projection": state.projection}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        pairs = self.n_gaussians * self.n_components
        even = torch.full((pairs,), 1 / pairs, dtype=torch.float64)
        return {**given, "share": client.state["share"] if client.state else even}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """The mixture of predictors, weighted by what the inputs say of each."""
        density = log_density(flat_inputs(x) @ personal["projection"], personal["gaussians"])
        share = personal["share"].log().unflatten(0, (self.n_gaussians, self.n_components))
        joint = torch.logsumexp(density[:, :, None] + share, 1)  # [n, b]
        return mix_outputs(self.model, personal["models"], x, joint.log_softmax(1))

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        pairs = state.shares[ids].unflatten(1, (self.n_gaussians, self.n_components))
        shares = torch.where(pairs < 0, torch.nan, pairs).sum(1)
        evidence = {"n_components": self.n_components, "estimate": "em"}
        return ComponentShares(shares, torch.full_like(shares, torch.nan), {}, evidence)

    @classmethod
    def example(cls, problem: Any) -> "FedGMM":
        return cls(problem.model, problem.local, problem.n_groups, n_gaussians=2, n_features=3)


def flat_inputs(x: Any) -> Tensor:
    """Inputs as rows of numbers: [n, inputs]."""
    return torch.cat([leaf.flatten(1).double() for leaf in leaves(x)], 1)


def projection(key: Tensor, inputs: int, features: int) -> Tensor:
    """A random matrix, the same for all clients; the identity if inputs are few."""
    if inputs <= features:
        return torch.eye(inputs, dtype=torch.float64)
    return normal(fold(key, "projection"), (inputs, features), torch.float64) / math.sqrt(inputs)


def weighted_moments(z: Tensor, weight: Tensor) -> Params:
    """Mean and mean square of the rows; zeros where there is no weight."""
    weight = weight / weight.sum().clamp(min=1e-300)
    first = torch.einsum("n,nd->d", weight, z)
    return {"first": first, "second": torch.einsum("n,nd,ne->de", weight, z, z)}


def gaussians(moments: Params, floor: Tensor) -> Params:
    """Means and Cholesky factors of the covariances."""
    mean = moments["first"]
    spread = moments["second"] - mean[:, :, None] * mean[:, None, :]
    eye = torch.eye(mean.shape[1], dtype=mean.dtype)
    return {"mean": mean, "factor": torch.linalg.cholesky(spread + floor * eye)}


def log_density(z: Tensor, given: Params) -> Tensor:
    """Log-density of each row under each Gaussian: [n, a]."""
    factor = given["factor"]
    apart = (z - given["mean"][:, None]).mT  # [a, d, n]
    scaled = torch.linalg.solve_triangular(factor, apart, upper=False)
    log_det = factor.diagonal(dim1=1, dim2=2).log().sum(1)
    constant = z.shape[1] / 2 * math.log(2 * math.pi)
    return (-scaled.square().sum(1) / 2 - log_det[:, None] - constant).mT
