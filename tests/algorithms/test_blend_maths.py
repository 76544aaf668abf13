"""Numbers worked out by hand, and what must hold whatever the numbers are."""

import math

import pytest
import torch

from coterie.algorithms.blend import shares as division
from coterie.algorithms.blend import simplex
from coterie.core.random import fold, normal, seed_key, uniform

# division


def part(scores, shares, least=1e-3):
    cost = division.penalties(
        torch.tensor([scores]), torch.zeros(len(scores)), torch.tensor(shares), least
    )
    return int(cost.argmin()), cost[0]


def test_the_prior_can_overrule_two_nats():
    # 10 - log 0.1 = 12.3026 against 12 - log 0.9 = 12.1054
    chosen, cost = part([10.0, 12.0], [0.1, 0.9])
    assert chosen == 1
    assert cost.tolist() == pytest.approx([12.302585, 12.105361], abs=1e-5)
    assert part([10.0, 12.0], [0.5, 0.5])[0] == 0


def test_an_empty_component_comes_back_only_with_a_floor():
    # 10 - log 1 = 10 against 2 - log 0.001 = 8.908
    assert part([10.0, 2.0], [1.0, 0.0])[0] == 1
    assert part([10.0, 2.0], [1.0, 0.0], least=0.0)[0] == 0  # 2 + infinity, for ever


def test_shares_of_highest_likelihood_take_one_step_by_hand():
    # likelihoods (3,1), (1,3), (3,1); from (1/2,1/2) responsibilities are 3/4, 1/4, 3/4, and the
    # fixed point solves a = mean of 3a/(3a+1-a), ...: 5/6
    scores = -torch.tensor([[3.0, 1.0], [1.0, 3.0], [3.0, 1.0]]).double().log()
    real = torch.ones(3, dtype=torch.bool)
    assert division.em_shares(scores, real, 1).tolist() == pytest.approx([7 / 12, 5 / 12])
    assert division.em_shares(scores, real, 500).tolist() == pytest.approx([5 / 6, 1 / 6], abs=1e-6)


def test_padding_does_not_count_in_shares():
    scores = torch.tensor([[0.0, 1.0], [5.0, 0.0]]).double()
    alone = division.em_shares(scores[:1], torch.ones(1, dtype=torch.bool))
    padded = division.em_shares(scores, torch.tensor([True, False]))
    assert torch.equal(alone, padded)


def test_counts_are_unconfused():
    confusion = torch.tensor([[0.8, 0.2], [0.1, 0.9]])
    # .3 * .8 + .7 * .1 = .31
    counts = torch.tensor([[0.31, 0.69], [0.05, 0.95]])
    expected = torch.tensor([[0.3, 0.7], [0.0, 1.0]]).double()
    assert torch.allclose(division.undo_confusion(counts, confusion), expected, atol=1e-6)


def test_the_nearest_shares():
    values = torch.tensor([[0.8, 0.6, -0.1], [1.0, 0.0, 0.0], [0.2, 0.2, 0.2]]).double()
    expected = torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    assert torch.allclose(simplex.project_to_simplex(values), expected, atol=1e-9)


# start


def test_corners_by_successive_projection():
    points = torch.tensor([[0, 0], [4, 0], [0, 3], [1, 1], [2, 0.5], [0.5, 2]]).double()
    found = simplex.corners(points - points.mean(0), 3)
    assert sorted(found.tolist()) == [0, 1, 2]
    # (1, 1) = 1/4 (4, 0) + 1/3 (0, 3) + the rest, 5/12, of (0, 0)
    shares = simplex.barycentric(points[3:4], points[:3])
    assert shares[0].tolist() == pytest.approx([5 / 12, 1 / 4, 1 / 3], abs=1e-9)


def test_equal_points_are_no_trouble():
    assert sorted(simplex.corners(torch.zeros(3, 1), 2).tolist()) == [0, 1]


def test_the_null_point():
    assert simplex.null_point(50, 16) == pytest.approx(2.78, abs=0.1)


