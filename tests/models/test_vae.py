"""Density models: scores by hand, draws from keys, stacks that equal one client at a time."""

import math

import pytest
import torch

from coterie.core import LocalSGD, Model
from coterie.core.client import Batch
from coterie.core.errors import ConfigError
from coterie.core.random import seed_key
from coterie.models import VAE, ConvVAE, make
from coterie.models.vae import Coded, bernoulli, divergence, gaussian, guard_terms


def batch(x):
    n = len(x)
    return Batch(x, torch.zeros(n), torch.ones(n, dtype=torch.bool), torch.ones(n))


def coded(output, mean, log_variance):
    return Coded(torch.tensor([output]), torch.tensor([mean]), torch.tensor([log_variance]))


def test_a_score_by_hand():
    # 2 log 2 for two pixels at logit 0, 0.5 for a code of mean 1 and variance 1
    seen = coded([0.0, 0.0], [1.0], [0.0])
    nats = bernoulli(seen, batch(torch.tensor([[1.0, 0.0]])))
    assert float(nats) == pytest.approx(1.886294, abs=1e-6)


def test_gaussian_pixels_by_hand():
    # (1 - 0.5)^2 / 0.2 + log(2 pi 0.1) / 2, and nothing for the code
    seen = coded([0.5], [0.0], [0.0])
    expected = 1.25 + 0.5 * math.log(0.2 * math.pi)
    assert float(gaussian(seen, batch(torch.tensor([[1.0]])))) == pytest.approx(expected, abs=1e-6)


def test_divergence_by_hand():
    # (mean^2 + variance - 1 - log variance) / 2 with mean 2 and variance e
    assert float(divergence(coded([0.0], [2.0], [1.0]))) == pytest.approx((4 + math.e - 2) / 2)


def test_guards_see_each_clients_own_batch():
    # codes -1 and 1: mean 0, variance 1 (plus 1e-4): nothing to guard against
    fine = Coded(torch.zeros(2, 1), torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1))
    assert guard_terms(fine, torch.ones(2).bool()).tolist() == pytest.approx([0, 0], abs=1e-6)
    two = Coded(*(torch.cat([leaf, 3 + leaf]) for leaf in fine))
    both = guard_terms(two, torch.ones(4).bool(), n_clients=2)
    alone = guard_terms(Coded(*(3 + leaf for leaf in fine)), torch.ones(2).bool())
    assert torch.allclose(both[2:], alone)


def test_padding_does_not_guard():
    seen = Coded(torch.zeros(3, 1), torch.tensor([[-1.0], [1.0], [50.0]]), torch.zeros(3, 1))
    terms = guard_terms(seen, torch.tensor([True, True, False]))
    assert terms[:2].tolist() == pytest.approx([0, 0], abs=1e-6)


NETS = {
    "mlp": lambda: VAE((1, 9, 7), 3, (8,), "bernoulli"),
    "conv": lambda: ConvVAE(1, (9, 7), 3, (4, 6), "gaussian"),
}
LOSSES = {"mlp": bernoulli, "conv": gaussian}


@pytest.mark.parametrize("kind", NETS)
def test_evaluation_draws_nothing_and_shapes_come_back(kind):
    model = Model(NETS[kind], LOSSES[kind])
    params, x = model.init(seed_key(0)), torch.rand(5, 1, 9, 7)
    once, again = model.apply(params, x), model.apply(params, x)
    assert torch.equal(once.output, again.output)
    assert once.output.shape == x.shape
    assert model.losses(params, batch(x)).shape == (5,)
    code = torch.zeros(2, 3)
    assert model.apply(params, {"code": code}).shape == (2, 1, 9, 7)


@pytest.mark.parametrize("kind", NETS)
def test_stacked_clients_train_as_one_by_one(kind, federate, tmp_path):
    from coterie.algorithms import FedAvg
    from coterie.data import from_arrays

    torch.manual_seed(0)
    data = from_arrays([torch.rand(n, 1, 9, 7) for n in (7, 5, 9)], test_fraction=0.0)
    model = Model(NETS[kind], LOSSES[kind], dtype=torch.float64)
    method = FedAvg(model, LocalSGD(0.01, epochs=2, batch_size=4, optimizer="adam"))
    states = []
    for fed in (federate(data), federate(data, chunk=1)):
        fed.begin(-1)
        state = method.init(fed)
        fed.begin(0)
        states.append(method.step(fed, state)[0])
    for name, leaf in states[0].params.items():
        assert torch.allclose(leaf, states[1].params[name], atol=1e-9), name


def test_networks_by_name():
    from types import SimpleNamespace

    grey = SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=10)
    colour = SimpleNamespace(sample_shape=(3, 32, 32), n_outputs=10)
    assert make("vae", grey).likelihood == "bernoulli"
    assert make("conv_vae", colour, latent=8).likelihood == "gaussian"
    with pytest.raises(ConfigError, match="images"):
        make("conv_vae", SimpleNamespace(sample_shape=(4,), n_outputs=2))
    with pytest.raises(ConfigError, match="likelihood"):
        make("vae", grey, likelihood="poisson")
    with pytest.raises(ConfigError, match="fewer widths"):
        ConvVAE(1, 4, widths=(2, 2, 2))
