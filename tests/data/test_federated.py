from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import codes, fold, seed_key
from coterie.core.tree import Tree, leaves
from coterie.data.arrays import from_arrays
from coterie.data.federated import FederatedData, RowIndex

NAMES = ("ann", "bob", "cat")


def small(**changes) -> FederatedData:
    """Three clients of 3, 1 and 2 training rows; ann and cat have one test row each."""
    options = {
        "x": torch.arange(16.0).reshape(8, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], dtype=torch.uint8),
        "rows": {
            "train": RowIndex.of([[4, 1, 0], [3], [2, 5]]),
            "test": RowIndex.of([[6], [], [7]]),
        },
        "names": NAMES,
        "task": "classification",
        "n_outputs": 3,
        "truth": torch.tensor([0, 1, 0]),
    }
    return FederatedData(**(options | changes))


def test_gather_equals_the_slices_of_each_client():
    data = small()
    batch = data.gather("train", torch.tensor([0, 1, 2]))
    assert batch.x.shape == (3, 3, 2)
    for i, rows in enumerate([[4, 1, 0], [3], [2, 5]]):
        assert torch.equal(batch.x[i, batch.mask[i]], data.x[rows])
        assert torch.equal(batch.y[i, batch.mask[i]], data.y[rows].long())
        assert int(batch.mask[i].sum()) == len(rows)
        assert batch.mask[i, : len(rows)].all()
    assert batch.y.dtype == torch.int64
    assert batch.weight.dtype == torch.float32
    assert (batch.weight == 1).all()


def test_the_order_of_ids_orders_the_clients_and_nothing_else():
    data = small()
    one = data.gather("train", torch.tensor([0, 1, 2]))
    other = data.gather("train", torch.tensor([2, 0, 1]))
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(a[[2, 0, 1]], b)


def test_padding_repeats_the_first_real_row():
    data = small()
    batch = data.gather("train", torch.tensor([1, 0]))
    assert batch.mask[0].tolist() == [True, False, False]
    assert torch.equal(batch.x[0], data.x[[3, 3, 3]])
    assert torch.equal(batch.y[0], data.y[[3, 3, 3]].long())


def test_a_chunk_is_as_long_as_its_largest_client():
    assert small().gather("train", torch.tensor([1, 2])).x.shape == (2, 2, 2)


def test_a_client_without_rows_is_padded_with_a_training_row():
    data = small()
    batch = data.gather("test", torch.tensor([0, 1]))
    assert batch.mask.tolist() == [[True], [False]]
    assert torch.equal(batch.x[1, 0], data.x[3])
    nothing = data.gather("validation", torch.tensor([0, 2]))
    assert not nothing.mask.any()
    assert torch.equal(nothing.x[:, 0], data.x[[4, 2]])


def test_nobody_asked_gives_an_empty_chunk():
    batch = small().gather("train", torch.tensor([], dtype=torch.int64))
    assert batch.x.shape[0] == 0
    assert batch.x.shape[2:] == (2,)


def test_sizes_and_length():
    data = small()
    assert len(data) == 3
    assert data.sizes("train").tolist() == [3, 1, 2]
    assert data.sizes("validation").tolist() == [0, 0, 0]
    assert data.sizes("test").tolist() == [1, 0, 1]
    assert data.sizes("train").dtype == torch.int64


def turn(x: Tensor, facts: Tree) -> Tensor:
    return x.float() * facts["sign"] + facts["shift"]


def test_a_transform_sees_each_client_with_its_own_facts():
    facts = {
        "sign": torch.tensor([1.0, -1.0, 2.0]),
        "shift": torch.tensor([[0, 1], [0, 0], [5, 5]]),
    }
    data = small(x=torch.arange(16, dtype=torch.uint8).reshape(8, 2), client_facts=facts)
    turned = replace(data, transform=turn)
    ids = torch.tensor([2, 0])
    x = turned.gather("train", ids).x
    plain = data.gather("train", ids).x.float()
    assert x.dtype == torch.float32
    assert torch.equal(x[0], plain[0] * 2 + 5)
    assert torch.equal(x[1], plain[1] + torch.tensor([0, 1]))
    assert torch.equal(turned.facts(ids)["sign"], torch.tensor([2.0, 1.0]))


