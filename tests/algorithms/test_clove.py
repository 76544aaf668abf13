import math

import pytest
import torch
from torch import nn

from coterie import metrics, models
from coterie.algorithms import IFCA, CLoVE, FedAvg
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.core.federation import Traffic
from coterie.core.tree import leaves
from coterie.data import blobs, digits, from_arrays, linear_groups
from coterie.engines import Simulation
from coterie.models import MLP, LinearRegressor

# Clients at 0, 2 and 10, models at 1 and 8: losses (1, 64), (1, 36), (81, 4).
PLACES = ([0.0], [2.0], [10.0])
STILL = LocalSGD(learning_rate=0.0)


def weights(state):
    return state.models["weight"].flatten().tolist()


def going_on(*args, **options):
    """CLoVE that never stops clustering."""
    return CLoVE(*args, **{"stable_after": 0, **options})


def test_one_round_by_hand(federate, points, scalar, half, bank, first, play):
    # Costs: cluster {0, 1}: (2, 100); cluster {2}: (81, 4). Matched 0 -> 0, 1 -> 1.
    # Half the way: 1 -> 0.5 (one sample) and 1.5 (three): (0.5 + 3 * 1.5) / 4; 8 -> 9.
    algorithm = going_on(scalar, half, n_groups=2)
    fed = federate(points([0.0], [2.0, 2.0, 2.0], [10.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [1.25, 9.0]
    assert after.info["groups_used"] == 2
    assert after.info["participants"].tolist() == [0, 1, 2]
    # The bank that was measured and its centroids are kept, keyed by model.
    assert after.state.saved["models"]["weight"].flatten().tolist() == [1, 8]
    assert after.state.centroids.tolist() == [[1, 50], [81, 4]]


@pytest.fixture
def figure_1(points):
    """Losses (1.0, 5.1) and (2.1, 3.5) on models at 0 and 2: model 0 is best for everybody.

    Samples m + s and m - s lose (w - m)^2 + s^2 on model w. With m = -0.025 and 0.65 the losses
    on the two models differ by 4 - 4 m = 4.1 and 1.4; s^2 makes up the rest.
    """

    def client(m, loss):
        s = math.sqrt(loss - m * m)
        return [m + s, m - s]

    return points(*[client(-0.025, 1.0)] * 2, *[client(0.65, 2.1)] * 2)


def test_figure_1_of_the_paper(federate, figure_1, scalar, bank, first, play):
    clove, ifca = going_on(scalar, STILL, n_groups=2), IFCA(scalar, STILL, n_groups=2)
    fed = federate(figure_1)
    state = first(clove, fed, models=bank(0, 2))
    fed.begin(0)
    _, reply = fed.map(clove.losses, {}, state.models, to=torch.tensor([0, 2]))
    torch.testing.assert_close(reply["losses"], torch.tensor([[1.0, 5.1], [2.1, 3.5]]))
    # 1.0 + 3.5 < 5.1 + 2.1
    [after] = play(clove, fed, state, 1)
    assert after.state.assignment.tolist() == [0, 0, 1, 1]
    [after] = play(ifca, fed, first(ifca, fed, models=bank(0, 2)), 1)
    assert after.state.assignment.tolist() == [0, 0, 0, 0]


def test_permuting_the_models_permutes_the_matching(figure_1, scalar, bank, first, play):
    algorithm, fed = going_on(scalar, STILL, n_groups=2), Simulation(figure_1)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(2, 0)), 1)
    assert after.state.assignment.tolist() == [1, 1, 0, 0]


def test_without_matching_clusters_get_models_in_order(
    federate, figure_1, scalar, bank, first, play
):
    algorithm, fed = going_on(scalar, STILL, n_groups=2, matching="none"), federate(figure_1)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(2, 0)), 1)
    assert after.state.assignment.tolist() == [0, 0, 1, 1]


