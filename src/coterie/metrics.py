"""Metrics of groupings, of models compared with the truth, and of scores over clients.

The true groups are known in simulations only, and only metrics may use them. A label of -1 means
that a client is unassigned. The metrics of groupings leave out unassigned clients, so a run with
few participants is evaluated on the clients it has asked.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import spearmanr
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

__all__ = [
    "MixtureError",
    "Spread",
    "accuracy",
    "adjusted_rand",
    "bootstrap_mean",
    "expert_scores",
    "first_round",
    "identity_accuracy",
    "match_components",
    "mixture_error",
    "normalized_mutual_info",
    "parameter_distance",
    "spread",
]


def bootstrap_mean(
    values: Tensor, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean of some values, and a percentile bootstrap interval: (mean, low, high).

    Parameters
    ----------
    values
        One value per client, finite. [clients]
    resamples
        Number of bootstrap samples.
    seed
        Seed of the bootstrap samples.
    level
        Share of the resampled means inside the interval.

    Examples
    --------
    >>> bootstrap_mean(torch.full((8,), 0.25))
    (0.25, 0.25, 0.25)
    >>> mean, low, high = bootstrap_mean(torch.tensor([0.1, -0.1] * 8))
    >>> low < 0 < high
    True
    """
    values = values.double()
    draw = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (resamples, len(values)), generator=draw)
    means = values[picks].mean(1)
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = means.quantile(edges).tolist()
    return float(values.mean()), low, high


def adjusted_rand(found: Tensor, truth: Tensor, on: Tensor | None = None) -> float | None:
    """Adjusted Rand index of a grouping: 1 for the true groups, about 0 for random ones.

    Parameters
    ----------
    found
        Group of each client, -1 for unassigned clients. [clients]
    truth
        True group of each client. [clients]
    on
        Ids of the clients to evaluate, for example the participants of a round. None: all clients.

    Returns
    -------
    The index, or None if it is undefined, because all clients belong to one true group.

    Examples
    --------
    >>> truth = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> adjusted_rand(torch.tensor([5, 5, 5, 2, 2, 2]), truth)
    1.0
    >>> adjusted_rand(torch.tensor([5, 5, -1, 2, 2, 5]), truth, on=torch.tensor([0, 1, 2, 3]))
    1.0
    >>> adjusted_rand(truth, torch.zeros(6)) is None
    True
    """
    found, truth = _select_clients(found, truth, on)
    if truth.unique().numel() < 2:
        return None
    return float(adjusted_rand_score(truth.numpy(), found.numpy()))


