"""First layers in the space of the samples, and first layers of a bank side by side."""

import pytest
import torch
from torch import nn

from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.ops import Fit, Loop
from coterie.core.random import fold, seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import stack
from coterie.engines.stacking.first import Gram, Watch, Wide, products
from coterie.engines.stacking.kernels import Stacked


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


class Reader(nn.Module):
    """Looks at its inputs a second time."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1)))) * x.flatten(1).mean(1, True)


class Scaled(nn.Module):
    """Its first layer does not meet the inputs as they are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 3)

    def forward(self, x):
        return self.first(2 * x.flatten(1))


def clients(model, sizes=(7, 4, 7), dtype=torch.float64):
    n = max(sizes)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(sizes), n, 3, 4, generator=draw).to(dtype)
    y = torch.randint(0, 3, (len(sizes), n), generator=draw)
    mask = torch.arange(n) < torch.tensor(sizes)[:, None]
    keys = fold(seed_key(1), torch.arange(len(sizes)))
    params = stack([model.init(fold(seed_key(2), i)) for i in range(len(sizes))])
    return params, Batch(x, y, mask, torch.ones(mask.shape)), keys, torch.zeros(1).long(), ()


@pytest.mark.parametrize("module", [mlp, Reader])
@pytest.mark.parametrize("local", [LocalSGD(0.1, epochs=3, batch_size=3), LocalSGD(0.1, steps=4)])
def test_a_first_layer_in_the_space_of_samples_trains_as_the_loop_does(module, local):
    model = Model(module, dtype=torch.float64)
    fit, tree = Fit(local, model.losses, None, None), clients(model)
    kernel = Stacked("gram")
    torch.testing.assert_close(kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9)
    (choice,) = kernel.choices.values()
    assert len(choice.first) == 2  # weight and bias
    assert choice.blind == (module is mlp)  # the other looks at its inputs, so it is shown them


def test_in_single_precision_the_gram_form_agrees_to_its_own_rounding():
    model = Model(mlp)
    fit = Fit(LocalSGD(0.1, epochs=5, batch_size=2), model.losses, None, None)
    tree = clients(model, dtype=torch.float32)
    mine, expected = Stacked("gram").fit(fit, tree), Loop().fit(fit, tree)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "local"),
    [
        (Scaled, LocalSGD(0.1, steps=3)),
        (mlp, LocalSGD(0.1, steps=3, momentum=0.5)),
        (mlp, LocalSGD(0.1, steps=3, optimizer="adam")),
    ],
)
def test_where_the_form_does_not_hold_it_is_not_used(module, local):
    model = Model(module, dtype=torch.float64)
    fit, tree = Fit(local, model.losses, None, None), clients(model)
    kernel = Stacked("gram")
    torch.testing.assert_close(kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-8, atol=1e-8)
    assert all(not choice.first for choice in kernel.choices.values())


def test_the_rule_asks_for_two_passes_over_fewer_samples_than_inputs():
    model, used = Model(mlp, dtype=torch.float64), []
    for epochs, sizes in ((1, (7, 4)), (2, (7, 4)), (2, (20, 4))):
        kernel = Stacked()
        seen = []
        held = kernel._hold_first
        kernel._hold_first = lambda *a, seen=seen, held=held: seen.append(1) or held(*a)
        fit = Fit(LocalSGD(0.1, epochs=epochs, batch_size=4), model.losses, None, None)
        kernel.fit(fit, clients(model, sizes))
        used.append(len(seen) == 2)  # once on trial, once in earnest
    assert used == [False, True, False]


def test_a_step_worked_out_by_hand():
    # One client, x = (1, 2), W = (3, 4), b = 0.5: the output is 11.5. A slope of 1 at rate 0.1
    # moves W by -0.1 x and b by -0.1: the output falls by 0.1 * (|x|^2 + 1) = 0.6.
    x = torch.tensor([[[1.0, 2.0]]])
    weight, bias = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[0.5]])
    gram = Gram(x, weight, bias, products(x))
    step = gram.at(x.flatten(0, 1), None, 1, 0.1)
    assert step.value().item() == pytest.approx(11.5)
    step.learn(torch.ones(1, 1, 1))
    assert gram.at(x.flatten(0, 1), None, 1, 0.1).value().item() == pytest.approx(10.9)
    gram.finish()
    assert weight.flatten().tolist() == pytest.approx([2.9, 3.8])
    assert bias.item() == pytest.approx(0.4)


def test_a_watch_knows_its_inputs_reshaped_but_not_changed():
    x = torch.arange(12.0).reshape(2, 2, 3)
    watch = Watch(x)
    assert watch.meets(x.flatten(1))
    assert not watch.meets(x.clone())
    assert not watch.meets(x.transpose(1, 2))
    assert not watch.meets(x[1:])
    x.add_(1)
    assert not watch.meets(x)


def test_side_by_side_gives_what_each_first_layer_gives():
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 4, generator=draw), torch.randn(3, 5, 4, generator=draw)
    b = torch.randn(3, 5, generator=draw)
    wide = Wide(x, w, b)
    for k in range(3):
        torch.testing.assert_close(wide.out[:, k], nn.functional.linear(x, w[k], b[k]))
    start = wide.start(x.reshape(2, 3, 4), w[[2, 0]], b[[2, 0]])
    torch.testing.assert_close(start[0], wide.out[:3, 2])
    torch.testing.assert_close(start[1], wide.out[3:, 0])
    assert wide.start(x.reshape(2, 3, 4), w[[2, 0]] + 1, b[[2, 0]]) is None
    assert wide.start(x.clone().reshape(2, 3, 4), w[[2, 0]], b[[2, 0]]) is None


def test_a_probe_reads_the_inputs_once_and_gives_the_same_losses():
    model = Model(mlp, dtype=torch.float64)
    params, batch, *_ = clients(model)
    kernel = Stacked()
    bank = {name: leaf[None] for name, leaf in params.items()}
    mine = kernel.probe(model.losses, bank, batch, flattens=True)
    assert kernel._probes._wide is not None
    expected = Loop().probe(model.losses, bank, batch, flattens=True)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
