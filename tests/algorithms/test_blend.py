"""Blend on mixtures small enough to run in a moment, and on density models that are exact."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.algorithms.blend import ANCHORS, DONE, ROUNDS, STAGES, WARM, Blend
from coterie.checks import tiny
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.core.random import fold, normal, seed_key
from coterie.core.tree import row, tree_map
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.engines.faults import Faults
from coterie.models import MLP
from mixed_clients import advance, at, begin, cloud_vae, clouds, exact, lines, quietly

WORK = LocalSGD(0.01, epochs=2, batch_size=16, optimizer="adam")


def make(labels=True, dtype=torch.float32, **changes):
    model = Model(lambda: MLP(4, 2, (8,)), dtype=dtype) if labels else None
    options = {"warm_rounds": 3, "warm_epochs": 4, "anchor_epochs": 10, "rounds": 4, "interval": 2}
    return Blend(cloud_vae(dtype), model, WORK, WORK, **{**options, **changes})


def play(method, fed, rounds=100):
    """The state after the given number of rounds, or at the end; and the stages of the rounds."""
    state, stages = begin(method, fed), []
    while not method.done(state) and len(stages) < rounds:
        stages.append(STAGES[int(state.stage)])
        state, _info = advance(method, fed, state, len(stages) - 1)
    return state, stages


def test_the_stages_come_one_round_each():
    data, _, _ = clouds()
    state, stages = play(make(), Simulation(data))
    assert stages == ["warm"] * 3 + ["moments", "anchors"] + ["rounds"] * 4 + ["report"]
    assert int(state.stage) == DONE


def test_components_are_counted_and_shares_found():
    data, parts, truth = clouds()
    fed = Simulation(data)
    state, _ = play(make(evidence="x"), fed)
    assert len(state.offsets) == 2
    assert float(state.eigenvalues[0]) > float(state.thresholds[0])
    assert float(state.eigenvalues[1]) < float(state.thresholds[1])
    found = make().mixture(state, fed.everyone())
    swap = float((found.shares - truth).abs().mean()) > 0.5
    order = [1, 0] if swap else [0, 1]
    for name in ("tail", "count"):
        assert float((found.others[name][:, order] - truth).abs().mean()) < 0.05, name
    right = [
        (torch.tensor(order)[fed.memory.get(i)["samples"]["part"]] == part).double().mean()
        for i, part in enumerate(parts)
    ]
    assert float(torch.stack(right).mean()) > 0.95
    assert set(torch.nonzero(state.anchor >= 0).flatten().tolist()) <= set(
        torch.nonzero(truth.max(1).values > 0.85).flatten().tolist()
    )


def test_experts_learn_what_contradicts_between_components():
    data, _, _ = clouds()
    method = make(rounds=8)
    fed = Simulation(data)
    state, _ = play(method, fed)
    batch = data.gather("train", torch.tensor([5]))
    given = method.deploy(state, torch.tensor([5]))
    personal = {**given, "prior": fed.memory.get(5)["prior"][: len(state.offsets)]}
    output = method.predict(personal, batch.x[0])
    assert float((output.argmax(1) == batch.y[0]).double().mean()) > 0.85


def test_without_labels_a_sample_is_reconstructed():
    data, _, _truth = clouds(labels=False)
    method = make(labels=False)
    fed = Simulation(data)
    state, _ = play(method, fed)
    assert state.experts == {}
    assert len(state.offsets) == 2
    x = data.gather("train", torch.tensor([0])).x[0]
    prior = fed.memory.get(0)["prior"][: len(state.offsets)]
    personal = {**method.deploy(state, torch.tensor([0])), "prior": prior}
    output = method.predict(personal, x)
    assert output.shape == x.shape
    assert float((output - x).square().mean()) < float((x - x.mean(0)).square().mean())


def test_one_component_is_fedavg():
    data, _, _ = clouds(n_clients=4)
    method = make(n_components=1, warm_rounds=0, rounds=1, dtype=torch.float64)
    fed = Simulation(data)
    state, _stages = play(method, fed, rounds=2)
    assert int(state.stage) == ROUNDS
    fed.begin(2)
    new, _ = method.step(fed, state)
    # By hand: all clients train both models on all their samples, weighted alike (60 each).
    number = {"name": "train_experts"}
    key = fold(fed.run_key, "client", 2, number["name"], 0)
    local = fold(fed.run_key, "client", 2, "update", 0)  # of local training, for every method
    trained = []
    for i in range(4):
        client = row(fed._client(_call(key, local), torch.tensor([i]), {}), 0)
        name_key = fed._name_keys[i]
        client = client._replace(key=fold(key, name_key), local_key=fold(local, name_key))
        trained.append(
            (
                WORK(client, row(state.vaes, 0), method.vae.losses),
                WORK(client, row(state.experts, 0), method.model.losses),
            )
        )
    mean = tree_map(lambda *leaf: torch.stack(leaf).mean(0), trained[0], *trained[1:])
    for bank, expected in zip((new.vaes, new.experts), mean, strict=True):
        for name, leaf in expected.items():
            assert torch.allclose(bank[name][0], leaf, atol=1e-9), name


def _call(key, local_key):
    from types import SimpleNamespace

    return SimpleNamespace(key=key, local_key=local_key)


def test_a_lost_reply_leaves_the_others_mean():
    data, _, _ = clouds(n_clients=6)
    method = make(n_components=2, interval=100)
    whole = Simulation(data)
    state, _ = play(method, whole, rounds=6)
    whole.begin(6)
    _, all_ = whole.map(method.train_experts, state.vaes, state.experts, to=whole.everyone())
    whole.begin(6)
    whole._calls = {}
    whole.faults = Faults(drop=0.4)
    new, _ = quietly(method.step, whole, state)
    # Who answers is a function of the key of the exchange.
    key = fold(whole.run_key, "client", 6, "train_experts", 0)
    lost, late = whole.faults.lost(key, whole._name_keys[whole.everyone()])
    assert bool((lost | late).any())
    assert not bool((lost | late).all())
    weight = all_["n_expert"][~(lost | late)]
    for name, leaf in all_["experts"].items():
        some = leaf[~(lost | late)].double()
        mean = torch.einsum("mk,mk...->k...", weight, some)
        mean = mean / weight.sum(0).reshape(-1, *(1,) * (mean.ndim - 1))
        assert torch.allclose(new.experts[name].double(), mean, atol=1e-5), name


def test_three_components():
    data, _, truth = clouds(n_clients=20, n=90, k=3)
    fed = Simulation(data)
    state, _ = play(make(evidence="x"), fed)
    assert len(state.offsets) == 3
    found = make().mixture(state, fed.everyone())
    anchors = torch.nonzero(state.anchor >= 0).flatten()
    assert len(truth[anchors].argmax(1).unique()) == 3
    from coterie.metrics import mixture_error

    assert mixture_error(found.shares, truth)["mae"] < 0.06
    assert torch.equal(found.shares, found.others["tail"])
    assert mixture_error(found.others["moments"], truth)["mae"] < 0.15  # from mean codes alone


def test_totals_match_the_target():
    data, _, _ = clouds(n_clients=12, apart=1.5)
    method = make(evidence="x", n_components=2)
    fed = Simulation(data)
    state, _ = play(method, fed, rounds=6)
    target = torch.tensor([0.35, 0.65]).double()
    fed.begin(7)
    ids, state = method.score_all(fed, state, fed.everyone(), joint=False)
    reply = method.survey_all(fed, state, ids)
    state, reply = method.balance(fed, state, ids, target, reply)
    total = reply["histogram"].sum((0, 2)) / reply["histogram"].sum()
    assert float((total - target).abs().max()) <= 0.005


def test_newcomers_are_placed_and_foreign_data_refused():
    data, _, truth = clouds(n_clients=14)
    key = seed_key(33)
    foreign = 40 + normal(key, (60, 4))
    batch = data.gather("train", torch.arange(14))
    xs, ys = [*batch.x, foreign], [*batch.y, torch.zeros(60).long()]
    data = from_arrays(xs, ys, test_fraction=0.0)
    method = make(evidence="x", rounds=4)
    fed = Simulation(data, joins=[0] * 13 + [50, 50])
    state, _ = play(method, fed)
    fed.begin(60)
    from coterie.core.algorithm import grow

    state = grow(state, fed.n_clients)
    assert state.assignment[13:].tolist() == [-1, -1]
    state, evidence = method.place(fed, state, torch.tensor([13, 14]))
    assert evidence.fits.tolist() == [True, False]
    found = method.mixture(state, fed.everyone())
    error = (found.shares[13] - truth[13]).abs().max()
    swapped = (found.shares[13].flip(0) - truth[13]).abs().max()
    assert float(min(error, swapped)) < 0.12
    personal = fed.memory.get(13)["prior"]
    assert torch.allclose(personal[:2], state.own[13])


def test_an_anchor_that_stays_silent_is_replaced():
    data, _, _ = clouds(n_clients=10)
    method = make(n_components=2)
    fed = Simulation(data)
    state, _ = play(method, fed, rounds=4)
    assert int(state.stage) == ANCHORS
    before = set(torch.nonzero(state.anchor >= 0).flatten().tolist())
    fed.faults = Faults(drop=1.0)
    fed.begin(4)
    state, _ = quietly(method.step, fed, state)
    assert int(state.stage) == ANCHORS
    fed.faults = None
    fed.begin(5)
    state, _ = quietly(method.step, fed, state)
    after = set(torch.nonzero(state.anchor >= 0).flatten().tolist())
    assert int(state.stage) == ROUNDS
    assert not before & after
    assert len(after) == 2


def test_evaluation_works_in_every_stage():
    from coterie.running.evaluation import evaluate

    data, _, _ = clouds(n_clients=6)
    method, fed = make(n_components=2, rounds=1), Simulation(data)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    for number in range(7):
        assert bool(
            evaluate(method, fed, state, "classification", split="train").loss.isfinite().all()
        )
        fed.begin(number)
        state, _ = quietly(method.step, fed, state)
        fed.commit()
    assert int(state.stage) == DONE
    assert WARM == 0


def test_heads_are_modules_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x)

    data, _, _ = clouds(n_clients=5)
    method = replace(make(n_components=2, rounds=1), model=Model(Net))
    state, _ = play(method, Simulation(data))
    assert int(state.stage) == DONE


def test_shares_that_mean_nothing_are_noticed():
    data, _, _ = clouds(n_clients=12)
    method = make(n_components=2, evidence="x")
    fed = Simulation(data)
    state, _ = play(method, fed, rounds=6)
    # Clients differ (e_1 is about 50), and shares by chance: 30 of 60 give or take 4.
    chance = 0.5 + 4 / 60 * normal(seed_key(1), (12,), torch.float64)
    vague = state._replace(own=torch.stack([chance, 1 - chance], 1))
    with pytest.warns(UserWarning, match="hardly vary .* Components may look alike"):
        method.judge(fed, vague)


def test_one_component_that_takes_all_is_noticed():
    data, _, _ = clouds(n_clients=12)
    method, fed = make(n_components=2, evidence="x"), Simulation(data)
    state, _ = play(method, fed, rounds=6)
    all_of_one = torch.tensor([[1.0, 0.0]]).double().expand(12, 2)
    with pytest.warns(UserWarning, match="partition is trivial: one component takes 100"):
        method.judge(fed, state._replace(own=all_of_one))


def test_a_component_that_is_empty_twice_is_fitted_anew():
    data, _, _ = clouds(n_clients=8)
    method, fed = make(n_components=3, evidence="x"), Simulation(data)
    state, _ = play(method, fed, rounds=6)
    half = torch.where(torch.arange(8) < 4, 0.9, 0.1).double()
    own = torch.stack([half, 1 - half, torch.zeros(8).double()], 1)
    state = state._replace(own=own, empty=torch.zeros(3, dtype=torch.int64))
    fed.begin(6)
    with pytest.warns(UserWarning, match=r"component \[2\] got no sample"):
        once, _ = method.judge(fed, state)
    assert all(torch.equal(leaf, once.vaes[name]) for name, leaf in state.vaes.items())
    twice, _ = quietly(method.judge, fed, once)
    for name, leaf in state.vaes.items():
        assert torch.equal(leaf[:2], twice.vaes[name][:2])
    assert any(not torch.equal(leaf[2], twice.vaes[name][2]) for name, leaf in state.vaes.items())


def test_exact_densities_give_the_shares():
    data, truth = lines()
    work = LocalSGD(0.0, epochs=0)
    method, fed = Blend(exact(), None, work, work, n_components=2, warm_rounds=0), Simulation(data)
    fed.begin(0)
    state = method.init(fed)
    zeros = torch.zeros(50, 2).double()
    known = {"first": torch.stack([truth, 1 - truth], 1), "anchor": torch.full((50,), -1)}
    unknown = dict.fromkeys(("own", "counts", "tail", "anchored", "em", "errors"), zeros - 1)
    bank = {"vaes": at(0.0, 4.0), "offsets": torch.zeros(2).double()}
    cut = {"cuts": torch.zeros(2, 7).double(), "profiles": torch.zeros(2, 16).double()}
    state = state._replace(**known, **unknown, **bank, **cut, empty=torch.zeros(2).long())
    state, _ = quietly(method.divide, fed, state, fed.everyone())
    for name in ("own", "counts", "tail", "em"):
        assert float((getattr(state, name)[:, 0] - truth).abs().mean()) <= 0.05, name


def test_options_that_cannot_be_run():
    with pytest.raises(ConfigError, match="Blend: vae must be a density model"):
        Blend(Model(lambda: MLP(4, 2)))
    data, _, _ = clouds(n_clients=2)
    with pytest.raises(ConfigError, match="at most the number of clients"):
        make(n_components=3).init(Simulation(data))


def test_engines_agree_after_a_warm_start():
    from coterie.checks.trial import difference, outcome

    def method(problem):
        return replace(Blend.example(problem), warm_rounds=2)

    ends = [
        quietly(outcome, method, tiny(), engine, rounds=5) for engine in ("loop", "stacked", "wire")
    ]
    assert not difference(ends[0], ends[1], 1e-9)
    assert not difference(ends[0], ends[2], 1e-9)
