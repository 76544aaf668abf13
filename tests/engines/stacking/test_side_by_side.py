import pytest
import torch
from torch import nn

from coterie.core import Model
from coterie.core.client import Batch
from coterie.core.ops import Loop
from coterie.core.random import seed_key
from coterie.engines.stacking import side_by_side
from coterie.engines.stacking.kernels import Stacked


class Small(nn.Module):
    """Two convolutions and a dense layer, as CLoVE's network for grey images."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3)
        self.norm = nn.GroupNorm(1, 3, affine=False) if norm else nn.Identity()
        self.second = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.dense = nn.Linear(4 * 3 * 3, 5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.dense(self.pool(self.second(x).relu()).flatten(1))


class Viewing(Small):
    def forward(self, x):
        x = self.pool(self.second(self.first(x).relu()).relu())
        return self.dense(x.reshape(-1, 4 * 3 * 3))


def batch_of(s: int, n: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(s, n, 1, 8, 8, generator=draw)
    y = torch.randint(5, (s, n), generator=draw)
    mask = torch.rand(s, n, generator=draw) > 0.2
    return Batch(x, y, mask, mask.float())


def both(model: Model, k: int, each: bool = False):
    batch = batch_of(3, 40)
    bank = {name: leaf[None] for name, leaf in model.init_many(seed_key(3), k).items()}
    kernel = Stacked()
    mine = kernel.probe(model.losses, bank, batch, flattens=True, each=each)
    alone = Loop().probe(model.losses, bank, batch, flattens=True, each=each)
    return kernel._probes._abreast._networks.get(model), mine, alone


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("k", [2, 5, 8, 9, 17])  # up to eight run side by side
def test_a_bank_side_by_side_has_the_losses_of_its_models(k, each):
    used, mine, alone = both(Model(Small), k, each)
    assert used is not None
    assert mine.shape == ((3, k, 40) if each else (3, k))
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", [lambda: Small(norm=True), Viewing])
def test_a_network_that_mixes_channels_or_counts_them_runs_model_by_model(module):
    used, mine, alone = both(Model(module), 4)
    assert used is None
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


def test_one_model_and_large_networks_run_alone(monkeypatch):
    used, mine, alone = both(Model(Small), 1)
    assert used is None
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(side_by_side, "LIGHT", 10)
    assert both(Model(Small), 4)[0] is None
    assert both(Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5))), 4)[0] is None


def test_pieces_do_not_show(monkeypatch):
    model = Model(Small, dtype=torch.float64)
    used, whole, _ = both(model, 3)
    assert used is not None
    monkeypatch.setattr(side_by_side, "PIECE", 7)
    torch.testing.assert_close(both(model, 3)[1], whole, rtol=1e-12, atol=1e-12)


def test_a_loss_of_the_users_own_is_used():
    model = Model(Small, loss=lambda output, batch: output.square().sum(1) + batch.y)
    used, mine, alone = both(model, 3, each=True)
    assert used is not None
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)
