"""FedGEM: fit one Gaussian mixture to the data of all clients, with an unknown number of groups.

Every client fits a mixture with its own number of components to its unlabelled samples by EM. After
each step it sends its centres and, for each centre, the radius of the largest ball in which the
centre may move without loss to the client. The server groups components of different clients whose
balls overlap, and moves their centres towards each other inside the balls. At the end it uses balls
of a final size: each group of overlapping balls is one component of all data, and the number of
groups is the estimate of K.

References: Ibrahim, Gebraeel, Xie: A federated generalized expectation-maximization algorithm for
mixture models with an unknown number of components, ICLR 2026, arXiv 2601.21160; the authors'
released code (there called FedClem).
Departures:
- The largest ball has a closed form, so there is no optimisation problem to solve (see `update`).
- Pairs of overlapping balls are joined closest first, not by index: the result does not depend on
  the numbering of clients. The common point of two balls lies between their centres; in the
  released code a sign is wrong.
- R is the smallest distance between two centres of a client. A client with one component has no R:
  the released code makes its final ball infinite; here it gets the mean R of the other clients.
- A component without samples keeps its centre, with a ball of radius 0.
- New clients are not part of the paper: they get all groups with equal weights.
Notes: only the abstract, the introduction and the released code were available, not the body of the
paper. Three rules come from the code: the balls that clients send have half of the largest squared
radius, when to stop, and the final radius. The code sets the factor of the final radius by hand or
by a cross-validated silhouette; the default here is the silhouette, with three folds over
`balls.FACTORS`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms.components import evidence_of
from coterie.algorithms.fedgem import balls
from coterie.algorithms.samples import keep_finite, known_count, pad_rows, samples
from coterie.clustering.lloyd import plus_plus, squared_distances
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation, each
from coterie.core.random import fold
from coterie.core.tree import Ids, Tree, put

ETA = math.sqrt(0.5)  # part of the largest radius that clients send; released code
TOLERANCE = 1e-3  # the rounds stop when no centre moves farther, in units of sigma; released code
EMPTY = 1e-6  # a component with a smaller expected count keeps its centre


class State(NamedTuple):
    turn: Tensor  # rounds done
    converged: Tensor  # no centre moved more than the tolerance in the last round
    counts: PerClient  # [clients]  components of each client, K_g; -1 before it was asked
    sizes: PerClient  # [clients]  samples of each client, N_g
    centres: Annotated[Tensor, Fill(0)]  # [clients, slots, d]  as returned by the server
    radii: Annotated[Tensor, Fill(-1)]  # [clients, slots]  of the last round; -1: no component
    members: PerClient  # [clients, slots]  group of each component
    groups: Tensor  # [k, d]  centres of the groups; none before the final aggregation
    factor: Tensor  # of the final radius; nan before it is chosen


@register("fedgem")
@dataclass(frozen=True)
class FedGEM(Algorithm):
    """Find the components of all clients' unlabelled data, and their number.

    Parameters
    ----------
    n_components
        Number of components of each client, K_g: one number for all clients, or "facts" (each
        client's own fact `n_components`).
    rounds
        Largest number of rounds; they stop earlier when no centre moves more than 0.001 `sigma`.
        The released code has 11, and 21 on Fashion-MNIST.
    sigma
        Standard deviation of every component. The released code has 1.
    factor
        Factor c of the final squared radius. None: the one with the best silhouette over three
        folds of the clients.
    """

    title: ClassVar[str] = "Federated generalised EM with an unknown number of components"
    supervised: ClassVar[bool] = False
    summaries: ClassVar[bool] = True
    bar: ClassVar[float] = 0.3  # the example gives clients two components where there are four

    n_components: Annotated[int, Ge(1)] | Literal["facts"] = "facts"
    rounds: Annotated[int, Ge(1)] = 11
    sigma: Annotated[float, Gt(0)] = 1.0
    factor: Annotated[float, Gt(0)] | None = None

    def init(self, fed: Federation) -> State:
        ids, told = fed.map(self.count, to=fed.everyone())
        slots, d = int(told["count"].max()), int(told["features"].max())
        zeros = torch.zeros(fed.n_clients, slots, d, dtype=torch.float64)
        state = State(
            turn=torch.tensor(0),
            converged=torch.tensor(False),
            counts=fed.per_client(-1),
            sizes=fed.per_client(-1),
            centres=zeros,
            radii=zeros[..., 0] - 1,
            members=torch.full((fed.n_clients, slots), -1),
            groups=zeros[0, :0],
            factor=zeros.new_tensor(self.factor or torch.nan),
        )
        return self.admit(fed, state, ids)

    def admit(self, fed: Federation, state: State, ids: Ids) -> State:
        """Let clients draw their initial centres, which they remember."""
        slots = torch.zeros(state.radii.shape[1])
        ids, told = fed.map(self.seed, slots, to=ids, at_least=0)
        if not len(ids):
            return state
        counts = put(state.counts, ids, told["count"])
        return state._replace(counts=counts, sizes=put(state.sizes, ids, told["size"]))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        if bool(state.converged) or int(state.turn) >= self.rounds:
            state = self.aggregate(fed, state)
            return state, {"stage": "aggregation", "components": len(state.groups)}
        cohort = fed.cohort()
        state = self.admit(fed, state, cohort[state.counts[cohort] < 0])
        return self.pull(fed, state, cohort[state.counts[cohort] > 0]), {"stage": "rounds"}

    def done(self, state: State) -> bool:
        return len(state.groups) > 0

    def pull(self, fed: Federation, state: State, ids: Ids) -> State:
        """One round: local EM steps; then centres of overlapping balls move inside their balls."""
        given = each({"centres": state.centres[ids], "use": state.radii[ids] >= 0})
        heard, reply = keep_finite("FedGEM", *fed.map(self.update, given, to=ids))
        real, known = reply["radii"] >= 0, state.radii[heard] >= 0  # [m, slots]
        owner = heard[:, None].expand_as(real)[real]
        centres = reply["centres"].clone()
        moved = balls.move(centres[real].numpy(), reply["radii"][real].numpy(), owner.numpy())
        centres[real] = torch.from_numpy(moved)
        shift = (centres - state.centres[heard]).norm(dim=2)
        still = torch.where(known, shift, torch.inf)[real] <= TOLERANCE * self.sigma
        return state._replace(
            turn=state.turn + 1,
            converged=still.all(),
            centres=put(state.centres, heard, centres),
            radii=put(state.radii, heard, reply["radii"]),
        )

    def aggregate(self, fed: Federation, state: State) -> State:
        """Final aggregation: overlapping balls of the final size are one component of all data."""
        real = state.radii >= 0
        owner = real.nonzero()[:, 0]
        told = state.centres[real].numpy(), owner.numpy(), state.sizes[owner].double().numpy()
        factor = self.factor or self.choose_factor(fed, *told)
        labels, found = balls.final_groups(*told, factor, self.sigma)
        order = np.lexsort(found.T[::-1])  # numbering does not depend on that of the clients
        members = torch.full(real.shape, -1)
        members[real] = torch.from_numpy(np.argsort(order)[labels])
        groups, ids = torch.from_numpy(found[order]), real.any(1).nonzero().flatten()
        fed.map(self.note, each(members[ids]), to=ids, at_least=0)
        return state._replace(members=members, groups=groups, factor=state.factor * 0 + factor)

    def choose_factor(self, fed: Federation, centres: Any, owner: Any, n: Any) -> float:
        """The factor with the best silhouette: groups from two folds, samples from the third."""
        ids = torch.from_numpy(np.unique(owner))
        fold_of = fed.turns(ids, "folds", every_round=True) % balls.FOLDS
        own = fold_of[torch.searchsorted(ids, torch.from_numpy(owner))].numpy()
        banks = torch.from_numpy(balls.factor_banks(centres, owner, n, own, self.sigma))
        asked = fed.map(self.silhouette, each(banks[fold_of]), to=ids)
        _, reply = keep_finite("FedGEM", *asked)
        return balls.FACTORS[int(reply["score"].mean(0).argmax())]

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """The group with the largest share of each client's samples."""
        shares = torch.ones(len(ids), 1, dtype=torch.float64)
        if len(state.groups):
            shares = fed.map(self.divide, state.groups, to=ids)[1]["shares"]
        return state, evidence_of(shares)

    @task(stackable=False, phase="cluster")
    def count(self, client: Client) -> dict[str, Tensor]:
        (x, _), k = samples(client), known_count(client, self.n_components)
        return {"count": torch.tensor(k), "features": torch.tensor(x.shape[1])}

    @task(stackable=False, phase="cluster")
    def seed(self, client: Client, slots: Tensor) -> Reply:
        """Initial centres: k-means++ seeds, without k-means."""
        (x, _), k = samples(client), known_count(client, self.n_components)
        if not 1 <= k <= min(len(x), len(slots)):
            raise ValueError(
                f"n_components must be between 1 and {min(len(x), len(slots))}, because the client "
                f"has {len(x)} samples and no client had more than {len(slots)} components at the "
                f"start, got {k}"
            )
        centres = pad_rows(plus_plus(fold(client.key, "seeds"), x, k)[0], len(slots))
        told = {"count": torch.tensor(k), "size": torch.tensor(len(x))}
        members = torch.full((len(slots),), -1)
        return Reply(told, keep={"centres": centres, "count": told["count"], "members": members})

    @task(phase="cluster")
    def update(self, client: Client, given: dict[str, Tensor]) -> Reply:
        """One EM step, and the largest ball in which each centre may move without loss.

        With a fixed isotropic covariance, the part of Q that depends on a centre mu is
        -n ||mu - M||^2 / (2 sigma^2) plus a constant, where M is the maximiser and n the expected
        count. It is no smaller than at the old centre exactly if ||mu - M|| <= ||old - M||.
        """
        x, mask = samples(client)
        old = torch.where(given["use"][:, None], given["centres"], client.state["centres"])
        real = torch.arange(len(old)) < client.state["count"]
        share = responsibilities(x, mask, old, real.double(), self.sigma)  # E-step: gamma
        n = share.sum(0)
        mean = share.T @ x / n.clamp(min=EMPTY)[:, None]  # M-step: M = sum gamma x / sum gamma
        mean = torch.where((n > EMPTY)[:, None], mean, old)
        radii = ETA * (mean - old).norm(dim=1)
        mean = torch.where(real[:, None], mean, 0.0)
        return Reply(
            {"centres": mean, "radii": torch.where(real, radii, -1.0)}, keep={"centres": mean}
        )

    @task(phase="cluster")
    def silhouette(self, client: Client, banks: Tensor) -> dict[str, Tensor]:
        return {"score": balls.silhouettes(*samples(client), banks)}

    @task(phase="cluster")
    def note(self, client: Client, members: Tensor) -> Reply:
        return Reply({}, keep={"members": members})

    @task(phase="cluster")
    def divide(self, client: Client, groups: Tensor) -> dict[str, Tensor]:
        x, mask = samples(client)
        share = responsibilities(x, mask, groups, torch.ones_like(groups[:, 0]), self.sigma)
        return {"shares": share.sum(0) / mask.sum()}

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"centres": state.groups}

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """The groups of a client (new clients: all groups); before the end, its own components."""
        centres, memory = given["centres"], client.state
        held = torch.ones(len(centres))
        if not len(centres):
            k = int(memory["count"]) if "count" in memory else 0
            centres = memory["centres"][:k] if k else samples(client)[0].mean(0)[None]
            held = torch.ones(len(centres))
        elif "members" in memory and bool((memory["members"] >= 0).any()):
            held = (memory["members"][:, None] == torch.arange(len(centres))).any(0)
        return {"centres": centres, "weights": held.double() / held.sum()}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Log of weight times density for each component: [n, k]; its softmax is the posterior."""
        x, variance = x.reshape(len(x), -1).double(), self.sigma**2
        logs = -squared_distances(x, personal["centres"]) / (2 * variance)
        return personal["weights"].log() + logs - x.shape[1] / 2 * math.log(2 * math.pi * variance)

    def surprise(self, output: Tensor) -> Tensor:
        """Minus the log-density of each sample, from what `predict` returned: [n]."""
        return -output.logsumexp(1)

    @classmethod
    def example(cls, problem: Any) -> "FedGEM":
        return cls(n_components=2, rounds=3)


def responsibilities(
    x: Tensor, mask: Tensor, centres: Tensor, weights: Tensor, sigma: float
) -> Tensor:
    """Posterior of each component, zero for rows that are padding: [n, k]."""
    logs = weights.log() - squared_distances(x, centres) / (2 * sigma**2)
    return torch.where(mask[:, None], logs.softmax(1), 0.0)
