"""A newcomer's method in one file: FedAvg, with clients weighted by how many classes they have.

References: none; an example for the tests.
Departures: none.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie import Algorithm, Client, Federation, LocalSGD, Mean, Model, each, task
from coterie.core import Fill
from coterie.core.question import Question, question


class State(NamedTuple):
    params: dict[str, Tensor]
    classes: Annotated[Tensor, Fill(1.0)]  # [clients]; 1 for those that join late


@question(phase="cluster")
def count_classes(method: "Newcomer", client: Client, *, most: int) -> dict[str, Tensor]:
    """Number of classes among a client's labels: a question that is not a task of the method."""
    label = torch.arange(most)
    there = (client.train.y[:, None] == label) & client.train.mask[:, None]
    return {"classes": there.any(0).sum()}


@dataclass(frozen=True)
class Newcomer(Algorithm):
    """Average the clients' models, weighted by their number of classes.

    Parameters
    ----------
    model
        The network.
    local
        Local training.
    most
        Largest number of classes that is counted.
    """

    bar: ClassVar[float] = 0.4  # one model for groups that disagree

    model: Model
    local: LocalSGD
    most: int = 10

    def init(self, fed: Federation) -> State:
        ask = Question(count_classes, self, {"most": self.most})
        ids, reply = fed.map(ask, to=fed.everyone(), at_least=0)
        classes = fed.per_client(1.0)
        if len(ids):
            classes[ids] = reply["classes"].float()
        return State(self.model.init(fed.key("model")), classes)

    def step(self, fed: Federation, state: State) -> tuple[State, dict[str, Any]]:
        cohort = fed.cohort()
        mean = Mean("params", around=state.params, weight="weight")
        weight = each(state.classes[cohort])
        _, reply = fed.map(self.update, state.params, weight, to=cohort, reduce=mean)
        return State(reply["params"], state.classes), {}

    @task
    def update(self, client: Client, params: dict[str, Tensor], weight: Tensor) -> dict[str, Any]:
        trained = self.local(client, params, self.model.losses)
        return {"params": trained, "weight": weight}

    def deploy(self, state: State, ids: Tensor) -> dict[str, Tensor]:
        return state.params
