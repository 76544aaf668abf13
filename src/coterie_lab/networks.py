"""The networks of the published studies, layer by layer.

Weights are initialised as in torch, except in `CroppedCNN`. References: the released code of CLoVE,
which is followed where the text is silent (`GreyCNN`, `ColourCNN`, the autoencoders, `TextCNN`);
the code of IFCA (`CroppedCNN`); LEAF (`WriterCNN`); FedSoft's networks, which FedGMI uses
(`DeepCNN`).
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.errors import ConfigError
from coterie.core.random import fold, uniform
from coterie.models import Sized, builder, describe_shape, n_inputs


class GreyCNN(nn.Module):
    """CLoVE's network for grey images: two 5 x 5 convolutions with pooling, one linear layer.

    >>> sum(p.numel() for p in GreyCNN(10).parameters())
    5142
    """

    def __init__(self, n_outputs: int, size: int = 28) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        side = ((size - 4) // 2 - 4) // 2
        self.output = nn.Linear(16 * side * side, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x).flatten(1))


class ColourCNN(nn.Module):
    """CLoVE's network for CIFAR-10: four convolutions with batch norm, three linear layers.

    `width` is the number of channels of the first convolution; all other layers follow it.

    >>> sum(p.numel() for p in ColourCNN(10).parameters())
    4181002
    """

    def __init__(self, n_outputs: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, width, 2 * width, 4 * width, 8 * width)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            nn.Linear(8 * width * 2 * 2, 16 * width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 8 * width),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        self.output = nn.Linear(8 * width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.dense(self.body(x).flatten(1)))


class Autoencoder(nn.Module):
    """Six linear layers, 784 to 196 and back; a sigmoid limits the output to [0, 1].

    >>> sum(p.numel() for p in Autoencoder().parameters())
    2000964
    """

    def __init__(self, n_inputs: int = 784) -> None:
        super().__init__()
        half, quarter = n_inputs // 2, n_inputs // 4
        self.encoder = nn.Sequential(
            nn.Linear(n_inputs, n_inputs),
            nn.ReLU(),
            nn.Linear(n_inputs, half),
            nn.ReLU(),
            nn.Linear(half, quarter),
        )
        self.decoder = nn.Sequential(
            nn.Linear(quarter, half),
            nn.ReLU(),
            nn.Linear(half, n_inputs),
            nn.ReLU(),
            nn.Linear(n_inputs, n_inputs),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x.flatten(1))).reshape(x.shape)


class ColourAutoencoder(nn.Module):
    """Three strided convolutions to 128 numbers and back; tanh limits the output to [-1, 1].

    >>> sum(p.numel() for p in ColourAutoencoder().parameters())
    712835
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 32, 64, 128)):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()]
        self.encoder = nn.Sequential(*layers)
        self.narrow, self.widen = nn.Linear(2048, 128), nn.Linear(128, 2048)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 3, stride=2, padding=1, output_padding=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        code = self.narrow(self.encoder(x).flatten(1))
        return self.decoder(self.widen(code).unflatten(1, (128, 4, 4)))


class TextCNN(nn.Module):
    """Word vectors, convolutions of widths 3, 4 and 5 over them, and max pooling.

    >>> sum(p.numel() for p in TextCNN(6).parameters())
    3322106
    """

    def __init__(self, n_outputs: int, n_words: int = 32_000, width: int = 100) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, width)
        self.windows = nn.ModuleList(nn.Conv1d(width, width, size) for size in (3, 4, 5))
        self.drop = nn.Dropout(0.8)
        self.output = nn.Linear(3 * width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.words(x).transpose(1, 2)  # [n, width, length]
        parts = [functional.relu(window(seen)).amax(2) for window in self.windows]
        return self.output(self.drop(torch.cat(parts, 1)))


class WriterCNN(nn.Module):
    """LEAF's network for FEMNIST; its last layer, `output`, is the one that IFCA clusters.

    With 512 hidden units and 26 outputs, it is used for the letters of EMNIST.

    >>> sum(p.numel() for p in WriterCNN(62).parameters())
    6603710
    >>> sum(p.numel() for p in WriterCNN(26, hidden=512).parameters())
    1671578
    """

    def __init__(self, n_outputs: int, hidden: int = 2048, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, hidden),
            nn.ReLU(),
        )
        self.output = nn.Linear(hidden, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x))


