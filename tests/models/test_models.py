from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

from coterie.core.errors import ConfigError
from coterie.models import CNN, MLP, MODELS, Linear, LinearRegressor, make

FLAT = SimpleNamespace(sample_shape=(64,), n_outputs=10)
IMAGE = SimpleNamespace(sample_shape=(1, 8, 8), n_outputs=10)
LINE = SimpleNamespace(sample_shape=(20,), n_outputs=1, task="regression")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("module", "n_parameters"),
    [
        (Linear(64, 10), 64 * 10 + 10),
        (Linear(64, 10, bias=False), 640),
        (LinearRegressor(20), 20),
        (MLP(64, 10), 64 * 32 + 32 + 32 * 10 + 10),
        (MLP(64, 10, hidden=(8, 4)), 64 * 8 + 8 + 8 * 4 + 4 + 4 * 10 + 10),
        (MLP(64, 10, hidden=()), 650),
        (CNN(1, 8, 10), (9 * 16 + 16) + (16 * 9 * 32 + 32) + (32 * 2 * 2 * 10 + 10)),
        (CNN(3, (9, 6), 2, widths=(4,)), (27 * 4 + 4) + (4 * 4 * 3 * 2 + 2)),
    ],
)
def test_parameter_counts(module, n_parameters):
    assert count(module) == n_parameters


def test_a_regressor_is_an_inner_product():
    module = LinearRegressor(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert module(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]])).tolist() == [6.0, 6.0]


def test_a_regressor_starts_at_a_random_unit_vector():
    module = LinearRegressor(20)
    first = module.weight.clone()
    module.reset_parameters()
    assert module.weight.requires_grad
    assert not torch.equal(first, module.weight)
    for weight in (first, module.weight):
        assert abs(float(weight.detach().norm()) - 1) < 1e-6


@pytest.mark.parametrize(("name", "data"), [("mlp", FLAT), ("cnn", IMAGE), ("linear", FLAT)])
def test_initial_weights_are_those_of_torch(name, data):
    torch.manual_seed(0)
    module = make(name, data)
    torch.manual_seed(0)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers:
        again = type(layer)(*shape_of(layer), **({} if isinstance(layer, nn.Linear) else PADDED))
        assert torch.equal(layer.weight, again.weight)
        assert torch.equal(layer.bias, again.bias)


PADDED = {"kernel_size": 3, "padding": 1}


def shape_of(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("linear", FLAT),
        ("linear", IMAGE),
        ("linear_regressor", LINE),
        ("mlp", IMAGE),
        ("cnn", IMAGE),
    ],
)
def test_every_module_with_weights_can_draw_them_anew(name, data):
    module = make(name, data)
    for layer in module.modules():
        if list(layer.parameters(recurse=False)):
            assert callable(layer.reset_parameters)
            before = [p.clone() for p in layer.parameters(recurse=False)]
            layer.reset_parameters()
            after = layer.parameters(recurse=False)
            assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "data"),
    [("linear", IMAGE), ("linear_regressor", LINE), ("mlp", IMAGE), ("cnn", IMAGE)],
)
def test_models_stack(name, data):
    modules = [make(name, data) for _ in range(3)]
    bank = {
        key: torch.stack([dict(module.named_parameters())[key].detach() for module in modules])
        for key, _ in modules[0].named_parameters()
    }
    x = torch.rand(3, 5, *data.sample_shape)
    out = torch.vmap(lambda params, x: functional_call(modules[0], params, (x,)))(bank, x)
    for i, module in enumerate(modules):
        # Stacked products may add in another order than single ones.
        assert torch.allclose(out[i], module(x[i]), atol=1e-5)
    assert out.shape == ((3, 5) if name == "linear_regressor" else (3, 5, data.n_outputs))


def test_every_model_has_a_builder():
    assert set(MODELS) >= {"linear", "linear_regressor", "mlp", "cnn", "vae", "conv_vae"}
    assert count(make("mlp", FLAT, hidden=[4])) == 64 * 4 + 4 + 4 * 10 + 10
    assert count(make("linear", IMAGE, bias=False)) == 640
    assert count(make("cnn", IMAGE, widths=[2])) == 9 * 2 + 2 + 2 * 16 * 10 + 10


@pytest.mark.parametrize(
    ("name", "data", "options", "sentence"),
    [
        ("mpl", FLAT, {}, "Unknown model 'mpl'. Did you mean 'mlp'"),
        ("mlp", FLAT, {"hiden": (3,)}, "Unknown option of mlp 'hiden'. Did you mean 'hidden'"),
        ("cnn", FLAT, {}, r"images \[channels, height, width\]. Got \[64\]"),
        ("cnn", IMAGE, {"widths": (2, 2, 2, 2)}, "at least 16 pixels wide and high for 4 blocks"),
        ("linear_regressor", FLAT, {}, "regression with one output. .* with 10 outputs"),
        (
            "mlp",
            SimpleNamespace(sample_shape={"a": (2,), "b": (3,)}, n_outputs=2),
            {},
            "samples must be one array. Got a dict of a, b",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name, data, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make(name, data, **options)


GREY = SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=10)
COLOUR = SimpleNamespace(sample_shape=(3, 32, 32), n_outputs=10)
WORDS = SimpleNamespace(sample_shape=(200,), n_outputs=4)


@pytest.mark.parametrize(
    ("name", "data", "options", "parameters"),
    [
        ("mlp", GREY, {"hidden": [200]}, 159_010),
        ("cropped_cnn", COLOUR, {}, 1_068_298),
        ("writer_cnn", SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=62), {}, 6_603_710),
        ("grey_cnn", GREY, {}, 5_142),
        ("grey_cnn", SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=62), {}, 18_506),
        ("cifar_cnn", COLOUR, {}, 4_181_002),
        ("autoencoder", GREY, {}, 2_000_964),
        ("colour_autoencoder", COLOUR, {}, 712_835),
        (
            "mlp",
            SimpleNamespace(sample_shape=(5000,), n_outputs=2),
            {"hidden": [1000, 500, 100]},
            5_551_802,
        ),
        ("text_cnn", WORDS, {"n_outputs": 6}, 3_322_106),
        ("linear_regressor", SimpleNamespace(sample_shape=(20,), n_outputs=1), {}, 20),
        ("coin_flip_regressor", SimpleNamespace(sample_shape=(1000,), n_outputs=1), {}, 1000),
        ("deep_cnn", COLOUR, {}, 5_851_338),
        ("letter_cnn", SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=26), {}, 1_671_578),
    ],
)
def test_published_networks_have_their_published_size(name, data, options, parameters):
    module = make(name, data, **options)
    assert sum(p.numel() for p in module.parameters()) == parameters
    x = torch.rand(3, *data.sample_shape)
    if name == "text_cnn":
        x = torch.randint(0, 20_002, (3, 200))
    out = module.eval()(x)
    if "autoencoder" in name:
        assert out.shape == x.shape
    elif "regressor" in name:
        assert out.shape == (3,)
    else:
        assert out.shape == (3, options.get("n_outputs", data.n_outputs))


def test_images_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"images \[3, 32, 32\]"):
        make("cifar_cnn", GREY)
