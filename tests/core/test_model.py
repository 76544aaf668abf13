import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.core.errors import ConfigError, TaskError
from coterie.core.layers import KeyedDropout, training
from coterie.core.model import LOSSES, Model
from coterie.core.ops import using
from coterie.core.random import fold, normal, seed_key
from coterie.core.tree import row
from coterie.engines.stacking.kernels import Stacked
from tiny import alone, batch, centres, mean_model, ragged, rooms

KEY = seed_key(0)


class Net(nn.Module):
    """Batch norm, dropout, an embedding, a body and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.fc2 = nn.Linear(6, 2)

    def forward(self, x):
        return self.fc2(self.body(self.embed(x).mean(1)))


TOKENS = torch.tensor([[0, 1], [2, 3], [4, 4]])


def test_init_is_a_function_of_the_key():
    for model in (Model(Net), Model(Net())):
        a, b, other = model.init(KEY), model.init(KEY), model.init(fold(KEY, 1))
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not torch.equal(a["fc2.weight"], other["fc2.weight"])


def test_init_leaves_the_global_generator_and_the_users_module_alone():
    module = Net()
    weight, before = module.fc2.weight.detach().clone(), torch.get_rng_state()
    model = Model(module)
    model.init(KEY)["fc2.weight"].add_(1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(module.fc2.weight, weight)
    assert isinstance(module.body[1], nn.BatchNorm1d)


def test_init_does_not_depend_on_the_global_generator():
    model = Model(Net)
    torch.manual_seed(1)
    a = model.init(KEY)
    torch.manual_seed(2)
    assert torch.equal(a["fc2.weight"], model.init(KEY)["fc2.weight"])


def test_a_bank_is_of_equal_or_of_different_models():
    model = mean_model()
    same, different = model.init_many(KEY, 3, same=True), model.init_many(KEY, 3)
    assert len(same["centre"].unique()) == 1
    assert len(different["centre"].unique()) == 3
    # Another number of models does not change the first ones.
    assert torch.equal(model.init_many(KEY, 2)["centre"], different["centre"][:2])


def test_buffers_are_leaves_of_their_own_kind():
    params = Model(Net).init(KEY)
    assert {name for name in params if name.startswith("buffer:")} == {
        "buffer:body.1.running_mean",
        "buffer:body.1.running_var",
        "buffer:body.1.num_batches_tracked",
    }


def test_frozen_weights_count_as_buffers():
    net = Net()
    net.embed.weight.requires_grad_(False)
    assert "buffer:embed.weight" in Model(net).init(KEY)


def test_weights_take_the_stated_type_and_inputs_are_cast():
    model = Model(nn.Sequential(nn.Linear(2, 1)), "squared_error", dtype=torch.float64)
    params = model.init(KEY)
    assert params["0.weight"].dtype == torch.float64
    assert model.apply(params, torch.ones(3, 2)).dtype == torch.float64


def test_apply_is_evaluation():
    model = Model(Net)
    params = model.init(KEY)
    a, b = model.apply(params, TOKENS), model.apply(params, TOKENS)
    assert torch.equal(a, b)  # no dropout
    assert torch.allclose(model.apply(params, TOKENS[:1]), a[:1], atol=1e-6)  # no batch statistics


def test_the_plain_module_predicts_the_same():
    model = Model(Net)
    params = model.init(KEY)
    params["buffer:body.1.running_mean"] += 0.3
    plain = model.plain(params)
    assert isinstance(plain.body[1], nn.BatchNorm1d)
    assert torch.allclose(plain(TOKENS), model.apply(params, TOKENS), atol=1e-6)


def test_split_and_merge_part_body_and_head():
    model = Model(Net, head="fc2")
    params = model.init(KEY)
    shared, clustered = model.split(params)
    assert set(clustered) == {"fc2.weight", "fc2.bias"}
    assert "buffer:body.1.running_mean" in shared
    whole = model.merge(shared, clustered)
    assert set(whole) == set(params)
    assert torch.equal(model.apply(whole, TOKENS), model.apply(params, TOKENS))


def test_a_head_may_have_several_parts():
    _, clustered = Model(Net, head=("fc2", "body.0")).split(Model(Net).init(KEY))
    assert set(clustered) == {"fc2.weight", "fc2.bias", "body.0.weight", "body.0.bias"}


def test_without_a_head_everything_belongs_to_a_group():
    params = Model(Net).init(KEY)
    shared, clustered = Model(Net).split(params)
    assert shared == {}
    assert set(clustered) == set(params)


def test_an_unknown_head_is_refused_with_the_known_parts():
    with pytest.raises(ConfigError) as error:
        Model(Net, head="fc")
    assert str(error.value) == (
        "Model: head must be the name of a part of Net. Got 'fc'. Known: embed, body, fc2."
    )


def test_features_are_what_enters_the_head():
    model = Model(Net, head="fc2")
    params = model.init(KEY)
    features = model.features(params, TOKENS)
    assert features.shape == (3, 6)
    output = functional.linear(features, params["fc2.weight"], params["fc2.bias"])
    assert torch.allclose(output, model.apply(params, TOKENS))


def test_features_stack():
    model = Model(Net, head="fc2")
    bank = model.init_many(KEY, 2)
    stacked = torch.vmap(model.features, in_dims=(0, None))(bank, TOKENS)
    assert torch.allclose(stacked[1], model.features(row(bank, 1), TOKENS), atol=1e-6)


@pytest.mark.parametrize("head", [None, ("fc2", "body")])
def test_features_need_one_head(head):
    model = Model(Net, head=head)
    with pytest.raises(ConfigError, match="head must be the name of one submodule"):
        model.features(model.init(KEY), TOKENS)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="loss must be one of cross_entropy"):
        Model(Net, loss="mse")


def test_a_layer_used_twice_is_swapped_in_both_places():
    drop = nn.Dropout(0.5)
    model = Model(nn.Sequential(nn.Linear(2, 2), drop, nn.Linear(2, 2), drop))
    kinds = [type(layer) for layer in model._training]
    assert kinds == [nn.Linear, KeyedDropout, nn.Linear, KeyedDropout]


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(2, 2, num_layers=2, dropout=0.5), nn.MultiheadAttention(2, 1, dropout=0.1)],
)
def test_dropout_inside_a_layer_is_refused(module):
    with pytest.raises(ConfigError, match="must have dropout=0, because it draws from the global"):
        Model(nn.Sequential(module))


def test_a_lone_batch_norm_is_refused():
    with pytest.raises(ConfigError, match="Got a single BatchNorm1d"):
        Model(nn.BatchNorm1d(2))


def test_losses_by_hand():
    one = batch([[1.0, 3.0]], torch.tensor([[2.0, 2.0]]))
    assert LOSSES["squared_error"](torch.tensor([[1.0, 5.0]]), one).tolist() == [5.0]  # (1 + 9) / 2
    # 1² and 0², averaged over the elements
    assert LOSSES["reconstruction"](torch.tensor([[2.0, 3.0]]), one).tolist() == [0.5]
    even = batch([[0.0]], torch.tensor([1]))
    loss = LOSSES["cross_entropy"](torch.zeros(1, 4), even)
    assert torch.allclose(loss, torch.log(torch.tensor([4.0])))
    # Several labels per sample: averaged over the positions.
    words = batch([[0.0]], torch.tensor([[0, 1]]))
    output = torch.tensor([[[10.0, 10.0], [-10.0, -10.0]]])  # [1, classes, positions]
    assert torch.allclose(LOSSES["cross_entropy"](output, words), torch.tensor([10.0]), atol=1e-4)


def test_a_loss_may_be_the_users_own():
    def absolute(output, batch):
        return (output - batch.x).abs().flatten(1).mean(1)

    model = Model(mean_model().module, absolute, dtype=torch.float64)
    # |2 - 1| and |2 - 5|
    assert model.probe(centres(2.0), batch([[1.0], [5.0]])).tolist() == [2.0]


def test_a_loss_that_averages_by_itself_is_refused():
    model = Model(mean_model().module, lambda output, batch: (output - batch.x).square().mean())
    with pytest.raises(TaskError, match="a loss must not average over the samples itself"):
        model.probe(model.init_many(KEY, 1), batch([[1.0], [5.0]]))


def test_inputs_may_be_a_dict():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x["a"]) + x["b"]

    model = Model(Two, dtype=torch.float64)
    x = {"a": torch.ones(3, 2), "b": torch.ones(3, 2, dtype=torch.int64)}
    assert model.apply(model.init(KEY), x).dtype == torch.float64


# The probe


def test_a_probe_is_the_mean_loss_of_each_model():
    # Client at 0 and 2, models at 0, 1, 4: (0 + 4) / 2, (1 + 1) / 2, (16 + 4) / 2.
    data = batch([[0.0], [2.0], [9.0]], mask=[True, True, False])
    losses = mean_model().probe(centres(0.0, 1.0, 4.0), data)
    assert losses.tolist() == [2.0, 1.0, 10.0]


def test_a_probe_is_in_evaluation_mode():
    model = Model(Net)
    bank, data = model.init_many(KEY, 2), batch(TOKENS, torch.tensor([0, 1, 0]))
    first = model.probe(bank, data)
    assert torch.equal(first, model.probe(bank, data))
    outputs = [model.apply(row(bank, j), TOKENS) for j in (0, 1)]
    by_hand = torch.stack([functional.cross_entropy(output, data.y) for output in outputs])
    assert torch.allclose(first, by_hand)


@pytest.mark.parametrize("kernel", [None, Stacked()])
def test_a_probe_holds_one_model_of_the_bank_at_a_time(kernel):
    seen = []

    def loss(output, batch):
        seen.append(tuple(output.shape))
        return (output - batch.x).square().flatten(1).mean(1)

    model = Model(mean_model().module, loss, dtype=torch.float64)
    bank = centres(0.0, 1.0, 2.0)
    if kernel is None:
        model.probe(bank, batch([[0.0], [2.0]]))
        assert seen == [(2, 1)] * 3
    else:
        clients = torch.stack([torch.tensor([[0.0], [2.0]])] * 4)
        with using(kernel):
            torch.vmap(lambda x: model.probe(bank, batch(x)))(clients)
        assert seen == [(8, 1)] * 3  # four clients of two rows as one batch, thrice


@pytest.mark.parametrize("track", [True, False])
def test_a_stacked_probe_equals_the_probe_of_each_client(track):
    norm = nn.BatchNorm1d(5, track_running_stats=track)
    module = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3))
    model = Model(module, dtype=torch.float64)
    data, bank = ragged(3, 7, 1), model.init_many(KEY, 2)
    with using(Stacked()):
        stacked = torch.vmap(lambda c: model.probe(bank, c.train))(rooms(data))
        own = torch.vmap(lambda c, b: model.probe(b, c.train))(
            rooms(data), {name: torch.stack([leaf] * 3) for name, leaf in bank.items()}
        )
    for i in range(3):
        single = model.probe(bank, alone(data, i).train)
        assert torch.allclose(stacked[i], single, atol=1e-12)
        assert torch.allclose(own[i], single, atol=1e-12)


def test_a_probe_of_parts_of_ones_data_stacks():
    # One client whose three parts share the inputs: only the mask has an axis.
    model, bank = mean_model(), centres(0.0, 1.0)
    data = batch([[0.0], [1.0], [2.0]])
    parts = torch.eye(3, dtype=torch.bool)
    with using(Stacked()):
        losses = torch.vmap(lambda part: model.probe(bank, data.where(part)))(parts)
    assert losses.tolist() == [[0.0, 1.0], [1.0, 0.0], [4.0, 1.0]]


def test_training_mode_is_for_the_training_operation():
    model = Model(Net)
    params = model.init(KEY)
    with training(torch.ones(3, dtype=torch.bool), KEY) as mode:
        noisy = model.apply(params, TOKENS)
    assert not torch.equal(noisy, model.apply(params, TOKENS))
    assert len(mode.updates) == 3
    assert params["buffer:body.1.num_batches_tracked"].item() == 0  # the caller's stay as they are


def test_tied_weights_are_one_leaf():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Model(Tied, dtype=torch.float64)
    params = model.init(KEY)
    assert list(params) == ["a.weight"]
    x, w = normal(KEY, (2, 3), torch.float64), params["a.weight"]
    assert torch.allclose(model.apply(params, x), x @ w.T @ w.T)
    assert torch.allclose(model.plain(params)(x), x @ w.T @ w.T)


def test_features_and_output_come_from_one_pass():
    model = Model(Net, head="fc2")
    params = model.init(KEY)
    features, output = model.features_and_output(params, TOKENS)
    assert torch.equal(features, model.features(params, TOKENS))
    assert torch.equal(output, model.apply(params, TOKENS))


def test_a_model_in_use_can_be_sent_to_another_process():
    model = Model(Net)
    params = model.init(KEY)
    mask = torch.ones(3, dtype=torch.bool)

    def slope(key):
        with training(mask, key):
            weights = {name: leaf for name, leaf in params.items() if leaf.is_floating_point()}
            rest = {name: leaf for name, leaf in params.items() if name not in weights}
            return torch.func.grad(lambda own: model.apply({**rest, **own}, TOKENS).sum())(weights)

    torch.vmap(slope)(torch.stack([KEY, fold(KEY, 1)]))  # leaves the tensors of a stack behind
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.apply(params, TOKENS), model.apply(params, TOKENS))
