"""How FedGMI's components begin, as functions: from moments, from far clients, from gains.

Every start ends in clients that stand for a component each, its anchors, and in an autoencoder for
each component that they have trained.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.algorithms.divisions import as_batch, finite
from coterie.clustering import proportions as mix
from coterie.core.aggregate import Mean
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.random import normal, permutation
from coterie.core.tree import Ids, Params, put, row, take, tree_map
from coterie.models.vae import pixels

if TYPE_CHECKING:
    from coterie.algorithms.fedgmi import FedGMI, State

PER_CLASS = 20  # samples of a class and client from which moments inside classes mean something

# client


def moments(code: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Mean and scatter of one's codes: [d], [1, d, d]."""
    share = batch.share()
    mean = (code * share[:, None]).sum(0)
    apart = code - mean
    scatter = torch.einsum("n,nd,ne->de", share, apart, apart)[None]
    return {"mean": mean, "n": batch.size, "scatter": scatter}


def class_moments(code: Tensor, batch: Batch, n_classes: int) -> dict[str, Tensor]:
    """Counts [c], sums [c, d] and scatter [c, d, d] of one's codes inside each class."""
    member = batch.y.long()[:, None] == torch.arange(n_classes, device=code.device)
    member = (member & batch.mask[:, None]).double()  # [n, c]
    counts, sums = member.sum(0), member.T @ code
    means = sums / counts.clamp(min=1)[:, None]
    apart = (code - member @ means) * batch.mask[:, None]
    inner = torch.einsum("nc,nd,ne->cde", member, apart, apart)
    inner = inner / counts.clamp(min=1)[:, None, None]
    return {"counts": counts, "sums": sums, "class_scatter": inner}


def gain(method: "FedGMI", client: Client, bank: Params, sets: Tensor) -> Tensor:
    """How well mixtures of some sets of candidates explain forty of one's samples: [s], nats."""
    order = permutation(client.key, client.train.mask)[:40]
    some = client.train.rows(order, torch.ones_like(order, dtype=torch.bool))
    scores = method.nats_of(bank, some).double()  # [40, c]
    likely = (scores.min(1, keepdim=True).values - scores).exp()
    picked = torch.stack([likely.index_select(1, one) for one in sets])  # [s, 40, k]
    shares = torch.full((len(sets), 1, sets.shape[1]), 1 / sets.shape[1]).double()
    weight = some.share()[:, None]
    for _ in range(30):
        joint = picked * shares
        new = joint / joint.sum(2, keepdim=True).clamp(min=1e-300)
        shares = (new * weight).sum(1, keepdim=True)
    total = (picked * shares).sum(2).clamp(min=1e-300).log() - scores.min(1).values
    return (total * some.share()).sum(1)


# server: moments


def asked_moments(method: "FedGMI", d: int, n_classes: int) -> list[Mean]:
    """What of the moments is averaged on the way in."""
    means = [Mean("scatter", torch.zeros(1, d, d).double(), weight="n", slots=True)]
    if method.labelled:
        around = torch.zeros(n_classes, d, d).double()
        means.append(Mean("class_scatter", around, weight="counts", slots=True))
    return means


def counted(
    method: "FedGMI", fed: Federation, ids: Ids, reply: dict[str, Any]
) -> tuple[Ids, mix.Simplex]:
    """The simplex that clients' mean codes span, and the clients it rests on."""
    fine = finite(reply["mean"], "moments")
    ids, n = ids[fine], reply["n"][fine].double()
    mean, within = reply["mean"][fine], reply["scatter"][0] * n.sum() / (n.sum() - len(n))
    k, inside = method.n_components, None
    if method.labelled:
        counts, sums = reply["counts"][fine].double(), reply["sums"][fine]
        if mix.labels_differ(counts):
            if float(n.mean()) / max(counts.shape[1], 1) >= PER_CLASS:
                spare = counts.sum(0) / (counts.sum(0) - (counts > 0).sum(0)).clamp(min=1)
                inner = reply["class_scatter"] * spare[:, None, None]
                inside = mix.per_class(sums, counts, inner)
                k = k or min(int(inside.median()), method.max_components)
                centres = sums.sum(0) / counts.sum(0).clamp(min=1)[:, None]
                mean = mean - (counts @ centres) / n[:, None]
                within = (inner * counts.sum(0)[:, None, None]).sum(0) / n.sum()
            elif k is None:
                warnings.warn(
                    "FedGMI: labels differ between clients, and there are too few samples of a "
                    "class to look inside it; labels may be counted as components. Give "
                    "n_components.",
                    stacklevel=2,
                )
    found = mix.simplex(mean, n, within, k, method.max_components)
    _warn_of_moments(method, fed, ids, found, inside)
    return ids, found


def _warn_of_moments(
    method: "FedGMI", fed: Federation, ids: Ids, found: mix.Simplex, inside: Tensor | None
) -> None:
    """Say what the moments show and the user may not expect."""
    for client in ids[found.strange].tolist():
        warnings.warn(
            f"FedGMI: client '{fed.names[client]}' has data unlike all others; it is left out "
            "of the number of components.",
            stacklevel=3,
        )
    k, seen = len(found.anchors), found.counted if inside is None else int(inside.median())
    if method.n_components is not None and seen < k:
        warnings.warn(
            f"FedGMI: n_components is {k}, but clients differ in {seen - 1} directions, "
            f"which speaks for {seen}. Leave n_components out to use what is found.",
            stacklevel=3,
        )


