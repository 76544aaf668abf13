import pytest
import torch

from coterie import models
from coterie.algorithms import IFCA, FedAvg
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.core.tree import leaves
from coterie.data import blobs
from coterie.engines import Simulation
from coterie.models import MLP

# Clients at 0, 2 and 10, models at 1 and 8: losses (1, 64), (1, 36), (81, 4), groups 0, 0, 1.
PLACES = ([0.0], [2.0], [10.0])


def weights(state):
    return state.models["weight"].flatten().tolist()


def test_one_round_of_model_averaging_by_hand(federate, points, scalar, half, bank, first, play):
    # Half the way: 1 -> 0.5 and 1.5, mean 1; 8 -> 9.
    algorithm, fed = IFCA(scalar, half, n_groups=2), federate(points(*PLACES))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [1.0, 9.0]
    assert after.info["groups_used"] == 2
    assert after.info["participants"].tolist() == [0, 1, 2]
    assert after.info["stable"] is False


def test_members_may_weigh_by_their_samples(federate, points, scalar, half, bank, first, play):
    # 1 -> 0.5 with one sample and 1.5 with three: (0.5 + 3 * 1.5) / 4.
    algorithm = IFCA(scalar, half, n_groups=2, weights="samples")
    fed = federate(points([0.0], [2.0, 2.0, 2.0], [10.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
    assert weights(after.state) == [1.25, 9.0]


def test_both_of_two_different_updates_count(federate, points, scalar, half, bank, first, play):
    # A published baseline gave all weight to the first client: 4 -> 2, instead of (2 + 6) / 2.
    algorithm, fed = IFCA(scalar, half, n_groups=1), federate(points([0.0], [8.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(4)), 1)
    assert weights(after.state) == [4.0]


def test_one_round_of_gradient_averaging_by_hand(federate, points, scalar, half, bank, first, play):
    # Gradients at 1: 2 (1 - y) = 2, -2, -6, sum -6; at 8: 2 (8 - 10) = -4. Rate 1/4, 4 clients.
    algorithm = IFCA(scalar, half, n_groups=2, averaging="gradient")
    fed = federate(points([0.0], [2.0], [4.0], [10.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 1)
    assert weights(after.state) == [1 + 6 / 16, 8 + 4 / 16]


def test_gradients_are_divided_by_the_number_of_all_clients(
    federate, points, scalar, half, bank, first, play
):
    # Line 14: two of four take part; both gradients at 0 are 2 (0 - 4) = -8, their sum is -16.
    algorithm = IFCA(scalar, half, n_groups=1, averaging="gradient")
    fed = federate(points(*[[4.0]] * 4), participation=0.5)
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(0)), 1)
    assert weights(after.state) == [0.25 * 16 / 4]


def test_gradients_may_weigh_by_samples(federate, points, scalar, half, bank, first, play):
    # Gradients at 0: -2 of one sample, -8 of three. Mean (-2 - 24) / 4, times 2 members of 2.
    algorithm = IFCA(scalar, half, n_groups=1, averaging="gradient", weights="samples")
    fed = federate(points([1.0], [4.0, 4.0, 4.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(0)), 1)
    assert weights(after.state) == [0.25 * 26 / 4]


def test_a_gradient_may_come_from_one_batch(federate, points, scalar, bank, first, play):
    # At 1 the samples 0 and 4 have gradients 2 and -6, their mean is -2. A step of 1/4.
    local = LocalSGD(learning_rate=0.25, batch_size=1)
    algorithm = IFCA(scalar, local, n_groups=1, averaging="gradient")
    ends = set()
    for seed in range(8):
        fed = federate(points([0.0, 4.0]), seed=seed)
        [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1)), 1)
        ends.update(weights(after.state))
    assert ends == {0.5, 2.5}


def test_gradient_averaging_takes_a_plain_step_whatever_the_optimiser(
    federate, points, scalar, bank, first, play
):
    local = LocalSGD(learning_rate=0.25, optimizer="adam")
    algorithm = IFCA(scalar, local, n_groups=1, averaging="gradient")
    fed = federate(points([8.0]))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(0)), 1)
    assert weights(after.state) == [4.0]


def test_an_empty_group_keeps_its_model_bit_for_bit(federate, points, scalar, bank, first, play):
    for averaging in ("model", "gradient"):
        local = LocalSGD(learning_rate=0.1)
        algorithm = IFCA(scalar, local, n_groups=3, averaging=averaging)
        fed = federate(points(*PLACES))
        state = first(algorithm, fed, models=bank(1, 0.1 + 100, 8))
        [after] = play(algorithm, fed, state, 1)
        assert torch.equal(after.state.models["weight"][1], state.models["weight"][1])
        assert after.info["groups_used"] == 2


def test_equal_losses_go_to_the_lowest_index(federate, points, scalar, half, bank, first, play):
    # A client at 0 loses 1 on both models.
    algorithm, fed = IFCA(scalar, half, n_groups=2), federate(points(*[[0.0]] * 12))
    [after] = play(algorithm, fed, first(algorithm, fed, models=bank(1, -1)), 1)
    assert after.state.assignment.tolist() == [0] * 12


def test_identical_first_models_put_everybody_in_group_0(
    federate, points, scalar, half, first, play
):
    # Clients at 4 and 6 from 0 or so: model 0 moves towards 5, model 1 stays where it was.
    algorithm = IFCA(scalar, half, n_groups=2, init_models="same")
    fed = federate(points([4.0], [6.0]))
    start = first(algorithm, fed)
    assert torch.equal(start.models["weight"][0], start.models["weight"][1])
    after = play(algorithm, fed, start, 3)
    assert [r.state.assignment.tolist() for r in after] == [[0, 0]] * 3
    assert [r.info["groups_used"] for r in after] == [1] * 3
    assert torch.equal(after[-1].state.models["weight"][1], start.models["weight"][1])


def test_the_first_round_may_be_dealt(federate, points, scalar, half, bank, first, play, down_up):
    algorithm = IFCA(scalar, half, n_groups=3, init_models="same", first="random")
    fed = federate(points(*[[0.0]] * 5))
    dealt, chosen = play(algorithm, fed, first(algorithm, fed, models=bank(1, 1, 1)), 2)
    assert dealt.state.assignment.unique().tolist() == [0, 1, 2]
    assert dealt.info["groups_used"] == 3
    # 0.5 three times: ties again, now chosen.
    assert chosen.state.assignment.tolist() == [0] * 5
    # One model of 4 bytes in round 1, three in round 2; the choice goes up as 8 bytes.
    assert down_up(fed, 0) == (4 + 12, 4 + (4 + 8))


def test_a_model_that_is_not_finite_is_nobodys_choice(
    federate, points, scalar, half, bank, first, play
):
    algorithm, fed = IFCA(scalar, half, n_groups=2), federate(points([0.0], [2.0]))
    state = first(algorithm, fed, models=bank(float("nan"), 8))
    [after] = play(algorithm, fed, state, 1)
    assert after.state.assignment.tolist() == [1, 1]
    assert after.state.models["weight"][1].tolist() == [4.5]  # (4 + 5) / 2


def test_weight_decay_does_not_enter_the_choice(federate, points, scalar, bank, first, play):
    # At y = 5 a model at 6 loses 1 and one at 2 loses 9. With half the square of the weight on
    # top it would be 19 against 11.
    groups = []
    for decay in (0.0, 1.0):
        local = LocalSGD(learning_rate=0.25, weight_decay=decay)
        algorithm, fed = IFCA(scalar, local, n_groups=2), federate(points([5.0], [1.0]))
        [after] = play(algorithm, fed, first(algorithm, fed, models=bank(2, 6)), 1)
        groups.append(after.state.assignment.tolist())
    assert groups == [[1, 0], [1, 0]]


# weight sharing


@pytest.mark.parametrize(
    ("options", "body", "heads"),
    [
        # Body 0, heads 1 and 8. Errors of PLACES: 1, -1, -2; both gradients are twice that.
        # A step of 1/4 moves body and head by -0.5, 0.5, 1.
        ({}, [(-0.5 + 0.5 + 1) / 3], [(0.5 + 1.5) / 2, 9.0]),
        # Gradients 2, -2, -4: mean over all -4/3; heads by 3 clients: 0 and -4/3.
        ({"averaging": "gradient"}, [1 / 3], [1.0, 8 + 1 / 3]),
    ],
)
def test_the_body_belongs_to_all_and_a_head_to_its_members(
    federate, points, two_parts, half, first, play, options, body, heads
):
    algorithm, fed = IFCA(two_parts, half, n_groups=2, **options), federate(points(*PLACES))
    state = first(
        algorithm, fed, shared={"body": torch.zeros(1)}, models={"head": torch.tensor([[1.0], [8]])}
    )
    [after] = play(algorithm, fed, state, 1)
    torch.testing.assert_close(after.state.shared["body"], torch.tensor(body))
    torch.testing.assert_close(after.state.models["head"].flatten(), torch.tensor(heads))


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_weight_sharing_sends_the_body_once(federate, first, play, down_up, averaging):
    data = blobs(n_groups=2, clients_per_group=2, n=8, n_classes=3, d=4)
    body, head, k = 4 * 5 + 5, 5 * 3 + 3, 3
    model = Model(MLP(4, 3, hidden=(5,)), head="output")
    algorithm, fed = IFCA(model, LocalSGD(), n_groups=k, averaging=averaging), federate(data)
    play(algorithm, fed, first(algorithm, fed), 1)
    assert down_up(fed, 0) == (4 * (body + k * head), 4 * (body + head) + 8)


def test_a_client_is_handed_the_body_and_its_own_head(points, two_parts, half, first, play):
    algorithm, fed = IFCA(two_parts, half, n_groups=2), Simulation(points(*PLACES))
    state = first(
        algorithm, fed, shared={"body": torch.zeros(1)}, models={"head": torch.tensor([[1.0], [8]])}
    )
    [after] = play(algorithm, fed, state, 1)
    ids = torch.tensor([2, 0])
    handed = algorithm.deploy(after.state, ids)
    _, own = fed.map(algorithm.personalise, handed, to=ids)
    assert own["head"].flatten().tolist() == [9.0, 1.0]
    torch.testing.assert_close(own["body"], torch.full((2, 1), 1 / 3))


# stability


def test_once_choices_are_stable_one_model_is_sent(
    federate, points, scalar, half, bank, first, play, down_up
):
    algorithm = IFCA(scalar, half, n_groups=2, stable_after=3)
    fed = federate(points(*PLACES))
    state = first(algorithm, fed, models=bank(1, 8))
    sizes = []
    for number in range(5):
        [after] = play(algorithm, fed, state, 1, start=number)
        state = after.state
        sizes.append(down_up(fed, 0))
        assert after.info["stable"] is (number >= 3)
    # Two models of 4 bytes down, model and choice (8 bytes) up; then one model each way.
    assert sizes == [(8, 12)] * 3 + [(4, 4)] * 2
    assert state.assignment.tolist() == [0, 0, 1]


def test_stability_is_latched(points, scalar, half, bank, first, play):
    algorithm = IFCA(scalar, half, n_groups=2, stable_after=1)
    fed = Simulation(points(*PLACES))
    state = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)[-1].state
    # Models change places; nobody looks any more.
    state = state._replace(models=bank(8, 1), repeats=torch.zeros(3, dtype=torch.int64))
    [after] = play(algorithm, fed, state, 1, start=2)
    assert after.state.assignment.tolist() == [0, 0, 1]
    assert weights(after.state) == [(4 + 5) / 2, 5.5]