class DeepCNN(nn.Module):
    """A network for CIFAR-10: six 3 x 3 convolutions with pooling, three linear layers.

    >>> sum(p.numel() for p in DeepCNN(10).parameters())
    5851338
    """

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise((3, 32, 64, 128, 128, 256, 256))):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i % 2 else []
        self.body = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            nn.Linear(256 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU()
        )
        self.output = nn.Linear(512, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.dense(self.body(x).flatten(1)))


class TruncatedConv2d(nn.Conv2d):
    """A convolution with initial weights from a truncated normal distribution (deviation 0.05)."""

    def reset_parameters(self) -> None:
        init_truncated(self, 0.05, 0.0)


class TruncatedLinear(nn.Linear):
    """A linear layer with initial weights from a truncated normal distribution (deviation 0.04)."""

    def reset_parameters(self) -> None:
        init_truncated(self, 0.04, 0.1)


def init_truncated(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> None:
    """Draw weights within two standard deviations of zero; biases are constant."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)


class CroppedCNN(nn.Module):
    """IFCA's network for CIFAR-10: it uses the middle 24 x 24 pixels and standardises each image.

    Two convolutions with pooling and local response norm, three linear layers. In training, the
    crop is random (`cropped_views`). The released code also has a penalty on the weights of two
    layers; use `weight_decay` for it.

    >>> sum(p.numel() for p in CroppedCNN(10).parameters())
    1068298
    """

    def __init__(self, n_outputs: int, width: int = 64) -> None:
        super().__init__()
        self.first = TruncatedConv2d(3, width, 5, padding=2)
        self.second = TruncatedConv2d(width, width, 5, padding=2)
        self.norm = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.dense = nn.Sequential(
            TruncatedLinear(width * 6 * 6, 384), nn.ReLU(), TruncatedLinear(384, 192), nn.ReLU()
        )
        self.output = TruncatedLinear(192, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[-1]
        edge = (side - 24) // 2
        x = x[..., edge : edge + 24, edge : edge + 24]
        mean = x.mean((1, 2, 3), keepdim=True)
        deviation = (x - mean).square().mean((1, 2, 3), keepdim=True).sqrt()
        x = (x - mean) / deviation.clamp(min=(3 * 24 * 24) ** -0.5)
        x = self.norm(_halve(functional.relu(self.first(x))))
        x = _halve(self.norm(functional.relu(self.second(x))))
        return self.output(self.dense(x.flatten(1)))


def _halve(x: Tensor) -> Tensor:
    """3 x 3 max pooling with stride two and one row and column of padding (values are >= 0)."""
    return functional.max_pool2d(functional.pad(x, (0, 1, 0, 1)), 3, 2)


def cropped_views(x: Tensor, key: Tensor) -> Tensor:
    """Augment images [n, 3, 32, 32] in [0, 1]: crop, mirror, brightness, contrast.

    A random 24 x 24 crop is moved to the middle of the image, so that shapes stay the same. The
    brightness changes by up to 63 of 255, the contrast by a factor of 0.2 to 1.8 (IFCA's code).

    >>> from coterie.core.random import seed_key
    >>> cropped_views(torch.rand(2, 3, 32, 32), seed_key(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    n, side = x.shape[0], x.shape[-1]
    room = side - 24 + 1
    at = (uniform(fold(key, "crop"), (2, n)) * room).long() - (side - 24) // 2  # [2, n]
    places = torch.arange(side)
    down = (places + at[0][:, None]).clamp(0, side - 1)  # [n, side]
    right = (places + at[1][:, None]).clamp(0, side - 1)
    mirrored = uniform(fold(key, "mirror"), (n, 1)) < 0.5
    right = torch.where(mirrored, right.flip(1), right)
    x = x.gather(2, down[:, None, :, None].expand_as(x))
    x = x.gather(3, right[:, None, None, :].expand_as(x))
    x = x + (uniform(fold(key, "brightness"), (n, 1, 1, 1)) * 2 - 1).to(x.dtype) * (63 / 255)
    middle = x.mean((2, 3), keepdim=True)
    factor = 0.2 + 1.6 * uniform(fold(key, "contrast"), (n, 1, 1, 1)).to(x.dtype)
    return (x - middle) * factor + middle


class CoinFlipRegressor(nn.Module):
    """The model of IFCA's linear study: the inner product of the input with one vector.

    The initial coordinates of the vector are 0 or 1.

    >>> CoinFlipRegressor(3)(torch.ones(5, 3)).shape
    torch.Size([5])
    """

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_inputs))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the coordinates again."""
        self.weight.bernoulli_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


# builders: networks by name, sized for the data


@builder("coin_flip_regressor")
def _coin_flip_regressor(data: Sized) -> nn.Module:
    """IFCA's linear model: one vector of weights, initially 0 or 1, without bias."""
    return CoinFlipRegressor(n_inputs("coin_flip_regressor", data))


@builder("grey_cnn")
def _grey_cnn(data: Sized) -> nn.Module:
    """CLoVE's network for grey 28 x 28 images: 5,142 parameters with ten classes."""
    return GreyCNN(data.n_outputs, _image("grey_cnn", data, 1)[1])


@builder("cifar_cnn")
def _cifar_cnn(data: Sized, width: int = 64) -> nn.Module:
    """CLoVE's network for 32 x 32 colour images: batch norm, dropout, 4.2 million parameters."""
    _image("cifar_cnn", data, 3, 32)
    return ColourCNN(data.n_outputs, width)


@builder("cropped_cnn")
def _cropped_cnn(data: Sized, width: int = 64) -> nn.Module:
    """IFCA's network for 32 x 32 colour images, of which it uses the middle."""
    _image("cropped_cnn", data, 3, 32)
    return CroppedCNN(data.n_outputs, width)


@builder("deep_cnn")
def _deep_cnn(data: Sized) -> nn.Module:
    """The network of FedSoft and FedGMI for 32 x 32 colour images: six convolutions."""
    _image("deep_cnn", data, 3, 32)
    return DeepCNN(data.n_outputs)


@builder("writer_cnn")
def _writer_cnn(data: Sized, hidden: int = 2048, width: int = 32) -> nn.Module:
    """LEAF's network for handwriting; IFCA clusters its last layer, `output`."""
    _image("writer_cnn", data, 1, 28)
    return WriterCNN(data.n_outputs, hidden, width)


@builder("letter_cnn")
def _letter_cnn(data: Sized) -> nn.Module:
    """A network for 28 x 28 letters, 1.7 million parameters with 26 classes."""
    _image("letter_cnn", data, 1, 28)
    return WriterCNN(data.n_outputs, hidden=512)


@builder("autoencoder")
def _autoencoder(data: Sized) -> nn.Module:
    """CLoVE's autoencoder for grey images: six linear layers, 2 million parameters."""
    return Autoencoder(n_inputs("autoencoder", data))


@builder("colour_autoencoder")
def _colour_autoencoder(data: Sized) -> nn.Module:
    """CLoVE's autoencoder for 32 x 32 colour images."""
    _image("colour_autoencoder", data, 3, 32)
    return ColourAutoencoder()


@builder("text_cnn")
def _text_cnn(
    data: Sized, n_words: int = 32_000, n_outputs: int | None = None, width: int = 100
) -> nn.Module:
    """CLoVE's network for news: convolutions over word vectors."""
    return TextCNN(n_outputs or data.n_outputs, n_words, width)


def _image(name: str, data: Sized, channels: int, side: int | None = None) -> tuple[int, int, int]:
    """The shape of images; checks the number of channels and, for some networks, the size."""
    shape = data.sample_shape
    right = isinstance(shape, tuple) and len(shape) == 3 and shape[0] == channels
    if not right or (side is not None and shape[1:] != (side, side)):
        size = "height, width" if side is None else f"{side}, {side}"
        raise ConfigError(
            f"{name}: samples must be images [{channels}, {size}]. Got {describe_shape(shape)}."
        )
    return shape
