"""Federations small enough to work a round out by hand, and rounds driven one by one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.random import fold
from coterie.data import from_arrays
from coterie.models import LinearRegressor


@pytest.fixture
def points():
    """Clients that hold numbers, to be met by one weight: a model w loses mean (w - y)^2."""

    def make(*ys, names=None, truth=None):
        ys = [torch.tensor(y, dtype=torch.float32).reshape(-1) for y in ys]
        return from_arrays(
            [torch.ones(len(y), 1) for y in ys], ys, test_fraction=0.0, names=names, truth=truth
        )

    return make


@pytest.fixture
def scalar():
    """One weight w. With step 1/4 a full gradient step goes half the way to the mean of y."""
    return Model(LinearRegressor(1), "squared_error")


@pytest.fixture
def half():
    """The local work that goes half the way."""
    return LocalSGD(learning_rate=0.25)


class BodyAndHead(nn.Module):
    """Predicts body + head, so that both parts have the same gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Parameter(torch.zeros(1))
        self.head = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x.flatten(1) @ (self.body + self.head)


@pytest.fixture
def two_parts():
    """A weight shared by all plus a weight of the group's own."""
    return Model(BodyAndHead(), "squared_error", head="head")


@pytest.fixture
def bank():
    """Group models from numbers."""
    return lambda *weights: {"weight": torch.tensor(weights, dtype=torch.float32).reshape(-1, 1)}


def _first(algorithm, fed, **changes):
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    return state._replace(**changes)


def _play(algorithm, fed, state, rounds, start=0):
    out = []
    for number in range(start, start + rounds):
        fed.begin(number)
        state, info = algorithm.step(fed, grow(state, fed.n_clients))
        fed.commit()
        out.append(SimpleNamespace(state=state, info=info))
    return out


@pytest.fixture
def first():
    """`first(algorithm, fed, **changes)`: the first state, some fields set by hand."""
    return _first


@pytest.fixture
def play():
    """`play(algorithm, fed, state, rounds, start=0)`: state and info after each round."""
    return _play


class Mute:
    """Clients that do not answer: always, or one task only."""

    def __init__(self, fed, ids, task=None):
        self.fed, self.silent, self.task = fed, fed._name_keys[torch.tensor(ids)], task

    def lost(self, key, names):
        exchange = fold(self.fed.run_key, "client", self.fed.round, self.task or "", 0)
        silent = torch.isin(names, self.silent) & bool(self.task is None or key == exchange)
        return silent, torch.zeros_like(silent)


@pytest.fixture
def mute():
    """`mute(fed, ids, task=None)`: these clients stop answering."""

    def switch(fed, ids, task=None):
        fed.faults = Mute(fed, ids, task)

    return switch


@pytest.fixture
def down_up():
    """Bytes a client received and sent since the last call, all phases together."""
    seen = {}

    def count(fed, client):
        now = {"down": 0, "up": 0}
        for (_, direction), amount in fed.traffic.totals.items():
            now[direction] += int(amount[client]) if client < len(amount) else 0
        old = seen.get((fed, client), {"down": 0, "up": 0})
        seen[fed, client] = now  # holds on to the federation, so that no other takes its place
        return now["down"] - old["down"], now["up"] - old["up"]

    return count
