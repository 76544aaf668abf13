"""Per-FedAvg: a common model from which one gradient step leads to a good personal model.

Each local step first takes a trial step on one batch, and moves the model by the gradient after the
trial, on another batch (model-agnostic meta-learning). The server averages the clients' models. A
client predicts after one gradient step on its own data.

References
----------
Fallah, Mokhtari, Ozdaglar: Personalized federated learning with theoretical guarantees: a
model-agnostic meta-learning approach, NeurIPS 2020, arXiv 2002.07948, Algorithm 1.

Departures: the server weights clients by their number of samples (the paper: equally). The batches
of a step are disjoint (the paper: drawn independently). A step reads two or three batches of
`local` at once and divides the rows among them, so a client with fewer samples divides what it has;
a single sample serves every batch. An epoch has as many steps as an epoch of FedAvg. Where a
client's data are not at hand, as in a saved run, the common model predicts.

Faults of public code that are avoided: local training that runs twice in a round; an outer gradient
that is applied to the model after the trial step; running statistics that the trial step changes;
an evaluation after a step on one small batch instead of all data.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Batch, Client, task
from coterie.core.federation import Federation
from coterie.core.layers import current_mode, training
from coterie.core.model import Model
from coterie.core.random import fold, initial_key
from coterie.core.training import LocalSGD, join, part
from coterie.core.tree import Ids, Params


class State(NamedTuple):
    params: Params


@register("per_fedavg")
@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """Learn a common model that fits each client after one gradient step.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training; its step size is the outer one, beta.
    order
        "first": the derivative of the trial step is taken as one (FO). "hessian_free": its product
        with the gradient is a difference of two gradients (HF).
    inner_rate
        Step size of the trial step and of personalisation, alpha. None: that of `local`.
    difference
        Step of the difference of gradients, delta; "hessian_free" only.
    fine_tune
        Epochs of personalisation, in batches of `local`. None: one step on all data of the client.
    """

    bar: ClassVar[float] = 0.4  # one model, one step away from each of two that contradict
    model: Model
    local: LocalSGD
    order: Literal["first", "hessian_free"] = "first"
    inner_rate: Annotated[float, Ge(0)] | None = None
    difference: Annotated[float, Gt(0)] = 1e-3
    fine_tune: Annotated[int, Ge(0)] | None = None

    @property
    def alpha(self) -> float:
        """Step size of the trial step."""
        return self.local.learning_rate if self.inner_rate is None else self.inner_rate

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
        work, parts = self.local, self.n_parts
        if work.batch_size is not None:  # a step reads several batches
            passes = 1 if work.epochs is None else work.epochs
            epochs = None if work.steps is not None else parts * passes
            work = replace(work, batch_size=parts * work.batch_size, epochs=epochs)
        trained = work(client, params, self.model.losses, direction=self.direction)
        return {"params": trained, "n": client.train.size}

    @property
    def n_parts(self) -> int:
        """Batches of a step."""
        return 2 if self.order == "first" else 3

    def direction(self, params: Params, batch: Batch, key: Tensor) -> Params:
        """The gradient of the loss after the trial step."""
        model, alpha, delta = self.model, self.alpha, self.difference
        batches = [portion(batch, j, self.n_parts) for j in range(self.n_parts)]
        inner, _ = gradient(model, params, batches[0], fold(key, 0))
        trial = move(params, inner, -alpha)  # u
        outer, updates = gradient(model, trial, batches[1], fold(key, 1))  # d
        current_mode().updates += updates  # running statistics follow the outer pass alone
        if self.order == "first":
            return outer
        ahead, _ = gradient(model, move(params, outer, delta), batches[2], fold(key, 2))
        back, _ = gradient(model, move(params, outer, -delta), batches[2], fold(key, 2))
        return move(move(outer, ahead, -alpha / (2 * delta)), back, alpha / (2 * delta))  # d - a h

    # use

    def deploy(self, state: State, ids: Ids) -> Params:
        return state.params

    @task
    def personalise(self, client: Client, given: Params) -> Params:
        if self.fine_tune is None:
            work = LocalSGD(self.alpha, steps=1)
        else:
            work = LocalSGD(self.alpha, epochs=self.fine_tune, batch_size=self.local.batch_size)
        return work(client, given, self.model.losses)


def portion(batch: Batch, j: int, parts: int) -> Batch:
    """Every `parts`-th row from row j on; the first row, if there is no real one among them."""
    n = len(batch.mask)
    place = torch.arange(-(-n // parts), device=batch.mask.device) * parts + j
    real = place < n
    place = place.clamp(max=n - 1)
    real = real & batch.mask.index_select(0, place)
    none = ~real.any()
    first = torch.arange(len(place), device=place.device) == 0
    return batch.rows(torch.where(none, 0, place), torch.where(none, first, real))


def move(params: Params, direction: Params, by: float) -> Params:
    """A model moved along a direction; buffers are the same tensors as before."""
    trained, fixed = part(params)
    pairs = zip(trained, part(direction)[0], strict=True)
    return join(params, [leaf + by * slope for leaf, slope in pairs], fixed)


def gradient(
    model: Model, params: Params, batch: Batch, key: Tensor
) -> tuple[Params, list[tuple[Tensor, Tensor]]]:
    """Gradient of the mean loss in training mode (zeros in buffers), and the new buffers."""
    trained, fixed = part(params)

    def objective(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with training(batch.mask, key) as mode:
            value = batch.mean(model.losses(join(params, leaves, fixed), batch, key))
        old.extend(before for before, _ in mode.updates)
        return value, [after for _, after in mode.updates]

    old: list[Tensor] = []
    slopes, new = torch.func.grad(objective, has_aux=True)(trained)
    zeros = [torch.zeros_like(leaf) for leaf in fixed]
    return join(params, list(slopes), zeros), list(zip(old, new, strict=True))
