"""FedPAC worked out by hand: one feature a * x, and a head of two classes."""

import itertools
import math

import pytest
import torch
from torch import nn

from coterie.algorithms import FedPAC
from coterie.algorithms.fedpac import least_on_simplex, mix_shares, project
from coterie.checks.trial import answers
from coterie.core import LocalSGD, Model
from coterie.core.random import normal, seed_key
from coterie.data import from_arrays
from coterie.engines import Simulation


class OneFeature(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.output = nn.Linear(1, 2)
        with torch.no_grad():
            self.body.weight.fill_(2.0)
            self.output.weight.zero_()
            self.output.bias.zero_()

    def forward(self, x):
        return self.output(self.body(x))


MODEL = Model(OneFeature, dtype=torch.float64)
STILL = LocalSGD(0.0)


def clients(*pairs):
    """Clients from lists of (x, class)."""
    xs = [torch.tensor([[float(x)] for x, _ in rows]) for rows in pairs]
    ys = [torch.tensor([y for _, y in rows]) for rows in pairs]
    return from_arrays(xs, ys, test_fraction=0.0)


def heads(*rows):
    """Two weights and two biases of each client."""
    return torch.tensor(rows, dtype=torch.float64)


def test_two_heads_are_mixed_by_hand(federate, first, play):
    # f = 2 x, no training. Client 0: x = 1, 2 of class 0; client 1: x = 3 of class 1 and 1 of 0.
    # h_0 = (3, 0), V_0 = ((4 + 16) / 2 - 9) / 2 = 1/2.
    # h_1 = (1/2 * 2, 1/2 * 6) = (1, 3), V_1 = ((36 + 4) / 2 - 10) / 2 = 5.
    # |h_0 - h_1|^2 = 4 + 9 = 13. For client 0 the least of V_0 a^2 + (V_1 + 13) (1 - a)^2 is at
    # a = 18 / 18.5; for client 1 the share of its own head is (0.5 + 13) / 18.5.
    fed = federate(clients([(1, 0), (2, 0)], [(3, 1), (1, 0)]))
    method = FedPAC(MODEL, STILL, head_rate=0.0)
    start = first(method, fed, heads=heads([1, 0, 0, 0], [0, 0, 0, 1]))
    (last,) = play(method, fed, start, 1)
    a, b = 18 / 18.5, 13.5 / 18.5
    expected = heads([a, 0, 0, 1 - a], [1 - b, 0, 0, b])
    assert torch.allclose(last.state.heads, expected, atol=1e-6)  # of the iterations
    # Prototypes by numbers of samples: class 0: (2 * 3 + 1 * 2) / 3; class 1: 6.
    assert last.state.prototypes.flatten().tolist() == pytest.approx([8 / 3, 6.0])
    # The average head weighs both clients alike: two samples each.
    assert last.state.head["output.weight"].flatten().tolist() == pytest.approx([0.5, 0.0])


def test_the_head_is_trained_before_the_body_by_hand(federate, first, play):
    # x = 1 of class 0, f = 2, head of zeros: p = 1/2 each. Slopes of the head: weights (-1, 1),
    # biases (-1/2, 1/2). Rate 1/2: weights (1/2, -1/2), biases (1/4, -1/4).
    # Then logits (1.25, -1.25), 1 - p_0 = 1 / (1 + e^2.5), slope of f: -(1 - p_0).
    # Prototype of class 0 at 5: slope of (f - 5)^2 is -6. Body rate 1/10.
    fed = federate(clients([(1, 0)]))
    method = FedPAC(MODEL, LocalSGD(0.1), head_rate=0.5)
    start = first(
        method,
        fed,
        prototypes=torch.tensor([[5.0], [0.0]]).double(),
        known=torch.tensor([True, False]),
    )
    (last,) = play(method, fed, start, 1)
    assert last.state.heads[0].tolist() == pytest.approx([0.5, -0.5, 0.25, -0.25])
    body = 2 + 0.1 * (6 + 1 / (1 + math.exp(2.5)))
    assert float(last.state.body["body.weight"]) == pytest.approx(body)
    assert float(last.state.prototypes[0]) == pytest.approx(body)  # of the trained body


def test_a_class_without_a_prototype_is_held_at_the_clients_own(first, play):
    # As above without a prototype: the pull is towards f = 2 itself, which has no slope.
    fed = Simulation(clients([(1, 0)]))
    method = FedPAC(MODEL, LocalSGD(0.1), head_rate=0.5)
    (last,) = play(method, fed, first(method, fed), 1)
    expected = 2 + 0.1 / (1 + math.exp(2.5))
    assert float(last.state.body["body.weight"]) == pytest.approx(expected)


def test_one_client_keeps_its_head(first, play):
    fed = Simulation(clients([(1, 0), (3, 1)]))
    method = FedPAC(MODEL, STILL, head_rate=0.0)
    start = first(method, fed, heads=heads([1, 2, 3, 4]))
    (last,) = play(method, fed, start, 1)
    assert last.state.heads.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_heads_follow_the_order_of_replies_and_the_silent_keep_theirs(first, play, mute):
    # Clients 0 and 2 hold opposite classes; client 1 is silent, so replies come from ids 0 and 2.
    fed = Simulation(clients([(5, 0)], [(5, 0)], [(5, 1)]))
    method = FedPAC(MODEL, STILL, head_rate=0.0)
    start = first(method, fed, heads=heads([1, 0, 0, 0], [0, 7, 7, 0], [0, 0, 0, 1]))
    mute(fed, [1])
    (last,) = play(method, fed, start, 1)
    assert last.state.heads[1].tolist() == [0.0, 7.0, 7.0, 0.0]
    # No variance within a client of one sample, and far apart: each keeps its own head.
    assert last.state.heads[[0, 2]].tolist() == heads([1, 0, 0, 0], [0, 0, 0, 1]).tolist()


def test_a_program_without_an_answer_leaves_everyone_the_own_head():
    shares = torch.full((3, 1, 1), torch.nan).double()
    assert torch.equal(mix_shares(shares, torch.ones(3).double()), torch.eye(3).double())


def test_small_shares_are_dropped_and_the_rest_sums_to_one():
    # Nothing apart, variances 1, 1 and 5000: shares in proportion to 1, 1 and 1/5000.
    mixture = mix_shares(torch.zeros(3, 1, 1).double(), torch.tensor([1.0, 1.0, 5000.0]).double())
    assert torch.allclose(mixture, torch.tensor([0.5, 0.5, 0.0]).double().expand(3, 3), atol=1e-4)
    assert mixture[:, 2].tolist() == [0.0] * 3
    assert torch.allclose(mixture.sum(1), torch.ones(3).double(), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_program_equals_a_search_over_the_simplex(seed):
    n = 200
    grid = [(a, b, n - a - b) for a, b in itertools.product(range(n + 1), repeat=2) if a + b <= n]
    grid = torch.tensor(grid).double() / n
    rows = normal(seed_key(seed), (3, 4), torch.float64)
    apart = rows - rows[0]
    q = apart @ apart.mT + normal(seed_key(seed + 9), (3,), torch.float64).square().diag()
    best = torch.einsum("gi,ij,gj->g", grid, q, grid).min()
    found = least_on_simplex(q[None])[0]
    assert float(found.sum()) == pytest.approx(1.0)
    assert float(found.min()) >= 0
    value = found @ q @ found
    assert float(value) <= float(best) + 1e-9  # never above the best of the grid


def test_many_clients_at_once_satisfy_the_conditions_of_a_minimum():
    # At a minimum over the simplex every slope is at least a' q a, and equal where the share is
    # positive.
    rows = normal(seed_key(1), (30, 20), torch.float64)
    rows[15:] += 2
    q = rows @ rows.mT + 0.05 * torch.eye(30).double()
    a = least_on_simplex(q[None])[0]
    slope, value = q @ a, a @ q @ a
    assert float((slope - value).min() / value) > -1e-5
    assert float((slope - value)[a > 1e-6].abs().max() / value) < 1e-5


def test_the_nearest_point_of_the_simplex():
    points = torch.tensor([[2.0, 0.0], [0.25, 0.75], [1.0, 1.0], [-1.0, -3.0]]).double()
    expected = [[1.0, 0.0], [0.25, 0.75], [0.5, 0.5], [1.0, 0.0]]
    assert project(points).tolist() == expected


def test_who_never_took_part_predicts_with_the_average_head(first):
    fed = Simulation(clients([(1, 0)], [(3, 1)]))
    method = FedPAC(MODEL, STILL)
    mean = {
        "output.weight": torch.tensor([[1.0], [0.0]]).double(),
        "output.bias": torch.tensor([0.0, 5.0]).double(),
    }
    nan = torch.nan
    state = first(method, fed, head=mean, heads=heads([2, 0, 0, 0], [nan, nan, nan, nan]))
    said = answers(method, fed, state, torch.ones(1, 1))["output"][:, 0]
    assert said.tolist() == [[4.0, 0.0], [2.0, 5.0]]  # f = 2


def test_messages_by_hand(first, play, down_up):
    fed = Simulation(clients([(1, 0)], [(3, 1)]))
    method = FedPAC(MODEL, STILL)
    play(method, fed, first(method, fed), 1)
    model, n_classes, n_features = 1 + 4, 2, 1
    down = 8 * (model + n_classes * n_features) + n_classes  # a byte for each class: known or not
    up = 8 * (model + 2 * n_classes * n_features + n_classes + 1) + 8  # and the number of samples
    assert down_up(fed, 0) == (down, up)
