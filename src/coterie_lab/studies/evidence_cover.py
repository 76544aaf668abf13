"""How often the intervals of a verdict cover what its sentence says, with trained models.

With one training of each way, the interval is about these models, on other rows of clients like
these. So every client holds out far more rows than the verdict is given, and the interval must
cover the mean gain of the same models on the rest. With several trainings it is about any training:
it must cover the mean gain over all trainings of all federations of a kind.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.fitting import run_others
from coterie.running.loop import begin
from coterie.running.progress import Silent
from coterie.running.request import Request, resolve
from coterie.running.verdict import ARMS, Trained, as_trained, judge, rivals_of
from coterie_lab.studies.evidence_cases import Case, federation

Line = dict[str, Any]
TRAININGS = 3


def covered(
    make: Callable[[np.random.Generator], Case], method: str, n_groups: int, rows: int, fresh: int
) -> Callable[[np.random.Generator, int], Line]:
    """Intervals from `rows` held-out rows a client, and gains on `fresh` further ones.

    Of each client's rows, `make` gives 42 for training beside these.
    """

    def study(rng: np.random.Generator, seed: int) -> Line:
        case = make(rng)
        share = (rows + fresh) / float((case.client == 0).sum())
        settings = {"rounds": 10, "seed": seed, "why": "nothing", "replicates": TRAININGS}
        settings["compare"] = True
        data = federation(case, share)
        ready = resolve(Request(data, method, n_groups=n_groups, settings=settings))
        result = begin(ready, None, Silent())
        others, again = run_others(ready, None, Silent())
        trainings = [{"groups": result, **others}, *again]
        arms = {
            arm: [as_trained(one[name or "groups"]) for one in trainings]
            for arm, name in ARMS.items()
        }
        real = arms["one"][0].losses.isfinite()
        place = torch.from_numpy(rng.random(real.shape)).masked_fill(~real, 2).argsort(1).argsort(1)
        seen = (place < rows) & real
        few = {arm: [_only(one, seen) for one in trained] for arm, trained in arms.items()}
        rivals = {name: _where(losses, seen) for name, losses in rivals_of(result).items()}
        once = judge({arm: one[:1] for arm, one in few.items()}, rivals, 2)
        often = judge(few, rivals, 2)
        line: Line = {"recommendation": once["recommendation"], "most": once["most"]}
        for pair in once["per_client"]:
            better, worse = pair.split(" over ")
            gains = [_gain(arms, better, worse, t, real & ~seen) for t in range(TRAININGS)]
            line[pair] = {
                "once": _round(once["per_client"][pair]),
                "often": _round(often["per_client"][pair]),
                "fresh": _round(gains),
            }
        return line

    return study


def _only(trained: Trained, chosen: Tensor) -> Trained:
    return trained._replace(losses=_where(trained.losses, chosen))


def _where(losses: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, losses, torch.nan)


def _gain(
    arms: Mapping[str, list[Trained]], better: str, worse: str, t: int, chosen: Tensor
) -> float:
    gain = arms[worse][t].losses - arms[better][t].losses
    return float(_where(gain, chosen).nanmean(1).nanmean())


def _round(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


def count_covered(lines: list[Line], trainings: str) -> tuple[float, float, float, int]:
    """Share of the intervals of a row that cover what they claim to.

    The intervals of a federation are not independent, so the interval of the share is that of a
    mean over federations.

    Parameters
    ----------
    trainings
        "once": one training of each way, "often": several.

    Returns
    -------
    The share, its 95 % interval, and the number of intervals.
    """
    pairs = sorted({pair for line in lines for pair in line if " over " in pair})
    if len(lines) < 2:
        return 0.0, 0.0, 1.0, 0
    every = {
        pair: float(np.mean([line[pair]["fresh"] for line in lines if pair in line]))
        for pair in pairs
    }
    shares, n = [], 0
    for line in lines:
        hits = []
        for pair in pairs:
            if pair in line:
                _, low, high = line[pair][trainings]
                truth = every[pair] if trainings == "often" else line[pair]["fresh"][0]
                hits.append(low <= truth <= high)
        shares.append(np.mean(hits))
        n += len(hits)
    mean, error = float(np.mean(shares)), float(np.std(shares, ddof=1)) / len(shares) ** 0.5
    return mean, max(0.0, mean - 1.96 * error), min(1.0, mean + 1.96 * error), n
