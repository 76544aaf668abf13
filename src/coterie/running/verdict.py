"""The verdict: one model for all, a model per group, or every client alone?

Each strategy is trained with the same initial model and the same batches, and measured at its best
round (`held_out.py`). Every client has a loss with each strategy on rows that were not used for
training. Intervals of gains: `evidence/gains.py`; the recommendation: `evidence/recommend.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.model import Model
from coterie.data import FederatedData
from coterie.evidence.gains import Interval, own_intervals
from coterie.evidence.recommend import Losses, Recommendation, recommend
from coterie.running.final import Result
from coterie.running.rivals import TRIVIAL, score_rivals

ARMS = {"one": "fedavg", "groups": None, "alone": "local_only"}
"""Ways of training and their methods; the groups are those of the run itself."""
HEADLINE = ("recommendation", "most", "exceptions", "method", "odd", "learnt")
"""What the summary of a run keeps of a verdict."""
ODD_APART = "keeping odd clients apart"
"""What a run with one group and odd clients trains: these alone, one model for the others."""
STILL_FALLS = 0.02  # per round: above it a way of training still improves
RISES = 0.1  # of the smallest loss: if the last one is larger by more, training went on too long
LAST = 5  # number of rounds over which a fall is measured


class Trained(NamedTuple):
    """What a verdict knows of one training."""

    about: Mapping[str, Any]  # `held_out.json`
    losses: Tensor  # [m, u]  of each client's held-out units; nan in the padding


def as_trained(result: Result) -> Trained:
    """What a verdict knows of a finished run."""
    return Trained(result.held_out, result.held_losses)


def rivals_of(result: Result) -> Mapping[str, Tensor]:
    """Losses of predictions without a network on the held-out rows of a run."""
    assert isinstance(result.data, FederatedData)
    model = getattr(result.algorithm, "model", None)
    loss = model.loss if isinstance(model, Model) else None
    return score_rivals(result.data, result.held_out["split"], loss)


def instead_of_groups(summary: Mapping[str, Any], odd: Sequence[str], n_groups: int) -> str:
    """What takes the place of groups in a run that has none; else empty.

    >>> instead_of_groups({"algorithm": "census", "personal": False}, ["site-7"], 1)
    'keeping odd clients apart'
    """
    if n_groups < 2 and odd:
        return ODD_APART
    return f"a personal model ({summary['algorithm']})" if summary["personal"] else ""


def judge(
    arms: Mapping[str, Sequence[Trained]],
    rivals: Mapping[str, Tensor],
    n_groups: int,
    method: str = "",
    odd: Sequence[str] = (),
) -> dict[str, Any]:
    """The verdict as plain data.

    Parameters
    ----------
    arms
        Trainings of "one", "groups" and "alone": one or more of each, the same number.
    rivals
        Losses of predictions without a network, see `score_rivals`. [m, u] each
    n_groups
        Number of groups that were found.
    method
        What takes the place of groups, see `instead_of_groups`.
    odd
        Clients that were kept apart and trained alone.
    """
    first = {arm: trained[0].about for arm, trained in arms.items()}
    about = first["groups"]
    used, losses, real = _stack(arms, rivals)
    rows = real.sum(1)
    found: dict[str, Any] = {
        "recommendation": "undecided",
        "most": None,
        "exceptions": [],
        "per_client": {},
        "per_row": {},
        "apart": [],
        "without": {},
        "n_groups": n_groups,
        "method": method,
        "odd": list(odd) if method == ODD_APART else [],
        "learnt": None,
        "matters": None,
        "ways": _ways(arms, rivals),
        "rounds": {arm: int(one["best_round"]) for arm, one in first.items()},
        "falls": _falling(first),
        "rises": [] if about["stop"] == "validation" else _rising(first),
        "replicates": min(len(trained) for trained in arms.values()),
        "split": str(about["split"]),
        "cost": {
            "rounds": sum(int(first[arm]["rounds"]) for arm in ("one", "alone")),
            "bytes": first["one"].get("bytes"),
            "held": int(rows.sum()),
        },
        "why": "",
    }
    found["clients"] = _list_clients(about["clients"], about["trained_on"], used, losses, rows)
    asked = rows > 0
    if int(asked.sum()) < 2:
        found["why"] = _too_few(int(asked.sum()))
        return found
    mean, covariance = _moments(losses[:, asked], real[asked])
    kept = Losses(used, mean, covariance, rows[asked])
    of_client = [found["clients"][i] for i in asked.nonzero()[:, 0].tolist()]
    _note_gains(kept, of_client)
    said = recommend(kept, n_groups if not method else max(n_groups, 2))
    ahead = _ahead(said, found["falls"].get("one", 0.0), float(found["ways"]["one"][0]))
    if ahead:
        said = said._replace(choice="undecided", most=None)
    said_of = _weigh(said, of_client)
    return found | said_of | ({"why": ahead} if ahead else {})


def hide_clients(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What takes the place of the figures of single clients in a verdict."""
    kept = ("client", "rows", "trained_on")
    blank = {**dict.fromkeys(ARMS), "better": ""}
    clients = [{name: line[name] for name in kept} | blank for line in verdict["clients"]]
    return {"clients": clients, "exceptions": [], "apart": [], "without": {}}


