"""k-means with random numbers from a key: distances, k-means++ seeds, Lloyd's steps."""

import torch
from torch import Tensor

from coterie.core.random import uniform


def squared_distances(x: Tensor, centres: Tensor) -> Tensor:
    """Squared Euclidean distance of every row to every centre: [..., n, k].

    >>> squared_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([[25.]])
    """
    middle = centres.mean(-2, keepdim=True)  # values near zero reduce cancellation
    x, centres = x - middle, centres - middle
    product = x @ centres.transpose(-1, -2)
    squares = (x * x).sum(-1)[..., :, None] + (centres * centres).sum(-1)[..., None, :]
    return (squares - 2 * product).clamp(min=0)


def plus_plus(key: Tensor, x: Tensor, k: int, starts: int = 1) -> Tensor:
    """k-means++ seeds for several starts: [starts, k, d]."""
    n = len(x)
    draws = uniform(key, (starts, k), torch.float64)
    index = (draws[:, 0] * n).long()
    chosen = [index]
    nearest = squared_distances(x[index], x)  # [starts, n]
    for j in range(1, k):
        total = nearest.sum(1, keepdim=True)
        share = torch.where(total > 0, nearest, 1.0).cumsum(1)
        index = torch.searchsorted(share, draws[:, j : j + 1] * share[:, -1:], right=True)
        index = index.squeeze(1).clamp(max=n - 1)
        chosen.append(index)
        nearest = torch.minimum(nearest, squared_distances(x[index], x))
    return x[torch.stack(chosen, 1)]


def lloyd(x: Tensor, centres: Tensor, steps: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """k-means from several starts at once; the best result: labels [n], centres [k, d], inertia."""
    starts, k, _d = centres.shape
    labels = None
    for _ in range(steps):
        distance = squared_distances(x.expand(starts, *x.shape), centres)  # [s, n, k]
        now = distance.argmin(2)
        if labels is not None and torch.equal(now, labels):
            break
        labels = now
        member = torch.nn.functional.one_hot(labels, k).to(x.dtype)
        count = member.sum(1)[:, :, None]
        centres = torch.where(count > 0, member.mT @ x / count.clamp(min=1), centres)
    distance = squared_distances(x.expand(starts, *x.shape), centres)
    inertia, labels = distance.min(2).values.sum(1), distance.argmin(2)
    best = int(inertia.argmin())
    return labels[best], centres[best], inertia[best]


def kmeans(key: Tensor, x: Tensor, k: int, starts: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """The best of several k-means: labels [n], centres [k, d], summed squared distance."""
    return lloyd(x, plus_plus(key, x, k, starts))
