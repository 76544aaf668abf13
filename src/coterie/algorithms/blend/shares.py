"""Division of samples by their scores, and shares computed from the division.

Scores are minus log densities, so the smallest wins. Functions with an argument `scores` work on
the samples of one client; the others work on numbers that clients have sent.
"""

import torch
from torch import Tensor

from coterie.algorithms.blend.simplex import project_to_simplex

# division


def penalties(scores: Tensor, offsets: Tensor, prior: Tensor, least: float) -> Tensor:
    """Score plus offset minus log share; the smallest one gives a sample's component. [n, k]"""
    return scores + offsets.to(scores.dtype) - prior.clamp(min=least).log().to(scores.dtype)


def pushes(scores: Tensor) -> Tensor:
    """How far each component's score may rise before it loses a sample: [n, k]."""
    two = scores.topk(min(2, scores.shape[1]), dim=1, largest=False).values
    best, second = two[:, :1], two[:, -1:]
    return torch.where(scores == best, second, best) - scores


def quantiles(values: Tensor, real: Tensor, count: int) -> Tensor:
    """Evenly spaced quantiles of the real values: [count]; arbitrary if there are none."""
    inf = torch.finfo(values.dtype).max
    ordered = torch.where(real, values, inf).sort().values
    place = (torch.arange(count, device=values.device) + 0.5) / count * real.sum()
    return ordered.gather(0, place.long().clamp(max=len(values) - 1)).double()


def pooled_quantiles(values: Tensor, n: Tensor, at: Tensor) -> Tensor:
    """Quantiles of all clients' samples, from those of each client [m, q] and its size [m]."""
    weight = (n.double() / values.shape[1])[:, None].expand_as(values).flatten()
    ordered, order = values.flatten().sort()
    below = weight[order].cumsum(0) - 0.5 * weight[order]
    total = weight.sum()
    place = torch.searchsorted(below.contiguous(), at.double() * total)
    return ordered[place.clamp(max=len(ordered) - 1)]


def move_offset(offsets: Tensor, room: Tensor, n: Tensor, total: Tensor, target: Tensor) -> Tensor:
    """Change one component's offset so that it gets its target share of all samples.

    Parameters
    ----------
    room
        Quantiles of each client's `pushes` under the present offsets. [m, k, q]
    n, total
        Samples of each client [m]; present share of each component [k].
    """
    j = int((total - target).abs().argmax())  # the worst first
    step = pooled_quantiles(room[:, j], n, 1 - target[j].clamp(0, 1))
    offsets = offsets.clone()
    offsets[j] = offsets[j] + step
    return offsets - offsets.mean()


def histogram(scores: Tensor, real: Tensor, cuts: Tensor) -> Tensor:
    """Number of samples by component and margin: [k, bins]."""
    k, bins = len(cuts), cuts.shape[1] + 1
    part, margin = divide(scores)
    place = (margin[:, None] >= cuts.index_select(0, part)).sum(1)
    hit = (part * bins + place)[:, None] == torch.arange(k * bins, device=part.device)
    return (hit & real[:, None]).sum(0).double().reshape(k, bins)


