"""The verdict: one model for all, a model per group, or every client alone?

Each way of training runs for the same number of rounds and gives every client a loss on its own
held-out data. The difference between two ways is averaged over clients; its 95% interval is a
bootstrap over clients. The verdict starts from one model for all. Groups replace it if the interval
of their gain lies above zero. Training alone replaces the better of these if its interval does.
Losses are compared, not accuracies, because their intervals are narrower.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coterie import metrics

ARMS = {"one": "fedavg", "groups": None, "local": "local_only"}
"""Ways of training and their methods; the groups are those of the run itself."""
LEAST_CLIENTS = 8  # with fewer there is no verdict
LEAST_SAMPLES = 20  # of a client that counts: a fifth of them, held out, are four
STILL_FALLS = 0.02  # per round: above it one model still improves
LAST = 5  # number of rounds over which that is measured
RESAMPLES = 2000


def judge(arms: Mapping[str, Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """The verdict on three runs as plain data, from the `held_out.json` of each.

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
            f"At least {LEAST_CLIENTS} clients with {LEAST_SAMPLES} samples or more and a "
            f"held-out loss are needed. Got {len(voters)}."
        )
        if not held:
            why += " No data are held out: add --set run.validation=0.2."
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
    """The fraction by which a loss falls per round at the end; None if it is not known."""
    marks = [(number, loss) for number, loss in by_round if number is not None and loss]
    if len(marks) < 2:
        return None
    last, now = marks[-1]
    early = [mark for mark in marks[:-1] if mark[0] >= last - LAST] or marks[-2:-1]
    first, then = early[0]
    if then <= 0 or now <= 0:
        return None
    return 1 - float(now / then) ** (1 / (last - first))
