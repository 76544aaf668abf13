import pytest
import torch
from torch import nn

from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.random import fold, normal, permutation, seed_key, uniform
from coterie.core.training import LocalSGD, descend, join, part
from coterie.core.tree import leaves
from coterie.engines.stacking.steps import _schedule
from tiny import alone, batch, centre, mean_model, ragged, room

KEY = seed_key(0)


def tanh_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


# One step by hand


def test_a_step_goes_down_the_gradient():
    # Centre 1, data 3 and 5: gradient 2 (1 - 4) = -6, step 0.1 leads to 1.6.
    trained = LocalSGD(0.1)(room(batch([[3.0], [5.0]])), centre(1.0), mean_model().losses)
    assert trained["centre"].item() == pytest.approx(1.6, abs=1e-12)


def test_training_leaves_the_given_parameters_alone():
    start = centre(1.0)
    LocalSGD(0.1)(room(batch([[3.0]])), start, mean_model().losses)
    assert start["centre"].item() == 1.0


def test_sample_weights_enter_the_objective():
    # Weights 1 and 3 put the mean of 0 and 4 at 3: gradient -6 from 0.
    data = batch([[0.0], [4.0]])._replace(weight=torch.tensor([1.0, 3.0]))
    assert LocalSGD(0.5)(room(data), centre(0.0), mean_model().losses)["centre"].item() == 3.0


def test_the_rate_decays_once_per_round():
    # Gradient of centre 0 at data 1 is -2: rate 0.1 * 0.5**3 moves by 0.025.
    local = LocalSGD(0.1, decay=0.5)
    moved = [
        local(room(batch([[1.0]]), round=r), centre(0.0), mean_model().losses)["centre"].item()
        for r in (-1, 0, 3)
    ]
    assert moved == pytest.approx([0.2, 0.2, 0.025], abs=1e-12)


def test_a_penalty_adds_to_the_objective():
    # (c - 4)² + (c - 1)² from c = 1.
    trained = LocalSGD(0.1, steps=2)(
        room(batch([[4.0]])),
        centre(1.0),
        mean_model().losses,
        penalty=lambda params, anchor: (params["centre"] - anchor["centre"]).square(),
        given=(centre(1.0),),
    )
    # Step 1: 1 + 0.6 = 1.6. Step 2: gradient 2 (1.6 - 4) + 2 (0.6) = -3.6, so 1.96.
    assert trained["centre"].item() == pytest.approx(1.96, abs=1e-12)


def test_given_tensors_reach_the_losses():
    # Loss (c - x - shift)²: gradient of 0 at x = 1, shift = 2 is -6.
    def losses(params, batch, key, shift):
        return (params["centre"] - batch.x.flatten() - shift).square()

    trained = LocalSGD(0.5)(room(batch([[1.0]])), centre(0.0), losses, given=(torch.tensor(2.0),))
    assert trained["centre"].item() == pytest.approx(3.0)


def test_a_direction_replaces_the_gradient():
    def direction(params, batch, key, size):
        return {"centre": size * torch.ones_like(params["centre"])}

    trained = LocalSGD(0.5, steps=2)(
        room(batch([[1.0]])), centre(0.0), None, direction=direction, given=(torch.tensor(3.0),)
    )
    assert trained["centre"].item() == -3.0


def test_on_trains_on_other_data():
    client = room(batch([[4.0], [10.0]]))
    on = client.train.where(torch.tensor([True, False]))
    trained = LocalSGD(0.5)(client, centre(0.0), mean_model().losses, on=on)
    assert trained["centre"].item() == 4.0


def test_zero_epochs_are_the_identity():
    model = Model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    client, params = room(batch(torch.ones(3, 3), torch.tensor([0, 1, 0]))), model.init(KEY)
    for local in (LocalSGD(0.1, epochs=0), LocalSGD(0.1, steps=0, batch_size=2)):
        trained = local(client, params, model.losses)
        assert all(torch.equal(trained[name], params[name]) for name in params)


# Equal to torch's optimisers, step by step


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, lambda p: torch.optim.SGD(p, 0.1)),
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ({"weight_decay": 0.3}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
        (
            {"momentum": 0.5, "weight_decay": 0.3},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.3),
        ),
        ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.1)),
        (
            {"optimizer": "adam", "weight_decay": 0.3},
            lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.3),
        ),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps_are_those_of_torch(options, make, steps):
    model, data = Model(tanh_net, dtype=torch.float64), alone(ragged(6), 0)
    start = model.init(KEY)
    trained = LocalSGD(0.1, steps=steps, **options)(data, start, model.losses)
    module = model.plain(start)
    optimizer = make(module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(data.train.x), data.train.y).backward()
        optimizer.step()
    for name, value in module.named_parameters():
        assert torch.allclose(trained[name], value, atol=1e-13)


