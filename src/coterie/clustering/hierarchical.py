"""Agglomerative clustering with Ward's criterion."""

from collections.abc import Sequence

import torch
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from coterie.clustering.labels import centroids, relabel

WARD_ROWS = 5_000  # 1.25e7 distances, and a second or two


def ward(points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Merge the pair that adds least to the within-cluster sum of squares until `k` remain.

    With fewer than `k` distinct rows, every distinct row is a cluster. Time and memory grow
    with the square of the rows, so above 5,000 rows the tree is built on 5,000 of them, drawn with
    a fixed seed, and the others join the nearest centroid.

    Parameters
    ----------
    points : shape [m, d], finite.
    k : clusters wanted.

    Returns
    -------
    Labels [m], numbered by smallest member index, and centroids [k', d] in float64.

    Examples
    --------
    >>> labels, means = ward(torch.tensor([[5.0], [0.0], [1.0], [5.5]]), k=2)
    >>> labels
    tensor([0, 1, 1, 0])
    >>> means.flatten()
    tensor([5.2500, 0.5000], dtype=torch.float64)
    """
    few = sample(points)
    labels = ward_path(few, [k])[0]
    if len(few) < len(points):
        labels = relabel(torch.cdist(points.double(), centroids(few, labels)).argmin(1))
    return labels, centroids(points, labels)


def sample(points: Tensor, size: int = WARD_ROWS) -> Tensor:
    """The points, or so many of them where there are more, drawn with a fixed seed.

    >>> len(sample(torch.zeros(9, 1), 4)), len(sample(torch.zeros(3, 1), 4))
    (4, 3)
    """
    if len(points) <= size:
        return points
    return points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:size]]


def ward_path(points: Tensor, ks: Sequence[int]) -> list[Tensor]:
    """Labels of the Ward tree cut at each of `ks`, the tree being built once.

    Examples
    --------
    >>> ward_path(torch.tensor([[0.0], [1.0], [5.0], [5.5]]), [1, 2, 3])
    [tensor([0, 0, 0, 0]), tensor([0, 0, 1, 1]), tensor([0, 1, 2, 2])]
    """
    points = points.double()
    m = len(points)
    n_distinct = len(torch.unique(points, dim=0))
    cuts = {k: min(k, n_distinct) for k in ks}  # k -> clusters that remain
    merges = linkage(points.numpy(), method="ward")[:, :2].astype(int) if m > 1 else []
    node = torch.arange(m)  # the tree node each row hangs from
    labels = {m: relabel(node)}
    wanted = set(cuts.values())
    for step, (left, right) in enumerate(merges):
        # Counting merges cuts at exactly k; a cut by height loses clusters to tied heights.
        node[(node == left) | (node == right)] = m + step
        remaining = m - 1 - step
        if remaining in wanted:
            labels[remaining] = relabel(node)
    return [labels[cuts[k]] for k in ks]
