"""Loss vectors: a row per client, a column per model; embedded, clustered, matched to models."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.clustering import noise
from coterie.clustering.choose_k import choose_k
from coterie.clustering.guard import COMPANY, clip, flat, loners, nearest
from coterie.clustering.hierarchical import ward
from coterie.clustering.kmeans import kmeans
from coterie.clustering.matching import merge_small, min_cost_matching
from coterie.core.algorithm import Curve


class Rules(Protocol):
    """The options these functions read."""

    @property
    def clustering(self) -> Literal["weighted", "kmeans", "agglomerative"]: ...
    @property
    def choose(self) -> Literal["noise", "silhouette", "elbow"]: ...
    @property
    def threshold(self) -> float: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def replicate(self) -> int: ...
    @property
    def matching(self) -> Literal["mincost", "none"]: ...
    @property
    def min_group_size(self) -> int: ...
    @property
    def guard(self) -> bool: ...


class Found(NamedTuple):
    """Groups of some clients, and what they rest on."""

    group: Tensor  # [m]  model of each client
    labels: Tensor  # [m]  its cluster
    aside: Tensor  # [m]  True: no company, so not clustered; it is told the nearest group
    curve: Tensor  # [j, 3]  number of groups, criterion, 1 if chosen; empty where K was given


def embed(
    losses: Tensor, embedding: Literal["noise", "loss", "sqrt"], unit: Tensor | None = None
) -> Tensor:
    """Losses, or their square roots, in units of each column.

    >>> embed(torch.tensor([[4.0, 9.0]]), "sqrt", torch.tensor([1.0, 3.0]))
    tensor([[2., 1.]], dtype=torch.float64)
    """
    vectors = losses.double()
    vectors = vectors.clamp(min=0).sqrt() if embedding == "sqrt" else vectors
    return vectors if unit is None else vectors / unit


def column_unit(vectors: Tensor, scale: Literal["none", "column_std"]) -> Tensor:
    """What each column is divided by: its standard deviation (1 where it has none), or 1.

    >>> column_unit(torch.tensor([[0.0, 5.0], [2.0, 5.0]]), "column_std")
    tensor([1., 1.], dtype=torch.float64)
    """
    ones = torch.ones(vectors.shape[1], dtype=torch.float64)
    if scale == "none":
        return ones
    deviation = vectors.double().std(0, correction=0)
    return torch.where(deviation > 0, deviation, ones)


def find_groups(
    rules: Rules,
    losses: Tensor,
    x: Tensor,
    weight: Tensor,
    k: int | None,
    limit: int,
    seed: int = 0,
    least: int = 1,
) -> Found:
    """Set loners aside, cluster the rest, and match the clusters to models.

    Parameters
    ----------
    losses : shape [m, models], by which clusters are matched.
    x, weight : shape [m, d], the vectors that are clustered and the precision of their entries.
    k : number of groups; None: chosen.
    limit : largest number considered.
    least : what a chosen number must not fall below; a survey may see more than losses do.
    """
    aside = torch.zeros(len(x), dtype=torch.bool)
    if rules.guard and len(x) >= COMPANY * (k or 1):  # in a small cohort the honest are few, too
        floor = float(rules.clustering == "weighted")  # in units of noise
        aside = loners(x, weight, floor=floor) | flat(clip(losses))
    points, weights = x[~aside], weight[~aside]
    curve = x.new_zeros(0, 3)
    if rules.clustering == "weighted":
        tree = noise.weighted_ward(points, weights)
        if k is None or k > len(points):
            k, curve = _number(rules, tree, points, limit, least)
        labels = tree.labels(k)
    else:
        if k is None or k > len(points):
            k, curve = _number(rules, None, points, limit, least)
        labels = (kmeans(points, k, seed) if rules.clustering == "kmeans" else ward(points, k))[0]
    labels = merge_small(points, labels, rules.min_group_size)
    model = match_models(losses[~aside], labels, rules.matching)  # by losses, whatever the vectors
    everyone = nearest(x, weight, labels, aside)
    of = torch.zeros(int(labels.max()) + 1, dtype=torch.int64).scatter(0, labels, model)
    return Found(of[everyone], everyone, aside, curve)


def _number(
    rules: Rules, tree: noise.Ward | None, points: Tensor, limit: int, least: int
) -> tuple[int, Tensor]:
    """How many groups, and the curve it was read off."""
    most = min(len(points), limit)
    if rules.choose == "noise" and tree is not None:
        choice = noise.choose_k(tree.ratio, limit, rules.threshold)
        # No number explains the scatter: the best silhouette, without a margin.
        k = choice.k or choose_k(points, most, tolerance=0.0, replicate=rules.replicate).k
        k = min(max(k, least), most)
        ks = range(1, len(choice.ratio) + 1)
        return k, _curve(ks, choice.ratio, k if choice.k is not None else None)
    rule: Literal["silhouette", "elbow"] = "elbow" if rules.choose == "elbow" else "silhouette"
    found = choose_k(points, most, 2, rule, rules.tolerance, rules.replicate)
    return found.k, _curve(found.ks, found.scores, found.k)


def _curve(ks: Iterable[int], values: Iterable[float], chosen: int | None) -> Tensor:
    rows = [[k, value, k == chosen] for k, value in zip(ks, values, strict=True)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


def explained(
    curve: Tensor, rule: Literal["noise", "silhouette", "elbow"], threshold: float, tolerance: float
) -> list[Curve]:
    """The curve of a chosen number of groups as evidence for reports; none if it is empty."""
    if not len(curve):
        return []
    ks, values = tuple(curve[:, 0].long().tolist()), tuple(curve[:, 1].tolist())
    if rule == "noise":
        ratio = torch.cat([curve[:, 1], curve.new_tensor([torch.nan])])
        found = noise.curve(noise.choose_k(ratio, len(ks), threshold), "losses")
        used = int(curve[curve[:, 2] == 1, 0].sum())
        if found.chosen is not None and used > found.chosen:
            note = f"losses alone show {found.chosen}; the survey before training showed {used}"
            found = found._replace(chosen=used, runner_up=found.chosen, close=(), note=note)
        return [found]
    chosen = int(curve[curve[:, 2] == 1, 0].sum()) or 1
    name = "silhouette" if rule == "silhouette" else "sum of squares"
    if rule == "elbow":
        return [Curve("losses", name, ks, values, chosen, None, ())]
    best = max(values)
    others = sorted((k for k in ks if k != chosen), key=lambda k: -values[ks.index(k)])
    close = tuple(k for k in others if values[ks.index(k)] >= best - tolerance * abs(best))
    note = "a silhouette cannot say that there is one group"
    read = chosen, others[0] if others else None, close
    return [Curve("losses", name, ks, values, *read, note=note)]


def match_models(losses: Tensor, labels: Tensor, matching: Literal["mincost", "none"]) -> Tensor:
    """Model of each row: different clusters get different models, with the least total loss.

    >>> match_models(torch.tensor([[1.0, 5.1], [2.1, 3.5]]), torch.tensor([0, 1]), "mincost")
    tensor([0, 1])
    """
    cost = torch.zeros(int(labels.max()) + 1, losses.shape[1], dtype=torch.float64)  # [k', k]
    cost.index_add_(0, labels, losses.double())
    column = min_cost_matching(cost) if matching == "mincost" else torch.arange(len(cost))
    return column[labels]
