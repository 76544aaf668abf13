"""How many clusters a set of points falls into."""

from typing import Literal, NamedTuple

import torch
from sklearn.metrics import silhouette_score
from torch import Tensor

from coterie.clustering.hierarchical import sample, ward_path
from coterie.clustering.labels import centroids
from coterie.core.errors import ConfigError

SILHOUETTE_ROWS = 20_000  # 4e8 distances: seconds, in chunks that fit in memory


class Choice(NamedTuple):
    """A number of clusters and the curve it was read from."""

    k: int
    ks: tuple[int, ...]  # the numbers that could be scored
    scores: tuple[float, ...]  # silhouette, or within-cluster sum of squares for the elbow
    rows: int  # points it rests on: all, or a sample of them


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean over points of (b - a) / max(a, b), between -1 and 1, larger is better.

    `a` is the mean Euclidean distance to the point's own cluster, `b` to the nearest other one;
    a point alone in its cluster counts 0. Needs at least two labels and fewer labels than
    points. Exact up to 20,000 points; beyond that the mean is taken over 20,000 of them, drawn
    with a fixed seed.

    Examples
    --------
    >>> points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    >>> round(silhouette(points, torch.tensor([0, 0, 1, 1])), 4)
    0.8885
    """
    sample = SILHOUETTE_ROWS if len(points) > SILHOUETTE_ROWS else None
    return float(
        silhouette_score(
            points.double().numpy(), labels.numpy(), sample_size=sample, random_state=0
        )
    )


def choose_k(
    points: Tensor,
    max_k: int,
    min_k: int = 2,
    rule: Literal["silhouette", "elbow"] = "silhouette",
    tolerance: float = 0.10,
    replicate: int = 5,
    single_if_below: float | None = None,
) -> Choice:
    """Choose the number of Ward clusters, with the curve of scores.

    `silhouette` walks up from `min_k` and moves on only when the score rises by more than the
    margin `tolerance * abs(best)`. It cannot compare with one cluster: 1 is the answer only when
    nothing could be scored (one point, or all equal) or by `single_if_below`.

    `elbow` draws the within-cluster sum of squares over k = 1 .. `max_k`, scales both axes to
    [0, 1], and takes the k that lies deepest below the straight line from the first point to
    the last. A curve without a bend gives 1, so two clusters need `max_k` of at least 3.

    Ward's tree is quadratic, so above 5,000 points the choice rests on 5,000 of them, drawn with a
    fixed seed (`rows` says so).

    Parameters
    ----------
    points : shape [m, d], finite.
    max_k : largest number considered, never more than the number of points.
    min_k, tolerance, replicate, single_if_below : for `silhouette` only.
    tolerance : 0 in the CLoVE paper, 0.10 in its authors' code.
    replicate : when `max_k` reaches the number of points, each point enters this many times, so
        that "every point alone" can be scored: identical copies give it exactly 1, and the
        margin still prefers fewer clusters when the points of one nearly coincide. 1 in the
        paper, 5 in the code.
    single_if_below : answer 1 when the chosen score is below this.

    Examples
    --------
    >>> corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> points = torch.cat([corners, corners + 0.1])
    >>> choice = choose_k(points, max_k=4)
    >>> choice.k, choice.ks
    (3, (2, 3, 4))
    >>> choose_k(points, max_k=6, rule="elbow").k
    3
    """
    points = sample(points)
    if rule == "elbow":
        return _elbow(points.double(), min(max_k, len(points)))
    if rule != "silhouette":
        raise ConfigError(f"choose_k: rule must be 'silhouette' or 'elbow', got {rule!r}.")
    rows, high = len(points), min(max_k, len(points))
    if high >= len(points):
        points = points.repeat(replicate, 1)
    candidates = range(min_k, min(high, len(points) - 1) + 1)
    chosen, best = 1, -1.0
    ks: list[int] = []
    scores: list[float] = []
    for k, labels in zip(candidates, ward_path(points, candidates), strict=True):
        if labels.max() == 0:
            continue
        score = silhouette(points, labels)
        if not ks or score > best + tolerance * abs(best):
            chosen, best = k, score
        ks.append(k)
        scores.append(score)
    if single_if_below is not None and best < single_if_below:
        chosen = 1
    return Choice(chosen, tuple(ks), tuple(scores), rows)


def _elbow(points: Tensor, high: int) -> Choice:
    ks = tuple(range(1, high + 1))
    within = torch.stack(
        [
            (points - centroids(points, labels)[labels]).square().sum()
            for labels in ward_path(points, ks)
        ]
    )  # [high]
    drop = within[0] - within[-1]
    chosen = 1
    if drop > 0:
        depth = 1 - torch.linspace(0, 1, high, dtype=torch.float64) - (within - within[-1]) / drop
        # A straight line bends by rounding alone.
        chosen = int(depth.argmax()) + 1 if depth.max() > 1e-9 else 1
    return Choice(chosen, ks, tuple(within.tolist()), len(points))
