"""What a client of mosaic does with its own components.

A client remembers its mixture in a fixed number of slots, of which `count` hold a component.
`wanted` is the number of components before small ones were dropped, `members` the group of each
component in the merge with the number `merges`.
"""

from typing import Literal

import torch
from torch import Tensor

from coterie.algorithms.mosaic import mixture as mixtures
from coterie.algorithms.mosaic.mixture import NDIM, Covariance, Mixture
from coterie.algorithms.samples import known_count, pad_rows, samples
from coterie.core.client import Client, Reply
from coterie.core.random import fold
from coterie.core.tree import Tree

OUTSIDE = 0.05  # a client fits no group if a larger share of its samples is far from every centre
SLACK = 1.0  # log-likelihood a client may lose by feedback, in BIC prices of a component
STILL = 1e-3  # in standard deviations; a component with a smaller radius no longer moves

# fitting


def rows(client: Client, units: Tensor) -> tuple[Tensor, Tensor]:
    """Samples in common units (units [0, 0]: unchanged), and the mask of the real ones."""
    x, mask = samples(client)
    return (x @ units if units.numel() else x), mask


def own_count(
    client: Client,
    rule: int | Literal["facts", "auto", "bic"],
    covariance: Covariance,
    most: int | None,
) -> int:
    """The number of components of a client: given, or chosen by the client (at most `most`)."""
    x, _ = samples(client)
    if rule == "auto" or rule == "bic":
        k = mixtures.choose_count(fold(client.key, "count"), x, rule, covariance)
        k = min(k, most or k)
    else:
        k = known_count(client, rule)
    if not 1 <= k <= len(x):
        raise ValueError(f"n_components must be between 1 and its {len(x)} samples, got {k}")
    return k


def within_scatter(client: Client, k: int) -> dict[str, Tensor]:
    """Mean scatter of samples around the centres of a client's own mixture: [d, d]."""
    x, mask = samples(client)
    floor = mixtures.variance_floor(x, mask)
    mixture, _ = mixtures.local_fit(client.key, x, k, "tied", floor)
    share, _ = mixtures.estep(x, mask, mixture)
    found = mixtures.moments(x, share, mixture.centres, NDIM["full"])
    return {"within": found.scatter.sum(0) / len(x), "n": client.train.size}


def own_best(client: Client, x: Tensor, k: int, covariance: Covariance) -> tuple[Mixture, Tensor]:
    """The best mixture for a client's samples alone, and its log-likelihood."""
    floor = mixtures.variance_floor(x, torch.ones(len(x), dtype=torch.bool))
    return mixtures.local_fit(fold(client.key, "own"), x, k, covariance, floor)


def offer(client: Client, own: Mixture, n: Tensor, radii: Tensor, min_count: float) -> Reply:
    """Send centres with their balls; small components and empty slots stay with the client."""
    shown = (torch.arange(len(n)) < client.state["count"]) & (n >= min_count)
    still = torch.where(shown, radii, 0.0) < STILL * mixtures.per_feature(own.variance).sqrt()
    sent = {
        "centres": torch.where(shown[:, None], own.centres, 0.0),
        "radii": torch.where(shown, radii, -1.0),
        "n": torch.where(shown, n, 0.0),
        "still": still.all(),
    }
    return Reply(sent, keep=own._asdict())


def summarise(
    client: Client,
    units: Tensor,
    mixture: Mixture,
    slots: int,
    covariance: Covariance,
    min_count: float,
) -> Reply:
    """Send counts, centres and variances after one more step, without the small components."""
    x, mask = rows(client, units)
    floor = mixtures.variance_floor(x, mask)
    while True:
        share, _ = mixtures.estep(x, mask, mixture)
        found = mixtures.moments(x, share, mixture.centres, NDIM[covariance])
        small = int(found.n.argmin())
        if found.n[small] >= min_count or len(found.n) == 1:
            break
        rest = torch.arange(len(found.n)) != small  # the other components get its samples
        mixture = Mixture(*(leaf[rest] for leaf in mixture))
        mixture = mixture._replace(weights=mixture.weights / mixture.weights.sum())
    mixture = mixtures.mstep(found, mixture, covariance, floor)
    n = torch.where(found.n >= min_count, found.n, 0.0)
    sent = {
        "n": pad_rows(n, slots),
        "centres": pad_rows(torch.where(n[:, None] > 0, found.mean, 0.0), slots),
        "variance": pad_rows(mixture.variance, slots, 1.0),
    }
    wanted = int(client.state["wanted"]) if "wanted" in client.state else len(n)
    return Reply(sent, keep=remember(mixture, slots, wanted))


