"""The scikit-learn estimators keep scikit-learn's contract."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from coterie.supervised import FederatedClassifier, FederatedRegressor

QUICK = {"rounds": 12, "random_state": 0}
ESTIMATORS = [FederatedClassifier(**QUICK), FederatedRegressor(**QUICK)]
CHECKS = [pair for one in ESTIMATORS for pair in estimator_checks_generator(one)]


def name(value):
    return getattr(getattr(value, "func", None), "__name__", type(value).__name__)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name)
def test_the_contract_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def sites():
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=(240, 2)), np.repeat(["a", "b", "c", "d"], 60)
    flipped = np.isin(site, ["b", "d"])
    return x, site, flipped


def test_clients_have_the_models_of_their_groups(sites):
    x, site, flipped = sites
    y = np.where((x[:, 0] > 0) ^ flipped, "ill", "well")
    model = FederatedClassifier(rounds=10, random_state=0).fit(x, y, groups=site)
    assert model.clients_.tolist() == ["a", "b", "c", "d"]
    assert model.assignment_[0] == model.assignment_[2] != model.assignment_[1]
    assert model.score(x, y, groups=site) > 0.9
    chances = model.predict_proba(x, groups=site)
    np.testing.assert_allclose(chances.sum(1), 1)
    assert (model.classes_[chances.argmax(1)] == model.predict(x, groups=site)).all()
    everybody = model.predict_proba(x)  # opposite models weigh the same
    assert abs(everybody - 0.5).mean() < 0.1
    with pytest.raises(ValueError, match="Got an unknown client"):
        model.predict(x[:1], groups=["e"])
    with pytest.raises(ValueError, match="one entry per row"):
        clone(model).fit(x, y, groups=site[:3])


def test_numbers_in_their_own_unit(sites):
    x, site, flipped = sites
    y = 100 + 20 * x[:, 0] * np.where(flipped, -1, 1)
    model = FederatedRegressor(rounds=15, random_state=0).fit(x, y, groups=site)
    assert model.score(x, y, groups=site) > 0.9
    assert abs(model.predict(x, groups="a").mean() - 100) < 5
