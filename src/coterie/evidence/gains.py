"""What one strategy gains over another: intervals that say what they cover.

Two strategies give every client two mean losses on its own held-out rows; the difference is
its gain. Three things make gains vary: which clients there are, which rows they hold out, and the
randomness of training (initial models, batches). The first two differ from client to client and are
seen in one training of each strategy. The third moves all clients together and is seen only if each
strategy is trained more than once, with other seeds (*replicates*).

With w the weights of clients (sum 1), g_ti the gain of client i in replicate t of T, and q the
quantiles of Student's t for clients and for replicates, each half of the interval has the length

    sqrt(q_clients^2 V_clients + q_training^2 V_training)

    V_clients = sum_i w_i^2 (g_.i - g_..)^2 / (1 - w_i)
    V_training = variance_t(sum_i w_i g_ti) / T

The squares of the lengths add up (Howe 1974). What a client and a replicate have to themselves is
in both variances. It is not taken from one of them: the difference is often near zero by chance,
and intervals then covered 88 to 93 %. Two replicates leave a single degree of freedom, and with one
quantile for the sum of both variances (Satterthwaite) intervals covered as little as 86 %. Gains
are often skew, because a few clients gain much. On the side of the long tail the quantile of Hall
(1992) is used where it is larger. A client needs no minimum of rows: clients with few rows vary
more, and many of them make up for it.

How often these intervals cover: `coterie_lab.studies.evidence_gains` (simulated losses) and
`coterie_lab.studies.evidence_rows`, rows "cover" (trained models).

References
----------
W. G. Howe: Approximate confidence limits on the mean of X + Y where X and Y are two tabled
independent random variables. Journal of the American Statistical Association 69, 1974.
P. Hall: On the removal of skewness by transformation. Journal of the Royal Statistical Society,
Series B, 54, 1992.
"""

import math
from typing import NamedTuple

import torch
from scipy.stats import t as student
from torch import Tensor

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean gain and where it may lie."""

    mean: float
    low: float
    high: float
    training: bool  # the randomness of training is covered


def interval(gain: Tensor, weight: Tensor | None = None, level: float = LEVEL) -> Interval:
    """Interval of the mean gain over clients like these.

    Parameters
    ----------
    gain
        Of each client in each replicate. [t, m]
    weight
        Of each client, for instance its held-out rows; None: all the same. [m]
    level
        Probability that the interval covers the mean.

    Examples
    --------
    Gains 1 and 3: mean 2, standard error 1, and the 97.5 % point of t with one degree of freedom
    is 12.71:

    >>> found = interval(torch.tensor([[1.0, 3.0]]))
    >>> found.mean, round(found.low, 2), found.training
    (2.0, -10.71, False)
    """
    gain = gain.double()
    t, m = gain.shape
    share = torch.ones(m).double() if weight is None else weight.double()
    share = share / share.sum()
    used = share > 0
    gain, share = gain[:, used], share[used]
    m = len(share)
    of_client, of_run = gain.mean(0), gain @ share
    mean = float(of_run.mean())
    if m < 2:
        return Interval(mean, -math.inf, math.inf, t > 1)
    factor = share.square() / (1 - share)
    apart = of_client - mean
    by_client, by_run = float((factor * apart.square()).sum()), 0.0
    if t > 1:
        by_run = (float(of_run.var()) / t) ** 0.5 * _quantile(level, t - 1)
    q = _quantile(level, float(1 / share.square().sum()) - 1)
    part = share * apart
    skew = float(part.pow(3).sum() / part.square().sum().clamp(min=1e-300) ** 1.5)
    low = math.hypot(by_client**0.5 * max(q, _hall(q, skew)), by_run)
    high = math.hypot(by_client**0.5 * max(q, -_hall(-q, skew)), by_run)
    return Interval(mean, mean - low, mean + high, t > 1)


def _quantile(level: float, free: float) -> float:
    return float(student.ppf((1 + level) / 2, free))


def normal_quantile(level: float) -> float:
    """Half the width, in standard errors, of an interval from many values."""
    return _quantile(level, math.inf)


def _hall(q: float, skew: float) -> float:
    """Quantile of the mean's t statistic where values are skew, from that of Student's t."""
    if abs(skew) < 1e-9:
        return q
    root = 1 + skew * (q - skew / 6)
    return 3 / skew * (math.copysign(abs(root) ** (1 / 3), root) - 1)


def satterthwaite(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Variance that is a sum of estimates, and its degrees of freedom.

    Parameters
    ----------
    parts
        Estimate and degrees of freedom of each. One that is subtracted is negative; the sum is at
        least the largest part.

    Examples
    --------
    Two estimates of equal size with 5 degrees of freedom each have 10 together:

    >>> satterthwaite([(1.0, 5.0), (1.0, 5.0)])
    (2.0, 10.0)
    """
    variance = max(sum(value for value, _ in parts), *(value for value, _ in parts), 0.0)
    below = sum(value**2 / free for value, free in parts if free > 0)
    return variance, variance**2 / below if below > 0 else math.inf


