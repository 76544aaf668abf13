import math

import pytest
import torch
from torch import nn

from coterie import metrics
from coterie.algorithms import Survey
from coterie.algorithms.survey import seeded
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.core.random import fold, seed_key
from coterie.core.tree import row
from coterie.data import blobs, from_arrays
from coterie.engines import Faults, Simulation
from coterie.models import MLP

LOCAL = LocalSGD(learning_rate=0.1, batch_size=20)


def net(dtype=torch.float32, inputs=4, classes=4):
    return Model(lambda: MLP(inputs, classes, hidden=(16,)), dtype=dtype)


def surveyed(algorithm, fed):
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    return state


def test_groups_before_any_training(federate):
    data = blobs(n_groups=3, clients_per_group=5, n=80, d=4, n_classes=4)
    state = surveyed(Survey(net(), LOCAL), federate(data))
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1
    assert all(len(leaf) == 3 for leaf in state.models.values())


def test_one_group_is_an_answer(federate):
    data = blobs(n_groups=1, clients_per_group=12, n=80, d=4, n_classes=4)
    algorithm = Survey(net(), LOCAL)
    state = surveyed(algorithm, federate(data))
    assert state.assignment.tolist() == [0] * 12
    conditional, joint = algorithm.curves(state)
    assert (conditional.chosen, joint.chosen) == (1, 1)
    assert conditional.decides


def test_the_block_by_hand(federate):
    """A client's answer is the moments of the losses of networks drawn from (seed, r)."""
    data = blobs(n_groups=2, clients_per_group=1, n=30, d=4, n_classes=4, unequal=True)
    model, seed = net(torch.float64), seed_key(5)
    fed = federate(data)
    fed.begin(-1)
    ids, block = seeded.ask(Survey(model, LOCAL), fed, fed.everyone(), seed, 3)
    for i in ids.tolist():
        batch = row(data.gather("train", torch.tensor([i])), 0)
        for r in range(3):
            losses = model.losses(model.init(fold(seed, r)), batch)
            for c in range(4):
                own = losses[batch.y == c]
                assert int(block.counts[i, c]) == len(own)
                if len(own):
                    assert float(block.mean[i, r, c]) == pytest.approx(float(own.mean()))
                    deviation = float(own.var(correction=0))
                    assert float(block.variance[i, r, c]) == pytest.approx(deviation, abs=1e-12)


def test_what_is_sent(federate):
    # Down a seed and a number, 8 bytes each; up 2 R C + C scalars of 4 bytes; no model.
    data = blobs(n_groups=2, clients_per_group=3, n=20, d=4, n_classes=4)
    fed = federate(data)
    surveyed(Survey(net(), LOCAL, networks=5), fed)
    assert set(fed.traffic.totals) == {("setup", "down"), ("setup", "up")}
    assert fed.traffic.totals["setup", "down"].tolist() == [16] * 6
    assert fed.traffic.totals["setup", "up"].tolist() == [4 * (2 * 5 * 4 + 4)] * 6
    # The joint lens alone: sums, and one number of samples.
    fed = federate(data)
    surveyed(Survey(net(), LOCAL, networks=5, lens="joint"), fed)
    assert fed.traffic.totals["setup", "up"].tolist() == [4 * (2 * 5 * 4 + 1)] * 6
    # Then a model down, a model and a number of samples up.
    fed, algorithm = federate(data), Survey(net(), LOCAL, networks=5)
    state = surveyed(algorithm, fed)
    fed.begin(0)
    algorithm.step(fed, state)
    model = 4 * sum(leaf[0].numel() for leaf in state.models.values())
    assert fed.traffic.totals["train", "down"].tolist() == [model] * 6
    assert fed.traffic.totals["train", "up"].tolist() == [model + 8] * 6


def test_a_given_number_is_kept(federate):
    data = blobs(n_groups=3, clients_per_group=4, n=80, d=4, n_classes=4)
    algorithm = Survey(net(), LOCAL, n_groups=2)
    state = surveyed(algorithm, federate(data))
    assert state.assignment.unique().tolist() == [0, 1]
    assert algorithm.curves(state) == []  # nothing was chosen


def test_losses_that_are_no_numbers_wait(federate):
    data = blobs(n_groups=2, clients_per_group=4, n=60, d=4, n_classes=4)
    first = int(data.rows["train"].of_clients(torch.tensor([3])).index[0])
    data.x[first] = math.nan
    algorithm, fed = Survey(net(), LOCAL), federate(data)
    with pytest.warns(UserWarning, match="set aside"):
        state = surveyed(algorithm, fed)
    others = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    assert state.assignment[3] == -1
    assert metrics.adjusted_rand(state.assignment, data.truth, on=others) == 1
    data.x[first] = 0.0  # mended: placed when next asked
    fed = federate(data)
    fed.begin(0)
    state, _ = algorithm.step(fed, state)
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1


