"""The scikit-learn front door: scikit-learn's own checks, and what clients add to them."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from coterie.estimator import FederatedGaussianMixture, effective_radii


@parametrize_with_checks([FederatedGaussianMixture(rounds=3, feedback=1, refine=3)])
def test_scikit_learn_is_satisfied(estimator, check):
    check(estimator)


def clouds(seed=0, n=40):
    """Three clouds; three clients that hold two each."""
    rng = np.random.default_rng(seed)
    pairs = [(0, 1), (1, 2), (0, 2)]
    labels = [np.repeat(pair, n) for pair in pairs]
    return [rng.normal(size=(2 * n, 2)) + 10 * own[:, None] for own in labels], labels


@pytest.fixture(scope="module")
def fitted():
    xs, _ = clouds()
    return FederatedGaussianMixture(n_components=2, random_state=0).fit(xs)


def test_densities_are_in_the_units_of_the_samples():
    rng, xs = np.random.default_rng(3), clouds(1)[0]
    stretch = np.array([[3.0, 1.0], [0.0, 0.5]])
    xs = [x @ stretch for x in xs]
    found = FederatedGaussianMixture(n_components=2, random_state=0).fit(xs)
    assert found.n_components_ == 3
    assert found.covariances_.shape == (3, 2, 2)
    assert np.allclose(found.covariances_[0], stretch.T @ stretch, rtol=0.3)
    centres = np.array([[0.0, 0.0], [10.0, 10.0], [20.0, 20.0]]) @ stretch
    assert np.allclose(found.means_, centres, atol=1)
    assert np.allclose(found.component_means_, centres[found.component_groups_], atol=1.5)
    x = rng.normal(size=(5, 2)) @ stretch
    parts = [
        np.log(weight) + multivariate_normal(mean, shape).logpdf(x)
        for weight, mean, shape in zip(
            found.weights_, found.means_, found.covariances_, strict=True
        )
    ]
    assert np.allclose(found.score_samples(x), logsumexp(parts, axis=0))


def test_groups_and_a_list_are_the_same(fitted):
    xs, _ = clouds()
    order = np.random.default_rng(1).permutation(240)
    owner = np.repeat([0, 1, 2], 80)
    other = FederatedGaussianMixture(n_components=2, random_state=0)
    other.fit(np.concatenate(xs), groups=owner)
    assert np.allclose(other.means_, fitted.means_)
    assert (other.labels_ == fitted.labels_).all()
    shuffled = clone(other).fit(np.concatenate(xs)[order], groups=owner[order])
    assert adjusted_rand_score(shuffled.labels_, fitted.labels_[order]) == 1


def test_everything_found_is_there(fitted):
    _, labels = clouds()
    assert fitted.n_components_ == 3
    assert adjusted_rand_score(np.concatenate(labels), fitted.labels_) == 1
    assert fitted.means_.shape == (3, 2)
    assert fitted.weights_ == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert ((fitted.client_weights_ > 0).sum(1) == 2).all()
    assert len(fitted.radii_) == len(fitted.component_counts_) == 6
    assert [step.n_components for step in fitted.path_] == [
        6,
        5,
        4,
        3,
    ]  # a third client forbids more
    best = min(fitted.path_, key=lambda step: step.criterion)
    assert best.n_components == 3
    assert fitted.plausible_ == [3]
    assert len(set(fitted.at(4).tolist())) == 4
    with pytest.raises(ValueError, match="between 3 and 6"):
        fitted.at(2)


def test_a_client_is_judged_by_its_own_weights(fitted):
    between = np.array([[20.0, 20.0]])  # the third cloud, which client 0 does not hold
    assert fitted.predict_proba(between)[0].argmax() == 2
    assert fitted.predict_proba(between, groups=0)[0, 2] == 0
    shares = fitted.predict_proba(between, groups=[1])
    assert shares.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="one of clients_"):
        fitted.predict(between, groups=[7])


def test_densities_integrate_to_one(fitted):
    grid = np.stack(np.meshgrid(*[np.linspace(-10, 30, 400)] * 2), -1).reshape(-1, 2)
    assert np.exp(fitted.score_samples(grid)).sum() * (40 / 399) ** 2 == pytest.approx(1, abs=0.01)


def test_newcomers(fitted):
    rng = np.random.default_rng(5)
    known = fitted.place(rng.normal(size=(60, 2)))
    assert known.components.tolist() == [0]
    assert known.fits
    strange = fitted.place(np.concatenate([rng.normal(size=(60, 2)), np.full((20, 2), 60.0)]))
    assert strange.outside == pytest.approx(0.25)
    assert not strange.fits


@pytest.mark.parametrize("counts", [[2, 2, 2], {0: 2, 1: 2, 2: 2}, "auto", "bic"])
def test_local_counts_in_every_form(counts):
    xs, labels = clouds()
    model = FederatedGaussianMixture(n_components=counts, random_state=0).fit(xs)
    assert adjusted_rand_score(np.concatenate(labels), model.labels_) > 0.99


def test_a_known_number_is_kept():
    xs, _ = clouds()
    model = FederatedGaussianMixture(n_components=2, n_clusters=4, random_state=0).fit(xs)
    assert model.n_components_ == 4


def test_mistakes_are_explained():
    xs, _ = clouds()
    with pytest.raises(ValueError, match="same features"):
        FederatedGaussianMixture().fit([xs[0], xs[1][:, :1]])
    with pytest.raises(ValueError, match="one entry per sample"):
        FederatedGaussianMixture().fit(xs[0], groups=[1, 2])
    with pytest.raises(ValueError, match="each of 3 clients"):
        FederatedGaussianMixture(n_components=[2, 2]).fit(xs)
    with pytest.raises(ValueError, match="criterion"):
        FederatedGaussianMixture(criterion="aic").fit(xs)


def test_a_client_told_too_many_components_adds_no_group():
    rng = np.random.default_rng(2)
    xs = [rng.normal(size=(80, 2)) for _ in range(3)]
    told = {"n_components": [1, 1, 2], "random_state": 0}
    found = FederatedGaussianMixture(**told).fit(xs)
    assert found.n_components_ == 1
    assert found.path_[-1].n_components == 1
    assert found.at(1).tolist() == [0, 0, 0, 0]
    assert FederatedGaussianMixture(**told, exclusivity=0.0).fit(xs).n_components_ == 2


def test_the_effective_radius_is_where_equal_components_merge():
    # d = 1, n = 100 each, one variance: 2 sqrt((2 log 200 + 400 log 2) / 200) = 2.3994. (The
    # criterion re-estimates the variance of what it merges, and so goes on to 3.58.)
    radii = effective_radii(np.full(2, 100.0), 1.0, 1)
    assert radii.sum() == pytest.approx(2.3994, abs=1e-4)
    assert effective_radii(np.full(2, 100.0), 1.0, 1, False).sum() == pytest.approx(0.46, abs=0.01)
