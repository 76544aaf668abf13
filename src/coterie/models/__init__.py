"""Plain networks with torch's own initialisation, and a builder for each that fits it to data."""

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

from torch import nn

from coterie.core.errors import ConfigError, unknown
from coterie.models.cnn import CNN
from coterie.models.linear import CoinFlipRegressor, Linear, LinearRegressor
from coterie.models.mlp import MLP
from coterie.models.published import (
    Autoencoder,
    ColourAutoencoder,
    ColourCNN,
    CroppedCNN,
    DeepCNN,
    GreyCNN,
    TextCNN,
    WriterCNN,
)
from coterie.models.vae import VAE, ConvVAE

__all__ = ["CNN", "MLP", "MODELS", "VAE", "ConvVAE", "Linear", "LinearRegressor", "make"]


class Sized(Protocol):
    """What a builder asks of data: the shape of one input and the number of outputs."""

    @property
    def sample_shape(self) -> Any: ...

    @property
    def n_outputs(self) -> int: ...


def _linear(data: Sized, bias: bool = True) -> nn.Module:
    """One layer from inputs to outputs: logistic or linear regression."""
    return Linear(_n_inputs("linear", data), data.n_outputs, bias)


def _linear_regressor(data: Sized) -> nn.Module:
    """One vector of weights without bias, drawn on the unit sphere; for theory."""
    if data.n_outputs != 1 or getattr(data, "task", "regression") != "regression":
        raise ConfigError(
            "linear_regressor: data must have one number to predict. These are for "
            f"{getattr(data, 'task', 'regression')} with {data.n_outputs} outputs. Use 'linear'."
        )
    return LinearRegressor(_n_inputs("linear_regressor", data))


def _coin_flip_regressor(data: Sized) -> nn.Module:
    """One vector of weights without bias, each 0 or 1 at first; for IFCA's linear study."""
    return CoinFlipRegressor(_n_inputs("coin_flip_regressor", data))


def _mlp(data: Sized, hidden: Sequence[int] = (32,)) -> nn.Module:
    """Fully connected layers with ReLU between them; suits tables and small images."""
    return MLP(_n_inputs("mlp", data), data.n_outputs, hidden)


def _cnn(data: Sized, widths: Sequence[int] = (16, 32)) -> nn.Module:
    """Convolution, ReLU and pooling, repeated, then one layer; for images."""
    shape = data.sample_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise ConfigError(
            f"cnn: samples must be images [channels, height, width]. Got {_shown(shape)}. "
            f"Reshape the data, or use 'mlp'."
        )
    return CNN(shape[0], (shape[1], shape[2]), data.n_outputs, widths)


def _grey_cnn(data: Sized) -> nn.Module:
    """CLoVE's network for grey 28 x 28 images: 5,142 parameters with ten classes."""
    return GreyCNN(data.n_outputs, _image("grey_cnn", data, 1)[1])


def _cifar_cnn(data: Sized) -> nn.Module:
    """CLoVE's network for 32 x 32 colour images: batch norm, dropout, 4.2 million parameters."""
    _image("cifar_cnn", data, 3, 32)
    return ColourCNN(data.n_outputs)


def _cropped_cnn(data: Sized) -> nn.Module:
    """IFCA's network for 32 x 32 colour images, of which it sees the middle."""
    _image("cropped_cnn", data, 3, 32)
    return CroppedCNN(data.n_outputs)


def _deep_cnn(data: Sized) -> nn.Module:
    """Six convolutions and three layers for 32 x 32 colour images: FedSoft's and FedGMI's."""
    _image("deep_cnn", data, 3, 32)
    return DeepCNN(data.n_outputs)


def _writer_cnn(data: Sized) -> nn.Module:
    """LEAF's network for handwriting; its layer `output` is the head that IFCA clusters."""
    _image("writer_cnn", data, 1, 28)
    return WriterCNN(data.n_outputs)