def test_square_roots_separate_but_losses_match(federate, points, scalar, bank, first, play):
    # Losses (100, 110) and (1, 9): 100 + 9 < 110 + 1, so 0 -> 0. Roots would say 0 -> 1:
    # 10 + 3 > 10.49 + 1.
    # Models at 0 and 2: (w - m)^2 + s^2: differences 10 = 4 - 4 m, m = -1.5; 8 = 4 - 4 m, m = -1.
    def client(m, loss):
        s = math.sqrt(loss - m * m)
        return [m + s, m - s]

    data = points(*[client(-1.5, 100.0)] * 2, *[client(-1.0, 1.0)] * 2)
    algorithm, fed = going_on(scalar, STILL, n_groups=2, embedding="sqrt"), federate(data)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(0, 2)), 1)
    assert after.state.assignment.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(
        after.state.centroids,
        torch.tensor([[100.0, 110.0], [1.0, 9.0]], dtype=torch.float64).sqrt(),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("clustering", ["kmeans", "agglomerative"])
def test_both_clusterings_have_centroids(federate, points, scalar, bank, first, play, clustering):
    algorithm = going_on(scalar, STILL, n_groups=2, clustering=clustering)
    fed = federate(points(*PLACES))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
    assert after.state.centroids.tolist() == [[1, 50], [81, 4]]


@pytest.mark.parametrize("clustering", ["kmeans", "agglomerative"])
def test_fewer_participants_than_groups_are_clustered_with_a_chosen_k(
    federate, points, scalar, bank, first, play, clustering
):
    algorithm = going_on(scalar, STILL, n_groups=4, clustering=clustering)
    fed = federate(points([0.0], [0.1], [10.0]))
    start = first(algorithm, fed, models=bank(0, 5, 10, 20))
    [after] = play(algorithm, fed, start, 1)
    # Losses (0, 25, 100, 400), nearly the same, and (100, 25, 0, 100).
    assert after.state.assignment.tolist() == [0, 0, 2]
    assert torch.equal(after.state.models["weight"], start.models["weight"])


@pytest.mark.parametrize("clustering", ["kmeans", "agglomerative"])
def test_equal_vectors_make_fewer_clusters_than_models(
    federate, points, scalar, half, bank, first, play, clustering
):
    algorithm = going_on(scalar, half, n_groups=3, clustering=clustering)
    fed = federate(points([0.0], [0.0], [0.0], [8.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 4, 10)), 1)
    assert after.state.assignment.tolist() == [0, 0, 0, 2]
    assert weights(after.state) == [0.5, 4.0, 9.0]  # nobody's model stays
    # All alike: one cluster.
    fed = federate(points(*[[0.0]] * 4))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 4, 10)), 1)
    assert after.state.assignment.tolist() == [0] * 4


def test_one_client_is_one_group(federate, points, scalar, half, bank, first, play):
    for known in ({"n_groups": 2}, {"max_groups": 2}):
        algorithm, fed = going_on(scalar, half, **known), federate(points([10.0]))
        [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
        assert after.state.assignment.tolist() == [1]


def test_an_empty_model_stays_bit_for_bit(federate, points, scalar, bank, first, play):
    for averaging in ("model", "gradient"):
        local = LocalSGD(learning_rate=0.1)
        algorithm = going_on(scalar, local, max_groups=3, averaging=averaging)
        fed = federate(points([0.0], [0.0], [10.0], [10.0]))
        state = first(algorithm, fed, models=bank(1, 100.1, 8))
        [after] = play(algorithm, fed, state, 1)
        assert after.state.assignment.tolist() == [0, 0, 2, 2]
        assert torch.equal(after.state.models["weight"][1], state.models["weight"][1])
        assert not torch.equal(after.state.models["weight"][2], state.models["weight"][2])


# number of groups


def straight(points, scalar, *places, **options):
    """Models all at 0 and square roots: the vector of a client is its place, repeated."""
    k = options["max_groups"]
    algorithm = going_on(scalar, STILL, embedding="sqrt", **options)
    return algorithm, points(*[[p] for p in places]), [0] * k


# Pairs at 0, 3 and 30: three clusters have a silhouette about 3 % above that of two, and the plain
# comparison of Algorithm 2 takes them.
@pytest.mark.parametrize(("most", "used"), [(4, 3), (2, 2)])
def test_algorithm_2_chooses_an_unknown_number_of_groups(
    federate, points, scalar, bank, first, play, most, used
):
    algorithm, data, models = straight(points, scalar, 0, 0.04, 3, 3.04, 30, 30.04, max_groups=most)
    fed = federate(data)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(*models)), 1)
    assert after.info["groups_used"] == used
    assert len(after.state.models["weight"]) == most
    [curve] = algorithm.curves(after.state)
    assert (curve.criterion, curve.chosen, curve.ks[0]) == ("silhouette", used, 2)


