"""Forecasts: lines worked out by hand, and counts that agree with runs."""

import pytest

from coterie.core.random import seed_key
from coterie.running.build import build
from coterie.running.forecast import (
    Forecast,
    Messages,
    Rounds,
    Shares,
    advise,
    extend,
    find_limit,
    line,
    on_one_machine,
    on_real_clients,
    on_shards,
    read_overheads,
)
from coterie.running.loop import run
from coterie.running.sample import choose, sample_rounds, sample_shards, sizes
from small_runs import described, ready

COSTS = {
    "process": 100, "neighbour": 1.25, "ray_call": 0.01, "ray_byte": 0.001, "ray_main": 120,
    "ray_shard": 110, "ray_rest": 50, "flower_exchange": 0.2, "flower_message": 0.01,
    "flower_byte": 1e-5, "flower_server": 300, "flower_client": 200,
}  # fmt: skip


def rounds(*parts):
    """Rounds of some clients: clients, work, memory, held."""
    return [
        Rounds(n, work, 0.1 * n, 0.5, 2, 10 * n, held, memory) for n, work, memory, held in parts
    ]


def test_one_machine_follows_the_line_through_the_last_two_samples():
    found = on_one_machine(
        rounds((10, 9.0, 1000, 0), (20, 3.0, 1000, 100), (40, 5.0, 1400, 200)), 100, 50, 0.5
    )
    assert found.seconds == pytest.approx(
        {"work of the clients": 11.0, "step of the server": 10.0, "checkpoints": 0.25}
    )
    assert found.round == pytest.approx(21.25)
    # 1200 at 40 clients without what is held, 15 a client up to 50 clients at once, 5 held a client
    assert found.memory == {"this process": 1200 + 150 + 500}
    assert found.bytes == 1000


def test_a_sample_of_all_clients_is_not_extended():
    found = on_one_machine(rounds((10, 1.0, 900, 10), (20, 2.5, 950, 20)), 20, 8, 1.0)
    assert found.seconds["work of the clients"] == pytest.approx(2.5)
    assert found.memory == {"this process": 950}


def test_two_shards_halve_the_work_of_the_clients_alone():
    sampled = rounds((10, 1.0, 500, 0), (20, 2.0, 500, 0))
    traffic = [Shares(5, 100), Shares(10, 150)]
    alone = on_one_machine(sampled, 20, 50, 1.0)
    found = on_shards(sampled, traffic, 20, 50, 1.0, 2, 2, 30, COSTS)
    assert found.seconds["work of the clients"] == pytest.approx(1.0 * 1.25)
    assert found.seconds["step of the server"] == alone.seconds["step of the server"]
    assert found.seconds["traffic between processes"] == pytest.approx(3 * 0.01 + 300 * 0.001)
    assert found.bytes == 300
    assert found.memory == {"main process": 150, "each shard": 510, "Ray": 50}
    # Four shards on two cores take turns.
    four = on_shards(sampled, traffic, 20, 50, 1.0, 4, 2, 30, COSTS)
    assert four.seconds["work of the clients"] == pytest.approx(0.5 * 2 * 1.25)


def test_a_link_carries_the_messages_of_all_clients():
    played = Messages(5, 2, 5000, 1000, 0.3, 0.1, 50, 10)
    found = on_real_clients(played, 20, 8000.0, 0.05, COSTS)
    assert found.bytes == 24_000
    assert found.seconds == pytest.approx(
        {
            "work of the clients": 0.3,
            "step of the server": 0.4,
            "messages through Flower": 2 * (0.2 + 20 * 0.01) + 24_000 * 1e-5,
            "transfer": 3.0 + 0.2,
        }
    )
    assert found.largest == "transfer"
    on_two_cores = on_real_clients(played, 20, 8000.0, 0.05, COSTS, places=2)
    assert on_two_cores.seconds["work of the clients"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("sizes", "values", "expected"),
    [
        ([2, 4], [2.0, 3.0], 4.0),
        ([2, 4], [2.0, 1.0], 1.0),  # a line never falls
        ([2, 4], [0.1, 2.0], 3.0),  # nor does it start below zero
        ([1, 2, 4], [9.0, 2.0, 3.0], 4.0),
        ([3], [3.0], 6.0),
    ],
)
def test_a_line_goes_through_the_last_two_sizes(sizes, values, expected):
    assert extend(sizes, values, 6) == pytest.approx(expected)
    assert line(sizes, values)[0] >= 0


