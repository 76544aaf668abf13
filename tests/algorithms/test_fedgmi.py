"""FedGMI on mixtures small enough to run in a moment, and on density models that are exact."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.algorithms import divisions, starts
from coterie.algorithms.fedgmi import ANCHORS, DONE, MOMENTS, ROUNDS, STAGES, WARM, FedGMI
from coterie.checks import tiny
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.core.random import fold, normal, seed_key, uniform
from coterie.core.tree import row, tree_map
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.engines.faults import Faults
from coterie.models import MLP, VAE
from coterie.models.vae import gaussian

WORK = LocalSGD(0.01, epochs=2, batch_size=16, optimizer="adam")


def clouds(n_clients=12, n=60, k=2, seed=0, apart=3.0, labels=True):
    """Clients that are mixtures of k clouds in four dimensions; two classes by the first sign."""
    key = fold(seed_key(seed), "clouds")
    centres = apart * torch.tensor([[0, 1, 1, 0], [0, -1, 0, 1], [0, 0, -1, -1]]).float()[:k]
    draw = -uniform(fold(key, "shares"), (n_clients, k)).clamp(min=1e-6).log()
    shares = draw / draw.sum(1, keepdim=True)
    shares[:k] = torch.eye(k)
    xs, ys, parts = [], [], []
    for i in range(n_clients):
        ends = (shares[i].cumsum(0) * n).round()
        part = (torch.arange(n)[:, None] >= ends).sum(1).clamp(max=k - 1)
        noise = normal(fold(key, "x", i), (n, 4))
        # The classes contradict each other between components.
        y = ((noise[:, 0] > 0) ^ (part == 1)).long()
        xs.append(centres[part] + noise)
        ys.append(y)
        parts.append(part)
    data = from_arrays(xs, ys if labels else None, test_fraction=0.0)
    truth = torch.stack([(torch.stack(parts) == j).double().mean(1) for j in range(k)], 1)
    return data, parts, truth


def net():
    return VAE((4,), 2, (16,), "gaussian")


def make(labels=True, dtype=torch.float32, **changes):
    model = Model(lambda: MLP(4, 2, (8,)), dtype=dtype) if labels else None
    options = {"warm_rounds": 3, "warm_epochs": 4, "anchor_epochs": 10, "rounds": 4, "interval": 2}
    return FedGMI(Model(net, gaussian, dtype=dtype), model, WORK, WORK, **{**options, **changes})


def play(method, fed, rounds=100, state=None):
    """The state after so many rounds, or at the end; and the stages it went through."""
    if state is None:
        fed.begin(-1)
        state = method.init(fed)
        fed.commit()
    stages, number = [], 0
    while not method.done(state) and number < rounds:
        fed.begin(number)
        stages.append(STAGES[int(state.stage)])
        state, _info = method.step(fed, state)
        fed.commit()
        number += 1
    return state, stages


def quietly(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return play(*args, **options)


def test_the_stages_come_one_round_each():
    data, _, _ = clouds()
    state, stages = quietly(make(), Simulation(data))
    assert stages == ["warm"] * 3 + ["moments", "anchors"] + ["rounds"] * 4 + ["report"]
    assert int(state.stage) == DONE


def test_components_are_counted_and_shares_found():
    data, parts, truth = clouds()
    fed = Simulation(data)
    state, _ = quietly(make(evidence="x"), fed)
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
    state, _ = quietly(method, fed)
    batch = data.gather("train", torch.tensor([5]))
    given = method.deploy(state, torch.tensor([5]))
    personal = {**given, "prior": fed.memory.get(5)["prior"][: len(state.offsets)]}
    output = method.predict(personal, batch.x[0])
    assert float((output.argmax(1) == batch.y[0]).double().mean()) > 0.85
    mixed = replace(method, prediction="mixed").predict(personal, batch.x[0])
    assert torch.allclose(mixed.exp().sum(1), torch.ones(60), atol=1e-4)
    assert float((mixed.argmax(1) == output.argmax(1)).double().mean()) > 0.9


def test_without_labels_a_sample_is_reconstructed():
    data, _, _truth = clouds(labels=False)
    method = make(labels=False)
    fed = Simulation(data)
    state, _ = quietly(method, fed)
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
    state, _stages = quietly(method, fed, rounds=2)
    assert int(state.stage) == ROUNDS
    fed.begin(2)
    new, _ = method.step(fed, state)
    # By hand: all clients train both models on all their samples, weighted alike (60 each).
    number = {"name": "train_experts"}
    key = fold(fed.run_key, "client", 2, number["name"], 0)
    trained = []
    for i in range(4):
        client = row(fed._client(_call(key), torch.tensor([i]), {}), 0)
        client = client._replace(key=fold(key, fed._name_keys[i]))
        trained.append(
            (
                WORK(client, row(state.vaes, 0), method.nats),
                WORK(client, row(state.experts, 0), method.model.losses),
            )
        )
    mean = tree_map(lambda *leaf: torch.stack(leaf).mean(0), trained[0], *trained[1:])
    for bank, expected in zip((new.vaes, new.experts), mean, strict=True):
        for name, leaf in expected.items():
            assert torch.allclose(bank[name][0], leaf, atol=1e-9), name


def _call(key):
    from types import SimpleNamespace

    return SimpleNamespace(key=key)


@pytest.mark.parametrize("division", ["hard", "soft"])
def test_parts_side_by_side_equal_parts_in_turn(division):
    data, _, _ = clouds(n_clients=5, n=30)
    method = make(n_components=2, division=division, dtype=torch.float64, interval=10)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=6)
    assert int(state.stage) == ROUNDS
    ids = torch.arange(5)
    fed.begin(6)
    which = torch.tensor([True, True])
    _, reply = fed.map(method.train_experts, state.vaes, state.experts, which, to=ids)
    key = fold(fed.run_key, "client", 6, "train_experts", 0)
    for i in range(5):
        memory = fed.memory.get(i)["samples"]
        client = row(fed._client(_call(key), torch.tensor([i]), {}), 0)
        client = client._replace(key=fold(key, fed._name_keys[i]))
        for j in range(2):
            own = client.train.where(memory["part"] == j)
            if division == "soft":
                weight = memory["weights"][:, j]
                own = client.train.where(weight > 1e-3)
                own = own._replace(weight=weight.float())
            size = own.size if division == "hard" else (weight * own.mask).sum()
            assert float(reply["n_vae"][i, j]) == pytest.approx(float(size))
            expected = WORK(client, row(state.vaes, j), method.nats, on=own, salt=j)
            for name, leaf in expected.items():
                assert torch.allclose(reply["vaes"][name][i, j], leaf, atol=1e-9)


def test_soft_with_certain_weights_equals_hard():
    data, _, _ = clouds(n_clients=4)
    method = make(n_components=2, interval=10)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=6)
    for i in range(4):  # what a soft division keeps, were it certain
        kept = fed.memory.get(i)
        weights = (kept["samples"]["part"][:, None] == torch.arange(2)).double()
        fed.memory.keep(i, {"samples": {**kept["samples"], "weights": weights}})
    fed.commit()
    replies = []
    for division in ("hard", "soft"):
        fed.begin(6)
        fed._calls = {}
        task = replace(method, division=division).train_experts
        which = torch.ones(2).bool()
        _, reply = fed.map(task, state.vaes, state.experts, which, to=fed.everyone())
        replies.append(reply)
    hard, soft = replies
    assert torch.equal(hard["n_vae"], soft["n_vae"])
    for part in ("vaes", "experts"):
        for name, leaf in hard[part].items():
            assert torch.allclose(leaf, soft[part][name], atol=1e-6), name


@pytest.mark.parametrize("parts", ["vaes", "experts", "facts"])
def test_clients_train_what_they_want(parts):
    data, _, _ = clouds(n_clients=6)
    if parts == "facts":  # half of the clients train the one, half the other
        data = replace(data, client_facts={"trains": torch.tensor([[1, 0], [0, 1]] * 3)})
    method = make(n_components=2, train_parts=parts, interval=10)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=5)
    fed.begin(5)
    new, _ = quietly_step(method, fed, state)
    moved = [
        any(not torch.equal(old[name], now[name]) for name in old)
        for old, now in ((state.vaes, new.vaes), (state.experts, new.experts))
    ]
    assert moved == {"vaes": [True, False], "experts": [False, True], "facts": [True, True]}[parts]


def quietly_step(method, fed, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.step(fed, state)


def test_a_lost_reply_leaves_the_others_mean():
    data, _, _ = clouds(n_clients=6)
    method = make(n_components=2, interval=100)
    whole = Simulation(data)
    state, _ = quietly(method, whole, rounds=6)
    whole.begin(6)
    _, all_ = whole.map(
        method.train_experts, state.vaes, state.experts, torch.ones(2).bool(), to=whole.everyone()
    )
    whole.begin(6)
    whole._calls = {}
    whole.faults = Faults(drop=0.4)
    new, _ = quietly_step(method, whole, state)
    heard = whole._heard  # who answers is a function of the exchange's key
    key = fold(whole.run_key, "client", 6, "train_experts", 0)
    lost, late = whole.faults.lost(key, whole._name_keys[whole.everyone()])
    assert heard
    assert bool((lost | late).any())
    assert not bool((lost | late).all())
    weight = all_["n_expert"][~(lost | late)]
    for name, leaf in all_["experts"].items():
        some = leaf[~(lost | late)].double()
        mean = torch.einsum("mk,mk...->k...", weight, some)
        mean = mean / weight.sum(0).reshape(-1, *(1,) * (mean.ndim - 1))
        assert torch.allclose(new.experts[name].double(), mean, atol=1e-5), name


def test_one_fitted_and_one_random_model_give_the_trivial_partition():
    data, _, _ = clouds(n_clients=8)
    method = make(n_components=2, evidence="x", offset="none")
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=5)
    far = tree_map(lambda leaf: leaf.clone(), state.vaes)
    random = Model(net, gaussian).init(seed_key(9))
    for name, leaf in random.items():
        far[name][1] = leaf * 8
        far[name][0] = state.common["vae"][name]
    fed.begin(5)
    with pytest.warns(UserWarning, match="partition is trivial: one component takes"):
        method.step(fed, state._replace(vaes=far))


def test_shares_that_mean_nothing_are_noticed_and_started_again():
    data, _, _ = clouds(n_clients=12)
    method = make(n_components=2, evidence="x", offset="none", start="published")
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=6)
    # Clients differ (e_1 is about 50), and shares by chance: 30 of 60 give or take 4.
    chance = 0.5 + 4 / 60 * normal(seed_key(1), (12,), torch.float64)
    vague = state._replace(own=torch.stack([chance, 1 - chance], 1))
    with pytest.warns(UserWarning, match="hardly vary .* Starting again from moments"):
        state, _ = method.sound(fed, vague)
    assert int(state.stage) == MOMENTS
    assert bool(state.restarted)
    state, stages = quietly(method, fed, rounds=3, state=state)
    assert stages == ["moments", "anchors", "rounds"]
    with pytest.warns(UserWarning, match="hardly vary .* Components may look alike"):
        method.sound(fed, vague._replace(restarted=torch.tensor(True)))


def test_the_published_start_finds_two_pure_clients():
    data, _, truth = clouds(n_clients=10, k=2)
    state, stages = quietly(make(n_components=2, start="published"), Simulation(data), rounds=5)
    assert stages[-2:] == ["moments", "anchors"]
    at = torch.nonzero(state.anchor >= 0).flatten()
    assert len(truth[at].argmax(1).unique()) == 2
    assert float(truth[at].max(1).values.min()) > 0.7


class Exact(FedGMI):
    """FedGMI whose density models are exact: normal around a centre, variance one."""

    def nats_of(self, vaes, batch):
        return 0.5 * (batch.x - vaes["centre"]).square()


def lines(n=200, apart=4.0, clients=50):
    """Clients of two normal distributions on a line, shares from none to all."""
    key = fold(seed_key(3), "lines")
    xs, shares = [], []
    for i in range(clients):
        first = torch.arange(n) < (i + 0.5) / clients * n
        xs.append(normal(fold(key, i), (n, 1)) + torch.where(first, 0.0, apart)[:, None])
        shares.append(float(first.double().mean()))
    return from_arrays(xs, test_fraction=0.0), torch.tensor(shares, dtype=torch.float64)


def exact(**changes):
    vae = Model(lambda: VAE((1,), 1, (2,), "gaussian"), gaussian)
    return Exact(vae, None, WORK, WORK, n_components=2, **{"warm_rounds": 0, **changes})


def test_gain_prefers_models_that_explain_the_mixtures():
    data, _ = lines(apart=6.0)
    method, fed = exact(), Simulation(data)
    fed.begin(0)
    bank = {"centre": torch.tensor([3.0, 0.0, -5.0, 6.0, 2.5])}  # the middle is the best single
    _, alone = fed.map(method.gain, bank, torch.arange(5)[:, None], to=fed.everyone())
    assert int(alone["gain"].mean(0).argmax()) == 0
    assert sorted(starts.gained(method, fed, bank, 2)) == [1, 3]


@pytest.mark.parametrize("offset", ["none", "tail"])
def test_exact_densities_give_the_shares(offset):
    data, truth = lines()
    method, fed = exact(offset=offset), Simulation(data)
    state, _ = quietly(method, fed, rounds=1)
    state = state._replace(vaes={"centre": torch.tensor([0.0, 4.0])}, stage=torch.tensor(ROUNDS))
    fed.begin(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, _ = method.divide(fed, state, fed.everyone())
    for name in ("own", "counts", "tail", "em"):
        assert float((getattr(state, name)[:, 0] - truth).abs().mean()) <= 0.05, name


def test_a_density_that_fits_nothing_gives_the_trivial_partition():
    data, _ = lines()
    method, fed = exact(offset="none"), Simulation(data)
    state, _ = quietly(method, fed, rounds=1)
    state = state._replace(vaes={"centre": torch.tensor([2.0, 90.0])}, stage=torch.tensor(ROUNDS))
    fed.begin(1)
    with pytest.warns(UserWarning, match="partition is trivial: one component takes 100"):
        method.divide(fed, state, fed.everyone())


def test_three_components():
    data, _, truth = clouds(n_clients=20, n=90, k=3)
    fed = Simulation(data)
    state, _ = quietly(make(evidence="x"), fed)
    assert len(state.offsets) == 3
    found = make().mixture(state, fed.everyone())
    anchors = torch.nonzero(state.anchor >= 0).flatten()
    assert len(truth[anchors].argmax(1).unique()) == 3
    from coterie.metrics import mixture_error

    assert mixture_error(found.shares, truth)["mae"] < 0.06
    early = make(shares="moments").mixture(state, fed.everyone())  # from mean codes alone
    assert torch.equal(early.shares, found.others["moments"])
    assert early.evidence["estimate"] == "moments"
    assert mixture_error(early.shares, truth)["mae"] < 0.15
    assert bool((early.errors > 0).all())
    assert float(early.errors.max()) < 0.2


def test_totals_match_the_target():
    data, _, _ = clouds(n_clients=12, apart=1.5)
    method = make(evidence="x", n_components=2)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=6)
    target = torch.tensor([0.35, 0.65]).double()
    fed.begin(7)
    ids, state = divisions.score(method, fed, state, fed.everyone(), joint=False)
    reply = divisions.survey(method, fed, ids, state)
    state, reply = divisions.balance(method, fed, ids, state, target, reply)
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
    state, _ = quietly(method, fed)
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


def test_an_empty_component_is_warned_of_and_started_anew():
    data, _, _ = clouds(n_clients=8)
    method = make(n_components=3, evidence="x", offset="none", least_share=1e-3)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=5)
    far = tree_map(lambda leaf: leaf.clone(), state.vaes)
    for name, leaf in Model(net, gaussian).init(seed_key(9)).items():
        far[name][2] = leaf * 8
    state = state._replace(vaes=far)
    fed.begin(5)
    with pytest.warns(UserWarning, match=r"component \[2\] got no sample"):
        state, _ = method.divide(fed, state, fed.everyone())
    fed.begin(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, _ = method.divide(fed, state, fed.everyone())
    assert any(not torch.equal(state.vaes[name][2], far[name][2]) for name in far)
    assert int(state.stage) == ROUNDS


def test_published_takes_the_papers_values():
    method = make(published=True, n_components=2, warm_rounds=10)
    assert (method.start, method.offset, method.shares) == ("published", "none", "count")
    assert (method.penalty, method.n_decoded, method.warm_rounds) == (0.1, 512, 0)
    assert replace(method, n_components=3).offset == "none"  # and stay when something changes


def test_options_that_cannot_be_run():
    with pytest.raises(ConfigError, match="n_components must be given"):
        make(start="published")
    with pytest.raises(ConfigError, match="density model"):
        FedGMI(Model(lambda: MLP(4, 2)))
    with pytest.raises(ConfigError, match="cross-entropy"):
        make(labels=False, evidence="joint")
    with pytest.raises(ConfigError, match="pure_bins"):
        make(pure_bins=8)
    data, _, _ = clouds(n_clients=2)
    with pytest.raises(ConfigError, match="at most the number of clients"):
        make(n_components=3).init(Simulation(data))


def test_an_anchor_that_stays_silent_is_replaced():
    data, _, _ = clouds(n_clients=10)
    method = make(n_components=2)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=4)
    assert int(state.stage) == ANCHORS
    before = set(torch.nonzero(state.anchor >= 0).flatten().tolist())
    fed.faults = Faults(drop=1.0)
    fed.begin(4)
    state, _ = quietly_step(method, fed, state)
    assert int(state.stage) == ANCHORS
    fed.faults = None
    fed.begin(5)
    state, _ = quietly_step(method, fed, state)
    after = set(torch.nonzero(state.anchor >= 0).flatten().tolist())
    assert int(state.stage) == ROUNDS
    assert not before & after
    assert len(after) == 2


def test_frozen_parts_train_experts_alone():
    data, _, _ = clouds(n_clients=6)
    method = make(n_components=2, freeze_after=1, interval=1, rounds=3)
    fed = Simulation(data)
    state, _ = quietly(method, fed, rounds=6)
    fed.begin(6)
    new, _ = quietly_step(method, fed, state)
    assert all(torch.equal(leaf, new.vaes[name]) for name, leaf in state.vaes.items())
    assert any(not torch.equal(leaf, new.experts[name]) for name, leaf in state.experts.items())
    assert torch.equal(state.own, new.own)


@pytest.mark.parametrize("options", [{"warm_rounds": 2}, {"start": "published"}, {"start": "gain"}])
def test_engines_agree_from_every_start(options):
    from coterie.checks.trial import difference, outcome

    def method(problem):
        return replace(FedGMI.example(problem), penalty=0.1, division="soft", **options)

    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for engine in ("loop", "stacked", "wire"):
            ends.append(outcome(method, tiny(), engine, rounds=5))
    assert not difference(ends[0], ends[1], 1e-9)
    assert not difference(ends[0], ends[2], 1e-9)


def test_the_exam_works_in_every_stage():
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
        state, _ = quietly_step(method, fed, state)
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
    state, _ = quietly(method, Simulation(data))
    assert int(state.stage) == DONE
