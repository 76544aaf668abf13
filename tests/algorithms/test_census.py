"""Census: noise units, evidence added up, K by the noise, guard, newcomers."""

import math

import pytest
import torch

from coterie import metrics
from coterie.algorithms import Census, FedAvg, LocalOnly
from coterie.core import LocalSGD, Model
from coterie.core.errors import ConfigError
from coterie.core.federation import Traffic
from coterie.core.tree import row, take
from coterie.data import blobs, from_arrays
from coterie.engines import Simulation
from coterie.models import make

STILL = LocalSGD(learning_rate=0.0)


def evaluating(*args, **options):
    """Round 1 clusters, so that it can be worked out."""
    return Census(*args, **{"first": "evaluation", **options})


def around(centre, *offsets):
    """Samples whose mean is the centre."""
    return [centre + o for o in offsets]


@pytest.fixture
def two_groups(points):
    """Five clients around 0, five around 10, four samples each."""
    clients = [around(0.01 * i, -0.5, 0.5, -0.3, 0.3) for i in range(5)]
    clients += [around(10 + 0.01 * i, -0.5, 0.5, -0.3, 0.3) for i in range(5)]
    return points(*clients, truth=[0] * 5 + [1] * 5)


def test_clients_send_losses_standard_errors_and_their_number(
    federate, points, scalar, bank, first
):
    # Samples 1 and 3 on models 0 and 2: losses (1, 9) and (1, 1), means 5 and 1.
    # Less the mean over models, (1, 5): (0, 4) and (0, -4). Standard deviations sqrt(8) each, over
    # sqrt(2): 2. A single sample knows no error.
    algorithm, fed = evaluating(scalar, STILL, n_groups=2), federate(points([1.0, 3.0], [5.0]))
    state = first(algorithm, fed, models=bank(0, 2))
    fed.begin(0)
    _, reply = fed.map(algorithm.losses, {}, state.models, to=fed.everyone())
    assert reply["losses"].tolist() == [[5.0, 1.0], [25.0, 9.0]]
    assert reply["errors"].tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert reply["n"].tolist() == [2, 1]


def test_groups_are_found_and_frozen_after_three_equal_rounds(
    federate, two_groups, scalar, half, bank, first, play
):
    algorithm, fed = evaluating(scalar, half, n_groups=2), federate(two_groups)
    rounds = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 5)
    for after in rounds:
        assert after.state.assignment.tolist() == [0] * 5 + [1] * 5
    assert [after.info["stable"] for after in rounds] == [False] * 3 + [True] * 2
    # Two models make two columns a round; at the freeze they are dropped.
    assert [after.state.units.shape for after in rounds] == [(10, 2), (10, 4), (10, 6)] + [
        (10, 0)
    ] * 2
    assert rounds[2].state.counts.unique().tolist() == [4.0]


def test_one_group_is_an_answer(federate, points, scalar, half, bank, first, play):
    clients = [around(0.0, -1.0, 1.0, *(o * (1 + 0.1 * i) for o in (-0.5, 0.5))) for i in range(8)]
    algorithm, fed = evaluating(scalar, half, max_groups=4), federate(points(*clients))
    rounds = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8, -3, 4)), 4)
    assert [after.info["groups_used"] for after in rounds] == [1] * 4
    [curve] = algorithm.curves(rounds[-1].state)
    assert (curve.name, curve.criterion, curve.chosen) == ("losses", "noise ratio", 1)
    assert curve.values[0] <= 2.5
    assert rounds[-1].state.stable


def test_an_unknown_number_is_read_off_the_noise(
    federate, two_groups, scalar, half, bank, first, play
):
    algorithm, fed = evaluating(scalar, half, max_groups=4), federate(two_groups)
    after = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8, -3, 4)), 2)[-1]
    assert metrics.adjusted_rand(after.state.assignment, two_groups.truth) == 1.0
    [curve] = algorithm.curves(after.state)
    assert curve.chosen == 2
    assert curve.values[0] > 2.5 >= curve.values[1]
    # What was given is not explained.
    assert evaluating(scalar, half, n_groups=2).curves(after.state) == []