def test_a_newcomer_after_the_freeze_sees_all_models_once(
    federate, points, scalar, half, bank, first, play, down_up
):
    algorithm = IFCA(scalar, half, n_groups=2, stable_after=1)
    fed = federate(points(*PLACES, [9.0]), joins=[0, 0, 0, 2])
    state = first(algorithm, fed, models=bank(1, 8))
    before = play(algorithm, fed, state, 2)
    assert before[-1].info["stable"]
    after = play(algorithm, fed, before[-1].state, 2, start=2)
    assert [r.state.assignment.tolist() for r in after] == [[0, 0, 1, 1]] * 2
    # Two losses (4 bytes each), once; the row of a bank it still has costs an index, but no more
    # than the row itself.
    assert down_up(fed, 3) == (8 + 4 + 4, 2 * 4 + 4 + 4)


def test_a_newcomer_that_stays_silent_waits(
    federate, points, scalar, half, bank, first, play, mute
):
    algorithm = IFCA(scalar, half, n_groups=2, stable_after=1)
    fed = federate(points(*PLACES, [9.0]), joins=[0, 0, 0, 2])
    state = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)[-1].state
    mute(fed, [3])
    [waiting] = play(algorithm, fed, state, 1, start=2)
    assert waiting.state.assignment.tolist() == [0, 0, 1, -1]
    assert waiting.info["participants"].tolist() == [0, 1, 2]
    fed.faults = None
    [after] = play(algorithm, fed, waiting.state, 1, start=3)
    assert after.state.assignment.tolist() == [0, 0, 1, 1]