def p_better(gain: Tensor, row_variance: Tensor, rows: Tensor) -> Tensor:
    """Client by client, the p-value of "it gains nothing": [m].

    A one-sided t-test of the client's own held-out rows. With replicates, the client's gain must
    also be larger than training varies. A client with fewer than two rows has a p-value of 1. With
    n rows no p-value is below 2^-n, that of n signs which are all alike: losses are skew, and a
    t-test of a few of them is too sure.

    Parameters
    ----------
    gain
        Of each client in each replicate. [t, m]
    row_variance
        Variance of the gain over a client's rows. [t, m]
    rows
        Held-out rows of each client, or units. [m]
    """
    gain, row_variance, rows = gain.double(), row_variance.double(), rows.double()
    out = torch.ones(gain.shape[1], dtype=torch.float64)
    for i in (rows >= 2).nonzero()[:, 0].tolist():
        n, mean = float(rows[i]), float(gain[:, i].mean())
        variance, free = _own_variance(gain[:, i], row_variance[:, i], n)
        if variance > 0:
            out[i] = float(student.sf(mean / math.sqrt(variance), free))
        elif mean > 0:
            out[i] = 0.0
        out[i] = max(float(out[i]), 0.5**n)
    return out


def own_intervals(
    gain: Tensor, row_variance: Tensor, rows: Tensor, level: float = LEVEL
) -> list[tuple[float, float]]:
    """Client by client, where its own gain may lie, given its held-out rows.

    Student's t over the client's rows; with replicates, training varies, too. A client with fewer
    than two rows may gain anything. Of many such intervals some miss: to name clients, use
    `p_better` and `holm`.

    Parameters
    ----------
    gain, row_variance, rows
        As in `p_better`.
    level
        Probability that an interval covers.

    Examples
    --------
    Four rows, variance 4: the standard error is 1, and the 97.5 % point of t is 3.18.

    >>> found = own_intervals(torch.tensor([[2.0]]), torch.tensor([[4.0]]), torch.tensor([4]))
    >>> [round(end, 2) for end in found[0]]
    [-1.18, 5.18]
    """
    gain, row_variance, rows = gain.double(), row_variance.double(), rows.double()
    out = []
    for i, n in enumerate(rows.tolist()):
        mean = float(gain[:, i].mean())
        if n < 2:
            out.append((-math.inf, math.inf))
            continue
        variance, free = _own_variance(gain[:, i], row_variance[:, i], n)
        half = _quantile(level, free) * math.sqrt(variance)
        out.append((mean - half, mean + half))
    return out


def _own_variance(gain: Tensor, row_variance: Tensor, n: float) -> tuple[float, float]:
    """Variance of a client's mean gain, and its degrees of freedom; both arguments are [t]."""
    parts = [(float(row_variance.mean()) / n, n - 1)]
    if len(gain) > 1:
        parts.append((float(gain.var()) / len(gain), len(gain) - 1.0))
    return satterthwaite(parts)


def holm(p: Tensor, level: float) -> Tensor:
    """Which of many hypotheses to reject, so that any is rejected wrongly with at most this level.

    >>> holm(torch.tensor([0.01, 0.04, 0.03]), 0.05).tolist()
    [True, False, False]
    """
    flat = p.flatten()
    order = flat.argsort()
    limit = level / torch.arange(len(flat), 0, -1)
    passed = (flat[order] <= limit).long().cumprod(0).bool()
    return torch.zeros_like(passed).scatter(0, order, passed).reshape(p.shape)
