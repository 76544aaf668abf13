from dataclasses import replace

import pytest
import torch
from torch import tensor

from coterie.algorithms import IFCA, FedAvg, LocalOnly
from coterie.core.client import task
from coterie.core.training import LocalSGD
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.running.evaluation import Oracle, evaluate
from tiny import centres, mean_model

STEP = LocalSGD(learning_rate=0.1)


def column(*values):
    return tensor(values, dtype=torch.float64)[:, None]


@pytest.fixture
def two():
    """Two groups of a client each; nobody has been asked yet. Models 1 and 3."""
    data = from_arrays(
        [column(0.0), column(4.0)], test=([column(1.0, 3.0), column(5.0)], None), truth=[0, 1]
    )
    method = IFCA(mean_model(), STEP, n_groups=2)
    fed = Simulation(data)
    fed.begin(0)
    state = method.init(fed)._replace(models=centres(1.0, 3.0), assignment=tensor([0, 1]))
    return method, fed, state, data


def test_everyone_is_scored_by_its_own_model_on_its_own_test_data(two):
    method, fed, state, data = two
    scores = evaluate(method, fed, state, data.task)
    # Model 1 on 1 and 3: (0 + 4) / 2. Model 3 on 5: 4.
    assert scores.loss.tolist() == [2.0, 4.0]
    assert scores.n.tolist() == [2, 1]
    assert scores.accuracy.isnan().all()


def test_the_exam_leaves_no_trace(two):
    method, fed, state, data = two
    fed.map(method.losses, state.shared, state.models, to=fed.everyone())
    before = fed.traffic.total(), dict(fed._calls)
    evaluate(method, fed, state, data.task)
    assert (fed.traffic.total(), dict(fed._calls)) == before
    assert fed.traffic.total("evaluation") > 0


def test_the_client_matrix_has_a_row_per_client_and_a_column_per_true_group(two):
    # Model 1 on {1, 3}: 2, on {5}: 16. Model 3 on {1, 3}: (4 + 0) / 2, on {5}: 4.
    assert Oracle(*two).client_matrix().tolist() == [[2.0, 16.0], [2.0, 4.0]]


def test_a_clients_model_on_all_test_data_of_its_true_group(two):
    method, fed, state, data = two
    # Swapped: client 0 has model 3, client 1 has model 1.
    swapped = state._replace(assignment=tensor([1, 0]))
    assert Oracle(method, fed, swapped, data).on_own_group().tolist() == [2.0, 16.0]


def test_the_distance_of_models_to_true_vectors_under_the_best_naming(two):
    method, fed, state, data = two
    assert Oracle(method, fed, state, data).parameter_distance() is None
    known = replace(data, extra={"targets": tensor([[4.0], [1.0]])})
    # Model 1 meets target 1, model 3 target 4: (0 + 1) / 2.
    assert Oracle(method, fed, state, known).parameter_distance() == 0.5


def test_agreement_with_the_truth(two):
    method, fed, state, data = two
    assert Oracle(method, fed, state, data).identity() == 1.0
    one = Oracle(method, fed, state._replace(assignment=tensor([0, 0])), data)
    assert one.identity() == 0.5
    unknown = replace(data, truth=None)
    assert Oracle(method, fed, state, unknown).ari() is None
    assert Oracle(method, fed, state, unknown).identity() is None


@pytest.mark.parametrize(("support", "loss"), [("train", 100.0), ("test", 0.0)])
def test_who_has_no_group_is_placed_by_the_data_it_shows(support, loss):
    # Training data say model 0, test data say model 10.
    data = from_arrays([column(0.0)], test=([column(10.0)], None))
    method = IFCA(mean_model(), STEP, n_groups=2)
    fed = Simulation(data)
    fed.begin(0)
    state = method.init(fed)._replace(models=centres(0.0, 10.0))
    assert evaluate(method, fed, state, data.task, support=support).loss.tolist() == [loss]
    assert state.assignment.tolist() == [-1]


def test_clients_without_test_samples_have_no_score():
    data = from_arrays([column(0.0), column(2.0)], test=([column(1.0), column()], None))
    fed = Simulation(data)
    fed.begin(0)
    method = FedAvg(mean_model(), STEP)
    state = method.init(fed)._replace(params={"centre": tensor(0.0, dtype=torch.float64)})
    scores = evaluate(method, fed, state, data.task)
    assert scores.loss[0] == 1.0
    assert scores.loss[1].isnan()


class Branching(LocalOnly):
    """Makes a client's model in a way that cannot be stacked."""

    @task
    def personalise(self, client, given):
        params = client.state["params"]
        return params if float(params["centre"]) > 1e9 else {"centre": params["centre"] * 0}


def test_an_exam_that_cannot_be_stacked_goes_on_one_by_one_and_says_so():
    data = from_arrays([column(0.0), column(2.0)], test=([column(1.0), column(3.0)], None))
    fed = Simulation(data)
    fed.begin(0)
    method = Branching(mean_model(), STEP)
    with pytest.warns(UserWarning, match="The evaluation runs one client at a time"):
        scores = evaluate(method, fed, method.init(fed), data.task)
    assert scores.loss.tolist() == [1.0, 9.0]