def test_a_batched_transform_sees_the_whole_chunk():
    def centre(x: Tensor, facts: Tree) -> Tensor:
        assert x.ndim == 3
        return x - facts["middle"][:, None]

    centre.batched = True
    data = small(client_facts={"middle": torch.ones(3, 2)}, transform=centre)
    assert torch.equal(
        data.gather("train", torch.tensor([0])).x, small().gather("train", torch.tensor([0])).x - 1
    )


def test_a_transform_may_change_shape_and_type():
    data = small(
        x=torch.arange(16, dtype=torch.uint8).reshape(8, 2),
        transform=lambda x, facts: (x / 255).double().reshape(-1, 1, 2),
    )
    assert data.sample_shape == (1, 2)
    assert data.dtype == torch.float64


def test_inputs_may_be_a_dict():
    x = {"image": torch.rand(8, 2, 2), "token": torch.arange(8)[:, None]}
    data = small(x=x)
    batch = data.gather("train", torch.tensor([2, 1]))
    assert torch.equal(batch.x["token"], torch.tensor([[[2], [5]], [[3], [3]]]))
    assert data.sample_shape == {"image": (2, 2), "token": (1,)}
    assert "image" in repr(data)


def test_the_representation_does_not_tell_the_groups():
    text = repr(small(name="toy", truth=torch.tensor([0, 1, 7])))
    assert text == (
        "FederatedData('toy', 3 clients, 6 train + 2 test samples, "
        "classification, x [2], 3 outputs)"
    )


def test_a_subset_keeps_what_belongs_to_its_clients():
    data = small(client_facts={"a": torch.arange(3)}, options={"seed": 1})
    part = data.subset(torch.tensor([2, 0]))
    assert part.names == ("cat", "ann")
    assert part.truth.tolist() == [0, 0]
    assert part.facts(torch.tensor([0]))["a"].tolist() == [2]
    for split in ("train", "test"):
        for a, b in zip(
            leaves(part.gather(split, torch.tensor([0, 1]))),
            leaves(data.gather(split, torch.tensor([2, 0]))),
            strict=True,
        ):
            assert torch.equal(a, b)
    assert part.options is None  # the options would make all clients again
    assert part.x is data.x


def test_a_subset_of_unknown_clients_is_refused():
    with pytest.raises(DataError, match=r"ids must lie in 0\.\.2\. Got 3"):
        small().subset(torch.tensor([3]))


def test_hold_out_moves_rows_and_loses_none():
    data = from_arrays([torch.arange(n * 1.0)[:, None] for n in (1, 2, 10, 40)], test_fraction=0.0)
    held = data.hold_out(0.25, seed=3)
    assert held.sizes("validation").tolist() == [0, 1, 2, 10]
    assert (held.sizes("train") + held.sizes("validation")).tolist() == [1, 2, 10, 40]
    for client in range(4):
        rows = [
            held.rows[split].of_clients(torch.tensor([client])).index
            for split in ("train", "validation")
        ]
        whole = torch.cat(rows).sort().values
        assert torch.equal(whole, data.rows["train"].of_clients(torch.tensor([client])).index)


def test_hold_out_depends_on_the_seed_and_not_on_the_other_clients():
    data = from_arrays([torch.rand(30, 1) for _ in range(4)], test_fraction=0.0)
    held = data.hold_out(0.5, seed=0)
    assert held.fingerprint() == data.hold_out(0.5, seed=0).fingerprint()
    assert held.fingerprint() != data.hold_out(0.5, seed=1).fingerprint()
    alone = data.subset(torch.tensor([2])).hold_out(0.5, seed=0)
    assert torch.equal(
        alone.rows["validation"].index, held.rows["validation"].of_clients(torch.tensor([2])).index
    )
    own = [held.rows["validation"].of_clients(torch.tensor([i])) for i in range(4)]
    assert len({tuple((rows.index % 30).tolist()) for rows in own}) == 4


def test_hold_out_twice_is_refused():
    with pytest.raises(DataError, match="without validation rows"):
        from_arrays([torch.rand(9, 1)]).hold_out(0.3, 0).hold_out(0.3, 0)
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\)\. Got 1"):
        small().hold_out(1.0, 0)


