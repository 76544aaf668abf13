"""FedALA: every client blends the common model into its own, weight by weight, before it trains.

The server averages as FedAvg does. A client that receives the average copies its lower layers; in
the top layers each weight is moved from the client's own value towards the average by a share
between 0 and 1, which the client learns on its own data.

References
----------
Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: adaptive local aggregation for personalized federated
learning, AAAI 2023, arXiv 2212.01197, Algorithm 1.

Departures: shares are learnt in evaluation mode, so that running statistics stay as they are, and
for at most `max_epochs` epochs. Buffers are those of the average.

Faults of public code that are avoided: the first exchange is recognised by a sum of differences,
which may be zero by chance; shares are learnt on neighbouring samples, which may be of one class;
the last batch stands for the epoch; an incomplete last batch is dropped; clients that do not take
part are changed; tensors are counted as layers, and with none to blend all are blended.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.ops import operate, stack_size
from coterie.core.random import fold, initial_key, permutation
from coterie.core.training import LocalSGD, trainable
from coterie.core.tree import Ids, Params, Tree, tree_map


class State(NamedTuple):
    params: Params  # the average of the clients' models


@register("fedala")
@dataclass(frozen=True)
class FedALA(Algorithm):
    """Blend the average into each client's own model by shares that the client learns.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training; shares are learnt in batches of its size.
    layers
        Number of top layers that are blended, p. 0: FedAvg.
    share
        Share of a client's samples that the blend is learnt on, s.
    rate
        Step size of the blend, eta.
    tolerance
        The first blend of a client is learnt until the standard deviation of the losses of the last
        `window` epochs is below this. Later blends take one epoch.
    window
        Number of epochs whose losses are compared.
    max_epochs
        Largest number of epochs of the first blend.
    prediction
        "blended": a client predicts with its blend of the average, as in the paper. "trained": with
        its model after local training.
    """

    bar: ClassVar[float] = 0.8  # every client's own model, on a few samples
    model: Model
    local: LocalSGD
    layers: Annotated[int, Ge(0)] = 1
    share: Annotated[float, Gt(0), Le(1)] = 0.8
    rate: Annotated[float, Ge(0)] = 1.0
    tolerance: Annotated[float, Gt(0)] = 0.1
    window: Annotated[int, Ge(2)] = 10
    max_epochs: Annotated[int, Ge(1)] = 100
    prediction: Literal["blended", "trained"] = "blended"

    # server

    def init(self, fed: Federation) -> State:
        return State(self.model.init(initial_key(fed.run_key)))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("params", state.params, weight="n")
        _, reply = fed.map(self.update, state.params, to=fed.cohort(), reduce=mean)
        return State(reply["params"]), {}

    # client

    def client_init(self, client: Client) -> Tree:
        params = self.model.init(initial_key(client.run_key))
        blend = {name: torch.ones_like(params[name]) for name in top_layers(params, self.layers)}
        return {"params": params, "blend": blend, "times": torch.tensor(0)}

    @task
    def update(self, client: Client, params: Params) -> Reply:
        start, blend = self.blend(client, params)
        own = self.local(client, start, self.model.losses)
        keep = {"params": own, "blend": blend, "times": client.state["times"] + 1}
        return Reply({"params": own, "n": client.train.size}, keep=keep)

    def blend(self, client: Client, params: Params) -> tuple[Params, Params]:
        """The client's blend of its own model and a received one, and the shares it learnt."""
        own, blend, times = (client.state[name] for name in ("params", "blend", "times"))
        if blend:
            given = (own, params, blend, client.train, client.key, times)
            blend = operate(self.learn, given, like=blend)
        return choose(times == 0, params, mix(own, params, blend)), blend

    def learn(self, stacked: Any) -> Params:
        """The shares of a stack of clients; each learns until its losses settle."""
        size = stack_size(stacked)
        stacked = tree_map(lambda leaf: leaf.expand(size, *leaf.shape[1:]), stacked)
        *_, blend, batch, key, times = stacked
        learnt = tree_map(torch.clone, blend)
        n = batch.mask.sum(1)
        count = (self.share * n.double()).ceil().long()  # samples that the blend is learnt on
        count = torch.where(times > 0, count, 0)  # before the first exchange it has no model
        real = torch.arange(max(int(count.max()), 1)) < count[:, None]  # [s, c]
        chosen = torch.vmap(permutation)(fold(key, "chosen"), batch.mask)[:, : real.shape[1]]
        left = count.nonzero().flatten()  # clients that have not finished
        losses = torch.empty(size, 0, dtype=torch.float64)
        for epoch in range(self.max_epochs):
            if not len(left):
                break
            own, received, _, some, keys, _ = pick(stacked, left)
            order = torch.vmap(permutation)(fold(keys, epoch), real[left])
            rows = chosen[left].gather(1, order)
            width = self.local.batch_size or rows.shape[1]
            now, total = {name: leaf[left] for name, leaf in learnt.items()}, 0.0
            for part, held in zip(rows.split(width, 1), real[left].split(width, 1), strict=True):
                now, value = torch.vmap(self.move)(now, own, received, some, part, held)
                total = total + value.double() * held.sum(1)
            for name, leaf in now.items():
                learnt[name][left] = leaf
            losses = torch.cat([losses, torch.full((size, 1), torch.nan).double()], 1)
            losses[left, -1] = total / count[left]
            last = losses[left, -self.window :]
            settled = (last.std(1, correction=0) < self.tolerance) & (epoch + 1 >= self.window)
            left = left[~(settled | (times[left] > 1))]  # later blends take one epoch
        return learnt

    def move(
        self, blend: Params, own: Params, received: Params, batch: Batch, rows: Tensor, real: Tensor
    ) -> tuple[Params, Tensor]:
        """One step of the shares on some rows, and the loss before it."""
        some = batch.rows(rows, real)

        def loss(blend: Params) -> Tensor:
            return some.mean(self.model.losses(mix(own, received, blend), some))

        slope, value = torch.func.grad_and_value(loss)(blend)
        return {
            name: (old - self.rate * slope[name]).clamp(0, 1) for name, old in blend.items()
        }, value

    # use

    def deploy(self, state: State, ids: Ids) -> Params:
        return state.params

    @task
    def personalise(self, client: Client, given: Params) -> Any:
        if not client.state:  # it has never taken part
            return given
        if self.prediction == "blended":
            return self.blend(client, given)[0]
        return choose(client.state["times"] == 0, given, client.state["params"])


def pick(tree: Any, rows: Tensor) -> Any:
    """Some rows of all leaves."""
    return tree_map(lambda leaf: leaf[rows], tree)


def choose(condition: Tensor, one: Params, other: Params) -> Params:
    """One model or another."""
    return {name: torch.where(condition, leaf, other[name]) for name, leaf in one.items()}


def top_layers(params: Params, count: int) -> list[str]:
    """Names of the trained weights of the last layers."""
    names = [name for name, leaf in params.items() if trainable((name,), leaf)]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    last = layers[len(layers) - min(count, len(layers)) :]
    return [name for name in names if name.rpartition(".")[0] in last]


def mix(own: Params, received: Params, blend: Params) -> Params:
    """The received model, with each blended weight a share of the way from one's own to it."""
    blended = {
        name: own[name] + (received[name] - own[name]) * share for name, share in blend.items()
    }
    return {**received, **blended}
