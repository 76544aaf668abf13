import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.algorithms import FedAvg
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, PerClient, grow
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError, TaskError
from coterie.core.federation import rows
from coterie.core.model import Model
from coterie.core.random import seed_key, uniform
from coterie.core.training import LocalSGD
from coterie.core.tree import leaves, take
from coterie.engines import Faults, Simulation
from tiny import ENGINES, centre, centres, everywhere, mean_model, points, ragged, rounds

KEY = seed_key(0)
UNEQUAL = ragged(5, 1, 8, 3, 2)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def normed():
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3)
    )


def furthest(a, b):
    pairs = zip(leaves(a), leaves(b), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


# All engines tell the same


@pytest.mark.parametrize("net", [mlp, normed])
def test_engines_agree_on_fedavg(net):
    method = FedAvg(
        Model(net, dtype=torch.float64), LocalSGD(0.2, epochs=2, batch_size=2, momentum=0.5)
    )
    states = {
        name: rounds(method, Simulation(UNEQUAL, participation=0.6, **kind), 4)
        for name, kind in ENGINES.items()
    }
    assert furthest(states["loop"], states["wire"]) == 0.0
    # Batch norm over two rows amplifies rounding, which differs from processor to processor.
    assert furthest(states["loop"], states["stacked"]) < (1e-10 if net is normed else 1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_do_not_matter(chunk):
    method = FedAvg(Model(mlp, dtype=torch.float64), LocalSGD(0.2, epochs=2, batch_size=2))
    whole = rounds(method, Simulation(UNEQUAL, chunk=5), 3)
    assert furthest(rounds(method, Simulation(UNEQUAL, chunk=chunk), 3), whole) < 1e-12


def test_the_same_seed_is_the_same_run_and_another_is_not(federate):
    method = FedAvg(Model(normed), LocalSGD(0.2, batch_size=2))
    a, b, c = (rounds(method, federate(UNEQUAL, seed=s), 2) for s in (1, 1, 2))
    assert furthest(a, b) == 0.0
    assert furthest(a, c) > 0.0


def test_fedavg_by_hand(federate):
    # Clients at 0 and {4, 6}; a full step of 0.5 leads to the client's mean.
    # Weighted by samples: (1 * 0 + 2 * 5) / 3.
    fed = federate(points([0.0], [4.0, 6.0]))
    method = FedAvg(mean_model(), LocalSGD(0.5))
    fed.begin(0)
    state, _ = method.step(fed, type(method.init(fed))(centre(1.0)))
    assert state.params["centre"].item() == pytest.approx(10 / 3, abs=1e-12)


def test_buffers_are_averaged_and_counters_are_the_first_contributors(federate):
    # Batch means 0 and 4: running means 0 and 0.4, by samples (0 + 3 * 0.4) / 4 = 0.3.
    model = Model(
        nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "reconstruction", dtype=torch.float64
    )
    fed = federate(points([0.0], [3.0, 4.0, 5.0]))
    state = rounds(FedAvg(model, LocalSGD(0.0, steps=1)), fed, 1)
    assert state.params["buffer:0.running_mean"].item() == pytest.approx(0.3)
    assert state.params["buffer:0.num_batches_tracked"].item() == 1
    assert state.params["buffer:1.num_batches_tracked"].item() == 1


def test_weight_decay_does_not_enter_the_probe(federate):
    # With a decay of 9 in the loss, the client at 2 would prefer the model at 0 to the one at 3.
    model, local = mean_model(), LocalSGD(0.01, weight_decay=9.0)

    @task
    def update(client, models):
        losses = model.probe(models, client.train)
        return {"losses": losses, **local(client, take(models, losses.argmin()), model.losses)}

    _, reply = federate(points([0.0], [2.0])).map(update, centres(0.0, 3.0), to=torch.arange(2))
    assert reply["losses"].tolist() == [[0.0, 9.0], [4.0, 1.0]]
    # The training does decay: gradient 2 (3 - 2) + 9 * 3 = 29.
    assert reply["centre"].tolist() == pytest.approx([0.0, 3.0 - 0.29])


def test_a_task_may_choose_a_model_and_train_it():
    model, local = mean_model(), LocalSGD(0.25)

    @task
    def update(client, models):
        nearest = model.probe(models, client.train).argmin()
        return {"group": nearest, "params": local(client, take(models, nearest), model.losses)}

    bank = centres(0.0, 8.0, 99.0)
    data = points([1.0], [3.0], [10.0])
    # Half the way: 0.5 and 1.5 for model 0, 9 for model 1; nobody is nearest to 99.
    mean = Mean("params", bank, by="group")
    for reply in everywhere(data, update, bank, reduce=mean).values():
        assert reply["group"].tolist() == [0, 0, 1]
        assert reply["params"]["centre"].tolist() == [1.0, 9.0, 99.0]


# Tasks that break the rules


@task
def branches(client):
    return {"x": client.train.x.sum() if client.train.x.sum() > 0 else client.train.y.sum()}


@task
def reads(client):
    return {"x": torch.tensor(client.train.x.sum().item())}


@task
def selects(client):
    return {"x": client.train.x[client.train.mask].sum()}


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (branches, "no `if` on a tensor and no `.item()`: use torch.where"),
        (reads, "no `if` on a tensor and no `.item()`: use torch.where"),
        (selects, "pick rows with `take`, and reduce through the mask"),
    ],
)
def test_a_task_that_cannot_be_stacked_is_told_the_rule_it_broke(broken, rule):
    with pytest.raises(TaskError) as error:
        Simulation(points([1.0], [2.0])).map(broken, to=torch.arange(2))
    assert f"{broken.__name__}: the task works for one client but cannot be stacked" in str(
        error.value
    )
    assert f"It breaks a rule: {rule}." in str(error.value)
    assert "Change the task, or mark it @task(stackable=False)." in str(error.value)