@pytest.mark.parametrize(
    ("m", "d"), [pytest.param(50, 16, marks=pytest.mark.slow), (20, 8), (12, 6), (8, 4), (5, 1)]
)
def test_chance_reaches_the_null_point_in_one_case_of_a_hundred(m, d):
    u = normal(fold(seed_key(5), m, d), (20_000, m, d), torch.float64)
    u = u - u.mean(1, keepdim=True)
    largest = torch.linalg.eigvalsh(u.mT @ u / (m - 1))[:, -1]
    above = float((largest > simplex.null_point(m, d)).double().mean())
    assert 0.007 < above < 0.013  # four standard errors


def alike(seed, m=50, d=16):
    """Clients that differ by chance: mean codes of 300 samples."""
    return normal(fold(seed_key(seed), "alike"), (m, d), torch.float64) / math.sqrt(300)


def test_clients_that_are_alike_are_one_component():
    n, found = torch.full((50,), 300), []
    limits = simplex.thresholds(50, 16)
    for seed in range(1000):
        seen = simplex.spectrum(alike(seed), n, torch.eye(16))
        found.append(simplex.count_significant(seen.eigenvalues, limits) == 0)
    assert 0.98 <= sum(found) / len(found) <= 0.999  # 99 % by construction


def moments(seed=0, k=3, m=40, noise=0.0):
    """Means that are the components' indicators, with pure clients; and true shares."""
    draw = -uniform(fold(seed_key(seed), "shares"), (m, k), torch.float64).clamp(min=1e-9).log()
    shares = draw / draw.sum(1, keepdim=True)
    shares[:k] = torch.eye(k).double()
    extra = noise * normal(fold(seed_key(seed), "noise"), (m, k), torch.float64)
    return shares + extra, shares


def test_first_shares_are_exact_where_features_are_indicators():
    means, shares = moments()
    found = simplex.simplex(means, torch.full((40,), 300), 0.25 * torch.eye(3), k=3)
    assert sorted(found.anchors.tolist()) == [0, 1, 2]
    order = found.anchors.argsort()
    assert torch.allclose(found.shares[:, order], shares, atol=1e-9)
    assert simplex.simplex(means, torch.full((40,), 300), 0.01 * torch.eye(3)).counted == 3


def test_an_affine_change_of_features_changes_nothing():
    means, _ = moments(seed=1, noise=0.01)
    n, within = torch.full((40,), 300), 0.05 * torch.eye(3).double()
    turn = torch.tensor([[2.0, 0.3, 0.0], [0.1, 1.0, 0.5], [0.0, 0.2, 3.0]]).double()
    once = simplex.simplex(means, n, within)
    other = simplex.simplex(means @ turn + 7, n, turn.T @ within @ turn)
    assert once.counted == other.counted
    assert torch.equal(once.anchors, other.anchors)
    assert torch.allclose(once.shares, other.shares, atol=1e-8)


def test_numbering_clients_differently_changes_nothing():
    means, _ = moments(seed=2, noise=0.01)
    n, within = torch.full((40,), 300), 0.05 * torch.eye(3).double()
    order = torch.arange(40).flip(0)
    once, other = simplex.simplex(means, n, within), simplex.simplex(means[order], n, within)
    assert torch.equal(once.anchors, order[other.anchors])
    assert torch.allclose(once.shares[order], other.shares, atol=1e-8)


def test_a_client_with_foreign_data_is_left_out():
    means, _ = moments(seed=3, noise=0.001)
    n, within = torch.full((40,), 300), 0.05 * torch.eye(3).double()
    foreign = means.clone()
    foreign[7] = torch.tensor([40.0, -3.0, 9.0])
    found = simplex.simplex(foreign, n, within)
    assert torch.nonzero(found.strange).flatten().tolist() == [7]
    assert found.counted == 3
    assert 7 not in found.anchors


def test_labels_that_differ_are_noticed():
    even = torch.full((10, 4), 25)
    assert not simplex.labels_differ(even)
    assert simplex.labels_differ(even + torch.eye(10, 4) * 40)


