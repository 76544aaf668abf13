import pytest
import torch

from coterie import metrics
from coterie.algorithms.census import accumulate
from coterie.algorithms.census.accumulate import append, noise_units, strength
from coterie.clustering.kmeans import kmeans
from coterie.clustering.noise import weighted_ward


def nothing(m):
    return torch.zeros(m, 0, dtype=torch.float64)


def cost(units, counts):
    """Chi-square between the two clients there are."""
    return float(weighted_ward(units, counts).cost[0])


def test_a_constant_added_to_a_client_changes_nothing():
    losses = torch.tensor([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])  # raw distance sqrt 3
    units = noise_units(losses, torch.full((2, 3), 0.1), torch.tensor([100, 100]))
    assert torch.equal(units[0], units[1])
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(6, 4, generator=generator)
    errors = torch.rand(6, 4, generator=generator) + 0.1
    sizes = torch.tensor([10, 20, 30, 40, 50, 60])
    moved = losses + torch.arange(6.0)[:, None]
    torch.testing.assert_close(
        noise_units(moved, errors, sizes), noise_units(losses, errors, sizes), rtol=0, atol=1e-5
    )


def test_permuting_models_or_clients_permutes_the_units():
    generator = torch.Generator().manual_seed(1)
    losses, errors = torch.rand(5, 3, generator=generator), torch.rand(5, 3, generator=generator)
    sizes, models, clients = torch.tensor([9, 8, 7, 6, 5]), [2, 0, 1], [4, 2, 0, 1, 3]
    units = noise_units(losses, errors, sizes)
    torch.testing.assert_close(
        noise_units(losses[:, models], errors[:, models], sizes), units[:, models]
    )
    torch.testing.assert_close(
        noise_units(losses[clients], errors[clients], sizes[clients]), units[clients]
    )


def test_a_round_of_little_noise_is_not_outvoted():
    # Losses (-.5, .5) and (.5, -.5) at noise .01, then equal ones at noise 1; n = 4.
    # Differences of 1 in both columns: units of sqrt(4) * .01 = .02, so 50 apart; the cost is
    # 4 * 4 / 8 * 50 ** 2 * 2 = 10000: a distance of 100 standard errors. A later one adds nothing.
    sizes, apart = torch.tensor([4, 4]), torch.tensor([[-0.5, 0.5], [0.5, -0.5]])
    block = noise_units(apart, torch.full((2, 2), 0.01), sizes)
    units, counts = append(nothing(2), nothing(2), torch.tensor([0, 1]), block, sizes)
    assert cost(units, counts) == pytest.approx(100.0**2)
    block = noise_units(torch.zeros(2, 2), torch.ones(2, 2), sizes)
    units, counts = append(units, counts, torch.tensor([0, 1]), block, sizes)
    assert cost(units, counts) == pytest.approx(100.0**2)
    # The mean of both rounds: a difference of .5 against a noise of .5 = sqrt(.01^2 + 1^2) / 2.
    mean = noise_units(apart / 2, torch.full((2, 2), 0.5), sizes)
    assert cost(*append(nothing(2), nothing(2), torch.tensor([0, 1]), mean, sizes)) < 2.0**2


def test_noise_is_pooled_over_clients_of_more_than_one_sample():
    # n e^2: 4 * .25 = 1 and 16 * .0625 = 1; the third has one sample and knows no error.
    losses = torch.tensor([[1.0, -1.0], [2.0, -2.0], [0.0, 0.0]])
    errors = torch.tensor([[0.5, 0.5], [0.25, 0.25], [0.0, torch.nan]])
    units = noise_units(losses, errors, torch.tensor([4, 16, 1]))
    around = (4 * 1 + 16 * 2) / 21
    torch.testing.assert_close(units[:, 0], torch.tensor([1.0, 2.0, 0.0]).double() - around)


def test_without_any_noise_losses_keep_their_unit():
    units = noise_units(torch.tensor([[0.0, 4.0], [6.0, 0.0]]), torch.zeros(2, 2), torch.ones(2))
    torch.testing.assert_close(units, torch.tensor([[-2.5, 2.5], [2.5, -2.5]]).double())


def test_separated_rounds_survive_a_hundred_rounds_of_noise():
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(20) // 5
    sizes, ids = torch.full((20,), 100), torch.arange(20)
    centres = 1 - 0.6 * torch.eye(4)  # twelve times the noise
    units, counts = nothing(20), nothing(20)
    for number in range(103):
        losses = 0.05 * torch.randn(20, 4, generator=generator)
        losses += centres[truth] if number < 3 else 0.0
        block = noise_units(losses, torch.full((20, 4), 0.05), sizes)
        units, counts = append(units, counts, ids, block, sizes)
    added = weighted_ward(units, counts).labels(4)
    assert metrics.adjusted_rand(added, truth) == 1.0
    last, _ = kmeans(losses.double(), 4, 0)
    assert metrics.adjusted_rand(last, truth) < 0.2
    assert units.shape == (20, 4 * 103)


def test_memory_is_bounded_and_strong_rounds_stay(monkeypatch):
    monkeypatch.setattr(accumulate, "COLUMNS", 6)
    ids, sizes = torch.arange(3), torch.full((3,), 4)
    units, counts = nothing(3), nothing(3)
    for strong in (False, True, False, False, False):
        block = (
            torch.tensor([[-9.0, 9.0], [0.0, 0.0], [9.0, -9.0]]) if strong else torch.zeros(3, 2)
        )
        units, counts = append(units, counts, ids, block, sizes)
    assert units.shape == counts.shape == (3, 6)
    assert strength(units, counts).sort().values[-2:].tolist() == [324.0, 324.0]  # 4 * 2 * 81 / 2
    assert (units[:, -2:] == 0).all()  # this round's


def test_many_clients_keep_fewer_columns(monkeypatch):
    monkeypatch.setattr(accumulate, "ENTRIES", 40)
    ids, sizes = torch.arange(10), torch.ones(10)
    units, counts = nothing(10), nothing(10)
    for _ in range(5):
        units, counts = append(units, counts, ids, torch.rand(10, 3), sizes)
    assert units.shape == (10, 4)