def _ahead(said: Recommendation, fall: float, loss: float) -> str:
    """Why a gain over one model may be a matter of time; empty if it is not.

    One model learns from all clients and needs more rounds. If a few more of them are worth more
    than the gain of the recommended way, nothing is known yet.
    """
    if said.most in (None, "one"):
        return ""
    gain = said.per_client[f"{said.most} over one"].mean
    more = loss * (1 - (1 - fall) ** LAST)
    if gain >= more:
        return ""
    return (
        f"One model for all still improves: {LAST} more rounds at the present pace would lower its "
        f"loss by {more:.3f}, which is more than the gain over it ({gain:.3f}). Train for more "
        "rounds."
    )


def _stack(
    arms: Mapping[str, Sequence[Trained]], rivals: Mapping[str, Tensor]
) -> tuple[list[str], Tensor, Tensor]:
    """Names of ways, their losses [t, m, u, ways], and which units have all of them [m, u]."""
    trivial = [name for name in TRIVIAL if name in rivals]
    t = min(len(trained) for trained in arms.values())
    by_run = [
        torch.stack([*(arms[arm][i].losses for arm in ARMS), *(rivals[name] for name in trivial)])
        for i in range(t)
    ]
    losses = torch.stack(by_run).double().permute(0, 2, 3, 1)
    return [*ARMS, *trivial], losses, losses.isfinite().all(3).all(0)


