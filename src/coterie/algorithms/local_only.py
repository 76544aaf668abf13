"""Local only: every client trains its own model and sends nothing.

The baseline for the question whether a federation helps at all. All clients train in every round,
also those that are not in the cohort.

References
----------
The "local model" of Ghosh et al. (IFCA), NeurIPS 2020, arXiv 2006.04088, section 6.

Departures: none. The evaluation scores a client's model on its own test data; the IFCA paper
scores it on all test data of the client's true group (`Oracle.on_own_group`).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from coterie.core.algorithm import Algorithm, Info, register
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree


class State(NamedTuple):
    """The server knows nothing."""


@register("local_only")
@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Train every client alone."""

    bar: ClassVar[float] = 0.8
    model: Model
    local: LocalSGD

    def init(self, fed: Federation) -> State:
        return State()

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        fed.map(self.update, to=fed.everyone())
        return state, {}

    def client_init(self, client: Client) -> Tree:
        return {"params": self.model.init(initial_key(client.run_key))}  # the same for all clients

    @task
    def update(self, client: Client) -> Reply:
        params = self.local(client, client.state["params"], self.model.losses)
        return Reply({}, keep={"params": params})

    def deploy(self, state: State, ids: Ids) -> Tree:
        return {}

    @task
    def personalise(self, client: Client, given: Tree) -> Params:
        return client.state["params"]
