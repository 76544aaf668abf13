"""FlexCFL worked out by hand on clients that hold numbers."""

import pytest
import torch

from coterie.algorithms import FedAvg, FlexCFL
from coterie.algorithms.flexcfl import edc, madc, mix
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.data import blobs, from_arrays
from coterie.engines import Simulation
from coterie.models import MLP

FAR = ([-20.0], [20.0], [-22.0], [22.0])


def weights(state):
    return state.models["weight"].flatten().tolist()


def in_order(state, low, high):
    """Models of the groups of two clients."""
    found = weights(state)
    return [found[int(state.assignment[low])], found[int(state.assignment[high])]]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_the_first_groups_by_hand(federate, points, scalar, half, first, measure):
    # One step goes half the way from w: members of the lower group train to (w - 20) / 2 and
    # (w - 22) / 2, all alike whatever their number of samples; the direction is their mean update.
    fed = federate(points([-20.0] * 3, *FAR[1:]))
    method = FlexCFL(scalar, half, n_groups=2, measure=measure, pretrain_steps=1)
    state = first(method, fed)
    w = float(state.start["weight"])
    group = state.assignment
    assert group[0] == group[2] != group[1] == group[3]
    assert in_order(state, 0, 1) == pytest.approx([(w - 21) / 2, (w + 21) / 2])
    assert state.directions[group[:2]].flatten().tolist() == pytest.approx(
        [(-21 - w) / 2, (21 - w) / 2]
    )


def test_a_round_is_fedavg_in_each_group(federate, points, scalar, half, bank, first, play):
    # From 1: half the way to 0 (one sample) and 2 (three): (0.5 + 3 * 1.5) / 4. From 8 to 9.
    fed = federate(points([0.0], [2.0] * 3, [10.0]))
    method = FlexCFL(scalar, half, n_groups=2)
    start = first(method, fed, models=bank(1, 8), assignment=torch.tensor([0, 0, 1]))
    [after] = play(method, fed, start, 1)
    assert weights(after.state) == [1.25, 9.0]
    assert after.info["groups_used"] == 2


def test_both_of_two_different_updates_count(points, scalar, half, bank, first, play):
    # Public code gives all weight to the first client: 4 -> 2 instead of (2 + 6) / 2.
    method, fed = FlexCFL(scalar, half, n_groups=1), Simulation(points([0.0], [8.0]))
    [after] = play(method, fed, first(method, fed, models=bank(4)), 1)
    assert weights(after.state) == [4.0]


def test_weights_of_a_mean_add_up_to_one(points, scalar, bank, first, play):
    # Public code adds 1e-5 to the sum of the weights; without work a model must stay as it is.
    idle = LocalSGD(0.0)
    method, fed = FlexCFL(scalar, idle, n_groups=1), Simulation(points([0.0], [8.0]))
    assert weights(play(method, fed, first(method, fed, models=bank(1e6)), 3)[-1].state) == [1e6]


# measures


def test_edc_is_the_cosine_with_the_leading_singular_vectors():
    updates = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)).double()
    u = torch.linalg.svd(updates.mT, full_matrices=False)[0][:, :3]  # [p, 3]
    expected = torch.nn.functional.normalize(updates) @ u
    found = edc(updates, 3)
    signs = (found * expected).sum(0).sign()
    torch.testing.assert_close(found * signs, expected)


def test_edc_survives_updates_of_zero():
    assert edc(torch.zeros(3, 4).double(), 2).tolist() == [[0, 0]] * 3


def test_madc_by_hand():
    # Updates at 0, 60 and 180 degrees: cosines 0-1 0.5, 0-2 -1, 1-2 -0.5. Each pair is compared by
    # its cosines with the third: |-1 - -0.5|, |0.5 - -0.5|, |0.5 - -1|.
    updates = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5], [-1.0, 0.0]]).double()
    found = madc(updates)
    expected = torch.tensor([[0, 0.5, 1.0], [0.5, 0, 1.5], [1.0, 1.5, 0]]).double()
    torch.testing.assert_close(found, expected)


# clients that come later


def test_only_some_clients_are_clustered_and_the_others_join_when_they_take_part(
    federate, points, scalar, half, first, play
):
    fed = federate(points(*FAR * 3))
    method = FlexCFL(scalar, half, n_groups=2, pretrain_steps=1, pretrain_clients=3)
    state = first(method, fed)
    assert int((state.assignment >= 0).sum()) == 6
    [after] = play(method, fed, state, 1)
    group = after.state.assignment
    assert all(int(group[i]) == int(group[i % 2]) for i in range(12))
    assert group[0] != group[1]


