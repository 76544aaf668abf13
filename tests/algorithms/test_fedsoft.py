"""FedSoft worked out by hand on clients that hold numbers."""

import pytest
import torch

from coterie.algorithms import FedSoft, LocalOnly
from coterie.core import LocalSGD
from coterie.engines import Simulation


def started(method, fed, centres):
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    name, leaf = next(iter(state.models.items()))
    return state._replace(models={name: torch.tensor(centres).reshape(leaf.shape)}), name


def test_shares_count_the_samples_a_centre_wins(federate, points, scalar, half):
    # centres 0 and 4: the samples 0, 1, 4 are nearer to 0, 0, 4; a tie at 2 goes to the first
    fed = federate(points([0, 1, 4], [2, 2, 2]))
    method = FedSoft(scalar, half, n_groups=2, selection="uniform")
    state, _ = started(method, fed, [0.0, 4.0])
    fed.begin(0)
    state = method.count_all(fed, state, fed.everyone())
    assert state.shares.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3)], [1.0, 0.0]]
    assert method.replace_zeros(state.shares)[1].tolist() == [1.0, 1e-4]
    # v: 3 * 2/3 = 2 and 3 of centre 0; 1 and 3e-4 of centre 1
    v = method.importance(state)
    assert v[:, 0].tolist() == pytest.approx([0.4, 0.6])
    assert v[:, 1].tolist() == pytest.approx([1 / 1.0003, 0.0003 / 1.0003])


def test_a_round_by_hand(federate, points, scalar):
    # One step of 1/4 from w = 1: gradient 2 (w - y) + lambda (u_0 (w - 0) + u_1 (w - 4)).
    fed = federate(points([0, 0], [4, 4]))
    method = FedSoft(
        scalar, LocalSGD(0.25), n_groups=2, selection="uniform", strength=0.4, least_share=0.1
    )
    state, name = started(method, fed, [0.0, 4.0])
    for client in range(2):
        fed.memory.committed[client] = {
            "params": {name: torch.ones_like(state.models[name][0])},
            "share": torch.tensor([0.5, 0.5]).double(),
            "trained": torch.tensor(True),
        }
    fed.begin(0)
    state, _ = method.step(fed, state)
    # client 0: u = (1, .1): 1 - (2 + .4 (1 + .1 * -3)) / 4 = 1 - 2.28 / 4 = .43
    # client 1: u = (.1, 1): 1 - (-6 + .4 (.1 - 3)) / 4 = 1 + 7.16 / 4 = 2.79
    fed.commit()
    own = [float(fed.memory.get(i)["params"][name].flatten()[0]) for i in range(2)]
    assert own == pytest.approx([0.43, 2.79], abs=1e-6)
    # v is (1, .1) / 1.1 and the reverse: (10 * .43 + 2.79) / 11 and (.43 + 10 * 2.79) / 11
    assert state.models[name].flatten().tolist() == pytest.approx([7.09 / 11, 28.33 / 11], abs=1e-6)


def test_one_centre_without_pull_trains_like_alone(points, scalar, half):
    data = points([0, 1], [4, 6, 8])
    fed, other = Simulation(data), Simulation(data)
    soft, alone = FedSoft(scalar, half, n_groups=1, strength=0.0), LocalOnly(scalar, half)
    states = []
    for method, federation in ((soft, fed), (alone, other)):
        federation.begin(-1)
        states.append(method.init(federation))
        federation.commit()
    name = next(iter(states[0].models))
    start = fed_start = None
    for number in range(2):
        for i, (method, federation) in enumerate(((soft, fed), (alone, other))):
            federation.begin(number)
            states[i], _ = method.step(federation, states[i])
            federation.commit()
        own = fed.memory.get(0)["params"][name]
        start, fed_start = fed_start, own
    # half of the way to the mean 0.5 each round, whatever the start
    assert float((fed_start - 0.5) / (start - 0.5)) == pytest.approx(0.5, abs=1e-5)


def test_clients_are_chosen_for_what_they_hold(points, scalar, half):
    fed = Simulation(points(*[[float(i)] for i in range(8)]))
    method = FedSoft(scalar, half, n_groups=2, per_centre=3)
    importance = torch.zeros(8, 2).double()
    importance[:4, 0], importance[4:, 1] = 0.25, 0.25
    times = torch.zeros(8, 2)
    for number in range(40):
        fed.begin(number)
        chosen = method.select(fed, importance)
        assert chosen.sum(0).tolist() == [3.0, 3.0]  # without replacement
        times += chosen
    assert float(times[4:, 0].sum()) == float(times[:4, 1].sum()) == 0.0  # nothing held, never
    assert float(times[:4, 0].min()) > 20  # 30 expected of each


def test_larger_holdings_are_chosen_more_often(points, scalar, half):
    fed = Simulation(points([0.0], [0.0], [0.0]))
    method = FedSoft(scalar, half, n_groups=1, per_centre=1)
    importance = torch.tensor([[0.6], [0.3], [0.1]]).double()
    times = torch.zeros(3)
    for number in range(600):
        fed.begin(number)
        times += method.select(fed, importance)[:, 0]
    assert (times / 600).tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.06)


def test_messages_are_k_models_down_and_one_up(points, scalar, half):
    fed = Simulation(points([0.0, 1.0], [3.0, 4.0]))
    method = FedSoft(scalar, half, n_groups=3, selection="uniform", interval=2)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    fed.begin(1)  # no count due, but nobody has been counted: placed first
    state, _ = method.step(fed, state)
    fed.commit()
    before = dict(fed.traffic.totals)
    fed.begin(3)
    method.step(fed, state)
    one = 4  # bytes of a model
    up = int((fed.traffic.totals["train", "up"] - before["train", "up"]).sum())
    assert up == 2 * one
    down = int((fed.traffic.totals["train", "down"] - before["train", "down"]).sum())
    assert down == 2 * (3 * one + 3 * 8)  # three centres, and the client's shares
