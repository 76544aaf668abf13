"""What FedGEM's clients do with their own components, and its server with summaries, as functions.

A client remembers its mixture in as many slots as everybody, of which `count` hold a component;
`wanted` is their number before small ones were dropped, `members` the group each went to in the
merge of the number `merges`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.centres import finite, known_count, padded, root_of, samples
from coterie.clustering import merging, mixtures, overlap, pooling
from coterie.clustering.mixtures import NDIM, Mixture
from coterie.clustering.pooling import Array, Groups, Labels
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Evidence
from coterie.core.client import Client, Reply
from coterie.core.errors import ConfigError
from coterie.core.federation import Each, Federation, each
from coterie.core.random import fold, normal
from coterie.core.tree import Ids, Tree, put

if TYPE_CHECKING:
    from coterie.algorithms.fedgem import FedGEM, State

OUTSIDE = 0.05  # share of samples far from every centre above which a client fits nowhere

# client: fitting


def rows(client: Client, units: Tensor) -> tuple[Tensor, Tensor]:
    """Samples in the units of the components, and which of them count; no units: as they are."""
    x, mask = samples(client)
    return (x @ units if units.numel() else x), mask


def own_count(method: "FedGEM", client: Client) -> Tensor:
    """How many components a client has: told, or chosen by itself."""
    rule, (x, _) = method.n_components, samples(client)
    if rule == "auto" or rule == "bic":
        key = fold(client.key, "count")
        k = mixtures.choose_count(key, x, rule, method.covariance, method.sigma**2)
        k = min(k, method.max_components or k)
    else:
        k = known_count(client, rule)
    if not 1 <= k <= len(x):
        raise ValueError(f"n_components must be between 1 and its {len(x)} samples, got {k}")
    return torch.tensor(k)


def recalled_count(method: "FedGEM", client: Client) -> int:
    """How many components a client said it has."""
    return int(client.state["count"] if "count" in client.state else own_count(method, client))


def own_best(method: "FedGEM", client: Client, x: Tensor, k: int) -> tuple[Mixture, Tensor]:
    """A client's best fit by itself, and its log-likelihood."""
    floor = mixtures.variance_floor(x, torch.ones(len(x), dtype=torch.bool))
    options = method.covariance, method.sigma**2, floor, method.weights == "uniform"
    return mixtures.local_fit(fold(client.key, "own"), x, k, *options)


def first(method: "FedGEM", client: Client, units: Tensor, slots: int, late: bool) -> Mixture:
    """Seeds, from which rounds go on; one's own best fit where there are none."""
    x, mask = rows(client, units)
    k = recalled_count(method, client)
    if k > slots:
        raise ValueError(
            f"it has {k} components, and there is room for {slots}. Set max_components"
        )
    if late or not method.rounds:
        return own_best(method, client, x, k)[0]
    draw, floor = fold(client.key, "seeds"), mixtures.variance_floor(x, mask)
    if method.seeds == "k-means":
        centres = mixtures.kmeans(draw, x, k)[1]
    else:
        centres = mixtures.plus_plus(draw, x, k)[0]
    return mixtures.from_seeds(x, centres, method.covariance, method.sigma**2, floor)


def offered(method: "FedGEM", client: Client, own: Mixture, n: Tensor, radii: Tensor) -> Reply:
    """Centres with their balls; small components and empty slots are not shown."""
    shown = (torch.arange(len(n)) < client.state["count"]) & (n >= method.min_count)
    still = torch.where(shown, radii, 0.0) < 1e-3 * mixtures.per_feature(own.variance).sqrt()
    sent = {
        "centres": torch.where(shown[:, None], own.centres, 0.0),
        "radii": torch.where(shown, radii, -1.0),
        "n": torch.where(shown, n, 0.0),
        "still": still.all(),
    }
    return Reply(sent, keep=own._asdict())


def summary(method: "FedGEM", client: Client, units: Tensor, mixture: Mixture, slots: int) -> Reply:
    """Counts, centres and variances after one more step, without the small components."""
    x, mask = rows(client, units)
    floor, ndim = mixtures.variance_floor(x, mask), NDIM[method.covariance]
    while True:
        share, _ = mixtures.estep(x, mask, mixture)
        found = mixtures.moments(x, share, mixture.centres, ndim)
        small = int(found.n.argmin())
        if found.n[small] >= method.min_count or len(found.n) == 1:
            break
        rest = torch.arange(len(found.n)) != small  # its samples go to the nearest remaining
        mixture = Mixture(*(leaf[rest] for leaf in mixture))
        mixture = mixture._replace(weights=mixture.weights / mixture.weights.sum())
    uniform = method.weights == "uniform"
    mixture = mixtures.mstep(found, mixture, method.covariance, floor, uniform)
    variance = mixture.variance  # as the model has it: one for all where they share one
    if method.covariance == "fixed":  # the one the data have, whatever was assumed
        own = found.scatter.sum() / (x.shape[1] * found.n.sum().clamp(min=mixtures.EMPTY))
        variance = torch.maximum(own, floor).expand(len(found.n))
    n = torch.where(found.n >= method.min_count, found.n, 0.0)
    sent = {
        "n": padded(n, slots),
        "centres": padded(torch.where(n[:, None] > 0, found.mean, 0.0), slots),
        "variance": padded(variance, slots, 1.0),
    }
    wanted = int(client.state["wanted"]) if "wanted" in client.state else len(n)
    return Reply(sent, keep=kept(mixture, slots, wanted))


