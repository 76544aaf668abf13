"""FedAvg: one model for everybody.

In every round the participating clients train the common model on their own data, and the server
averages the results, weighted by the number of samples.

References
----------
McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017, arXiv 1602.05629, Algorithm 1.

Departures: none. `weights="equal"` is the "global model" of the IFCA paper.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params


class State(NamedTuple):
    params: Params


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Average the clients' models into one.

    Parameters
    ----------
    model
        The network.
    local
        Local training: the number of epochs, the optimiser and its step size.
    weights
        Whether clients count by their number of samples ("samples") or alike ("equal").
    """

    bar: ClassVar[float] = 0.4  # two groups that contradict each other allow one model 0.5
    model: Model
    local: LocalSGD
    weights: Literal["samples", "equal"] = "samples"

    def init(self, fed: Federation) -> State:
        return State(self.model.init(initial_key(fed.run_key)))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        weight = "n" if self.weights == "samples" else None
        mean = Mean("params", state.params, weight=weight)
        _, reply = fed.map(self.update, state.params, to=fed.cohort(), reduce=mean)
        return State(reply["params"]), {}

    @task
    def update(self, client: Client, params: Params) -> dict[str, Any]:
        return {"params": self.local(client, params, self.model.losses), "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Params:
        return state.params
