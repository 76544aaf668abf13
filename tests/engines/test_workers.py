import pytest
import torch

from coterie.algorithms import FedAvg, LocalOnly
from coterie.core.client import task
from coterie.core.errors import ConfigError, TaskError
from coterie.core.training import LocalSGD
from coterie.engines import Simulation
from coterie.engines.workers import available, in_workers
from tiny import mean_model, points

pytestmark = pytest.mark.skipif(not available(), reason="this system cannot fork processes")


@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
def test_workers_change_no_bit(method):
    algorithm, states, memories = method(mean_model(), LocalSGD(0.25)), [], []
    for workers in (1, 2, 3):
        fed = Simulation(points([1.0, 5.0], [2.0], [7.0], [0.0]), stack=False, workers=workers)
        fed.begin(-1)
        state = algorithm.init(fed)
        for number in range(2):
            fed.begin(number)
            state, _ = algorithm.step(fed, state)
            fed.commit()
        states.append(state)
        memories.append(fed.memory.committed)
    assert str(states[0]) == str(states[1]) == str(states[2])
    assert str(memories[0]) == str(memories[1]) == str(memories[2])


def test_an_error_in_a_worker_names_its_client():
    @task
    def broken(client):
        if float(client.train.x.sum()) == 3.0:
            raise ValueError("mine")
        return {"n": client.train.size}

    fed = Simulation(points([1.0], [2.0], [3.0]), stack=False, workers=2)
    with pytest.raises(TaskError, match=r"client '.*2' failed in round 0: mine"):
        fed.map(broken, to=torch.arange(3))


def test_a_worker_that_dies_is_an_error_and_not_a_wait():
    import os

    with pytest.raises(TaskError, match="stopped unexpectedly"):
        list(in_workers(lambda place: os._exit(3), [0, 1], 2))


def test_places_are_given_in_order():
    assert list(in_workers(lambda place: str(place).encode(), [5, 3, 9], 2)) == [b"5", b"3", b"9"]


def test_stacks_have_no_workers():
    with pytest.raises(ConfigError, match="workers need the loop engine"):
        Simulation(points([1.0]), workers=2)
