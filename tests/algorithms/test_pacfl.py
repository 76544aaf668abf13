"""PACFL worked out by hand on clients whose inputs lie on lines and planes."""

import math

import pytest
import torch

from coterie.algorithms import PACFL, FedAvg
from coterie.algorithms.pacfl import angles, orthonormal
from coterie.core import LocalSGD, Model
from coterie.core.algorithm import grow
from coterie.core.errors import ConfigError
from coterie.data import blobs, from_arrays
from coterie.engines import Simulation
from coterie.models import MLP, LinearRegressor

DRAW = torch.Generator().manual_seed(0)


def line(degrees):
    angle = math.radians(degrees)
    return [math.cos(angle), math.sin(angle)]


def on_lines(*degrees, names=None):
    """Clients with two samples on a line through 0, and targets 1 and 2."""
    xs = [torch.tensor([line(d), [2 * c for c in line(d)]]) for d in degrees]
    return from_arrays(xs, [torch.tensor([1.0, 2.0])] * len(xs), test_fraction=0.0, names=names)


PLANE = Model(LinearRegressor(2), "squared_error")
QUARTER = LocalSGD(0.25)


def groups_of(state):
    return [sorted((state.assignment == g).nonzero().flatten().tolist()) for g in range(10)]


def bases(*vectors):
    """One client with one class."""
    return torch.tensor(vectors)[None, None].double()


# angles


def test_the_angle_of_two_planes():
    # The planes spanned by e1, e2 and by e3, cos 30 e1 + sin 30 e4 are 30 degrees apart.
    one = bases([1.0, 0, 0, 0], [0.0, 1, 0, 0])
    two = bases([0.0, 0, 1, 0], [math.cos(math.pi / 6), 0, 0, math.sin(math.pi / 6)])
    assert float(angles(one, two, "smallest")) == pytest.approx(30)
    assert float(angles(one, two, "sum")) == pytest.approx(180)  # e1 to e3, e2 to the other


def test_signs_of_singular_vectors_change_nothing():
    # Public code takes the smallest arc cosine of signed entries: 150 degrees instead of 30.
    one, two = bases([1.0, 0.0]), bases([math.cos(math.pi / 6), math.sin(math.pi / 6)])
    for kind in ("smallest", "sum"):
        assert float(angles(one, two, kind)) == pytest.approx(30)
        assert float(angles(one, -two, kind)) == pytest.approx(30)


def test_the_choice_of_a_basis_changes_nothing():
    # Entries of the product depend on the bases; the angle between the subspaces does not.
    one = torch.linalg.qr(torch.randn(5, 2, generator=DRAW).double())[0].mT[None, None]
    two = torch.linalg.qr(torch.randn(5, 2, generator=DRAW).double())[0].mT[None, None]
    turned = torch.tensor([line(40), [-line(40)[1], line(40)[0]]]).double() @ one
    expected = angles(one, two, "smallest")
    torch.testing.assert_close(angles(turned, two, "smallest"), expected)


def test_directions_of_several_classes_need_not_be_orthogonal():
    # Two classes along nearly the same line span a plane; e3 is at a right angle to it.
    one = torch.tensor([[[[*line(0), 0.0]], [[*line(10), 0.0]]]]).double()
    two = torch.tensor([[[[0.0, 0, 1]], [[0.0, 1, 1]]]]).double() / math.sqrt(2)
    q = orthonormal(one)[0]
    torch.testing.assert_close(q @ q.mT, torch.eye(2).double())
    assert float(angles(one, two[:, :1], "smallest")) == pytest.approx(90)
    assert float(angles(one, two, "smallest")) == pytest.approx(0, abs=1e-5)  # e2 is in both


def test_a_class_that_only_one_client_has_counts_90_degrees():
    nothing = torch.zeros(1, 1, 2).double()
    one = torch.stack([bases(line(0))[0, 0], nothing[0], nothing[0]])[None]
    two = torch.stack([bases(line(20))[0, 0], bases(line(5))[0, 0], nothing[0]])[None]
    assert float(angles(one, two, "sum")) == pytest.approx(20 + 90)


# clusters


def test_a_round_by_hand(federate, first, play):
    # Clients on the lines at 0, 2, 90 and 92 degrees. Targets are the distances from 0, so a step
    # of 1/4 from 0 along 2 y x, averaged over (1, 2), moves 1/4 * 2 * (1 + 4) / 2 along the line.
    fed = federate(on_lines(0, 90, 2, 92))
    method = PACFL(PLANE, QUARTER, threshold=5)
    state = first(method, fed)
    assert groups_of(state)[:2] in ([[0, 2], [1, 3]], [[1, 3], [0, 2]])
    zeros = {name: torch.zeros_like(leaf) for name, leaf in state.models.items()}
    [after] = play(method, fed, state._replace(models=zeros), 1)
    for pair in ((0, 2), (90, 92)):
        expected = 1.25 * torch.tensor([line(d) for d in pair]).mean(0)
        group = after.state.assignment[0 if pair[0] == 0 else 1]
        found = after.state.models["weight"][group].flatten()
        torch.testing.assert_close(found, expected)
    assert after.info["groups_used"] == 2


