import pytest
import torch

from coterie.core.aggregate import Mean
from coterie.core.client import Reply, task
from coterie.core.errors import FederationError, TaskError
from coterie.core.federation import each, rows
from coterie.core.random import uniform
from coterie.engines import Faults, Simulation
from tiny import centre, centres, points, ragged

FOUR = points([0.0], [1.0, 3.0], [5.0], [7.0])


@task
def size(client):
    return {"n": client.train.size, "mean": client.train.mean(client.train.x.flatten())}


@task
def echo(client, *given):
    return {str(i): tree for i, tree in enumerate(given)}


@task(phase="cluster")
def draw(client):
    return {"u": uniform(client.key, (2,), torch.float64)}


def test_replies_come_stacked_in_the_order_asked(federate):
    fed = federate(FOUR)
    ids, reply = fed.map(size, to=torch.tensor([3, 1, 0]))
    assert ids.tolist() == [3, 1, 0]
    assert reply["n"].tolist() == [1, 2, 1]
    assert reply["mean"].tolist() == [7.0, 2.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_the_order_does_not_depend_on_chunks(federate, chunk):
    ids, reply = federate(FOUR, chunk=chunk).map(size, to=torch.tensor([2, 0, 1, 3]))
    assert ids.tolist() == [2, 0, 1, 3]
    assert reply["mean"].tolist() == [5.0, 0.0, 2.0, 7.0]


@pytest.mark.parametrize("chunk", [1, 8])
def test_payloads_for_all_by_row_and_each(federate, chunk):
    fed = federate(FOUR, chunk=chunk)
    to = torch.tensor([3, 1])
    _, reply = fed.map(
        echo,
        centre(9.0),
        rows(centres(0.0, 10.0, 20.0), torch.tensor([2, 0])),
        each({"own": torch.tensor([[1], [2]])}),
        to=to,
    )
    assert reply["0"]["centre"].tolist() == [9.0, 9.0]
    assert reply["1"]["centre"].tolist() == [20.0, 0.0]
    assert reply["2"]["own"].tolist() == [[1], [2]]


def test_a_payload_may_be_a_tuple_or_empty(federate):
    @task
    def both(client, pair, nothing):
        shared, bank = pair
        assert nothing == {}
        return {"sum": shared["centre"] + bank["centre"].sum()}

    _, reply = federate(FOUR).map(both, (centre(1.0), centres(2.0, 3.0)), {}, to=torch.arange(2))
    assert reply["sum"].tolist() == [6.0, 6.0]


def test_means_are_taken_on_the_way_in(federate):
    # Sample means 0, 2, 5, 7 with 1, 2, 1, 1 samples: 16 / 5, and 14 / 4 unweighted.
    mean = Mean("mean", torch.tensor(0.0), weight="n")
    _, reply = federate(FOUR, chunk=2).map(size, to=torch.arange(4), reduce=mean)
    assert reply["mean"].item() == pytest.approx(3.2)
    assert reply["n"].tolist() == [1, 2, 1, 1]


def test_two_means_at_once(federate):
    @task
    def two(client):
        x = client.train.mean(client.train.x.flatten())
        return {"a": x, "b": -x, "group": (x > 4).long()}

    means = (Mean("a", torch.tensor(0.0)), Mean("b", torch.zeros(3), by="group"))
    _, reply = federate(FOUR).map(two, to=torch.arange(4), reduce=means)
    assert reply["a"].item() == 3.5
    assert reply["b"].tolist() == [-1.0, -6.0, 0.0]
    assert reply["group"].tolist() == [0, 0, 1, 1]


def test_groups_by_server_vector_follow_the_order_asked(federate):
    fed = federate(FOUR, chunk=1)
    mean = Mean("mean", torch.zeros(2), by=torch.tensor([1, 0, 1]))
    _, reply = fed.map(size, to=torch.tensor([3, 1, 0]), reduce=mean)
    assert reply["mean"].tolist() == [2.0, 3.5]


def test_nobody_asked_is_nothing_said(federate):
    nobody = torch.empty(0, dtype=torch.int64)
    ids, reply = federate(FOUR).map(size, to=nobody, at_least=0)
    assert len(ids) == 0
    assert reply == {}
    mean = Mean("mean", torch.tensor(0.1))
    _, reply = federate(FOUR).map(size, to=nobody, at_least=0, reduce=mean)
    assert torch.equal(reply["mean"], torch.tensor(0.1))


def test_too_few_answers_are_an_error_that_counts_them(federate):
    fed = federate(FOUR, faults=Faults(drop=1.0))
    fed.begin(2)
    with pytest.raises(FederationError) as error:
        fed.map(size, to=torch.arange(3), at_least=2)
    assert str(error.value) == (
        "size: at least 2 of 3 clients must answer in round 3. 0 did; 'client-0' did not answer."
    )


def test_a_function_that_is_no_task_is_refused(federate):
    with pytest.raises(TaskError, match=r"is not a task. Put @task above"):
        federate(FOUR).map(lambda client: {}, to=torch.arange(2))


def test_an_unknown_leaf_is_refused(federate):
    with pytest.raises(TaskError, match=r"size: Mean needs 'params' in the reply. Got: n, mean"):
        federate(FOUR).map(size, to=torch.arange(2), reduce=Mean("params", centre(0.0)))


def test_a_reply_with_a_number_is_refused(federate):
    @task
    def count(client):
        return {"n": len(client.train.mask)}

    with pytest.raises(
        TaskError, match=r"count: every leaf of a reply must be a tensor. 'n' is int"
    ):
        federate(FOUR).map(count, to=torch.arange(2))


# Traffic


def bytes_of(fed, phase, direction):
    return fed.traffic.totals[phase, direction].tolist()


def test_a_bank_counts_whole_and_a_row_as_a_row(federate):
    fed = federate(FOUR)
    fed.begin(0)
    bank, assignment = centres(0.0, 1.0, 2.0), torch.tensor([2, 1])
    fed.map(echo, bank, to=torch.tensor([0]))
    fed.map(echo, rows(centres(0.0, 1.0, 2.0), assignment), to=torch.tensor([1, 3]))
    assert bytes_of(fed, "train", "down") == [24, 8, 0, 8]
    assert bytes_of(fed, "train", "up") == [24, 8, 0, 8]


def wide(k):
    return {"w": torch.zeros(k, 10)}  # 40 bytes a row


def test_what_a_client_holds_in_a_round_counts_as_an_index(federate):
    fed = federate(FOUR)
    bank, to = wide(3), torch.tensor([0, 1])
    fed.begin(0)
    fed.map(size, to=to)
    fed.map(draw, to=to)
    fed.map(echo, bank, to=to)  # 120
    fed.map(echo, bank, to=to)  # held: 8
    fed.map(echo, rows(bank, torch.tensor([0, 2])), to=to)  # held: 8
    assert bytes_of(fed, "train", "down") == [136, 136]
    fed.begin(1)  # a new round: forgotten
    fed.map(echo, rows(bank, torch.tensor([0, 2])), to=to)  # 40
    fed.map(echo, rows(bank, torch.tensor([0, 1])), to=to)  # 8 and 40
    fed.map(echo, bank, to=to)  # a row is not the bank: 120
    assert bytes_of(fed, "train", "down") == [136 + 168, 136 + 200]


def test_equal_values_in_other_tensors_are_sent_again(federate):
    fed = federate(FOUR)
    fed.begin(0)
    fed.map(echo, wide(1), to=torch.tensor([0]))
    fed.map(echo, wide(1), to=torch.tensor([0]))
    assert bytes_of(fed, "train", "down") == [80]


def test_own_parts_count_one_each(federate):
    fed = federate(FOUR)
    fed.begin(0)
    fed.map(echo, each(wide(2)), {}, to=torch.tensor([1, 2]))
    assert bytes_of(fed, "train", "down") == [0, 40, 40]


def test_traffic_is_kept_by_phase(federate):
    fed = federate(FOUR)
    fed.begin(-1)
    fed.map(draw, to=torch.tensor([0]))  # 2 float64
    fed.begin(0)
    fed.map(draw, to=torch.tensor([0]))
    fed.map(size, to=torch.tensor([1]))  # int64 and float32
    with fed.aside():
        fed.map(size, to=torch.tensor([1]))
    assert bytes_of(fed, "setup", "up") == [16]
    assert bytes_of(fed, "cluster", "up") == [16]
    assert bytes_of(fed, "train", "up") == [0, 12]
    assert bytes_of(fed, "evaluation", "up") == [0, 12]
    assert fed.traffic.total() == 44  # all but the evaluation
    assert fed.traffic.total("evaluation", "train") == 24


def test_what_is_kept_does_not_travel(federate):
    @task
    def remember(client):
        return Reply({}, keep={"big": torch.zeros(100)})

    fed = federate(FOUR)
    fed.map(remember, to=torch.arange(4))
    assert fed.traffic.total() == 0


# Cohorts and keys


@pytest.mark.parametrize(
    ("participation", "count"),
    [(1.0, 10), (0.5, 5), (0.3, 3), (0.29, 2), (0.7, 7), (0.01, 1), (0.0, 1)],
)
def test_a_cohort_is_the_floor_of_its_share_and_at_least_one(participation, count):
    # 0.7 * 10 is 6.999... in floating point and means 7.
    fed = Simulation(ragged(*[1] * 10), participation=participation)
    cohort = fed.cohort()
    assert len(cohort) == len(cohort.unique()) == count
    assert cohort.tolist() == sorted(cohort.tolist())


def cohorts(fed):
    out = []
    for r in range(5):
        fed.begin(r)
        out.append([fed.names[i] for i in fed.cohort()])
    return out


def test_a_cohort_is_a_function_of_seed_and_round():
    data = ragged(*[1] * 10)
    base = cohorts(Simulation(data, seed=1, participation=0.5))
    assert cohorts(Simulation(data, seed=1, participation=0.5, restart=3, stack=False)) == base
    assert cohorts(Simulation(data, seed=2, participation=0.5)) != base
    assert len({tuple(names) for names in base}) == 5


def test_a_cohort_does_not_depend_on_the_numbering_of_clients():
    data = ragged(*[1] * 10)
    turned = data.subset(torch.arange(9, -1, -1))
    a, b = (cohorts(Simulation(d, participation=0.5)) for d in (data, turned))
    assert [sorted(names) for names in a] == [sorted(names) for names in b]


def test_everybody_is_drawn_equally_often():
    fed = Simulation(ragged(*[1] * 10), participation=0.3)
    counts = torch.zeros(10)
    for r in range(1000):
        fed.begin(r)
        counts[fed.cohort()] += 1
    assert float((counts - 300).abs().max()) < 75  # deviation 14.5


def drawn(fed, order, round=0):
    fed.begin(round)
    ids, reply = fed.map(draw, to=order)
    return {fed.names[int(i)]: tuple(u.tolist()) for i, u in zip(ids, reply["u"], strict=True)}


def test_client_keys_depend_on_nothing_but_seed_round_task_and_name(federate):
    data = ragged(3, 1, 2, 4)
    base = drawn(Simulation(data, stack=False), torch.arange(4))
    assert len(set(base.values())) == 4
    for chunk in (1, 3, 8):
        assert drawn(federate(data, chunk=chunk), torch.tensor([2, 3, 0, 1])) == base
    turned = federate(data.subset(torch.tensor([3, 1, 0])))
    some = drawn(turned, torch.arange(3))
    assert some == {name: base[name] for name in some}
    assert drawn(federate(data), torch.arange(4), round=1) != base
    assert drawn(federate(data, seed=1), torch.arange(4)) != base
    assert drawn(federate(data, restart=1), torch.arange(4)) != base


def test_a_second_exchange_of_a_task_draws_anew(federate):
    fed = federate(FOUR)
    fed.begin(0)
    (_, a), (_, b) = (fed.map(draw, to=torch.arange(4)) for _ in range(2))
    assert not torch.equal(a["u"], b["u"])


def test_asking_aside_leaves_no_trace(federate):
    @task
    def remember(client):
        return Reply({"u": uniform(client.key, ())}, keep={"u": torch.tensor(1.0)})

    fed, other = federate(FOUR), federate(FOUR)
    for f in (fed, other):
        f.begin(0)
    with other.aside():
        other.map(remember, to=torch.arange(4))
        assert other.memory.get(0) == {"u": torch.tensor(1.0)}
    assert not other.memory.knows(0)
    a, b = (f.map(remember, to=torch.arange(4))[1]["u"] for f in (fed, other))
    assert torch.equal(a, b)
    assert fed.traffic.total() == other.traffic.total()


def test_server_keys_differ_by_round_and_label():
    fed = Simulation(FOUR)
    fed.begin(0)
    keys = [int(fed.key("a")), int(fed.key("b")), int(fed.key("a", 1))]
    assert keys[0] == int(fed.key("a"))
    fed.begin(1)
    assert len({*keys, int(fed.key("a"))}) == 4


def test_turns_are_a_permutation_that_follows_names():
    data = ragged(*[1] * 6)
    fed, turned = Simulation(data), Simulation(data.subset(torch.arange(5, -1, -1)))
    turns = fed.turns(torch.arange(6), "seats")
    assert sorted(turns.tolist()) == list(range(6))
    assert turned.turns(torch.arange(6), "seats").tolist() == turns.flip(0).tolist()


def test_per_client_tensors_take_the_type_of_their_fill():
    fed = Simulation(FOUR)
    assert fed.per_client(-1).tolist() == [-1] * 4
    assert fed.per_client(-1).dtype == torch.int64
    assert fed.per_client(0.0).dtype == torch.float32