def test_a_task_may_say_that_it_cannot_be_stacked(federate):
    @task(stackable=False)
    def unpadded(client):
        x = client.train.x
        return {"x": x.sum() if x.sum().item() > 0 else x.min(), "rows": torch.tensor(len(x))}

    _, reply = federate(points([1.0, 1.0], [-2.0])).map(unpadded, to=torch.arange(2))
    assert reply["x"].tolist() == [2.0, -2.0]
    assert reply["rows"].tolist() == [2, 1]


@task
def rolls(client):
    return {"x": torch.rand(())}


def test_the_global_generator_is_refused(federate):
    with pytest.raises(TaskError, match=r"must not draw from the global generator. Use client.key"):
        federate(points([1.0], [2.0])).map(rolls, to=torch.arange(2))


class Loose(nn.Module):
    """Functional dropout draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(functional.dropout(x, 0.5, self.training))


@pytest.mark.filterwarnings("ignore:Loose cannot be stacked")
def test_functional_dropout_is_refused_in_training_and_fine_in_evaluation(federate):
    model = Model(Loose)
    method, fed = FedAvg(model, LocalSGD(0.1)), federate(UNEQUAL)
    fed.begin(0)
    with pytest.raises(TaskError, match=r"nn.Dropout instead of functional dropout"):
        method.step(fed, method.init(fed))

    @task
    def losses(client, models):
        return {"losses": model.probe(models, client.train)}

    assert torch.isfinite(
        fed.map(losses, model.init_many(KEY, 2), to=torch.arange(2))[1]["losses"]
    ).all()


def test_a_failing_client_is_named_with_method_task_and_round(federate):
    @dataclass(frozen=True)
    class Picky(Algorithm):
        def init(self, fed: Any) -> Any:
            return ()

        def step(self, fed: Any, state: Any) -> Any:
            return fed.map(self.look, to=fed.everyone()), {}

        @task
        def look(self, client: Client) -> Any:
            return {"x": client.state["nothing"]}

        def deploy(self, state: Any, ids: Any) -> Any:
            return ()

        def predict(self, personal: Any, x: Any) -> Tensor:
            return x

    fed = federate(points([1.0], [2.0], names=["ann", "bob"]))
    fed.begin(4)
    with pytest.raises(TaskError) as error:
        Picky().step(fed, ())
    assert str(error.value) == "Picky.look: client 'ann' failed in round 5: 'nothing'"
    assert isinstance(error.value.__cause__, KeyError)


# Modules that cannot be stacked


def test_spectral_norm_trains_one_by_one_after_one_warning():
    def module():
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        return nn.Sequential(layer)

    method = FedAvg(Model(module, dtype=torch.float64), LocalSGD(0.1, epochs=2, batch_size=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stacked = rounds(method, Simulation(UNEQUAL), 3)
    ours = [str(w.message) for w in caught if "stacked" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].startswith("Sequential cannot be stacked, so its clients train one at a time")
    loop = rounds(method, Simulation(UNEQUAL, stack=False), 3)
    assert furthest(stacked, loop) < 1e-12


def test_a_broken_model_shows_its_own_error_not_that_of_stacking(federate):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 3)

        def forward(self, x):
            return self.layer(x)

    method, fed = FedAvg(Model(Wrong), LocalSGD(0.1)), federate(UNEQUAL)
    fed.begin(0)
    with pytest.raises(
        TaskError, match=r"FedAvg.update: client 'client-\d' failed in round 1: mat1"
    ):
        method.step(fed, method.init(fed))


# Memory


class State(NamedTuple):
    assignment: PerClient


@dataclass(frozen=True)
class Diary(Algorithm):
    """Every client counts how often it was asked, and marks its samples."""

    def init(self, fed: Any) -> State:
        return State(fed.per_client(-1))

    def step(self, fed: Any, state: State) -> Any:
        ids, reply = fed.map(self.note, to=fed.cohort())
        return state, {"ids": ids, **reply}

    def client_init(self, client: Client) -> Any:
        return {
            "count": torch.tensor(0),
            "samples": {"mark": torch.zeros(len(client.train.mask))},
            "luck": uniform(client.key, ()),
        }

    @task
    def note(self, client: Client) -> Reply:
        count, mark = client.state["count"] + 1, client.state["samples"]["mark"]
        new = mark + client.train.x.flatten()
        return Reply(
            {"count": count, "mark": client.train.mean(mark), "luck": client.state["luck"]},
            keep={"count": count, "samples": {"mark": new}},
        )

    def deploy(self, state: State, ids: Any) -> Any:
        return {}

    def predict(self, personal: Any, x: Any) -> Tensor:
        return x


def info(fed, round):
    fed.begin(round)
    return Diary().step(fed, grow(State(fed.per_client(-1)), fed.n_clients))[1]


def test_memory_lasts_over_rounds(federate):
    fed = federate(points([1.0], [2.0]))
    for r in range(3):
        assert info(fed, r)["count"].tolist() == [r + 1, r + 1]
        fed.commit()


def test_memory_of_a_round_is_seen_by_its_next_exchange(federate):
    fed = federate(points([1.0], [2.0]))
    fed.begin(0)
    for n in (1, 2):
        assert Diary().step(fed, None)[1]["count"].tolist() == [n, n]


def test_an_abandoned_round_leaves_no_trace(federate):
    fed, plain = federate(points([1.0], [2.0])), federate(points([1.0], [2.0]))
    for f in (fed, plain):
        info(f, 0)
        f.commit()
    info(fed, 1)
    fed.rollback()
    a, b = info(fed, 1), info(plain, 1)
    assert a["count"].tolist() == b["count"].tolist() == [2, 2]
    assert a["mark"].tolist() == b["mark"].tolist()


def test_an_abandoned_first_round_leaves_nothing(federate):
    fed = federate(points([1.0], [2.0]))
    info(fed, 0)
    fed.rollback()
    assert not fed.memory.knows(0)
    assert info(fed, 0)["count"].tolist() == [1, 1]


def test_memory_of_samples_is_unpadded_whoever_is_asked_together(federate):
    data = points([1.0], [2.0, 4.0, 6.0], [5.0, 7.0])
    fed = federate(data)
    fed.begin(0)
    for together in ([0, 1], [0], [1, 2], [2], [0, 2], [0, 1, 2]):
        fed.map(Diary().note, to=torch.tensor(together))
    assert [fed.memory.get(i)["samples"]["mark"].tolist() for i in range(3)] == [
        [4.0],  # asked four times
        [6.0, 12.0, 18.0],
        [20.0, 28.0],
    ]


def test_the_first_memory_does_not_depend_on_when_a_client_is_first_asked(federate):
    data = points([1.0], [2.0], [3.0])
    early, late = federate(data), federate(data, chunk=1)
    first = info(early, 0)["luck"]
    late.begin(7)
    _, reply = late.map(Diary().note, to=torch.tensor([2, 0]))
    assert reply["luck"].tolist() == first[[2, 0]].tolist()


def test_what_a_task_does_not_keep_stays(federate):
    fed = federate(points([1.0], [2.0]))
    info(fed, 0)
    assert set(fed.memory.get(0)) == {"count", "samples", "luck"}


def test_clients_with_different_memories_are_refused_in_a_stack():
    @task
    def keep(client):
        return Reply({}, keep={"a": torch.ones(())})

    @task
    def look(client):
        return {"a": client.state.get("a", torch.zeros(()))}

    loop, stacked = (Simulation(points([1.0], [2.0]), stack=s) for s in (False, True))
    for fed in (loop, stacked):
        fed.map(keep, to=torch.tensor([1]))
    assert loop.map(look, to=torch.arange(2))[1]["a"].tolist() == [0.0, 1.0]
    with pytest.raises(
        TaskError, match=r"must have the same names .* Set all names in client_init"
    ):
        stacked.map(look, to=torch.arange(2))


def test_memory_is_not_a_view_of_the_reply(federate):
    @task
    def keep(client):
        both = torch.zeros(3)
        return Reply({"a": both}, keep={"a": both})

    fed = federate(points([1.0], [2.0]))
    _, reply = fed.map(keep, to=torch.arange(2))
    reply["a"].add_(1)
    assert fed.memory.get(0)["a"].tolist() == [0.0, 0.0, 0.0]


# Joining late


def test_clients_join_in_their_round(federate):
    fed = federate(points([1.0], [2.0], [3.0]), joins=[0, 0, 2])
    assert info(fed, 0)["ids"].tolist() == [0, 1]
    fed.commit()
    assert info(fed, 1)["ids"].tolist() == [0, 1]
    fed.commit()
    assert info(fed, 2)["count"].tolist() == [3, 3, 1]
    fed.begin(-1)
    assert fed.n_clients == 2  # init counts as the first round


def test_a_state_grows_with_the_federation(federate):
    fed = federate(points([1.0], [2.0], [3.0]), joins=[0, 1, 1])
    fed.begin(0)
    state = Diary().init(fed)
    assert len(state.assignment) == 1
    fed.begin(1)
    assert grow(state, fed.n_clients).assignment.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("joins", [[1, 0], [0], [0, 0, 0]])
def test_joins_must_rise_and_name_every_client(joins):
    with pytest.raises(ConfigError, match=r"joins must have a round for each of 2 clients"):
        Simulation(points([1.0], [2.0]), joins=joins)


# Lost replies


def test_the_silent_are_not_touched(federate):
    data = ragged(*[2] * 12, shape=(1,))
    fed = federate(data, faults=Faults(drop=0.4))
    answered = info(fed, 0)["ids"].tolist()
    assert 0 < len(answered) < 12
    assert answered == sorted(answered)
    assert [i for i in range(12) if fed.memory.knows(i)] == answered
    up = fed.traffic.totals["train", "up"]
    assert [i for i in range(len(up)) if up[i]] == answered


def test_lost_replies_are_the_same_on_every_engine():
    data = ragged(*[2] * 12, shape=(1,))
    ids = [
        info(Simulation(data, faults=Faults(drop=0.4, seed=3), **kind), 0)["ids"].tolist()
        for kind in ENGINES.values()
    ]
    assert ids[0] == ids[1] == ids[2]


def test_the_mean_is_of_those_who_answered(federate):
    data = points(*[[float(i)] for i in range(8)])
    fed = federate(data, faults=Faults(drop=0.5, seed=1))

    @task
    def mine(client):
        return {"x": client.train.x.sum(), "group": torch.zeros((), dtype=torch.int64)}

    by = torch.arange(8) % 2
    ids, reply = fed.map(mine, to=torch.arange(8), reduce=Mean("x", torch.full((2,), -1.0), by=by))
    for g in (0, 1):
        own = [float(i) for i in ids if i % 2 == g]
        assert reply["x"][g].item() == pytest.approx(sum(own) / len(own) if own else -1.0)


def test_rows_reach_the_right_clients_when_some_are_lost(federate):
    fed = federate(
        points(*[[float(i)] for i in range(8)]), faults=Faults(drop=0.5, seed=1), chunk=3
    )

    @task
    def echo(client, model):
        return {"given": model["centre"], "x": client.train.x.sum()}

    index = torch.arange(7, -1, -1)
    ids, reply = fed.map(echo, rows(centres(*range(8)), index), to=torch.arange(8))
    assert 0 < len(ids) < 8
    assert reply["given"].tolist() == [7.0 - i for i in ids.tolist()]
    assert reply["x"].tolist() == ids.double().tolist()


def test_the_exam_loses_nobody(federate):
    fed = federate(points([1.0], [2.0]), faults=Faults(drop=1.0))
    with fed.aside():
        assert fed.map(Diary().note, to=torch.arange(2))[0].tolist() == [0, 1]


def test_a_reason_is_forgotten_with_its_exchange():
    fed = Simulation(points([1.0], [2.0]), faults=Faults(drop=1.0))
    fed.map(Diary().note, to=torch.arange(2), at_least=0)
    fed.faults = None
    fed.map(Diary().note, to=torch.arange(2))
    assert fed.why_missing() == ""


# The room


def test_a_client_sees_its_own_room(federate):
    @task
    def look(client):
        return {
            "round": client.round + 0,
            "run": client.run_key + 0,
            "key": client.key,
            "n": client.train.size,
            "held": client.validation.size,
        }

    fed = federate(UNEQUAL)
    fed.begin(3)
    _, reply = fed.map(look, to=torch.arange(5))
    assert reply["round"].tolist() == [3] * 5
    assert len(reply["run"].unique()) == 1
    assert len(reply["key"].unique()) == 5
    assert reply["n"].tolist() == [5, 1, 8, 3, 2]
    assert reply["held"].tolist() == [0] * 5


def test_padding_repeats_a_row_of_the_same_client():
    # A net that normalises its input would turn zeros into NaN gradients, even behind a mask.
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x / x.norm(dim=1, keepdim=True))

    @task
    def look(client):
        return {"padded": client.train.x[-1], "first": client.train.x[0]}

    _, reply = Simulation(UNEQUAL).map(look, to=torch.tensor([1, 2]))
    assert torch.equal(reply["padded"][0], reply["first"][0])
    method = FedAvg(Model(Unit, dtype=torch.float64), LocalSGD(0.1, batch_size=3))
    stacked, loop = (rounds(method, Simulation(UNEQUAL, stack=s), 2) for s in (True, False))
    assert furthest(stacked, loop) < 1e-12


def test_round_and_run_key_may_be_read_by_python(federate):
    @task
    def look(client):
        return {"late": torch.tensor(int(client.round) > 1)}

    fed = federate(points([1.0], [2.0]))
    fed.begin(2)
    assert fed.map(look, to=torch.arange(2))[1]["late"].tolist() == [True, True]


def test_no_gradient_is_recorded(federate):
    @task
    def scale(client, w):
        return {"x": client.train.x.sum() * w}

    w = torch.ones((), requires_grad=True)
    assert (
        not federate(points([1.0], [2.0])).map(scale, w, to=torch.arange(2))[1]["x"].requires_grad
    )


def test_the_plan_says_what_decides_the_last_bits(federate):
    fed = federate(points([1.0], [2.0]), chunk=2)
    assert fed.plan["chunk"] == 2
    assert fed.plan["engine"] in ENGINES
    assert fed.plan["kernels"] == {}  # nothing was trained yet


def test_wire_runs_one_by_one():
    assert not Simulation(points([1.0]), wire=True).stack
