"""Networks with torch's own initialisation, and builders that choose their shapes from the data."""

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol, TypeVar

from torch import nn

from coterie.core.errors import ConfigError, unknown
from coterie.core.plugins import load_plugins
from coterie.models.cnn import CNN
from coterie.models.linear import Linear, LinearRegressor
from coterie.models.mlp import MLP
from coterie.models.vae import VAE, ConvVAE

__all__ = ["CNN", "MLP", "MODELS", "VAE", "ConvVAE", "Linear", "LinearRegressor", "make"]


class Sized(Protocol):
    """What a builder needs from the data: the shape of one sample and the number of outputs."""

    @property
    def sample_shape(self) -> Any: ...

    @property
    def n_outputs(self) -> int: ...


def _linear(data: Sized, bias: bool = True) -> nn.Module:
    """One layer from inputs to outputs: logistic or linear regression."""
    return Linear(n_inputs("linear", data), data.n_outputs, bias)


def _linear_regressor(data: Sized) -> nn.Module:
    """One vector of weights without bias, drawn from the unit sphere; for theoretical studies."""
    if data.n_outputs != 1 or getattr(data, "task", "regression") != "regression":
        raise ConfigError(
            "linear_regressor: the task must be regression with one output. Got "
            f"{getattr(data, 'task', 'regression')} with {data.n_outputs} outputs. Use 'linear'."
        )
    return LinearRegressor(n_inputs("linear_regressor", data))


def _mlp(data: Sized, hidden: Sequence[int] = (32,)) -> nn.Module:
    """Fully connected layers with ReLU between them; for tables and small images."""
    return MLP(n_inputs("mlp", data), data.n_outputs, hidden)


def _cnn(data: Sized, widths: Sequence[int] = (16, 32)) -> nn.Module:
    """Convolution, ReLU and pooling, repeated, then one layer; for images."""
    shape = data.sample_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise ConfigError(
            f"cnn: samples must be images [channels, height, width]. Got {describe_shape(shape)}. "
            f"Reshape the data, or use 'mlp'."
        )
    return CNN(shape[0], (shape[1], shape[2]), data.n_outputs, widths)


def _vae(
    data: Sized, latent: int = 16, hidden: Sequence[int] = (400,), likelihood: str = "auto"
) -> nn.Module:
    """Variational autoencoder of fully connected layers: a density model for FedGMI and Blend."""
    kind: Any = _likelihood(data, likelihood)
    n_inputs("vae", data)
    return VAE(data.sample_shape, latent, hidden, kind)


def _conv_vae(
    data: Sized,
    latent: int = 64,
    widths: Sequence[int] = (32, 64, 128),
    likelihood: str = "auto",
) -> nn.Module:
    """Convolutional variational autoencoder: a density model for larger images."""
    shape = data.sample_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise ConfigError(
            "conv_vae: samples must be images [channels, height, width]. Got "
            f"{describe_shape(shape)}. Reshape the data, or use 'vae'."
        )
    kind: Any = _likelihood(data, likelihood)
    return ConvVAE(shape[0], (shape[1], shape[2]), latent, widths, kind)


def _likelihood(data: Sized, likelihood: str) -> str:
    """The likelihood for "auto": Bernoulli for grey images, whose pixels lie in [0, 1]."""
    if likelihood != "auto":
        return likelihood
    shape = data.sample_shape
    grey = isinstance(shape, tuple) and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
    return "bernoulli" if grey else "gaussian"


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "linear_regressor": _linear_regressor,
    "mlp": _mlp,
    "cnn": _cnn,
    "vae": _vae,
    "conv_vae": _conv_vae,
}
"""Builders `(data, **options) -> module` by name."""

B = TypeVar("B", bound=Callable[..., nn.Module])


def builder(name: str) -> Callable[[B], B]:
    """Add a network to `MODELS`, for packages that provide their own networks."""

    def add(function: B) -> B:
        MODELS[name] = function
        return function

    return add


def make(name: str, data: Sized, **options: Any) -> nn.Module:
    """A network by name, with inputs and outputs that fit the data.

    >>> from types import SimpleNamespace
    >>> make("mlp", SimpleNamespace(sample_shape=(64,), n_outputs=10), hidden=[8]).output
    Linear(in_features=8, out_features=10, bias=True)
    """
    if name not in MODELS:
        load_plugins()
    if name not in MODELS:
        raise ConfigError(unknown("model", name, MODELS))
    known = list(inspect.signature(MODELS[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise ConfigError(unknown(f"option of {name}", option, known))
    return MODELS[name](data, **options)


def n_inputs(name: str, data: Sized) -> int:
    """The number of input values of one sample, which must be one array."""
    shape = data.sample_shape
    if not isinstance(shape, tuple):
        raise ConfigError(f"{name}: samples must be one array. Got {describe_shape(shape)}.")
    return prod(shape)


def describe_shape(shape: Any) -> str:
    """A shape as text for messages."""
    return f"a dict of {', '.join(shape)}" if isinstance(shape, dict) else str(list(shape))
