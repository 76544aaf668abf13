"""Matching clusters to models."""

import warnings

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def clean_losses(losses: Tensor) -> Tensor:
    """Replace nan and infinite entries by ten times the largest finite entry, with a warning.

    The largest entry is the one with the largest absolute value, so the replacement is the worst
    loss even if losses are negative. It is 1 if all finite entries are 0. If no entry is finite,
    all entries of the result are zero.

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


def match_clusters(losses: Tensor, labels: Tensor) -> Tensor:
    """Match each cluster to a different model so that the total loss is smallest.

    Parameters
    ----------
    losses : shape [m, k], finite.
    labels : shape [m], clusters 0 to k' - 1 with k' <= k; k - k' models are not matched.

    Returns
    -------
    The model of each cluster, [k'].

    Examples
    --------
    Both clusters prefer model 0; 1.0 + 3.5 is less than 5.1 + 2.1 (figure 1 of the CLoVE paper).

    >>> match_clusters(torch.tensor([[1.0, 5.1], [2.1, 3.5]]), torch.tensor([0, 1]))
    tensor([0, 1])
    """
    cost = torch.zeros(int(labels.max()) + 1, losses.shape[1], dtype=torch.float64)  # [k', k]
    cost.index_add_(0, labels, losses.double())
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).long()
