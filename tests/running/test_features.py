"""Features found together: principal components equal the central ones; codes that tell apart."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from coterie.core.errors import ConfigError
from coterie.data.mixture import mixture_tight
from coterie.running.features import autoencoded, principal, with_features


def test_principal_components_are_the_central_ones():
    data = mixture_tight(5, 4, 6, 40, 6.0, 2, 3, seed=1)
    ours = principal(data, 3)
    theirs = PCA(3).fit(data.x.numpy())
    assert np.abs(ours.directions.numpy() @ theirs.components_.T) == pytest.approx(
        np.eye(3), abs=1e-8
    )
    assert ours.variance.numpy() * 200 / 199 == pytest.approx(theirs.explained_variance_)
    reduced = with_features(data, ours)
    assert np.abs(reduced.x.numpy()) == pytest.approx(np.abs(theirs.transform(data.x.numpy())))


def test_clients_keep_their_rows_labels_and_facts():
    data = mixture_tight(3, 3, 4, 20, 6.0, 2, 3, test_fraction=0.2, seed=2)
    reduced = with_features(data, lambda x: 2 * x)
    for split in ("train", "test"):
        for i in range(3):
            ours, theirs = (d.gather(split, torch.tensor([i])) for d in (reduced, data))
            assert torch.equal(ours.x, 2 * theirs.x)
            assert torch.equal(ours.y, theirs.y)
    ours, theirs = (d.client_facts["n_components"] for d in (reduced, data))
    assert torch.equal(ours, theirs)


def test_more_features_than_there_are():
    with pytest.raises(ConfigError, match="at most 4"):
        principal(mixture_tight(2, 2, 4, 20, 6.0, 2, 2), 5)


def test_an_autoencoder_learns_to_tell_groups_apart():
    data = mixture_tight(3, 3, 8, 60, 8.0, 2, 3, seed=2)
    data = with_features(data, lambda x: (x / 10).float())
    code = with_features(data, autoencoded(data, 2, hidden=(16,), rounds=10, learning_rate=0.01))
    assert code.x.shape == (180, 2)
    means = torch.stack([code.x[code.y == k].mean(0) for k in range(3)])
    within = torch.stack([code.x[code.y == k].std(0).norm() for k in range(3)])
    apart = torch.cdist(means, means)[torch.triu_indices(3, 3, 1).unbind()]
    assert float(apart.min()) > float(within.mean())
