"""How FedGMI divides samples among components and reads shares off, as functions.

Clients score their samples under every component's autoencoder and remember the scores; the server
finds offsets that give the scores a common zero, clients divide by them, and shares come from
counts, from histograms of margins (tail), and from the anchors' counts.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.clustering import proportions as mix
from coterie.clustering.evidence import REFUSAL
from coterie.core.algorithm import Evidence, Info, Mixture
from coterie.core.client import Batch, Client, Reply
from coterie.core.federation import Federation, each
from coterie.core.tree import Ids, put

if TYPE_CHECKING:
    from coterie.algorithms.fedgmi import FedGMI, State

# both sides


def as_batch(x: Any) -> Batch:
    """Samples without labels."""
    n = len(x)
    ones = torch.ones(n, device=x.device)
    return Batch(x, torch.zeros(n, device=x.device), ones.bool(), ones)


def finite(values: Tensor, what: str) -> Tensor:
    """Which replies are numbers; warns of the others."""
    fine = torch.isfinite(values.reshape(len(values), -1).sum(1))
    if not bool(fine.all()):
        warnings.warn(
            f"FedGMI: {int((~fine).sum())} replies with {what} were not finite and were left out.",
            stacklevel=3,
        )
    return fine


# client


def surveyed(client: Client, offsets: Tensor, cuts: Tensor) -> dict[str, Tensor]:
    """How the samples would be divided, and how far each offset could move."""
    k, real = len(offsets), client.train.mask
    scores = client.state["samples"]["scores"][:, :k].double() + offsets
    part, margin = mix.divided(scores)
    room = mix.pushes(scores)
    margins = [mix.quantiles(margin, real & (part == j), 32) for j in range(k)]
    return {
        "n": client.train.size,
        "histogram": mix.histogram(scores, real, cuts),
        "margins": torch.stack(margins),
        "room": torch.stack([mix.quantiles(room[:, j], real, 64) for j in range(k)]),
    }


def settled(method: "FedGMI", client: Client, offsets: Tensor, prior: Tensor) -> Reply:
    """Parts by score, offset and prior: the client's shares, or from a uniform one."""
    k, batch = len(offsets), client.train
    scores = client.state["samples"]["scores"][:, :k].double()
    known = prior[0] >= 0
    share = torch.where(known, prior, 1 / k)
    for _ in range(3):  # a prior that is known stays as it is
        cost = mix.penalties(scores, offsets, share, method.least_share)
        if method.division == "soft":
            weights = torch.softmax(-cost, 1)
        else:
            weights = (cost.argmin(1)[:, None] == torch.arange(k)).double()
        found = (weights * batch.share()[:, None]).sum(0)
        share = torch.where(known, prior, found)
    samples = {**client.state["samples"], "part": cost.argmin(1)}
    if method.division == "soft":
        room = client.state["samples"]["weights"][:, k:]
        samples["weights"] = torch.cat([weights, room], 1)
    own = torch.cat([found, client.state["prior"][k:]])
    em = mix.em_shares(scores + offsets, batch.mask)
    return Reply({"share": found, "em": em}, keep={"samples": samples, "prior": own})


def parts(method: "FedGMI", client: Client, k: int) -> Tensor:
    """Weight of each sample in each component: [k, n]."""
    if method.division == "soft":
        weights: Tensor = client.state["samples"]["weights"][:, :k].T
        return weights
    return (client.state["samples"]["part"] == torch.arange(k)[:, None]).double()


# server