def divide(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The component of each sample, and its margin: how much worse the second best is."""
    part = scores.argmin(1)
    two = scores.topk(min(2, scores.shape[1]), dim=1, largest=False).values
    return part, (two[:, -1] - two[:, 0]).double()


# shares


def tail_shares(counts: Tensor, pure: int, steps: int = 500) -> tuple[Tensor, Tensor]:
    """Shares from histograms of margins: samples with the largest margins are taken as correct.

    Parameters
    ----------
    counts
        Samples of each client by component and margin. [m, k, bins]
    pure
        Number of a component's clearest bins, which have no samples of other components.

    Returns
    -------
    Shares [m, k], and the distribution of each component's samples over all bins [k, k * bins].
    """
    m, k, bins = counts.shape
    flat = counts.double().reshape(m, k * bins)
    shares = counts.double().sum(2) / counts.double().sum((1, 2))[:, None].clamp(min=1)
    shares = shares.clamp(min=0.02)
    shares = shares / shares.sum(1, keepdim=True)
    own = torch.arange(k * bins) // bins == torch.arange(k)[:, None]  # [k, k * bins]
    clear = torch.arange(k * bins) % bins >= bins - pure
    profiles = (shares.T @ flat) * (own | ~clear)
    profiles = _normalise(profiles)
    return mixture_em(flat, shares, profiles, steps)


def mixture_em(
    counts: Tensor, shares: Tensor, profiles: Tensor, steps: int, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Fit `counts[i] ~ Multinomial(shares[i] @ profiles)`; zeros stay zero."""
    size = counts.sum(1, keepdim=True).clamp(min=1e-12)
    for _ in range(steps):
        ratio = counts / (shares @ profiles).clamp(min=1e-300)  # [m, bins]
        new = shares * (ratio @ profiles.T) / size
        if not fixed:
            profiles = _normalise(profiles * (shares.T @ ratio))
        shares = new
    return shares / shares.sum(1, keepdim=True).clamp(min=1e-12), profiles


def _normalise(rows: Tensor) -> Tensor:
    return rows / rows.sum(1, keepdim=True).clamp(min=1e-300)


def undo_confusion(counts: Tensor, confusion: Tensor) -> Tensor:
    """Correct counts for samples that are assigned to the wrong component.

    `confusion[i, j]` is the share of component i's samples that is assigned to component j.

    >>> undo_confusion(torch.tensor([[0.31, 0.69]]), torch.tensor([[0.8, 0.2], [0.1, 0.9]]))
    tensor([[0.3000, 0.7000]], dtype=torch.float64)
    """
    inverse = torch.linalg.pinv(confusion.double())
    return project_to_simplex(counts.double() @ inverse)


def em_shares(scores: Tensor, real: Tensor, steps: int = 50) -> Tensor:
    """Maximum-likelihood shares of one client, with scores as minus log densities: [k]."""
    k = scores.shape[1]
    likely = (scores.min(1, keepdim=True).values - scores).double().exp()
    shares = torch.full((k,), 1 / k, dtype=torch.float64, device=scores.device)
    weight = real.double() / real.sum().clamp(min=1)
    for _ in range(steps):
        joint = likely * shares
        shares = (joint / joint.sum(1, keepdim=True) * weight[:, None]).sum(0)
    return shares


def share_errors(shares: Tensor, profiles: Tensor, n: Tensor) -> Tensor:
    """Standard errors of shares that were fitted to histograms with known profiles: [m, k]."""
    k = shares.shape[1]
    if k == 1:
        return torch.zeros_like(shares)
    held = shares.clamp(min=1e-3) / shares.clamp(min=1e-3).sum(1, keepdim=True)
    apart = profiles[:-1] - profiles[-1]  # [k - 1, bins]
    seen = (held @ profiles).clamp(min=1e-12)  # [m, bins]
    information = torch.einsum("jb,mb,lb->mjl", apart, 1 / seen, apart) * n[:, None, None]
    ridge = 1e-6 * torch.eye(k - 1, dtype=torch.float64)
    cover = torch.linalg.inv(information + ridge)
    own = cover.diagonal(dim1=1, dim2=2)
    last = cover.sum((1, 2))[:, None]
    return torch.cat([own, last], 1).clamp(0, 0.25).sqrt()  # the largest variance of a share


def dispersion(shares: Tensor, n: Tensor) -> Tensor:
    """Variation of shares between clients relative to chance: [k]; 0 for an empty component."""
    n = n.double()
    mean = (n[:, None] * shares).sum(0) / n.sum()
    chance = mean * (1 - mean)
    varies = (n[:, None] * (shares - mean).square()).sum(0) / max(len(shares) - 1, 1)
    return torch.where(chance > 1e-12, varies / chance.clamp(min=1e-12), 0.0)
