"""Small federations whose clients are mixtures, and density models that are exact."""

import warnings

import torch
from torch import nn

from coterie.core import Model
from coterie.core.random import fold, normal, seed_key, uniform
from coterie.data import from_arrays
from coterie.models import VAE
from coterie.models.vae import gaussian


def clouds(n_clients=12, n=60, k=2, seed=0, apart=3.0, labels=True):
    """Clients that are mixtures of k clouds in four dimensions; two classes by the first sign."""
    key = fold(seed_key(seed), "clouds")
    centres = apart * torch.tensor([[0, 1, 1, 0], [0, -1, 0, 1], [0, 0, -1, -1]]).float()[:k]
    draw = -uniform(fold(key, "shares"), (n_clients, k)).clamp(min=1e-6).log()
    shares = draw / draw.sum(1, keepdim=True)
    shares[:k] = torch.eye(k)
    xs, ys, parts = [], [], []
    for i in range(n_clients):
        ends = (shares[i].cumsum(0) * n).round()
        part = (torch.arange(n)[:, None] >= ends).sum(1).clamp(max=k - 1)
        noise = normal(fold(key, "x", i), (n, 4))
        # The classes contradict each other between components.
        y = ((noise[:, 0] > 0) ^ (part == 1)).long()
        xs.append(centres[part] + noise)
        ys.append(y)
        parts.append(part)
    data = from_arrays(xs, ys if labels else None, test_fraction=0.0)
    truth = torch.stack([(torch.stack(parts) == j).double().mean(1) for j in range(k)], 1)
    return data, parts, truth


def lines(n=200, apart=4.0, clients=50):
    """Clients of two normal distributions on a line, shares from none to all."""
    key = fold(seed_key(3), "lines")
    xs, shares = [], []
    for i in range(clients):
        first = torch.arange(n) < (i + 0.5) / clients * n
        xs.append(normal(fold(key, i), (n, 1)) + torch.where(first, 0.0, apart)[:, None])
        shares.append(float(first.double().mean()))
    return from_arrays(xs, test_fraction=0.0), torch.tensor(shares, dtype=torch.float64)


class Normal(nn.Module):
    """A density on a line that is exact: normal around a centre, variance one."""

    latent = 1

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(1))

    def decode(self, code):
        return self.centre + code

    def forward(self, x):
        return self.decode(x["code"]) if isinstance(x, dict) else x - self.centre


def half_square(output, batch):
    """Minus the log density, up to a constant."""
    return 0.5 * output.square().sum(1)


def exact():
    """The exact density as a model."""
    return Model(Normal, half_square)


def at(*centres):
    """A bank of exact densities."""
    return {"centre": torch.tensor(centres)[:, None]}


def cloud_vae(dtype=torch.float32):
    """A small autoencoder for `clouds`."""
    return Model(lambda: VAE((4,), 2, (16,), "gaussian"), gaussian, dtype=dtype)


def quietly(function, *args, **options):
    """Call without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def begin(method, fed):
    """The state before the first round."""
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    return state


def advance(method, fed, state, number):
    """The state after one round, and what the round tells."""
    fed.begin(number)
    state, info = quietly(method.step, fed, state)
    fed.commit()
    return state, info
