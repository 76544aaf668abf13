"""Agglomerative clustering of a matrix of distances."""

from typing import Literal

import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from coterie.clustering.labels import relabel


def agglomerate(
    distances: Tensor,
    method: Literal["single", "complete", "average"],
    k: int = 1,
    threshold: float = torch.inf,
) -> Tensor:
    """Merge the nearest clusters while there are more than `k` and they are within `threshold`.

    `distances` is symmetric, [m, m]. Returns labels [m], numbered by smallest member index.

    Examples
    --------
    >>> x = torch.tensor([0.0, 1.0, 5.0, 7.0])
    >>> agglomerate((x[:, None] - x).abs(), "average", k=2)
    tensor([0, 0, 1, 1])
    >>> agglomerate((x[:, None] - x).abs(), "average", threshold=1.5)
    tensor([0, 0, 1, 2])
    """
    m = len(distances)
    node = torch.arange(m)  # the tree node of each row
    if m > 1:
        pairs = squareform(distances.double().numpy(), checks=False)
        # Counting merges cuts at exactly k; a cut by height loses clusters to tied heights.
        for step, (left, right, height, _) in enumerate(linkage(pairs, method)[: max(m - k, 0)]):
            if height > threshold:
                break
            node[(node == int(left)) | (node == int(right))] = m + step
    return relabel(node)
