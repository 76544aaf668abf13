"""FedProto: clients exchange the mean features of their classes, and no weights.

Every client keeps a model of its own, a body that makes features and a linear head. It trains on
its own labels, with a term that pulls the features of a sample towards the common prototype of its
class. The server averages the clients' prototypes.

References
----------
Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: federated prototype learning across heterogeneous
clients, AAAI 2022, arXiv 2105.00243, Algorithm 1.

Departures: the pull is the squared distance of each sample to its prototype, averaged over
features, as in the authors' code (the paper: the distance of the client's prototypes). The server
keeps the last prototype of a class that nobody in the cohort has. All clients begin with the same
weights. A client that has not taken part yet trains once on its own data before it predicts.

Faults of public code that are avoided: prototypes averaged without the number of samples; features
collected while the weights still change; classes forgotten by the server; accuracy 0 before the
first exchange, where the head answers here.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms.prototypes import class_means, head_shape, row_of_class, with_head
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree


class State(NamedTuple):
    prototypes: Tensor  # [c, d]
    known: Tensor  # [c]  whether any client has sent one


@register("fedproto")
@dataclass(frozen=True)
class FedProto(Algorithm):
    """Align clients' own models by common prototypes of the classes.

    Parameters
    ----------
    model
        The network and its loss, cross-entropy. Its head must be a linear layer; without a head,
        the last linear layer is taken.
    local
        Local training.
    strength
        Weight of the pull towards the prototypes, lambda.
    prediction
        "prototype": the class of the nearest prototype. "head": the output of the client's model.
    """

    bar: ClassVar[float] = 0.8  # every client's own model, on a few samples
    model: Model
    local: LocalSGD
    strength: Annotated[float, Ge(0)] = 1.0
    prediction: Literal["prototype", "head"] = "prototype"

    def check(self) -> None:
        object.__setattr__(self, "model", with_head(self.model, "FedProto"))

    # server

    def init(self, fed: Federation) -> State:
        n_classes, n_features = head_shape(self.model)
        zeros = torch.zeros(n_classes, n_features, dtype=self.model.dtype)
        return State(zeros, torch.zeros(n_classes, dtype=torch.bool))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        mean = Mean("prototypes", state.prototypes, weight="counts", slots=True)
        _, reply = fed.map(self.update, *state, to=fed.cohort(), reduce=mean)
        known = state.known | (reply["counts"] > 0).any(0)
        return State(reply["prototypes"], known), {"classes": int(known.sum())}

    # client

    def client_init(self, client: Client) -> Tree:
        return {
            "params": self.model.init(initial_key(client.run_key)),
            "trained": torch.tensor(False),
        }

    @task(reveals="label counts")
    def update(self, client: Client, prototypes: Tensor, known: Tensor) -> Reply:
        batch = client.train
        params = self.train(client, batch, prototypes, known)
        features = self.model.features(params, batch.x)
        means, counts = class_means(features, batch, len(known))
        fine = torch.isfinite(means).all()  # what the server leaves out must not count as known
        sent = {"prototypes": means, "counts": (counts * fine).to(means.dtype)}
        keep = {"params": params, "trained": torch.ones_like(client.state["trained"])}
        return Reply(sent, keep=keep)

    def train(self, client: Client, on: Batch, prototypes: Tensor, known: Tensor) -> Any:
        """The client's model after local training."""
        table = torch.cat([prototypes, known[:, None].to(prototypes.dtype)], 1)
        return self.local(client, client.state["params"], self.losses, on=on, given=(table,))

    def losses(self, params: Params, batch: Batch, key: Tensor | None, table: Tensor) -> Tensor:
        """Cross-entropy plus the pull, where the class has a prototype."""
        features, output = self.model.features_and_output(params, batch.x)
        target = row_of_class(table, batch.y.long())
        pull = (features - target[:, :-1]).square().mean(1)
        return self.model.loss_of(output, batch) + self.strength * target[:, -1] * pull

    # use

    def deploy(self, state: State, ids: Ids) -> Tree:
        return state._asdict()

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        new = client.train.where(~client.state["trained"])  # no rows, no training
        return {**given, "params": self.train(client, new, given["prototypes"], given["known"])}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Minus the squared distances to the prototypes, or the outputs of the head."""
        features, output = self.model.features_and_output(personal["params"], x)
        if self.prediction == "head":
            return output
        prototypes, known = personal["prototypes"], personal["known"]
        near = -(features[:, None] - prototypes).square().sum(2)  # [n, c]
        near = torch.where(known, near, near.min(1, keepdim=True).values - 10)  # below all others
        return torch.where(known.any(), near, output)
