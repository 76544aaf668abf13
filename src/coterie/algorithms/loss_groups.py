"""How vectors of losses become groups: the clustering step of CLoVE, as functions.

A client's losses are written down in units of their noise (`clustering/accumulate.py`), loners are
set aside, the rest is clustered and matched to models (`clustering/loss_vectors.py`), and the bank
of the best separated round is kept for newcomers, once its models have learned these groups.
"""

from dataclasses import fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from coterie.algorithms import groups, seeded
from coterie.clustering.accumulate import append, cliff, noise_units
from coterie.clustering.evidence import reference
from coterie.clustering.guard import clip
from coterie.clustering.loss_vectors import Rules, column_unit, embed, explained, find_groups
from coterie.clustering.matching import clean_losses
from coterie.core.algorithm import Curve
from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.tree import Ids, Params, put

NOTHING = torch.zeros(0, 0, dtype=torch.float64)
GROWN = 3
"""Equal clusterings in a row up to which newcomers meet the last bank; then the clearest since."""

ERODED = 0.25
"""Of what separated the groups before: groups at less than half their distance are not taken."""

PUBLISHED: dict[str, Any] = {
    "embedding": "loss",
    "accumulate": False,
    "clustering": "kmeans",
    "choose": "silhouette",
    "guard": False,
    "snapshot": "last",
    "stable_after": 0,
}


class LossGroups(Rules, Protocol):
    """The options these functions read."""

    @property
    def model(self) -> Model: ...
    @property
    def n_groups(self) -> int | None: ...
    @property
    def max_groups(self) -> int | None: ...
    @property
    def embedding(self) -> Literal["noise", "loss", "sqrt"]: ...
    @property
    def accumulate(self) -> bool: ...
    @property
    def scale(self) -> Literal["none", "column_std"]: ...
    @property
    def first(self) -> str: ...
    @property
    def snapshot(self) -> Literal["best", "last"]: ...
    @property
    def stable_after(self) -> int | None: ...
    @property
    def published(self) -> bool: ...


def check(method: LossGroups) -> None:
    """Fill in what follows from other options, and refuse what makes no sense together."""
    given = method.n_groups, method.max_groups
    if given.count(None) != 1:
        raise ConfigError(f"CLoVE: give n_groups, or max_groups if it is unknown. Got {given}.")
    for field in fields(method) if method.published else ():  # type: ignore[arg-type]
        if field.name in PUBLISHED and getattr(method, field.name) == field.default:
            object.__setattr__(method, field.name, PUBLISHED[field.name])
    if method.stable_after is None:
        object.__setattr__(method, "stable_after", 3)
    if method.clustering == "weighted" and method.embedding != "noise":
        raise ConfigError(
            "CLoVE: clustering='weighted' goes with embedding='noise', which knows the precision "
            f"of losses. Got embedding='{method.embedding}'; add published=True, or "
            "clustering='kmeans'."
        )
    if method.choose == "noise" and method.clustering != "weighted":
        raise ConfigError(
            "CLoVE: choose='noise' goes with clustering='weighted'. Got clustering="
            f"'{method.clustering}'; add published=True, or choose='silhouette'."
        )


# client


def measured(method: LossGroups, shared: Params, models: Params, batch: Batch) -> dict[str, Tensor]:
    """Mean loss of every group's model, [k], and standard errors of what is left of it, [k].

    What is left once the mean over models is taken off, sample by sample: that a sample is hard for
    every model says nothing on groups. As published, the losses alone.
    """
    if method.embedding != "noise":
        return {"losses": method.model.probe(groups.bank(shared, models), batch)}
    each = method.model.probe_each(groups.bank(shared, models), batch)  # [k, n]
    finite = torch.where(batch.mask & each.isfinite(), each, 0.0).double()
    share, n = batch.share(), batch.size
    left = finite - finite.mean(0)
    left = left - (left * share).sum(1, keepdim=True)
    variance = (left.square() * share).sum(1) / (n - 1).clamp(min=1)  # n / (n - 1), over n
    losses = torch.vmap(batch.mean)(each)
    return {"losses": losses, "errors": variance.sqrt().to(losses.dtype), "n": n}