def masked_rand(found: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """Adjusted Rand index of the real rows, as a tensor; stackable.

    It is 1 if both labellings put all rows into one group, or if both put each row into its own.

    >>> found, truth = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 7, 5])
    >>> masked_rand(found, truth, torch.tensor([True, True, True, False]))
    tensor(1., dtype=torch.float64)
    """
    n = mask.sum().double()
    # Numbers of pairs of rows that are in one group: in both labellings, in `found`, in `truth`.
    both, a, b = (
        _pairs_together(code, mask) for code in (found * (truth.max() + 1) + truth, found, truth)
    )
    expected = a * b / (n * (n - 1) / 2).clamp(min=1)
    most = (a + b) / 2
    same = (most - expected).abs() < 1e-12
    return torch.where(same, 1.0, (both - expected) / torch.where(same, 1.0, most - expected))


def _pairs_together(code: Tensor, mask: Tensor) -> Tensor:
    code = torch.where(mask, code.long(), -1)
    order = code.sort().values
    same = torch.searchsorted(order, code, right=True) - torch.searchsorted(order, code)
    return (torch.where(mask, same - 1, 0).sum() / 2).double()


def normalized_mutual_info(found: Tensor, truth: Tensor, on: Tensor | None = None) -> float | None:
    """Mutual information of found and true groups, divided by the mean of their entropies.

    Unlike the adjusted Rand index it is not corrected for chance, so many small groups get a high
    value. Parameters and undefined cases are those of `adjusted_rand`.

    Examples
    --------
    >>> truth = torch.tensor([0, 0, 1, 1])
    >>> normalized_mutual_info(torch.tensor([1, 1, 0, 0]), truth)
    1.0
    >>> round(normalized_mutual_info(torch.tensor([0, 1, 2, 3]), truth), 3)
    0.667
    """
    found, truth = _select_clients(found, truth, on)
    if truth.unique().numel() < 2:
        return None
    return float(normalized_mutual_info_score(truth.numpy(), found.numpy()))


def identity_accuracy(found: Tensor, truth: Tensor, on: Tensor | None = None) -> float | None:
    """Fraction of clients in the correct group, for the best one-to-one matching of the groups.

    If there are more found groups than true groups, all clients of a group without a match count as
    wrong. Parameters are those of `adjusted_rand`; None if all clients are unassigned.

    Examples
    --------
    >>> identity_accuracy(torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
    0.75
    >>> identity_accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    found, truth = _select_clients(found, truth, on)
    if not found.numel():
        return None
    shared = contingency_matrix(truth.numpy(), found.numpy())  # [true groups, found groups]
    best = linear_sum_assignment(shared, maximize=True)
    return float(shared[best].sum() / found.numel())


def first_round(values: Iterable[float | None], at_least: float) -> int | None:
    """First round, counted from 1, in which a value reaches a level; None if there is none.

    Undefined entries (None or NaN) do not reach any level.

    Examples
    --------
    >>> first_round([None, 0.4, 0.95, 1.0], at_least=0.9)
    3
    >>> first_round([0.1, 0.2], at_least=0.9) is None
    True
    """
    for number, value in enumerate(values, start=1):
        if value is not None and value >= at_least:
            return number
    return None


def parameter_distance(models: Tensor, truth: Tensor, nearest: bool = False) -> float:
    """Mean Euclidean distance between learnt and true parameter vectors.

    Parameters
    ----------
    models
        Learnt parameters, one model per row. [k, d]
    truth
        True parameters, one group per row. [k, d]
    nearest
        False: models and true parameters are paired one to one so that the mean is smallest; if
        there are more of one than of the other, the rest does not count. True: each model is
        compared with the nearest true parameters, so several models may be compared with the same.

    Returns
    -------
    The mean distance; infinity if an entry is not finite, because a model has diverged.

    Examples
    --------
    >>> truth = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> parameter_distance(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), truth)
    0.5
    >>> collapsed = torch.zeros(2, 2)
    >>> parameter_distance(collapsed, truth), parameter_distance(collapsed, truth, nearest=True)
    (2.5, 0.0)
    """
    models, truth = _numbers(models), _numbers(truth)
    if models.ndim != 2 or truth.ndim != 2 or models.shape[1] != truth.shape[1]:
        raise ValueError(
            "parameter_distance: models and truth must be matrices with the same number of "
            f"columns. Got shapes {tuple(models.shape)} and {tuple(truth.shape)}."
        )
    # Not by inner products, which lose half of the digits if vectors are almost equal.
    distance = torch.cdist(models, truth, compute_mode="donot_use_mm_for_euclid_dist")  # [k, k]
    if not distance.isfinite().all():
        return float("inf")
    if nearest:
        return distance.min(dim=1).values.mean().item()
    return distance[_best_pairs(distance)].mean().item()


class MixtureError(TypedDict):
    """Errors of estimated mixture proportions."""

    mae: float
    """Mean absolute error over clients and components."""
    maximum: float
    """Largest absolute error."""
    spearman: list[float | None]
    """Rank correlation over clients, per true component; None if one side is constant."""
    slope: float | None
    """Regression of the estimate on the truth; below one, shares are biased towards equal ones."""


def mixture_error(estimated: Tensor, true: Tensor) -> MixtureError:
    """Error of estimated mixture proportions, for the best one-to-one matching of components.

    Parameters
    ----------
    estimated
        Estimated share of each component in each client's data. [m, k]
    true
        True shares. [m, k]

    Returns
    -------
    Mean absolute error, largest error, rank correlation over clients for each true component, and
    slope. The matching is the one with the smallest mean absolute error.

    Examples
    --------
    >>> true = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> swapped = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.75, 0.25]])
    >>> error = mixture_error(swapped, true)
    >>> round(error["mae"], 4), error["maximum"], [round(rho, 4) for rho in error["spearman"]]
    (0.0833, 0.25, [1.0, 1.0])
    """
    estimated, true = _numbers(estimated), _numbers(true)
    if estimated.ndim != 2 or estimated.shape != true.shape:
        raise ValueError(
            "mixture_error: estimated and true must be matrices of the same shape. "
            f"Got shapes {tuple(estimated.shape)} and {tuple(true.shape)}."
        )
    estimated = estimated[:, match_components(estimated, true)]
    error = (estimated - true).abs()
    truth = true - true.mean(0)
    varies = truth.square().sum()
    return {
        "mae": error.mean().item(),
        "maximum": error.max().item(),
        "spearman": [_spearman(a, b) for a, b in zip(estimated.T, true.T, strict=True)],
        "slope": float((truth * estimated).sum() / varies) if float(varies) > 0 else None,
    }


def match_components(estimated: Tensor, true: Tensor) -> Tensor:
    """The estimated component that matches each true component, by shares: [k].

    Examples
    --------
    >>> match_components(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[1.0, 0], [0, 1]]))
    tensor([1, 0])
    """
    estimated, true = _numbers(estimated), _numbers(true)
    cost = (true[:, :, None] - estimated[:, None, :]).abs().mean(dim=0)  # [k true, k estimated]
    return _best_pairs(cost)[1]


class Experts(TypedDict):
    """Scores of the matching expert of each component, and its lead over the other experts."""

    matched: list[float]
    """Score of the matching expert on each true component."""
    gap: list[float]
    """Difference to the best of the other experts; empty with one component."""


def expert_scores(matrix: Tensor, order: Tensor) -> Experts:
    """Scores of the matching experts and their leads, from the scores of all experts.

    Parameters
    ----------
    matrix
        Score of expert j on the test set of true component c. [k, k]
    order
        The expert of each true component, from `match_components` (never from the scores). [k]

    Examples
    --------
    >>> expert_scores(torch.tensor([[0.25, 0.75], [1.0, 0.5]]), torch.tensor([1, 0]))
    {'matched': [1.0, 0.75], 'gap': [0.75, 0.25]}
    """
    matrix = _numbers(matrix)[order]  # rows in the order of the true components
    k = len(matrix)
    own = matrix.diagonal()
    others = matrix.masked_fill(torch.eye(k, dtype=torch.bool), -torch.inf).max(0).values
    return {"matched": own.tolist(), "gap": (own - others).tolist() if k > 1 else []}


class Spread(TypedDict):
    """Five summary statistics of scores over clients."""

    mean: float
    std: float
    """Population standard deviation (divided by the number of clients)."""
    worst_decile: float
    """Mean of the lowest tenth of the clients, at least one."""
    min: float
    median: float


def spread(values: Tensor | Sequence[float]) -> Spread:
    """Mean, standard deviation, worst decile, minimum and median of one score per client.

    Higher scores must be better: use negative losses, not losses. Leave out clients without a
    score; one NaN makes all results NaN, so that no client is lost unnoticed.

    Examples
    --------
    >>> spread([0.5, 0.75, 1.0, 0.75])
    {'mean': 0.75, 'std': 0.176..., 'worst_decile': 0.5, 'min': 0.5, 'median': 0.75}
    """
    scores = _numbers(torch.as_tensor(values, dtype=torch.float64)).flatten()
    if not scores.numel():
        raise ValueError("spread: there must be at least one value. Got none.")
    if scores.isnan().any():
        scores = torch.full_like(scores, torch.nan)
    scores = scores.sort().values
    return {
        "mean": scores.mean().item(),
        "std": scores.std(correction=0).item(),
        "worst_decile": scores[: max(1, len(scores) // 10)].mean().item(),
        "min": scores[0].item(),
        "median": scores.quantile(0.5).item(),
    }


def accuracy(outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Fraction of the real samples whose largest output is that of their class.

    Stackable, so the result is a tensor. NaN if no row is real.

    Parameters
    ----------
    outputs
        One score per class. [n, c]
    y
        Class of each sample. [n]
    mask
        True for real rows; the others are padding. [n]

    Examples
    --------
    >>> outputs = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0], [5.0, 0.0]])
    >>> accuracy(outputs, torch.tensor([0, 1, 1, 0]), torch.tensor([True, True, False, False]))
    tensor(1.)
    """
    right = (outputs.argmax(dim=-1) == y) & mask
    return right.sum() / mask.sum()


def _select_clients(found: Tensor, truth: Tensor, on: Tensor | None) -> tuple[Tensor, Tensor]:
    """Found and true groups of the clients in `on` that are assigned to a group."""
    if found.ndim != 1 or found.shape != truth.shape:
        raise ValueError(
            "metrics: found and truth must hold one label per client. "
            f"Got shapes {tuple(found.shape)} and {tuple(truth.shape)}."
        )
    found, truth = found.detach().cpu(), truth.detach().cpu()
    if on is not None:
        found, truth = found[on.cpu()], truth[on.cpu()]
    placed = found != -1
    return found[placed].long(), truth[placed].long()


def _numbers(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _best_pairs(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column indices of the cheapest one-to-one pairing."""
    rows, columns = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _spearman(a: Tensor, b: Tensor) -> float | None:
    if a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(spearmanr(a.numpy(), b.numpy()).statistic)
