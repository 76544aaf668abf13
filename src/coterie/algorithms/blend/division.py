"""Blend's division: what a client does, and how the server checks it."""

import torch
from torch import Tensor

from coterie.algorithms.blend import shares, simplex
from coterie.core.client import Client, Reply

BINS = 8  # of a component's margins
PURE_BINS = 2  # number of the clearest bins, assumed to have no samples of other components
LEAST_SHARE = 1e-3  # floor of the prior, so that an empty component can get samples again
REFUSAL = 1.5  # a new client with a larger strangeness fits no component; 1: worst of 100 members

# client


def survey(client: Client, offsets: Tensor, cuts: Tensor) -> dict[str, Tensor]:
    """Describe how the samples would be divided, and how far each offset could change."""
    k, real = len(offsets), client.train.mask
    scores = client.state["samples"]["scores"][:, :k].double() + offsets
    part, margin = shares.divide(scores)
    room = shares.pushes(scores)
    margins = [shares.quantiles(margin, real & (part == j), 32) for j in range(k)]
    return {
        "n": client.train.size,
        "histogram": shares.histogram(scores, real, cuts),
        "margins": torch.stack(margins),
        "room": torch.stack([shares.quantiles(room[:, j], real, 64) for j in range(k)]),
    }


def settle(client: Client, offsets: Tensor, prior: Tensor) -> Reply:
    """Divide the samples by score, offset and prior; estimate the prior if it is unknown."""
    k, batch = len(offsets), client.train
    scores = client.state["samples"]["scores"][:, :k].double()
    known = prior[0] >= 0
    share = torch.where(known, prior, 1 / k)
    for _ in range(3):  # a known prior does not change
        part = shares.penalties(scores, offsets, share, LEAST_SHARE).argmin(1)
        member = (part[:, None] == torch.arange(k)).double()
        found = (member * batch.share()[:, None]).sum(0)
        share = torch.where(known, prior, found)
    samples = {**client.state["samples"], "part": part}
    own = torch.cat([found, client.state["prior"][k:]])
    em = shares.em_shares(scores + offsets, batch.mask)
    return Reply({"share": found, "em": em}, keep={"samples": samples, "prior": own})


# server


def choose_cuts(histogram: Tensor, margins: Tensor) -> Tensor:
    """Margins that cut the samples of every component into equal parts: [k, bins - 1].

    Parameters
    ----------
    histogram, margins
        As clients sent them: [m, k, bins] and [m, k, quantiles].
    """
    at = torch.arange(1, BINS) / BINS
    n = histogram.sum(2)  # [m, k]
    own = [shares.pooled_quantiles(margins[:, j], n[:, j], at) for j in range(n.shape[1])]
    return torch.stack(own).clamp(max=1e30)


def find_confusion(counts: Tensor, anchor: Tensor) -> Tensor:
    """How the samples of each component are divided, by the counts of its anchor: [k, k]."""
    k = counts.shape[1]
    confusion = torch.eye(k, dtype=torch.float64)
    for j in range(k):
        at = torch.nonzero(anchor == j).flatten()
        if len(at) and float(counts[at[0], 0]) >= 0:
            confusion[j] = counts[at[0]]
    return confusion


def explain_trivial(total: Tensor, varies: Tensor, eigenvalues: Tensor, limits: Tensor) -> str:
    """Explain in a phrase why a partition is trivial; empty if it is not.

    Parameters
    ----------
    total
        Share of each component in all samples. [k]
    varies
        Dispersion of the clients' shares of each component. [k]
    eigenvalues, limits
        How much clients differ in their mean codes, and the limits for differences by chance.
    """
    if float(total.max()) > 0.99:
        return f"one component takes {float(total.max()):.1%} of all samples"
    differ = float(eigenvalues[0]) if len(eigenvalues) else 0.0
    if bool((varies < differ / 4).all()) and differ > float(limits[0]):
        return (
            f"shares hardly vary between clients (dispersion {float(varies.max()):.1f}, where "
            f"clients differ by {differ:.1f})"
        )
    return ""


def measure_strangeness(best: Tensor, usual: Tensor) -> Tensor:
    """How much worse the components fit clients than members; 1 is the worst of 100 members."""
    centre, far = usual.median(), usual.quantile(0.99)
    return (best.double() - centre) / (far - centre).clamp(min=1e-6 + 1e-3 * centre.abs())


def measure_distance(means: Tensor, n: Tensor, corners: Tensor) -> Tensor:
    """How far clients' means lie outside the simplex, on the scale of `measure_strangeness`."""
    # A client that lies three standard deviations outside is refused.
    return simplex.beyond(means, corners) * n.double().sqrt() / 3 * REFUSAL