def _letter_cnn(data: Sized) -> nn.Module:
    """A network for 28 x 28 letters, 1.7 million parameters with 26 classes."""
    _image("letter_cnn", data, 1, 28)
    return WriterCNN(data.n_outputs, hidden=512)


def _autoencoder(data: Sized) -> nn.Module:
    """CLoVE's autoencoder for grey images: six linear layers, 2 million parameters."""
    return Autoencoder(_n_inputs("autoencoder", data))


def _colour_autoencoder(data: Sized) -> nn.Module:
    """CLoVE's autoencoder for 32 x 32 colour images."""
    _image("colour_autoencoder", data, 3, 32)
    return ColourAutoencoder()


def _text_cnn(data: Sized, n_words: int = 32_000, n_outputs: int | None = None) -> nn.Module:
    """Convolutions over numbered words; CLoVE's network for news."""
    return TextCNN(n_outputs or data.n_outputs, n_words)


def _image(name: str, data: Sized, channels: int, side: int | None = None) -> tuple[int, int, int]:
    """The shape of images, which must have so many channels and, for some, one size."""
    shape = data.sample_shape
    right = isinstance(shape, tuple) and len(shape) == 3 and shape[0] == channels
    if not right or (side is not None and shape[1:] != (side, side)):
        size = "height, width" if side is None else f"{side}, {side}"
        raise ConfigError(
            f"{name}: samples must be images [{channels}, {size}]. Got {_shown(shape)}."
        )
    return shape


def _vae(
    data: Sized, latent: int = 16, hidden: Sequence[int] = (400,), likelihood: str = "auto"
) -> nn.Module:
    """Variational autoencoder of fully connected layers: a density model for FedGMI."""
    kind: Any = _likelihood(data, likelihood)
    _n_inputs("vae", data)
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
            f"conv_vae: samples must be images [channels, height, width]. Got {_shown(shape)}. "
            f"Reshape the data, or use 'vae'."
        )
    kind: Any = _likelihood(data, likelihood)
    return ConvVAE(shape[0], (shape[1], shape[2]), latent, widths, kind)


def _likelihood(data: Sized, likelihood: str) -> str:
    """Grey images have pixels in [0, 1]; of all else nothing is known."""
    if likelihood != "auto":
        return likelihood
    shape = data.sample_shape
    grey = isinstance(shape, tuple) and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
    return "bernoulli" if grey else "gaussian"


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "linear_regressor": _linear_regressor,
    "coin_flip_regressor": _coin_flip_regressor,
    "mlp": _mlp,
    "cnn": _cnn,
    "grey_cnn": _grey_cnn,
    "vae": _vae,
    "conv_vae": _conv_vae,
    "cifar_cnn": _cifar_cnn,
    "cropped_cnn": _cropped_cnn,
    "deep_cnn": _deep_cnn,
    "writer_cnn": _writer_cnn,
    "letter_cnn": _letter_cnn,
    "autoencoder": _autoencoder,
    "colour_autoencoder": _colour_autoencoder,
    "text_cnn": _text_cnn,
}
"""Builders `(data, **options) -> module` by name."""


def make(name: str, data: Sized, **options: Any) -> nn.Module:
    """A network by name, with inputs and outputs that fit the data.

    >>> from types import SimpleNamespace
    >>> make("mlp", SimpleNamespace(sample_shape=(64,), n_outputs=10), hidden=[8]).output
    Linear(in_features=8, out_features=10, bias=True)
    """
    if name not in MODELS:
        raise ConfigError(unknown("model", name, MODELS))
    known = list(inspect.signature(MODELS[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise ConfigError(unknown(f"option of {name}", option, known))
    return MODELS[name](data, **options)


def _n_inputs(name: str, data: Sized) -> int:
    shape = data.sample_shape
    if not isinstance(shape, tuple):
        raise ConfigError(f"{name}: samples must be one array. Got {_shown(shape)}.")
    return prod(shape)


def _shown(shape: Any) -> str:
    return f"a dict of {', '.join(shape)}" if isinstance(shape, dict) else str(list(shape))