# server


def recluster(
    method: LossGroups, fed: Federation, state: Any, cohort: Ids, reply: dict[str, Tensor]
) -> tuple[Any, Tensor | None]:
    """New groups; and, if newcomers are to meet this bank, all clients' vectors on it."""
    losses = clean_losses(reply["losses"])
    unit = column_unit(embed(losses, method.embedding), method.scale)
    vectors = embed(losses, method.embedding, unit)
    x, weight = vectors, torch.ones_like(vectors)
    if method.embedding == "noise":
        bounded = clip(losses) if method.guard else losses
        block = noise_units(bounded, reply["errors"], reply["n"])
        state = state if method.accumulate else forgotten(state)
        units, counts = append(state.units, state.counts, cohort, block, reply["n"])
        state = state._replace(units=units, counts=counts)
        x, weight = units[cohort], counts[cohort]
    if fed.round == 0 and method.first != "evaluation":
        state, group = first_groups(method, fed, state, cohort, losses.shape[1])
        return groups.noted(state, cohort, group, dealt=True), None
    limit, seed = method.n_groups or losses.shape[1], int(fed.key("kmeans")) & 0x7FFFFFFF
    had = state.assignment[cohort]
    least = len(had[had >= 0].unique()) if method.first == "survey" else 1
    found = find_groups(method, losses, x, weight, method.n_groups, limit, seed, least)
    rest, now = ~found.aside, slice(-losses.shape[1], None)  # of all columns those of this round
    apart = cliff(x[rest, now], weight[rest, now], found.labels[rest])
    settled = bool((state.assignment[cohort] == found.group).all())
    state = groups.noted(state, cohort, found.group)
    aside = put(state.aside, cohort, found.aside.to(state.aside))
    state = state._replace(aside=aside, curve=found.curve)
    # A bank knows what its models have learned. Fresh from a random deal they know how often each
    # label occurs and little of what it looks like: relabelled data would pass for another group.
    grown = float(state.repeats[cohort].double().median()) > GROWN
    needed = float(state.apart) * (1.0 if grown else ERODED)
    if method.snapshot == "best" and settled and apart < needed:
        return state, None
    anchors = {"shared": state.shared, "models": state.models}
    state = state._replace(anchors=anchors, scale=unit, apart=torch.tensor(apart).double())
    return state, vectors.new_zeros(fed.n_clients, losses.shape[1]).index_copy(0, cohort, vectors)


def first_groups(
    method: LossGroups, fed: Federation, state: Any, cohort: Ids, most: int
) -> tuple[Any, Tensor]:
    """Groups of the first round: at random, or by a survey, whose answers stay as evidence."""
    dealt = groups.random_groups(fed, cohort, most)
    if method.first != "survey":
        return state, dealt
    heard, seen = seeded.surveyed(method, fed, cohort, method.n_groups, most)
    if seen is None:
        return state, dealt
    if method.embedding == "noise" and method.accumulate:
        units, counts = append(state.units, state.counts, heard, seen.view.x, seen.view.weight)
        state = state._replace(units=units, counts=counts)
    dealt = dealt % seen.k  # the silent
    dealt[torch.isin(cohort, heard)] = seen.labels
    return state, dealt


def remembered(state: Any, vectors: Tensor | None, ids: Ids, group: Tensor, n: Tensor) -> Any:
    """The state that newcomers meet: by those who trained after the clearest clustering.

    Once nothing is clustered any more, the losses of past rounds are forgotten.
    """
    if vectors is not None:
        state = state._replace(reference=reference(vectors[ids], group, n, vectors.shape[1]))
    return forgotten(state) if state.stable else state


def forgotten(state: Any) -> Any:
    """The state without the losses of past rounds."""
    none = state.units.new_zeros(len(state.units), 0)
    return state._replace(units=none, counts=none)


def curves(method: LossGroups, state: Any) -> list[Curve]:
    """Why there are so many groups, by the last clustering; what was given is not explained."""
    if method.n_groups is not None:
        return []
    return explained(state.curve, method.choose, method.threshold, method.tolerance)
