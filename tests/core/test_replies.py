"""A reply is checked before it counts, and who sent a faulty one is named."""

import warnings

import pytest
import torch

from coterie.core.aggregate import Mean
from coterie.core.policy import Policy
from coterie.core.replies import Inspector, Record, find_misfit, shapes_of
from coterie.core.tree import tree_map
from coterie.engines import Simulation
from tiny import ENGINES, ragged

SIZES = torch.tensor([10, 10, 10, 10, -1])


def inspect(reply, means=(), **options):
    looker = Inspector(means, SIZES, **options)
    position, rest = looker.check(torch.arange(5), reply)
    for more, _ in looker.judge():
        position = torch.cat([position, more])
    return position.tolist(), [tuple(fault) for fault in looker.faults], rest


@pytest.mark.parametrize(
    ("n", "why"),
    [
        (11, "sent 11 samples in 'n', but declared 10"),
        (10**18, "sent 1e+18 samples in 'n', but declared 10"),
        (-1, "sent -1 as weight 'n'"),
        (0, "sent 0 samples in 'n', but declared 10"),
    ],
)
def test_counts_fit_what_was_declared(n, why):
    found = inspect({"n": torch.tensor([1, 10, n, 2, 10**9])})  # the last has declared nothing
    assert found[:2] == ([0, 1, 3, 4], [(2, why)])


def test_a_group_or_class_may_have_no_samples():
    assert inspect({"n": torch.tensor([[0.0, 0.0], *[[0.0, 9.0]] * 4])})[1] == []
    assert inspect({"n": torch.zeros(5)}, [])[0] == [4]  # the last has declared nothing


def test_values_that_nobody_can_have_are_left_out():
    losses = torch.tensor([[1.0, 2.0], [1e30, 0.0], [-1e30, 1.0], [-1e-6, 3.0], [torch.nan, 1.0]])
    found = inspect({"losses": losses}, limits={"losses": (0.0, float("inf"))}, strict=False)
    assert found[:2] == ([0, 1, 3, 4], [(2, "sent -1e+30 in 'losses', which is 0 or more")])
    shares = torch.tensor([0.0, 1.0, 57.0, torch.nan, 0.5])
    found = inspect({"accuracy": shares}, limits={"accuracy": (0.0, 1.0)}, strict=False)
    assert found[:2] == ([0, 1, 3, 4], [(2, "sent 57 in 'accuracy', which is between 0 and 1")])


@pytest.mark.parametrize(("loss", "low"), [("cross_entropy", 0.0), (lambda o, b: -b.y, None)])
def test_a_loss_may_be_negative_if_it_is_the_users_own(loss, low):
    from coterie.algorithms import IFCA
    from coterie.core.model import Model
    from coterie.core.training import LocalSGD
    from coterie.models import MLP

    method = IFCA(Model(MLP(4, 3, hidden=(2,)), loss), LocalSGD(), n_groups=2)
    limits = Simulation(ragged(5, 6)).call(method.losses, (), torch.arange(2)).limits
    assert limits == ({} if low is None else {"losses": (low, float("inf"))})


def test_shares_of_samples_may_be_rounded():
    n = torch.full((5, 3), 10 / 3 * 1.00001)
    mean = Mean("w", torch.zeros(3), weight="n_part", slots=True)
    assert inspect({"w": torch.ones(5, 3), "n_part": n}, [mean])[1] == []
    assert inspect({"w": torch.ones(5, 3), "n_part": 2 * n}, [mean])[0] == [4]


def test_a_weight_that_is_no_count_may_be_of_any_size_but_not_below_zero():
    mean = Mean("w", torch.zeros(()), weight="trust")
    trust = torch.tensor([1.0, 500.0, 2.0, -0.1, 3.0])
    found = inspect({"w": torch.ones(5), "trust": trust}, [mean])
    assert found[:2] == ([0, 1, 2, 4], [(3, "sent -0.1 as weight 'trust'")])


