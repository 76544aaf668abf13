import math

import pytest
import torch
from torch import nn

from coterie import metrics
from coterie.algorithms import Survey
from coterie.algorithms.survey import seeded
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
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
    [curve] = algorithm.curves(state)
    assert (curve.name, curve.chosen) == ("conditional", 1)
    assert len(algorithm.odd(state)) == 0


def test_the_same_question_gets_the_same_answer_in_any_round(federate):
    data = blobs(n_groups=2, clients_per_group=3, n=30, d=4, n_classes=4)
    found = []
    for number in (-1, 4):
        fed = federate(data)
        fed.begin(number)
        found.append(seeded.ask(Survey(net(), LOCAL), fed, fed.everyone(), seed_key(5), 3)[1])
    before, later = found
    assert before.keys() == later.keys() == {"conditional", "shares"}
    for name, summary in before.items():
        assert all(torch.equal(*pair) for pair in zip(summary, later[name], strict=True))


def test_the_answer_by_hand(federate):
    """Counts, means and scatter of the losses of networks drawn from (seed, r), by fold."""
    data = blobs(n_groups=2, clients_per_group=1, n=30, d=4, n_classes=4, unequal=True)
    model, seed = net(torch.float64), seed_key(5)
    fed = federate(data)
    fed.begin(-1)
    ids, answers = seeded.ask(Survey(model, LOCAL), fed, fed.everyone(), seed, 3)
    counts, mean, scatter = answers["conditional"]
    assert counts.shape == (2, 4, 4)
    assert answers["shares"].mean.shape == (2, 4, 1, 4)
    squares = torch.zeros(4, 3, 3, dtype=torch.float64)
    for i in ids.tolist():
        batch = row(data.gather("train", torch.tensor([i])), 0)
        losses = torch.stack([model.losses(model.init(fold(seed, r)), batch) for r in range(3)])
        shares = torch.zeros(4, dtype=torch.float64)
        for c in range(4):
            own = losses[:, batch.mask & (batch.y == c)]
            size = counts[i, :, c]
            assert int(size.sum()) == own.shape[1]
            assert float(size.max() - size.min()) <= 1  # rows of a class are divided evenly
            total = (size[:, None] * mean[i, :, c]).sum(0)
            torch.testing.assert_close(total, own.sum(1))
            # squares within folds: all squares less those of the means
            squares[c] += own @ own.T - (mean[i, :, c].T * size) @ mean[i, :, c]
            shares[c] = own.shape[1] / float(batch.mask.sum())
        of_fold = answers["shares"].counts[i, :, 0]
        found = (of_fold[:, None] * answers["shares"].mean[i, :, 0]).sum(0) / of_fold.sum()
        torch.testing.assert_close(found, shares)
    torch.testing.assert_close(scatter, squares)


def test_what_is_sent(federate):
    # Down a seed and a number, 8 bytes each. Up, in scalars of 4 bytes: by fold and class a count
    # and a mean for each network, by class a triangle of scatter; the same of the label shares.
    data = blobs(n_groups=2, clients_per_group=3, n=20, d=4, n_classes=4)
    fed = federate(data)
    surveyed(Survey(net(), LOCAL, networks=5), fed)
    losses, shares = 4 * 4 * (1 + 5) + 4 * 15, 4 * (1 + 4) + 10
    assert set(fed.traffic.totals) == {("setup", "down"), ("setup", "up")}
    assert fed.traffic.totals["setup", "down"].tolist() == [16] * 6
    assert fed.traffic.totals["setup", "up"].tolist() == [4 * (losses + shares)] * 6
    # Without label counts: losses over all classes.
    fed = federate(data)
    surveyed(Survey(net(), LOCAL, networks=5, lens="joint"), fed)
    assert fed.traffic.totals["setup", "up"].tolist() == [4 * (4 * (1 + 5) + 15)] * 6
    # Then a model down, a model and a number of samples up.
    fed, algorithm = federate(data), Survey(net(), LOCAL, networks=5)
    state = surveyed(algorithm, fed)
    fed.begin(0)
    algorithm.step(fed, state)
    model = 4 * sum(leaf[0].numel() for leaf in state.models.values())
    assert fed.traffic.totals["train", "down"].tolist() == [model] * 6
    assert fed.traffic.totals["train", "up"].tolist() == [model + 8] * 6


def test_networks_are_doubled_until_halves_agree():
    clear = blobs(n_groups=2, clients_per_group=5, n=80, d=4, n_classes=4)
    assert int(surveyed(Survey(net(), LOCAL), Simulation(clear)).networks) == 16
    assert list(seeded._numbers(64)) == [16, 32, 64]
    assert list(seeded._numbers(40)) == [16, 32, 40]
    assert list(seeded._numbers(5)) == [5]