def take_feedback(
    client: Client,
    units: Tensor,
    centres: Tensor,
    variance: Tensor,
    covariance: Covariance,
    counted: bool,
) -> Mixture:
    """A client's own mixture, or one started from the common centres if it is about as good.

    A client whose number of components was given takes this number of common centres, if its
    log-likelihood falls by no more than `SLACK`. A client that chose its number by silhouette
    (`counted`) may have missed components: it takes at least this number, and more if they separate
    its samples better.
    """
    x, mask = rows(client, units)
    own, k = unpad(client, recall(client)), int(client.state["wanted"])
    floor = mixtures.variance_floor(x, mask)

    def fit(k: int) -> tuple[Mixture, Tensor]:
        start = mixtures.heaviest(x, centres, variance, own, k)
        return mixtures.em(x, start, covariance, floor)

    def separation(mixture: Mixture) -> float:
        return mixtures.separation(client.key, x, mixtures.log_joint(x, mixture).argmax(1))

    if counted:
        most = min(len(centres), len(client.state["weights"]))
        return max([own, *(fit(j)[0] for j in range(k, most + 1))], key=separation)
    if k > len(centres):
        return own
    other, value = fit(k)
    least = mixtures.log_likelihood(x, mask, own) - SLACK * mixtures.price(x)
    return other if value >= least else own


# memory


def remember(mixture: Mixture, slots: int, wanted: int | None = None) -> Tree:
    """A mixture as a client remembers it: padded with slots of weight 0."""
    k, d = mixture.centres.shape
    variance = pad_rows(mixture.variance, slots, 1.0)
    if variance.ndim == 3 and slots > k:
        variance[k:] = torch.eye(d, dtype=variance.dtype)
    return {
        "centres": pad_rows(mixture.centres, slots),
        "weights": pad_rows(mixture.weights, slots),
        "variance": variance.clone(),
        "count": torch.tensor(k),
        "wanted": torch.tensor(wanted or k),
        "members": torch.full((slots,), -1),
        "merges": torch.tensor(0),
    }


def recall(client: Client, given: dict[str, Tensor] | None = None) -> Mixture:
    """The mixture a client remembers, with the centres that the server returned."""
    own = Mixture(*(client.state[name] for name in Mixture._fields))
    if given is None:
        return own
    return own._replace(centres=torch.where(given["use"][:, None], given["centres"], own.centres))


def unpad(client: Client, mixture: Mixture) -> Mixture:
    """The slots that hold a component."""
    k = int(client.state["count"])
    return Mixture(*(leaf[:k] for leaf in mixture))


def group_weights(client: Client, merges: Tensor, k: int) -> Tensor | None:
    """Weights over the groups of a client; None if it did not receive the groups of this merge."""
    memory = client.state
    if "members" not in memory or int(memory["merges"]) != int(merges):
        return None
    held = memory["members"][:, None] == torch.arange(k)
    if not bool(held.any()):
        return None
    weights = (memory["weights"][:, None] * held).sum(0)
    weights = torch.where(held.any(0), weights.clamp(min=1e-12), 0.0)
    return weights / weights.sum()


# groups


def restrict(client: Client, held: Tensor, uniform: bool) -> Tensor:
    """Weights over the groups [k], from the slots that belong to each group, `held` [slots, k]."""
    weights = client.state["weights"] @ held.double()
    # A component that lost all samples keeps its group, with a small weight.
    weights = torch.where(held.any(0), weights.clamp(min=1e-12), 0.0)
    if uniform:
        weights = held.any(0).double()
    return weights / weights.sum()


def clip_norms(x: Tensor, most: float | None) -> Tensor:
    """Shorten samples to at most this norm."""
    if most is None:
        return x
    return x * (most / x.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)


def settle(client: Client, groups: Tree, slots: int) -> Reply:
    """Find the groups of a client, and the share of its samples that is far from all groups."""
    x, _ = rows(client, groups["units"])
    centres, variance, merges = (groups[name] for name in ("centres", "variance", "merges"))
    weights, keep = group_weights(client, merges, len(centres)), None
    if weights is None:
        weights = mixtures.fitting_weights(x, centres, variance)
        best = weights.argsort(descending=True, stable=True)[:slots]
        best = best[weights[best] > 0]
        own = Mixture(centres[best], weights[best] / weights[best].sum(), variance[best])
        members = pad_rows(best, slots, -1)
        keep = {**remember(own, slots), "members": members, "merges": merges.clone()}
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
