"""One model, groups, or every client alone? By losses on data that trained nothing.

Three ways of training, each of as many rounds, give every client three losses on its own held-out
data. The difference of two of them, client by client, is averaged over clients, with an interval by
drawing clients again. One model is the starting point. Groups replace it if their gain over it lies
above zero, and staying alone replaces what is left if its gain does. Loss, not accuracy: intervals
are narrower and point the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coterie import metrics

ARMS = {"one": "fedavg", "groups": None, "local": "local_only"}
"""Ways of training, and the methods that stand for them; groups are those of the run judged."""
LEAST_CLIENTS = 8  # fewer say nothing
LEAST_SAMPLES = 20  # of a client that has a say: a fifth of them are four
STILL_FALLS = 0.02  # a round: one model has not come to its end
LAST = 5  # rounds over which that is measured
RESAMPLES = 2000


def judge(arms: Mapping[str, Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """The verdict on three runs, from what each left in `held_out.json`, as plain data.

    Parameters
    ----------
    arms
        "one", "groups" and "local": clients, their held-out losses and numbers of samples, the mean
        loss by round.
    """
    names = list(arms["groups"]["clients"])
    losses = {arm: dict(zip(f["clients"], f["loss"], strict=True)) for arm, f in arms.items()}
    samples = dict(zip(names, arms["groups"]["samples"], strict=True))
    clients: list[dict[str, Any]] = []
    for name in names:
        own: dict[str, Any] = {arm: losses[arm].get(name) for arm in ARMS}
        numbers = all(value is not None and value == value for value in own.values())
        has_say = numbers and samples[name] >= LEAST_SAMPLES
        gain = own["one"] - own["groups"] if has_say else None
        best = min(own, key=lambda arm: own[arm]) if has_say else "abstains"
        line = {"client": name, **own, "gain": gain, "best": best, "samples": samples[name]}
        clients.append(line)
    voters = [line for line in clients if line["gain"] is not None]
    fall = _fall(arms["one"]["by_round"])
    held, total = sum(arms["groups"]["held"]), sum(arms["groups"]["samples"])
    common: dict[str, Any] = {
        "round": int(arms["groups"]["rounds"]),
        "better_off": sum(line["gain"] > 0 for line in voters) / len(voters) if voters else None,
        "clients": clients,
        "fall": fall,
        "provisional": fall is None or fall > STILL_FALLS,
        "split": str(arms["groups"]["split"]),
        "cost": {
            "rounds": int(arms["one"]["rounds"]) + int(arms["local"]["rounds"]),
            "bytes": arms["one"].get("bytes"),
            "held": held / total if total else 0.0,
        },
    }
    if len(voters) < LEAST_CLIENTS:
        why = (
            f"{len(voters)} clients have {LEAST_SAMPLES} samples and a held-out loss; "
            f"{LEAST_CLIENTS} are needed."
        )
        if not held:
            why += " Nothing is held out: add --set run.validation=0.2."
        return {"choice": "undecided", "intervals": {}, **common, "why": why}
    pairs = {"groups over one": ("one", "groups"), "local over groups": ("groups", "local")}
    pairs["local over one"] = ("one", "local")
    intervals: dict[str, list[float]] = {}
    for name, (worse, better) in pairs.items():
        gains = torch.tensor([line[worse] - line[better] for line in voters], dtype=torch.float64)
        intervals[name] = list(metrics.bootstrap_mean(gains, RESAMPLES, seed))  # mean, low, high
    choice = "groups" if intervals["groups over one"][1] > 0 else "one"
    if intervals[f"local over {choice}"][1] > 0:
        choice = "local"
    return {"choice": choice, "intervals": intervals, **common}


def _fall(by_round: Sequence[Sequence[float | None]]) -> float | None:
    """By which share a loss falls in a round, over the last few; None if too little is known."""
    marks = [(number, loss) for number, loss in by_round if number is not None and loss]
    if len(marks) < 2:
        return None
    last, now = marks[-1]
    early = [mark for mark in marks[:-1] if mark[0] >= last - LAST] or marks[-2:-1]
    first, then = early[0]
    if then <= 0 or now <= 0:
        return None
    return 1 - float(now / then) ** (1 / (last - first))
