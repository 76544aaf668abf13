"""Which cluster goes with which model, and what to do with clusters too small to keep."""

import warnings

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.clustering.labels import centroids, relabel


def clean_losses(losses: Tensor) -> Tensor:
    """Replace nan and infinite entries by ten times the largest finite one, with a warning.

    The size of an entry is its absolute value, so that the replacement is the worst loss even
    where losses are negative; it is 1 if all finite entries are 0. Without any finite entry the
    result is zero throughout.

    Examples
    --------
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     clean_losses(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]))
    tensor([[ 1., 30.],
            [ 2.,  3.]])
    """
    finite = losses.isfinite()
    if finite.all():
        return losses
    warnings.warn(
        f"{int((~finite).sum())} of {losses.numel()} losses are not finite and were replaced.",
        stacklevel=2,
    )
    if not finite.any():
        return torch.zeros_like(losses)
    largest = float(losses[finite].abs().max()) or 0.1
    return torch.where(finite, losses, min(10 * largest, torch.finfo(losses.dtype).max))


def min_cost_matching(cost: Tensor) -> Tensor:
    """Give each row a column of its own so that the total cost is smallest.

    Parameters
    ----------
    cost : shape [k', k] with k' <= k; k - k' columns stay free. Entries that are not finite
        are replaced as in `clean_losses`.

    Returns
    -------
    The column of each row, [k'].

    Examples
    --------
    Both rows prefer column 0; 1.0 + 3.5 is less than 5.1 + 2.1 (figure 1 of the CLoVE paper).

    >>> min_cost_matching(torch.tensor([[1.0, 5.1], [2.1, 3.5]]))
    tensor([0, 1])
    """
    rows, columns = cost.shape
    if rows > columns:
        raise ValueError(
            "min_cost_matching: cost must have no more rows than columns, "
            f"got {rows} rows and {columns} columns."
        )
    _, column = linear_sum_assignment(clean_losses(cost.double()).numpy())
    return torch.from_numpy(column).long()


def merge_small(points: Tensor, labels: Tensor, min_size: int) -> Tensor:
    """Join every cluster of fewer than `min_size` points to the nearest large enough one.

    Nearest is by Euclidean distance between centroids as they were before any merge. Labels
    come back as they are when no cluster is large enough, else numbered by smallest member.

    Examples
    --------
    >>> points = torch.tensor([[0.0], [0.1], [1.0], [5.0], [5.1]])
    >>> merge_small(points, torch.tensor([0, 0, 1, 2, 2]), min_size=2)
    tensor([0, 0, 0, 1, 1])
    """
    numbered = relabel(labels)
    large = torch.bincount(numbered) >= min_size  # [k]
    if not large.any():
        return labels
    means = centroids(points, numbered)  # [k, d]
    distance = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance.masked_fill(~large, torch.inf).argmin(dim=1)
    target = torch.where(large, torch.arange(len(large)), nearest)
    return relabel(target[numbered])