def odd_one():
    """Ten clients alike, and one with other labels."""
    data = blobs(n_groups=1, clients_per_group=11, n=80, d=4, n_classes=4)
    batch = data.gather("train", torch.arange(11))
    ys = [*batch.y]
    ys[4] = (ys[4] + 1) % 4
    return from_arrays([*batch.x], ys, n_outputs=4, task="classification", test_fraction=0.0)


@pytest.mark.parametrize("known", [{"n_groups": 1}, {"lens": "joint"}])
def test_an_odd_client_is_found_whatever_is_known(known):
    algorithm = Survey(net(), LOCAL, **known)
    state = surveyed(algorithm, Simulation(odd_one()))
    assert algorithm.odd(state).tolist() == [4]
    assert state.assignment.tolist() == [0] * 4 + [1] + [0] * 6


def test_an_odd_client_trains_alone(federate):
    data = odd_one()
    algorithm, fed = Survey(net(), LOCAL), federate(data)
    state = surveyed(algorithm, fed)
    assert algorithm.odd(state).tolist() == [4]
    assert state.assignment.tolist() == [0] * 4 + [1] + [0] * 6
    fed.begin(0)
    after, _ = algorithm.step(fed, state)
    # The group trains as it does without the odd client.
    others = torch.tensor([i for i in range(11) if i != 4])
    alone = federate(data.subset(others))
    without = surveyed(Survey(net(), LOCAL), alone)
    alone.begin(0)
    without, _ = Survey(net(), LOCAL).step(alone, without)
    torch.testing.assert_close(row(after.models, 0), row(without.models, 0))
    # Members fit; the odd client fits no group and keeps its model.
    state, found = algorithm.place(fed, after, fed.everyone())
    assert state.assignment[4] == 1
    assert found.fits.tolist() == [i != 4 for i in range(11)]


def test_clients_beyond_many_are_placed_in_the_groups_of_the_first(monkeypatch):
    monkeypatch.setattr(seeded, "MANY", 14)
    data = blobs(n_groups=2, clients_per_group=15, n=80, d=4, n_classes=4)
    rows = data.rows["train"].of_clients(torch.tensor([7])).index
    data.y[rows] = (3 - data.y[rows]) % 4  # unlike both groups
    data.truth[7] = 2
    algorithm = Survey(net(), LOCAL)
    state = surveyed(algorithm, Simulation(data))
    assert metrics.adjusted_rand(state.assignment, data.truth) == 1
    assert algorithm.odd(state).tolist() == [7]


def test_a_twin_of_an_odd_client_joins_nobody():
    # A newcomer like the odd client fits no group: nobody joins an odd client.
    data = odd_one()
    algorithm = Survey(net(), LOCAL)
    state = surveyed(algorithm, Simulation(data))
    fed = Simulation(data.subset(torch.tensor([4])))
    fed.begin(0)
    state = state._replace(assignment=torch.tensor([-1]), odd=torch.tensor([0]))
    state, found = algorithm.place(fed, state, torch.arange(1))
    assert (found.group.tolist(), found.fits.tolist()) == ([0], [False])


def test_a_given_number_is_kept(federate):
    data = blobs(n_groups=3, clients_per_group=4, n=80, d=4, n_classes=4)
    algorithm = Survey(net(), LOCAL, n_groups=2)
    state = surveyed(algorithm, federate(data))
    assert state.assignment.unique().tolist() == [0, 1]
    assert algorithm.curves(state) == []  # nothing was chosen


def test_an_odd_client_has_its_own_model_whatever_number_is_given():
    algorithm = Survey(net(), LOCAL, n_groups=3)
    state = surveyed(algorithm, Simulation(odd_one()))
    assert algorithm.odd(state).tolist() == [4]
    assert state.assignment.bincount()[3] == 1
    assert state.assignment[4] == 3


def test_losses_that_are_no_numbers_wait(federate):
    data = blobs(n_groups=2, clients_per_group=4, n=60, d=4, n_classes=4)
    first = int(data.rows["train"].of_clients(torch.tensor([3])).index[0])
    data.x[first] = math.nan
    algorithm, fed = Survey(net(), LOCAL), federate(data)
    with pytest.warns(UserWarning, match="'client-3' sent values that are not finite"):
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
    state, found = algorithm.place(fed, grow(state, 12), torch.arange(12))
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
    state = state._replace(assignment=torch.tensor([-1, -1]), odd=torch.tensor([0, 0]))
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
