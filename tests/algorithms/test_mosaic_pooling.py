"""Groups from summaries and from sums: by hand, and both ways to the same numbers."""

import numpy as np
import pytest
import torch

from coterie.algorithms.mosaic import pooling
from coterie.algorithms.mosaic.mixture import NDIM
from coterie.algorithms.mosaic.pooling import Groups


def test_groups_by_hand():
    # Components at 6 (n 1), 0 (n 2) and 3 (n 1), variances 1; the last two are one group: mean 1,
    # variance 1 + (2 * 1 + 1 * 4) / 3 = 3. Groups come by their centres: 1, then 6.
    n, centres = np.array([1.0, 2.0, 1.0]), np.array([[6.0], [0.0], [3.0]])
    labels = np.array([0, 1, 1])
    found, number = pooling.pool_groups(n, centres, np.ones(3), labels, "spherical")
    assert found.centres.flatten().tolist() == pytest.approx([1.0, 6.0])
    assert found.variance.tolist() == pytest.approx([3.0, 1.0])
    assert found.n.tolist() == [3.0, 1.0]
    assert number.tolist() == [1, 0, 0]
    # Tied: (3 * 3 + 1 * 1) / 4.
    tied, _ = pooling.pool_groups(n, centres, np.ones(3), labels, "tied")
    assert tied.variance.tolist() == pytest.approx([2.5, 2.5])


@pytest.mark.parametrize("covariance", ["spherical", "diagonal", "full"])
def test_sums_of_parts_give_the_moments_of_all(covariance):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(90, 3)) @ rng.normal(size=(3, 3)) + 50)
    share = torch.from_numpy(rng.dirichlet(np.ones(2), size=90))
    shape = (3,) * NDIM[covariance]
    start = torch.eye(3).double().expand(2, 3, 3) if len(shape) == 2 else torch.ones(2, *shape)
    groups = Groups(torch.full((2, 3), 50.0).double(), start.double(), torch.ones(2).double())
    origin = pooling.middle(groups)
    parts = [
        pooling.sums(x[rows] - origin, share[rows], NDIM[covariance])
        for rows in (slice(0, 30), slice(30, 90))
    ]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert {name: leaf.shape for name, leaf in pooling.no_sums(groups).items()} == {
        name: leaf.shape for name, leaf in total.items()
    }
    found = pooling.from_sums(groups, total, covariance)
    for k in range(2):
        weight = share[:, k] / share[:, k].sum()
        mean = weight @ x
        spread = (x - mean).T @ ((x - mean) * weight[:, None])
        wanted = {0: spread.trace() / 3, 1: spread.diagonal(), 2: spread}[NDIM[covariance]]
        assert torch.allclose(found.centres[k], mean)
        assert torch.allclose(found.variance[k], wanted)


def test_a_group_without_samples_stays():
    groups = Groups(
        torch.tensor([[0.0], [9.0]]).double(), torch.ones(2).double(), torch.ones(2).double()
    )
    x, share = torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[1.0, 0.0]] * 2).double()
    sums = pooling.sums(x, share, 0)
    found = pooling.from_sums(groups, sums, "spherical")
    assert found.centres.flatten().tolist() == pytest.approx([2.0 + 4.5, 9.0])  # from the middle
    assert found.variance.tolist() == pytest.approx([1.0, 1.0])


def test_one_variance_for_all_weighs_groups_by_their_samples():
    variance, n = torch.tensor([1.0, 5.0]).double(), torch.tensor([3.0, 1.0]).double()
    groups = Groups(torch.zeros(2, 1).double(), variance, n)
    assert pooling.common_variance(groups).tolist() == pytest.approx([2.0, 2.0])
    assert pooling.mean_variance(groups.n.numpy(), groups.variance.numpy()) == pytest.approx(2.0)


def test_before_the_first_merge_there_is_nothing():
    for covariance, shape in (("tied", (0,)), ("diagonal", (0, 4)), ("full", (0, 4, 4))):
        groups = pooling.no_groups(4, covariance)
        assert groups.variance.shape == shape
        assert (groups.centres.shape, groups.n.shape) == ((0, 4), (0,))
