"""Stacked twins: which networks run on them, and that they never change a result."""

import pytest
import torch
from torch import nn

from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.ops import Fit, Loop
from coterie.core.random import fold, seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import leaves, stack
from coterie.engines.stacking.kernels import Stacked
from coterie.engines.stacking.twins import NoTwin, twin_of


class Mixed(nn.Module):
    """Most layers that have a twin, and a forward of its own with a residual connection."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(6)
        self.group_norm = nn.GroupNorm(2, 6)
        self.layer_norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)
        self.output = nn.Linear(6, 3)

    def forward(self, x):
        x = self.words(x).transpose(1, 2)  # [b, 4, t]
        x = self.group_norm(torch.relu(self.batch_norm(self.conv(x))))
        x = self.layer_norm(x.mean(2))
        return self.output(self.drop(x + torch.relu(self.inner(x))))


class Images(nn.Module):
    """Down and up again: both kinds of convolution, and batch norm over pixels."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2, bias=False)
        self.output = nn.Linear(32, 3)

    def forward(self, x):
        return self.output(torch.tanh(self.up(torch.relu(self.norm(self.down(x))))).flatten(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.output = nn.Linear(4, 3)

    def forward(self, x):
        return self.output(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x @ self.weight


SIZES = (7, 12, 3, 12)


def stacked(model, x):
    """Clients of unequal size, padded by repeats: what a kernel is handed."""
    n = max(SIZES)
    index = torch.stack([torch.arange(n).clamp(max=size - 1) for size in SIZES])
    x = torch.stack([rows[i] for rows, i in zip(x, index, strict=True)])
    y = (torch.arange(n) * 7 % 3).expand(len(SIZES), n).gather(1, index)
    mask = torch.arange(n) < torch.tensor(SIZES)[:, None]
    batch = Batch(x, y, mask, torch.ones(mask.shape))
    keys = fold(seed_key(1), torch.arange(len(SIZES)))
    params = stack([model.init(fold(seed_key(2), i)) for i in range(len(SIZES))])
    return params, batch, keys, torch.zeros(1, dtype=torch.int64), ()


LOCALS = {
    "sgd": LocalSGD(0.1, epochs=2, batch_size=5),
    "full": LocalSGD(0.1, steps=3),
    "momentum": LocalSGD(0.1, epochs=2, batch_size=5, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", LOCALS)
def test_twins_train_as_one_client_after_the_other_does(name):
    model = Model(Mixed, dtype=torch.float64)
    fit = Fit(LOCALS[name], model.losses, None, None)
    draw = torch.Generator().manual_seed(0)
    tree = stacked(model, torch.randint(0, 5, (len(SIZES), 12, 6), generator=draw))
    kernel = Stacked()
    for mine, reference in zip(
        leaves(kernel.fit(fit, tree)), leaves(Loop().fit(fit, tree)), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
    (choice,) = kernel.choices.values()
    assert choice.path == "twins"


@pytest.mark.parametrize("name", LOCALS)
def test_convolutions_have_twins(name):
    model = Model(Images, dtype=torch.float64)
    fit = Fit(LOCALS[name], model.losses, None, None)
    draw = torch.Generator().manual_seed(0)
    tree = stacked(model, torch.randn(len(SIZES), 12, 1, 4, 4, generator=draw))
    kernel = Stacked()
    mine, reference = kernel.fit(fit, tree), Loop().fit(fit, tree)
    torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
    assert [choice.path for choice in kernel.choices.values()] == ["twins"]


def test_linear_layers_and_convolutions_step_in_backward_and_others_do_not():
    model = Model(Mixed, dtype=torch.float64)
    fit = Fit(LOCALS["sgd"], model.losses, None, None)
    kernel = Stacked()
    kernel.fit(fit, stacked(model, torch.zeros(len(SIZES), 12, 6, dtype=torch.int64)))
    (choice,) = kernel.choices.values()
    trained = [name for name, _ in Mixed().named_parameters()]
    stepped = [name for name, own in zip(trained, choice.stepping, strict=True) if own]
    layers = ["conv", "inner", "output"]
    assert stepped == [f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")]


def test_weights_used_twice_wait_for_both_gradients():
    model = Model(Tied, dtype=torch.float64)
    fit = Fit(LOCALS["sgd"], model.losses, None, None)
    draw = torch.Generator().manual_seed(0)
    tree = stacked(model, torch.randn(len(SIZES), 12, 4, generator=draw))
    kernel = Stacked()
    for mine, reference in zip(
        leaves(kernel.fit(fit, tree)), leaves(Loop().fit(fit, tree)), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
    (choice,) = kernel.choices.values()
    assert choice.stepping == (False, False, True, True)


def test_a_layer_with_weights_of_its_own_has_no_twin_and_is_mapped():
    model = Model(Bare, dtype=torch.float64)
    with pytest.raises(NoTwin, match="Bare"):
        twin_of(model)
    fit = Fit(LOCALS["sgd"], model.losses, None, None)
    draw = torch.Generator().manual_seed(0)
    tree = stacked(model, torch.randn(len(SIZES), 12, 4, generator=draw))
    kernel = Stacked()
    mine, reference = kernel.fit(fit, tree), Loop().fit(fit, tree)
    torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
    assert [choice.path for choice in kernel.choices.values()] == ["vmap"]


def test_a_loss_that_reads_a_clients_own_tensor_by_label_is_not_trusted():
    # prototypes[y] picks a row for one client; on stacked prototypes it would pick a client.
    model = Model(lambda: nn.Sequential(nn.Linear(4, 3)), dtype=torch.float64)

    def losses(params, batch, key, prototypes):
        return ((model.apply(params, batch.x) - prototypes[batch.y]) ** 2).sum(1)

    fit = Fit(LOCALS["sgd"], losses, None, None)
    draw = torch.Generator().manual_seed(0)
    params, batch, keys, round, _ = stacked(model, torch.randn(4, 12, 4, generator=draw))
    prototypes = torch.randn(4, 3, 3, generator=draw, dtype=torch.float64)
    tree = (params, batch, keys, round, (prototypes,))
    kernel = Stacked()
    torch.testing.assert_close(kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9)
    assert [choice.path for choice in kernel.choices.values()] == ["vmap"]


def test_weights_that_are_given_are_not_stepped():
    # A frozen body: it enters by `given`, and only the head may move.
    model = Model(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        head="2",
        dtype=torch.float64,
    )

    def losses(head, batch, key, body):
        return model.losses(model.merge(body, head), batch)

    fit = Fit(LocalSGD(0.3, steps=9), losses, None, None)
    draw = torch.Generator().manual_seed(0)
    params, batch, keys, round, _ = stacked(model, torch.randn(4, 12, 4, generator=draw))
    body, head = model.split(params)
    tree = (head, batch, keys, round, (body,))
    before = {name: leaf.clone() for name, leaf in body.items()}
    kernel = Stacked()
    torch.testing.assert_close(kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9)
    (choice,) = kernel.choices.values()
    assert choice.stepping == (True, True)
    assert all(torch.equal(body[name], before[name]) for name in body)


def test_a_penalty_is_each_clients_own():
    model = Model(lambda: nn.Sequential(nn.Linear(4, 3)), dtype=torch.float64)

    def penalty(params, centre):
        return sum(((params[name] - centre[name]) ** 2).sum() for name in params)

    fit = Fit(LOCALS["momentum"], model.losses, penalty, None)
    draw = torch.Generator().manual_seed(0)
    params, batch, keys, round, _ = stacked(model, torch.randn(4, 12, 4, generator=draw))
    centre = stack([model.init(fold(seed_key(9), i)) for i in range(4)])
    tree = (params, batch, keys, round, (centre,))
    torch.testing.assert_close(
        Stacked().fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9
    )


def test_losses_that_look_alike_are_tried_one_by_one():
    # The same shapes and titles; the second net uses its first layer twice.
    class Once(Tied):
        def forward(self, x):
            return self.output(torch.tanh(self.layer(x)))

    Once.__name__ = Once.__qualname__ = Tied.__name__
    kernel, draw = Stacked(), torch.Generator().manual_seed(0)
    x = torch.randn(len(SIZES), 12, 4, generator=draw)
    for net in (Once, Tied):
        model = Model(net, dtype=torch.float64)
        fit, tree = Fit(LOCALS["sgd"], model.losses, None, None), stacked(model, x)
        torch.testing.assert_close(
            kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9
        )
    first, second = kernel.choices.values()
    assert first.stepping == (True,) * 4
    assert second.stepping == (False, False, True, True)
    resumed = Stacked(choices=kernel.describe())
    assert resumed.choices == kernel.choices


def test_a_layer_without_a_twin_runs_for_each_client_inside_the_stack():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.reads, self.output = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.output(self.reads(x)[0][:, -1])

    model = Model(Recurrent, dtype=torch.float64)
    assert twin_of(model).own == ("reads",)
    fit = Fit(LOCALS["sgd"], model.losses, None, None)
    tree = stacked(model, torch.randn(4, 12, 6, 4, generator=torch.Generator().manual_seed(0)))
    kernel = Stacked()
    torch.testing.assert_close(kernel.fit(fit, tree), Loop().fit(fit, tree), rtol=1e-9, atol=1e-9)
    assert [choice.path for choice in kernel.choices.values()] == ["twins"]
