"""The workloads do the amount of work they are known by."""

import pytest
import torch

from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie_lab.bench import networks
from coterie_lab.bench.images import images
from coterie_lab.bench.workloads import NAMES, WORKLOADS, federation_of, gflop, select

# 1e9 operations a round, worked out by hand: W1 has 20,000 samples of
# 4 * 784 * 200 + 6 * 200 * 10 operations, W4 240,000 of 10 such and 4 forward passes, ...
KNOWN = {
    "W1": 12.78,
    "W2": 63.9,
    "W3": 98.7,
    "W4": 1839.0,
    "W5": 38.2,
    "W6": 97.1,
    "W7-ae": 10.5,
    "W7-vae": 20.8,
    "W9": 0.404,
}
SHAPES = {"flat": (784,), "image": (1, 28, 28), "turned": (28, 28), "noise": (3, 32, 32)}


@pytest.mark.parametrize("name", KNOWN)
def test_operations_of_a_round(name):
    work = NAMES[name]
    x = torch.rand(2, *SHAPES.get(work.inputs, (64,)))
    model = Model(work.network, loss=work.loss)
    assert gflop(work, model, x, work.clients) == pytest.approx(KNOWN[name], rel=0.005)


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_clients_have_the_samples_they_are_to_have(work):
    data = federation_of(work.scale(0.01))
    assert data.sizes("train").unique().tolist() == [work.samples]
    batch = data.gather("train", torch.tensor([0, 1]))
    assert batch.x.dtype == torch.float32
    assert len(data) % work.groups == 0


def test_images_say_where_they_come_from(monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    images.cache_clear()
    try:
        found = images(500)
        assert "scikit-learn" in found.source
        assert found.x.shape == (500, 28, 28)
        assert found.y.unique().tolist() == list(range(10))
    finally:
        images.cache_clear()


def test_an_unknown_workload_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="W9"):
        select(["W99"])


def test_the_noise_of_the_vae_is_a_function_of_the_image():
    x, network = torch.rand(3, 784), networks.VAE()
    assert torch.equal(network(x)[0], network(x)[0])
    batch = Batch(x, torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.ones(3))
    assert networks.vae_losses(network(x), batch).shape == (3,)