def test_a_dealt_round_leaves_evidence_but_no_group_of_its_own(
    federate, two_groups, scalar, half, first, play
):
    algorithm, fed = Census(scalar, half, n_groups=2), federate(two_groups)
    [after] = play(algorithm, fed, first(algorithm, fed), 1)
    assert after.state.units.shape == (10, 2)
    assert after.state.repeats.tolist() == [0] * 10
    assert len(after.state.known.number) == 0


def test_evidence_outlives_models_that_treat_everybody_alike(
    federate, two_groups, scalar, bank, first, play
):
    # After one round all models are one: losses no longer tell the groups apart by model.
    algorithm = evaluating(scalar, STILL, n_groups=2, stable_after=0)
    fed = federate(two_groups)
    state = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)[-1].state
    state = state._replace(models=bank(5, 5.0001))
    after = play(algorithm, fed, state, 3, start=1)[-1]
    assert metrics.adjusted_rand(after.state.assignment, two_groups.truth) == 1.0


def test_absent_clients_weigh_nothing(federate, two_groups, scalar, half, bank, first, play, mute):
    algorithm, fed = evaluating(scalar, half, n_groups=2), federate(two_groups)
    state = first(algorithm, fed, models=bank(1, 8))
    mute(fed, [3], task="losses")
    [after] = play(algorithm, fed, state, 1)
    assert after.state.counts[3].tolist() == [0.0, 0.0]
    assert after.state.assignment[3] == -1
    fed.faults = None
    [after] = play(algorithm, fed, after.state, 1, start=1)
    assert after.state.counts[3].tolist() == [0.0, 0.0, 4.0, 4.0]
    assert after.state.assignment.tolist() == [0] * 5 + [1] * 5


def test_fewer_participants_than_groups_may_stand_alone(
    federate, points, scalar, half, bank, first, play
):
    # Three clients far apart, four groups known: no two of them are one.
    clients = [around(centre, -0.5, 0.5, -0.3, 0.3) for centre in (0.0, 10.0, 30.0)]
    algorithm, fed = evaluating(scalar, half, n_groups=4), federate(points(*clients))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8, 33, 70)), 1)
    assert after.state.assignment.tolist() == [0, 1, 2]


def test_late_clients_join_with_no_past(federate, two_groups, scalar, half, bank, first, play):
    algorithm = evaluating(scalar, half, n_groups=2, stable_after=0)
    fed = federate(two_groups, joins=[0] * 9 + [2])
    after = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 3)[-1]
    assert after.state.counts[9].tolist() == [0.0] * 4 + [4.0] * 2
    assert after.state.assignment[9] == 1


def test_a_liar_is_set_aside_and_trains_alone(federate, points, scalar, half, bank, first, play):
    # Between the groups, and far from both: the second-nearest is far for this client alone.
    clients = [around(0.01 * i, -0.5, 0.5, -0.3, 0.3) for i in range(5)]
    clients += [around(10 + 0.01 * i, -0.5, 0.5, -0.3, 0.3) for i in range(5)]
    honest = points(*clients)
    spoilt = points(*clients, around(4.0, -0.5, 0.5, -0.3, 0.3))
    ends = {}
    for name, data in (("honest", honest), ("guard", spoilt)):
        algorithm, fed = evaluating(scalar, half, n_groups=2), federate(data)
        after = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)[-1]
        ends[name] = after
    assert ends["guard"].info["set_aside"] == 1
    assert ends["guard"].state.aside.tolist() == [0.0] * 10 + [1.0]
    assert ends["guard"].state.assignment[:10].tolist() == [0] * 5 + [1] * 5
    assert ends["guard"].state.assignment[10] == 2  # a model of its own, after those of the groups
    # Half of the way from the model of its group to 4, twice; nobody else moves it.
    own = ends["guard"].state.alone["models"]["weight"].flatten()
    assert any(float(own) == pytest.approx(4 + (start - 4) / 4, abs=1e-5) for start in (1.0, 8.0))
    assert evaluating(scalar, half, n_groups=2).odd(ends["guard"].state).tolist() == [10]
    torch.testing.assert_close(ends["guard"].state.models, ends["honest"].state.models)
    algorithm = evaluating(scalar, half, n_groups=2, guard=False)
    fed = federate(spoilt)
    after = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)[-1]
    assert after.info["set_aside"] == 0
    # A client that is set aside is said to fit no group.
    algorithm = evaluating(scalar, half, n_groups=2)
    _, evidence = algorithm.place(fed, ends["guard"].state, torch.tensor([0, 10]))
    assert evidence.fits.tolist() == [True, False]


