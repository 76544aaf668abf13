"""FedProto worked out by hand: one feature a * x, and a head of two classes that begins at zero."""

import pytest
import torch
from torch import nn

from coterie.algorithms import FedProto
from coterie.checks.trial import answers
from coterie.core import LocalSGD, Model
from coterie.data import from_arrays
from coterie.engines import Simulation

STEP = LocalSGD(0.5)


class OneFeature(nn.Module):
    """With a head of zeros the cross-entropy does not move the body in the first step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.output = nn.Linear(1, 3)
        with torch.no_grad():
            self.body.weight.fill_(2.0)
            self.output.weight.zero_()
            self.output.bias.zero_()

    def forward(self, x):
        return self.output(self.body(x))


MODEL = Model(OneFeature)


def clients(*pairs):
    """Clients from lists of (x, class)."""
    xs = [torch.tensor([[float(x)] for x, _ in rows]) for rows in pairs]
    ys = [torch.tensor([y for _, y in rows]) for rows in pairs]
    return from_arrays(xs, ys, test_fraction=0.0)


def body(fed, client):
    return float(fed.memory.get(client)["params"]["body.weight"])


def test_prototypes_are_averaged_by_the_number_of_samples(federate, first, play):
    # Without training f = 2 x. Class 0: client 0 has x = 1, 1, 1 (mean 2), client 1 x = 3 (mean 6):
    # (3 * 2 + 1 * 6) / 4 = 3, not (2 + 6) / 2. Class 1: client 1 alone, x = 5: 10. Class 2: nobody.
    fed = federate(clients([(1, 0), (1, 0), (1, 0)], [(3, 0), (5, 1)]))
    method = FedProto(MODEL, LocalSGD(0.0))
    (last,) = play(method, fed, first(method, fed), 1)
    assert last.state.prototypes.flatten().tolist() == [3.0, 10.0, 0.0]
    assert last.state.known.tolist() == [True, True, False]


def test_features_are_pulled_to_the_prototype_of_their_class(federate, first, play):
    # Prototypes: class 0 at 5, class 1 unknown. Client: x = 1 (class 0), x = 7 (class 1).
    # The mean over samples: d/da of (1/2) (a - 5)^2 at a = 2 is -3; step 1/2: a = 3.5.
    # The sample of class 1 has no prototype and pulls nothing.
    fed = federate(clients([(1, 0), (7, 1)]))
    method = FedProto(MODEL, STEP, strength=1.0)
    start = first(
        method,
        fed,
        prototypes=torch.tensor([[5.0], [0.0], [0.0]]),
        known=torch.tensor([True, False, False]),
    )
    (last,) = play(method, fed, start, 1)
    assert body(fed, 0) == pytest.approx(3.5)
    # Prototypes are those of the trained body, not of the body on the way there.
    assert last.state.prototypes.flatten().tolist() == pytest.approx([3.5, 24.5, 0.0])


def test_the_server_keeps_the_prototype_of_a_class_nobody_has_now(first, play, mute):
    fed = Simulation(clients([(1, 0)], [(3, 1)]))
    method = FedProto(MODEL, LocalSGD(0.0))
    rounds = play(method, fed, first(method, fed), 1)
    mute(fed, [1])
    rounds += play(method, fed, rounds[-1].state, 1, start=1)
    for played in rounds:
        assert played.state.prototypes.flatten().tolist() == [2.0, 6.0, 0.0]
        assert played.state.known.tolist() == [True, True, False]


def test_the_nearest_prototype_predicts_and_unknown_classes_never_do(first, play):
    fed = Simulation(clients([(1, 0), (3, 1)]))
    method = FedProto(MODEL, LocalSGD(0.0))
    start = first(method, fed)
    x = torch.tensor([[1.2], [2.9], [0.0]])  # features 2.4, 5.8, 0; prototypes 2 and 6
    before = answers(method, fed, start, x)["output"]
    assert before[0].tolist() == [[0.0] * 3] * 3  # no prototypes yet: the head answers
    (last,) = play(method, fed, start, 1)
    said = answers(method, fed, last.state, x)["output"][0]
    assert said.argmax(1).tolist() == [0, 1, 0]
    assert said[0, :2].tolist() == pytest.approx([-0.16, -12.96], abs=1e-5)
    assert bool(torch.isfinite(said).all())
    head = FedProto(MODEL, LocalSGD(0.0), prediction="head")
    assert answers(head, fed, last.state, x)["output"][0].tolist() == [[0.0] * 3] * 3


def test_who_never_took_part_trains_before_it_predicts(first, play, mute):
    # As in the second test, but the client is silent; its prediction is by the trained body.
    fed = Simulation(clients([(1, 0)], [(1, 0)]))
    method = FedProto(MODEL, STEP)
    start = first(
        method,
        fed,
        prototypes=torch.tensor([[5.0], [0.0], [0.0]]),
        known=torch.tensor([True, False, False]),
    )
    mute(fed, [1])
    (last,) = play(method, fed, start, 1)
    said = answers(method, fed, last.state, torch.ones(1, 1))["output"]
    # Client 0: a = 2 - 1/2 * 2 * (2 - 5) = 5, the new prototype: distance 0; so does client 1 now.
    assert said[:, 0, 0].tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert 1 not in fed.memory.committed  # and nothing of it is kept


def test_messages_are_prototypes_and_counts(first, play, down_up):
    fed = Simulation(clients([(1, 0)], [(3, 1)]))
    method = FedProto(MODEL, STEP)
    play(method, fed, first(method, fed), 1)
    n_classes, n_features = 3, 1
    down = 4 * n_classes * n_features + n_classes  # and a byte for each class: known or not
    assert down_up(fed, 0) == (down, 4 * n_classes * (n_features + 1))