def test_algorithm_2_cannot_score_as_many_groups_as_participants(
    federate, points, scalar, bank, first, play
):
    # Three clients far apart: only two clusters have a silhouette.
    algorithm, data, models = straight(points, scalar, 1, 20, 50, max_groups=3)
    fed = federate(data)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(*models)), 1)
    assert after.info["groups_used"] == 2


def test_all_models_may_be_matched_not_only_the_first(federate, points, scalar, bank, first, play):
    # Two clusters, five models: the last two fit best.
    algorithm = going_on(scalar, STILL, max_groups=5)
    fed = federate(points([0.0], [0.0], [10.0], [10.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(50, 40, 30, 10, 1)), 1)
    assert after.state.assignment.tolist() == [4, 4, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_eight_participants_of_ten_groups(federate, first, play, seed):
    data = digits(n_clients=20, n_groups=10, per_client=20, seed=seed)
    algorithm = CLoVE(Model(models.make("linear", data)), LocalSGD(), n_groups=10)
    fed = federate(data, seed=seed, participation=0.4)
    for after in play(algorithm, fed, first(algorithm, fed), 4):
        participants = after.info["participants"]
        assert len(participants) == 8
        used = after.state.assignment[participants].unique()
        assert 1 <= len(used) <= 8
        assert ((used >= 0) & (used < 10)).all()


# first round


def test_a_dealt_first_round_leaves_no_model_empty(federate, points, scalar, half, first, play):
    algorithm = going_on(scalar, half, n_groups=4, first="random")
    for seed in range(5):
        fed = federate(points(*[[0.0]] * 6), seed=seed)
        [after] = play(algorithm, fed, first(algorithm, fed), 1)
        assert after.state.assignment.unique().tolist() == [0, 1, 2, 3]
        assert after.info["groups_used"] == 4
        # Nothing was clustered, so there is nothing to judge newcomers by.
        assert after.state.centroids.isnan().all()


def test_first_models_may_be_copies(points, scalar, half, first):
    fed = Simulation(points([0.0]))
    model = Model(LinearRegressor(4), "squared_error")
    same = first(CLoVE(model, half, n_groups=3, init_models="same"), fed).models["weight"]
    apart = first(CLoVE(model, half, n_groups=3), fed).models["weight"]
    assert len(same.unique(dim=0)) == 1
    assert len(apart.unique(dim=0)) == 3
    assert torch.equal(same[0], apart[0])


def test_identical_models_and_no_deal_still_find_the_groups_by_round_3(first, play):
    data = linear_groups(n_groups=3, clients_per_group=5, n=200, seed=0)
    model = Model(models.make("linear_regressor", data), "squared_error")
    options = {"n_groups": 3, "init_models": "same", "first": "evaluation"}
    local = LocalSGD(learning_rate=0.05, epochs=1, batch_size=20)
    found = {}
    for method in (CLoVE, IFCA):
        algorithm, fed = method(model, local, **options), Simulation(data)
        rounds = play(algorithm, fed, first(algorithm, fed), 5)
        found[method] = [metrics.adjusted_rand(r.state.assignment, data.truth) for r in rounds]
    assert found[CLoVE][0] < 1
    assert found[CLoVE][2:] == [1.0] * 3
    assert found[IFCA] == [0.0] * 5  # all in group 0


def test_the_first_round_may_follow_given_groups(federate, points, scalar, half, bank, first, play):
    # Unlisted clients are assigned at random. Nothing was clustered, so nothing counts as stable.
    algorithm, fed = CLoVE(scalar, half, n_groups=2), federate(points(*PLACES, [3.0]))
    fed.start = torch.tensor([1, 1, 0, -1])
    told, found = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)
    assert told.state.assignment[:3].tolist() == [1, 1, 0]
    assert told.state.assignment[3] in (0, 1)
    assert told.state.repeats.tolist() == [0] * 4
    assert told.state.centroids.isnan().all()
    assert found.state.repeats.tolist() == [1] * 4  # clustered in round 2
    fed.start = torch.tensor([0, 1, 2, -1])
    with pytest.raises(ConfigError, match="Got group 2"):
        play(algorithm, fed, first(algorithm, fed), 1)


# averaging


def test_gradient_averaging_takes_a_plain_step_of_the_clusters_mean_gradient(
    federate, points, scalar, bank, first, play
):
    # Gradients at 1: 2 (one sample) and -2 (three): mean -1 by samples; at 8: -4.
    # Adam's first step would be the rate itself, 0.25, up or down.
    for optimizer in ("sgd", "adam"):
        local = LocalSGD(learning_rate=0.25, optimizer=optimizer)
        algorithm = CLoVE(scalar, local, n_groups=2, averaging="gradient")
        fed = federate(points([0.0], [2.0, 2.0, 2.0], [10.0]))
        [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
        assert weights(after.state) == [1.25, 9.0]


@pytest.mark.parametrize(
    ("options", "body", "heads"),
    [
        # Body 0, heads 1 and 8; errors 1, -1, -2. See test_ifca.
        ({}, [1 / 3], [1.0, 9.0]),
        ({"averaging": "gradient"}, [1 / 3], [1.0, 9.0]),
    ],
)
def test_the_body_belongs_to_all_and_a_head_to_its_members(
    federate, points, two_parts, half, first, play, options, body, heads
):
    algorithm, fed = going_on(two_parts, half, n_groups=2, **options), federate(points(*PLACES))
    state = first(
        algorithm, fed, shared={"body": torch.zeros(1)}, models={"head": torch.tensor([[1.0], [8]])}
    )
    [after] = play(algorithm, fed, state, 1)
    torch.testing.assert_close(after.state.shared["body"], torch.tensor(body))
    torch.testing.assert_close(after.state.models["head"].flatten(), torch.tensor(heads))


def test_buffers_are_averaged_with_models_and_kept_with_gradients(first, play):
    data = blobs(n_groups=2, clients_per_group=2, n=20)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for averaging in ("model", "gradient"):
        algorithm = going_on(Model(net), LocalSGD(), n_groups=2, averaging=averaging)
        fed = Simulation(data)
        start = first(algorithm, fed)
        [after] = play(algorithm, fed, start, 1)
        [name] = [n for n in start.models if "running_mean" in n]
        changed = not torch.equal(after.state.models[name], start.models[name])
        assert changed is (averaging == "model")


# stability and newcomers


def test_clustering_stops_for_good_once_assignments_are_stable(
    federate, points, scalar, half, bank, first, play, down_up
):
    algorithm = going_on(scalar, half, n_groups=2, stable_after=3)
    fed = federate(points(*PLACES))
    state = first(algorithm, fed, models=bank(1, 8))
    sizes = []
    for number in range(6):
        if number == 4:  # the latch holds, whatever the models or the counts become
            state = state._replace(models=bank(8, 1), repeats=torch.zeros(3, dtype=torch.int64))
        [after] = play(algorithm, fed, state, 1, start=number)
        state = after.state
        sizes.append(down_up(fed, 0))
        assert after.info["stable"] is (number >= 3)
    # Down: two models of 4 bytes, then the number of a row, at most 8 bytes but no more than the
    # row itself. Up: two losses, then model and count. Frozen: a model down, model and count up.
    assert sizes == [(8 + 4, 8 + 4 + 8)] * 3 + [(4, 4 + 8)] * 3
    assert state.assignment.tolist() == [0, 0, 1]


def test_going_back_and_forth_is_not_stable(federate, points, scalar, bank, first, play):
    # Models change places under a client's feet: groups 0, 1, 0. First and last agree.
    algorithm = going_on(scalar, STILL, n_groups=2, stable_after=3)
    fed = federate(points([0.0], [10.0]))
    state = first(algorithm, fed)
    for number, places in enumerate([(0, 10), (10, 0), (0, 10), (0, 10), (0, 10)]):
        state = state._replace(models=bank(*places))
        [after] = play(algorithm, fed, state, 1, start=number)
        state = after.state
        assert not after.info["stable"]
    [after] = play(algorithm, fed, state, 1, start=5)  # 0, 1, 0, 0, 0: now
    assert after.info["stable"]


def test_a_client_seen_twice_is_not_stable(federate, points, scalar, bank, first, play):
    algorithm = going_on(scalar, STILL, n_groups=2, stable_after=3)
    fed = federate(points([0.0], [10.0], [9.0]), joins=[0, 0, 1])
    after = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 5)
    assert [r.info["stable"] for r in after] == [False] * 4 + [True]


def frozen(federate, points, scalar, bank, first, play, late, **options):
    """Members around 0 and 10 frozen with the bank (0, 10); some more clients join in round 3."""
    members = [[-1.0], [0.0], [1.0], [9.0], [10.0], [11.0]]
    algorithm = going_on(scalar, STILL, n_groups=2, stable_after=1, embedding="sqrt", **options)
    fed = federate(points(*members, *late), joins=[0] * 6 + [3] * len(late))
    state = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 3)[-1].state
    assert state.stable
    fed.begin(3)
    return algorithm, fed, grow(state, fed.n_clients)


