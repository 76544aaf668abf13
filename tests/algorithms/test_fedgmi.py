"""FedGMI as printed: each equation by hand on exact densities, and whole runs on small mixtures."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coterie.algorithms import FedGMI
from coterie.algorithms.fedgmi import affinity_cost, choose_apart
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.core.random import fold, normal, seed_key
from coterie.core.tree import row, tree_map
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.engines.faults import Faults
from coterie.metrics import mixture_error
from coterie.models import MLP
from mixed_clients import advance, at, begin, cloud_vae, clouds, exact, lines, quietly

WORK = LocalSGD(0.01, epochs=2, batch_size=16, optimizer="adam")
NO_WORK = LocalSGD(0.0, epochs=0)
DISTANCE = torch.tensor(
    [[0.0, 1.0, 5.0, 4.0], [2.0, 0.0, 3.0, 1.0], [4.0, 1.0, 0.0, 4.0], [1.0, 1.0, 4.5, 0.0]]
)


def make(labels=True, dtype=torch.float32, **changes):
    model = Model(lambda: MLP(4, 2, (8,)), dtype=dtype) if labels else None
    options = {"start_epochs": 10, "n_decoded": 64, "interval": 2, "n_components": 2}
    given = {"vae": cloud_vae(dtype), "model": model, "local": WORK, "local_vae": WORK}
    return FedGMI(**given, **{**options, **changes})


def line_method(**changes):
    return FedGMI(exact(), 2, local=NO_WORK, local_vae=NO_WORK, **changes)


def play(method, fed, rounds):
    state = begin(method, fed)
    for number in range(rounds):
        state, _ = advance(method, fed, state, number)
    return state


def test_eq_9_is_one_pass_with_a_uniform_prior_at_first():
    # Scores under centres 0 and 4 differ by 4 x - 8 nats: 0.2 for x = 2.05. The first division has
    # a uniform prior, so 2.05 goes to the second component: alpha = (3/4, 1/4). In the second one
    # the prior counts for log 3 = 1.1 nats: alpha = (1, 0). A second pass would have done so at
    # once.
    xs = [torch.tensor([[0.0], [0.0], [0.0], [2.05]]), torch.full((4, 1), 4.0)]
    method, fed = line_method(), Simulation(from_arrays(xs, test_fraction=0.0))
    state = begin(method, fed)._replace(vaes=at(0.0, 4.0))
    found = []
    for number in range(3):
        fed.begin(number)
        state = method.divide_all(fed, state, fed.everyone())
        fed.commit()
        found.append((state.shares[0].tolist(), fed.memory.get(0)["samples"]["part"].tolist()))
    assert found[0] == ([0.75, 0.25], [0, 0, 0, 1])
    assert found[1] == ([1.0, 0.0], [0, 0, 0, 0])
    # There is no floor: even where the second centre fits far better, it gets nothing back.
    fed.begin(3)
    state = method.divide_all(fed, state._replace(vaes=at(9.0, 0.0)), fed.everyone())
    assert state.shares[0].tolist() == [1.0, 0.0]


def test_eq_8_and_9_in_logarithms():
    # 10 - log 0.1 = 12.3026 against 12 - log 0.9 = 12.1054: the prior overrules two nats
    scores = torch.tensor([[10.0, 12.0]])
    cost = affinity_cost(scores, torch.tensor([0.1, 0.9]))
    assert cost[0].tolist() == pytest.approx([12.302585, 12.105361], abs=1e-5)
    assert int(affinity_cost(scores, torch.tensor([0.5, 0.5])).argmin()) == 0
    diverged = affinity_cost(torch.tensor([[torch.nan, 3.0]]), torch.tensor([0.5, 0.5]))
    assert int(diverged.argmin()) == 1


def test_the_reported_shares_are_those_of_the_clients_own_division():
    data, _ = lines(n=40, clients=6)
    method, fed = line_method(interval=2), Simulation(data)
    state = begin(method, fed)._replace(vaes=at(0.0, 4.0), turn=torch.tensor(2))
    state, _ = advance(method, fed, state, 2)
    # alpha = |S(i, j)| / |D_i| by hand, uniform prior: nearer to 0 or to 4
    x = data.gather("train", fed.everyone()).x[..., 0]
    first = (x < 2).double().mean(1)
    found = method.mixture(state, fed.everyone())
    assert torch.allclose(found.shares, torch.stack([first, 1 - first], 1))
    expected = (first * (1 - first) / 40).sqrt()
    assert torch.allclose(found.errors, torch.stack([expected, expected], 1))
    for i in range(6):
        assert torch.allclose(fed.memory.get(i)["prior"], found.shares[i])
    # Between divisions, and when the run ends there, the shares stay.
    after, _ = advance(method, fed, state, 3)
    assert torch.equal(after.shares, state.shares)
    assert not method.done(after)


def test_exact_densities_give_the_shares():
    data, truth = lines()
    method, fed = line_method(), Simulation(data)
    state = begin(method, fed)._replace(vaes=at(0.0, 4.0), turn=torch.tensor(5))
    state, _ = advance(method, fed, state, 5)
    assert float((state.shares[:, 0] - truth).abs().mean()) <= 0.05


def test_eq_10_by_hand():
    # x = c_i + z, so D_ij = mean of (c_i - c_j + z)^2 / 2 - z^2 / 2
    #                     = (c_i - c_j)^2 / 2 + (c_i - c_j) mean z, with the same z for all.
    method, key = line_method(n_decoded=16), seed_key(5)
    centres = torch.tensor([0.0, 1.0, -3.0])
    z = normal(key, (16, 1)).mean()
    apart = centres[:, None] - centres
    expected = apart.square() / 2 + apart * z
    found = method.distances(at(*centres.tolist()), key)
    assert torch.allclose(found, expected.double(), atol=1e-5)


def test_algorithm_2_takes_the_candidate_farthest_from_all_chosen():
    # {0, 2} is the farthest pair; then 1 has min(2, 3) = 2, and 3 has min(1, 4.5) = 1
    assert choose_apart(DISTANCE, 3) == [0, 2, 1]
    assert choose_apart(DISTANCE, 1) == [1]  # sums of rows: 10, 6, 9, 6.5


def test_stable_initialize_finds_two_pure_clients():
    data, _, truth = clouds(n_clients=10)
    method, fed = make(), Simulation(data)
    state = begin(method, fed)
    fed.begin(0)
    chosen, distance = method.initialize(fed, state)
    assert distance > 0
    # Which clients were they? Each of the two VAEs prefers samples of another component.
    batch = data.gather("train", torch.arange(10))
    clients = [
        torch.stack([method.vae.losses(row(chosen.vaes, j), row(batch, i)).mean() for j in (0, 1)])
        for i in range(10)
    ]
    better = torch.stack(clients).argmin(1)
    pure = truth.max(1).values > 0.9
    assert len(better[pure].unique()) == 2
    for j in (0, 1):
        assert len(truth[pure & (better == j)].argmax(1).unique()) == 1


def test_the_rounds_are_those_of_algorithm_1():
    data, _, truth = clouds()
    method, fed = make(), Simulation(data)
    state, said = begin(method, fed), []
    for number in range(5):
        state, info = advance(method, fed, state, number)
        said.append(info)
    assert int(state.turn) == 5
    assert ["distance" in info for info in said] == [True, False, False, False, False]
    assert ["largest_share" in info for info in said] == [True, False, True, False, True]
    assert mixture_error(method.mixture(state, fed.everyone()).shares, truth)["mae"] < 0.1


def test_eq_11_weights_by_the_size_of_the_part():
    data, _, _ = clouds(n_clients=6)
    method, fed = make(interval=100), Simulation(data)
    state = play(method, fed, 2)
    fed.begin(2)
    given = state.vaes, state.experts
    _, reply = fed.map(method.train_experts, *given, to=fed.everyone())
    sizes = torch.stack(
        [
            (fed.memory.get(i)["samples"]["part"][:, None] == torch.arange(2)).sum(0).double()
            for i in range(6)
        ]
    )
    assert torch.equal(reply["n_vae"], sizes)
    assert torch.equal(reply["n_expert"], sizes)
    fed.begin(2)
    fed._calls = {}
    fed.faults = Faults(drop=0.4)  # beta is renormalised over those who answer
    ids = fed.cohort()
    new, _ = quietly(method.step, fed, state)
    key = fold(fed.run_key, "client", 2, "train_experts", 0)
    lost, late = fed.faults.lost(key, fed._name_keys[ids])
    heard = ~(lost | late)
    assert 0 < int(heard.sum()) < 6
    for part, bank in (("vaes", new.vaes), ("experts", new.experts)):
        for name, leaf in reply[part].items():
            mean = torch.einsum("mk,mk...->k...", sizes[heard], leaf[heard].double())
            mean = mean / sizes[heard].sum(0).reshape(-1, *(1,) * (mean.ndim - 1))
            assert torch.allclose(bank[name].double(), mean, atol=1e-5), name


def test_parts_side_by_side_equal_parts_in_turn():
    data, _, _ = clouds(n_clients=5, n=30)
    method, fed = make(dtype=torch.float64, interval=10), Simulation(data)
    state = play(method, fed, 1)
    fed.begin(1)
    _, reply = fed.map(method.train_experts, state.vaes, state.experts, to=torch.arange(5))
    key = fold(fed.run_key, "client", 1, "train_experts", 0)
    local = fold(fed.run_key, "client", 1, "update", 0)  # of local training, for every method
    call = SimpleNamespace(key=key, local_key=local)
    for i in range(5):
        client = row(fed._client(call, torch.tensor([i]), {}), 0)
        name_key = fed._name_keys[i]
        client = client._replace(key=fold(key, name_key), local_key=fold(local, name_key))
        for j in range(2):
            own = client.train.where(fed.memory.get(i)["samples"]["part"] == j)
            assert float(reply["n_vae"][i, j]) == float(own.size)
            vae = WORK(client, row(state.vaes, j), method.penalised, on=own, salt=j)
            expert = WORK(client, row(state.experts, j), method.model.losses, on=own, salt=j)
            for part, expected in (("vaes", vae), ("experts", expert)):
                for name, leaf in expected.items():
                    assert torch.allclose(reply[part][name][i, j], leaf, atol=1e-9), name


def test_clients_train_what_they_want():
    data, _, _ = clouds(n_clients=6)
    wants = torch.tensor([[1, 0], [0, 1]] * 3)  # half of the clients the one, half the other
    data = replace(data, client_facts={"trains": wants})
    method, fed = make(train_parts="facts", interval=10), Simulation(data)
    state = play(method, fed, 1)
    fed.begin(1)
    _, reply = fed.map(method.train_experts, state.vaes, state.experts, to=fed.everyone())
    assert torch.equal(reply["n_vae"].sum(1) > 0, wants[:, 0].bool())
    assert torch.equal(reply["n_expert"].sum(1) > 0, wants[:, 1].bool())
    for i in range(6):
        same = all(torch.equal(reply["vaes"][n][i], leaf) for n, leaf in state.vaes.items())
        assert same == (not bool(wants[i, 0]))


def test_a_density_that_fits_nothing_gives_the_trivial_partition():
    data, _ = lines()
    method, fed = line_method(), Simulation(data)
    state = begin(method, fed)._replace(vaes=at(2.0, 90.0), turn=torch.tensor(5))
    fed.begin(5)
    with pytest.warns(UserWarning, match="partition is trivial: one component takes 100"):
        method.step(fed, state)


def test_one_component_trains_on_all_data():
    data, _, _ = clouds(n_clients=4)
    method, fed = make(n_components=1), Simulation(data)
    state = play(method, fed, 2)
    assert bool((state.shares == 1).all())
    assert state.assignment.tolist() == [0, 0, 0, 0]


def test_without_labels_a_sample_is_reconstructed():
    data, _, _ = clouds(labels=False)
    method, fed = make(labels=False), Simulation(data)
    state = play(method, fed, 4)
    assert state.experts == {}
    x = data.gather("train", torch.tensor([0])).x[0]
    prior = fed.memory.get(0)["prior"]
    output = method.predict({**method.deploy(state, torch.tensor([0])), "prior": prior}, x)
    assert output.shape == x.shape
    assert float((output - x).square().mean()) < float((x - x.mean(0)).square().mean())


def test_experts_learn_what_contradicts_between_components():
    data, _, _ = clouds()
    method, fed = make(), Simulation(data)
    state = play(method, fed, 9)
    batch = data.gather("train", torch.tensor([5]))
    given = method.deploy(state, torch.tensor([5]))
    output = method.predict({**given, "prior": fed.memory.get(5)["prior"]}, batch.x[0])
    assert float((output.argmax(1) == batch.y[0]).double().mean()) > 0.85


def test_newcomers_divide_with_a_uniform_prior():
    data, _ = lines(n=40, clients=8)
    method, fed = line_method(interval=10), Simulation(data, joins=[0] * 7 + [50])
    state = begin(method, fed)
    assert method.place(fed, state, fed.everyone())[1].group.tolist() == [0] * 7  # not started yet
    state, _ = advance(method, fed, state._replace(vaes=at(0.0, 4.0), turn=torch.tensor(10)), 10)
    fed.begin(60)
    state = grow(state, fed.n_clients)
    assert state.assignment[7:].tolist() == [-1]
    state, evidence = method.place(fed, state, torch.tensor([7]))
    first = float((data.gather("train", torch.tensor([7])).x < 2).double().mean())
    assert state.shares[7].tolist() == pytest.approx([first, 1 - first])
    assert evidence.group.tolist() == [int(first < 0.5)]
    assert float(evidence.margin[0]) == pytest.approx(abs(2 * first - 1))


def test_terms_against_collapse_are_part_of_training_only():
    data, _, _ = clouds(n_clients=3)
    method = make()
    batch = row(data.gather("train", torch.tensor([0])), 0)
    params = method.vae.init(seed_key(0))
    plain, with_terms = method.vae.losses(params, batch), method.penalised(params, batch)
    assert bool((with_terms - plain > 0).all())
    none = replace(method, penalty=0.0)
    assert torch.allclose(none.penalised(params, batch), plain)


def test_options_that_cannot_be_run():
    with pytest.raises(ConfigError, match="FedGMI: vae must be a density model"):
        FedGMI(Model(lambda: MLP(4, 2)), 2)
    data, _, _ = clouds(n_clients=2)
    with pytest.raises(ConfigError, match="at most the number of clients"):
        make(n_components=3).init(Simulation(data))


def test_the_order_of_clients_does_not_matter_for_the_start():
    data, _, _ = clouds(n_clients=6)
    batch = data.gather("train", torch.arange(6))
    names = [f"c{i}" for i in range(6)]
    order = [3, 1, 5, 0, 2, 4]
    ends = []
    for some in (range(6), order):
        one = from_arrays(
            [batch.x[i] for i in some],
            [batch.y[i] for i in some],
            names=[names[i] for i in some],
            test_fraction=0.0,
        )
        method, fed = make(dtype=torch.float64), Simulation(one)
        state = begin(method, fed)
        fed.begin(0)
        ends.append(method.initialize(fed, state)[0].vaes)
    different = tree_map(lambda a, b: (a - b).abs().max(), *ends)
    assert max(float(leaf) for leaf in different.values()) < 1e-9
