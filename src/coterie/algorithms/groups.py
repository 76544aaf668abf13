"""What methods with one model per group have in common, as functions.

A model is held in two parts: `shared` by all groups (empty unless the model has a head) and one row
of `models` per group, so weight sharing is not a second code path.
"""

import warnings
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from coterie.clustering.evidence import REFUSAL
from coterie.clustering.matching import clean_losses
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Evidence, Info
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import bits, fold, normal, uniform
from coterie.core.training import LocalSGD, descend
from coterie.core.tree import Ids, Params, Tree, put, tree_map


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


def fresh(client: Client, n_rounds: int | None, use: int) -> Batch:
    """All data; or, cut for so many rounds, this round's own part of it for one of two uses."""
    if n_rounds is None:
        return client.train
    part = torch.arange(len(client.train.mask)) * 2 * n_rounds // client.train.size
    now = (2 * client.round + use) % (2 * n_rounds)  # later rounds use the parts again
    return client.train.where(part == now)


def smallest(losses: Tensor, ties: Literal["lowest", "random"], key: Tensor) -> Tensor:
    """Index of the smallest loss; one that is not a number is the largest."""
    losses = losses.nan_to_num(torch.inf, torch.inf)
    if ties == "lowest":
        return losses.argmin()
    draw = bits(fold(key, "ties"), tuple(losses.shape))
    return torch.where(losses == losses.min(), draw, torch.iinfo(torch.int64).min).argmax()


def bank(shared: Params, models: Params) -> Params:
    """Whole models, a row per group; the shared part is repeated without copying."""
    k = len(next(iter(models.values())))
    return {**{name: leaf.expand(k, *leaf.shape) for name, leaf in shared.items()}, **models}


# server


def first_models(
    model: Model, key: Tensor, k: int, same: bool = False, at_right_angles: bool = False
) -> tuple[Params, Params]:
    """The shared part, and a bank of group parts: k draws, k copies, or an orthonormal set."""
    shared, models = model.split(model.init_many(key, k, same))
    models = orthonormal(models, key) if at_right_angles else models
    return {name: leaf[0] for name, leaf in shared.items()}, models


def all_preferred(losses: Tensor, share: float, last: bool) -> bool:
    """Whether each model is best for this share of the clients; warns if no draw was."""
    losses = clean_losses(losses)
    preferred = torch.bincount(losses.argmin(1), minlength=losses.shape[1])
    enough = int(preferred.min()) >= share * len(losses)
    if last and not enough:
        warnings.warn(
            f"IFCA: no draw of first models had each preferred by a share of {share}; the last one "
            f"is used, preferred by {preferred.tolist()}.",
            stacklevel=2,
        )
    return enough


def means(method: Grouped, state: Any, by: str | Tensor) -> tuple[Mean, Mean]:
    """Both parts averaged on the way in: over all, and by group."""
    moving, models = {} if method.shared == "frozen" else state.shared, state.models
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


def noted(state: Any, ids: Ids, group: Tensor, dealt: bool = False) -> Any:
    """The state with new groups, and how often in a row each client has now had its own.

    A group that was dealt at random says nothing of stability and does not count.
    """
    same = (state.assignment[ids] == group) & (state.repeats[ids] > 0)
    repeats = torch.where(same, state.repeats[ids] + 1, 0 if dealt else 1)
    assignment = put(state.assignment, ids, group)
    return state._replace(assignment=assignment, repeats=put(state.repeats, ids, repeats))


def settled(method: Any, state: Any, ids: Ids) -> Tensor:
    """Whether enough of some clients had the same group in each of their last rounds; latched."""
    if hasattr(state, "aside"):  # who is not averaged need not settle
        ids = ids[state.aside[ids] == 0]
    if not method.stable_after or not len(ids):
        return state.stable
    share = (state.repeats[ids] >= method.stable_after).double().mean()
    return state.stable | (share >= method.stable_fraction)


def info(state: Any, ids: Ids, group: Tensor) -> Info:
    """What a person may look at after a round."""
    aside = {"set_aside": int(state.aside.sum())} if hasattr(state, "aside") else {}
    return {
        "assignment": state.assignment,
        "participants": ids,
        "groups_used": len(group.unique()),
        "stable": bool(state.stable),
        **aside,
    }


def judged(
    state: Any, asked: Ids, heard: Ids, nearest: Tensor, margin: Tensor, score: Tensor
) -> tuple[Any, Evidence]:
    """Give those without a group the nearest one; evidence in the order asked.

    The silent keep what they had and are not judged.
    """
    known = state.assignment[heard]
    assignment = put(state.assignment, heard, torch.where(known >= 0, known, nearest))
    answered = torch.isin(asked, heard)  # answers come in the order asked
    nan = torch.full((len(asked),), torch.nan, dtype=torch.float64)
    margin = nan.masked_scatter(answered, margin.double())
    score = nan.masked_scatter(answered, score.double())
    fits = ~(score > REFUSAL)
    if hasattr(state, "aside"):
        fits &= state.aside[asked] == 0
    found = Evidence(assignment[asked], margin, score, fits)
    return state._replace(assignment=assignment), found


def no_evidence(asked: Ids, assignment: Tensor) -> Evidence:
    """Nobody answered."""
    nan = torch.full((len(asked),), torch.nan, dtype=torch.float64)
    return Evidence(assignment[asked], nan, nan, torch.ones(len(asked), dtype=torch.bool))


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
