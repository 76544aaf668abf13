"""k-means with initial centres by k-means++."""

import warnings

import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from coterie.clustering.labels import centroids, relabel


def kmeans(points: Tensor, k: int, seed: int = 0, n_init: int = 10) -> tuple[Tensor, Tensor]:
    """Divide points into at most `k` clusters with small squared Euclidean distances.

    Parameters
    ----------
    points : shape [m, d], finite.
    k : number of clusters. With fewer distinct rows, every distinct row is a cluster, so use the
        number of centroids afterwards, not `k`.
    seed : of the initial centres; the global random state is neither read nor changed.
    n_init : number of starts; the best result is returned.

    Returns
    -------
    Labels [m], numbered by smallest member index, and centroids [k', d] in float64.

    Examples
    --------
    >>> labels, means = kmeans(torch.tensor([[5.0], [0.0], [1.0], [5.0]]), k=2)
    >>> labels
    tensor([0, 1, 1, 0])
    >>> means.flatten()
    tensor([5.0000, 0.5000], dtype=torch.float64)
    """
    points = points.double()
    distinct, position = torch.unique(points, dim=0, return_inverse=True)
    if k >= len(distinct):
        labels = relabel(position)
    else:
        model = KMeans(n_clusters=k, init="k-means++", n_init=n_init, random_state=seed)
        with warnings.catch_warnings():
            # If rows differ by rounding only, a cluster may stay empty; then k' < k.
            warnings.simplefilter("ignore", ConvergenceWarning)
            labels = relabel(torch.from_numpy(model.fit_predict(points.numpy())).long())
    return labels, centroids(points, labels)