def test_newcomers_are_placed_by_the_saved_bank_though_models_have_drifted(
    federate, points, scalar, bank, first, play
):
    algorithm, fed, state = frozen(federate, points, scalar, bank, first, play, late=[[9.5], [0.5]])
    # The current models have changed places: by smallest loss both newcomers would be wrong.
    [after] = play(algorithm, fed, state._replace(models=bank(10, 0)), 1, start=3)
    assert after.state.assignment.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert after.info["participants"].tolist() == list(range(8))
    assert after.state.saved["models"]["weight"].flatten().tolist() == [0, 10]


def test_a_newcomer_costs_one_bank_once(federate, points, scalar, bank, first, play, down_up):
    algorithm, fed, state = frozen(federate, points, scalar, bank, first, play, late=[[9.5]])
    play(algorithm, fed, state, 2, start=3)
    # The saved bank and then the current model down, twice; two losses, then model and count,
    # twice.
    assert down_up(fed, 6) == (8 + 4 + 4, 8 + 2 * (4 + 8))


def test_centroids_belong_to_models_not_to_clusters(federate, points, scalar, bank, first, play):
    # Cluster 0 (client 0) is matched to model 1: its centroid is row 1.
    algorithm, fed = going_on(scalar, STILL, n_groups=2), federate(points([10.0], [0.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 1)
    assert after.state.assignment.tolist() == [1, 0]
    assert after.state.centroids.tolist() == [[0, 100], [100, 0]]


def test_only_models_with_a_centroid_take_newcomers(federate, points, scalar, bank, first, play):
    # A model at 40 that nobody has would be the best for a newcomer at 40.
    algorithm = going_on(scalar, STILL, max_groups=3, stable_after=1)
    fed = federate(points([0.0], [0.5], [10.0], [10.5], [40.0]), joins=[0, 0, 0, 0, 2])
    state = play(algorithm, fed, first(algorithm, fed, models=bank(0, 40, 10)), 2)[-1].state
    assert state.assignment.tolist() == [0, 0, 2, 2]
    [after] = play(algorithm, fed, state, 1, start=2)
    assert after.state.assignment.tolist() == [0, 0, 2, 2, 2]


def test_without_centroids_the_smallest_loss_decides(federate, points, scalar, bank, first, play):
    algorithm = CLoVE(scalar, STILL, n_groups=2, first="random")
    fed = federate(points([0.0], [10.0], [9.0]), joins=[0, 0, 1])
    start = first(algorithm, fed, models=bank(0, 10), saved={"shared": {}, "models": bank(0, 10)})
    [after] = play(algorithm, fed, start, 1)  # dealt
    fed.begin(1)
    _, evidence = algorithm.place(fed, grow(after.state, 3), torch.tensor([2]))
    assert evidence.group.tolist() == [1]
    assert evidence.score.isnan().all()
    assert evidence.fits.all()


def test_newcomers_join_the_nearest_centroid_worked_by_hand(
    federate, points, scalar, bank, first, play
):
    # Members at -1, 0, 1 and at 9, 10, 11 on models 0 and 10. Roots of losses: (1, 11), (0, 10),
    # (1, 9) and the reverse, so the centroids are (2/3, 10) and (10, 2/3).
    algorithm, fed, state = frozen(
        federate, points, scalar, bank, first, play, late=[[9.5], [-4.0], [60.0], [5.0]]
    )
    torch.testing.assert_close(
        state.centroids, torch.tensor([[2 / 3, 10], [10, 2 / 3]], dtype=torch.float64)
    )
    ids = torch.tensor([8, 3, 7, 9, 6])
    state, evidence = algorithm.place(fed, state, ids)
    assert evidence.group[[0, 1, 2, 4]].tolist() == [1, 1, 0, 1]
    # -4 is at (4, 14): sqrt((10/3)^2 + 4^2) from the first, sqrt(6^2 + (40/3)^2) from the second.
    near, far = math.hypot(10 / 3, 4), math.hypot(6, 40 / 3)
    assert evidence.margin[2] == pytest.approx((far - near) / (far + near), abs=1e-6)
    assert evidence.margin[3] == pytest.approx(0, abs=1e-6)  # 5 is between the centroids
    assert evidence.fits.all()  # the method refuses nobody
    assert evidence.score.isnan().all()
    assert state.assignment[ids].tolist() == evidence.group.tolist()


def test_the_nearest_centroid_is_not_the_smallest_loss(federate, points, scalar, bank, first, play):
    # One cluster per model, centroids (0, 100) and (900, 400). A newcomer at 19 has (361, 81): the
    # smaller loss is on model 1, the nearer centroid is that of model 0: 361.5 against 626.
    algorithm = CLoVE(scalar, STILL, n_groups=2, stable_after=1)
    fed = federate(points([0.0], [30.0], [19.0]), joins=[0, 0, 2])
    state = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 2)[-1].state
    assert state.centroids.tolist() == [[0, 100], [900, 400]]
    [after] = play(algorithm, fed, state, 1, start=2)
    assert after.state.assignment.tolist() == [0, 1, 0]


def test_the_silent_are_neither_placed_nor_judged(
    federate, points, scalar, bank, first, play, mute
):
    algorithm, fed, state = frozen(
        federate, points, scalar, bank, first, play, late=[[9.5], [0.5], [60.0]]
    )
    mute(fed, [6, 3])
    ids = torch.tensor([8, 6, 3, 7, 0])
    state, evidence = algorithm.place(fed, state, ids)
    assert evidence.group.tolist() == [1, -1, 1, 0, 0]
    silent = torch.tensor([False, True, True, False, False])
    assert torch.equal(evidence.margin.isnan(), silent)
    assert evidence.fits.all()
    assert state.assignment[6] == -1


def test_a_silent_newcomer_waits(federate, points, scalar, bank, first, play, mute):
    algorithm, fed, state = frozen(federate, points, scalar, bank, first, play, late=[[9.5]])
    mute(fed, [6])
    [waiting] = play(algorithm, fed, state, 1, start=3)
    assert waiting.state.assignment[6] == -1
    assert waiting.info["participants"].tolist() == list(range(6))
    fed.faults = None
    [after] = play(algorithm, fed, waiting.state, 1, start=4)
    assert after.state.assignment[6] == 1


def test_whoever_answers_the_probe_but_not_the_update_keeps_its_group(
    federate, points, scalar, half, bank, first, play, mute
):
    algorithm, fed = going_on(scalar, half, n_groups=2), federate(points(*PLACES))
    state = first(algorithm, fed, models=bank(1, 8))
    mute(fed, [1], task="update")
    [after] = play(algorithm, fed, state, 1)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [0.5, 9.0]  # half the way from 1 to client 0 alone


def test_whoever_does_not_answer_the_probe_is_not_asked_to_train(
    federate, points, scalar, half, bank, first, play, mute, down_up
):
    algorithm, fed = going_on(scalar, half, n_groups=2), federate(points(*PLACES))
    state = first(algorithm, fed, models=bank(1, 8))
    mute(fed, [1], task="losses")
    [after] = play(algorithm, fed, state, 1)
    assert after.state.assignment.tolist() == [0, -1, 1]
    assert down_up(fed, 1) == (8, 0)


def test_losses_that_are_not_finite_count_as_the_worst(federate, points, scalar, bank, first, play):
    algorithm = going_on(scalar, STILL, max_groups=3)
    fed = federate(points([0.0], [0.0], [10.0], [10.0]))
    state = first(algorithm, fed, models=bank(0, float("nan"), 10))
    with pytest.warns(UserWarning, match="4 of 12 losses are not finite and were replaced"):
        [after] = play(algorithm, fed, state, 1)
    assert after.state.assignment.tolist() == [0, 0, 2, 2]
    assert after.state.centroids[[0, 2]].isfinite().all()


# messages and memory


def test_bytes_while_clustering_and_after(federate, first, play, down_up):
    data = blobs(n_groups=2, clients_per_group=2, n=8)
    model = Model(models.make("mlp", data, hidden=(5,)))
    p, k = 2 * 5 + 5 + 5 * 3 + 3, 3
    sizes = {}
    for name, algorithm in {
        "fedavg": FedAvg(model, STILL),
        "ifca": IFCA(model, STILL, n_groups=k, weights="samples", stable_after=1),
        "clove": going_on(model, STILL, n_groups=k, stable_after=1),
    }.items():
        fed = federate(data)
        state = first(algorithm, fed)
        sizes[name] = []
        for number in range(2):
            [after] = play(algorithm, fed, state, 1, start=number)
            state = after.state
            sizes[name].append(down_up(fed, 0))
    count, choice, scalar = 8, 8, 4
    assert sizes["fedavg"] == [(4 * p, 4 * p + count)] * 2
    assert sizes["ifca"] == [(4 * k * p, 4 * p + count + choice), (4 * p, 4 * p + count)]
    # The client still has the model it is told to train, so only its number is sent.
    clustering = (4 * k * p + Traffic.INDEX, k * scalar + 4 * p + count)
    assert sizes["clove"] == [clustering, (4 * p, 4 * p + count)]
    # k losses up instead of one choice.
    assert sizes["clove"][0][1] - sizes["ifca"][0][1] == k * scalar - choice
    assert sizes["clove"][1] == sizes["fedavg"][1]


def test_weight_sharing_sends_the_body_once(federate, first, play, down_up):
    data = blobs(n_groups=2, clients_per_group=2, n=8, d=4)
    body, head, k = 4 * 5 + 5, 5 * 3 + 3, 3
    model = Model(MLP(4, 3, hidden=(5,)), head="output")
    algorithm, fed = going_on(model, LocalSGD(), n_groups=k), federate(data)
    play(algorithm, fed, first(algorithm, fed), 1)
    down, up = down_up(fed, 0)
    # For training both parts are named, not sent again.
    assert 0 <= down - 4 * (body + k * head) <= 2 * Traffic.INDEX
    assert up == 4 * k + 4 * (body + head) + 8


class Spy(nn.Module):
    """Notes where the weights it is run with are stored."""

    seen: list

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, x):
        self.seen.append((self.weight.untyped_storage().data_ptr(), self.weight.shape, len(x)))
        return x.flatten(1) @ self.weight[:1]