def test_codes_of_names_fold_like_the_names():
    key = seed_key(4)
    found = fold(key, codes(["ann", "bob"]))
    assert found.tolist() == [int(fold(key, "ann")), int(fold(key, "bob"))]


def test_the_fingerprint_follows_the_data_alone():
    data = small()
    # A stored value: it must not change from one process to the next.
    assert data.fingerprint() == "be06f9ef82866bab0bb130413c829787948a38c44da7a0ad4a532ab31a0794c3"
    assert small(notes=("a note",), truth=None).fingerprint() == data.fingerprint()
    changed = data.x.clone()
    changed[7, 1] += 1
    others = [
        small(x=changed),
        small(names=("ann", "bob", "cas")),
        small(
            rows={
                "train": RowIndex.of([[4, 1, 0], [3], [5, 2]]),
                "test": RowIndex.of([[6], [], [7]]),
            }
        ),
        small(
            rows={
                "train": RowIndex.of([[4, 1], [0, 3], [2, 5]]),
                "test": RowIndex.of([[6], [], [7]]),
            }
        ),
        small(client_facts={"a": torch.zeros(3)}),
        small(y=data.y.long()),
        small(transform=turn),
    ]
    assert len({other.fingerprint() for other in [data, *others]}) == len(others) + 1


def test_a_hundred_thousand_clients_are_cut_and_gathered():
    m = 100_000
    data = FederatedData(
        torch.zeros(3 * m, 4, dtype=torch.uint8),
        torch.zeros(3 * m, dtype=torch.uint8),
        {"train": RowIndex.blocks(torch.full((m,), 3))},
        names=tuple(map(str, range(m))),
        task="classification",
        n_outputs=2,
    ).hold_out(0.3, seed=0)
    batch = data.gather("train", torch.arange(0, m, 100))
    assert batch.x.shape == (1000, 2, 4)
    assert data.sizes("train").unique().tolist() == [2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"names": ("ann", "bob", "ann")}, "names must be unique. 'ann' occurs more than once"),
        ({"names": ()}, "at least one client. Got none"),
        ({"names": ("ann", "bob")}, "'train' rows must cover all 2 clients. They cover 3"),
        ({"y": torch.zeros(7).long()}, "x has 8 rows, y has 7"),
        ({"task": "clasification"}, "Unknown task 'clasification'. Did you mean 'classification'"),
        ({"rows": {"trian": RowIndex.none(3)}}, "Unknown split 'trian'. Did you mean 'train'"),
        ({"rows": {"train": RowIndex.of([[0], [], [1]])}}, "Client 'bob' has none. Leave it out"),
        ({"rows": {"train": RowIndex.of([[0], [1, 8], [1]])}}, "Client 'bob', train row 1 points"),
        ({"rows": {"train": RowIndex.of([[0], [1], [-1]])}}, "Client 'cat', train row 0 points"),
        ({"client_facts": {"a": torch.zeros(2)}}, "'a' must have a row for each of 3 clients"),
        ({"truth": torch.zeros(4)}, "'truth' must have a row for each of 3 clients. It has 4"),
        ({"n_outputs": 2}, r"labels must lie in 0..1. Client 'cat', train row 0 of y does not"),
    ],
)
def test_what_does_not_fit_is_refused(changes, sentence):
    with pytest.raises(DataError, match=sentence):
        small(**changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_traced_to_client_and_row(value):
    x = torch.zeros(8, 2)
    x[5, 1] = value
    with pytest.raises(DataError, match="Client 'cat', train row 1 of x is nan or infinite"):
        small(x=x)
    spare = torch.zeros(9, 2)
    spare[8] = value
    small(x=spare, y=torch.zeros(9).long())  # nobody's row


def test_an_unknown_split_is_refused():
    for call in (small().sizes, lambda split: small().gather(split, torch.tensor([0]))):
        with pytest.raises(DataError, match=r"Unknown split 'tests'\. Did you mean 'test'"):
            call("tests")


# from_arrays


def arrays(*sizes: int, d: int = 2) -> list[np.ndarray]:
    return [np.arange(n * d, dtype=np.float64).reshape(n, d) + 100 * n for n in sizes]


def test_integer_targets_are_labels_and_keep_their_names():
    data = from_arrays(arrays(3, 4), [np.array([7, 3, 7]), np.array([3, 3, 9, 7])], test_fraction=0)
    assert (data.task, data.n_outputs, data.classes) == ("classification", 3, ("3", "7", "9"))
    assert data.gather("train", torch.tensor([0])).y.tolist() == [[1, 0, 1]]
    assert data.names == ("client-0", "client-1")
    assert data.name is None
    assert data.options is None


def test_text_targets_are_labels():
    ys = [["dog", "cat"], np.array(["cow", "cow"], dtype=object)]
    data = from_arrays(arrays(2, 2), ys, test_fraction=0)
    assert data.classes == ("cat", "cow", "dog")


def test_a_given_number_of_outputs_leaves_labels_as_they_are():
    data = from_arrays(arrays(2, 2), [[0, 5], [5, 5]], n_outputs=10, test_fraction=0)
    assert data.n_outputs == 10
    assert data.gather("train", torch.tensor([0])).y.tolist() == [[0, 5]]


def test_float_targets_are_numbers_to_predict():
    data = from_arrays(arrays(3), [torch.rand(3, 2, dtype=torch.float64)])
    assert (data.task, data.n_outputs, data.classes) == ("regression", 2, None)
    assert data.y.dtype == torch.float32
    assert from_arrays(arrays(3), [np.arange(3)], task="regression").y.dtype == torch.float32
    assert from_arrays(arrays(3), [np.arange(3.0)]).n_outputs == 1


def test_no_targets_ask_for_reconstruction():
    data = from_arrays([torch.rand(4, 2, 3)])
    assert (data.task, data.n_outputs) == ("reconstruction", 6)
    assert data.gather("train", torch.tensor([0])).y.eq(0).all()


def test_rows_stay_with_their_targets():
    xs = arrays(5, 20)
    data = from_arrays(xs, [x[:, 0] * 2 for x in xs])
    for split in ("train", "test"):
        batch = data.gather(split, torch.tensor([0, 1]))
        assert torch.equal(batch.y, batch.x[..., 0] * 2)


def test_the_test_rows_are_a_keyed_part_of_every_client():
    xs = arrays(1, 2, 10, 50)
    data = from_arrays(xs, names=list("abcd"))
    assert data.sizes("test").tolist() == [0, 1, 2, 10]
    assert data.sizes("train").tolist() == [1, 1, 8, 40]
    both = torch.cat([data.rows["train"].index, data.rows["test"].index])
    assert both.sort().values.tolist() == list(range(63))
    assert data.fingerprint() == from_arrays(xs, names=list("abcd")).fingerprint()
    assert data.fingerprint() != from_arrays(xs, names=list("abcd"), seed=1).fingerprint()


def test_given_test_data_are_used():
    xs, test = arrays(3, 2), arrays(0, 4)
    data = from_arrays(
        xs, [[0, 1, 0], [1, 1]], test=(test, [np.zeros(0, dtype=int), [2, 0, 1, 2]]), truth=[1, 0]
    )
    assert data.sizes("train").tolist() == [3, 2]
    assert data.sizes("test").tolist() == [0, 4]
    batch = data.gather("test", torch.tensor([1]))
    assert torch.equal(batch.x[0], torch.tensor(test[1], dtype=torch.float32))
    assert batch.y.tolist() == [[2, 0, 1, 2]]
    assert data.n_outputs == 3
    assert data.truth.tolist() == [1, 0]


def test_bytes_stay_bytes_and_leave_as_floats():
    data = from_arrays([np.full((2, 1, 2), 255, dtype=np.uint8)], [[0, 1]], test_fraction=0)
    assert data.x.dtype == torch.uint8
    x = data.gather("train", torch.tensor([0])).x
    assert x.dtype == torch.float32
    assert (x == 1).all()


def test_other_integers_stay_integers():
    data = from_arrays([torch.arange(6, dtype=torch.int32).reshape(3, 2)], [[0, 1, 0]])
    assert data.gather("train", torch.tensor([0])).x.dtype == torch.int64


def test_the_arrays_given_are_not_touched():
    x = torch.zeros(4, 1)
    data = from_arrays([x], [torch.zeros(4)])
    x += 1
    assert data.x.eq(0).all()


NAN = np.array([[0.0], [np.nan]])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"xs": []}, "xs must hold at least one client"),
        (
            {"xs": [np.ones((2, 3)), np.ones((2, 4))]},
            r"'client-0' has \[3\], 'client-1' has \[4\]",
        ),
        ({"xs": arrays(2), "names": ["a", "b"]}, "names must have one entry for each of 1 clients"),
        ({"xs": arrays(2, 2), "names": ["a", "a"]}, "unique. 'a' occurs more than once"),
        ({"xs": arrays(2, 0)}, "Client 'client-1' has none"),
        ({"xs": [NAN]}, "Client 'client-0', train row 1 of x is nan"),
        (
            {"xs": [np.full((2, 1), 1e300)]},
            "'client-0', train row 0 of x is nan or infinite",
        ),
        ({"xs": arrays(2, d=1), "ys": [[0.0, np.inf]]}, "train row 1 of y is nan or infinite"),
        ({"xs": arrays(2, d=1), "test": ([NAN], None)}, "'client-0', test row 1 of x is nan"),
        ({"xs": [np.ones(3)]}, r"has x of shape \[3\]. For a single feature use x\[:, None\]"),
        ({"xs": [[["a", "b"]]]}, "x must hold numbers. Client 'client-0' has x of type <U1"),
        ({"xs": [np.ones((2, 1), complex)]}, "x must hold numbers.*complex128"),
        ({"xs": [[[1, 2], [3]]]}, "x of a client must be one array. Client 'client-0' has none"),
        (
            {"xs": [np.ones((2, 1)), np.ones((2, 1), np.uint8)]},
            "inputs of one type. 'client-0' has torch.float32, 'client-1' has torch.uint8",
        ),
        ({"xs": arrays(2, 2), "ys": [[0, 1]]}, "ys must have one entry for each of 2 clients"),
        ({"xs": arrays(2), "ys": [[0, 1, 1]]}, "'client-0' has 2 rows of x and 3 of y"),
        ({"xs": arrays(2), "ys": [0]}, "y must have a row per sample"),
        ({"xs": arrays(2), "ys": [[0j, 1j]]}, "y must hold numbers or text.*complex128"),
        (
            {"xs": arrays(2, 2), "ys": [[0, 1], ["a", "b"]]},
            "numbers for all clients or text",
        ),
        ({"xs": arrays(2), "ys": [[[0, 1], [1, 1]]]}, r"one label per sample .* shape \[2, 2\]"),
        (
            {"xs": arrays(2, 2), "ys": [[0.0, 1.0], [[0.0], [1.0]]]},
            r"y must hold rows \[\] for regression. Client 'client-1' has y of shape \[2, 1\]",
        ),
        ({"xs": arrays(2), "ys": [[0.5, 1]], "task": "classification"}, "Got floats"),
        ({"xs": arrays(2), "ys": [["a", "b"]], "task": "regression"}, "Got text"),
        ({"xs": arrays(2), "ys": [[0, 1]], "task": "reconstruction"}, "takes no targets"),
        ({"xs": arrays(2), "ys": [[0, 1]], "task": "regresion"}, "Did you mean 'regression'"),
        ({"xs": arrays(2), "task": "regression"}, "regression must have targets. Give ys"),
        ({"xs": arrays(2), "ys": [[0, 9]], "n_outputs": 5}, r"labels must lie in 0\.\.4"),
        ({"xs": arrays(2), "ys": [["a", "b"]], "n_outputs": 1}, "at most n_outputs = 1 labels"),
        ({"xs": arrays(2), "ys": [[0, 1]], "test": (arrays(2), None)}, "both have targets"),
        ({"xs": arrays(2, 2), "test": (arrays(2), None)}, "the test xs must have one entry"),
        ({"xs": arrays(2), "truth": [0, 1]}, "'truth' must have a row for each of 1 clients"),
        ({"xs": arrays(2), "truth": ["a"]}, "truth must be one integer per client"),
    ],
)
def test_unusable_arrays_are_refused(given, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(**given)
