"""Survey: groups before any training, then one model per group.

Every client evaluates a few networks drawn from a common seed and never trained, and sends its
losses class by class; no model travels. From one such exchange the server reads whether there are
groups, of what kind, and how many, one included; then each group trains a model by averaging.

References: a method of this package. It averages as FedAvg does: McMahan et al., AISTATS 2017.
Departures: none. Formulas: `clustering/lenses.py` and `clustering/noise.py`.
Notes: random networks see coarse differences; groups that differ in a subtle function of the inputs
may need trained ones (CLoVE). Counts and losses per class tell the server each client's label
shares; `lens="joint"` hides the counts, in part.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms import groups, seeded
from coterie.clustering import lenses
from coterie.clustering.lenses import KINDS, LENSES, Scale, Yardstick
from coterie.core.algorithm import Algorithm, Curve, Evidence, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  group of each client, -1 until it has answered
    seed: Tensor  # of the networks that newcomers are asked about, too
    kind: Tensor  # position in KINDS; -1: nobody has answered
    lens: Tensor  # position in LENSES
    curves: Tensor  # [2, 2, max_groups]  noise ratio and threshold through each lens, or nan
    known: Yardstick  # the groups, by which newcomers are placed


@register("survey")
@dataclass(frozen=True)
class Survey(Algorithm):
    """Group clients by their losses on networks that were never trained; then average by group.

    Parameters
    ----------
    n_groups, max_groups
        The number of groups, or a bound on it: then one group is as good an answer as any.
    networks
        Seeded networks, R: 2 are enough on MNIST, 16 leave room for other data. 0: groups are dealt
        at random.
    threshold
        Noise ratio up to which a group counts as one; more does where chance reaches it. On MNIST:
        true groups at .87-1.32, one too few at 1.6 (n = 100) to 220. Raise it where clients differ
        a little one by one, as cameras do.
    lens
        Through which differences count: "auto" takes the conditional lens if it shows groups, else
        the joint one; "conditional" never groups by label shares; "joint" does not send counts.
    n_classes
        Classes of a loss of your own; a network with cross-entropy says itself.
    averaging, weights, shared
        As in IFCA; gradients are divided by the weight of the group's members.
    init_models
        Independent or identical first models.
    """

    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    max_groups: Annotated[int, Ge(1)] = 10
    networks: Annotated[int, Ge(0)] = seeded.NETWORKS
    threshold: Annotated[float, Gt(0)] = lenses.THRESHOLD
    lens: seeded.Lens = "auto"
    n_classes: Annotated[int, Ge(2)] | None = None
    averaging: Literal["model", "gradient"] = "model"
    weights: Literal["samples", "equal"] = "samples"
    shared: Literal["train", "frozen"] = "train"
    init_models: Literal["different", "same"] = "different"

    def check(self) -> None:
        if self.networks == 0 and self.n_groups is None:
            raise ConfigError("Survey: networks=0 deals groups at random and needs n_groups.")

    def init(self, fed: Federation) -> State:
        start = State(
            *groups.first_models(self.model, fed.key("models"), 1),
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
        """Ask everybody, and group those who answer; unchanged if nobody does."""
        ids = fed.everyone()
        if self.networks == 0:
            group = groups.random_groups(fed, ids, self.n_groups or 1)
        else:
            ids, block = seeded.ask(
                self, fed, ids, state.seed, self.networks, self.lens, self.n_classes
            )
            if block is None:
                return state
            views = seeded.views(block, self.model, self.lens)
            seen = lenses.look(views, self.most, self.threshold, self.n_groups)
            group = seeded.numbered(fed, ids, seen.labels)
            state = state._replace(
                kind=torch.tensor(KINDS.index(seen.kind)),
                lens=torch.tensor(LENSES.index(seen.lens)),
                curves=lenses.curves(seen, self.most),
                known=lenses.yardstick(seen.view, group),
            )
        k, same = int(group.max()) + 1, self.init_models == "same"
        shared, models = groups.first_models(self.model, fed.key("models"), k, same)
        assignment = put(state.assignment, ids, group)
        return state._replace(shared=shared, models=models, assignment=assignment)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        if not bool((state.assignment >= 0).any()):
            state = self.divide(fed, state)
        cohort = fed.cohort()
        state, _ = self.place(fed, state, groups.unplaced(state.assignment, cohort))
        cohort = cohort[state.assignment[cohort] >= 0]  # who has not answered yet waits
        group = state.assignment[cohort]
        means, own = groups.means(self, state, by=group), rows(state.models, group)
        ids, reply = fed.map(self.update, state.shared, own, to=cohort, reduce=means)
        group = group[torch.isin(cohort, ids)]
        shared, models = groups.moved(self, fed, state, reply, group, "cluster")
        state = state._replace(shared=shared, models=models)
        info = {"assignment": state.assignment, "participants": ids}
        return state, info | {"groups_used": len(group.unique())}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        if self.networks == 0:
            new = groups.unplaced(state.assignment, ids)
            dealt = groups.random_groups(fed, new, self.n_groups or 1)
            state = state._replace(assignment=put(state.assignment, new, dealt))
            return state, groups.no_evidence(ids, state.assignment)
        heard, block = seeded.ask(
            self, fed, ids, state.seed, self.networks, self.lens, self.n_classes
        )
        if block is None or not len(state.known.mean):
            return state, groups.no_evidence(ids, state.assignment)
        lens = LENSES[int(state.lens)]
        scales: dict[str, Scale] = {lens: state.known.scale}
        view = seeded.views(block, self.model, self.lens, scales)[lens]
        return groups.judged(state, ids, heard, *lenses.weigh(state.known, view))

    def curves(self, state: State) -> list[Curve]:
        if self.n_groups is not None or int(state.kind) < 0:
            return []
        kind, lens = KINDS[int(state.kind)], LENSES[int(state.lens)]
        return lenses.evidence(state.curves, kind, lens)

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        return {**groups.work(self, client, shared, own), "n": client.train.size}

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(groups.bank(state.shared, state.models), state.assignment[ids].clamp(min=0))
