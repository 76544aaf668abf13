"""From losses in units of noise to groups: the clustering step of Census."""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.census.guard import COMPANY, clip, flat, label_all, loners
from coterie.clustering.hierarchical import choose_k
from coterie.clustering.matching import match_clusters
from coterie.clustering.noise import Ward, choose_by_noise, make_curve, weighted_ward
from coterie.core.algorithm import Curve
from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.tree import Params

THRESHOLD = 2.5
"""Noise ratio of trained networks' losses up to which clients count as one group. True groups lay
at up to 1.7, since models remember the clients they were trained on."""

COPIES = 5  # of each point, so that "every client alone" has a silhouette


class Found(NamedTuple):
    """Groups of some clients, and the evidence for their number."""

    group: Tensor  # [m]  model of each client
    labels: Tensor  # [m]  its cluster
    aside: Tensor  # [m]  True: far from all others, so not clustered; it gets the nearest group
    curve: Tensor  # [j, 3]  number of groups, noise ratio, 1 if chosen; empty if K was given


def measure_losses(model: Model, models: Params, batch: Batch) -> dict[str, Tensor]:
    """Mean loss of every group's model, [k], standard errors of its differences, [k], and n.

    The errors are those of the losses less their mean over models, sample by sample: that a sample
    is hard for every model says nothing about groups.
    """
    each = model.probe_each(models, batch)  # [k, n]
    finite = torch.where(batch.mask & each.isfinite(), each, 0.0).double()
    share, n = batch.share(), batch.size
    left = finite - finite.mean(0)
    left = left - (left * share).sum(1, keepdim=True)
    variance = (left.square() * share).sum(1) / (n - 1).clamp(min=1)  # n / (n - 1), over n
    losses = torch.vmap(batch.mean)(each)
    return {"losses": losses, "errors": variance.sqrt().to(losses.dtype), "n": n}


def find_groups(
    losses: Tensor,
    x: Tensor,
    weight: Tensor,
    k: int | None,
    guard: bool = True,
    before: Tensor | None = None,
) -> Found:
    """Set loners aside, cluster the rest, and match the clusters to models.

    Parameters
    ----------
    losses : shape [m, models], finite; clusters are matched to models by them.
    x, weight : shape [m, d], what is clustered, in units of noise, and the weight of each entry.
    k : number of groups; None: read off the noise, at most one group per model.
    guard : whether clients may be set aside.
    before : shape [m], groups of a survey, or -1; none that still has two members is given up.
    """
    aside = torch.zeros(len(x), dtype=torch.bool)
    if guard and len(x) >= COMPANY * (k or 1):  # in a small cohort honest clients are few, too
        aside = loners(x, weight) | flat(clip(losses))
    size = torch.zeros(0) if before is None else before[~aside & (before >= 0)].bincount()
    points = x[~aside]
    tree, curve = weighted_ward(points, weight[~aside]), x.new_zeros(0, 3)
    if k is None or k > len(points):
        k, curve = _choose_number(tree, points, k or losses.shape[1], int((size > 1).sum()))
    labels = tree.labels(k)
    model = match_clusters(losses[~aside], labels)
    everyone = label_all(x, weight, labels, aside)
    return Found(model[everyone], everyone, aside, curve)


def _choose_number(tree: Ward, points: Tensor, limit: int, least: int) -> tuple[int, Tensor]:
    """The number of groups, and the curve it was read from."""
    most = min(len(points), limit)
    choice = choose_by_noise(tree.ratio, limit, THRESHOLD)
    k = choice.k
    if k is None:  # no number explains the scatter: the best silhouette
        k, _ = choose_k(points.repeat(COPIES, 1) if most >= len(points) else points, most)
    k = min(max(k, least, 1), most)
    rows = [[j + 1, ratio, j + 1 == k and bool(choice.k)] for j, ratio in enumerate(choice.ratio)]
    return k, torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


def explain_number(rows: Tensor, stray: bool) -> list[Curve]:
    """The curve of a number of groups, [j, 3], for reports; `stray`: the survey found none."""
    if not len(rows):
        return []
    ratio = torch.cat([rows[:, 1], rows.new_tensor([torch.nan])])
    found = make_curve(choose_by_noise(ratio, len(rows), THRESHOLD))
    used = int(rows[rows[:, 2] == 1, 0].sum())
    if stray:
        found = found._replace(chosen=None, close=(), note="the survey before training found none")
    if found.chosen is not None and used > found.chosen:
        note = f"losses alone show {found.chosen}; the survey before training showed {used}"
        found = found._replace(chosen=used, runner_up=found.chosen, close=(), note=note)
    return [found]
