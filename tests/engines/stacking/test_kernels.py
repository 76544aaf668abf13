import itertools
import warnings

import pytest
import torch
from torch import nn

from coterie.algorithms import FedAvg
from coterie.core.algorithm import play
from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.ops import Fit, Loop, using
from coterie.core.random import seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import tree_map
from coterie.engines import Simulation
from coterie.engines.stacking.kernels import HEAVY, Stacked
from tiny import alone, centre, mean_model, ragged, rooms

KEY = seed_key(0)


def fit(data, model, local, params, losses=None):
    with using(Stacked()):
        return torch.vmap(lambda c: local(c, params, losses or model.losses))(rooms(data))


def test_who_finishes_early_stays_as_it_was_then():
    # A step of 0.5 goes all the way to its row; batches of one row, so n steps.
    data = ragged(1, 3, shape=(1,))
    x = data.gather("train", torch.arange(2)).x
    local = LocalSGD(0.5, batch_size=1)
    trained = fit(data, mean_model(), local, centre(0.0))
    assert trained["centre"][0].item() == pytest.approx(x[0, 0, 0].item())
    assert trained["centre"][1].item() in [pytest.approx(v) for v in x[1].flatten().tolist()]


def test_unequal_amounts_of_work_in_one_stack_keep_optimiser_states_apart():
    model, data = Model(nn.Sequential(nn.Linear(4, 3)), dtype=torch.float64), ragged(2, 9, 4)
    local = LocalSGD(0.05, epochs=2, batch_size=2, optimizer="adam")
    params = model.init(KEY)
    together = fit(data, model, local, params)
    for i in range(3):
        own = local(alone(data, i), params, model.losses)
        assert torch.allclose(own["0.weight"], together["0.weight"][i], atol=1e-12)


def test_the_stack_is_given_back_in_the_order_it_came():
    # Full batches: every client goes all the way to its own mean.
    data = ragged(2, 5, 1, 3, shape=(1,))
    trained = fit(data, mean_model(), LocalSGD(0.5), centre(0.0))
    batch = data.gather("train", torch.arange(4))
    means = torch.vmap(lambda b: b.mean(b.x.flatten()))(batch)
    assert torch.allclose(trained["centre"], means, atol=1e-12)


def test_a_fallback_warns_once_for_each_loss():
    kernel = Stacked()

    def losses(params, batch, key):
        if batch.x.sum() > 1e9:  # an `if` on a tensor
            return batch.x.flatten()
        return (params["centre"] - batch.x.flatten()).square()

    with using(kernel), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            trained = torch.vmap(lambda c: LocalSGD(0.5)(c, centre(0.0), losses))(
                rooms(ragged(2, 2, shape=(1,)))
            )
    assert len(caught) == 1
    assert "losses cannot be stacked, so its clients train one at a time" in str(caught[0].message)
    assert trained["centre"].shape == (2,)


def test_an_error_in_the_loss_is_not_called_a_matter_of_stacking():
    def losses(params, batch, key):
        raise RuntimeError("mine")

    clients = rooms(ragged(2, 2, shape=(1,)))
    with using(Stacked()), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="mine"):
            torch.vmap(lambda c: LocalSGD(0.5)(c, centre(0.0), losses))(clients)


def test_the_kernel_does_not_write_into_what_it_was_given():
    model, data = Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), ragged(2, 3)
    params = model.init(KEY)
    before = tree_map(torch.clone, params)
    fit(data, model, LocalSGD(0.5, epochs=3, batch_size=1, momentum=0.5), params)
    assert all(torch.equal(params[name], before[name]) for name in params)


def test_integer_buffers_stay_integers():
    model = Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    trained = fit(ragged(2, 5), model, LocalSGD(0.1, batch_size=2), model.init(KEY))
    assert trained["buffer:1.num_batches_tracked"].tolist() == [1, 3]


class Viewing(nn.Module):
    """Takes a view that only one layout of its images allows."""

    def __init__(self):
        super().__init__()
        self.conv, self.output = nn.Conv2d(2, 3, 2), nn.Linear(12, 3)

    def forward(self, x):
        return self.output(torch.relu(self.conv(x)).view(len(x), -1))


def test_images_are_probed_in_pieces_and_networks_may_view_them():
    model = Model(Viewing, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 200, 2, 3, 3, generator=draw, dtype=torch.float64)
    mask = torch.ones(3, 200, dtype=torch.bool)
    batch = Batch(x, torch.zeros(3, 200, dtype=torch.int64), mask, torch.ones(3, 200))
    bank = tree_map(lambda leaf: leaf[None], model.init_many(KEY, 4))
    mine = Stacked().probe(model.losses, bank, batch, flattens=True)
    expected = Loop().probe(model.losses, bank, batch, flattens=True)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_network_that_views_its_images_trains_one_by_one():
    model, keys = Model(Viewing, dtype=torch.float64), torch.arange(2)
    x = torch.randn(2, 6, 2, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.ones(2, 6, dtype=torch.bool)
    batch = Batch(x, torch.zeros(2, 6, dtype=torch.int64), mask, torch.ones(2, 6))
    tree = (model.init_many(KEY, 2), batch, keys, torch.zeros(1, dtype=torch.int64), ())
    fit = Fit(LocalSGD(0.1, steps=2), model.losses, None, None)
    torch.testing.assert_close(
        Stacked().fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9
    )


def wide_net():
    """58,000 weights; a client's convolutions put out 16 x 26 x 26 + 32 x 11 x 11 a sample."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )


@pytest.mark.parametrize(("batch_size", "path"), [(4, "twins"), (None, "loop")])
def test_shapes_choose_the_kernel_and_fresh_runs_agree_to_the_last_bit(batch_size, path):
    # 80 rows put out 80 * 14,688 = 1,175,040 numbers, above CROWDED; 4 rows 58,752, below.
    data = ragged(80, 77, shape=(1, 28, 28))
    assert sum(leaf.numel() for leaf in Model(wide_net).init(KEY).values()) >= HEAVY
    ends, plans = [], []
    for _ in range(2):
        method = FedAvg(Model(wide_net), LocalSGD(0.05, batch_size=batch_size, steps=3))
        fed = Simulation(data, chunk=2)
        *_, (state, _) = itertools.islice(play(method, fed), 3)
        ends.append(state.params)
        plans.append(fed.plan["kernels"])
    assert [choice["path"] for choice in plans[0].values()] == [path]
    assert plans[0] == plans[1]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
