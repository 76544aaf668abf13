"""Per-FedAvg worked out by hand on clients that hold numbers."""

import pytest
import torch
from torch import nn

from coterie.algorithms import PerFedAvg
from coterie.algorithms.per_fedavg import portion
from coterie.checks import assert_contract
from coterie.checks.trial import answers
from coterie.core import LocalSGD, Model
from coterie.data import from_arrays
from coterie.engines import Simulation
from tiny import batch


def played(method, fed, first, play, w=4.0):
    start = first(method, fed, params={"weight": torch.tensor([w])})
    (last,) = play(method, fed, start, 1)
    return float(last.state.params["weight"])


def test_a_first_order_round_by_hand(federate, points, scalar, first, play):
    # f = (w - y)^2. All samples of a client are the same, so any split gives the same gradients.
    # alpha = 1/4 goes half the way: u = (w + y) / 2. w = 4.
    # y = 0: u = 2, d = 4, w - d/8 = 3.5. y = 8: u = 6, d = -4, w = 4.5.
    # Two samples and four: (2 * 3.5 + 4 * 4.5) / 6. The model moves from w, not from u, and once.
    fed = federate(points([0, 0], [8, 8, 8, 8]))
    method = PerFedAvg(scalar, LocalSGD(0.125), inner_rate=0.25)
    assert played(method, fed, first, play) == pytest.approx((2 * 3.5 + 4 * 4.5) / 6)


def test_a_hessian_free_round_by_hand(federate, points, scalar, first, play):
    # As above, and the second derivative is 2, which a difference of gradients gives exactly:
    # w - beta (d - alpha 2 d) = w - d/8 * 1/2: 4 - 0.25 and 4 + 0.25.
    fed = federate(points([0, 0, 0], [8, 8, 8, 8, 8, 8]))
    method = PerFedAvg(scalar, LocalSGD(0.125), "hessian_free", inner_rate=0.25, difference=0.5)
    assert played(method, fed, first, play) == pytest.approx((3 * 3.75 + 6 * 4.25) / 9)


def test_the_trial_and_the_outer_batch_are_disjoint(federate, points, scalar, first, play):
    # Two samples, 0 and 8: the trial step sees one of them and the outer gradient the other.
    # All data are one batch, so rows are divided in their order: trial on 0, u = 2, then
    # d = 2 (2 - 8) = -12 and w = 4 + 12/8 = 5.5. Both on the mean 4 would stay at 4.
    fed = federate(points([0, 8]))
    method = PerFedAvg(scalar, LocalSGD(0.125), inner_rate=0.25)
    assert played(method, fed, first, play) == pytest.approx(5.5)


def test_rows_are_divided_and_a_single_one_serves_all_batches():
    rows = batch(torch.arange(5.0)[:, None])
    parts = [portion(rows, j, 3) for j in range(3)]
    real = [part.x[part.mask].flatten().tolist() for part in parts]
    assert real == [[0.0, 3.0], [1.0, 4.0], [2.0]]
    padded = batch(torch.tensor([[7.0], [7.0]]), mask=[True, False])
    for j in range(3):
        part = portion(padded, j, 3)
        assert part.x[part.mask].flatten().tolist() == [7.0]


def test_a_client_with_one_sample_trains(federate, points, scalar, first, play):
    fed = federate(points([0], [0]))
    method = PerFedAvg(scalar, LocalSGD(0.125), inner_rate=0.25)
    assert played(method, fed, first, play) == pytest.approx(3.5)


@pytest.mark.parametrize(("order", "n"), [("first", 8), ("hessian_free", 12)])
def test_an_epoch_has_as_many_steps_as_one_of_fedavg(points, scalar, first, play, order, n):
    # Batches of 2: n / 2 steps, each w -> w - (w / 2) beta' with the same factor every time.
    fed = Simulation(points([0.0] * n))
    method = PerFedAvg(scalar, LocalSGD(0.125, batch_size=2), order, inner_rate=0.25)
    factor = 1 - 0.125 * (1.0 if order == "first" else 0.5)  # d = w, or w / 2 after correction
    assert played(method, fed, first, play) == pytest.approx(4 * factor ** (n // 2), rel=1e-5)


def test_a_client_predicts_after_one_step_on_all_its_data(points, scalar, first):
    # From w = 4, alpha = 1/4: half the way to the mean of all samples; batches of one would not.
    fed = Simulation(points([0, 2], [10]))
    method = PerFedAvg(scalar, LocalSGD(0.1, batch_size=1), inner_rate=0.25)
    state = first(method, fed, params={"weight": torch.tensor([4.0])})
    said = answers(method, fed, state, torch.ones(1, 1))["output"].flatten()
    assert said.tolist() == pytest.approx([2.5, 7.0])
    # Three epochs in batches of one halve the distance to the single sample three times.
    method = PerFedAvg(scalar, LocalSGD(0.1, batch_size=1), inner_rate=0.25, fine_tune=3)
    said = answers(method, fed, state, torch.ones(1, 1))["output"].flatten()
    assert float(said[1]) == pytest.approx(10 - 6 / 8)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.output = nn.Linear(1, 1)

    def forward(self, x):
        return self.output(self.norm(x)).squeeze(1)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_only_the_outer_pass_moves_running_statistics(federate, order, first, play):
    # Rows 0, 1, 2, ...: the trial sees x = 0, the outer pass x = 10, the third batch x = 50.
    values = [0.0, 10.0] if order == "first" else [0.0, 10.0, 50.0]
    x = torch.tensor(values * 2)[:, None]
    fed = federate(from_arrays([x], [torch.zeros(len(x))], test_fraction=0.0))
    model = Model(Normed, "squared_error")
    method = PerFedAvg(model, LocalSGD(0.0), order)
    (last,) = play(method, fed, first(method, fed), 1)
    params = last.state.params
    assert float(params["buffer:norm.running_mean"]) == pytest.approx(1.0)  # a tenth of 10
    assert int(params["buffer:norm.num_batches_tracked"]) == 1


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    fed = Simulation(points([0.0, 1.0], [3.0]))
    method = PerFedAvg(scalar, half)
    play(method, fed, first(method, fed), 1)
    assert down_up(fed, 0) == (4, 4 + 8)


def test_engines_agree_on_the_hessian_free_form_too():
    def make(problem):
        return PerFedAvg(problem.model, problem.local, "hessian_free", fine_tune=1)

    assert_contract(make, only=["engines_agree", "batch_norm_and_dropout"])
