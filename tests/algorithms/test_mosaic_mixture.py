"""EM steps of one client, and how far a centre may be moved: by hand, and by trying."""

import math

import pytest
import torch

from coterie.algorithms.mosaic import mixture as mixtures
from coterie.algorithms.mosaic.mixture import NDIM, Mixture, Moments
from coterie.clustering.lloyd import kmeans
from coterie.core.random import normal, seed_key

COVARIANCES = ["tied", "spherical", "diagonal", "full"]


def draw(seed, *shape):
    return normal(seed_key(seed), shape, torch.float64)


def expected_log_likelihood(found, k, centre, variance):
    """Q of component k at a centre and a variance, up to a constant; d is the centre's length."""
    d, n = len(centre), found.n[k]
    gap = centre - found.mean[k]
    scatter = found.scatter[k]
    if variance.ndim == 0:
        return -(d * n * variance.log() + (scatter + n * gap @ gap) / variance) / 2
    if variance.ndim == 1:
        return -(n * variance.log().sum() + ((scatter + n * gap**2) / variance).sum()) / 2
    whole = scatter + n * torch.outer(gap, gap)
    return -(n * torch.logdet(variance) + torch.linalg.solve(variance, whole).trace()) / 2


def a_step(seed, covariance, d=3, k=2, n=40):
    """One EM step from a random mixture: moments, before, after."""
    x = draw(seed, n, d) + 2 * draw(seed + 1000, k, d)[torch.arange(n) % k]
    mask = torch.ones(n, dtype=torch.bool)
    floor = mixtures.variance_floor(x, mask)
    old = mixtures.from_seeds(x, x[:k] + 0.3, covariance, floor)
    share, _ = mixtures.estep(x, mask, old)
    found = mixtures.moments(x, share, old.centres, NDIM[covariance])
    return found, old, mixtures.mstep(found, old, covariance, floor)


def test_spherical_radius_by_hand():
    # d = 2, s2 1 -> 0.5, ||d0||² = 0.25: 0.5 (2 (0.5 - 1 - log 0.5) + 0.25) = 0.5640453710².
    one = torch.ones(1, dtype=torch.float64)
    old = Mixture(torch.zeros(1, 2).double(), one, one)
    found = Moments(10 * one, torch.tensor([[0.5, 0.0]]).double(), 10 * one)
    new = Mixture(found.mean, one, 0.5 * one)
    radius = mixtures.squared_radius(found, old, new, "spherical").sqrt().item()
    assert radius == pytest.approx(0.5640453710, abs=1e-10)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_no_point_of_a_ball_loses(covariance):
    for seed in range(8):
        found, old, new = a_step(seed, covariance)
        radius = mixtures.squared_radius(found, old, new, covariance).sqrt()
        for k in range(2):
            before = expected_log_likelihood(found, k, old.centres[k], old.variance[k])
            if covariance == "tied":  # the centre alone: the variance's gain is kept in reserve
                before = expected_log_likelihood(found, k, old.centres[k], new.variance[k])
                before = before + found.n[k] * (
                    (found.mean[k] - old.centres[k]).square().sum()
                    * (1 / new.variance[k] - 1 / old.variance[k])
                    / 2
                )
            ways = draw(seed + 50, 30, 3)
            ways = ways / ways.norm(dim=1, keepdim=True)
            for way in ways:
                inside = found.mean[k] + 0.999 * radius[k] * way
                value = expected_log_likelihood(found, k, inside, new.variance[k])
                assert value >= before - 1e-9
                if covariance in ("tied", "spherical"):
                    outside = found.mean[k] + 1.01 * radius[k] * way
                    assert expected_log_likelihood(found, k, outside, new.variance[k]) < before


