import warnings

import pytest
import torch
from torch import nn

from coterie.core.errors import TaskError
from coterie.core.model import Model
from coterie.core.ops import Loop, stack_size, unstack, using
from coterie.core.random import normal, seed_key
from coterie.core.training import LocalSGD
from coterie.core.tree import row, tree_map
from coterie.engines.stacking.kernels import Stacked
from tiny import alone, batch, centre, mean_model, ragged, room, rooms

KEY = seed_key(0)
KERNELS = [Loop(), Stacked()]
SGD = LocalSGD(0.3, epochs=2, batch_size=2, momentum=0.5)


def close(a, b, atol=1e-12):
    return all(torch.allclose(a[name].double(), b[name].double(), atol=atol, rtol=0) for name in a)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layer = nn.Linear(3 * 4, 6)
        self.norm, self.drop, self.out = nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3)

    def forward(self, x):
        tokens = (x * 2).long().clamp(0, 3)
        return self.out(self.drop(torch.relu(self.norm(self.layer(self.embed(tokens).flatten(1))))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x + torch.tanh(self.inner(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.cell, self.out = kind(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.cell(x.reshape(-1, 2, 2))[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = x.reshape(-1, 2, 2)
        return self.out(self.attention(x, x, x, need_weights=False)[0].flatten(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.BatchNorm2d(3, momentum=None),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(27, 3),
    )


NETS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 3)),
    "embedding, batch norm, dropout": Embedded,
    "residual, layer norm": Residual,
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "tied weights": Tied,
    "convolution, batch norm, channel dropout": convolutional,
    "group norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "local",
    [
        SGD,
        LocalSGD(0.2, epochs=2, weight_decay=0.1),
        LocalSGD(0.01, steps=4, batch_size=3, optimizer="adam"),
    ],
    ids=["minibatch", "full", "adam"],
)
def test_a_net_trains_stacked_as_it_does_alone(name, local):
    # Unequal clients in one padded stack against each of them unpadded.
    model, data = Model(NETS[name], dtype=torch.float64), ragged(5, 2, 8, 3)
    params = model.init(KEY)
    with using(Stacked()), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* cannot be stacked")
        stacked = torch.vmap(lambda c: local(c, params, model.losses))(rooms(data))
    for i in range(4):
        single = local(alone(data, i), params, model.losses)
        # Adam divides by the size of the gradient; before batch norm a bias has none but rounding.
        assert close(row(stacked, i), single, atol=1e-8 if local.optimizer == "adam" else 1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=["loop", "stacked"])
def test_four_clients_with_three_experts_are_a_stack_of_twelve(kernel):
    model, data = Model(NETS["residual, layer norm"], dtype=torch.float64), ragged(5, 2, 8, 3)
    experts = model.init_many(KEY, 3)
    sizes = []

    class Counting(type(kernel)):
        def fit(self, fit, stacked):
            sizes.append(stack_size(stacked))
            return super().fit(fit, stacked)

    def one(client):
        def expert(params, j):
            own = client.train.where(client.train.y == j)
            return SGD(client, params, model.losses, on=own, salt=j)

        return torch.vmap(expert)(experts, torch.arange(3))

    with using(Counting()):
        nested = torch.vmap(one)(rooms(data))
    assert sizes == [12]
    for i in range(4):
        client = alone(data, i)
        for j in range(3):
            own = client.train.where(client.train.y == j)
            single = SGD(client, row(experts, j), model.losses, on=own, salt=j)
            assert close(row(row(nested, i), j), single)


def test_an_expert_without_samples_stays_as_it_is():
    # Labels are 0, 1, 2, 0, ...: the client of two samples has none of label 2.
    model, data = Model(NETS["linear"], dtype=torch.float64), ragged(3, 2)
    start = model.init(KEY)
    local = LocalSGD(0.3, momentum=0.9, weight_decay=0.5)

    def one(client):
        own = client.train.where(client.train.y == 2)
        return local(client, start, model.losses, on=own, penalty=lambda p: p["0.weight"].sum())

    with using(Stacked()):
        trained = torch.vmap(one)(rooms(data))
    empty = [i for i in range(2) if not (alone(data, i).train.y == 2).any()]
    assert empty == [1] or empty == [0]
    assert all(torch.equal(row(trained, empty[0])[name], start[name]) for name in start)
    assert not torch.equal(row(trained, 1 - empty[0])["0.weight"], start["0.weight"])


@pytest.mark.parametrize("local", [LocalSGD(0.5, epochs=0), LocalSGD(0.5, steps=0, batch_size=1)])
def test_no_work_is_the_identity_in_a_stack(local):
    model, data = Model(Embedded, dtype=torch.float64), ragged(5, 2)
    params = model.init(KEY)
    with using(Stacked()):
        stacked = torch.vmap(lambda c: local(c, params, model.losses))(rooms(data))
    assert all(torch.equal(stacked[name][1], params[name]) for name in params)


@pytest.mark.parametrize("size", [(3, 1), (1, 3)])
def test_axes_of_length_one_stack(size):
    m, k = size
    model, data = mean_model(), batch([[4.0]])
    bank = {"centre": torch.zeros(k, dtype=torch.float64)}
    clients = tree_map(lambda leaf: torch.stack([leaf] * m), room(data))
    run = torch.vmap(
        torch.vmap(lambda c, p: LocalSGD(0.5)(c, p, model.losses), in_dims=(None, 0)),
        in_dims=(0, None),
    )
    for kernel in KERNELS:
        with using(kernel):
            assert run(clients, bank)["centre"].tolist() == [[4.0] * k] * m


def test_given_is_each_clients_own():
    # Loss (c - x - shift)², one step of 0.5 goes to x + shift.
    def losses(params, batch, key, shift):
        return (params["centre"] - batch.x.flatten() - shift).square()

    clients = tree_map(lambda leaf: torch.stack([leaf] * 3), room(batch([[1.0]])))
    shifts = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    for kernel in KERNELS:
        with using(kernel):
            trained = torch.vmap(lambda c, s: LocalSGD(0.5)(c, centre(0.0), losses, given=(s,)))(
                clients, shifts
            )
        assert trained["centre"].tolist() == [1.0, 2.0, 6.0]


def test_a_direction_stacks():
    def direction(params, batch, key, size):
        inner = torch.func.grad(lambda p: batch.mean((p - batch.x.flatten()).square()))
        return {"centre": size * inner(params["centre"])}

    clients = tree_map(lambda leaf: torch.stack([leaf] * 2), room(batch([[1.0]])))
    sizes = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for kernel in KERNELS:
        with using(kernel):
            trained = torch.vmap(
                lambda c, s: LocalSGD(0.5)(c, centre(0.0), None, direction=direction, given=(s,))
            )(clients, sizes)
        assert trained["centre"].tolist() == [1.0, 0.5]


@pytest.mark.parametrize("kernel", KERNELS, ids=["loop", "stacked"])
@pytest.mark.parametrize("hide", ["penalty", "dict", "helper", "losses"])
def test_a_closure_over_a_clients_tensor_is_refused(kernel, hide):
    model, clients = mean_model(), rooms(ragged(2, 2, shape=(1,)))

    def one(client):
        mine = client.train.x.mean()
        held = {"mine": mine}

        def helper(params):
            return (params["centre"] - mine).square()

        options = {
            "penalty": {"penalty": lambda p: (p["centre"] - mine).square()},
            "dict": {"penalty": lambda p: (p["centre"] - held["mine"]).square()},
            "helper": {"penalty": lambda p: helper(p)},
            "losses": {},
        }[hide]
        losses = (lambda p, b, k: p["centre"] - mine + b.x.flatten()) if hide == "losses" else None
        return LocalSGD(0.5)(client, centre(0.0), losses or model.losses, **options)

    with using(kernel), pytest.raises(TaskError, match="must not close over a client's tensor"):
        torch.vmap(one)(clients)


def test_a_closure_over_a_servers_tensor_is_allowed():
    anchor, model = torch.tensor(2.0, dtype=torch.float64), mean_model()
    clients = tree_map(lambda leaf: torch.stack([leaf] * 2), room(batch([[1.0]])))

    def one(client):
        return LocalSGD(0.25)(
            client,
            centre(0.0),
            model.losses,
            penalty=lambda p: (p["centre"] - anchor).square(),
        )

    with using(Stacked()):
        assert torch.vmap(one)(clients)["centre"].tolist() == [1.5, 1.5]  # gradient -2 - 4


def test_no_gradient_flows_through_training():
    start = centre(1.0)
    start["centre"].requires_grad_()
    trained = LocalSGD(0.1)(room(batch([[3.0]])), start, mean_model().losses)
    assert not trained["centre"].requires_grad


def test_members_of_a_stack_share_what_has_one_row():
    stacked = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[9.0]])}
    assert [member["b"].item() for member in unstack(stacked)] == [9.0, 9.0]


def test_dropout_differs_between_clients():
    model = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2)), dtype=torch.float64)
    x = normal(KEY, (6, 8), torch.float64)
    clients = tree_map(lambda leaf: torch.stack([leaf] * 2), room(batch(x, torch.arange(6) % 2)))
    clients, params = clients._replace(local_key=torch.tensor([1, 2])), model.init(KEY)
    with using(Stacked()):
        trained = torch.vmap(lambda c: LocalSGD(0.5)(c, params, model.losses))(clients)
    assert not torch.allclose(trained["1.weight"][0], trained["1.weight"][1])
