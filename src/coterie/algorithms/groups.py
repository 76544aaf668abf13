"""What methods with one model per group have in common, as functions.

A model is held in two parts: `shared` by all groups (empty unless the model has a head) and one row
of `models` per group, so weight sharing is not a second code path.
"""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from coterie.clustering.evidence import REFUSAL
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Evidence, Info
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import fold, normal, uniform
from coterie.core.training import LocalSGD, descend
from coterie.core.tree import Ids, Params, Tree, tree_map


class Grouped(Protocol):
    """The options these functions read."""

    @property
    def model(self) -> Model: ...
    @property
    def local(self) -> LocalSGD: ...
    @property
    def averaging(self) -> Literal["model", "gradient"]: ...
    @property
    def weights(self) -> Literal["equal", "samples"]: ...
    @property
    def shared(self) -> Literal["train", "frozen"]: ...


# client


def work(method: Grouped, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
    """Train the model of one's group: the new weights, or the gradient, of both parts."""
    fixed, moving = (shared, {}) if method.shared == "frozen" else ({}, shared)

    def losses(parts: Tree, batch: Batch, key: Tensor, fixed: Params) -> Tensor:
        return method.model.losses({**fixed, **parts["shared"], **parts["models"]}, batch)

    learn = method.local if method.averaging == "model" else method.local.gradient
    return learn(client, {"shared": moving, "models": own}, losses, given=(fixed,))


def bank_losses(method: Grouped, shared: Params, models: Params, batch: Batch) -> Tensor:
    """Mean loss of every group's model on one's data: [k]."""
    return method.model.probe(bank(shared, models), batch)


def bank(shared: Params, models: Params) -> Params:
    """Whole models, a row per group; the shared part is repeated without copying."""
    k = len(next(iter(models.values())))
    return {**{name: leaf.expand(k, *leaf.shape) for name, leaf in shared.items()}, **models}


# server


def first_models(model: Model, key: Tensor, k: int, same: bool) -> tuple[Params, Params]:
    """The shared part, and a bank of k drawn group parts or of k copies of one."""
    shared, models = model.split(model.init_many(key, k, same))
    return {name: leaf[0] for name, leaf in shared.items()}, models


def means(method: Grouped, shared: Params, models: Params, by: str | Tensor) -> tuple[Mean, Mean]:
    """Both parts averaged on the way in: over all, and by group."""
    moving = {} if method.shared == "frozen" else shared
    if method.averaging == "gradient":
        moving, models = tree_map(torch.zeros_like, (moving, models))
    weight = "n" if method.weights == "samples" else None
    return Mean("shared", moving, weight=weight), Mean("models", models, by=by, weight=weight)


def moved(
    method: Grouped,
    fed: Federation,
    state: Any,
    reply: dict[str, Any],
    group: Tensor,
    divisor: Literal["participants", "all", "cluster"],
) -> tuple[Params, Params]:
    """Both parts after a round: the means themselves, or a step along the mean gradients.

    A group's gradients are summed and divided by the number of its members (`cluster`), of those
    who answered (`participants`) or of `all` clients.
    """
    if method.averaging == "model":
        return {**state.shared, **reply["shared"]}, reply["models"]
    rate = method.local.rate(torch.tensor(fed.round))
    members = torch.bincount(group, minlength=len(next(iter(state.models.values()))))  # [k]
    everyone = fed.n_clients if divisor == "all" else len(group)
    share = members.clamp(max=1) if divisor == "cluster" else members / everyone
    models = descend(state.models, reply["models"], rate * share)
    moving = {name: state.shared[name] for name in reply["shared"]}
    shared = descend(moving, reply["shared"], rate * len(group) / everyone)
    return {**state.shared, **shared}, models


def random_groups(fed: Federation, ids: Ids, n_groups: int) -> Tensor:
    """Random groups, none of them empty while there are clients for it."""
    place = fed.turns(ids, "first")  # everyone's turn in the deal
    late = (uniform(fed.key("deal"), (len(ids),)) * n_groups).long()
    return torch.where(place < n_groups, place, late[place])


def equal_groups(fed: Federation, ids: Ids, n_groups: int) -> Tensor:
    """A random partition of all clients into groups of equal size; the groups of some of them."""
    return fed.turns(fed.everyone(), "equal", every_round=True)[ids] % n_groups


def unplaced(assignment: Tensor, ids: Ids) -> Ids:
    """Those without a group."""
    return ids[assignment[ids] < 0]


def run_lengths(assignment: Tensor, repeats: Tensor, ids: Ids, group: Tensor) -> Tensor:
    """How often in a row each of some clients has now had its group, from its own rounds only."""
    return torch.where(assignment[ids] == group, repeats[ids] + 1, 1)


def settled(repeats: Tensor, ids: Ids, stable_after: int | None, fraction: float) -> bool:
    """Whether enough of some clients had the same group in each of their last rounds."""
    if stable_after is None or not len(ids):
        return False
    return bool((repeats[ids] >= stable_after).double().mean() >= fraction)


def info(state: Any, ids: Ids, group: Tensor) -> Info:
    """What a person may look at after a round."""
    return {
        "assignment": state.assignment,
        "participants": ids,
        "groups_used": len(group.unique()),
        "stable": bool(state.stable),
    }


def evidence(
    asked: Ids, answered: Ids, group: Tensor, margin: Tensor, score: Tensor, assignment: Tensor
) -> Evidence:
    """Evidence in the order asked; the silent keep their group and are not judged."""
    heard = torch.isin(asked, answered)  # answers come in the order asked
    nan = torch.full((len(asked),), torch.nan, dtype=torch.float64)
    margin = nan.masked_scatter(heard, margin.double())
    score = nan.masked_scatter(heard, score.double())
    group = assignment[asked].masked_scatter(heard, group)
    return Evidence(group, margin, score, ~(score > REFUSAL))


def no_evidence(asked: Ids, assignment: Tensor) -> Evidence:
    """Nobody answered."""
    return evidence(asked, asked[:0], asked[:0], torch.empty(0), torch.empty(0), assignment)


def orthonormal(models: Params, key: Tensor) -> Params:
    """As many models as inputs, orthonormal; for linear models with one vector of weights."""
    (name, leaf), *rest = models.items()
    if rest:
        raise ConfigError(
            "CLoVE: first_bank='orthonormal' needs a linear model with one vector of weights. "
            f"Got leaves {', '.join(models)}."
        )
    d = leaf[0].numel()
    basis, _ = torch.linalg.qr(normal(fold(key, "orthonormal"), (d, d), torch.float64))
    return {name: basis.reshape(d, *leaf.shape[1:]).to(leaf.dtype)}