def test_nobody_answers_at_first(federate):
    data = blobs(n_groups=2, clients_per_group=4, n=60, d=4, n_classes=4)
    algorithm, fed = Survey(net(), LOCAL), federate(data)
    fed.faults = Faults(drop=1.0)
    state = surveyed(algorithm, fed)
    assert (state.assignment == -1).all()
    fed.faults = None
    fed.begin(0)
    state, _ = algorithm.step(fed, state)
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1


def test_newcomers_answer_the_same_survey(federate):
    data = blobs(n_groups=2, clients_per_group=6, n=80, d=4, n_classes=4)
    few = data.subset(torch.arange(10))
    algorithm = Survey(net(), LOCAL)
    state = surveyed(algorithm, federate(few))
    fed = federate(data)
    fed.begin(1)
    state = state._replace(assignment=torch.cat([state.assignment, torch.tensor([-1, -1])]))
    state, found = algorithm.place(fed, state, torch.arange(12))
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1
    assert found.fits.all()
    assert (found.margin > 0.3).all()


def test_strangers_fit_no_group():
    data = blobs(n_groups=2, clients_per_group=8, n=100, d=4, n_classes=4)
    algorithm = Survey(net(), LOCAL)
    state = surveyed(algorithm, Simulation(data))
    batch = data.gather("train", torch.arange(2))
    strange = from_arrays(
        [4 - 3 * batch.x[0], batch.x[1]], [batch.y[0], (batch.y[1] + 1) % 4], n_outputs=4,
        task="classification", test_fraction=0.0,
    )  # fmt: skip
    fed = Simulation(strange)
    fed.begin(0)
    state = state._replace(assignment=torch.tensor([-1, -1]))
    _, found = algorithm.place(fed, state, torch.arange(2))
    assert found.fits.tolist() == [False, False]


class Normed(nn.Module):
    def __init__(self, track=True):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 16),
            nn.BatchNorm1d(16, track_running_stats=track),
            nn.ReLU(),
            nn.LayerNorm(16),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("track", [True, False])
def test_networks_with_normalisation(federate, track):
    data = blobs(n_groups=3, clients_per_group=5, n=80, d=4, n_classes=4)
    state = surveyed(Survey(Model(lambda: Normed(track)), LOCAL), federate(data))
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1


def test_regression_has_one_lens(federate):
    # The two groups have opposite slopes.
    torch.manual_seed(0)
    xs = [torch.randn(80, 3) + 1 for _ in range(10)]
    ys = [x.sum(1, keepdim=True) * (1 if i % 2 else -1) for i, x in enumerate(xs)]
    truth = torch.arange(10) % 2
    data = from_arrays(xs, ys, task="regression", truth=truth, test_fraction=0.0)
    model = Model(lambda: MLP(3, 1, hidden=(16,)), "squared_error")
    algorithm = Survey(model, LOCAL)
    state = surveyed(algorithm, federate(data))
    assert metrics.adjusted_rand(state.assignment, truth) == 1
    assert [line.name for line in algorithm.curves(state)] == ["joint"]


def test_reconstruction_has_one_lens(federate):
    torch.manual_seed(0)
    xs = [torch.randn(80, 6) * (1 + i % 2) for i in range(10)]
    truth = torch.arange(10) % 2
    data = from_arrays(xs, truth=truth, test_fraction=0.0)
    model = Model(lambda: MLP(6, 6, hidden=(4,)), "reconstruction")
    state = surveyed(Survey(model, LOCAL), federate(data))
    assert metrics.adjusted_rand(state.assignment, truth) == 1


def test_given_groups_are_those_of_the_first_round(federate):
    # Groups the survey would not make; the unlisted client joins the nearest of them.
    data = blobs(n_groups=3, clients_per_group=5, n=80, d=4, n_classes=4)
    algorithm, fed = Survey(net(), LOCAL, n_groups=2), federate(data)
    fed.start = (data.truth == 1).long()
    fed.start[[6, 12]] = -1
    state = surveyed(algorithm, fed)
    assert torch.equal(state.assignment, (data.truth == 1).long())
    assert all(len(leaf) == 2 for leaf in state.models.values())
    fed.start = data.truth
    with pytest.raises(ConfigError, match="start: groups must be 0 to 1"):
        surveyed(algorithm, fed)
