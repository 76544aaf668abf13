"""Survey: groups before any training, then one model per group.

Every client evaluates a few networks that are drawn from a common seed and never trained, and sends
its mean losses by fold and class; no model is sent. From this the server decides which clients are
unlike all others, and whether the rest are groups, of what kind, and how many; one group is a
possible answer. Then each group trains a model by averaging, and each odd client trains alone.

References
----------
A method of this package. It averages as FedAvg does: McMahan et al., AISTATS 2017.

Formulas: `seeded.py` (the exchange), `evidence/replication.py` (what differs by more than chance),
`evidence/grouping.py` (number of groups, odd clients), `evidence/placing.py` (newcomers).

Notes
-----
Random networks see coarse differences. Groups that differ in a subtle function of the inputs may
need trained networks: use `census`. Counts and losses per class tell the server each client's label
shares; `lens="joint"` keeps them on the client. If the model has a head, odd clients help to train
the part that all share.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.survey import seeded
from coterie.algorithms.survey.seeded import KINDS, STATISTICS, Kind, Seen, Statistic, p_value
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put
from coterie.evidence.grouping import Step
from coterie.evidence.placing import Known, learn_groups, no_groups, place_in

MEANING: dict[Kind, str] = {
    "one": "clients differ by no more than chance: one group",
    "meaning": "between groups the inputs, or what a label means, differ",
    "labels": "groups differ in how often they have each label, and in nothing else",
    "client by client": "clients differ one by one: no number of groups describes them",
}


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k + odd clients, ...]
    assignment: PerClient  # [clients]  model of each client, -1 until it has answered
    odd: Annotated[Tensor, Fill(0)]  # [clients]  1: unlike all others, with a model of its own
    seed: Tensor  # of the networks that newcomers are asked about, too
    networks: Tensor  # their number
    kind: Tensor  # position in KINDS; -1: no client has answered
    statistic: Tensor  # position in STATISTICS: what the groups were read from
    chosen: Tensor  # number of groups; -1: no number describes the clients
    steps: Tensor  # [j, 5]  see `keep_steps`
    known: Known  # the groups, in which newcomers are placed


@register("survey")
@dataclass(frozen=True)
class Survey(Algorithm):
    """Group clients by their losses on networks that were never trained; then average by group.

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
    networks
        The largest number of seeded networks. A survey begins with 16 and doubles them until two
        halves of them show the same groups.
    lens
        Which differences count. "auto" compares losses within each class and, if they show no
        groups, label shares; "conditional" never groups by label shares; "joint" compares losses
        over all classes together, so that no label counts are sent.
    """

    starts: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(1)] = 10
    networks: Annotated[int, Ge(2)] = seeded.MOST_NETWORKS
    lens: seeded.Lens = "auto"

    @classmethod
    def example(cls, problem: Any) -> "Survey":
        return cls(problem.model, problem.local, problem.n_groups, networks=seeded.NETWORKS)

    def init(self, fed: Federation) -> State:
        start = State(
            *common.draw_models(self.model, fed.key("models"), 1),
            assignment=fed.per_client(-1),
            odd=fed.per_client(0),
            seed=fed.key("survey"),
            networks=torch.tensor(0),
            kind=torch.tensor(-1),
            statistic=torch.tensor(-1),
            chosen=torch.tensor(-1),
            steps=keep_steps([]),
            known=no_groups(),
        )
        return self.divide(fed, start)

    def divide(self, fed: Federation, state: State) -> State:
        """Ask all clients, and group those that answer; unchanged if none does."""
        most = max(self.max_groups, self.n_groups or 1)
        asked = fed.everyone(), state.seed, most, self.n_groups, self.lens, self.networks
        ids, seen = seeded.look(self, fed, *asked)
        if seen is None:
            return state
        if fed.start is not None:
            seen = self.follow_start(fed, ids, seen)
        grouped = seen.labels.masked_fill(seen.odd, -1)
        known = learn_groups(seen.answers, grouped, seen.statistic == "shares")
        liars = fed.everyone()[fed.distrusted(fed.everyone())]  # each gets a model of its own
        own = int(seen.labels.max()) + 1 + torch.arange(len(liars))
        ids = torch.cat([ids, liars])
        labels = torch.cat([seen.labels, own])
        odd = torch.cat([seen.odd, torch.ones(len(liars), dtype=torch.bool)])
        n_models = int(labels.max()) + 1
        shared, models = common.draw_models(self.model, fed.key("models"), n_models)
        return state._replace(
            shared=shared,
            models=models,
            assignment=put(state.assignment, ids, labels),
            odd=put(state.odd, ids, odd.to(state.odd)),
            networks=torch.tensor(seen.networks),
            kind=torch.tensor(KINDS.index(seen.kind)),
            statistic=torch.tensor(STATISTICS.index(seen.statistic)),
            chosen=torch.tensor(-1 if seen.n_groups is None else seen.n_groups),
            steps=keep_steps(seen.steps),
            known=known,
        )

    def follow_start(self, fed: Federation, ids: Ids, seen: Seen) -> Seen:
        """The groups given to the run; unlisted clients join the nearest of them, or are odd."""
        most = self.n_groups or self.max_groups
        given = common.follow_start(fed, ids, torch.full_like(ids, -1), most)
        listed = given >= 0
        if not bool(listed.any()):
            return seen
        known = learn_groups(seen.answers, given, seen.statistic == "shares")
        nearest = known.number[place_in(seen.answers, known).group]
        labels = torch.where(listed, given, nearest)
        odd = seen.odd & ~listed
        labels[odd] = int(given.max()) + 1 + torch.arange(int(odd.sum()))
        return seen._replace(labels=labels, odd=odd)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        if not bool((state.assignment >= 0).any()):
            state = self.divide(fed, state)
        cohort = fed.cohort()
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that have not answered yet wait
        group = state.assignment[cohort]
        means = common.means_of(state.shared, state.models, group, "n")
        own = rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)
        state = state._replace(shared=reply["shared"], models=reply["models"])
        info = {"assignment": state.assignment, "participants": ids}
        return state, info | {"groups_used": len(state.assignment[ids].unique())}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        nothing = torch.zeros(0, dtype=torch.float64)
        heard, found = ids[:0], (ids[:0], nothing, nothing)
        if len(state.known.number):
            asked = state.seed, int(state.networks), self.lens
            heard, answers = seeded.ask(self, fed, ids, *asked)
            if answers:
                place = place_in(answers, state.known)
                found = state.known.number[place.group], place.margin, place.score
        placed = common.place_clients(state.assignment, ids, heard, *found, seeded.REFUSAL)
        fits = placed[1].fits & (state.odd[ids] == 0)
        return state._replace(assignment=placed[0]), placed[1]._replace(fits=fits)

    def odd(self, state: State) -> Ids:
        return state.odd.nonzero()[:, 0]

    def curves(self, state: State) -> list[Curve]:
        if self.n_groups is not None or int(state.kind) < 0:
            return []
        kind, statistic = KINDS[int(state.kind)], STATISTICS[int(state.statistic)]
        chosen = None if int(state.chosen) < 0 else int(state.chosen)
        return [make_curve(state.steps, statistic, kind, chosen, int(state.odd.sum()))]

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        trained = common.train_own(self.model, self.local, client, shared, own)
        return {**trained, "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        return rows(bank, state.assignment[ids].clamp(min=0))


def keep_steps(steps: list[Step]) -> Tensor:
    """Number of sets, share explained, and the three p-values of each step: [j, 5]."""
    rows = [[step.n_sets, step.explained, *step.test[:3]] for step in steps]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 5)


def make_curve(rows: Tensor, name: Statistic, kind: Kind, n_groups: int | None, odd: int) -> Curve:
    """The evidence for a number of sets (groups and odd clients) as reports show it."""
    ks = tuple(int(k) for k in rows[:, 0])
    left = tuple(1 - float(share) for share in rows[:, 1])
    note = f"{MEANING[kind]} (p = {p_value(rows[-1, 2:]):.2g} for what is left)"
    if odd and n_groups is not None:
        note = f"{n_groups} of these are groups and {odd} are odd clients; {note}"
    chosen = None if n_groups is None else ks[-1]
    return Curve(name, "unexplained share", ks, left, chosen, None, (), note=note)
