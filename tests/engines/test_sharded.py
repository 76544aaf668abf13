"""Shards: what they compute together, what happens when one stops, and Ray itself."""

import os
import signal
import socket
import warnings
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from coterie.checks import tiny
from coterie.checks.trial import difference, outcome, states, traces
from coterie.core.algorithm import find
from coterie.core.client import task
from coterie.core.errors import ConfigError, DataError, FederationError, TaskError
from coterie.core.memory import Memory
from coterie.engines.ray_pool import _knock
from coterie.engines.sharded import RESTARTS, Here, Lost, Shard, Sharded
from coterie.running.build import Settings, build
from coterie.running.loop import resume, run
from coterie.running.shards import _load


class Fragile(Here):
    """Shards that stop when told to."""

    def __init__(self, makers):
        super().__init__(makers)
        self.dying: dict[int, int] = {}  # shard, and how many of its calls fail

    def take(self, ticket):
        shard, value = ticket
        if self.dying.get(shard, 0):
            self.dying[shard] -= 1
            raise Lost
        return value

    def ask(self, shard, name, *given):
        return shard, super().ask(shard, name, *given)


def federation(method: str = "ditto", shards: int = 2, pool=Fragile):
    problem = tiny()
    algorithm = find(method).example(problem)
    parts = torch.arange(len(problem.data)).tensor_split(shards)
    makers = [
        partial(Shard, algorithm, partial(problem.data.subset, ids), {"seed": 0}) for ids in parts
    ]
    fed = Sharded(problem.data.names, pool(makers), [len(ids) for ids in parts])
    return algorithm, fed


@pytest.mark.parametrize("method", ["ifca", "ditto"])
def test_the_number_of_shards_does_not_matter(method):
    alone = outcome(find(method).example, tiny(), "stacked")
    algorithm, fed = federation(method, 3, Here)
    *_, state = states(algorithm, fed, 3)
    assert difference(alone, traces(fed, state), 1e-9) == ""


def test_only_shards_whose_clients_are_asked_get_a_message():
    algorithm, fed = federation(pool=Fragile)
    asked = []
    old = fed.pool.ask
    fed.pool.ask = lambda shard, name, *given: (
        asked.append((shard, name)) or old(shard, name, *given)
    )
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    fed.begin(0)
    asked.clear()
    fed.map(algorithm.update, state.params, to=torch.tensor([4, 5]))
    fed.rollback()
    assert asked == [(1, "gather"), (1, "rollback")]


def test_a_lost_shard_misses_the_round_and_comes_back_with_its_memory():
    algorithm, fed = federation()
    *_, state = states(algorithm, fed, 2)
    before = traces(fed, state)["memory"]
    fed.pool.dying[1] = 1
    fed.begin(2)
    state, _ = algorithm.step(fed, state)
    with pytest.warns(UserWarning, match=r"Shard 2 of 2 has stopped; its clients missed round 3"):
        fed.commit()
    after = traces(fed, state)["memory"]
    names = fed.names
    assert difference({n: before[n] for n in names[3:]}, {n: after[n] for n in names[3:]}, 0) == ""
    assert difference({names[0]: before[names[0]]}, {names[0]: after[names[0]]}, 0) != ""
    # It has its memory again: the next round is that of a federation restored to this point.
    other, twin = federation()
    memory = Memory()
    memory.committed = dict(fed.memory.committed)
    twin.restore(memory)
    for method, one in ((algorithm, fed), (other, twin)):
        one.begin(3)
        new, _ = method.step(one, state)
        one.commit()
        after = traces(one, new) if one is fed else after
    assert difference(after, traces(twin, new), 0) == ""


def test_a_round_without_enough_answers_names_the_shard():
    algorithm, fed = federation()
    *_, state = states(algorithm, fed, 0)
    fed.pool.dying |= {0: 1, 1: 1}
    fed.begin(0)
    with pytest.raises(FederationError, match=r"shard . of 2 \(3 clients\) has stopped"):
        algorithm.step(fed, state)
    with pytest.warns(UserWarning, match="is started again"):
        fed.rollback()


def test_a_shard_that_stops_again_and_again_ends_the_run():
    algorithm, fed = federation()
    *_, state = states(algorithm, fed, 0)
    fed.pool.dying[0] = 10**6
    fed.begin(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithm.step(fed, state)
        with pytest.raises(FederationError, match=f"has stopped {RESTARTS + 1} times in a row"):
            fed.commit()


def test_an_error_in_a_task_is_the_same_as_without_shards():
    @task
    def fail(client):
        raise ValueError("no such thing")

    _, fed = federation(pool=Here)
    fed.begin(0)
    with pytest.raises(TaskError, match=r"client '.*' failed in round 1: no such thing"):
        fed.map(fail, to=fed.everyone())


def test_after_a_rest_shards_have_their_memory():
    algorithm, fed = federation(pool=Here)
    twin_of, twin = federation(pool=Here)
    ends = []
    for method, one, rests in ((algorithm, fed, True), (twin_of, twin, False)):
        *_, state = states(method, one, 2)
        if rests:
            one.rest()
            assert not one.pool.shards
        one.begin(2)
        state, _ = method.step(one, state)
        one.commit()
        ends.append(traces(one, state))
    assert difference(*ends, 0) == ""


def test_shards_refuse_data_that_differ_from_those_of_the_run():
    table = {"name": "blobs", "n_groups": 2, "clients_per_group": 3}
    with pytest.raises(DataError, match="All machines must have the same files"):
        _load(table, torch.tensor([0, 1]), Settings(), "another")


def test_shards_without_ray_are_refused():
    with pytest.raises(ConfigError, match='belong to engine="ray"'):
        Settings(shards=2)


def test_an_address_where_nobody_answers_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(FederationError, match=rf"No Ray cluster answers at {address}"):
        _knock(address)


# Ray itself

RUN = {
    "algorithm": {"name": "ditto"},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"learning_rate": 0.1, "batch_size": 16},
    "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 4, "n": 30},
    "run": {"rounds": 4, "threads": 1},
}


def ready(**settings):
    return build({**RUN, "run": {**RUN["run"], **settings}})


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_writes_the_files_of_one_process_and_survives_a_killed_actor(tmp_path):
    one = ready()
    whole = run(one.algorithm, one.data, one.settings)
    two = ready(engine="ray", shards=2)
    result = run(two.algorithm, two.data, two.settings, tmp_path / "a")
    assert result.files == whole.files
    # Resumed after two rounds: the same files.
    short = ready(engine="ray", shards=2, rounds=2)
    run(short.algorithm, short.data, short.settings, tmp_path / "b")
    again = resume(two.algorithm, two.data, two.settings, tmp_path / "b")
    assert again.files == result.files
    # An actor is killed: its clients miss a round, and the run goes on.
    fed = result.fed
    fed.begin(4)
    fed.map(two.algorithm.update, result.state.params, to=fed.everyone())
    fed.rollback()
    host = fed.pool._hosts[1]
    victim = fed.pool.ray.get(host.ask.remote("process"))
    os.kill(victim, signal.SIGKILL)
    heard, _ = fed.map(two.algorithm.update, result.state.params, to=fed.everyone())
    with pytest.warns(UserWarning, match="Shard 2 of 2 has stopped"):
        fed.commit()
    assert heard.tolist() == [0, 1, 2, 3]
    heard, _ = fed.map(two.algorithm.update, result.state.params, to=fed.everyone())
    assert len(heard) == 8
    fed.rest()