def test_losses_ten_times_too_large_change_nobodys_group(
    federate, two_groups, scalar, half, bank, first, play
):
    algorithm, fed = evaluating(scalar, half, n_groups=2), federate(two_groups)
    state = first(algorithm, fed, models=bank(1, 8))
    fed.begin(0)
    cohort, reply = fed.map(algorithm.losses, {}, state.models, to=fed.everyone())
    reply["losses"][2] *= 10
    state = algorithm.cluster(fed, state, cohort, reply)
    honest = torch.arange(10) != 2
    assert state.assignment[honest].tolist() == [0] * 4 + [1] * 5


def test_a_late_client_answers_what_members_answer(
    federate, two_groups, scalar, half, bank, first, play
):
    # Clustering stops in round 4, client 9 joins in round 6.
    algorithm, fed = evaluating(scalar, half, n_groups=2), federate(two_groups, joins=[0] * 9 + [5])
    asked = []
    original = fed.map
    fed.map = lambda task, *given, **options: (
        asked.append((getattr(task, "__name__", str(task)), options["to"].tolist())),
        original(task, *given, **options),
    )[1]
    rounds = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 7)
    assert len(rounds[4].state.known.number) == 0  # nobody was late
    known = rounds[5].state.known
    assert known.number.tolist() == [0, 1]
    assert known.losses.members.tolist() == [5.0, 4.0]
    assert rounds[5].state.assignment.tolist() == [0] * 5 + [1] * 5
    # Members answer once, together with the client that is late.
    surveys = [ids for name, ids in asked if "probe_seeded" in name]
    assert surveys == [list(range(10))]


def test_who_comes_before_clustering_has_stopped_goes_to_the_smallest_loss(
    federate, two_groups, scalar, bank, first, play
):
    algorithm, fed = evaluating(scalar, STILL, n_groups=2), federate(two_groups)
    state = first(algorithm, fed, models=bank(0, 10))
    fed.begin(0)
    state, evidence = algorithm.place(fed, state, torch.tensor([1, 6]))
    assert evidence.group.tolist() == [0, 1]
    assert evidence.score.isnan().all()
    assert evidence.fits.tolist() == [True, True]
    assert len(state.known.number) == 0


def test_newcomers_meet_the_latest_models(federate, two_groups, scalar, bank, first, play):
    # Random networks cannot tell apart what differs by labels alone in one class; models can.
    algorithm, fed = evaluating(scalar, STILL, n_groups=2), federate(two_groups)
    state = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 5)[-1].state
    fed.begin(5)
    _, reply = fed.map(algorithm.answer, {}, state.models, to=torch.tensor([0, 9]))
    assert set(reply) == {"losses"}  # nothing that tells the spread
    everyone = torch.arange(10)
    state, evidence = algorithm.place(fed, state, everyone)
    assert evidence.group.tolist() == [0] * 5 + [1] * 5
    assert evidence.fits.all()
    assert state.known.number.tolist() == [0, 1]


