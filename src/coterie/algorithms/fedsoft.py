"""FedSoft: clients that mix several groups keep one model each, held near all centres at once.

Every few rounds a client counts which centre has the smallest loss on each of its samples; the
counts are its shares. It then trains its own model with a pull towards every centre in proportion
to its share, and each centre becomes the mean of the models of the clients chosen for it.

References: Ruan, Joe-Wong: FedSoft: soft clustered federated learning with proximal local updating,
AAAI 2022, arXiv 2112.06053; Algorithm 1. `selection="uniform"` is the variant that FedGMI's paper
compares with.
Departures: with uniform selection the centres are means weighted by v, renormalised over the
selected clients. A client that has not trained yet predicts with the mean of the centres by its
shares.
Notes: a zero share is replaced by `least_share`, and shares are not normalised again, as printed.
Equal losses go to the lowest index.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.core.aggregate import Mean, RunningMean
from coterie.core.algorithm import (
    Algorithm,
    ComponentShares,
    Evidence,
    Fill,
    Info,
    PerClient,
    register,
)
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation, each
from coterie.core.model import Model
from coterie.core.random import fold, uniform
from coterie.core.training import LocalSGD, trainable
from coterie.core.tree import Ids, Params, Tree, put, row, stack, tree_map


class State(NamedTuple):
    models: Params  # [k, ...]  centres
    shares: Annotated[Tensor, Fill(-1)]  # [clients, k]  samples won by each centre, -1: not counted
    size: Annotated[Tensor, Fill(0)]  # [clients]  samples
    assignment: PerClient  # [clients]  centre of the largest share


@register("fedsoft")
@dataclass(frozen=True)
class FedSoft(Algorithm):
    """Hold each client's own model near all centres, in proportion to its shares.

    Parameters
    ----------
    model
        Network of the clients and of the centres.
    local
        Training of a client's own model.
    n_groups
        Number of centres, S in the paper.
    selection
        "centres": choose clients for each centre, in proportion to what they hold of it.
        "uniform": one cohort for all centres, by the run's participation.
    per_centre
        Number of clients chosen for each centre, K; not used with uniform selection.
    interval
        Rounds between two counts, tau.
    strength
        Weight of the pull towards the centres, lambda.
    least_share
        What a share of zero is replaced by, sigma.
    init_models
        "different": every centre has initial weights of its own. "same": all centres start from
        the weights that the clients' models start from.
    """

    bar: ClassVar[float] = 0.8  # every client's own model, on a few samples, held near two centres
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    selection: Literal["centres", "uniform"] = "centres"
    per_centre: Annotated[int, Ge(1)] = 15
    interval: Annotated[int, Ge(1)] = 2
    strength: Annotated[float, Ge(0)] = 0.1
    least_share: Annotated[float, Gt(0)] = 1e-4
    init_models: Literal["different", "same"] = "different"

    # server

    def init(self, fed: Federation) -> State:
        if self.init_models == "same":
            models = stack([self.model.init(fold(fed.run_key, "resident"))] * self.n_groups)
        else:
            models = self.model.init_many(fed.key("models"), self.n_groups)
        unknown = torch.full((fed.n_clients, self.n_groups), -1.0, dtype=torch.float64)
        size = torch.zeros(fed.n_clients, dtype=torch.float64)
        return State(models, unknown, size, torch.full((fed.n_clients,), -1))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        everyone = fed.everyone()
        if fed.round % self.interval == 0:
            state = self.count_all(fed, state, everyone)
        else:
            state, _ = self.place(fed, state, everyone[state.assignment < 0])
        importance = self.importance(state)  # v: [clients, k]
        if self.selection == "uniform":
            cohort = fed.cohort()
            weight = importance
        else:
            weight = self.select(fed, importance)
            cohort = everyone[weight.any(1)]
        cohort = cohort[state.assignment[cohort] >= 0]
        if not len(cohort):
            return state, {"assignment": state.assignment}
        own = each(self.replace_zeros(state.shares[cohort]))
        ids, reply = fed.map(self.train, state.models, own, to=cohort)
        sums = RunningMean(
            Mean("params", state.models, weight="weight", slots=True), "FedSoft.train"
        )
        k = self.n_groups
        every = tree_map(lambda leaf: leaf[:, None].expand(-1, k, *leaf.shape[1:]), reply["params"])
        sums.add({"params": every, "weight": weight[ids]}, torch.arange(len(ids)))
        state = state._replace(models=sums.result())
        return state, {"assignment": state.assignment, "participants": ids}

    def count_all(self, fed: Federation, state: State, ids: Ids, at_least: int = 1) -> State:
        """Let some clients count their shares; a client that stays silent keeps its shares."""
        ids, reply = fed.map(self.count, state.models, to=ids, at_least=at_least)
        if not len(ids):
            return state
        fine = torch.isfinite(reply["share"]).all(1)
        if not bool(fine.all()):
            warnings.warn(
                f"FedSoft: {int((~fine).sum())} shares were not finite and were left out.",
                stacklevel=2,
            )
        ids, share = ids[fine], reply["share"][fine]
        return state._replace(
            shares=put(state.shares, ids, share),
            size=put(state.size, ids, reply["n"][fine].double()),
            assignment=put(state.assignment, ids, share.argmax(1)),
        )

    def replace_zeros(self, shares: Tensor) -> Tensor:
        """Shares with every zero replaced by `least_share`: u."""
        return torch.where(shares == 0, self.least_share, shares)

    def importance(self, state: State) -> Tensor:
        """What each client holds of each centre, as a share of all: v, [clients, k]."""
        held = self.replace_zeros(state.shares.clamp(min=0)) * state.size[:, None]
        return held / held.sum(0).clamp(min=1e-300)

    def select(self, fed: Federation, importance: Tensor) -> Tensor:
        """Choose clients for each centre, in proportion and without replacement: [clients, k]."""
        n, k = importance.shape
        out = torch.zeros(n, k, dtype=torch.float64)
        for s in range(k):
            draw = uniform(fed.key("select", s), (n,), torch.float64) + 2.0**-25
            draw = draw[fed.turns(fed.everyone(), f"select {s}")]  # by name, not by number
            rank = draw.log() / importance[:, s]  # Efraimidis and Spirakis' keys
            rank = torch.where(importance[:, s] > 0, rank, -torch.inf)
            first = rank.topk(min(self.per_centre, n)).indices
            out[first[rank[first] > -torch.inf], s] = 1.0
        return out

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        new = ids[state.assignment[ids] < 0]
        if len(new):
            state = self.count_all(fed, state, new, at_least=0)
        shares = state.shares[ids].clamp(min=0)
        two = shares.topk(min(2, self.n_groups), dim=1).values
        margin = two[:, 0] - (two[:, 1] if self.n_groups > 1 else 0.0)
        unknown = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        fits = torch.ones(len(ids), dtype=torch.bool)
        return state, Evidence(state.assignment[ids].clamp(min=0), margin, unknown, fits)

    # client

    def client_init(self, client: Client) -> Tree:
        own = self.model.init(fold(client.run_key, "resident"))  # all clients start alike
        share = torch.full((self.n_groups,), 1 / self.n_groups, dtype=torch.float64)
        return {"params": own, "share": share, "trained": torch.tensor(False)}

    @task(phase="cluster")
    def count(self, client: Client, models: Params) -> Reply:
        batch, k = client.train, self.n_groups
        losses = torch.stack([self.model.losses(row(models, s), batch) for s in range(k)], 1)
        won = losses.nan_to_num(torch.inf, torch.inf).argmin(1)[:, None] == torch.arange(k)
        share = (won * batch.share()[:, None]).sum(0)
        return Reply({"share": share, "n": batch.size}, keep={"share": share})

    @task
    def train(self, client: Client, models: Params, share: Tensor) -> Reply:
        # Pulls of u_s towards every centre are, but for a constant, one of their sum towards the
        # mean of the centres.
        total = share.sum()
        mean = {name: _mix(leaf, share / total) for name, leaf in models.items()}

        def pull(params: Params, mean: Params, total: Tensor) -> Tensor:
            apart = [
                (leaf - mean[name]).square().sum().double()
                for name, leaf in params.items()
                if trainable((name,), leaf)
            ]
            return self.strength / 2 * total * torch.stack(apart).sum()

        penalty = pull if self.strength else None
        given = (mean, total) if self.strength else ()
        own = self.local(
            client, client.state["params"], self.model.losses, penalty=penalty, given=given
        )
        keep = {"params": own, "trained": torch.ones_like(client.state["trained"])}
        return Reply({"params": own}, keep=keep)

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"models": state.models}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        if not client.state:  # a file without memories: the centres alone
            return row(given["models"], 0)
        share, trained = client.state["share"], client.state["trained"]

        def one(centre: Tensor, own: Tensor) -> Tensor:
            return torch.where(trained, own, _mix(centre, share))

        return tree_map(one, given["models"], client.state["params"])

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        shares = state.shares[ids]
        shares = torch.where(shares < 0, torch.nan, shares)
        errors = (shares * (1 - shares) / state.size[ids][:, None].clamp(min=1)).sqrt()
        evidence = {"n_components": self.n_groups, "estimate": "count"}
        return ComponentShares(shares, errors, {"count": shares}, evidence)

    @classmethod
    def example(cls, problem: Any) -> "FedSoft":
        # Centres are means of the clients' models, so without local work they stay where they are
        # only if all start alike.
        return cls(problem.model, problem.local, problem.n_groups, init_models="same")


def _mix(leaf: Tensor, share: Tensor) -> Tensor:
    """Mean of the centres' weights by shares; counters are those of the first centre."""
    if not leaf.is_floating_point():
        return leaf[0]
    return (share.to(leaf.dtype).reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0)
