"""Survey: groups before any training, then one model per group.

Every client evaluates a few networks that are drawn from a common seed and never trained, and sends
its losses class by class; no model is sent. From this one exchange the server decides whether there
are groups, of what kind, and how many; one group is a possible answer. Then each group trains a
model by averaging.

References
----------
A method of this package. It averages as FedAvg does: McMahan et al., AISTATS 2017.

Formulas: `seeded.py` (the exchange), `clustering/lenses.py` (losses in units of noise),
`clustering/noise.py` (clustering and number of groups).

Notes
-----
Random networks see coarse differences. Groups that differ in a subtle function of the inputs may
need trained networks: use `census`. Counts and losses per class tell the server each client's label
shares; `lens="joint"` hides the counts in part.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms import common
from coterie.algorithms.survey import seeded
from coterie.clustering import lenses
from coterie.clustering.lenses import KINDS, LENSES, Scale, View, Yardstick
from coterie.core.algorithm import Algorithm, Curve, Evidence, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  group of each client, -1 until it has answered
    seed: Tensor  # of the networks that newcomers are asked about, too
    kind: Tensor  # position in KINDS; -1: no client has answered
    lens: Tensor  # position in LENSES
    curves: Tensor  # [2, 2, max_groups]  noise ratio and threshold through each lens, or nan
    known: Yardstick  # the groups, by which newcomers are placed


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
        Number of seeded networks, R: 2 are enough on MNIST, 16 leave room for other data.
    threshold
        Noise ratio up to which clients count as one group; larger where chance alone exceeds it.
        On MNIST true groups were at .87-1.32, one group too few at 1.6 (n = 100) to 220. Raise it
        where clients differ a little one by one, as cameras do.
    lens
        Which differences count. "auto" takes the conditional lens if it shows groups, else the
        joint one; "conditional" never groups by label shares; "joint" does not send counts.
    """

    starts: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(1)] = 10
    networks: Annotated[int, Ge(1)] = seeded.NETWORKS
    threshold: Annotated[float, Gt(0)] = lenses.THRESHOLD
    lens: seeded.Lens = "auto"

    def init(self, fed: Federation) -> State:
        start = State(
            *common.draw_models(self.model, fed.key("models"), 1),
            assignment=fed.per_client(-1),
            seed=fed.key("survey"),
            kind=torch.tensor(-1),
            lens=torch.tensor(-1),
            curves=lenses.no_curves(self.most),
            known=lenses.no_yardstick(),
        )
        return self.divide(fed, start)

    @property
    def most(self) -> int:
        return max(self.max_groups, self.n_groups or 1)

    def divide(self, fed: Federation, state: State) -> State:
        """Ask all clients, and group those that answer; unchanged if none does."""
        ids, block = self.ask(fed, state, fed.everyone())
        if block is None:
            return state
        views = seeded.views(block, self.model, self.lens)
        seen = lenses.look(views, self.most, self.threshold, self.n_groups)
        group = seeded.number_groups(fed, ids, seen.labels)
        if fed.start is not None:
            group = self.follow_start(fed, ids, seen.view, group)
        shared, models = common.draw_models(self.model, fed.key("models"), int(group.max()) + 1)
        return state._replace(
            shared=shared,
            models=models,
            assignment=put(state.assignment, ids, group),
            kind=torch.tensor(KINDS.index(seen.kind)),
            lens=torch.tensor(LENSES.index(seen.lens)),
            curves=lenses.curves(seen, self.most),
            known=lenses.yardstick(seen.view, group),
        )

    def follow_start(self, fed: Federation, ids: Ids, view: View, group: Tensor) -> Tensor:
        """The groups given to the run; unlisted clients join the nearest of them."""
        most = self.n_groups or self.max_groups
        given = common.follow_start(fed, ids, torch.full_like(ids, -1), most)
        listed = given >= 0
        if not bool(listed.any()):
            return group
        known = lenses.yardstick(
            view._replace(x=view.x[listed], weight=view.weight[listed]), given[listed]
        )
        return torch.where(listed, given, lenses.weigh(known, view)[0])

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
        heard, block = self.ask(fed, state, ids)
        nothing = torch.zeros(0, dtype=torch.float64)
        found = heard[:0], nothing, nothing
        if block is None or not len(state.known.mean):
            heard = heard[:0]
        else:
            lens = LENSES[int(state.lens)]
            scales: dict[str, Scale] = {lens: state.known.scale}
            view = seeded.views(block, self.model, self.lens, scales)[lens]
            found = lenses.weigh(state.known, view)
        placed = common.place_clients(state.assignment, ids, heard, *found, lenses.REFUSAL)
        return state._replace(assignment=placed[0]), placed[1]

    def ask(self, fed: Federation, state: State, ids: Ids) -> tuple[Ids, seeded.Answers | None]:
        """Which clients answered the survey, and their answers."""
        return seeded.ask(self, fed, ids, state.seed, self.networks, self.lens)

    def curves(self, state: State) -> list[Curve]:
        if self.n_groups is not None or int(state.kind) < 0:
            return []
        kind, lens = KINDS[int(state.kind)], LENSES[int(state.lens)]
        return lenses.evidence(state.curves, kind, lens)

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        trained = common.train_own(self.model, self.local, client, shared, own)
        return {**trained, "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        return rows(bank, state.assignment[ids].clamp(min=0))
