"""Census: groups from losses in units of their noise, added up over the rounds.

Every round each client evaluates the models of all groups, and sends its mean losses and their
standard errors. Losses are put in units of their noise and kept: clients that once differed by far
more than chance stay apart, however similar later models treat them. The number of groups is the
smallest whose members differ by no more than noise, one group included. Clients that are unlike all
others, by a survey before training or by their losses, are set aside and trained alone. When the
groups no longer change, clustering stops. Newcomers are compared with the scatter of the members,
and may fit no group.

References
----------
A method of this package. It grew out of CLoVE (arXiv 2506.22427), from which it keeps the vectors
of losses, the matching of clusters to models and the early stop.

Formulas: `accumulate.py` (noise units), `guard.py` (clients set aside), `alone.py` (their models),
`clustering/noise.py` (clustering and number of groups), `clustering/evidence.py` (newcomers).
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.census.accumulate import append, cliff, noise_units
from coterie.algorithms.census.alone import add_models, count_models, no_models
from coterie.algorithms.census.grouping import explain_number, find_groups, measure_losses
from coterie.algorithms.census.guard import clip
from coterie.algorithms.survey.seeded import columns, look
from coterie.clustering.evidence import REFUSAL, Reference, no_reference, reference, weigh
from coterie.clustering.matching import clean_losses
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, grow, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put

NOTHING = torch.zeros(0, 0, dtype=torch.float64)

GROWN = 3
"""Newcomers meet the latest models until the groups were the same more often than this in a row;
then those models, of this and later rounds, that separate the groups best."""

ERODED = 0.25
"""Models that separate the groups by less than this share of the saved ones' are not saved."""


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  model of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  the same model this many times in a row
    stable: Tensor  # once true, nothing is clustered any more
    saved: dict[str, Params]  # both parts of the models that newcomers evaluate
    reference: Reference  # the members' losses on them: centroid of each model, scatter
    apart: Tensor  # how well they separate the groups
    alone: dict[str, Params]  # both parts of the models of clients that were set aside
    units: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  losses in units of noise
    counts: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  samples behind; 0: none
    aside: Annotated[Tensor, Fill(0)] = NOTHING.flatten()  # [clients]  1: set aside, not averaged
    odd: Annotated[Tensor, Fill(0)] = NOTHING.flatten()  # [clients]  1: by the survey, for good
    seat: PerClient = NOTHING.flatten().long()  # [clients]  row of its own model in `alone`, or -1
    curve: Tensor = NOTHING  # [j, 3]  number of groups, noise ratio, 1 if chosen: last clustering


