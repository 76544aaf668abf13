"""FedGEM: fit a Gaussian mixture to everybody's data when nobody knows how many groups there are.

Every client fits a mixture to its own unlabelled samples and tells, for each component, its centre
and the ball around it inside which moving the centre costs the client nothing. The server pulls
overlapping components together inside their balls (rounds), merges what belongs together and so
finds the number of groups (merge), tells clients of centres they may have missed (feedback), and
pools everybody's sums for the merged groups (refinement). Only centres, radii, counts and variances
leave a client.

References: Ibrahim, Gebraeel, Xie: A federated generalized expectation-maximization algorithm for
mixture models with an unknown number of components, ICLR 2026, arXiv 2601.21160.
Departures: the radius is a closed formula (`mixtures.squared_radius`) instead of an optimisation
problem; grouping does not depend on the numbering of clients; a group's centres meet at its
weighted mean instead of at means of pairs; the number of groups comes from the integrated completed
likelihood of merged summaries instead of balls of a tuned size; challenger, feedback and refinement
are ours. `published=True` gives the paper's method, whose tuned factor is chosen by three-fold
silhouette.
Notes: the paper's body was not at hand when this was written: abstract, introduction and the
authors' code were. Rounds steer the start only; their fixed points are the clients' own. With
`published`, a silhouette is taken to merged centres, by clients left out of the merge.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from scipy.stats import chi2
from torch import Tensor

from coterie.algorithms import centres as shared
from coterie.clustering import merging, mixtures
from coterie.clustering.mixtures import NDIM, Covariance, Mixture
from coterie.clustering.privacy import epsilon
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, each
from coterie.core.random import fold, normal
from coterie.core.tree import Ids, Tree, put

STAGES = ("rounds", "merge", "feedback", "refinement")
ROUNDS, MERGE, FEEDBACK, REFINEMENT = range(4)
FACTORS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1e3, 1e4, 1e5, 1e6)
OUTSIDE = 0.05  # share of samples far from every centre above which a client fits nowhere


class Groups(NamedTuple):
    """The merged components, in the order of their first coordinates."""

    centres: Tensor  # [k, d]
    variance: Tensor  # [k], [k, d] or [k, d, d]
    n: Tensor  # [k]  samples in all


class State(NamedTuple):
    stage: Tensor  # place in STAGES
    turn: Tensor  # exchanges done in this stage
    counts: PerClient  # [clients]  components of each client; -1 before it has any
    centres: Annotated[Tensor, Fill(0)]  # [clients, slots, d]  as returned by the server
    radii: Annotated[Tensor, Fill(-1)]  # [clients, slots]  of the last round; -1: nothing there
    sizes: Annotated[Tensor, Fill(0)]  # [clients, slots]  counts of the last summaries
    means: Annotated[Tensor, Fill(0)]  # [clients, slots, d]  centres of the last summaries
    variances: Annotated[Tensor, Fill(1)]  # [clients, slots, ...]
    members: PerClient  # [clients, slots]  group of each component
    groups: Groups
    merges: Tensor  # merges so far: groups are numbered anew by each
    curve: Tensor  # [p, 3]  number of groups, criterion, cost of the merge
    gap: Tensor  # criterion of the runner-up minus that of the number chosen
    factor: Tensor  # of the published radius, once chosen


@register("fedgem")
@dataclass(frozen=True)
class FedGEM(Algorithm):
    """Find the components of everybody's unlabelled data, and how many there are.

    Parameters
    ----------
    n_components
        Components of each client: a number for all, "facts" (each client's own fact
        `n_components`), or chosen by every client itself: "auto" (Calinski-Harabasz plus one) or
        "bic" (for truly Gaussian data).
    max_components
        Room for components of a client; default: the most anybody has at the start.
    rounds, local_steps, eta
        Exchanges in which overlapping components are pulled together (0: one shot), EM steps in
        each, and the share of the allowed radius that is offered.
    covariance, sigma, weights
        Structure of the components; "fixed" has the variance sigma**2. Each client's weights are
        its own, or uniform.
    seeds
        First centres: raw k-means++ seeds, or a whole local "k-means" (which leaves the rounds
        nothing to do).
    consensus
        Where grouped centres are pulled: to their weighted "mean", or "pairwise" as in the paper.
    criterion, n_clusters
        When to stop merging: "icl", "bic" (close Gaussian groups), "random_effects" (clients'
        copies of a centre differ), "overlap" (balls of a given `radius`), or "given" `n_clusters`.
    exclusivity
        A group may hold two components of one client for at most this share of its clients. 0:
        never, 1: no restriction; None: 0.1, and 1 where clients choose their own number.
    radius, factor
        Balls of "overlap": "statistical", "published" or a number; factor of the published one,
        None: the best three-fold silhouette.
    challenger, feedback, slack, refine
        Margin (in BIC prices of a component) by which a client's own best fit must win, None: no
        challenger; rounds of feedback, and what a client may lose by it (same unit); rounds of
        pooled EM.
    min_count
        Components with fewer expected samples never leave the client.
    noise, clip
        Multiplier of Gaussian noise on the sums of refinement, and the bound on a sample's
        distance from the middle of the centres. Earlier stages are not private.
    published
        The paper's method: fixed covariance, uniform weights, pairwise means, overlap of published
        radii, nothing after the merge.
    """

    title: ClassVar[str] = "Federated mixture fitting with an unknown number of components"
    supervised: ClassVar[bool] = False
    bar: ClassVar[float] = 0.6  # agreement with the labels of clouds of which clients have ten

    n_components: Annotated[int, Ge(1)] | Literal["facts", "auto", "bic"] = "auto"
    max_components: Annotated[int, Ge(1)] | None = None
    rounds: Annotated[int, Ge(0)] = 10
    local_steps: Annotated[int, Ge(1)] = 1
    eta: Annotated[float, Ge(0), Le(1)] = math.sqrt(0.5)
    covariance: Covariance = "tied"
    sigma: Annotated[float, Gt(0)] = 1.0
    weights: Literal["own", "uniform"] = "own"
    seeds: Literal["k-means++", "k-means"] = "k-means++"
    consensus: Literal["mean", "pairwise"] = "mean"
    criterion: merging.Criterion = "icl"
    n_clusters: Annotated[int, Ge(1)] | None = None
    exclusivity: Annotated[float, Ge(0), Le(1)] | None = None
    radius: Literal["statistical", "published"] | Annotated[float, Ge(0)] = "statistical"
    factor: Annotated[float, Gt(0)] | None = None
    challenger: Annotated[float, Ge(0)] | None = 3.0
    feedback: Annotated[int, Ge(0)] = 2
    slack: Annotated[float, Ge(0)] = 1.0
    refine: Annotated[int, Ge(0)] = 10
    min_count: Annotated[float, Ge(0)] = 5.0
    noise: Annotated[float, Gt(0)] | None = None
    clip: Annotated[float, Gt(0)] | None = None
    published: bool = False

    def check(self) -> None:
        if self.published:
            method = {
                "covariance": "fixed",
                "weights": "uniform",
                "consensus": "pairwise",
                "criterion": "overlap",
                "radius": "published",
                "challenger": None,
                "feedback": 0,
                "refine": 0,
            }
            for name, value in method.items():
                object.__setattr__(self, name, value)
        if (self.criterion == "given") != (self.n_clusters is not None):
            raise ConfigError(
                "FedGEM: n_clusters goes with criterion='given', and with no other. Got "
                f"criterion={self.criterion!r}, n_clusters={self.n_clusters}."
            )
        if (self.noise is None) != (self.clip is None):
            raise ConfigError(
                f"FedGEM: noise needs clip, and clip noise. Got noise={self.noise}, "
                f"clip={self.clip}."
            )

    @property
    def tolerance(self) -> float:
        """Exclusivity as it is used: off where local counts may be too large."""
        if self.exclusivity is not None:
            return self.exclusivity
        return 1.0 if self.n_components in ("auto", "bic") else 0.1

    # server

    def init(self, fed: Federation) -> State:
        ids, reply = fed.map(self.count, to=fed.everyone())
        slots = self.max_components or int(reply["count"].max())
        m, d = fed.n_clients, int(reply["features"].max())
        shape = (d,) * NDIM[self.covariance]
        zeros = torch.zeros(m, slots, d, dtype=torch.float64)
        nothing = zeros[..., 0]
        groups = Groups(zeros[0, :0], torch.ones(0, *shape, dtype=torch.float64), nothing[0, :0])
        state = State(
            stage=torch.tensor(ROUNDS if self.rounds else MERGE),
            turn=torch.tensor(0),
            counts=fed.per_client(-1),
            centres=zeros,
            radii=nothing - 1,
            sizes=nothing,
            means=zeros,
            variances=torch.ones(m, slots, *shape, dtype=torch.float64),
            members=torch.full((m, slots), -1),
            groups=groups,
            merges=torch.tensor(0),
            curve=torch.zeros(0, 3, dtype=torch.float64),
            gap=torch.tensor(torch.inf, dtype=torch.float64),
            factor=torch.tensor(self.factor or torch.nan, dtype=torch.float64),
        )
        return self._seeded(fed, state, ids)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()
        new = cohort[state.counts[cohort] < 0]
        if len(new) and state.stage < REFINEMENT:
            state = self._seeded(fed, state, new)
        elif len(new):
            state, _ = self.place(fed, state, new)
        ids = cohort[state.counts[cohort] > 0]
        stage = int(state.stage)
        if stage == ROUNDS:
            state = self._pulled(fed, state, ids)
        elif stage == MERGE:
            given = each({"centres": state.centres[ids], "use": state.radii[ids] >= 0})
            state = self._merged(fed, self._noted(state, *fed.map(self.summarise, given, to=ids)))
            state = _at(state, FEEDBACK if self.feedback else REFINEMENT, 0)
        elif stage == FEEDBACK:
            centres, variance = state.groups.centres, self._pooled(state.groups)
            state = self._noted(state, *fed.map(self.adopt, centres, variance, to=ids))
            state = self._merged(fed, state)
            turn = int(state.turn) + 1
            state = _at(state, *((FEEDBACK, turn) if turn < self.feedback else (REFINEMENT, 0)))
        elif self.refine:
            state = _at(self._refined(fed, state, ids), REFINEMENT, int(state.turn) + 1)
        return state, self._info(state, stage)

    def done(self, state: State) -> bool:
        return int(state.stage) == REFINEMENT and int(state.turn) >= self.refine

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """The groups each client holds; those who have none yet are given the ones they fit."""
        m, k = len(ids), len(state.groups.n)
        group, margin = torch.zeros(m, dtype=torch.int64), torch.ones(m, dtype=torch.float64)
        evidence = Evidence(group, margin, margin * torch.nan, torch.ones(m, dtype=torch.bool))
        if not k:
            return state, evidence
        slots = torch.zeros(state.members.shape[1])
        given = state.groups.centres, state.groups.variance, state.merges, slots
        heard, reply = fed.map(self.settle, *given, to=ids, at_least=0)
        heard, reply = shared.finite(self, heard, reply)
        if not len(heard):
            return state, evidence
        new = (state.counts[heard] < 0) | (state.members[heard] < 0).all(1)
        state = state._replace(
            counts=put(state.counts, heard[new], reply["held"][new]),
            members=put(state.members, heard[new], reply["members"][new]),
        )
        at = torch.isin(ids, heard)
        return state, Evidence(
            put(group, at, reply["group"]),
            put(margin, at, reply["margin"]),
            put(evidence.score, at, reply["outside"] / OUTSIDE),
            put(evidence.fits, at, reply["outside"] <= OUTSIDE),
        )

    def extend(self, fed: Federation, state: State, ids: Ids) -> State:
        """Take clients in with what fits no group: extra components for it, and a new merge."""
        slots = torch.zeros(state.members.shape[1])
        given = state.groups.centres, state.groups.variance, slots
        heard, reply = fed.map(self.bring, *given, to=ids)
        state = self._noted(state, heard, reply)
        state = state._replace(counts=put(state.counts, heard, (reply["n"] > 0).sum(1)))
        return self._merged(fed, state)

    def _seeded(self, fed: Federation, state: State, ids: Ids) -> State:
        slots = torch.zeros(state.radii.shape[1])
        late = (state.stage > ROUNDS).clone()
        heard, reply = fed.map(self.seed, slots, late, to=ids, at_least=0)
        return (
            state._replace(counts=put(state.counts, heard, reply["count"])) if len(heard) else state
        )

    def _pulled(self, fed: Federation, state: State, ids: Ids) -> State:
        given = each({"centres": state.centres[ids], "use": state.radii[ids] >= 0})
        ids, reply = shared.finite(self, *fed.map(self.update, given, to=ids))
        centres, radii, n = reply["centres"], reply["radii"], reply["n"]
        real = (radii >= 0).flatten().numpy()
        points, reach = centres.flatten(0, 1).numpy().copy(), radii.flatten().numpy()
        owner = ids.repeat_interleave(radii.shape[1]).numpy()[real]
        if real.any():
            where, ball = points[real], reach[real]
            pairs, _ = merging.overlaps(where, ball, owner)
            labels = merging.connect(pairs, owner)
            if self.consensus == "pairwise":
                points[real] = merging.pairwise_means(where, ball, pairs, labels)
            else:
                points[real] = merging.consensus(where, ball, n.flatten().numpy()[real], labels)
        state = state._replace(
            centres=put(state.centres, ids, torch.from_numpy(points).reshape(centres.shape)),
            radii=put(state.radii, ids, radii),
        )
        turn = int(state.turn) + 1
        over = turn >= self.rounds or bool(reply["still"].all())
        return _at(state, *((MERGE, 0) if over else (ROUNDS, turn)))

    def _noted(self, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        """Summaries of some clients, as they are heard."""
        ids, reply = shared.finite(self, ids, reply)
        return state._replace(
            sizes=put(state.sizes, ids, reply["n"]),
            means=put(state.means, ids, reply["centres"]),
            variances=put(state.variances, ids, reply["variance"]),
        )

    def _merged(self, fed: Federation, state: State) -> State:
        """Components into groups; then everyone is told which groups its components went to."""
        real = state.sizes > mixtures.EMPTY  # [clients, slots]
        if not bool(real.any()):
            raise ConfigError(
                f"FedGEM: at least one component must have min_count={self.min_count} samples. "
                "None has. Lower min_count, or ask for fewer components."
            )
        owner = real.nonzero()[:, 0].numpy()
        n, centres = state.sizes[real].numpy(), state.means[real].numpy()
        variance = state.variances[real].numpy()
        labels, curve, gap, factor = self._labels(fed, state, n, centres, variance, owner)
        found = self._groups(n, centres, variance, labels)
        order = np.lexsort(found.centres.numpy().T[::-1])  # numbering must not depend on clients'
        rank = np.argsort(order)
        members = torch.full_like(state.members, -1)
        members[real] = torch.from_numpy(rank[labels])
        index = torch.from_numpy(order)
        state = state._replace(
            groups=Groups(*(leaf[index] for leaf in found)),
            members=members,
            merges=state.merges + 1,
            curve=torch.from_numpy(curve),
            gap=torch.tensor(gap, dtype=torch.float64),
            factor=torch.tensor(factor, dtype=torch.float64),
        )
        holders = real.any(1).nonzero().flatten()
        fed.map(self.note, each(members[holders]), state.merges, to=holders, at_least=0)
        return state

    def _labels(
        self,
        fed: Federation,
        state: State,
        n: np.ndarray,
        centres: np.ndarray,
        variance: np.ndarray,
        owner: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, float, float]:
        factor = float(state.factor)
        if self.criterion == "overlap":
            if self.radius == "published" and math.isnan(factor):
                factor = self._best_factor(fed, n, centres, owner)
            radii = self._overlap_radii(n, centres, variance, owner, factor)
            labels = merging.connect(merging.overlaps(centres, radii, owner)[0], owner)
            return labels, np.zeros((0, 3)), math.inf, factor
        most = int(np.bincount(owner).max()) if self.tolerance < 1 else 1
        found = merging.merge(
            n, centres, variance, owner, self.criterion, self.tolerance, most, self.n_clusters
        )
        return found.labels, found.curve, found.gap, factor

    def _overlap_radii(
        self,
        n: np.ndarray,
        centres: np.ndarray,
        variance: np.ndarray,
        owner: np.ndarray,
        factor: float,
    ) -> np.ndarray:
        if self.radius == "published":
            return merging.published_radii(n, centres, owner, factor, self.sigma)
        if self.radius == "statistical":
            return merging.statistical_radii(n, _mean_variance(n, variance), centres.shape[1])
        return np.full(len(n), float(self.radius))

    def _best_factor(
        self, fed: Federation, n: np.ndarray, centres: np.ndarray, owner: np.ndarray
    ) -> float:
        """The factor whose merge of two thirds of the clients suits the other third best."""
        ids = torch.from_numpy(np.unique(owner))
        fold_of = fed.turns(ids, "folds", every_round=True) % 3
        folds = dict(zip(ids.tolist(), fold_of.tolist(), strict=True))
        mine = np.array([folds[int(client)] for client in owner])
        banks: list[np.ndarray] = []
        for part in range(3):
            kept = mine != part if (mine != part).any() else np.ones(len(n), dtype=bool)
            for factor in FACTORS:
                radii = merging.published_radii(
                    n[kept], centres[kept], owner[kept], factor, self.sigma
                )
                pairs = merging.overlaps(centres[kept], radii, owner[kept])[0]
                labels = merging.connect(pairs, owner[kept])
                banks.append(_means(n[kept], centres[kept], labels))
        most = max(map(len, banks))
        padded = np.full((3, len(FACTORS), most, centres.shape[1]), np.inf)
        for i, bank in enumerate(banks):
            padded[i // len(FACTORS), i % len(FACTORS), : len(bank)] = bank
        own = each(torch.from_numpy(padded)[fold_of])
        ids, reply = shared.finite(self, *fed.map(self.silhouette, own, to=ids))
        return FACTORS[int(reply["score"].mean(0).argmax())]

    def _groups(
        self, n: np.ndarray, centres: np.ndarray, variance: np.ndarray, labels: np.ndarray
    ) -> Groups:
        """Counts, centres and variances of merged groups, in the structure asked for."""
        k, d = int(labels.max()) + 1, centres.shape[1]
        size = np.bincount(labels, n, k)
        mu = _means(n, centres, labels)
        gap = centres - mu[labels]
        spread: np.ndarray
        if variance.ndim == 1:
            spread = variance + (gap**2).sum(1) / d
        elif variance.ndim == 2:
            spread = variance + gap**2
        else:
            spread = variance + gap[:, :, None] * gap[:, None, :]
        total = np.zeros((k, *variance.shape[1:]))
        np.add.at(total, labels, spread * n.reshape(-1, *(1,) * (variance.ndim - 1)))
        within = total / size.reshape(-1, *(1,) * (variance.ndim - 1))
        found = Groups(torch.from_numpy(mu), torch.from_numpy(within), torch.from_numpy(size))
        return found._replace(variance=self._structured(found.variance, found.n))

    def _structured(self, variance: Tensor, n: Tensor) -> Tensor:
        """Variances of groups as the covariance option has them."""
        if self.covariance == "fixed":
            return torch.full_like(variance, self.sigma**2)
        if self.covariance == "tied":
            return ((variance * n).sum() / n.sum()).expand(len(n)).clone()
        return variance

    def _pooled(self, groups: Groups) -> Tensor:
        """One variance for all groups, in the same structure."""
        share = groups.n / groups.n.sum()
        return torch.einsum("k,k...->...", share, groups.variance).expand_as(groups.variance)

    def _refined(self, fed: Federation, state: State, ids: Ids) -> State:
        """EM on everybody's data at once, each client restricted to its groups."""
        groups, members = state.groups, state.members
        ids = ids[(members[ids] >= 0).any(1)]
        k, d = groups.centres.shape
        origin = (groups.centres * groups.n[:, None]).sum(0) / groups.n.sum()
        zeros = {
            "n": torch.zeros(k, dtype=torch.float64),
            "x": torch.zeros(k, d, dtype=torch.float64),
            "squares": torch.zeros_like(groups.variance),
        }
        given = groups.centres, groups.variance, origin, state.merges, each(members[ids])
        ids, reply = fed.map(self.sums, *given, to=ids, reduce=Mean("sums", around=zeros))
        sums = {name: leaf * len(ids) for name, leaf in reply["sums"].items()}
        if self.noise is not None and self.clip is not None:
            for i, name in enumerate(sums):  # counts, sums, squares: bounds 1, B, B**2
                draw = normal(fed.key("noise", name), tuple(sums[name].shape), torch.float64)
                sums[name] = sums[name] + self.noise * self.clip**i * draw
        n = sums["n"]
        some = n > (1.0 if self.noise is not None else mixtures.EMPTY)
        safe = torch.where(some, n, 1.0)
        mean = sums["x"] / safe[:, None]
        shape = (-1, *(1,) * NDIM[self.covariance])
        second = sums["squares"] / safe.reshape(shape)
        if NDIM[self.covariance] == 0:
            within = (second - mean.square().sum(1)) / d
        elif NDIM[self.covariance] == 1:
            within = second - mean.square()
        else:
            within = second - mean[:, :, None] * mean[:, None, :]
        least = mixtures.FLOOR * _mean_variance(groups.n.numpy(), groups.variance.numpy())
        if NDIM[self.covariance] < 2:
            within = within.clamp(min=least)
        else:
            values, vectors = torch.linalg.eigh(within)
            within = vectors @ torch.diag_embed(values.clamp(min=least)) @ vectors.mT
        variance = torch.where(some.reshape(shape), within, groups.variance)
        variance = self._structured(variance, torch.where(some, n, 0.0))
        centres = torch.where(some[:, None], mean + origin, groups.centres)
        return state._replace(groups=Groups(centres, variance, torch.where(some, n, groups.n)))

    def _info(self, state: State, stage: int) -> Info:
        info: Info = {"stage": STAGES[stage]}
        if len(state.groups.n):
            info["components"] = len(state.groups.n)
        if stage in (MERGE, FEEDBACK) and math.isfinite(float(state.gap)):
            info["gap"] = float(state.gap)
        if stage == REFINEMENT and self.noise is not None:
            info["epsilon"] = epsilon(self.noise, int(state.turn))
        return info

    # client, in the order asked

    @task(stackable=False, phase="cluster")
    def count(self, client: Client) -> Reply:
        x = shared.samples(client)[0]
        k = self._count(client, x)
        return Reply({"count": k, "features": torch.tensor(x.shape[1])}, keep={"count": k})

    @task(stackable=False, phase="cluster")
    def seed(self, client: Client, slots: Tensor, late: Tensor) -> Reply:
        x, mask = shared.samples(client)
        k = int(client.state["count"] if "count" in client.state else self._count(client, x))
        if k > len(slots):
            raise ValueError(
                f"it has {k} components, and there is room for {len(slots)}. Set max_components"
            )
        floor, fixed = mixtures.variance_floor(x, mask), self.sigma**2
        if late or not self.rounds:
            mixture = self._own_best(client, x, k)[0]
        else:
            draw = fold(client.key, "seeds")
            if self.seeds == "k-means":
                centres = mixtures.kmeans(draw, x, k)[1]
            else:
                centres = mixtures.plus_plus(draw, x, k)[0]
            mixture = mixtures.from_seeds(x, centres, self.covariance, fixed, floor)
        return Reply({"count": torch.tensor(k)}, keep=_kept(mixture, len(slots)))

    @task(phase="cluster")
    def update(self, client: Client, given: dict[str, Tensor]) -> Reply:
        x, mask = shared.samples(client)
        floor = mixtures.variance_floor(x, mask)
        mixture = _recalled(client, given)
        for _ in range(self.local_steps):
            old = mixture
            share, _ = mixtures.estep(x, mask, old)
            found = mixtures.moments(x, share, old.centres, NDIM[self.covariance])
            mixture = mixtures.mstep(found, old, self.covariance, floor, self.weights == "uniform")
        squared = mixtures.squared_radius(found, old, mixture, self.covariance)
        radii = self.eta * squared.sqrt()
        shown = _real(client, len(radii)) & (found.n >= self.min_count)
        still = torch.where(shown, radii, 0.0) < 1e-3 * _scale(mixture.variance).sqrt()
        sent = {
            "centres": torch.where(shown[:, None], mixture.centres, 0.0),
            "radii": torch.where(shown, radii, -1.0),
            "n": torch.where(shown, found.n, 0.0),
            "still": still.all(),
        }
        return Reply(sent, keep=mixture._asdict())

    @task(stackable=False, phase="cluster")
    def summarise(self, client: Client, given: dict[str, Tensor]) -> Reply:
        x, mask = shared.samples(client)
        mixture = _unpadded(client, _recalled(client, given))
        if self.challenger is not None and self.rounds:
            best, value = self._own_best(client, x, len(mixture.weights))
            own = mixtures.log_likelihood(x, mask, mixture)
            if value > own + self.challenger * _price(x):
                mixture = best
        return self._summary(client, x, mixture, len(given["use"]))

    @task(stackable=False, phase="cluster")
    def adopt(self, client: Client, centres: Tensor, variance: Tensor) -> Reply:
        x, mask = shared.samples(client)
        slots = len(client.state["weights"])
        mixture = _unpadded(client, Mixture(*(client.state[name] for name in Mixture._fields)))
        k = int(client.state["wanted"])
        if k <= len(centres):
            density = mixtures.log_density(x, centres, variance)
            weights = mixtures.weights_alone(density, 10)
            heaviest = weights.argsort(descending=True, stable=True)[:k]
            share = mixture.weights / mixture.weights.sum()
            pooled = torch.einsum("k,k...->...", share, mixture.variance)
            start = weights[heaviest].clamp(min=1e-12)
            start = torch.full_like(start, 1 / k) if self.weights == "uniform" else start
            variance = pooled.expand(k, *pooled.shape)
            other = Mixture(centres[heaviest], start / start.sum(), variance)
            floor = mixtures.variance_floor(x, mask)
            options = self.covariance, floor, self.weights == "uniform"
            other, value = mixtures.em(x, other, *options)
            own = mixtures.log_likelihood(x, mask, mixture)
            if value >= own - self.slack * _price(x):
                mixture = other
        return self._summary(client, x, mixture, slots)

    @task(phase="cluster")
    def note(self, client: Client, members: Tensor, merges: Tensor) -> Reply:
        return Reply({}, keep={"members": members, "merges": merges})

    @task(phase="cluster")
    def silhouette(self, client: Client, banks: Tensor) -> dict[str, Tensor]:
        """Mean simplified silhouette of one's samples for each bank of centres: [factors]."""
        x, mask = shared.samples(client)
        scores = []
        for bank in banks:  # [k, d], rows of infinity where there is no centre
            real = bank.isfinite().all(1)
            distance = mixtures.squared_distances(x, torch.where(real[:, None], bank, 0.0))
            distance = torch.where(real, distance, torch.inf)
            if bank.shape[0] == 1:
                scores.append(distance.new_zeros(()))
                continue
            near = distance.topk(2, 1, largest=False).values.sqrt()  # [n, 2]
            ratio = 1 - near[:, 0] / near[:, 1].clamp(min=1e-300)
            ratio = torch.where(near[:, 1].isinf(), 0.0, ratio)  # one group: no silhouette
            scores.append(torch.where(mask, ratio, 0.0).sum() / mask.sum())
        return {"score": torch.stack(scores)}

    @task
    def sums(
        self,
        client: Client,
        centres: Tensor,
        variance: Tensor,
        origin: Tensor,
        merges: Tensor,
        members: Tensor,
    ) -> Reply:
        x, mask = shared.samples(client)
        held = members[:, None] == torch.arange(len(centres))  # [slots, k]
        weights = client.state["weights"] @ held.double()
        # A component that died out still holds its group, with a small weight.
        weights = torch.where(held.any(0), weights.clamp(min=1e-12), 0.0)
        if self.noise is not None or self.weights == "uniform":
            weights = held.any(0).double()
        weights = weights / weights.sum()
        share, _ = mixtures.estep(x, mask, Mixture(centres, weights, variance))
        y = x - origin
        if self.clip is not None:
            y = y * (self.clip / y.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        n = share.sum(0)
        if NDIM[self.covariance] == 0:
            squares = share.T @ y.square().sum(1)
        elif NDIM[self.covariance] == 1:
            squares = share.T @ y.square()
        else:
            squares = torch.einsum("nk,ni,nj->kij", share, y, y)
        own = (held * (n / n.sum() / held.sum(0).clamp(min=1))).sum(1)  # back into slots
        keep = {"weights": own, "members": members, "merges": merges}
        return Reply({"sums": {"n": n, "x": share.T @ y, "squares": squares}}, keep=keep)

    @task(stackable=False, phase="cluster")
    def settle(
        self, client: Client, centres: Tensor, variance: Tensor, merges: Tensor, slots: Tensor
    ) -> Reply:
        """Which groups one holds, and how many samples lie outside all of them."""
        x, _ = shared.samples(client)
        weights = _memory_weights(client, merges, len(centres))
        keep = None
        if weights is None:
            weights = self._fitting_weights(x, centres, variance)
            heaviest = weights.argsort(descending=True, stable=True)[: len(slots)]
            heaviest = heaviest[weights[heaviest] > 0]
            own = Mixture(
                centres[heaviest], weights[heaviest] / weights[heaviest].sum(), variance[heaviest]
            )
            members = _padded(heaviest, len(slots), -1)
            keep = {**_kept(own, len(slots)), "members": members, "merges": merges.clone()}
        else:
            members = client.state["members"]
        two = torch.cat([weights, weights.new_zeros(1)]).sort(descending=True).values[:2]
        sent = {
            "group": weights.argmax(),
            "margin": two[0] - two[1],
            "outside": self._outside(x, centres, variance, weights).double().mean(),
            "held": (weights > 0).sum(),
            "members": members,
        }
        return Reply(sent, keep=keep)

    @task(stackable=False, phase="cluster")
    def bring(self, client: Client, centres: Tensor, variance: Tensor, slots: Tensor) -> Reply:
        """Summaries of the groups one holds and of components fitted to what lies outside."""
        x, mask = shared.samples(client)
        weights = self._fitting_weights(x, centres, variance)
        outside = self._outside(x, centres, variance, weights)
        parts = [centres[weights > 0]]
        far = x[outside]
        if len(far) > max(self.min_count, OUTSIDE * len(x)):
            k = mixtures.choose_count(client.key, far, "bic", self.covariance, self.sigma**2)
            parts.append(mixtures.kmeans(fold(client.key, "outside"), far, k)[1])
        start = torch.cat(parts[::-1])[: len(slots)]  # what is new comes first
        floor = mixtures.variance_floor(x, mask)
        mixture = mixtures.from_seeds(x, start, self.covariance, self.sigma**2, floor)
        mixture, _ = mixtures.em(x, mixture, self.covariance, floor)
        return self._summary(client, x, mixture, len(slots))

    # client, inside

    def _count(self, client: Client, x: Tensor) -> Tensor:
        if isinstance(self.n_components, int) or self.n_components == "facts":
            k = shared.known_count(client, self.n_components)
        else:
            rule: Any = self.n_components
            key = fold(client.key, "count")
            k = mixtures.choose_count(key, x, rule, self.covariance, self.sigma**2)
            k = min(k, self.max_components or k)
        if not 1 <= k <= len(x):
            raise ValueError(f"n_components must be between 1 and its {len(x)} samples, got {k}")
        return torch.tensor(k)

    def _own_best(self, client: Client, x: Tensor, k: int) -> tuple[Mixture, Tensor]:
        floor = mixtures.variance_floor(x, torch.ones(len(x), dtype=torch.bool))
        options = self.covariance, self.sigma**2, floor, self.weights == "uniform"
        return mixtures.local_fit(fold(client.key, "own"), x, k, *options)

    def _summary(self, client: Client, x: Tensor, mixture: Mixture, slots: int) -> Reply:
        """Counts, centres and variances after one more step, without the small components."""
        mask = torch.ones(len(x), dtype=torch.bool)
        floor = mixtures.variance_floor(x, mask)
        while True:
            share, _ = mixtures.estep(x, mask, mixture)
            found = mixtures.moments(x, share, mixture.centres, NDIM[self.covariance])
            small = int(found.n.argmin())
            if found.n[small] >= self.min_count or len(found.n) == 1:
                break
            rest = torch.arange(len(found.n)) != small  # its samples go to the nearest remaining
            mixture = Mixture(*(leaf[rest] for leaf in mixture))
            mixture = mixture._replace(weights=mixture.weights / mixture.weights.sum())
        mixture = mixtures.mstep(found, mixture, self.covariance, floor, self.weights == "uniform")
        variance = mixture.variance
        if NDIM[self.covariance] == 0:
            own = found.scatter / (x.shape[1] * found.n.clamp(min=mixtures.EMPTY))
            variance = torch.maximum(own, floor)
        n = torch.where(found.n >= self.min_count, found.n, 0.0)
        shown = n > 0
        sent = {
            "n": _padded(n, slots, 0.0),
            "centres": _padded(torch.where(shown[:, None], found.mean, 0.0), slots, 0.0),
            "variance": _padded(variance, slots, 1.0),
        }
        wanted = int(client.state["wanted"]) if "wanted" in client.state else len(n)
        return Reply(sent, keep=_kept(mixture, slots, wanted))

    def _fitting_weights(self, x: Tensor, centres: Tensor, variance: Tensor) -> Tensor:
        """Weights over all groups, zero for those with hardly a sample: [k]."""
        weights = mixtures.weights_alone(mixtures.log_density(x, centres, variance), 20)
        enough = weights * len(x) >= min(max(3.0, 0.01 * len(x)), float(weights.max()) * len(x))
        weights = torch.where(enough, weights, 0.0)
        return weights / weights.sum()

    def _outside(self, x: Tensor, centres: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
        """Samples farther from every kept centre than one in a thousand should be: [n]."""
        kept = weights > 0
        density = mixtures.log_density(x, centres[kept], variance[kept])
        peak = mixtures.log_density(centres[kept], centres[kept], variance[kept]).diagonal()
        squared = (2 * (peak - density)).min(1).values  # Mahalanobis
        return squared > float(chi2.ppf(0.999, x.shape[1]))

    # prediction

    def deploy(self, state: State, ids: Ids) -> Any:
        total = state.groups.n.sum().clamp(min=1e-300)
        return {
            "centres": state.groups.centres,
            "variance": state.groups.variance,
            "weights": state.groups.n / total,
            "merges": state.merges,
        }

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """The groups with one's own weights; before the merge, one's own components."""
        if not len(given["centres"]):
            if "weights" not in client.state:
                x, _ = shared.samples(client)
                k = int(self._count(client, x))
                return self._own_best(client, x, k)[0]._asdict()
            return {name: client.state[name] for name in Mixture._fields}
        weights = _memory_weights(client, given["merges"], len(given["centres"]))
        if weights is None and client.train.x.ndim > 1 and len(client.train.x):
            x, _ = shared.samples(client)
            weights = self._fitting_weights(x, given["centres"], given["variance"])
        weights = given["weights"] if weights is None else weights
        return {"centres": given["centres"], "weights": weights, "variance": given["variance"]}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Log of weight times density for each component: [n, k]; its softmax is the posterior."""
        mixture = Mixture(personal["centres"], personal["weights"], personal["variance"])
        return mixtures.log_joint(x.reshape(len(x), -1).double(), mixture)

    def surprise(self, output: Tensor) -> Tensor:
        """Minus the log-density of each sample, of what `predict` said: [n]."""
        return -output.logsumexp(1)

    @classmethod
    def example(cls, problem: Any) -> "FedGEM":
        k = min(4, int(problem.data.sizes("train").min()))
        return cls(n_components=k, max_components=4, rounds=2, feedback=1, refine=2, min_count=1.0)


def _at(state: State, stage: int, turn: int) -> State:
    return state._replace(stage=torch.tensor(stage), turn=torch.tensor(turn))


def _means(n: np.ndarray, centres: np.ndarray, labels: np.ndarray) -> np.ndarray:
    sums = np.zeros((int(labels.max()) + 1, centres.shape[1]))
    np.add.at(sums, labels, n[:, None] * centres)
    return sums / np.bincount(labels, n)[:, None]


def _mean_variance(n: np.ndarray, variance: np.ndarray) -> float:
    """Mean variance of a feature within components."""
    if variance.ndim == 3:
        variance = np.diagonal(variance, axis1=1, axis2=2)
    own = variance if variance.ndim == 1 else variance.mean(1)
    return float(np.average(own, weights=n))


def _real(client: Client, slots: int) -> Tensor:
    return torch.arange(slots) < client.state["count"]


def _recalled(client: Client, given: dict[str, Tensor]) -> Mixture:
    """The mixture a client remembers, with the centres the server returned."""
    own = Mixture(*(client.state[name] for name in Mixture._fields))
    return own._replace(centres=torch.where(given["use"][:, None], given["centres"], own.centres))


def _unpadded(client: Client, mixture: Mixture) -> Mixture:
    k = int(client.state["count"])
    return Mixture(*(leaf[:k] for leaf in mixture))


def _padded(leaf: Tensor, slots: int, fill: float) -> Tensor:
    missing = slots - len(leaf)
    return torch.cat([leaf, leaf.new_full((missing, *leaf.shape[1:]), fill)]) if missing else leaf


def _kept(mixture: Mixture, slots: int, wanted: int | None = None) -> Tree:
    """A mixture as a client remembers it: padded by slots of weight 0.

    `wanted` is its number of components when small ones have been dropped from the mixture.
    """
    k, d = mixture.centres.shape
    variance = _padded(mixture.variance, slots, 1.0)
    if variance.ndim == 3 and slots > k:
        variance[k:] = torch.eye(d, dtype=variance.dtype)
    return {
        "centres": _padded(mixture.centres, slots, 0.0),
        "weights": _padded(mixture.weights, slots, 0.0),
        "variance": variance.clone(),
        "count": torch.tensor(k),
        "wanted": torch.tensor(wanted or k),
        "members": torch.full((slots,), -1),
        "merges": torch.tensor(0),
    }


def _memory_weights(client: Client, merges: Tensor, k: int) -> Tensor | None:
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


def _scale(variance: Tensor) -> Tensor:
    """Variance of a feature, per component: [k]."""
    if variance.ndim == 1:
        return variance
    if variance.ndim == 2:
        return variance.mean(1)
    return variance.diagonal(dim1=1, dim2=2).mean(1)


def _price(x: Tensor) -> float:
    """What a component must be worth, in nats: half its free numbers times log n."""
    return (x.shape[1] + 1) / 2 * math.log(len(x))