def test_a_probe_meets_one_model_at_a_time_and_copies_none(points, play, first):
    Spy.seen = []
    algorithm = going_on(Model(Spy(), "squared_error"), STILL, n_groups=5)
    fed = Simulation(points([1.0, 2.0]), stack=False, chunk=1)
    state = first(algorithm, fed)
    Spy.seen.clear()
    fed.begin(0)
    _, reply = fed.map(algorithm.losses, {}, state.models, to=fed.everyone())
    bank = state.models["weight"].untyped_storage().data_ptr()
    assert Spy.seen == [(bank, torch.Size([1000]), 2)] * 5  # rows of the bank itself
    assert reply["losses"].shape == (1, 5)


# invariants


def test_one_group_is_fedavg_and_ifca_bit_for_bit(federate, first, play):
    data = blobs(n_groups=2, clients_per_group=3, n=20)
    model = Model(models.make("mlp", data, hidden=(4,)))
    local = LocalSGD(learning_rate=0.1, steps=5)
    clove = going_on(model, local, n_groups=1)
    start = first(clove, federate(data)).models
    ends = []
    for algorithm in (clove, IFCA(model, local, n_groups=1)):
        fed = federate(data)
        ends.append(play(algorithm, fed, first(algorithm, fed, models=start), 3)[-1].state.models)
    plain, fed = FedAvg(model, local), federate(data)
    state = first(plain, fed, params={name: leaf[0] for name, leaf in start.items()})
    params = play(plain, fed, state, 3)[-1].state.params
    for name, leaf in params.items():
        assert all(torch.equal(end[name][0], leaf) for end in ends)


