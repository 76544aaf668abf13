"""Cluster labels: a standard numbering, and the means of the labels."""

import torch
from torch import Tensor


def relabel(labels: Tensor) -> Tensor:
    """Number clusters 0, 1, ... in the order of their smallest member index.

    Examples
    --------
    >>> relabel(torch.tensor([7, 7, 2, 9, 2]))
    tensor([0, 0, 1, 2, 1])
    """
    values, position = torch.unique(labels, return_inverse=True)
    rows = torch.arange(len(labels))
    first = torch.full((len(values),), len(labels)).scatter_reduce(0, position, rows, "amin")
    return first.argsort().argsort()[position]


def centroids(points: Tensor, labels: Tensor, n_groups: int | None = None) -> Tensor:
    """Mean of the points of each label, in float64.

    Parameters
    ----------
    points : shape [m, d].
    labels : shape [m], integers from 0.
    n_groups : number of rows of the result, by default the largest label plus one. The row of a
        label that no point has is nan.

    Examples
    --------
    >>> centroids(torch.tensor([[0.0, 0.0], [2.0, 4.0], [9.0, 9.0]]), torch.tensor([0, 0, 1]))
    tensor([[1., 2.],
            [9., 9.]], dtype=torch.float64)
    """
    if n_groups is None:
        n_groups = int(labels.max()) + 1
    sums = torch.zeros(n_groups, points.shape[1], dtype=torch.float64)  # [k, d]
    sums.index_add_(0, labels, points.double())
    return sums / torch.bincount(labels, minlength=n_groups)[:, None]
