import pytest
import torch
from torch import nn

from coterie.core.layers import (
    HalvingPool,
    KeyedDropout,
    MaskedBatchNorm,
    current_mode,
    evaluating,
    training,
)
from coterie.core.random import fold, normal, seed_key

KEY = seed_key(2)


def ones(n):
    return torch.ones(n, dtype=torch.bool)


def cases():
    for momentum in (0.1, 0.7, None):
        for affine in (True, False):
            yield nn.BatchNorm1d(3, momentum=momentum, affine=affine), (5, 3)
            yield nn.BatchNorm1d(3, momentum=momentum, affine=affine), (5, 3, 4)
            yield nn.BatchNorm2d(3, momentum=momentum, affine=affine), (5, 3, 2, 4)


@pytest.mark.parametrize(("torchs", "shape"), list(cases()))
def test_batch_norm_is_torchs_where_nothing_is_padded(torchs, shape):
    torchs = torchs.double()
    if torchs.affine:
        torchs.weight.data, torchs.bias.data = normal(KEY, (2, 3), torch.float64)
    ours = MaskedBatchNorm(torchs)
    # Ours writes no buffer, so that the layer's own stay torch's, the truth.
    old = {name: b.clone() for name, b in torchs.named_buffers()}
    seen = dict(old)
    for step in range(3):
        x = normal(fold(KEY, step), shape, torch.float64)
        with training(ones(5), KEY) as mode:
            y = torch.func.functional_call(ours, seen, (x,))
        renewed = {id(before): after for before, after in mode.updates}
        seen = {name: renewed[id(value)] for name, value in seen.items()}
        assert torch.allclose(y, torchs.train()(x), rtol=1e-12, atol=1e-12)
        for name, value in torchs.named_buffers():
            assert torch.allclose(seen[name], value, rtol=1e-12, atol=1e-12)
            assert seen[name].dtype == value.dtype
    x = normal(KEY, shape, torch.float64)
    y = torch.func.functional_call(ours, seen, (x,))
    assert torch.allclose(y, torchs.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 2)])
def test_padding_does_not_enter_batch_statistics(shape):
    layer = MaskedBatchNorm(nn.BatchNorm1d(3).double())
    x = normal(KEY, shape, torch.float64)
    padded = torch.cat([x, 100 * torch.ones(4, *shape[1:], dtype=torch.float64)])
    with training(ones(5), KEY) as plain:
        y = layer(x)
    with training(torch.arange(9) < 5, KEY) as masked:
        z = layer(padded)
    assert torch.allclose(z[:5], y, atol=1e-12)
    for (_, a), (_, b) in zip(plain.updates, masked.updates, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_axes_folded_into_the_batch_are_masked_with_their_sample():
    # Two samples of three positions each, the second one padding.
    layer = MaskedBatchNorm(nn.BatchNorm1d(1).double())
    x = torch.tensor([[0.0], [1.0], [2.0], [50.0], [50.0], [50.0]], dtype=torch.float64)
    with training(torch.tensor([True, False]), KEY):
        mean, _, count = layer.statistics(x, current_mode().mask)
    assert (mean.item(), count.item()) == (1.0, 3.0)


def test_a_batch_of_one_row_is_taken():
    # torch refuses it; here it is normalised to zero, and only its mean is remembered.
    layer = MaskedBatchNorm(nn.BatchNorm1d(2))
    with training(ones(1), KEY) as mode:
        assert layer(torch.tensor([[3.0, 4.0]])).tolist() == [[0.0, 0.0]]
    assert all(bool(torch.isfinite(new).all()) for _, new in mode.updates)


def test_evaluation_writes_nothing():
    layer = MaskedBatchNorm(nn.BatchNorm1d(2))
    before = layer.running_mean.clone()
    layer(torch.ones(3, 2))
    assert torch.equal(layer.running_mean, before)
    assert current_mode().updates == []


def test_without_running_statistics_evaluation_leaves_padding_out_too():
    layer = MaskedBatchNorm(nn.BatchNorm1d(1, track_running_stats=False))
    x = torch.tensor([[1.0], [3.0], [77.0]])
    with evaluating(torch.tensor([True, True, False])):
        masked = layer(x)
    assert torch.allclose(masked[:2], layer(x[:2]))


@pytest.mark.parametrize(("channels", "shape"), [(False, (6, 5)), (True, (6, 5, 3, 3))])
def test_dropout_drops_and_rescales(channels, shape):
    layer = KeyedDropout(0.25, channels=channels)
    with training(ones(6), KEY):
        y = layer(torch.ones(shape))
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    if channels:  # a channel goes or stays as a whole
        assert bool((y.amax((2, 3)) == y.amin((2, 3))).all())


def test_dropout_drops_the_stated_share():
    with training(ones(100), KEY):
        kept = KeyedDropout(0.3)(torch.ones(100, 1000)) > 0
    assert abs(float(kept.double().mean()) - 0.7) < 0.008  # five deviations


def test_dropout_does_not_depend_on_padding():
    layer = KeyedDropout(0.5)
    with training(ones(4), KEY):
        short = layer(torch.ones(4, 7))
    with training(torch.arange(9) < 4, KEY):
        long = layer(torch.ones(9, 7))
    assert torch.equal(short, long[:4])


def test_each_layer_and_each_key_drops_its_own():
    layer, x = KeyedDropout(0.5), torch.ones(4, 50)
    with training(ones(4), KEY):
        first, second = layer(x), layer(x)
    with training(ones(4), fold(KEY, 1)):
        other = layer(x)
    with training(ones(4), KEY):
        again = layer(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_all(p, factor):
    with training(ones(2), KEY):
        assert KeyedDropout(p)(torch.ones(2, 2)).tolist() == [[factor] * 2] * 2


def test_dropout_is_off_in_evaluation():
    assert torch.equal(KeyedDropout(0.9)(torch.ones(3)), torch.ones(3))


def test_training_mode_ends_with_an_error():
    with pytest.raises(RuntimeError), training(ones(1), KEY):
        raise RuntimeError
    assert not current_mode().training


@pytest.mark.parametrize("size", [(6, 8), (7, 9), (2, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_halving_pool_is_torchs_max_pooling(size, layout):
    x = normal(KEY, (4, 3, *size), torch.float64).round(decimals=1)  # some are equal
    x = x.to(memory_format=layout)
    expected = nn.MaxPool2d(2)(x)
    assert torch.equal(HalvingPool()(x), expected)
    assert torch.equal(HalvingPool()(x[0]), expected[0])  # a single image
    slopes = []
    for layer in (HalvingPool(), nn.MaxPool2d(2)):
        leaf = x.clone().requires_grad_()
        with training(ones(4), KEY):
            (layer(leaf) ** 2).sum().backward()
        slopes.append(leaf.grad)
    assert torch.equal(*slopes)


def test_halving_pool_stands_for_plain_pooling_of_two_by_two_only():
    plain = [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), 2)]
    others = [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2),
    ]
    assert all(map(HalvingPool.stands_for, plain))
    assert not any(map(HalvingPool.stands_for, others))