def test_the_threshold_and_the_number_of_clusters(first):
    data = on_lines(0, 3, 20, 23, 60)
    sizes = {}
    for options in ({"threshold": 1}, {"threshold": 5}, {"threshold": 89}, {"n_groups": 3}):
        state = first(PACFL(PLANE, QUARTER, **options), Simulation(data))
        sizes[str(options)] = sorted(len(g) for g in groups_of(state) if g)
    assert list(sizes.values()) == [[1] * 5, [1, 2, 2], [5], [1, 2, 2]]


def test_average_linkage_counts_every_member(first):
    # 0 and 2 merge, then 5 joins (mean of 5 and 3 is 4). 12 is 12, 10, 7 from these, mean 9.67;
    # without sizes it would be (11 + 7) / 2 = 9.
    state = first(PACFL(PLANE, QUARTER, threshold=9.5), Simulation(on_lines(0, 2, 5, 12)))
    assert sorted(len(g) for g in groups_of(state) if g) == [1, 3]


def test_few_samples_of_a_class_give_few_directions():
    data = from_arrays([torch.tensor([[3.0, 4.0]])], [torch.tensor([1.0])], test_fraction=0.0)
    fed = Simulation(data)
    fed.begin(-1)
    _, reply = fed.map(PACFL(PLANE, QUARTER, n_groups=1).directions, to=fed.everyone())
    sent = reply["bases"]
    assert sent.shape == (1, 1, 3, 2)
    torch.testing.assert_close(sent[0, 0, 0].abs(), torch.tensor([0.6, 0.8]))
    assert not sent[0, 0, 1:].any()


@pytest.mark.parametrize("options", [{"threshold": 5}, {"n_groups": 2}])
def test_newcomers_join_or_open_a_cluster(first, play, options):
    data = on_lines(0, 90, 2, 92, 1, 45, 46, names=list("abcdefg"))
    fed = Simulation(data, joins=[0] * 4 + [1] * 3)
    method = PACFL(PLANE, QUARTER, **options)
    [after] = play(method, fed, first(method, fed), 1)
    fed.begin(1)
    state = grow(after.state, 7)
    state, found = method.place(fed, state, torch.tensor([4, 5, 6]))
    group = state.assignment.tolist()
    assert group[4] == group[0] == group[2]
    if "threshold" in options:  # 45 opens a cluster, and 46 joins it
        assert group[5] == group[6] == 2
        assert found.fits.tolist() == [True, False, True]
        assert torch.equal(state.models["weight"][2], state.start["weight"])
    else:
        assert set(group) == {0, 1}
        assert found.fits.all()
    [later] = play(method, fed, state, 1, start=1)
    assert later.state.assignment.tolist() == group  # clusters are fixed


def test_a_known_client_is_judged_without_itself(first):
    fed = Simulation(on_lines(0, 4, 90, 92))
    method = PACFL(PLANE, QUARTER, threshold=5)
    state = first(method, fed)
    fed.begin(0)
    same, found = method.place(fed, state, torch.tensor([0]))
    assert float(found.score[0]) == pytest.approx(4 / 5)
    assert torch.equal(same.assignment, state.assignment)


def test_one_cluster_is_fedavg(first, play):
    data = blobs(n_groups=2, clients_per_group=2, n=12)
    model = Model(lambda: MLP(data.sample_shape[0], data.n_outputs, hidden=(4,)))
    local = LocalSGD(0.1, batch_size=4)
    method, plain = PACFL(model, local, n_groups=1), FedAvg(model, local)
    fed, other = Simulation(data), Simulation(data)
    ours = play(method, fed, first(method, fed), 2)[-1].state.models
    theirs = play(plain, other, first(plain, other), 2)[-1].state.params
    for name, leaf in theirs.items():
        torch.testing.assert_close(ours[name][0], leaf)


def test_messages_are_the_directions_once_and_a_model_each_way(first, play, down_up):
    fed = Simulation(on_lines(0, 90))
    method = PACFL(PLANE, QUARTER, n_groups=2, n_vectors=1)
    state = first(method, fed)
    assert down_up(fed, 0) == (0, 1 * 1 * 2 * 4)  # p * classes * inputs numbers
    play(method, fed, state, 1)
    size = sum(leaf[0].numel() for leaf in state.models.values()) * 4
    assert down_up(fed, 0) == (size, size + 8)  # and the number of samples


def test_a_number_or_a_threshold_must_be_given():
    for options in ({}, {"n_groups": 2, "threshold": 5.0}):
        with pytest.raises(ConfigError, match=r"PACFL: give n_groups or threshold"):
            PACFL(PLANE, QUARTER, **options)