def n_classes(method: "FedGMI", common: dict[str, Params]) -> int:
    """Outputs of an expert, found on a decoded sample; 0 without labels."""
    if method.model is None or not method.labelled:
        return 0
    code = torch.zeros(1, method.latent, dtype=method.vae.dtype)
    sample = method.vae.apply(common["vae"], {"code": code})
    try:
        return int(method.model.apply(common["expert"], sample).shape[1])
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"FedGMI: samples of the VAE must fit the expert {method.model.title} "
            f"({str(error).splitlines()[0]}). Give the VAE the shape of a sample, such as "
            "VAE((1, 28, 28))."
        ) from error


# server: anchors


def refit(
    method: "FedGMI", fed: Federation, state: "State", components: Tensor
) -> tuple["State", bool]:
    """Autoencoders of some components anew from their anchors, and whether all have answered."""
    state, at = _anchors(state, components)
    order = at.argsort()
    at, components = at[order], components[order]
    mean = Mean("vae", state.vaes, by=components)
    ids, reply = fed.map(method.fit_vae, state.common["vae"], to=at, reduce=mean, at_least=0)
    fine = torch.isfinite(reply["nats"]) if len(ids) else torch.zeros(0, dtype=torch.bool)
    silent = at[~torch.isin(at, ids[fine])]
    state = state._replace(anchor=put(state.anchor, silent, -2))
    state = state._replace(vaes=reply["vae"]) if len(ids) else state
    return state, not len(silent)


def _anchors(state: "State", components: Tensor) -> tuple["State", Tensor]:
    """Who stands for some components; where nobody does, the purest not asked yet."""
    at = torch.stack([(state.anchor == j).int().argmax() for j in components.tolist()])
    missing = ~torch.isin(components, state.anchor)
    for place in torch.nonzero(missing).flatten().tolist():
        free = state.anchor == -1
        if not bool(free.any()):
            state = state._replace(anchor=torch.where(state.anchor == -2, -1, state.anchor))
            free = state.anchor == -1
        purest = torch.where(free, state.first[:, components[place]], -torch.inf)
        at[place] = purest.argmax()
        state = state._replace(anchor=put(state.anchor, at[place : place + 1], components[place]))
    return state, at


# server: local autoencoders


def pick(method: "FedGMI", fed: Federation, state: "State") -> tuple["State", float]:
    """Local VAEs of all clients: those far apart (published), or that gain most; how far."""
    k = len(state.offsets)
    ids, reply = fed.map(method.fit_vae, state.common["vae"], to=fed.everyone(), at_least=k)
    fine = finite(reply["nats"], "local VAEs")
    ids, bank = ids[fine], tree_map(lambda leaf: leaf[fine], reply["vae"])
    # By name, so that which client comes first does not matter.
    order = fed.turns(ids, "pick").argsort()
    ids, bank = ids[order], take(bank, order)
    apart = distances(method, bank, fed.key("decoded"))
    if method.start == "published":
        chosen = mix.farthest(apart, k, method.symmetric)
    else:
        some = sorted(set(mix.farthest(apart, min(4 * k, len(ids)), symmetric=True)))
        chosen = [some[j] for j in gained(method, fed, take(bank, torch.tensor(some)), k)]
    _warn_of_picks(state, ids[chosen])
    nobody = torch.full_like(state.anchor, -1)
    anchor = put(nobody, ids[chosen], torch.arange(k))
    state = state._replace(vaes=take(bank, torch.tensor(chosen)), anchor=anchor)
    return state, float(apart.max())


def distances(method: "FedGMI", bank: Params, key: Tensor) -> Tensor:
    """How much worse VAE j scores what VAE i decodes than VAE i itself does: [m, m], nats."""
    vae, m = method.vae, len(next(iter(bank.values())))
    code = normal(key, (method.n_decoded, method.latent), vae.dtype)  # the same for all
    with torch.no_grad():
        shown = [pixels(vae.apply(row(bank, i), {"code": code}), vae.loss) for i in range(m)]
        batch = as_batch(torch.cat(shown))
        scores = [vae.losses(row(bank, j), batch).double().reshape(m, -1).mean(1) for j in range(m)]
    table = torch.stack(scores, 1)  # [i, j]
    return table - table.diagonal()[:, None]


def gained(method: "FedGMI", fed: Federation, bank: Params, k: int) -> list[int]:
    """The candidates whose mixtures explain the clients' samples best: greedy, then swaps."""
    c = len(next(iter(bank.values())))

    def value(sets: list[list[int]]) -> Tensor:
        _, reply = fed.map(method.gain, bank, torch.tensor(sets), to=fed.everyone())
        fine = finite(reply["gain"], "gains")
        return reply["gain"][fine].mean(0)

    chosen: list[int] = []
    while len(chosen) < k:
        others = [j for j in range(c) if j not in chosen]
        best = int(value([[*chosen, j] for j in others]).argmax())
        chosen.append(others[best])
    now = float(value([chosen])[0])
    for _ in range(2 * k):
        free = [j for j in range(c) if j not in chosen]
        swaps = [[*chosen[:i], j, *chosen[i + 1 :]] for i in range(k) for j in free]
        if not swaps:
            break
        values = value(swaps)
        if float(values.max()) <= now + 1e-9:
            break
        now, chosen = float(values.max()), swaps[int(values.argmax())]
    return chosen


def _warn_of_picks(state: "State", ids: Ids) -> None:
    """Say if the clients picked are mixtures, going by the moments."""
    shares = state.first[ids]
    known = shares[:, 0] >= 0
    largest, component = shares.max(1)
    mixed = bool((largest[known] < 0.6).any())
    if mixed or len(component[known].unique()) < int(known.sum()):
        told = ", ".join(" ".join(f"{a:.2f}" for a in row_) for row_ in shares.tolist())
        warnings.warn(
            f"FedGMI: the clients picked as starts are mixtures themselves (shares {told}), so "
            "components may come out mixed. Use start='moments'.",
            stacklevel=3,
        )
