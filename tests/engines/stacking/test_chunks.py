from itertools import permutations

import pytest
import torch
from torch import nn

from coterie.algorithms import FedAvg
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import n_bytes
from coterie.engines.stacking import chunks as module
from coterie.engines.stacking.chunks import Gatherer, chunk_size, chunks
from tiny import mean_model, ragged

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_client_is_in_one_chunk(size):
    sizes = torch.tensor([5, 1, 9, 9, 2, 7])
    parts = chunks(torch.arange(6), sizes, size)
    assert sorted(torch.cat(parts).tolist()) == list(range(6))
    assert all(len(part) <= size for part in parts)


def test_clients_of_like_size_run_together():
    # Sizes of clients 4, 0, 2, 3: 2, 5, 9, 9. Positions, largest first.
    parts = chunks(torch.tensor([4, 0, 2, 3]), torch.tensor([5, 1, 9, 9, 2, 7]), 2)
    assert [part.tolist() for part in parts] == [[2, 3], [1, 0]]


def test_nobody_is_no_chunk():
    assert chunks(torch.empty(0, dtype=torch.int64), torch.tensor([1]), 3) == []


def test_a_chunk_is_bounded_by_models_and_by_data():
    data = ragged(10, 20)
    small = FedAvg(mean_model(), LocalSGD(0.1))
    # One sample: 4 float64 + int64 + bool + float32 = 45 bytes, the largest client has 20.
    assert chunk_size(small, data) == min(4096, module.DATA // (20 * 45))
    wide = Model(nn.Sequential(nn.Linear(1000, 1000, bias=False)))  # 4 MB
    assert chunk_size(FedAvg(wide, LocalSGD(0.1)), data) == module.MODELS // 4_000_000
    assert chunk_size(None, data) == 4096


def test_a_chunk_has_at_least_one_client():
    huge = FedAvg(Model(nn.Sequential(nn.Linear(3000, 3000, bias=False))), LocalSGD(0.1))
    assert chunk_size(huge, ragged(2)) == 1


# A client of two samples has 90 bytes.


@pytest.mark.parametrize(("budget", "kept"), [(1000, True), (200, False)])
def test_gathered_batches_are_kept_if_those_of_all_clients_fit(budget, kept):
    one, ids = Gatherer(ragged(2, 2, 2), CPU, budget), torch.tensor([0])
    first = one.batch("train", ids)
    again = one.batch("train", ids)
    assert (again is first) == kept
    assert torch.equal(again.x, first.x)


def test_batches_of_changing_cohorts_do_not_pile_up():
    # Two passes over three clients of two training rows and, padded, one of each other split.
    one = Gatherer(ragged(2, 2, 2), CPU)
    for order in permutations(range(3)):
        assert one.batch("train", torch.tensor(order)).mask.shape == (3, 2)
        assert sum(n_bytes(batch) for batch in one._kept.values()) <= 2 * 3 * 45 * (2 + 1 + 1)


def test_the_batches_of_all_clients_stay_while_cohorts_change():
    one = Gatherer(ragged(2, 2, 2, 2), CPU)
    everyone = one.batch("train", torch.arange(4))
    for order in permutations(range(4), 2):
        one.batch("train", torch.tensor(order))
        assert one.batch("train", torch.arange(4)) is everyone


def test_splits_are_not_confused():
    one = Gatherer(ragged(2, 3), CPU)
    ids = torch.arange(2)
    assert one.batch("train", ids).mask.sum() == 5
    assert one.batch("validation", ids).mask.sum() == 0


def test_a_chunk_is_bounded_by_what_layers_put_out():
    # 4 inputs -> 1000 float64 -> 1000 float64: 16,000 bytes a sample, batches of 10 samples.
    net = Model(nn.Sequential(nn.Linear(4, 1000), nn.Tanh()), dtype=torch.float64)
    method = FedAvg(net, LocalSGD(0.1, batch_size=10))
    assert chunk_size(method, ragged(10, 20)) == module.OUTPUTS // 160_000