def informed(
    method: "FedGEM", client: Client, units: Tensor, centres: Tensor, variance: Tensor
) -> Mixture:
    """A client's own mixture, or one begun from common centres if that is about as good or better.

    Whoever knows how many components it has takes so many, if its log-likelihood falls by no more
    than the slack. Whoever counted by silhouette may have missed some that others see: it takes at
    least as many as it counted, and more where its samples are better separated by them.
    """
    x, mask = rows(client, units)
    own, k = unpadded(client, recalled(client)), int(client.state["wanted"])
    floor, uniform = mixtures.variance_floor(x, mask), method.weights == "uniform"

    def begun(k: int) -> tuple[Mixture, Tensor]:
        start = mixtures.heaviest(x, centres, variance, own, k, uniform)
        return mixtures.em(x, start, method.covariance, floor, uniform)

    def separated(mixture: Mixture) -> float:
        return mixtures.separation(client.key, x, mixtures.log_joint(x, mixture).argmax(1))

    if method.n_components == "auto":
        most = min(len(centres), len(client.state["weights"]))
        return max([own, *(begun(j)[0] for j in range(k, most + 1))], key=separated)
    if k > len(centres):
        return own
    other, value = begun(k)
    least = mixtures.log_likelihood(x, mask, own) - method.slack * mixtures.price(x)
    return other if value >= least else own


# client: memory


def kept(mixture: Mixture, slots: int, wanted: int | None = None) -> Tree:
    """A mixture as a client remembers it: padded by slots of weight 0."""
    k, d = mixture.centres.shape
    variance = padded(mixture.variance, slots, 1.0)
    if variance.ndim == 3 and slots > k:
        variance[k:] = torch.eye(d, dtype=variance.dtype)
    return {
        "centres": padded(mixture.centres, slots),
        "weights": padded(mixture.weights, slots),
        "variance": variance.clone(),
        "count": torch.tensor(k),
        "wanted": torch.tensor(wanted or k),
        "members": torch.full((slots,), -1),
        "merges": torch.tensor(0),
    }


def recalled(client: Client, given: dict[str, Tensor] | None = None) -> Mixture:
    """The mixture a client remembers, with the centres the server returned."""
    own = Mixture(*(client.state[name] for name in Mixture._fields))
    if given is None:
        return own
    return own._replace(centres=torch.where(given["use"][:, None], given["centres"], own.centres))


def unpadded(client: Client, mixture: Mixture) -> Mixture:
    """The slots that hold a component."""
    k = int(client.state["count"])
    return Mixture(*(leaf[:k] for leaf in mixture))


def group_weights(client: Client, merges: Tensor, k: int) -> Tensor | None:
    """Weights over the groups a client was told it holds; None if it was told of none of these."""
    memory = client.state
    if "members" not in memory or int(memory["merges"]) != int(merges):
        return None
    held = memory["members"][:, None] == torch.arange(k)
    if not bool(held.any()):
        return None
    weights = (memory["weights"][:, None] * held).sum(0)
    weights = torch.where(held.any(0), weights.clamp(min=1e-12), 0.0)
    return weights / weights.sum()


# client: groups


def restricted(method: "FedGEM", client: Client, held: Tensor) -> Tensor:
    """Weights over the groups held, [k], from those of the slots that hold them, [slots, k]."""
    weights = client.state["weights"] @ held.double()
    # A component that died out still holds its group, with a small weight.
    weights = torch.where(held.any(0), weights.clamp(min=1e-12), 0.0)
    if method.noise is not None or method.weights == "uniform":
        weights = held.any(0).double()
    return weights / weights.sum()


def clipped(x: Tensor, most: float | None) -> Tensor:
    """Samples no farther from zero than this."""
    if most is None:
        return x
    return x * (most / x.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)


