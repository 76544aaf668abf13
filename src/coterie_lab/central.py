"""Reference methods on the pooled data of all clients, for comparison only."""

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture


def central_kmeans(x: NDArray[np.float64], k: int, seed: int = 0) -> NDArray[np.int64]:
    """Labels of k-means on pooled samples with a given k; ten starts."""
    labels: NDArray[np.int64] = KMeans(k, n_init=10, random_state=seed).fit_predict(x)
    return labels


def central_gmm(
    x: NDArray[np.float64], k: int, seed: int = 0, covariance: str = "spherical"
) -> NDArray[np.int64]:
    """Labels of a Gaussian mixture on pooled samples with a given k; five starts.

    >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
    >>> len(set(central_gmm(x, 2).tolist()))
    2
    """
    model = GaussianMixture(k, covariance_type=covariance, n_init=5, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels: NDArray[np.int64] = model.fit_predict(x)
    return labels


def central_dpgmm(x: NDArray[np.float64], most: int = 40, seed: int = 0) -> NDArray[np.int64]:
    """Labels of a Dirichlet-process mixture on pooled samples; it finds the number of groups."""
    model = BayesianGaussianMixture(
        n_components=min(most, len(x)),
        covariance_type="spherical",
        weight_concentration_prior_type="dirichlet_process",
        max_iter=300,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels: NDArray[np.int64] = model.fit_predict(x)
    return labels