# Amount of work


@pytest.mark.parametrize(
    ("options", "n", "steps"),
    [
        ({}, 7, 1),
        ({"epochs": 3}, 7, 3),
        ({"epochs": 3, "batch_size": 2}, 7, 12),  # 4 batches, the last with one row
        ({"epochs": 2, "batch_size": 50}, 7, 2),  # fewer samples than a batch: still trains
        ({"steps": 5, "batch_size": 2}, 7, 5),
        ({"steps": 5}, 7, 5),
        ({"epochs": 0}, 7, 0),
        ({"steps": 5}, 0, 0),
    ],
)
def test_the_amount_of_work(options, n, steps):
    assert LocalSGD(0.1, **options).total_steps(n) == steps


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(ConfigError, match=r"give steps or epochs, not both. Got steps=1, epochs=2"):
        LocalSGD(0.1, steps=1, epochs=2)


def test_every_epoch_visits_every_row_once_and_shuffles_anew():
    local = LocalSGD(0.1, epochs=3, batch_size=4)
    rows, real, _ = local.schedule(torch.arange(12) < 10, KEY)
    assert real.sum(1).tolist() == [4, 4, 2] * 3  # the short last batch is kept
    epochs = [rows[i : i + 3][real[i : i + 3]].tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_steps_go_on_into_the_next_epoch():
    rows, real, keys = LocalSGD(0.1, steps=5, batch_size=4).schedule(
        torch.ones(6, dtype=torch.bool), KEY
    )
    assert real.sum(1).tolist() == [4, 2, 4, 2, 4]
    assert len(keys.unique()) == 5
    assert sorted(rows[2:4][real[2:4]].tolist()) == list(range(6))


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 5}])
def test_stacked_clients_take_the_same_batches(options):
    local = LocalSGD(0.1, batch_size=3, **options)
    sizes = [8, 7, 3, 1, 0]
    masks = torch.arange(8) < torch.tensor(sizes)[:, None]
    keys = fold(KEY, torch.arange(5))
    totals = torch.tensor([local.total_steps(n) for n in sizes])
    rows, real = _schedule(local, masks, keys, totals)
    for i in range(5):
        own_rows, own_real, own_keys = local.schedule(masks[i, : max(sizes[i], 1)], keys[i])
        t = int(totals[i])
        assert len(own_rows) == t == len(own_keys)
        assert real[i, :t].tolist() == own_real.tolist()
        assert torch.equal(rows[i, :t][real[i, :t]], own_rows[own_real])


def test_a_client_with_fewer_samples_than_a_batch_trains():
    trained = LocalSGD(0.5, batch_size=10)(room(batch([[4.0]])), centre(0.0), mean_model().losses)
    assert trained["centre"].item() == 4.0


def test_salt_tells_two_trainings_apart():
    data, model = alone(ragged(9), 0), Model(tanh_net, dtype=torch.float64)
    local, start = LocalSGD(0.5, batch_size=2), model.init(KEY)
    a, b, c = (local(data, start, model.losses, salt=s)["0.weight"] for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# Nothing to learn from


EVERY_OPTIMISER = [
    {},
    {"momentum": 0.9, "weight_decay": 0.5},
    {"optimizer": "adam", "weight_decay": 0.5},
    {"steps": 4, "batch_size": 2, "momentum": 0.9},
]


@pytest.mark.parametrize("options", EVERY_OPTIMISER)
def test_an_empty_batch_changes_nothing(options):
    empty = batch([[4.0], [4.0]], mask=[False, False])
    trained = LocalSGD(0.5, **options)(
        room(empty),
        centre(1.0),
        mean_model().losses,
        penalty=lambda params: params["centre"].square(),  # has a gradient without any data
    )
    assert trained["centre"].item() == 1.0


# Layers that know training mode


def test_buffers_come_back_with_the_parameters():
    # Batch mean 3: running mean 0.1 * 3 after one step, 0.1 * 3 + 0.9 * 0.3 after two.
    model = Model(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), dtype=torch.float64)
    data = room(batch([[2.0], [4.0]], torch.tensor([0, 1])))
    params = model.init(KEY)
    trained = LocalSGD(0.1, steps=2)(data, params, model.losses)
    assert trained["buffer:0.running_mean"].item() == pytest.approx(0.57)
    assert trained["buffer:0.num_batches_tracked"].item() == 2
    assert params["buffer:0.num_batches_tracked"].item() == 0