def settled(client: Client, groups: Tree, slots: int) -> Reply:
    """Which groups a client holds, and how many of its samples lie outside all of them."""
    x, _ = rows(client, groups["units"])
    centres, variance, merges = (groups[name] for name in ("centres", "variance", "merges"))
    weights, keep = group_weights(client, merges, len(centres)), None
    if weights is None:
        weights = mixtures.fitting_weights(x, centres, variance)
        best = weights.argsort(descending=True, stable=True)[:slots]
        best = best[weights[best] > 0]
        own = Mixture(centres[best], weights[best] / weights[best].sum(), variance[best])
        members = padded(best, slots, -1)
        keep = {**kept(own, slots), "members": members, "merges": merges.clone()}
    else:
        members = client.state["members"]
    two = torch.cat([weights, weights.new_zeros(1)]).sort(descending=True).values[:2]
    sent = {
        "group": weights.argmax(),
        "margin": two[0] - two[1],
        "outside": mixtures.outside(x, centres, variance, weights).double().mean(),
        "held": (weights > 0).sum(),
        "members": members,
    }
    return Reply(sent, keep=keep)


def with_extra(method: "FedGEM", client: Client, groups: Tree, slots: int) -> Mixture:
    """A mixture of the groups a client holds, and of components fitted to what lies outside."""
    x, mask = rows(client, groups["units"])
    centres, variance = groups["centres"], groups["variance"]
    weights = mixtures.fitting_weights(x, centres, variance)
    far = x[mixtures.outside(x, centres, variance, weights)]
    parts = [centres[weights > 0]]
    if len(far) > max(method.min_count, OUTSIDE * len(x)):
        k = mixtures.choose_count(client.key, far, "bic", method.covariance, method.sigma**2)
        parts.append(mixtures.kmeans(fold(client.key, "outside"), far, k)[1])
    start = torch.cat(parts[::-1])[:slots]  # what is new comes first
    floor = mixtures.variance_floor(x, mask)
    mixture = mixtures.from_seeds(x, start, method.covariance, method.sigma**2, floor)
    return mixtures.em(x, mixture, method.covariance, floor)[0]


def personal(method: "FedGEM", client: Client, given: Tree) -> Tree:
    """The groups with a client's own weights; before the merge, its own components."""
    centres, units = given["centres"], given["units"]
    if not len(centres):
        own = recalled(client) if "weights" in client.state else None
        if own is None:
            k = int(own_count(method, client))
            own = own_best(method, client, rows(client, units)[0], k)[0]
        return {**own._asdict(), "units": units}
    weights = group_weights(client, given["merges"], len(centres))
    if weights is None and client.train.x.ndim > 1 and len(client.train.x):
        x, _ = rows(client, units)
        weights = mixtures.fitting_weights(x, centres, given["variance"])
    weights = given["weights"] if weights is None else weights
    return {"centres": centres, "weights": weights, "variance": given["variance"], "units": units}


# server


class Summaries(NamedTuple):
    """All components that clients have told of."""

    n: Array  # [c]
    centres: Array  # [c, d]
    variance: Array  # [c], [c, d] or [c, d, d]
    owner: Labels  # [c]


def common(state: "State") -> Tree:
    """What everybody may know of the groups: also the number of their merge, and their units."""
    centres, variance, _ = state.groups
    told = {"centres": centres, "variance": variance}
    return {**told, "merges": state.merges, "units": state.units}


def units(method: "FedGEM", fed: Federation, ids: Ids, d: int) -> Tensor:
    """Units in which what everybody's own components leave unexplained is round: [d, d].

    None, [0, 0], where the components are to be fitted in those of the samples.
    """
    if method.covariance != "tied_full":
        return torch.zeros(0, 0, dtype=torch.float64)
    within = Mean("within", torch.zeros(d, d, dtype=torch.float64), weight="n")
    told = fed.map(method.scatter, to=ids, reduce=within)[1]["within"]
    if not bool(told.trace() > 0):
        return torch.eye(d, dtype=torch.float64)
    return torch.linalg.inv(root_of(told)).T


def returned(state: "State", ids: Ids) -> Each:
    """Each client's centres as the server left them, and whether there are any."""
    return each({"centres": state.centres[ids], "use": state.radii[ids] >= 0})


def pulled(method: "FedGEM", ids: Ids, reply: dict[str, Any]) -> Tensor:
    """Where clients' centres go, inside their balls: [m, slots, d]."""
    centres, slots = reply["centres"], reply["radii"].shape[1]
    radii, n = reply["radii"].flatten().numpy(), reply["n"].flatten().numpy()
    owner = ids.repeat_interleave(slots).numpy()
    moved = overlap.pulled(centres.flatten(0, 1).numpy(), radii, n, owner, method.consensus)
    return torch.from_numpy(moved).reshape(centres.shape)


