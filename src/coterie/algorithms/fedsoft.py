"""FedSoft: each client mixes several groups and has one model, held near all group centres.

Every few rounds a client finds, for each of its samples, the centre with the smallest loss. Its
share of a centre is the fraction of samples that this centre wins. It then trains its own model
with a penalty on the distance to every centre, in proportion to the shares. Each centre becomes the
mean of the models of the clients selected for it.

References: Ruan, Joe-Wong: FedSoft: soft clustered federated learning with proximal local updating,
AAAI 2022, arXiv 2112.06053; Algorithm 1. `selection="uniform"` is the variant that FedGMI's paper
compares with.
Departures: with uniform selection the centres are means weighted by v, renormalised over the
selected clients. A client that has not trained yet predicts with the mean of the centres, weighted
by its shares.
Notes: a zero share is replaced by `least_share`, and shares are not normalised again, as printed.
If two centres have equal losses, the one with the lower index wins.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms.components import evidence_of, note_shares, report_counts
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
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation, each
from coterie.core.model import Model
from coterie.core.random import fold, uniform
from coterie.core.training import LocalSGD, trainable
from coterie.core.tree import Ids, Params, Tree, row, stack, tree_map


class State(NamedTuple):
    models: Params  # [k, ...]  centres
    shares: Annotated[Tensor, Fill(-1)]  # [clients, k]  share of each centre, -1: unknown
    size: Annotated[Tensor, Fill(0)]  # [clients]  samples
    assignment: PerClient  # [clients]  centre of the largest share


@register("fedsoft")
@dataclass(frozen=True)
class FedSoft(Algorithm):
    """Train one model per client, held near all group centres in proportion to the client's shares.

    Parameters
    ----------
    model
        Network of the clients and of the centres.
    local
        Training of a client's own model.
    n_groups
        Number of centres, S in the paper.
    selection
        "centres": select clients for each centre, with probabilities proportional to their share of
        its samples. "uniform": one cohort for all centres, by the participation of the run.
    per_centre
        Number of clients selected for each centre, K; not used with uniform selection.
    interval
        Number of rounds between two estimates of the shares, tau.
    strength
        Weight of the penalty that holds models near the centres, lambda.
    least_share
        Value that replaces a share of zero, sigma.
    init_models
        "different": every centre has its own initial weights. "same": all centres have the initial
        weights of the clients' models.
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
        mean = Mean("params", state.models, weight="weight", slots=True)
        sums = fed.average(mean, "FedSoft.train")
        k = self.n_groups
        every = tree_map(lambda leaf: leaf[:, None].expand(-1, k, *leaf.shape[1:]), reply["params"])
        sums.add({"params": every, "weight": weight[ids]}, torch.arange(len(ids)))
        state = state._replace(models=sums.result())
        return state, {"assignment": state.assignment, "participants": ids}

    def count_all(self, fed: Federation, state: State, ids: Ids, at_least: int = 1) -> State:
        """Let some clients compute their shares; those that do not answer keep the old ones."""
        asked = fed.map(self.count, state.models, to=ids, at_least=at_least)
        return note_shares("FedSoft", state, *asked, size="n")

    def replace_zeros(self, shares: Tensor) -> Tensor:
        """Shares with every zero replaced by `least_share`: u."""
        return torch.where(shares == 0, self.least_share, shares)

    def importance(self, state: State) -> Tensor:
        """Each client's part of all samples of each centre: v, [clients, k]."""
        held = self.replace_zeros(state.shares.clamp(min=0)) * state.size[:, None]
        return held / held.sum(0).clamp(min=1e-300)

    def select(self, fed: Federation, importance: Tensor) -> Tensor:
        """Select clients for each centre by importance, without replacement: [clients, k]."""
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
        return state, evidence_of(state.shares[ids])

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
        # Penalties of weight u_s on the distance to every centre equal, up to a constant, one
        # penalty of their total weight on the distance to the mean of the centres.
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
        if not client.state:  # a saved run without the clients' memory: the centres alone
            return row(given["models"], 0)
        share, trained = client.state["share"], client.state["trained"]

        def one(centre: Tensor, own: Tensor) -> Tensor:
            return torch.where(trained, own, _mix(centre, share))

        return tree_map(one, given["models"], client.state["params"])

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        return report_counts(state.shares[ids], state.size[ids])

    @classmethod
    def example(cls, problem: Any) -> "FedSoft":
        # Centres are means of the clients' models, so without local training they only stay the
        # same if all models start with the same weights.
        return cls(problem.model, problem.local, problem.n_groups, init_models="same")


def _mix(leaf: Tensor, share: Tensor) -> Tensor:
    """Mean of the centres' weights by shares; integer counters are taken from the first centre."""
    if not leaf.is_floating_point():
        return leaf[0]
    return (share.to(leaf.dtype).reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0)