def test_components_are_counted_inside_classes():
    key, m, c, d, n = seed_key(5), 40, 4, 3, 30
    shares = uniform(fold(key, "a"), (m,), torch.float64)
    classes = 5 * normal(fold(key, "c"), (c, d), torch.float64)
    shift = torch.tensor([3.0, 0.0, 0.0]).double()
    chance = normal(fold(key, "n"), (m, c, d), torch.float64) / math.sqrt(n)
    means = classes + shares[:, None, None] * shift + chance
    counts = torch.full((m, c), float(n), dtype=torch.float64)
    inside = simplex.per_class(means * n, counts, torch.eye(3).expand(c, 3, 3))
    assert inside.tolist() == [2] * c
    alone = simplex.per_class((classes + chance) * n, counts, torch.eye(3).expand(c, 3, 3))
    assert alone.tolist() == [1] * c


# offsets


def balanced(scores, target, n_clients=1, steps=20):
    """Offsets as the server finds them, from quantiles of each client."""
    scores = scores.double()
    parts = scores.tensor_split(n_clients)
    offsets = torch.zeros(scores.shape[1], dtype=torch.float64)
    for _ in range(steps):
        total = (scores + offsets).argmin(1).bincount(minlength=len(offsets)) / len(scores)
        if float((total - target).abs().max()) <= 0.003:
            break
        room = [division.pushes(own + offsets) for own in parts]
        real = [torch.ones(len(own), dtype=torch.bool) for own in parts]
        room = torch.stack(
            [
                torch.stack([division.quantiles(r[:, j], ok, 64) for j in range(r.shape[1])])
                for r, ok in zip(room, real, strict=True)
            ]
        )
        n = torch.tensor([len(own) for own in parts])
        offsets = division.move_offset(offsets, room, n, total, target)
    return offsets, total


def test_offsets_by_hand():
    scores = torch.tensor([[0.0, 10.0]] * 100 + [[0.0, -2.0]] * 100)
    offsets, total = balanced(scores, torch.tensor([0.5, 0.5]).double())
    assert -2 < float(offsets[0] - offsets[1]) < 10
    assert total.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("k", [2, 3])
def test_a_constant_on_one_score_changes_no_part(k):
    target = torch.tensor([0.5, 0.3, 0.2][:k]).double()
    target = target / target.sum()
    scores = 30 * normal(fold(seed_key(1), k), (6000, k), torch.float64)
    shifted = scores.clone()
    shifted[:, 0] += 25.0
    ours, total = balanced(scores, target, n_clients=20)
    theirs, other = balanced(shifted, target, n_clients=20)
    assert float((total - target).abs().max()) <= 0.005
    assert float((other - target).abs().max()) <= 0.005
    same = (scores + ours).argmin(1) == (shifted + theirs).argmin(1)
    assert float(same.double().mean()) > 0.985  # quantiles, not samples, were exchanged


def test_pushes():
    # component 0 leads by 3; it may rise by 3, the others must fall by 3 and 5
    assert division.pushes(torch.tensor([[1.0, 4.0, 6.0]])).tolist() == [[3.0, -3.0, -5.0]]


def test_quantiles_see_real_rows_only():
    values = torch.tensor([4.0, 1.0, 3.0, 2.0, 99.0])
    real = torch.tensor([True, True, True, True, False])
    assert division.quantiles(values, real, 4).tolist() == [1.0, 2.0, 3.0, 4.0]


# shares by histograms


def random_histograms(seed, m=20, k=3, bins=8):
    draw = uniform(fold(seed_key(seed), "h"), (m, k, bins), torch.float64)
    return (20 * draw).floor()


def test_likelihood_never_falls_and_zeros_stay_zero():
    counts = random_histograms(0)
    flat = counts.flatten(1)
    before = -math.inf
    for steps in range(0, 60, 5):
        shares, profiles = division.tail_shares(counts, 2, steps)
        now = float((flat * (shares @ profiles).clamp(min=1e-300).log()).sum())
        assert now >= before - 1e-9
        before = now
        for j in range(3):  # the two clearest bins of j are j's alone
            others = profiles[[i for i in range(3) if i != j]]
            assert float(others[:, j * 8 + 6 : j * 8 + 8].abs().max()) == 0.0