def summaries(method: "FedGEM", state: "State") -> tuple[Summaries, Tensor]:
    """What has been told of components with samples, and their places: [clients, slots]."""
    real = state.sizes > mixtures.EMPTY
    if not bool(real.any()):
        raise ConfigError(
            f"FedGEM: at least one component must have min_count={method.min_count} samples. "
            "None has. Lower min_count, or ask for fewer components."
        )
    n, centres = state.sizes[real].numpy(), state.means[real].numpy()
    owner = real.nonzero()[:, 0].numpy()
    return Summaries(n, centres, state.variances[real].numpy(), owner), real


def partition(method: "FedGEM", told: Summaries, factor: float) -> merging.Merged:
    """Which components belong together, by the criterion or by balls of a fixed size."""
    n, centres, variance, owner = told
    if method.criterion != "overlap":
        tolerance, given = method.tolerance, method.n_clusters
        least = merging.fewest(owner, tolerance)
        return merging.merge(*told, method.criterion, tolerance, least, given)
    if method.radius == "published":
        radii = overlap.published_radii(n, centres, owner, factor, method.sigma)
    elif method.radius == "statistical":
        variance_within = pooling.mean_variance(n, variance)
        radii = overlap.statistical_radii(n, variance_within, centres.shape[1])
    else:
        radii = np.full(len(n), float(method.radius))
    return merging.Merged(overlap.joined(centres, radii, owner), np.zeros((0, 3)), math.inf)


def merged(method: "FedGEM", fed: Federation, state: "State") -> tuple["State", Ids]:
    """Components into groups, numbered anew, and whoever has one of them."""
    (told, real), factor = summaries(method, state), float(state.factor)
    if method.criterion == "overlap" and method.radius == "published" and math.isnan(factor):
        factor = best_factor(method, fed, told, state.units)
    found = partition(method, told, factor)
    groups, members = grouped(method, told, found.labels, real)
    state = state._replace(
        groups=groups,
        members=members,
        merges=state.merges + 1,
        curve=torch.from_numpy(found.curve),
        gap=torch.tensor(found.gap, dtype=torch.float64),
        factor=torch.tensor(factor, dtype=torch.float64),
    )
    return state, real.any(1).nonzero().flatten()


def grouped(
    method: "FedGEM", told: Summaries, labels: Labels, real: Tensor
) -> tuple[Groups, Tensor]:
    """The groups, and that of each client's component, -1 where there is none: [clients, slots]."""
    n, centres, variance, _ = told
    kind = method.covariance, method.sigma**2
    groups, number = pooling.grouped(n, centres, variance, labels, *kind)
    members = torch.full(real.shape, -1)
    members[real] = torch.from_numpy(number)
    return groups, members


def best_factor(method: "FedGEM", fed: Federation, told: Summaries, units: Tensor) -> float:
    """The published factor whose merge of two thirds of the clients suits the other third best."""
    ids = torch.from_numpy(np.unique(told.owner))
    fold_of = fed.turns(ids, "folds", every_round=True) % overlap.FOLDS
    own = fold_of[torch.searchsorted(ids, torch.from_numpy(told.owner))].numpy()
    banks = overlap.factor_banks(told.n, told.centres, told.owner, own, method.sigma)
    asked = fed.map(method.silhouette, units, each(torch.from_numpy(banks)[fold_of]), to=ids)
    scores = finite(method, *asked)[1]["score"]
    return overlap.FACTORS[int(scores.mean(0).argmax())]


def noised(method: "FedGEM", fed: Federation, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums with the noise asked for; a sample changes counts, sums, squares by 1, B, B**2."""
    if method.noise is None or method.clip is None:
        return sums
    out = {}
    for i, (name, leaf) in enumerate(sums.items()):
        draw = normal(fed.key("noise", name), tuple(leaf.shape), torch.float64)
        out[name] = leaf + method.noise * method.clip**i * draw
    return out


def judged(
    state: "State", asked: Ids, heard: Ids, reply: dict[str, Any]
) -> tuple["State", Evidence]:
    """Groups for those who have none, and evidence in the order asked; the silent fit."""
    m = len(asked)
    group, margin = torch.zeros(m, dtype=torch.int64), torch.ones(m, dtype=torch.float64)
    evidence = Evidence(group, margin, margin * torch.nan, torch.ones(m, dtype=torch.bool))
    if not len(heard):
        return state, evidence
    new = (state.counts[heard] < 0) | (state.members[heard] < 0).all(1)
    state = state._replace(
        counts=put(state.counts, heard[new], reply["held"][new]),
        members=put(state.members, heard[new], reply["members"][new]),
    )
    at = torch.isin(asked, heard)
    return state, Evidence(
        put(group, at, reply["group"]),
        put(margin, at, reply["margin"]),
        put(evidence.score, at, reply["outside"] / OUTSIDE),
        put(evidence.fits, at, reply["outside"] <= OUTSIDE),
    )
