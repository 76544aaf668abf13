"""Methods differ in what they do and not in luck: the same initial model, batches and dropout."""

import pytest
import torch
from torch import nn

from coterie.algorithms import IFCA, Census, CLoVE, FedAvg, LocalOnly, Survey
from coterie.core.algorithm import play
from coterie.core.client import Reply, task
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data import make
from coterie.engines import Simulation

DATA = make("blobs", n_groups=1, clients_per_group=6, n=30, test=10)
LOCAL = LocalSGD(optimizer="adam", learning_rate=0.01, batch_size=8)


def network():
    inputs, outputs = DATA.sample_shape[0], DATA.n_outputs
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, outputs))


MODEL = Model(network, "cross_entropy")


def after(method, rounds, seed=3):
    """State and federation after some rounds."""
    fed = Simulation(DATA, seed=seed)
    states = play(method, fed)
    for _ in range(rounds + 1):
        state, _ = next(states)
    return state, fed


@pytest.mark.parametrize(
    "method",
    [
        CLoVE(MODEL, LOCAL, n_groups=1),
        Census(MODEL, LOCAL, n_groups=1),
        Survey(MODEL, LOCAL, n_groups=1),
        IFCA(MODEL, LOCAL, n_groups=1, weights="samples"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_one_group_is_fedavg_to_the_bit(method):
    one = after(FedAvg(MODEL, LOCAL), 3)[0].params
    groups = after(method, 3)[0].models
    for name, leaf in one.items():
        assert torch.equal(leaf, groups[name][0])


class Another(FedAvg):
    """FedAvg whose task has another name, and that keeps what each client trained."""

    def step(self, fed, state):
        fed.map(self.learn, state.params, to=fed.everyone())
        return state, {}

    @task
    def learn(self, client, params):
        return Reply({}, keep={"params": self.local(client, params, self.model.losses)})


def test_the_name_of_a_task_does_not_change_its_training():
    alone, named = after(LocalOnly(MODEL, LOCAL), 1)[1], after(Another(MODEL, LOCAL), 1)[1]
    for client in range(len(DATA)):
        mine, other = alone.memory.get(client)["params"], named.memory.get(client)["params"]
        for name, leaf in mine.items():
            assert torch.equal(leaf, other[name])
    one, two = alone.memory.get(0)["params"], alone.memory.get(1)["params"]
    assert not torch.equal(one["0.weight"], two["0.weight"])  # clients have batches of their own
