"""Which strategy to recommend: one model, groups, alone, a mixture of these, or no answer yet.

One model is the starting point, being the simplest. Groups replace it if their gain over it is
above zero for certain, and training alone replaces what is left if its gain is. If neither is shown
but a gain that matters cannot be excluded, the answer is "undecided". Clients that
are better off with another strategy for certain are exceptions; with them the answer is "mixed".
If no trained model beats trivial predictions, nothing was learnt and nothing can be recommended.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.evidence.gains import LEVEL, Interval, holm, interval, normal_quantile, p_better

Arm = Literal["one", "groups", "alone"]
ARMS: tuple[Arm, ...] = ("one", "groups", "alone")

WORTH = 0.05
"""Share of what was learnt that a gain must be to matter: the loss of the best trivial prediction
less that of one model is what was learnt."""


FEW = 8
"""Fewer clients than this say little about clients like them. Whether anything was learnt is then
asked of these clients alone."""


class Losses(NamedTuple):
    """Held-out losses of `a` strategies: the arms, then any number of trivial rivals."""

    names: Sequence[str]  # a
    mean: Tensor  # [t, m, a]  of each client in each replicate
    covariance: Tensor  # [t, m, a, a]  over the client's rows
    rows: Tensor  # [m]  held-out rows of each client, or units


class BetterOff(NamedTuple):
    """A client that is better off with another strategy than the recommended one for certain."""

    client: int
    arm: Arm
    gain: float


class Recommendation(NamedTuple):
    """The answer and what it rests on."""

    choice: Literal["one", "groups", "alone", "mixed", "undecided"]
    most: Arm | None  # what is recommended to all but the exceptions; None: undecided
    exceptions: list[BetterOff]
    per_client: dict[str, Interval]  # "groups over one" and so on; every client counts the same
    per_row: dict[str, Interval]  # every row counts the same
    learnt: bool  # an arm beats the best trivial rival
    matters: float  # the smallest gain that matters
    apart: list[int]  # clients whose large gains hid the answer for the others
    without: dict[str, Interval]  # as `per_client`, without these; empty if there are none


def recommend(losses: Losses, n_groups: int, level: float = LEVEL) -> Recommendation:
    """Recommend a strategy.

    Parameters
    ----------
    losses
        Of "one", "groups" and "alone", and of trivial rivals.
    n_groups
        With one group there is nothing to compare with one model, and "groups" is left out.
    level
        Of all intervals; one less it is the probability that any exception is named wrongly.
    """
    arms = [arm for arm in ARMS if arm in losses.names and (arm != "groups" or n_groups > 1)]
    everyone = torch.ones(len(losses.rows), dtype=torch.bool)
    per_client = _compare(losses, arms, everyone.double(), level)
    per_row = _compare(losses, arms, losses.rows.double(), level)
    learnt, matters = _floor(losses, arms, level)
    if not learnt:
        return Recommendation("undecided", None, [], per_client, per_row, False, matters, [], {})
    without: dict[str, Interval] = {}
    apart: list[int] = []
    most = _decide(per_client, arms, matters)
    for arm in arms if most is None else ():  # perhaps because of a few clients: leave them out
        few = [found.client for found in _exceptions(losses, arms, arm, level)]
        others = everyone.clone()
        others[few] = False
        if few and int(others.sum()) > max(1, len(few)):
            apart, without = few, _compare(losses, arms, others.double(), level)
            most = _decide(without, arms, matters)
        if most is not None:
            break
    if most is None:
        return Recommendation("undecided", None, [], per_client, per_row, True, matters, [], {})
    exceptions = _exceptions(losses, arms, most, level)
    choice = "mixed" if exceptions else most
    return Recommendation(
        choice, most, exceptions, per_client, per_row, True, matters, apart, without
    )


def _gain(losses: Losses, better: str, worse: str) -> Tensor:
    column = list(losses.names).index
    return losses.mean[..., column(worse)] - losses.mean[..., column(better)]  # [t, m]


def _compare(
    losses: Losses, arms: Sequence[str], weight: Tensor, level: float
) -> dict[str, Interval]:
    pairs = [(b, a) for i, a in enumerate(arms) for b in arms[i + 1 :]]
    return {f"{b} over {a}": interval(_gain(losses, b, a), weight, level) for b, a in pairs}


def _floor(losses: Losses, arms: Sequence[str], level: float) -> tuple[bool, float]:
    """Whether an arm beats the best trivial rival, and the smallest gain that matters."""
    mean = dict(zip(losses.names, losses.mean.mean((0, 1)).tolist(), strict=True))
    rivals = [name for name in losses.names if name not in ARMS]
    if not rivals:
        return True, WORTH * abs(mean["one"])
    rival = min(rivals, key=lambda name: mean[name])
    best = min(arms, key=lambda arm: mean[arm])
    learnt = _beats(losses, best, rival, level)
    return learnt, WORTH * max(mean[rival] - mean["one"], mean[rival] - mean[best], 0.0)


def _beats(losses: Losses, better: str, worse: str, level: float) -> bool:
    """Whether a strategy is better for certain: for clients like these; for these, if few."""
    gain = _gain(losses, better, worse)
    if len(losses.rows) >= FEW or interval(gain, None, level).low > 0:
        return interval(gain, None, level).low > 0
    column = list(losses.names).index
    a, b, spread = column(better), column(worse), losses.covariance
    variance = (spread[..., a, a] + spread[..., b, b] - 2 * spread[..., a, b]).mean(0)  # [m]
    error = float((variance / losses.rows).sum().clamp(min=0).sqrt()) / len(losses.rows)
    return float(gain.mean()) > normal_quantile(level) * error > 0


def _decide(found: dict[str, Interval], arms: Sequence[Arm], matters: float) -> Arm | None:
    most: Arm = "one"
    for arm in arms[1:]:
        if found[f"{arm} over {most}"].low > 0:
            most = arm
    for arm in arms[arms.index(most) + 1 :]:
        if found[f"{arm} over {most}"].high > matters:
            return None
    return most


def _exceptions(losses: Losses, arms: Sequence[Arm], most: Arm, level: float) -> list[BetterOff]:
    others = [arm for arm in arms if arm != most]
    if not others:
        return []
    column = list(losses.names).index
    one = column(most)
    gains, p = [], []
    for arm in others:
        gain, other = _gain(losses, arm, most), column(arm)
        spread = losses.covariance
        variance = spread[..., one, one] + spread[..., other, other] - 2 * spread[..., one, other]
        gains.append(gain.mean(0))
        p.append(p_better(gain, variance.clamp(min=0), losses.rows))
    sure = holm(torch.stack(p), 1 - level)  # [others, m]
    gain = torch.where(sure, torch.stack(gains), -torch.inf)
    best = gain.max(0)
    return [
        BetterOff(i, others[int(best.indices[i])], float(best.values[i]))
        for i in sure.any(0).nonzero()[:, 0].tolist()
    ]