# placing


def settled_four(points, scalar, bank, federate, first, play):
    """Members around 0 and around 10, models there, and two clients that never took part."""
    near, far = [[-1.0], [0.0], [1.0]], [[9.0], [10.0], [11.0]]
    data = points(*near, *far, [0.5], [40.0])
    algorithm = IFCA(scalar, LocalSGD(learning_rate=0.0), n_groups=2)
    fed = federate(data, joins=[0] * 6 + [1] * 2)
    state = play(algorithm, fed, first(algorithm, fed, models=bank(0, 10)), 1)[-1].state
    fed.begin(1)
    return algorithm, fed, grow(state, 8)


def test_newcomers_get_the_model_of_smallest_loss(federate, points, scalar, bank, first, play):
    algorithm, fed, start = settled_four(points, scalar, bank, federate, first, play)
    ids = torch.tensor([7, 3, 6, 0])
    state, evidence = algorithm.place(fed, start, ids)
    assert evidence.group.tolist() == [1, 1, 0, 0]
    assert state.assignment.tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    # Losses of 40: 1600 and 900; of 9: 81 and 1; of 0.5: 0.25 and 90.25; of -1: 1 and 121.
    margin = torch.tensor([700 / 2500, 80 / 82, 90 / 90.5, 120 / 122], dtype=torch.float64)
    torch.testing.assert_close(evidence.margin, margin)
    assert evidence.score.isnan().all()
    assert evidence.fits.all()


