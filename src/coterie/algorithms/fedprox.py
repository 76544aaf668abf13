"""FedProx: one model for all, and clients that stay near it while they train.

FedAvg with a proximal term: a client minimises its loss plus `strength` times half the squared
distance between its model and the model it received.

References
----------
Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks,
MLSys 2020, arXiv 1812.06127, Algorithm 2.

Departures: the paper draws clients in proportion to their number of samples and averages them
equally. Here a cohort is drawn uniformly, and the average is weighted by the number of samples.
Every client does the work of `local`; partial work of slow clients is not modelled.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD, half_square_distance
from coterie.core.tree import Ids, Params


class State(NamedTuple):
    params: Params


@register("fedprox")
@dataclass(frozen=True)
class FedProx(Algorithm):
    """Average the clients' models into one, and keep clients near it while they train.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training.
    strength
        Weight of the proximal term, mu. The paper tunes it among 0.001, 0.01, 0.1 and 1, and takes
        1 for MNIST and FEMNIST. 0: FedAvg.
    """

    bar: ClassVar[float] = 0.4  # two groups that contradict each other allow one model 0.5
    model: Model
    local: LocalSGD
    strength: Annotated[float, Ge(0)] = 1.0

    # server

    def init(self, fed: Federation) -> State:
        return State(self.model.init(initial_key(fed.run_key)))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("params", state.params, weight="n")
        _, reply = fed.map(self.update, state.params, to=fed.cohort(), reduce=mean)
        return State(reply["params"]), {}

    # client

    @task
    def update(self, client: Client, params: Params) -> dict[str, Any]:
        def pull(new: Params, received: Params) -> Tensor:
            return self.strength * half_square_distance(new, received)

        losses = self.model.losses
        trained = self.local(client, params, losses, penalty=pull, given=(params,))
        return {"params": trained, "n": client.train.size}

    # use

    def deploy(self, state: State, ids: Ids) -> Params:
        return state.params