def test_bytes_are_those_of_the_messages(federate, first, play, down_up):
    data = blobs(n_groups=2, clients_per_group=2, n=8)
    model = Model(make("mlp", data, hidden=(5,)))
    p, k, count = 2 * 5 + 5 + 5 * 3 + 3, 3, 8
    algorithm, fed = evaluating(model, STILL, n_groups=k, stable_after=1), federate(data)
    state, sizes = first(algorithm, fed), []
    for number in range(2):
        [after] = play(algorithm, fed, state, 1, start=number)
        state = after.state
        sizes.append(down_up(fed, 0))
    # K models down; K losses, K standard errors and n up, then the model (and n, its weight).
    clustering = (4 * k * p + Traffic.INDEX, 4 * 2 * k + count + 4 * p + count)
    assert sizes == [clustering, (4 * p, 4 * p + count)]


def test_one_group_is_fedavg(federate, first, play):
    data = blobs(n_groups=2, clients_per_group=3, n=20)
    model = Model(make("mlp", data, hidden=(4,)))
    local = LocalSGD(learning_rate=0.1, steps=5)
    clove, fed = Census(model, local, n_groups=1), federate(data)
    start = first(clove, fed)
    end = play(clove, fed, start, 6)[-1].state.models
    plain, fed = FedAvg(model, local), federate(data)
    state = first(plain, fed, params={name: leaf[0] for name, leaf in start.models.items()})
    params = play(plain, fed, state, 6)[-1].state.params
    assert all(torch.equal(end[name][0], leaf) for name, leaf in params.items())


def test_permuting_clients_permutes_the_groups(two_groups, scalar, half, bank, first, play):
    order = torch.tensor([7, 2, 9, 0, 4, 5, 1, 8, 3, 6])
    found = []
    for data in (two_groups, two_groups.subset(order)):
        algorithm, fed = evaluating(scalar, half, n_groups=2), Simulation(data)
        found.append(play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 3)[-1].state)
    assert found[0].assignment[order].tolist() == found[1].assignment.tolist()
    torch.testing.assert_close(found[0].units[order], found[1].units)


def test_losses_that_are_not_finite_leave_the_state_finite(
    federate, two_groups, scalar, bank, first, play
):
    algorithm, fed = evaluating(scalar, STILL, max_groups=3), federate(two_groups)
    state = first(algorithm, fed, models=bank(0, math.nan, 10))
    with pytest.warns(UserWarning, match="10 of 30 losses are not finite and were replaced"):
        [after] = play(algorithm, fed, state, 1)
    assert after.state.units.isfinite().all()
    assert metrics.adjusted_rand(after.state.assignment, two_groups.truth) == 1.0


