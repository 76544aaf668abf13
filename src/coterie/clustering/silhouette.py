"""How well clusters are separated."""

from sklearn.metrics import silhouette_score
from torch import Tensor

SILHOUETTE_ROWS = 20_000  # 4e8 distances: seconds, in chunks that fit in memory


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean over points of (b - a) / max(a, b), between -1 and 1, larger is better.

    `a` is the mean Euclidean distance to the point's own cluster, `b` to the nearest other one;
    a point alone in its cluster counts 0. Needs at least two labels and fewer labels than
    points. Exact up to 20,000 points; beyond that the mean is taken over 20,000 of them, drawn
    with a fixed seed.

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
