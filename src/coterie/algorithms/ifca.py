"""IFCA: clients pick the model that fits them best, and train it.

Every round each client evaluates the models of all groups on its own data, takes the one with the
smallest loss, and trains it; the server averages what comes back for each model. Nothing is
clustered on the server, and the result depends on the initial models.

References
----------
Ghosh, Chung, Yin, Ramchandran: An efficient framework for clustered federated learning, NeurIPS
2020, arXiv 2006.04088: Algorithm 2, and section 4.3 on weight sharing. Line numbers in the code are
those of Algorithm 2.

Departures
----------
- A group that nobody chose keeps its model; lines 14 and 15 say nothing about it (0 / 0).
- Equal losses go to the lowest index; line 6 leaves it open. So identical initial models put
  everybody in group 0.
- Models stop being sent to clients that no longer change ("several" rounds in section 4.3) only if
  `stable_after` says after how many.
- `weights`, `init_models` and `first` are not in the paper. Its code for FEMNIST weighs by samples;
  the comparison in section 5.2 of the CLoVE paper (arXiv 2506.22427) needs the other two.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, task
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD, descend
from coterie.core.tree import Ids, Params, Tree, take


class State(NamedTuple):
    shared: Params  # what all groups share; empty without a head
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  group of each client, -1 until first contact
    repeats: Annotated[Tensor, Fill(0)]  # [clients]  equal choices in a row
    stable: Tensor  # once true, choices no longer change, and one model is sent


@register("ifca")
@dataclass(frozen=True)
class IFCA(Algorithm):
    """Let every client pick the model that fits it best.

    Parameters
    ----------
    model
        The network. If it has a head, the groups share everything else (section 4.3).
    local
        Local training: the number of steps or epochs, and the step size.
    n_groups
        Number of models, k.
    averaging
        "model" averages the members' trained models (option II). "gradient" takes one step along
        their gradients, of all data or of one batch of `local.batch_size` (option I).
    weights
        Whether the members of a group count alike ("equal") or by their number of samples.
    init_models
        Independent ("different") or identical ("same") initial models.
    first
        In the first round clients choose ("evaluation") or are assigned at random ("random").
    stable_after
        Send each client one model instead of k once every participant has made the same choice
        this many times in a row. None: always send k.
    """

    starts: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)]
    averaging: Literal["model", "gradient"] = "model"
    weights: Literal["equal", "samples"] = "equal"
    init_models: Literal["different", "same"] = "different"
    first: Literal["evaluation", "random"] = "evaluation"
    stable_after: Annotated[int, Ge(1)] | None = None

    def init(self, fed: Federation) -> State:
        same = self.init_models == "same"
        parts = common.draw_models(self.model, fed.key("models"), self.n_groups, same)  # line 1
        return State(*parts, fed.per_client(-1), fed.per_client(0), torch.tensor(False))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, told = fed.cohort(), None  # line 3: M_t; told: groups the server knows
        stable = common.is_stable(state.stable, state.repeats, cohort, self.stable_after)
        state = state._replace(stable=stable)
        if fed.round == 0 and (self.first == "random" or fed.start is not None):
            told = common.assign_at_random(fed, cohort, self.n_groups)
            told = common.follow_start(fed, cohort, told, self.n_groups)
        elif stable:
            state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
            cohort = cohort[state.assignment[cohort] >= 0]  # a silent newcomer waits
            told = state.assignment[cohort]
        gradients, weight = self.averaging == "gradient", "n" if self.weights == "samples" else None
        by = "group" if told is None else told
        means = common.means_of(state.shared, state.models, by, weight, gradients)
        if told is None:  # lines 2-6: send k models, let clients choose
            ids, reply = fed.map(self.choose, state.shared, state.models, to=cohort, reduce=means)
            group = reply["group"]
        else:
            own = rows(state.models, told)
            ids, reply = fed.map(self.train, state.shared, own, to=cohort, reduce=means)
            group = told[torch.isin(cohort, ids)]
        shared, models = reply["shared"], reply["models"]  # line 15: mean of the members' models
        if gradients:  # line 14: (step / m) times the sum of the members' gradients
            rate = self.local.rate(torch.tensor(fed.round))
            members = torch.bincount(group, minlength=self.n_groups)
            shared = descend(state.shared, shared, rate * len(group) / fed.n_clients)
            models = descend(state.models, models, rate * (members / fed.n_clients))
        counts = told is None or bool(stable)
        places = common.count_repeats(state.assignment, state.repeats, ids, group, counts)
        state = State(shared, models, *places, stable)
        return state, common.report_round(state.assignment, ids, group, stable)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = fed.map(self.losses, state.shared, state.models, to=ids, at_least=0)
        losses = reply["losses"] if len(heard) else torch.zeros(0, self.n_groups)
        nearest = common.choose_nearest(losses.nan_to_num(torch.inf, torch.inf))
        assignment, found = common.place_clients(state.assignment, ids, heard, *nearest)
        return state._replace(assignment=assignment), found

    @task
    def choose(self, client: Client, shared: Params, models: Params) -> dict[str, Tree]:
        losses = self.model.probe(common.whole_models(shared, models), client.train)  # [k]
        nearest = losses.nan_to_num(torch.inf, torch.inf).argmin()  # line 6
        return {**self.train(client, shared, take(models, nearest)), "group": nearest}  # line 7

    @task
    def train(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        learn = self.local if self.averaging == "model" else self.local.gradient
        n = {"n": client.train.size} if self.weights == "samples" else {}
        # lines 9 (gradient) and 11, 18-20 (local update)
        return {**common.train_own(self.model, learn, client, shared, own), **n}

    @task(phase="cluster", losses=("losses",))
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        return {"losses": self.model.probe(common.whole_models(shared, models), client.train)}

    def deploy(self, state: State, ids: Ids) -> Any:
        bank = common.whole_models(state.shared, state.models)
        return rows(bank, state.assignment[ids].clamp(min=0))
