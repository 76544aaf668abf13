"""What methods with one model per group share.

A model is held in two parts: `shared` by all groups (empty unless the model has a head) and one row
of `models` per group, so weight sharing is not a second code path.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Evidence, Info
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import uniform
from coterie.core.tree import Ids, Params, Tree, n_rows, put, tree_map

# models


def draw_models(model: Model, key: Tensor, k: int, same: bool = False) -> tuple[Params, Params]:
    """The shared part and the group parts of k initial models: k draws, or k copies of one."""
    shared, models = model.split(model.init_many(key, k, same))
    return {name: leaf[0] for name, leaf in shared.items()}, models


def whole_models(shared: Params, models: Params) -> Params:
    """Whole models, one row per group; the shared part is repeated without copying."""
    k = n_rows(models)
    return {**{name: leaf.expand(k, *leaf.shape) for name, leaf in shared.items()}, **models}


def train_own(
    model: Model, learn: Callable[..., Tree], client: Client, shared: Params, own: Params
) -> dict[str, Tree]:
    """New weights, or the gradient, of both parts of a client's model.

    `learn` is a `LocalSGD` or its method `gradient`.
    """

    def losses(parts: Tree, batch: Batch, key: Tensor) -> Tensor:
        return model.losses({**parts["shared"], **parts["models"]}, batch)

    return learn(client, {"shared": shared, "models": own}, losses)


def means_of(
    shared: Params, models: Params, by: str | Tensor, weight: str | None, gradients: bool = False
) -> tuple[Mean, Mean]:
    """The means to take of replies: the shared part over all clients, models by group.

    A group without a reply keeps its model; the mean of no gradients is zero.
    """
    if gradients:
        shared, models = tree_map(torch.zeros_like, (shared, models))
    return Mean("shared", shared, weight=weight), Mean("models", models, by=by, weight=weight)


# first round


def assign_at_random(fed: Federation, ids: Ids, n_groups: int) -> Tensor:
    """Random groups, [m]; no group is empty while there are clients for it."""
    place = fed.turns(ids, "first")
    late = (uniform(fed.key("deal"), (len(ids),)) * n_groups).long()
    return torch.where(place < n_groups, place, late[place])


def follow_start(fed: Federation, ids: Ids, group: Tensor, n_groups: int) -> Tensor:
    """The groups that were given to the run (`start=`), [m]; `group` for unlisted clients."""
    if fed.start is None:
        return group
    given = fed.start[ids]
    if len(given) and int(given.max()) >= n_groups:
        raise ConfigError(
            f"start: groups must be 0 to {n_groups - 1}, because there are {n_groups} models. Got "
            f"group {int(given.max())}. Change the file, or ask for more groups."
        )
    return torch.where(given >= 0, given, group)


# stability


def count_repeats(
    assignment: Tensor, repeats: Tensor, ids: Ids, group: Tensor, counts: bool = True
) -> tuple[Tensor, Tensor]:
    """Groups of all clients, and how many times in a row each got its own: both [clients].

    `counts=False`: the new groups say nothing about stability, as when they are random.
    """
    same = (assignment[ids] == group) & (repeats[ids] > 0)
    now = torch.where(same, repeats[ids] + 1, 1 if counts else 0)
    return put(assignment, ids, group), put(repeats, ids, now)


def is_stable(stable: Tensor, repeats: Tensor, ids: Ids, stable_after: int | None) -> Tensor:
    """Whether each of some clients had its group `stable_after` times in a row; stays true."""
    if not stable_after or not len(ids):
        return stable
    return stable | (repeats[ids] >= stable_after).all()


# placing and reporting


def choose_nearest(cost: Tensor) -> tuple[Tensor, Tensor]:
    """The group of smallest cost of each client, and its margin over the second: [m] each.

    The margin is (second - first) / (second + first); 1 if there is no second group.
    """
    ordered, order = cost.double().sort(dim=1, stable=True)  # stable: ties to the lowest group
    first = ordered[:, 0]
    second = ordered[:, 1] if cost.shape[1] > 1 else torch.full_like(first, torch.inf)
    margin = ((second - first) / (second.abs() + first.abs())).nan_to_num(0.0)
    return order[:, 0], torch.where(second.isinf(), first.isfinite().double(), margin)


def place_clients(
    assignment: Tensor,
    asked: Ids,
    heard: Ids,
    nearest: Tensor,
    margin: Tensor,
    score: Tensor | None = None,
    refusal: float = torch.inf,
) -> tuple[Tensor, Evidence]:
    """Give unassigned clients the nearest group: groups of all, evidence in the order asked.

    Clients that did not answer keep what they had and are not judged. A client whose score is above
    `refusal` fits no group.
    """
    known = assignment[heard]
    assignment = put(assignment, heard, torch.where(known >= 0, known, nearest))
    answered = torch.isin(asked, heard)  # answers come in the order asked
    nan = torch.full((len(asked),), torch.nan, dtype=torch.float64)
    margins = nan.masked_scatter(answered, margin.double())
    scores = nan if score is None else nan.masked_scatter(answered, score.double())
    return assignment, Evidence(assignment[asked], margins, scores, ~(scores > refusal))


def report_round(assignment: Tensor, ids: Ids, group: Tensor, stable: Tensor) -> Info:
    """What a person may look at after a round."""
    return {
        "assignment": assignment,
        "participants": ids,
        "groups_used": len(group.unique()),
        "stable": bool(stable),
    }