def test_the_full_set_is_twice_a_divergence():
    # Without a ridge c = 2 KL(new || old), and the radius is sqrt(c * smallest eigenvalue).
    a = draw(3, 3, 3)
    old_s, new_s = a @ a.T + torch.eye(3), torch.diag(torch.tensor([0.5, 1.0, 2.0])).double()
    shift = draw(4, 3)
    n = torch.tensor([7.0]).double()
    found = Moments(n, shift[None], n[:, None, None] * new_s[None])
    one = torch.ones(1).double()
    old = Mixture(torch.zeros(1, 3).double(), one, old_s[None])
    new = Mixture(shift[None], one, new_s[None])
    squared = mixtures.squared_radius(found, old, new, "full")
    p = torch.distributions.MultivariateNormal(shift, new_s)
    q = torch.distributions.MultivariateNormal(torch.zeros(3).double(), old_s)
    divergence = torch.distributions.kl_divergence(p, q)
    assert squared.item() == pytest.approx(2 * divergence.item() * 0.5, rel=1e-12)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_padding_changes_nothing(covariance):
    x = draw(1, 12, 3)
    real = torch.arange(16) < 12
    padded = torch.cat([x, x[:1].expand(4, 3)])
    floor = mixtures.variance_floor(x, real[:12])
    assert mixtures.variance_floor(padded, real) == pytest.approx(floor.item(), rel=1e-12)
    small = mixtures.from_seeds(x, x[:2], covariance, floor)
    extra = mixtures.spread_out(torch.tensor(1.0).double(), 3, 1, covariance)
    zeros = torch.zeros(1, 3).double()
    large = Mixture(
        torch.cat([small.centres, zeros]),
        torch.cat([small.weights, zeros[0, :1]]),
        torch.cat([small.variance, extra]),
    )
    for _ in range(3):
        results = []
        for mixture, rows, mask in ((small, x, real[:12]), (large, padded, real)):
            share, value = mixtures.estep(rows, mask, mixture)
            found = mixtures.moments(rows, share, mixture.centres, NDIM[covariance])
            new = mixtures.mstep(found, mixture, covariance, floor)
            radius = mixtures.squared_radius(found, mixture, new, covariance)
            results.append((value, new, radius))
        (value, small, radius), (padded_value, large, padded_radius) = results
        assert torch.allclose(value, padded_value, atol=1e-10)
        assert torch.allclose(radius, padded_radius[:2], atol=1e-10)
        for ours, theirs in zip(small, large, strict=True):
            assert torch.allclose(ours, theirs[:2], atol=1e-10)


@pytest.mark.parametrize("covariance", ["tied", "spherical"])
def test_em_never_falls(covariance):
    x = torch.cat([draw(1, 30, 2), draw(2, 30, 2) + 4])
    mask = torch.ones(60, dtype=torch.bool)
    floor = mixtures.variance_floor(x, mask)
    mixture = mixtures.from_seeds(x, x[:3], covariance, floor)
    last = -math.inf
    for _ in range(20):
        share, value = mixtures.estep(x, mask, mixture)
        assert value >= last - 1e-9
        last = value
        found = mixtures.moments(x, share, mixture.centres, 0)
        mixture = mixtures.mstep(found, mixture, covariance, floor)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_densities_are_those_of_scipy(covariance):
    from scipy.stats import multivariate_normal

    x = draw(5, 6, 3)
    _, _, mixture = a_step(2, covariance)
    ours = mixtures.log_density(x, mixture.centres, mixture.variance)
    for k in range(2):
        v = mixture.variance[k]
        cov = v * torch.eye(3).double() if v.ndim == 0 else torch.diag(v) if v.ndim == 1 else v
        theirs = multivariate_normal(mixture.centres[k].numpy(), cov.numpy()).logpdf(x.numpy())
        assert ours[:, k].numpy() == pytest.approx(theirs, rel=1e-9)


def test_an_empty_component_keeps_its_centre_and_has_no_radius():
    x = draw(1, 10, 2)
    one = torch.ones(10, 1).double()
    share = torch.cat([one, 0 * one], 1)
    centres = torch.tensor([[0.0, 0.0], [9.0, 9.0]]).double()
    found = mixtures.moments(x, share, centres, 0)
    old = Mixture(centres, torch.tensor([0.5, 0.5]).double(), torch.ones(2).double())
    new = mixtures.mstep(found, old, "tied", torch.tensor(1e-9).double())
    assert found.mean[1].tolist() == [9.0, 9.0]
    assert mixtures.squared_radius(found, old, new, "tied")[1] == 0


def test_kmeans_finds_separated_clouds():
    x = torch.cat([draw(i, 20, 2) * 0.1 + 10 * i for i in range(4)])
    labels, centres, inertia = kmeans(seed_key(0), x, 4)
    assert len(labels.unique()) == 4
    assert all(len(labels[20 * i : 20 * i + 20].unique()) == 1 for i in range(4))
    assert inertia == pytest.approx((x - centres[labels]).square().sum().item())


def test_counts_are_chosen_by_clients_themselves():
    x = torch.cat([draw(i, 40, 2) + 10 * i for i in range(3)])
    assert mixtures.choose_count(seed_key(0), x, "bic", "tied") == 3
    assert mixtures.choose_count(seed_key(0), x, "auto", "tied") == 4  # and one to spare
    assert mixtures.choose_count(seed_key(0), torch.ones(50, 2).double(), "auto", "tied") == 1
    assert mixtures.choose_count(seed_key(0), x[:5], "bic", "tied") == 1


def test_a_band_without_groups_is_not_cut_into_many():
    band = torch.linspace(0, 1, 200).double()[:, None] * torch.tensor([3.0, 2.0, 1.0])
    assert mixtures.choose_count(seed_key(0), band, "auto", "tied") == 3


def test_constant_data_have_a_likelihood():
    x = torch.ones(20, 3).double()
    mask = torch.ones(20, dtype=torch.bool)
    mixture, value = mixtures.local_fit(seed_key(0), x, 2, "tied", mixtures.variance_floor(x, mask))
    assert bool(value.isfinite())
    assert torch.allclose(mixture.centres, torch.ones(2, 3).double())
