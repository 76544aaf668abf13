"""Methods that cluster samples around centres: rounds by hand."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from coterie.algorithms import FederatedCMeans, FederatedKMeans, KFed
from coterie.core.algorithm import play
from coterie.core.errors import ConfigError, TaskError
from coterie.data.mixture import mixture_tight
from coterie.engines import Simulation
from coterie.running.evaluation import components
from tiny import points, rounds


def agreement(method, data, seed=0):
    """ARI of everybody's samples together, after the method is done."""
    fed = Simulation(data, seed)
    state = list(play(method, fed))[-1][0]
    found, truth = components(method, fed, state, data)
    return adjusted_rand_score(np.concatenate(truth), np.concatenate(found))


def test_kfed_by_hand(federate):
    # Two clients with two clusters each: {0, 1}, {10, 11} and {0.5}, {20, 21}; centres 0.5, 10.5
    # and 0.5, 20.5. From either client the farthest-first choice of three is 0.5, 10.5, 20.5.
    fed = federate(points([0.0, 1.0, 10.0, 11.0], [0.5, 0.5, 20.0, 21.0]))
    method = KFed(n_clusters=3, n_components=2)
    state = rounds(method, fed, 1)
    assert sorted(state.centres.flatten().tolist()) == pytest.approx([0.5, 10.5, 20.5])
    low = int(state.centres.argmin())
    assert low in state.members[0].tolist()
    assert low in state.members[1].tolist()


def test_kfed_takes_the_samples_where_there_are_few(federate):
    fed = federate(points([0.0, 5.0], [9.0, 1.0, 1.5]))
    state = rounds(KFed(n_clusters=2, n_components=2), fed, 1)
    assert int((state.members >= 0).sum()) == 4


def test_kfed_says_when_there_are_too_few_centres(federate):
    with pytest.raises(ConfigError, match="at least n_clusters=5"):
        rounds(
            KFed(n_clusters=5, n_components=2),
            federate(points([0.0, 1.0, 2.0], [3.0, 4.0, 5.0])),
            1,
        )
    with pytest.raises(TaskError, match="at most n_clusters=1"):
        rounds(KFed(n_clusters=1, n_components=2), federate(points([0.0, 1.0, 2.0])), 1)


def test_a_round_of_federated_kmeans_by_hand(federate):
    # Data 0, 2 | 4, 10 and centres 1, 9: means 1 | 4 and 10, sizes 2 | 1 and 1. Weighted k-means of
    # 1 (2), 4 (1), 10 (1) has the centres 2 and 10.
    fed = federate(points([0.0, 2.0], [4.0, 10.0]))
    method = FederatedKMeans(n_clusters=2)
    fed.begin(-1)
    state = method.init(fed)._replace(centres=torch.tensor([[1.0], [9.0]]).double())
    fed.begin(0)
    state, _ = method.step(fed, state)
    assert state.centres.flatten().tolist() == pytest.approx([2.0, 10.0])


def test_a_part_without_samples_reports_the_centre(federate):
    fed = federate(points([0.0, 2.0]))
    method = FederatedKMeans(n_clusters=2)
    fed.begin(0)
    centres = torch.tensor([[1.0], [99.0]]).double()
    _, reply = fed.map(method.divide, centres, to=fed.everyone())
    assert reply["centres"].flatten().tolist() == [1.0, 99.0]
    assert reply["n"].flatten().tolist() == [2.0, 0.0]


def test_fuzzy_memberships_by_hand():
    # Distances 1 and 3, m = 2: u = (1/1, 1/9) / (1 + 1/9) = 0.9, 0.1.
    method = FederatedCMeans(n_clusters=2)
    share = method.memberships(
        torch.tensor([[1.0]]).double(), torch.tensor([[0.0], [4.0]]).double()
    )
    assert share[0].tolist() == pytest.approx([0.9, 0.1])


def test_a_fuzzy_round_by_hand(federate):
    # One sample at 1 and one at 3, centres 0 and 4: memberships .9, .1 and .1, .9; squared
    # .81, .01: centres (.81 * 1 + .01 * 3) / .82 and the mirror image.
    fed = federate(points([1.0], [3.0]))
    method = FederatedCMeans(n_clusters=2)
    fed.begin(-1)
    state = method.init(fed)._replace(centres=torch.tensor([[0.0], [4.0]]).double())
    fed.begin(0)
    state, _ = method.step(fed, state)
    wanted = (0.81 * 1 + 0.01 * 3) / 0.82
    assert state.centres.flatten().tolist() == pytest.approx([wanted, 4 - wanted])


@pytest.mark.parametrize(
    "method",
    [
        KFed(n_clusters=5),
        FederatedKMeans(n_clusters=5),
        FederatedCMeans(n_clusters=5),
    ],
    ids=["kfed", "kmeans", "cmeans"],
)
def test_clear_groups_are_found(method):
    data = mixture_tight(8, 5, 5, 100, 12.0, 2, 4, seed=1)
    assert agreement(method, data) > 0.95


def test_pooled_kmeans_is_no_better():
    data = mixture_tight(8, 5, 5, 100, 12.0, 2, 4, seed=1)
    pooled = KMeans(5, n_init=10, random_state=0).fit_predict(data.x.numpy())
    ours = agreement(FederatedKMeans(n_clusters=5), data)
    assert ours >= adjusted_rand_score(data.y, pooled) - 1e-9