def test_placing_keeps_the_order_where_some_are_silent(
    federate, points, scalar, bank, first, play, mute
):
    algorithm, fed, state = settled_four(points, scalar, bank, federate, first, play)
    mute(fed, [6, 4])
    ids = torch.tensor([6, 5, 4, 0, 7, 3, 1])
    state, evidence = algorithm.place(fed, state, ids)
    assert evidence.group.tolist() == [-1, 1, 1, 0, 1, 1, 0]
    silent = torch.tensor([True, False, True, False, False, False, False])
    assert torch.equal(evidence.margin.isnan(), silent)
    assert evidence.fits.all()
    assert state.assignment[6] == -1


def test_placing_nobody_who_answers_changes_nothing(
    federate, points, scalar, bank, first, play, mute
):
    algorithm, fed, state = settled_four(points, scalar, bank, federate, first, play)
    mute(fed, [6, 7])
    same, evidence = algorithm.place(fed, state, torch.tensor([7, 6]))
    assert torch.equal(same.assignment, state.assignment)
    assert evidence.group.tolist() == [-1, -1]


# groups given from outside


def test_the_first_round_may_follow_given_groups(
    federate, points, scalar, half, bank, first, play, down_up
):
    # Every client is told the model that fits it less; unlisted clients are assigned at random.
    algorithm, fed = IFCA(scalar, half, n_groups=2), federate(points(*PLACES, [3.0]))
    fed.start = torch.tensor([1, 1, 0, -1])
    told, chosen = play(algorithm, fed, first(algorithm, fed, models=bank(1, 8)), 2)
    assert told.state.assignment[:3].tolist() == [1, 1, 0]
    assert told.state.assignment[3] in (0, 1)
    assert told.state.repeats.tolist() == [0] * 4  # nobody has chosen yet
    model = told.state.models["weight"].flatten()
    expected = [int((model - y).abs().argmin()) for y in (0, 2, 10, 3)]
    assert chosen.state.assignment.tolist() == expected
    assert down_up(fed, 0) == (4 + 8, 4 + 12)  # one model in round 1, two and a choice in round 2


