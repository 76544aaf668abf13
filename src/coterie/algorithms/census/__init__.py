"""Census: groups from losses in units of their noise, added up over the rounds.

In every round each client evaluates the models of all groups, and sends its mean losses and their
standard errors. The server divides losses by their noise and keeps them, so that clients that once
differed by far more than chance stay apart. It takes the smallest number of groups, which may be
one, whose members differ by no more than noise. Clients that are unlike all others, by a survey
before training or by their losses, are set aside and trained alone. When the groups no longer
change, clustering stops. New clients answer the questions of a survey, as the members did. They
join the group that they fit, or none; if several fit, the one whose model has the smallest loss.

References
----------
A method of this package. It grew out of CLoVE (arXiv 2506.22427), from which it keeps the vectors
of losses, the matching of clusters to models and the early stop.

Formulas: `accumulate.py` (noise units), `guard.py` (clients set aside), `alone.py` (their models),
`clustering/noise.py` (clustering and number of groups), `evidence/placing.py` (newcomers).
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.census.accumulate import append, noise_units
from coterie.algorithms.census.alone import add_models, no_models
from coterie.algorithms.census.grouping import explain_number, find_groups, measure_losses
from coterie.algorithms.census.guard import clip
from coterie.algorithms.survey.seeded import NETWORKS, REFUSAL, ask, choose_statistic, look
from coterie.algorithms.survey.seeded import columns as to_columns
from coterie.clustering.matching import clean_losses
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, grow, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.random import fold
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, n_rows, put
from coterie.evidence.placing import Known, choose_by_loss, learn_groups, no_groups, place_in
from coterie.evidence.summaries import select

NOTHING = torch.zeros(0, 0, dtype=torch.float64)


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  model of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  the same model this many times in a row
    stable: Tensor  # once true, nothing is clustered any more
    seed: Tensor  # of the networks that members and newcomers are asked about
    known: Known  # the groups, in which newcomers are placed; none before clustering stops
    alone: dict[str, Params]  # both parts of the models of clients that were set aside
    units: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  losses in units of noise
    counts: Annotated[Tensor, Fill(0)] = NOTHING  # [clients, columns]  samples behind; 0: none
    aside: Annotated[Tensor, Fill(0)] = NOTHING.flatten()  # [clients]  1: set aside, not averaged
    odd: Annotated[Tensor, Fill(0)] = NOTHING.flatten()  # [clients]  1: by the survey, for good
    seat: PerClient = NOTHING.flatten().long()  # [clients]  row of its own model in `alone`, or -1
    curve: Tensor = NOTHING  # [j, 3]  number of groups, noise ratio, 1 if chosen: last clustering
    stray: Tensor = torch.tensor(False)  # the survey found no number of groups


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
    # Chosen on one seed of digits; `attack_study` compares all rules.
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
        known, alone = (fed.key("survey"), no_groups()), no_models(shared, models)
        return grow(State(shared, models, *places, *known, alone), fed.n_clients)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()
        free = cohort[state.aside[cohort] == 0]
        stable = common.is_stable(state.stable, state.repeats, free, self.stable_after)
        state = state._replace(stable=stable)
        if stable:
            none = state.units.new_zeros(len(state.units), 0)
            state = state._replace(units=none, counts=none)  # no longer needed
            state = self.join(fed, state, cohort[state.assignment[cohort] < 0])
            cohort = cohort[state.assignment[cohort] >= 0]  # a silent newcomer waits
        else:
            odd = cohort[state.odd[cohort] == 1]
            asked = cohort[state.odd[cohort] == 0]
            asked, reply = fed.map(self.losses, state.shared, state.models, to=asked)
            state = self.cluster(fed, state, asked, reply)
            cohort = torch.cat([asked, odd])
        aside = cohort[state.aside[cohort] == 1]
        cohort = cohort[state.aside[cohort] == 0]
        group = state.assignment[cohort]
        means = common.means_of(state.shared, state.models, group, "n")
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)
        group = state.assignment[ids]
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
    ) -> State:
        """New groups from the losses of this and earlier rounds."""
        losses, n = clean_losses(reply["losses"]), reply["n"]
        block = noise_units(clip(losses) if self.guard else losses, reply["errors"], n)
        units, counts = append(state.units, state.counts, cohort, block, n)
        state = state._replace(units=units, counts=counts)
        if fed.round == 0 and (self.first != "evaluation" or fed.start is not None):
            return self.assign_first(fed, state, cohort, losses.shape[1])
        x, weight, had = units[cohort], counts[cohort], state.assignment[cohort]
        surveyed = self.first == "survey" and fed.start is None
        before = torch.where(state.aside[cohort] == 0, had, -1) if surveyed else None
        found = find_groups(losses, x, weight, self.n_groups, self.guard, before)
        state, group = self.set_aside(state, cohort, found.group, found.aside)
        places = common.count_repeats(state.assignment, state.repeats, cohort, group)
        return state._replace(assignment=places[0], repeats=places[1], curve=found.curve)

    def assign_first(self, fed: Federation, state: State, cohort: Ids, most: int) -> State:
        """Groups of the first round: given, at random, or by a survey."""
        group = common.assign_at_random(fed, cohort, most)
        if fed.start is not None:
            group = common.follow_start(fed, cohort, group, most)
        elif self.first == "survey":
            heard, seen = look(self, fed, cohort, state.seed, most, self.n_groups)
            if seen is not None:
                units, counts = append(state.units, state.counts, heard, *to_columns(seen))
                state = state._replace(units=units, counts=counts)
                state = state._replace(stray=torch.tensor(seen.n_groups is None))
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
        k, had = n_rows(state.models), n_rows(state.alone["models"])
        seat = put(state.seat, ids[new], had + torch.arange(int(new.sum())))
        marked = put(state.aside, ids, aside.to(state.aside))
        state = state._replace(alone=alone, seat=seat, aside=marked)
        return state, torch.where(aside, k + seat[ids], group)

    def join(self, fed: Federation, state: State, late: Ids) -> State:
        """Place clients that joined after clustering has stopped; the first time, ask members."""
        if not len(late):
            return state
        everyone = fed.everyone()
        members = everyone[state.assignment[everyone] >= 0]
        ids = late if len(state.known.number) else torch.cat([late, members]).sort().values
        return self.place(fed, state, ids)[0]

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, answers = ask(self, fed, ids, state.seed, NETWORKS)
        had = torch.where(state.aside[heard] == 0, state.assignment[heard], -1)
        if not len(state.known.number) and bool((had >= 0).any()):
            key = fold(state.seed, "statistic")
            statistic = choose_statistic(answers, had, key)
            state = state._replace(known=learn_groups(answers, had, statistic == "shares"))
        bank = state.shared, state.models
        again, reply = fed.map(self.answer, *bank, to=heard, at_least=0)
        nothing = torch.zeros(0, dtype=torch.float64)
        found = ids[:0], nothing, nothing
        if len(again):
            losses = clean_losses(reply["losses"]).double()
            number = state.known.number
            group, margin = common.choose_nearest(losses)
            found = group, margin, torch.full_like(margin, torch.nan)
            if len(number):
                kept = torch.isin(heard, again).nonzero()[:, 0]
                some = {name: select(answer, kept) for name, answer in answers.items()}
                spot = choose_by_loss(place_in(some, state.known), losses[:, number])
                found = number[spot.group], spot.margin, spot.score
        placed = common.place_clients(state.assignment, ids, again, *found, REFUSAL)
        fits = placed[1].fits & (state.aside[ids] == 0)
        return state._replace(assignment=placed[0]), placed[1]._replace(fits=fits)

    def curves(self, state: State) -> list[Curve]:
        return [] if self.n_groups is not None else explain_number(state.curve, bool(state.stray))

    def odd(self, state: State) -> Ids:
        return state.aside.nonzero()[:, 0]

    @task(phase="cluster", losses=("losses",))
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return measure_losses(self.model, common.whole_models(shared, models), client.train)

    @task(phase="cluster", losses=("losses",))
    def answer(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return {"losses": self.model.probe(common.whole_models(shared, models), client.train)}

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