def test_disjoint_supports_give_counts():
    counts = torch.zeros(4, 2, 8)
    counts[:, 0, 6] = torch.tensor([10.0, 5.0, 2.0, 7.0])
    counts[:, 1, 7] = torch.tensor([0.0, 5.0, 8.0, 3.0])
    shares, _ = division.tail_shares(counts, 2)
    assert torch.allclose(shares[1:, 0], torch.tensor([0.5, 0.2, 0.7]).double(), atol=1e-9)
    assert float(shares[0, 0]) == pytest.approx(1.0, abs=1e-6)


def gaussians(apart, n, seed, m=50):
    """Clients of two normal components as exact densities: their scores and true shares."""
    key = fold(seed_key(seed), "gaussians", n)
    wanted = (torch.arange(m) + 0.5) / m
    first = torch.arange(n) < (wanted * n).round()[:, None]  # [m, n]
    x = normal(key, (m, n), torch.float64) + torch.where(first, 0.0, apart)
    scores = torch.stack([0.5 * x.square(), 0.5 * (x - apart).square()], 2)
    return scores, first.double().mean(1)


@pytest.mark.parametrize(
    ("apart", "n", "counts", "map_", "soft", "tail"),
    [
        (2.0, 300, 0.078, 0.056, 0.019, 0.022),
        (3.0, 300, 0.034, 0.014, 0.010, 0.013),
        (4.0, 300, 0.012, 0.006, 0.005, 0.010),
        pytest.param(2.0, 2000, 0.075, 0.052, 0.007, 0.010, marks=pytest.mark.slow),
        pytest.param(3.0, 2000, 0.032, 0.010, 0.004, 0.005, marks=pytest.mark.slow),
    ],
)
def test_exact_densities(apart, n, counts, map_, soft, tail):
    found = {"counts": [], "map": [], "soft": [], "tail": []}
    for seed in range(3):
        scores, truth = gaussians(apart, n, seed)
        real = torch.ones(n, dtype=torch.bool)

        def error(estimate, truth=truth):
            return float((estimate - truth).abs().mean())

        found["counts"].append(error((scores.argmin(2) == 0).double().mean(1)))
        prior = torch.full((50, 2), 0.5).double()
        for _ in range(20):
            cost = scores - prior.clamp(min=1e-3).log()[:, None]
            own = (cost.argmin(2) == 0).double().mean(1)
            prior = torch.stack([own, 1 - own], 1)
        found["map"].append(error(prior[:, 0]))
        em = torch.stack([division.em_shares(own, real, 200)[0] for own in scores])
        found["soft"].append(error(em))
        part, margin = division.divide(scores.flatten(0, 1))
        at = torch.arange(1, 8) / 8
        cuts = torch.stack([margin[part == j].quantile(at.double()) for j in range(2)])
        histograms = torch.stack([division.histogram(own, real, cuts) for own in scores])
        found["tail"].append(error(division.tail_shares(histograms, 2)[0][:, 0]))
    expected = {"counts": counts, "map": map_, "soft": soft, "tail": tail}
    for name, values in found.items():  # five runs of another draw gave these
        assert sum(values) / len(values) <= 1.3 * expected[name] + 0.003, name


def test_errors_of_shares_fall_with_the_root_of_n():
    profiles = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]).double()
    shares = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).double()
    errors = division.share_errors(shares, profiles, torch.tensor([100.0, 400.0]))
    # half of the samples tell: variance 1 / (n * sum (f0 - f1)^2 / p) = 1 / (2 n)
    assert errors[0].tolist() == pytest.approx([math.sqrt(1 / 200)] * 2, rel=1e-4)
    assert errors[1].tolist() == pytest.approx([math.sqrt(1 / 800)] * 2, rel=1e-4)


def test_dispersion_is_one_by_chance():
    n = 200
    draws = uniform(seed_key(8), (2000, n), torch.float64) < 0.3
    first = draws.double().mean(1)
    varies = division.dispersion(torch.stack([first, 1 - first], 1), torch.full((2000,), n))
    assert varies.tolist() == pytest.approx([1.0, 1.0], abs=0.1)
