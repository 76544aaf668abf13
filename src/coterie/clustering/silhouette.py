"""The silhouette: how well clusters are separated."""

from sklearn.metrics import silhouette_score
from torch import Tensor

SILHOUETTE_ROWS = 20_000  # 4e8 distances: a few seconds, in chunks that fit in memory


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean over points of (b - a) / max(a, b), between -1 and 1, larger is better.

    `a` is the mean Euclidean distance to the other points of the cluster, `b` to the points of the
    nearest other cluster. A point that is alone in its cluster counts as 0. There must be at least
    two labels, and fewer labels than points. The result is exact up to 20,000 points; with more,
    the mean is over 20,000 of them, drawn with a fixed seed.

    Examples
    --------
    >>> import torch
    >>> points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    >>> round(silhouette(points, torch.tensor([0, 0, 1, 1])), 4)
    0.8885
    """
    size = SILHOUETTE_ROWS if len(points) > SILHOUETTE_ROWS else None
    rows = points.double().numpy()
    return float(silhouette_score(rows, labels.numpy(), sample_size=size, random_state=0))