def test_memory_is_the_limit_if_it_does_not_suffice():
    found = Forecast(
        "one process", {"work of the clients": 2.0}, {"this process": 3 * 10**9}, 1, ""
    )
    assert find_limit(found, 10**9) == "memory: 3.0 GB are needed and 1.0 GB are free"
    assert "run.policy.mean=plain" in advise(found, 10**9, 2, True)
    assert find_limit(found, 10**10) == "work of the clients: 100% of a round"
    assert "--engine ray --shards 2" in advise(found, 10**10, 2, False)
    assert advise(found, 10**10, 1, False) == ""


def test_the_stored_overheads_are_complete():
    assert set(read_overheads()) == set(COSTS)
    assert all(value > 0 for value in read_overheads().values())


# what is counted agrees with a run


def test_samples_grow_and_have_clients_of_all_sizes():
    assert list(sizes(100, 1)) == [4, 16, 64, 100]
    assert list(sizes(100, 30)) == [60, 100]
    data = ready("ifca", 1).data
    sizes_of = data.sizes("train")
    chosen = sizes_of[choose(data, 2)]
    assert sizes_of.min() <= chosen.min() <= sizes_of.float().median() <= chosen.max()


@pytest.mark.parametrize("method", ["ifca", "clove", "ditto"])
def test_the_bytes_of_a_round_are_those_of_a_run(method):
    one = ready(method, 4)
    found = sample_rounds(one)
    assert found[-1].clients == len(one.data)
    result = run(one.algorithm, one.data, one.settings)
    sent = [line["bytes"] for line in result.rounds]
    assert found[-1].bytes == sent[-1] - sent[-2]


def test_a_shard_gets_no_more_if_it_has_more_clients():
    one = build({**described("fedavg", 4), "model": {"name": "mlp", "hidden": [64]}})
    sample = sample_rounds(one)[-1]
    found = sample_shards(one, sample)
    assert found[-1].clients > found[0].clients
    # A client adds its number, its place and its scores, and no model.
    model = sum(leaf.nbytes for leaf in one.algorithm.model.init(seed_key(0)).values())
    added = (found[-1].bytes - found[0].bytes) / (found[-1].clients - found[0].clients)
    assert added < model


def test_real_clients_get_what_a_deployment_would_send(tmp_path):
    from coterie.data import DataCard
    from coterie.deploy.sample import sample_messages
    from coterie.deploy.worker import Worker
    from coterie.engines import Remote
    from coterie.running.loop import run_round
    from links import LocalLink

    tables = described("ifca", 4)
    tables["run"]["participation"] = 1.0
    one = build(tables)
    found = sample_messages(one)
    workers = {}
    for number, name in enumerate(one.data.names):
        (tmp_path / name).mkdir()
        workers[number] = Worker(tmp_path / name, name, "run")
    setup = {"description": tables, "card": {**DataCard.of(one.data).to_dict(), "truth": None}}
    fed = Remote(LocalLink(workers), setup, "0a", deadline=5.0, poll=0.001)
    fed.meet(len(one.data), 5.0)
    fed.begin(-1)
    state = one.algorithm.init(fed)
    fed.commit()
    card, late, seen = DataCard.of(one.data), {}, []
    for number in range(3):
        state, *_ = run_round(one.algorithm, card, one.settings, fed, state, number, late, None)
        seen.append(sum(fed.wire_bytes.values()))
    sent = (found.down + found.up) / found.clients * len(one.data)
    assert sent == pytest.approx(seen[-1] - seen[-2], rel=0.01)