def test_a_newcomer_joins_the_group_of_the_nearest_direction(points, scalar, half, first, play):
    data = points(*FAR, [-3.0], names=list("abcde"))
    fed = Simulation(data, joins=[0, 0, 0, 0, 2])
    method = FlexCFL(scalar, half, n_groups=2, pretrain_steps=1)
    state = play(method, fed, first(method, fed), 2)[-1].state
    fed.begin(2)
    state, found = method.place(fed, grow(state, 5), torch.tensor([4]))
    assert state.assignment[4] == state.assignment[0] == found.group[0]
    assert float(found.margin[0]) == pytest.approx(1)  # one cosine is 1, the other -1


# mixing


def test_mixing_by_hand():
    # w = (2, 4), strength 1: (2 + 4/4) / (1 + 1/4) and (4 + 2/2) / (1 + 1/2).
    mixed = mix({"weight": torch.tensor([[2.0], [4.0]])}, 1.0)
    assert mixed["weight"].flatten().tolist() == pytest.approx([3 / 1.25, 5 / 1.5])


def test_mixing_leaves_buffers_and_equal_models_alone():
    models = {"weight": torch.ones(3, 2), "buffer:mean": torch.tensor([1.0, 2.0, 3.0])}
    mixed = mix(models, 0.5)
    torch.testing.assert_close(mixed["weight"], models["weight"])
    assert torch.equal(mixed["buffer:mean"], models["buffer:mean"])


def test_a_round_mixes_after_the_mean(points, scalar, half, bank, first, play):
    fed = Simulation(points([3.0], [0.0]))  # 1 -> 2 and 8 -> 4
    method = FlexCFL(scalar, half, n_groups=2, mixing=1.0)
    start = first(method, fed, models=bank(1, 8), assignment=torch.tensor([0, 1]))
    [after] = play(method, fed, start, 1)
    assert weights(after.state) == pytest.approx([3 / 1.25, 5 / 1.5])


# migration


def labelled(*clients):
    """Clients with inputs 1, 0 or 0, 1 by class, and these labels."""
    ys = [torch.tensor(labels) for labels in clients]
    eye = torch.eye(3)
    return from_arrays([eye[y] for y in ys], ys, test_fraction=0.0, n_outputs=3)


@pytest.mark.parametrize(("share", "moves"), [(None, False), (0.2, True), (2.5, False)])
def test_a_client_whose_labels_changed_is_grouped_anew(federate, first, play, share, moves):
    # Client 3 had class 0 only and has class 1 only now. Sorted, its counts are the same, which is
    # all that public code compares. The differences add up to 12: above 0.2 * 6, below 2.5 * 6.
    before = labelled([0] * 6, [1] * 6, [1] * 6, [0] * 6)
    after = labelled([0] * 6, [1] * 6, [1] * 6, [1] * 6)
    model = Model(lambda: torch.nn.Linear(3, 3, bias=False))
    method = FlexCFL(model, LocalSGD(0.5), n_groups=2, pretrain_steps=5, migration=share)
    fed = federate(before)
    state = first(method, fed)
    assert state.assignment[3] == state.assignment[0] != state.assignment[1]
    later = federate(after)
    later.memory.committed = fed.memory.committed
    [one] = play(method, later, state, 1)
    old, new = state.assignment[0], state.assignment[1]
    assert one.state.assignment[3] == (new if moves else old)
    assert torch.equal(one.state.assignment[:3], state.assignment[:3])


def test_migration_needs_labels(scalar, half):
    with pytest.raises(ConfigError, match="FlexCFL: migration needs labels"):
        FlexCFL(scalar, half, n_groups=2, migration=0.2)


# the rest


def test_one_group_trains_as_fedavg(first, play):
    data = blobs(n_groups=2, clients_per_group=2, n=12)
    model = Model(lambda: MLP(data.sample_shape[0], data.n_outputs, hidden=(4,)))
    local = LocalSGD(0.1, batch_size=4)
    method, plain = FlexCFL(model, local, n_groups=1), FedAvg(model, local)
    fed, other = Simulation(data), Simulation(data)
    state, same = first(method, fed), first(plain, other)
    params = {name: leaf[0] for name, leaf in state.models.items()}
    ours = play(method, fed, state, 2)[-1].state.models
    theirs = play(plain, other, same._replace(params=params), 2)[-1].state.params
    for name, leaf in theirs.items():
        torch.testing.assert_close(ours[name][0], leaf)


def test_messages_are_a_model_each_way(points, scalar, half, first, play, down_up):
    method, fed = FlexCFL(scalar, half, n_groups=2), Simulation(points([0.0, 1.0], [3.0]))
    state = first(method, fed)
    assert down_up(fed, 0) == (4, 4)  # before the first round
    play(method, fed, state, 1)
    assert down_up(fed, 0) == (4, 4 + 8)  # and the number of samples
