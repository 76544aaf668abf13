"""Ditto: one common model, and a personal model of each client that is held near it.

The common model is trained by FedAvg. Beside it, each client trains a model of its own that never
leaves the client, with a proximal term towards the common model it received in the round.

References
----------
Li, Hu, Beirami, Smith: Ditto: fair and robust federated learning through personalization, ICML
2021, arXiv 2012.04221, Algorithm 1.

Departures: the personal model of a client that takes part for the first time starts at the common
model it receives (the paper: at the initial one, which is the same in the first round). A client
that has not taken part yet predicts with the common model. Clients do not choose `strength` by a
validation set, and the common model is trained by FedAvg, not by a robust average.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD, half_square_distance
from coterie.core.tree import Ids, Params, Tree, tree_map


class State(NamedTuple):
    params: Params  # the common model, w


@register("ditto")
@dataclass(frozen=True)
class Ditto(Algorithm):
    """Train a personal model for each client, near a common one.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training, of the common and of the personal model.
    strength
        Weight of the proximal term of the personal model, lambda. The paper takes 1 where a client
        has too few samples to choose, and 0.1 under strong attacks. 0: every client trains alone.
    personal_epochs
        Epochs of the personal model in a round. None: the work of `local`.
    """

    bar: ClassVar[float] = 0.8  # a model per client, on few samples, held near a poor common one
    model: Model
    local: LocalSGD
    strength: Annotated[float, Ge(0)] = 1.0
    personal_epochs: Annotated[int, Ge(0)] | None = None

    # server

    def init(self, fed: Federation) -> State:
        return State(self.model.init(initial_key(fed.run_key)))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("params", state.params, weight="n")
        _, reply = fed.map(self.update, state.params, to=fed.cohort(), reduce=mean)
        return State(reply["params"]), {}

    # client

    def client_init(self, client: Client) -> Tree:
        return {
            "params": self.model.init(initial_key(client.run_key)),
            "trained": torch.tensor(False),
        }

    @task
    def update(self, client: Client, params: Params) -> Reply:
        def pull(own: Params, received: Params) -> Tensor:
            return self.strength * half_square_distance(own, received)

        losses = self.model.losses
        work = self.local
        if self.personal_epochs is not None:
            work = replace(work, epochs=self.personal_epochs, steps=None)
        own = self.personalise(client, params)
        own = work(client, own, losses, salt=1, penalty=pull, given=(params,))  # v_k
        common = self.local(client, params, losses)  # w_k
        keep = {"params": own, "trained": torch.ones_like(client.state["trained"])}
        return Reply({"params": common, "n": client.train.size}, keep=keep)

    # use

    def deploy(self, state: State, ids: Ids) -> Params:
        return state.params

    @task
    def personalise(self, client: Client, given: Params) -> Any:
        if not client.state:  # a file without memories: the common model alone
            return given
        trained = client.state["trained"]
        return tree_map(lambda own, w: torch.where(trained, own, w), client.state["params"], given)

    @classmethod
    def example(cls, problem: Any) -> "Ditto":
        # The common model fits neither of two groups that contradict each other: a weak pull.
        return cls(problem.model, problem.local, strength=0.1)