@register("census")
@dataclass(frozen=True)
class Census(Algorithm):
    """Group clients by all losses measured so far, and train a model for each group.

    Parameters
    ----------
    model
        The network. If it has a head, the groups share everything else.
    local
        Local training: the number of epochs, the optimiser and its step size.
    n_groups
        The number of groups, if it is known.
    max_groups
        An upper bound on the number of groups if it is unknown; one group is a possible answer.
    first
        In the first round clients are assigned at random ("random"), are clustered by their losses
        on the initial models ("evaluation"), or get the groups of a survey with networks that were
        never trained ("survey"). Its answers are kept as evidence, and clients that it finds odd
        are trained alone.
    guard
        Limit very large losses, and set aside clients whose losses are far from all others'. Set it
        to False if you expect groups of one or two clients beside larger ones.
    stable_after
        Stop clustering once every participant has had the same model this many times in a row.
        0: never stop.
    """

    starts: ClassVar[bool] = True
    # It cost nothing without an attack, and held under every one that was tried (attack_study).
    policy: ClassVar[dict[str, Any]] = {"mean": "geometric_median", "tell": False}
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(2)] | None = None
    first: Literal["random", "evaluation", "survey"] = "random"
    guard: bool = True
    stable_after: Annotated[int, Ge(0)] = 3

    def check(self) -> None:
        given = self.n_groups, self.max_groups
        if given.count(None) != 1:
            raise ConfigError(
                f"Census: give n_groups, or max_groups if it is unknown. Got {given}."
            )

    def init(self, fed: Federation) -> State:
        k = self.n_groups or self.max_groups or 1
        shared, models = common.draw_models(self.model, fed.key("models"), k)
        places = fed.per_client(-1), fed.per_client(0), torch.tensor(False)
        apart = torch.tensor(torch.nan, dtype=torch.float64)
        saved = {"shared": shared, "models": models}
        known, alone = no_reference(k, k), no_models(shared, models)
        return grow(State(shared, models, *places, saved, known, apart, alone), fed.n_clients)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, vectors = fed.cohort(), None
        free = cohort[state.aside[cohort] == 0]
        stable = common.is_stable(state.stable, state.repeats, free, self.stable_after)
        state = state._replace(stable=stable)
        if stable:
            none = state.units.new_zeros(len(state.units), 0)
            state = state._replace(units=none, counts=none)  # no longer needed
            state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
            cohort = cohort[state.assignment[cohort] >= 0]  # a silent newcomer waits
        else:
            odd = cohort[state.odd[cohort] == 1]
            asked = cohort[state.odd[cohort] == 0]
            asked, reply = fed.map(self.losses, state.shared, state.models, to=asked)
            state, vectors = self.cluster(fed, state, asked, reply)
            cohort = torch.cat([asked, odd])
        aside = cohort[state.aside[cohort] == 1]
        cohort = cohort[state.aside[cohort] == 0]
        group = state.assignment[cohort]
        means = common.means_of(state.shared, state.models, group, "n")
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)
        group = state.assignment[ids]
        if vectors is not None:  # the models just measured are the ones saved for newcomers
            known = reference(vectors[ids], group, reply["n"], vectors.shape[1])
            state = state._replace(reference=known)
        state = state._replace(shared=reply["shared"], models=reply["models"])
        state = self.train_alone(fed, state, aside)
        info = common.report_round(state.assignment, cohort, group, stable)
        return state, info | {"set_aside": int(state.aside.sum())}

    def train_alone(self, fed: Federation, state: State, ids: Ids) -> State:
        """One round of the clients that were set aside, each with its own model."""
        if not len(ids):
            return state
        seat = state.seat[ids]
        parts = {name: bank for name, bank in state.alone.items() if bank}  # no head: not shared
        means = [Mean(name, bank, by=seat, weight="n") for name, bank in parts.items()]
        given = [rows(bank, seat) if bank else bank for bank in state.alone.values()]
        _, reply = fed.map(self.update_alone, *given, to=ids, reduce=means, at_least=0)
        return state._replace(alone=state.alone | {name: reply[name] for name in parts})

    def cluster(
        self, fed: Federation, state: State, cohort: Ids, reply: dict[str, Tensor]
    ) -> tuple[State, Tensor | None]:
        """New groups; and all clients' losses [clients, k] if these models are to be saved."""
        losses, n = clean_losses(reply["losses"]), reply["n"]
        block = noise_units(clip(losses) if self.guard else losses, reply["errors"], n)
        units, counts = append(state.units, state.counts, cohort, block, n)
        state = state._replace(units=units, counts=counts)
        if fed.round == 0 and (self.first != "evaluation" or fed.start is not None):
            return self.assign_first(fed, state, cohort, losses.shape[1]), None
        x, weight, had = units[cohort], counts[cohort], state.assignment[cohort]
        surveyed = self.first == "survey" and fed.start is None
        before = had[(had >= 0) & (state.aside[cohort] == 0)]
        least = len(before.unique()) if surveyed else 1
        found = find_groups(losses, x, weight, self.n_groups, self.guard, least)
        rest, now = ~found.aside, slice(-losses.shape[1], None)  # the columns of this round
        apart = cliff(x[rest, now], weight[rest, now], found.labels[rest])
        same = bool((had == found.group)[rest].all())
        state, group = self.set_aside(state, cohort, found.group, found.aside)
        places = common.count_repeats(state.assignment, state.repeats, cohort, group)
        state = state._replace(assignment=places[0], repeats=places[1], curve=found.curve)
        # Models know what they have learned. After a random assignment they know how often each
        # label occurs and little of what it looks like: relabelled data would pass for a group.
        grown = float(state.repeats[cohort].double().median()) > GROWN
        if same and apart < float(state.apart) * (1.0 if grown else ERODED):
            return state, None
        saved = {"shared": state.shared, "models": state.models}
        state = state._replace(saved=saved, apart=torch.tensor(apart).double())
        vectors = losses.double()
        return state, vectors.new_zeros(fed.n_clients, losses.shape[1]).index_copy(
            0, cohort, vectors
        )

    def assign_first(self, fed: Federation, state: State, cohort: Ids, most: int) -> State:
        """Groups of the first round: given, at random, or by a survey."""
        group = common.assign_at_random(fed, cohort, most)
        if fed.start is not None:
            group = common.follow_start(fed, cohort, group, most)
        elif self.first == "survey":
            heard, seen = look(self, fed, cohort, fed.key("survey"), most, self.n_groups)
            if seen is not None:
                units, counts = append(state.units, state.counts, heard, *columns(seen))
                state = state._replace(units=units, counts=counts)
                group = group % seen.used  # of clients that did not answer
                answered = torch.isin(cohort, heard)
                group[answered] = torch.where(seen.odd, 0, seen.labels)
                odd = torch.zeros_like(answered).masked_scatter(answered, seen.odd)
                odd |= fed.distrusted(cohort)  # their answers cannot be true
                state = state._replace(odd=put(state.odd, cohort, odd.to(state.odd)))
                state, group = self.set_aside(state, cohort, group, odd)
        places = common.count_repeats(state.assignment, state.repeats, cohort, group, False)
        return state._replace(assignment=places[0], repeats=places[1])

    def set_aside(
        self, state: State, ids: Ids, group: Tensor, aside: Tensor
    ) -> tuple[State, Tensor]:
        """Give clients that are set aside their own models; and the model of each client: [m]."""
        new = aside & (state.seat[ids] < 0)
        alone = add_models(state.alone, state.shared, state.models, group[new])
        k, had = count_models(state.models), count_models(state.alone["models"])
        seat = put(state.seat, ids[new], had + torch.arange(int(new.sum())))
        marked = put(state.aside, ids, aside.to(state.aside))
        state = state._replace(alone=alone, seat=seat, aside=marked)
        return state, torch.where(aside, k + seat[ids], group)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        saved = state.saved
        heard, reply = fed.map(self.answer, saved["shared"], saved["models"], to=ids, at_least=0)
        if not len(heard):
            reply = {"losses": state.reference.centroids[:0], "n": heard}
        losses = clean_losses(reply["losses"]).double()
        found = weigh(state.reference, losses, reply["n"])
        assignment, judged = common.place_clients(state.assignment, ids, heard, *found, REFUSAL)
        fits = judged.fits & (state.aside[ids] == 0)
        return state._replace(assignment=assignment), judged._replace(fits=fits)

    def curves(self, state: State) -> list[Curve]:
        return explain_number(state.curve) if self.n_groups is None else []

    def odd(self, state: State) -> Ids:
        return state.aside.nonzero()[:, 0]

    def profiles(self, state: State) -> Tensor:
        return state.reference.centroids

    @task(phase="cluster")
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return measure_losses(self.model, common.whole_models(shared, models), client.train)

    @task(phase="cluster")
    def answer(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        losses = self.model.probe(common.whole_models(shared, models), client.train)
        return {"losses": losses, "n": client.train.size}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        trained = common.train_own(self.model, self.local, client, shared, own)
        return {**trained, "n": client.train.size}

    @task
    def update_alone(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        return self.update(client, shared, own)

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        own = {**state.alone["shared"], **state.alone["models"]}
        bank = {name: torch.cat([leaf, own[name]]) for name, leaf in bank.items()}
        return rows(bank, state.assignment[ids].clamp(min=0))