def _moments(losses: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [t, m, a] and covariance [t, m, a, a] of each client's units."""
    n = real.sum(1).double()[:, None]  # [m, 1]
    values = torch.where(real[..., None], losses, 0.0)
    mean = values.sum(2) / n
    apart = torch.where(real[..., None], losses - mean[:, :, None], 0.0)
    square = torch.einsum("tmua,tmub->tmab", apart, apart)
    return mean, square / (n - 1).clamp(min=1)[..., None]


def _ways(
    arms: Mapping[str, Sequence[Trained]], rivals: Mapping[str, Tensor]
) -> dict[str, list[float | None]]:
    """Mean loss of each way: every client counts the same, and every unit counts the same."""
    losses = {arm: torch.stack([one.losses for one in arms[arm]]).mean(0) for arm in ARMS}
    out: dict[str, list[float | None]] = {}
    for name, values in {**losses, **rivals}.items():
        finite = torch.where(values.isfinite(), values.double(), torch.nan)
        out[name] = [float(finite.nanmean(1).nanmean()), float(finite.nanmean())]
    return out


def _list_clients(
    names: Sequence[str], trained_on: Sequence[int], ways: Sequence[str], losses: Tensor, n: Tensor
) -> list[dict[str, Any]]:
    """A row per client: held-out units and mean loss of each way of training."""
    means = losses.mean(0).nanmean(1)  # [m, a]
    return [
        {
            "client": name,
            "rows": int(n[i]),
            "trained_on": int(trained_on[i]),
            **{arm: float(means[i, ways.index(arm)]) for arm in ARMS},
            "better": "",
        }
        for i, name in enumerate(names)
    ]


def _note_gains(losses: Losses, clients: Sequence[dict[str, Any]]) -> None:
    """Add to each client its gains over one model, with an interval over its own rows."""
    one, spread = losses.names.index("one"), losses.covariance
    for arm in ("groups", "alone"):
        other = losses.names.index(arm)
        gain = losses.mean[..., one] - losses.mean[..., other]  # [t, m]
        variance = spread[..., one, one] + spread[..., other, other] - 2 * spread[..., one, other]
        bounds = own_intervals(gain, variance.clamp(min=0), losses.rows)
        for i, (client, ends) in enumerate(zip(clients, bounds, strict=True)):
            client.setdefault("gains", {})[arm] = [float(gain[:, i].mean()), *ends]


def _weigh(said: Recommendation, clients: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A recommendation as plain data; clients that are better off otherwise are marked."""
    choice, most, why = said.choice, said.most, ""
    against = None if most is None else _contradiction(said.per_row, most)
    if against is not None:
        why = (
            f'If every client counts the same, "{most}" is best; if every row counts the same, '
            f'"{against}" is better.'
        )
        choice, most = "undecided", None
    exceptions = said.exceptions if most is not None else []
    for one in exceptions:
        clients[one.client]["better"] = one.arm
    return {
        "recommendation": choice,
        "most": most,
        "exceptions": [
            {"client": clients[one.client]["client"], "instead": one.arm, "gain": one.gain}
            for one in exceptions
        ],
        "per_client": {name: list(value[:3]) for name, value in said.per_client.items()},
        "per_row": {name: list(value[:3]) for name, value in said.per_row.items()},
        "apart": [clients[i]["client"] for i in said.apart],
        "without": {name: list(value[:3]) for name, value in said.without.items()},
        "learnt": said.learnt,
        "matters": said.matters,
        "why": why,
    }


def _contradiction(per_row: Mapping[str, Interval], most: str) -> str | None:
    """A way that is better for certain if every row counts the same; None if there is none."""
    for pair, gain in per_row.items():
        better, worse = pair.split(" over ")
        if worse == most and gain.low > 0:
            return better
        if better == most and gain.high < 0:
            return worse
    return None


def _too_few(n_clients: int) -> str:
    why = f"At least two clients with held-out rows are needed. Got {n_clients}."
    return why if n_clients else f"{why} No rows are held out: add --set run.validation=0.2."


def _falling(about: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Ways whose loss still falls at the end, and by what fraction per round."""
    falls = {arm: _fall(one["by_round"]) for arm, one in about.items()}
    return {arm: fall for arm, fall in falls.items() if fall is not None and fall > STILL_FALLS}


def _fall(by_round: Sequence[Sequence[float | None]]) -> float | None:
    """The fraction by which a loss falls per round at the end; None if it does not fall."""
    marks = [(number, loss) for number, loss in by_round if number is not None and loss]
    if len(marks) < 2 or marks[-1][1] > min(loss for _, loss in marks):
        return None
    last, now = marks[-1]
    early = [mark for mark in marks[:-1] if mark[0] >= last - LAST] or marks[-2:-1]
    first, then = early[0]
    if then <= 0 or now <= 0:
        return None
    return 1 - float(now / then) ** (1 / (last - first))


def _rising(about: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ways whose last loss is clearly larger than their smallest."""
    out = []
    for arm, one in about.items():
        losses = [loss for _, loss in one["by_round"] if loss is not None]
        if losses and losses[-1] > min(losses) + RISES * abs(min(losses)):
            out.append(arm)
    return out
