"""FedALA worked out by hand: a body that predicts nothing, and one weight in the top layer."""

import pytest
import torch
from torch import nn

from coterie.algorithms import FedALA, FedAvg
from coterie.algorithms.fedala import top_layers
from coterie.checks import tiny
from coterie.checks.trial import answers
from coterie.core import LocalSGD, Model
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.models import MLP
from tiny import batch, room


class TwoLayers(nn.Module):
    """Predicts the weight of the top layer, times x; the lower weight is not used."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(1, 1, bias=False)
        self.top = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return (self.top(x) + 0 * self.low(x)).squeeze(1)


MODEL = Model(TwoLayers, "squared_error")


def model(low, top):
    return {"low.weight": torch.tensor([[low]]), "top.weight": torch.tensor([[top]])}


def remember(fed, client, own, blend, times):
    fed.memory.committed[client] = {
        "params": own,
        "blend": {"top.weight": torch.tensor([[blend]])},
        "times": torch.tensor(times),
    }


def kept(fed, client):
    memory = fed.memory.get(client)
    return float(memory["params"]["top.weight"]), float(memory["blend"]["top.weight"])


def test_a_later_round_by_hand(federate, points, first, play):
    # Own top weight 1, received 3, share 1: the blend is 3. Samples are 2: the loss is (3 - 2)^2,
    # its slope 2, times (3 - 1) = 4: with eta = 1/16 the share is 3/4 and the blend 2.5.
    # Then one local step of 1/4 goes half the way to 2: 2.25. The lower weight is the received one.
    fed = federate(points([2, 2]))
    method = FedALA(MODEL, LocalSGD(0.25), share=1.0, rate=1 / 16)
    remember(fed, 0, model(9.0, 1.0), 1.0, times=2)
    start = first(method, fed, params=model(5.0, 3.0))
    (last,) = play(method, fed, start, 1)
    assert kept(fed, 0) == pytest.approx((2.25, 0.75))
    assert float(last.state.params["low.weight"]) == 5.0
    assert float(last.state.params["top.weight"]) == pytest.approx(2.25)


def test_shares_stay_between_zero_and_one(points, first, play):
    for y, end in ((-50.0, 0.0), (50.0, 1.0)):
        fed = Simulation(points([y]))
        method = FedALA(MODEL, LocalSGD(0.0), rate=10.0)
        remember(fed, 0, model(0.0, 1.0), 0.5, times=2)
        play(method, fed, first(method, fed, params=model(0.0, 3.0)), 1)
        assert kept(fed, 0)[1] == end


def test_the_first_blend_is_learnt_until_its_losses_settle(points, first, play):
    # From share 1, slope 2 (b - 1/2) * 2 * 2 with own 1, received 3, y = 2: b - 1/2 shrinks by
    # 1 - 8 eta = 1/2 in each epoch, so the losses (2 (b - 1/2))^2 are 1, 1/4, 1/16, ...
    # The standard deviation of the last 2 is half their difference: 3/8, 3/32 < 0.1 after three.
    method = FedALA(MODEL, LocalSGD(0.0), rate=1 / 16, window=2)
    fed = Simulation(points([2]))
    remember(fed, 0, model(0.0, 1.0), 1.0, times=1)
    play(method, fed, first(method, fed, params=model(0.0, 3.0)), 1)
    assert kept(fed, 0)[1] == pytest.approx(0.5 + 0.5 / 8)
    # The next blend takes one epoch, from the share 0.5625 and the model 2.125 that it kept:
    # the blend is 2.125 + 0.875 * 0.5625, its slope 2 * 0.6171875 * 0.875.
    play(method, fed, first(method, fed, params=model(0.0, 3.0)), 1, start=1)
    assert kept(fed, 0)[1] == pytest.approx(0.5625 - 2 * 0.6171875 * 0.875 / 16)


def test_a_cap_ends_the_first_blend(points, first, play):
    fed = Simulation(points([2]))
    method = FedALA(MODEL, LocalSGD(0.0), rate=1 / 16, tolerance=1e-9, max_epochs=4)
    remember(fed, 0, model(0.0, 1.0), 1.0, times=1)
    play(method, fed, first(method, fed, params=model(0.0, 3.0)), 1)
    assert kept(fed, 0)[1] == pytest.approx(0.5 + 0.5 / 16)


def test_equal_models_do_not_make_it_the_first_exchange_again(points, first, play):
    # Own and received weight agree, as in the first exchange; the count of exchanges decides.
    fed = Simulation(points([2]))
    method = FedALA(MODEL, LocalSGD(0.0))
    remember(fed, 0, model(3.0, 3.0), 0.25, times=2)
    play(method, fed, first(method, fed, params=model(3.0, 3.0)), 1)
    assert kept(fed, 0) == (3.0, 0.25)  # no difference, no slope: the share stays
    assert int(fed.memory.get(0)["times"]) == 3


def test_the_epochs_loss_is_that_of_all_its_samples(points, first, play):
    # Batches of one with rate 0: every epoch's loss is the same, so the first blend ends after
    # `window` epochs; the losses of last batches alone, 0 or 100 at random, would go on to the cap.
    fed = Simulation(points([3.0, 13.0, 3.0, 13.0, 3.0]))
    calls = []
    counted = Model(TwoLayers, loss=lambda out, batch: calls.append(1) or (out - batch.y) ** 2)
    method = FedALA(counted, LocalSGD(0.0, batch_size=1), rate=0.0, share=1.0, window=3)
    remember(fed, 0, model(0.0, 1.0), 1.0, times=1)
    start = first(method, fed, params=model(0.0, 3.0))
    calls.clear()
    play(method, fed, start, 1)
    assert len(calls) == 3 * 5 + 5  # three epochs of the blend, and one of local training


def test_the_blend_is_learnt_on_a_random_subset_not_on_a_slice(first, play):
    # Forty samples sorted by label; the blend sees 20 of them. Each sample tells which it is by its
    # place in x, and only samples that were seen have a slope.
    seen = []

    def loss(output, batch):
        seen.append(batch.x.flatten())
        return (output - batch.y) ** 2

    x = torch.arange(1.0, 41.0)[:, None]
    fed = Simulation(from_arrays([x], [x.flatten()], test_fraction=0.0), stack=False)
    method = FedALA(Model(TwoLayers, loss), LocalSGD(0.0, epochs=0), share=0.5)
    remember(fed, 0, model(0.0, 1.0), 1.0, times=2)
    start = first(method, fed, params=model(0.0, 3.0))
    seen.clear()
    play(method, fed, start, 1)
    rows = torch.func.debug_unwrap(seen[0], recurse=True).flatten().long().sort().values.tolist()
    assert len(rows) == len(set(rows)) == 20
    assert rows != list(range(rows[0], rows[0] + 20))


def test_top_layers_are_counted_with_all_their_weights():
    params = Model(MLP(4, 3, hidden=(5,))).init(torch.tensor(0))
    assert top_layers(params, 0) == []
    assert top_layers(params, 1) == ["output.weight", "output.bias"]
    assert top_layers(params, 9) == list(params)


@pytest.mark.parametrize(
    "options", [{"layers": 0}, {"rate": 0.0}], ids=["no layers", "shares of 1"]
)
def test_without_a_blend_it_is_fedavg(options, play, first):
    problem = tiny()
    ends = []
    for method in (
        FedALA(problem.model, problem.local, **options),
        FedAvg(problem.model, problem.local),
    ):
        fed = Simulation(problem.data, stack=False, participation=0.5)
        ends.append(play(method, fed, first(method, fed), 3)[-1].state.params)
    for name, leaf in ends[0].items():
        # own + (received - own) rounds
        assert torch.allclose(leaf, ends[1][name], atol=1e-12)


def test_who_did_not_take_part_keeps_what_it_had(play, first):
    problem = tiny()
    fed = Simulation(problem.data, participation=0.5)
    method = FedALA(problem.model, problem.local)
    rounds = play(method, fed, first(method, fed), 1)
    before = dict(fed.memory.committed)
    play(method, fed, rounds[-1].state, 1, start=1)
    answered = {int(i) for i in fed.cohort()}
    for client in set(before) - answered:
        assert fed.memory.get(client) is before[client]


def test_a_client_predicts_with_its_blend_or_with_what_it_trained(points, first):
    fed = Simulation(points([2], [7]))
    remember(fed, 0, model(0.0, 1.0), 1.0, times=2)
    x = torch.ones(1, 1)
    for prediction, own in (("blended", 2.5), ("trained", 1.0)):
        method = FedALA(MODEL, LocalSGD(0.25), share=1.0, rate=1 / 16, prediction=prediction)
        state = first(method, fed, params=model(5.0, 3.0))
        said = answers(method, fed, state, x)["output"].flatten()
        assert said.tolist() == pytest.approx([own, 3.0])  # who never took part: the average
    assert kept(fed, 0) == (1.0, 1.0)  # predicting changes nothing


def test_messages_are_a_model_each_way(points, first, play, down_up):
    fed = Simulation(points([0.0, 1.0], [3.0]))
    method = FedALA(MODEL, LocalSGD(0.25))
    play(method, fed, first(method, fed), 1)
    assert down_up(fed, 0) == (8, 8 + 8)  # two weights; and the number of samples


def test_without_data_a_client_blends_by_the_shares_it_has(points):
    # As when a saved run predicts: own 1, received 3, share 3/4.
    fed = Simulation(points([2]))
    remember(fed, 0, model(0.0, 1.0), 0.75, times=2)
    train = batch(torch.zeros(0, 1))
    client = room(train)._replace(state=fed.memory.get(0))
    start, _ = FedALA(MODEL, LocalSGD(0.25)).blend(client, model(5.0, 3.0))
    assert float(start["top.weight"]) == 2.5
    assert float(start["low.weight"]) == 5.0
