"""Agglomerative clustering with Ward's criterion; the number of clusters by silhouettes."""

from collections.abc import Sequence

import torch
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from coterie.clustering.labels import relabel
from coterie.clustering.silhouette import silhouette

WARD_ROWS = 5_000  # 1.25e7 distances, one or two seconds


def ward_path(points: Tensor, ks: Sequence[int]) -> list[Tensor]:
    """Labels [m] of Ward's tree cut at each of `ks`; the tree is built once.

    The pair that adds least to the within-cluster sum of squares is merged first. With fewer than k
    distinct rows, every distinct row is a cluster. Time and memory grow with the square of m.

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
    node = torch.arange(m)  # the tree node of each row
    labels = {m: relabel(node)}
    wanted = set(cuts.values())
    for step, (left, right) in enumerate(merges):
        # Counting merges gives exactly k clusters; a cut by height gives fewer if heights are tied.
        node[(node == left) | (node == right)] = m + step
        remaining = m - 1 - step
        if remaining in wanted:
            labels[remaining] = relabel(node)
    return [labels[cuts[k]] for k in ks]


def choose_k(points: Tensor, max_k: int) -> tuple[int, dict[int, float]]:
    """The number of Ward clusters (2 to `max_k`) with the largest silhouette, and all silhouettes.

    If two numbers have the same silhouette, the smaller one is chosen. A silhouette needs at least
    two clusters, and fewer clusters than points. The result is 1 if no number has a silhouette:
    with fewer than three points, or if all points are equal. With more than 5,000 points, 5,000 are
    drawn with a fixed seed.

    Examples
    --------
    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> k, scores = choose_k(torch.cat([corners, corners + 0.1]), max_k=4)
    >>> k, list(scores)
    (3, [2, 3, 4])
    """
    if len(points) > WARD_ROWS:
        draw = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
        points = points[draw[:WARD_ROWS]]
    candidates = range(2, min(max_k, len(points) - 1) + 1)
    cuts = zip(candidates, ward_path(points, candidates), strict=True)
    scores = {k: silhouette(points, labels) for k, labels in cuts if labels.max() > 0}
    return max(scores, key=lambda k: scores[k], default=1), scores