def test_weight_decay_spares_buffers():
    model = Model(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), dtype=torch.float64)
    data = room(batch([[2.0], [4.0]], torch.tensor([0, 1])))
    plain, decayed = (
        LocalSGD(0.1, weight_decay=w)(data, model.init(KEY), model.losses) for w in (0.0, 0.9)
    )
    assert torch.equal(plain["buffer:0.running_var"], decayed["buffer:0.running_var"])
    assert not torch.equal(plain["1.weight"], decayed["1.weight"])


def test_augmentation_is_keyed_and_differs_by_step():
    seen = []

    def augment(x, key):
        seen.append(uniform(key, ()).item())
        return x + 1

    local = LocalSGD(0.5, steps=2, augment=augment)
    first = local(room(batch([[3.0]])), centre(0.0), mean_model().losses)
    again = local(room(batch([[3.0]])), centre(0.0), mean_model().losses)
    # The reconstruction loss reads the augmented input, 4.
    assert first["centre"].item() == again["centre"].item() == 4.0
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


# The gradient


def test_the_gradient_of_the_squared_loss_has_no_half():
    # (2/n) X^T (X theta - y), X = [[1, 2], [3, 4]], theta = (1, 1), y = (1, 2):
    # residuals 2 and 5, X^T r = (17, 24), times 2/2.
    model = Model(nn.Linear(2, 1, bias=False), "squared_error", dtype=torch.float64)
    data = room(batch([[1.0, 2.0], [3.0, 4.0]], torch.tensor([1.0, 2.0])))
    theta = {"weight": torch.ones(1, 2, dtype=torch.float64)}
    gradient = LocalSGD().gradient(data, theta, model.losses)
    assert gradient["weight"].tolist() == [[17.0, 24.0]]


def test_the_gradient_leaves_padding_out():
    padded = batch([[3.0], [9.0]], mask=[True, False])
    gradient = LocalSGD().gradient(room(padded), centre(1.0), mean_model().losses)
    assert gradient["centre"].item() == -4.0


def test_the_gradient_of_a_drawn_batch_is_that_of_its_rows():
    client = room(batch([[0.0], [1.0], [2.0], [30.0]]))
    order = permutation(fold(client.key, "gradient"), client.train.mask)[:2]
    gradient = LocalSGD(batch_size=2).gradient(client, centre(0.0), mean_model().losses)
    assert gradient["centre"].item() == pytest.approx(-2 * client.train.x[order].mean().item())


def test_the_gradient_is_taken_in_evaluation_mode_and_spares_buffers():
    model = Model(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)),
        dtype=torch.float64,
    )
    x = normal(KEY, (5, 3), torch.float64)
    data, params = room(batch(x, torch.tensor([0, 1, 0, 1, 1]))), model.init(KEY)
    gradient = LocalSGD().gradient(data, params, model.losses)
    module = model.plain(params)
    nn.functional.cross_entropy(module(x), data.train.y).backward()
    for name, value in module.named_parameters():
        assert torch.allclose(gradient[name], value.grad, atol=1e-12)
    for name in params:
        if name.startswith("buffer:"):
            assert not gradient[name].any()
            assert gradient[name].dtype == params[name].dtype


# The tree of parameters


def test_part_and_join_are_inverse():
    tree = {"w": torch.ones(1), "buffer:m": torch.zeros(1), "n": torch.tensor(3)}
    trained, fixed = part(tree)
    assert (len(trained), len(fixed)) == (1, 2)
    again = join(tree, trained, fixed)
    assert all(a is b for a, b in zip(leaves(tree), leaves(again), strict=True))


def test_a_tree_of_several_models_is_trained_as_one():
    def losses(params, batch, key):
        return (params["a"]["centre"] + params["b"][0] - batch.x.flatten()).square()

    start = {"a": centre(0.0), "b": (torch.tensor(0.0, dtype=torch.float64),)}
    trained = LocalSGD(0.25)(room(batch([[4.0]])), start, losses)
    assert trained["a"]["centre"].item() == trained["b"][0].item() == 2.0


def test_descend_steps_a_bank_row_by_row():
    models = {"w": torch.ones(2, 2), "n": torch.tensor([1, 2])}
    gradients = {"w": torch.ones(2, 2), "n": torch.zeros(2, dtype=torch.int64)}
    new = descend(models, gradients, torch.tensor([0.5, 0.0]))
    assert new["w"].tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert new["n"].tolist() == [1, 2]