def test_given_groups_beyond_the_models_are_refused(points, scalar, half, first, play):
    algorithm, fed = IFCA(scalar, half, n_groups=2), Simulation(points(*PLACES))
    fed.start = torch.tensor([0, 1, 2])
    with pytest.raises(ConfigError, match=r"start: groups must be 0 to 1, .* Got group 2"):
        play(algorithm, fed, first(algorithm, fed), 1)


# invariants


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_one_group_is_fedavg_bit_for_bit(federate, first, play, averaging):
    data = blobs(n_groups=2, clients_per_group=3, n=20)
    model = Model(models.make("mlp", data, hidden=(4,)))
    local = LocalSGD(learning_rate=0.1, steps=1 if averaging == "gradient" else 5)
    algorithm, plain = IFCA(model, local, n_groups=1, averaging=averaging), FedAvg(model, local)
    fed, other = federate(data), federate(data)
    start = first(algorithm, fed)
    state = first(plain, other, params={n: leaf[0] for n, leaf in start.models.items()})
    ours = play(algorithm, fed, start, 3)[-1].state.models
    theirs = play(plain, other, state, 3)[-1].state.params
    for name, leaf in theirs.items():
        if averaging == "model":
            assert torch.equal(ours[name][0], leaf)
        else:  # averaging gradients, then stepping, rounds elsewhere than the reverse
            torch.testing.assert_close(ours[name][0], leaf, rtol=1e-5, atol=1e-6)


def test_engines_and_chunks_agree(first, play):
    data = blobs(n_groups=2, clients_per_group=4, n=20, unequal=True)
    model = Model(models.make("mlp", data, hidden=(4,)))
    for averaging in ("model", "gradient"):
        local = LocalSGD(learning_rate=0.1, batch_size=6)
        algorithm = IFCA(model, local, n_groups=2, averaging=averaging, weights="samples")
        ends = []
        for options in ({}, {"chunk": 3}, {"stack": False}, {"stack": False, "wire": True}, {}):
            fed = Simulation(data, seed=1, participation=0.7, **options)
            ends.append(play(algorithm, fed, first(algorithm, fed), 3)[-1].state)
        for end in ends[1:]:
            assert torch.equal(end.assignment, ends[0].assignment)
            for a, b in zip(leaves(end.models), leaves(ends[0].models), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        pairs = zip(leaves(ends[-1]), leaves(ends[0]), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_the_order_of_clients_does_not_matter(points, scalar, half, first, play):
    values = {"a": [1.0, 5.0], "b": [2.0, -3.0, 4.0], "c": [8.0, 0.0], "d": [-9.0], "e": [3.0]}
    local = LocalSGD(learning_rate=0.1, batch_size=1)
    algorithm, found = IFCA(scalar, local, n_groups=2, first="random"), []
    for names in ("abcde", "ecadb"):
        fed = Simulation(points(*(values[n] for n in names), names=list(names)), participation=0.6)
        state = play(algorithm, fed, first(algorithm, fed), 4)[-1].state
        found.append((dict(zip(names, state.assignment.tolist(), strict=True)), state.models))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-6)


def test_permuting_the_models_permutes_the_groups(points, scalar, half, bank, first, play):
    algorithm, data = IFCA(scalar, half, n_groups=3), points(*PLACES, [-6.0])
    one, two = (
        play(algorithm, fed, first(algorithm, fed, models=bank(*models)), 2)[-1].state
        for fed, models in (
            (Simulation(data), (1, 8, -3)),
            (Simulation(data), (8, -3, 1)),
        )
    )
    order = torch.tensor([2, 0, 1])  # model j of the first is model order[j] of the second
    assert torch.equal(two.assignment, order[one.assignment])
    assert torch.equal(two.models["weight"][order], one.models["weight"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_groups": 0},
        {"stable_after": 0},
        {"first": "survey"},
        {"averaging": "median"},
    ],
)
def test_options_out_of_range_are_refused(scalar, half, wrong):
    with pytest.raises(ConfigError, match=f"IFCA: {next(iter(wrong))} must be"):
        IFCA(scalar, half, **{"n_groups": 2, **wrong})