def test_reconstruction_needs_no_labels(first, play):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(20, 1, generator=draw) * 0.1 + v for v in (1.0,) * 4 + (-3.0,) * 4]
    data = from_arrays(xs, test_fraction=0.0)
    algorithm = evaluating(Model(torch.nn.Linear(1, 1), "reconstruction"), LocalSGD(), n_groups=2)
    [after] = play(algorithm, Simulation(data), first(algorithm, Simulation(data)), 1)
    assert metrics.adjusted_rand(after.state.assignment, torch.arange(8) // 4) == 1.0


def test_a_survey_may_give_the_first_groups(federate, first, play):
    # Groups that name the classes differently; answers of the survey stay as evidence.
    data = blobs(n_groups=2, clients_per_group=5, n=60, d=4, n_classes=4)
    model = Model(make("mlp", data, hidden=(8,)))
    for known in ({"n_groups": 2}, {"max_groups": 4}):
        algorithm, fed = Census(model, STILL, first="survey", **known), federate(data)
        [after] = play(algorithm, fed, first(algorithm, fed), 1)
        assert metrics.adjusted_rand(after.state.assignment, data.truth) == 1.0
        bank = len(next(iter(after.state.models.values())))
        assert after.state.units.shape[1] > bank
        assert after.state.repeats.tolist() == [0] * 10
        [after] = play(algorithm, fed, after.state, 1, start=1)
        assert metrics.adjusted_rand(after.state.assignment, data.truth) == 1.0


def with_odd_one():
    """Two groups of six and one client with other labels than both."""
    data = blobs(n_groups=2, clients_per_group=6, n=80, d=4, n_classes=4)
    batch = data.gather("train", torch.arange(12))
    xs, ys = [*batch.x], [*batch.y]
    ys[3] = (3 - ys[3]) % 4
    truth = data.truth.clone()
    truth[3] = 2
    return from_arrays(xs, ys, n_outputs=4, task="classification", test_fraction=0.0, truth=truth)


@pytest.mark.parametrize("known", [{"n_groups": 2}, {"max_groups": 4}])
@pytest.mark.parametrize("head", [None, "output"])
def test_what_a_survey_finds_odd_trains_alone(first, play, known, head):
    data = with_odd_one()
    model = Model(make("mlp", data, hidden=(8,)), head=head)
    local = LocalSGD(learning_rate=0.1, batch_size=20)
    algorithm, fed = Census(model, local, first="survey", **known), Simulation(data)
    after = play(algorithm, fed, first(algorithm, fed), 4)[-1].state
    k = len(next(iter(after.models.values())))
    assert algorithm.odd(after).tolist() == [3]
    assert metrics.adjusted_rand(after.assignment, data.truth) == 1.0
    assert after.assignment[3] == k  # a model of its own, after those of the groups
    assert len(after.assignment[after.assignment < k].unique()) == 2
    # Its model is what it would have trained without a federation.
    lonely, fed = LocalOnly(model, local), Simulation(data)
    play(lonely, fed, first(lonely, fed), 4)
    alone = fed.memory.committed[3]["params"]
    bank = algorithm.deploy(after, torch.tensor([3]))
    own = row(take(bank.bank, bank.index), 0)
    torch.testing.assert_close(dict(own), dict(alone))


def test_losses_do_not_take_back_what_a_survey_showed(points, scalar, half, bank, first, play):
    # Everybody is alike to the losses, and a survey has found two groups.
    clients = [around(0.0, -1.0, 1.0, *(o * (1 + 0.1 * i) for o in (-0.5, 0.5))) for i in range(8)]
    found = {}
    for start in ("survey", "random"):
        algorithm = Census(scalar, half, max_groups=3, first=start)
        fed = Simulation(points(*clients))
        state = first(algorithm, fed, models=bank(1, 8, -3))
        state = state._replace(assignment=torch.arange(8) % 2)
        [after] = play(algorithm, fed, state, 1, start=1)
        [curve] = algorithm.curves(after.state)
        found[start] = after.info["groups_used"], curve.chosen, curve.note
    assert found["random"][:2] == (1, 1)
    assert found["survey"][:2] == (2, 2)
    assert "losses alone show 1" in found["survey"][2]


@pytest.mark.parametrize("kind", ["random", "evaluation", "survey"])
def test_the_first_round_may_follow_given_groups(federate, first, play, kind):
    # Given groups overrule the method's own first groups; the losses of round 1 stay as evidence.
    data = blobs(n_groups=2, clients_per_group=5, n=60, d=4, n_classes=4)
    model = Model(make("mlp", data, hidden=(8,)))
    algorithm, fed = Census(model, STILL, n_groups=2, first=kind), federate(data)
    fed.start = 1 - data.truth
    fed.start[7] = -1  # unlisted: assigned at random
    [after] = play(algorithm, fed, first(algorithm, fed), 1)
    listed = fed.start >= 0
    assert torch.equal(after.state.assignment[listed], fed.start[listed])
    assert after.state.assignment[7] in (0, 1)
    assert after.state.repeats.tolist() == [0] * 10
    assert after.state.units.shape == (10, 2)
    fed.start = fed.start + 1
    with pytest.raises(ConfigError, match="start: groups must be 0 to 1"):
        play(algorithm, fed, first(algorithm, fed), 1)


@pytest.mark.parametrize("given", [{}, {"n_groups": 2, "max_groups": 3}])
def test_either_the_number_of_groups_or_a_bound_is_given(scalar, half, given):
    with pytest.raises(ConfigError, match="Census: give n_groups, or max_groups"):
        Census(scalar, half, **given)