def test_engines_and_chunks_agree_and_a_seed_repeats(first, play):
    data = blobs(n_groups=2, clients_per_group=4, n=20, unequal=True)
    model = Model(models.make("mlp", data, hidden=(4,)))
    local = LocalSGD(learning_rate=0.1, batch_size=6)
    algorithm, ends = CLoVE(model, local, n_groups=2), []
    for options in ({}, {"chunk": 3}, {"stack": False}, {"stack": False, "wire": True}, {}):
        fed = Simulation(data, seed=1, participation=0.7, **options)
        ends.append(play(algorithm, fed, first(algorithm, fed), 3)[-1].state)
    for end in ends[1:]:
        assert torch.equal(end.assignment, ends[0].assignment)
        for a, b in zip(leaves(end.models), leaves(ends[0].models), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    pairs = zip(leaves(ends[-1]), leaves(ends[0]), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_the_order_of_clients_does_not_matter(points, scalar, first, play):
    values = {"a": [1.0, 5.0], "b": [2.0, -3.0, 4.0], "c": [80.0, 0.0], "d": [-9.0], "e": [30.0]}
    local = LocalSGD(learning_rate=0.1, batch_size=1)
    options = {"clustering": "agglomerative", "first": "random"}
    algorithm, found = CLoVE(scalar, local, n_groups=2, **options), []
    for names in ("abcde", "ecadb"):
        fed = Simulation(points(*(values[n] for n in names), names=list(names)), participation=0.8)
        state = play(algorithm, fed, first(algorithm, fed), 4)[-1].state
        found.append((dict(zip(names, state.assignment.tolist(), strict=True)), state.models))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-5)


def test_weight_decay_and_augmentation_do_not_enter_the_losses(
    federate, points, scalar, bank, first
):
    found = []
    for local in (STILL, LocalSGD(weight_decay=9.0, augment=lambda x, key: x * 100)):
        algorithm, fed = going_on(scalar, local, n_groups=2), federate(points(*PLACES))
        state = first(algorithm, fed, models=bank(1, 8))
        fed.begin(0)
        found.append(fed.map(algorithm.losses, {}, state.models, to=fed.everyone())[1]["losses"])
    assert found[0].tolist() == found[1].tolist() == [[1, 64], [1, 36], [81, 4]]


def test_reconstruction_needs_no_labels(first, play):
    # Two kinds of inputs, an autoencoder of one number: input 1 or -3.
    xs = [torch.full((4, 1), value) for value in (1.0, 1.0, -3.0, -3.0)]
    data = from_arrays(xs, test_fraction=0.0)
    algorithm = going_on(Model(nn.Linear(1, 1), "reconstruction"), LocalSGD(), n_groups=2)
    fed = Simulation(data)
    [after] = play(algorithm, fed, first(algorithm, fed), 1)
    assert metrics.adjusted_rand(after.state.assignment, torch.tensor([0, 0, 1, 1])) == 1.0


@pytest.mark.parametrize("given", [{}, {"n_groups": 2, "max_groups": 3}])
def test_either_the_number_of_groups_or_a_bound_is_given(scalar, half, given):
    with pytest.raises(ConfigError, match="CLoVE: give n_groups, or max_groups"):
        CLoVE(scalar, half, **given)


@pytest.mark.parametrize(
    "wrong", [{"max_groups": 1}, {"embedding": "log"}, {"first": "survey"}, {"stable_after": -1}]
)
def test_options_out_of_range_are_refused(scalar, half, wrong):
    options = {"max_groups": 2, **wrong}
    with pytest.raises(ConfigError, match=f"CLoVE: {next(iter(wrong))} must be"):
        CLoVE(scalar, half, **options)