def nothing_known(n_clients: int, k: int, bins: int) -> dict[str, Any]:
    """Fields of the state that a division fills, before the first one."""
    zeros, ones = torch.zeros(k, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    unknown = torch.full((n_clients, k), -1.0, dtype=torch.float64)
    shares = "first", "own", "counts", "tail", "anchored", "em", "errors"
    return {
        "offsets": zeros,
        "scale": ones,
        "labels": torch.tensor(False),
        "cuts": zeros.new_zeros(k, bins - 1),
        "profiles": zeros.new_zeros(k, k * bins),
        "empty": torch.zeros(k, dtype=torch.int64),
        "assignment": torch.full((n_clients,), -1),
        **dict.fromkeys(shares, unknown),
    }


def divided(method: "FedGMI", fed: Federation, state: "State", ids: Ids) -> "State":
    """Scores, offsets, parts and shares of all clients."""
    first = bool((state.assignment < 0).all())
    # Experts are random before the first parts, so labels say nothing then.
    ids, state = score(method, fed, state, ids, joint=method.joint and not first)
    reply = survey(method, fed, ids, state)
    state = state._replace(cuts=_cuts(method, reply))
    if method.offset != "none" and len(state.offsets) > 1:
        known = state.first[state.first[:, 0] >= 0]
        corners = method.start == "moments" or bool(state.restarted)
        if method.offset == "moments" or (first and corners):
            state, reply = balance(method, fed, ids, state, known.mean(0), reply)
        for _ in range(2 if method.offset == "tail" else 0):
            state = state._replace(cuts=_cuts(method, reply))
            reply = survey(method, fed, ids, state)
            tail, _ = mix.tail_shares(reply["histogram"], method.pure_bins)
            target = (reply["n"][:, None] * tail).sum(0) / reply["n"].sum()
            state, reply = balance(method, fed, ids, state, target, reply)
    state = state._replace(cuts=_cuts(method, reply))
    reply = survey(method, fed, ids, state)
    tail, profiles = mix.tail_shares(reply["histogram"], method.pure_bins)
    state = _noted(state._replace(profiles=profiles), reply, tail)
    return _settle(method, fed, state, ids)


def score(
    method: "FedGMI", fed: Federation, state: "State", ids: Ids, joint: bool
) -> tuple[Ids, "State"]:
    """Clients score their samples and keep the scores; who can be divided."""
    scale = torch.tensor(method.label_scale if joint else 1.0, dtype=torch.float64)
    given = state.vaes, state.experts if joint else {}, scale
    ids, reply = fed.map(method.score, *given, to=ids)
    fine = finite(reply["best"], "scores")
    ids = ids[fine]
    best, size = put(state.best, ids, reply["best"][fine]), reply["n"][fine].double()
    state = state._replace(scale=scale, labels=torch.tensor(joint))
    return ids, state._replace(best=best, size=put(state.size, ids, size))


def survey(method: "FedGMI", fed: Federation, ids: Ids, state: "State") -> dict[str, Tensor]:
    """Histograms of margins of those who answer with numbers, and who they are."""
    heard, reply = fed.map(method.survey, state.offsets, state.cuts, to=ids)
    fine = torch.isfinite(reply["histogram"]).all(2).all(1)
    return {**{name: leaf[fine] for name, leaf in reply.items()}, "ids": heard[fine]}


def _cuts(method: "FedGMI", reply: dict[str, Tensor]) -> Tensor:
    """Margins that cut every component's samples into equal parts: [k, bins - 1]."""
    at = torch.arange(1, method.bins) / method.bins
    n, margins = reply["histogram"].sum(2), reply["margins"]  # [m, k], [m, k, q]
    own = [mix.pooled_quantiles(margins[:, j], n[:, j], at) for j in range(n.shape[1])]
    return torch.stack(own).clamp(max=1e30)


def balance(
    method: "FedGMI",
    fed: Federation,
    ids: Ids,
    state: "State",
    target: Tensor,
    reply: dict[str, Tensor],
) -> tuple["State", dict[str, Tensor]]:
    """Offsets by which total counts match a target, one component at a time."""
    for _ in range(4 * len(target)):
        total = reply["histogram"].sum((0, 2))
        total = total / total.sum().clamp(min=1)
        if float((total - target).abs().max()) <= 0.003:
            break
        offsets = mix.moved(state.offsets, reply["room"], reply["n"], total, target)
        state = state._replace(offsets=offsets)
        reply = survey(method, fed, ids, state)
    return state, reply


def _noted(state: "State", reply: dict[str, Tensor], tail: Tensor) -> "State":
    """The state with shares read off histograms."""
    ids, histogram = reply["ids"], reply["histogram"]
    counts = histogram.sum(2) / reply["n"][:, None].clamp(min=1)
    all_counts = put(state.counts, ids, counts)
    k = counts.shape[1]
    confusion = torch.eye(k, dtype=torch.float64)
    for j in range(k):
        at = torch.nonzero(state.anchor == j).flatten()
        if len(at) and float(all_counts[at[0], 0]) >= 0:
            confusion[j] = all_counts[at[0]]
    errors = mix.share_errors(tail, state.profiles, reply["n"])
    return state._replace(
        counts=all_counts,
        tail=put(state.tail, ids, tail),
        errors=put(state.errors, ids, errors),
        anchored=put(state.anchored, ids, mix.unconfused(counts, confusion)),
    )


def _settle(method: "FedGMI", fed: Federation, state: "State", ids: Ids) -> "State":
    """Clients divide their samples by score, offset and their own prior."""
    ids, reply = fed.map(method.settle, state.offsets, each(state.own[ids]), to=ids)
    fine = torch.isfinite(reply["share"]).all(1)
    ids, share = ids[fine], reply["share"][fine]
    return state._replace(
        own=put(state.own, ids, share),
        em=put(state.em, ids, reply["em"][fine]),
        assignment=put(state.assignment, ids, share.argmax(1)),
    )


# server: what a division is worth


def judged(method: "FedGMI", state: "State") -> tuple["State", Info, bool, Tensor]:
    """Warn of partitions that mean nothing and of empty components.

    Returns the state, what a person may look at, whether to start again from moments, and which
    components have twice been given nothing.
    """
    known = state.own[:, 0] >= 0
    own, size = state.own[known], state.size[known]
    total = (size[:, None] * own).sum(0) / size.sum()
    varies = mix.dispersion(own, size)
    apart = float((state.tail[known] - state.anchored[known]).abs().mean())
    info: Info = {
        "largest_share": float(total.max()),
        "dispersion": float(varies.max()),
        "tail_against_anchor": apart,
    }
    none = torch.zeros(0, dtype=torch.int64)
    if len(state.offsets) == 1:
        return state, info, False, none
    state = state._replace(empty=torch.where(total == 0, state.empty + 1, 0))
    differ = float(state.eigenvalues[0]) if len(state.eigenvalues) else 0.0
    alike = bool((varies < differ / 4).all()) and differ > float(state.thresholds[0])
    barren = torch.nonzero(state.empty >= 2).flatten()
    if float(total.max()) > 0.99 or alike:
        again, barren = _warn_of_trivial(method, state, total, varies, differ), none
        if again:
            return state, info, True, none
    elif bool((state.empty > 0).any()):
        names = torch.nonzero(state.empty > 0).flatten().tolist()
        warnings.warn(f"FedGMI: component {names} got no sample of anybody.", stacklevel=4)
    return state, info, False, barren


def warn_of_dispute(apart: float) -> None:
    """Say that two ways to calibrate shares disagree, by so much on average."""
    if apart > 0.05:
        warnings.warn(
            f"FedGMI: shares by tail and by anchor differ by {apart:.2f} on average: they are "
            "bracketed, not known. Quote both.",
            stacklevel=3,
        )


def _warn_of_trivial(
    method: "FedGMI", state: "State", total: Tensor, varies: Tensor, differ: float
) -> bool:
    """Say why a partition is trivial, and whether a start from moments may help."""
    why = (
        f"one component takes {float(total.max()):.1%} of all samples"
        if float(total.max()) > 0.99
        else f"shares hardly vary between clients (dispersion {float(varies.max()):.1f}, "
        f"where clients differ by {differ:.1f})"
    )
    tried = method.start == "moments" or bool(state.restarted)
    again = method.restart and not tried
    then = "Starting again from moments." if again else "Use start='moments'."
    if tried:
        then = (
            "Components may look alike, or n_components is wrong. shares='moments' rests on mean "
            "codes alone."
        )
    warnings.warn(f"FedGMI: the partition is trivial: {why}. {then}", stacklevel=5)
    return again


# server: newcomers


def placed(method: "FedGMI", fed: Federation, state: "State", ids: Ids) -> tuple["State", Evidence]:
    """Shares of clients not divided yet, and how well each of some fits."""
    unsure = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    given = state.vaes, state.experts if bool(state.labels) else {}, state.scale
    heard, reply = fed.map(method.score, *given, to=ids, at_least=0)
    known = state.assignment >= 0
    if not len(heard):
        fits = torch.ones(len(ids), dtype=torch.bool)
        return state, Evidence(state.assignment[ids].clamp(min=0), unsure, unsure, fits)
    before, members = state, torch.nonzero(known & (state.size > 0)).flatten()
    new = heard[~known[heard] & torch.isfinite(reply["best"])]
    strange = _strangeness(method, fed, state, heard, reply["best"], members)
    if len(new):
        seen = survey(method, fed, new, state)
        flat = seen["histogram"].flatten(1)
        even = torch.full((len(flat), len(state.offsets)), 1 / len(state.offsets)).double()
        tail, _ = mix.mixture_em(flat, even, state.profiles.clamp(min=1e-12), 200, fixed=True)
        state = _settle(method, fed, _noted(state, seen, tail), new)
        fresh = put(state.best, heard, reply["best"])
        state = state._replace(best=torch.where(known, before.best, fresh))
        size = put(state.size, heard, reply["n"].double())
        state = state._replace(size=torch.where(known, before.size, size))
    group = state.assignment[ids].clamp(min=0)
    two = state.own[ids].topk(min(2, state.own.shape[1]), dim=1).values
    margin = (two[:, 0] - (two[:, 1] if two.shape[1] > 1 else 0.0)).clamp(0, 1)
    answered = torch.isin(ids, heard)
    odd = unsure.masked_scatter(answered, strange)
    return state, Evidence(group, margin, odd, ~(odd > REFUSAL))


def _strangeness(
    method: "FedGMI", fed: Federation, state: "State", ids: Ids, best: Tensor, members: Ids
) -> Tensor:
    """How unlike the members clients are, 1 being the strangest of 100 members."""
    if len(members) < 4:
        return torch.full((len(ids),), torch.nan, dtype=torch.float64)
    usual = state.best[members]
    centre, far = usual.median(), usual.quantile(0.99)
    by_score = (best.double() - centre) / (far - centre).clamp(min=1e-6 + 1e-3 * centre.abs())
    heard, reply = fed.map(method.codes, state.common["vae"], to=ids, at_least=0)
    if not len(state.root) or not state.root.shape[1] or not len(heard):
        return by_score
    points = (reply["mean"] - state.centre) @ state.root
    units = mix.beyond(points, state.corners) * reply["n"].double().sqrt()
    # Outside the simplex by three standard deviations is where a client is refused.
    answered = torch.isin(ids, heard)
    by_code = torch.zeros_like(by_score).masked_scatter(answered, units / 3 * REFUSAL)
    return torch.maximum(by_score, by_code)


# what is reported


def estimates(method: "FedGMI", state: "State", ids: Ids) -> Mixture:
    """The shares asked for with their errors, all others, and why there are so many components."""
    every = {
        "tail": state.tail,
        "count": state.counts,
        "anchor": state.anchored,
        "em": state.em,
        "moments": state.first,
    }
    known = {name: _known(value[ids]) for name, value in every.items()}
    errors = _known(state.errors[ids])
    if method.shares == "moments":
        errors = mix.barycentric_errors(state.corners, state.size[ids])
    elif method.shares != "tail":  # of a share by count, as far as chance goes
        share, n = known[method.shares], state.size[ids][:, None].clamp(min=1)
        errors = (share * (1 - share) / n).sqrt()
    evidence = {
        "n_components": len(state.offsets),
        "eigenvalues": state.eigenvalues.tolist(),
        "thresholds": state.thresholds.tolist(),
        "estimate": method.shares,
        "tail_against_anchor": float((known["tail"] - known["anchor"]).abs().nanmean()),
    }
    return Mixture(known[method.shares], errors, known, evidence)


def _known(values: Tensor) -> Tensor:
    return torch.where(values < 0, torch.nan, values)
