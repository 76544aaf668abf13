"""IFCA: clients pick the model that fits them best, and train it.

Every round each client evaluates the models of all groups on its own data, takes the one with the
smallest loss, and trains it; the server averages what comes back for each model. Nothing is
clustered on the server, and everything hangs on the first models.

References: Ghosh, Chung, Yin, Ramchandran: An efficient framework for clustered federated learning,
NeurIPS 2020, arXiv 2006.04088: Algorithm 2, and its section on weight sharing.
Departures: `redraw` and `warm_up` come from the authors' code, `first` and `init_models` from later
comparisons. Whether a client fits is judged by the statistic in `clustering/evidence.py`.
Notes: equal losses go to the lowest index, so identical first models put everybody in group 0.
Dividing by the participants is the paper's rule under full participation. Empty groups stay empty.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import groups, seeded
from coterie.clustering.evidence import Reference, no_reference, reference, weigh
from coterie.clustering.matching import clean_losses
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, take


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  group of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  equal choices in a row
    stable: Tensor  # latched: choices no longer change, and one model is sent
    reference: Reference  # loss vectors of the members, by which newcomers are judged


@register("ifca")
@dataclass(frozen=True)
class IFCA(Algorithm):
    """Let every client pick the model that fits it best.

    Parameters
    ----------
    n_groups
        Number of models, k.
    averaging, divisor, weights
        Average models, or gradients (of all data, or of one batch of `local.batch_size`), clients
        alike or by samples. A group's sum of gradients is divided by the number of `participants`,
        of `all` clients (M) or of its members (`cluster`).
    init_models, first
        Independent or identical first models; round 1 evaluates them, is dealt at random, or takes
        its groups from networks that were never trained (`survey`).
    shared
        What lies outside the model's head is trained by all groups together, or frozen.
    stable_after, stable_fraction, recheck_every
        Send one model instead of k once this share of a cohort chose the same this often in a row;
        let them choose again every so many rounds.
    redraw, warm_up
        Draw the first models again, up to 100 times, until each is preferred by this share of a
        cohort; train so many rounds on a random equal partition before clients choose.
    resample, ties
        Theory only: for T rounds data are split 2T ways, a part to choose and a part to train;
        equal losses go to the lowest index, or are drawn from the client's key.
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    averaging: Literal["model", "gradient"] = "model"
    divisor: Literal["participants", "all", "cluster"] = "participants"
    weights: Literal["equal", "samples"] = "equal"
    init_models: Literal["different", "same"] = "different"
    first: Literal["evaluation", "random", "survey"] = "evaluation"
    shared: Literal["train", "frozen"] = "train"
    stable_after: Annotated[int, Ge(1)] | None = None
    stable_fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    recheck_every: Annotated[int, Ge(1)] | None = None
    redraw: Annotated[float, Ge(0), Le(1)] = 0.0
    warm_up: Annotated[int, Ge(0)] = 0
    resample: Annotated[int, Ge(1)] | None = None
    ties: Literal["lowest", "random"] = "lowest"

    def init(self, fed: Federation) -> State:
        k, same = self.n_groups, self.init_models == "same"
        for attempt in range(100 if self.redraw else 1):
            shared, models = groups.first_models(self.model, fed.key("models", attempt), k, same)
            if self.redraw:
                _, reply = fed.map(self.losses, shared, models, to=fed.cohort())
                if groups.all_preferred(reply["losses"], self.redraw, last=attempt == 99):
                    break
        nobody, never = fed.per_client(-1), fed.per_client(0)
        return State(shared, models, nobody, never, torch.tensor(False), no_reference(k, k))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, told = fed.cohort(), None  # groups the server decides; None: clients choose
        state = state._replace(stable=groups.settled(self, state, cohort))
        recheck = self.recheck_every is not None and fed.round % self.recheck_every == 0
        if fed.round < self.warm_up:
            told = groups.equal_groups(fed, cohort, self.n_groups)
        elif fed.round == 0 and self.first != "evaluation":
            told = seeded.first_groups(self, fed, cohort, self.n_groups)
        elif state.stable and not recheck:
            state, _ = self.place(fed, state, groups.unplaced(state.assignment, cohort))
            cohort = cohort[state.assignment[cohort] >= 0]  # a newcomer that stays silent waits
            told = state.assignment[cohort]
        if told is None:
            means = groups.means(self, state, by="group")
            ids, reply = fed.map(self.choose, state.shared, state.models, to=cohort, reduce=means)
            group = reply["group"]
        else:
            means, own = groups.means(self, state, by=told), rows(state.models, told)
            ids, reply = fed.map(self.train, state.shared, own, to=cohort, reduce=means)
            group = told[torch.isin(cohort, ids)]
        shared, models = groups.moved(self, fed, state, reply, group, self.divisor)  # lines 13-15
        unknown = no_reference(self.n_groups, self.n_groups)  # the models moved: ask members anew
        state = state._replace(shared=shared, models=models, reference=unknown)
        state = groups.noted(state, ids, group, dealt=told is not None and not state.stable)
        return state, groups.info(state, ids, group)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = fed.map(self.losses, state.shared, state.models, to=ids, at_least=0)
        if not len(heard):
            return state, groups.no_evidence(ids, state.assignment)
        losses, n = clean_losses(reply["losses"]).double(), reply["n"]
        group, member = state.assignment[heard], state.assignment[heard] >= 0
        members = torch.nonzero(state.assignment >= 0).flatten()
        renew = torch.isin(members, ids).all() | state.reference.centroids.isnan().all()
        if bool(member.any() & renew):  # a few members do not redefine the group
            known = reference(losses[member], group[member], n[member], self.n_groups)
            state = state._replace(reference=known)
        _, margin, score = weigh(state.reference, losses, n)
        return groups.judged(state, ids, heard, losses.argmin(1), margin, score)

    @task
    def choose(self, client: Client, shared: Params, models: Params) -> dict[str, Tree]:
        part = groups.fresh(client, self.resample, 0)
        losses = groups.bank_losses(self, shared, models, part)
        nearest = groups.smallest(losses, self.ties, client.key)  # line 6
        return {**self.train(client, shared, take(models, nearest)), "group": nearest}

    @task
    def train(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        client = client._replace(train=groups.fresh(client, self.resample, 1))
        n = {"n": client.train.size} if self.weights == "samples" else {}
        return {**groups.work(self, client, shared, own), **n}  # lines 8 or 11

    @task(phase="cluster")
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        losses = groups.bank_losses(self, shared, models, client.train)
        return {"losses": losses, "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(groups.bank(state.shared, state.models), state.assignment[ids].clamp(min=0))