@pytest.mark.parametrize("group", [3, 99, -1])
def test_groups_must_exist(group):
    mean = Mean("w", torch.zeros(3, 2), by="group")
    reply = {"w": torch.ones(5, 2), "group": torch.tensor([0, group, 2, 1, 0])}
    positions, faults, rest = inspect(reply, [mean])
    assert positions == [0, 2, 3, 4]
    assert faults == [(1, f"sent group {group}, but groups are 0 to 2")]
    assert rest["group"].tolist() == [0, 2, 1, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("leaf", ["w", "losses"])
def test_values_must_be_finite(value, leaf):
    reply = {"w": torch.ones(5, 2), "losses": torch.ones(5, 3)}
    reply[leaf][2, 1] = value
    found = inspect(reply, [Mean("w", torch.zeros(2))])
    assert found[:2] == ([0, 1, 3, 4], [(2, "sent values that are not finite")])


def test_where_most_replies_are_not_finite_the_model_is_to_blame():
    reply = {"losses": torch.tensor([torch.nan, torch.inf, 1.0, torch.nan, 2.0])}
    positions, faults, _ = inspect(reply)
    assert (sorted(positions), faults) == ([0, 1, 2, 3, 4], [])


def test_tasks_may_send_values_that_are_not_finite():
    assert inspect({"score": torch.tensor([1.0, torch.nan, 1, 1, 1])}, strict=False)[1] == []


@pytest.mark.parametrize("size", [1e7, 1e30, 3e38])
def test_wild_values_are_left_out(size):
    w = torch.ones(5, 2)
    w[3] = size
    positions, faults, _ = inspect({"w": w}, [Mean("w", torch.ones(2))])
    assert positions == [0, 1, 2, 4]
    assert faults[0][1].startswith("sent values in 'w' of length")
    assert inspect({"w": w.clamp(max=1e5)}, [Mean("w", torch.ones(2))])[1] == []


def test_the_first_of_all_replies_is_measured_by_the_present_model():
    looker = Inspector([Mean("w", torch.ones(2))], SIZES)
    looker.check(torch.tensor([0]), {"w": torch.full((1, 2), 1e30)})
    assert [fault.position for fault in looker.faults] == [0]


def test_structure():
    expected = shapes_of({"w": {"a": torch.zeros(2)}, "n": torch.tensor(1), "e": {}})
    good = {"w": {"a": torch.ones(2)}, "n": torch.tensor(5), "e": {}}
    assert find_misfit(good, expected) is None
    one = torch.tensor(1)
    for bad, why in [
        ([one], "sent a list"),
        ({"w": {"a": torch.ones(3)}, "n": one, "e": {}}, "of shape [3], not float32 of shape [2]"),
        ({"w": {"a": torch.ones(2).double()}, "n": one, "e": {}}, "float64"),
        ({"w": {"a": torch.ones(2)}, "e": {}}, "did not send 'n'"),
        ({"w": {"a": torch.ones(2)}, "n": one}, "did not send 'e'"),
        ({**good, "z": one}, "sent 'z', which the task does not send"),
        ({"n": one, "w": {"a": torch.ones(2)}, "e": {}}, "in another order"),
        ({"w/a": torch.ones(2), "n": one, "e": {}}, "did not send 'w/a'"),
        ({"w": {"a": torch.ones(2)}, "n": one, "e": []}, "sent 'e' as list"),
    ]:
        assert why in str(find_misfit(bad, expected))
    assert find_misfit({"l": {"0": one}}, shapes_of({"l": [one]})) is not None


class Liar(Simulation):
    """One client's replies are changed before the server reads them."""

    lie = staticmethod(lambda reply: reply)

    def exchange(self, call):
        for position, reply in super().exchange(call):
            own = (call.ids[position] == 1).nonzero()[:, 0]
            if len(own) and call.phase != "evaluation":
                reply = tree_map(torch.clone, reply)
                self.lie(reply, own)
            yield position, reply


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_too_many_faults_is_asked_no_more(engine):
    from coterie.algorithms import FedAvg
    from coterie.core.model import Model
    from coterie.core.training import LocalSGD
    from coterie.models import MLP

    def lie(reply, own):
        reply["n"][own] = 10**12

    method = FedAvg(Model(MLP(4, 3, hidden=(2,)), dtype=torch.float64), LocalSGD())
    fed = Liar(ragged(5, 6, 7, 8), **ENGINES[engine])
    fed.lie, fed.policy = lie, Policy(strikes=2)
    asked = []
    plain = fed.exchange
    fed.exchange = lambda call: asked.append(call.ids.tolist()) or plain(call)
    state = method.init(fed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            fed.begin(number)
            state, _ = method.step(fed, state)
    assert asked == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3]]
    words = [str(warning.message) for warning in said]
    assert len(words) == 2
    assert words[0] == (
        "FedAvg.update: 'client-1' sent 1e+12 samples in 'n', but declared 6. Its reply is left "
        "out."
    )
    assert words[1].endswith("This was fault 2: it is asked no more.")
    faults = fed.record.take()["faults"]
    assert [fault["client"] for fault in faults] == ["client-1", "client-1"]
    again = Record()
    again.restore([{"faults": faults[:1]}, {}, {"faults": faults[1:]}])
    assert again.counts == {"client-1": 2}
