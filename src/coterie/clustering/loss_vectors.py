"""Loss vectors: a row per client, a column per model; embedded, clustered, matched to models."""

from typing import Literal

import torch
from torch import Tensor

from coterie.clustering.choose_k import choose_k
from coterie.clustering.hierarchical import ward
from coterie.clustering.kmeans import kmeans
from coterie.clustering.matching import merge_small, min_cost_matching


def embed(losses: Tensor, embedding: Literal["loss", "sqrt"], unit: Tensor | None = None) -> Tensor:
    """Losses, or their square roots, in units of each column.

    >>> embed(torch.tensor([[4.0, 9.0]]), "sqrt", torch.tensor([1.0, 3.0]))
    tensor([[2., 1.]], dtype=torch.float64)
    """
    vectors = losses.double()
    vectors = vectors.clamp(min=0).sqrt() if embedding == "sqrt" else vectors
    return vectors if unit is None else vectors / unit


def column_unit(vectors: Tensor, scale: Literal["none", "column_std"]) -> Tensor:
    """What each column is divided by: its standard deviation (1 where it has none), or 1.

    >>> column_unit(torch.tensor([[0.0, 5.0], [2.0, 5.0]]), "column_std")
    tensor([1., 1.], dtype=torch.float64)
    """
    ones = torch.ones(vectors.shape[1], dtype=torch.float64)
    if scale == "none":
        return ones
    deviation = vectors.double().std(0, correction=0)
    return torch.where(deviation > 0, deviation, ones)


def cluster(
    vectors: Tensor,
    k: int | None,
    method: Literal["kmeans", "agglomerative"] = "kmeans",
    choose: Literal["silhouette", "elbow"] = "silhouette",
    tolerance: float = 0.1,
    replicate: int = 5,
    min_size: int = 1,
    seed: int = 0,
) -> Tensor:
    """Cluster of each row; k is chosen where it is unknown, or where there are fewer rows.

    >>> cluster(torch.tensor([[0.0], [0.1], [9.0]]), 2).tolist()
    [0, 0, 1]
    """
    if k is None or k > len(vectors):
        k = choose_k(vectors, min(vectors.shape), 2, choose, tolerance, replicate).k
    labels, _ = kmeans(vectors, k, seed) if method == "kmeans" else ward(vectors, k)
    return merge_small(vectors, labels, min_size)


def match_models(losses: Tensor, labels: Tensor, matching: Literal["mincost", "none"]) -> Tensor:
    """Model of each row: different clusters get different models, with the least total loss.

    >>> match_models(torch.tensor([[1.0, 5.1], [2.1, 3.5]]), torch.tensor([0, 1]), "mincost")
    tensor([0, 1])
    """
    cost = torch.zeros(int(labels.max()) + 1, losses.shape[1], dtype=torch.float64)  # [k', k]
    cost.index_add_(0, labels, losses.double())
    column = min_cost_matching(cost) if matching == "mincost" else torch.arange(len(cost))
    return column[labels]
