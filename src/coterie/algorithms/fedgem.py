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
likelihood of merged summaries instead of balls of a tuned size; common units ("tied_full"), joins
of nested groups and far copies, challenger, feedback, refinement: ours, off with `published=True`.
Notes: the paper's body was not at hand when this was written: abstract, introduction and the
authors' code were. Rounds steer the start only; their fixed points are the clients' own. With
`published`, the factor is chosen by a three-fold silhouette to merged centres.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import components
from coterie.algorithms.centres import finite, samples, unexplained
from coterie.clustering import merging, mixtures, overlap, pooling
from coterie.clustering.mixtures import NDIM, Covariance, Mixture
from coterie.clustering.pooling import Groups
from coterie.clustering.privacy import epsilon
from coterie.clustering.ward import TOLERANCE
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, each
from coterie.core.tree import Ids, Tree, put

STAGES = ("rounds", "merge", "feedback", "refinement")
ROUNDS, MERGE, FEEDBACK, REFINEMENT = range(4)
OWN_COUNT = ("auto", "bic")  # clients choose their number of components
PUBLISHED = {"covariance": "fixed", "weights": "uniform", "consensus": "pairwise", "refine": 0}
PUBLISHED |= {"criterion": "overlap", "radius": "published", "challenger": None, "feedback": 0}


class State(NamedTuple):
    stage: Tensor  # place in STAGES
    turn: Tensor  # exchanges done in this stage
    units: Tensor  # [d, d]  samples times it have round components; [0, 0]: they are as they are
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
    n_components, max_components
        Components of each client: a number for all, "facts" (each client's own fact
        `n_components`), or chosen by every client itself: "auto" (best silhouette plus one, and
        more if feedback shows them) or "bic" (for truly Gaussian data). Room for them; default: the
        most anybody has at the start, with "auto" 11.
    rounds, local_steps, eta
        Exchanges in which overlapping components are pulled together (0: one shot), EM steps in
        each, and the share of the allowed radius that is offered.
    covariance, sigma, weights
        Structure of the components: "tied" (round, one variance for all of a client), "tied_full"
        (the same in units in which all clients' components together are round: one exchange more,
        a covariance up; `radius` and `clip` are lengths in these units), "spherical", "diagonal",
        "full", or "fixed" to the variance sigma**2. Each client's weights are its own, or uniform.
    seeds, consensus
        First centres: raw k-means++ seeds, or a whole local "k-means" (which leaves the rounds
        nothing to do). Grouped centres go to their weighted "mean", or "pairwise" as in the paper.
    criterion, n_clusters
        When to stop merging: "icl" (and groups that lie as copies of one do are one), "bic" (close
        Gaussian groups), "random_effects" (all by how clients' copies of a centre scatter),
        "overlap" (balls of a given `radius`), or "given" `n_clusters`.
    exclusivity
        A group may hold two components of one client for at most this share of its clients, or if
        it has a part that no one has without the rest. 0: never, 1: always; None: 0.05, and 1
        where clients choose their own number.
    radius, factor
        Balls of "overlap": "statistical", "published" or a number; factor of the published one,
        None: the best three-fold silhouette.
    challenger, feedback, slack, refine
        Margin (in BIC prices of a component) by which a client's own best fit must win, "auto": 3,
        or 0 under "bic"; None: no challenger. Rounds of feedback, and what a client may lose by it
        (same unit; where it counts by "auto", silhouettes decide); rounds of pooled EM.
    min_count, noise, clip
        Components with fewer expected samples never leave the client. Multiplier of Gaussian noise
        on the sums of refinement, and the bound on a sample's distance from the middle of the
        centres. Earlier stages are not private.
    published
        The paper's method: fixed covariance, uniform weights, pairwise means, overlap of published
        radii, nothing after the merge.
    """

    title: ClassVar[str] = "Federated mixture fitting with an unknown number of components"
    supervised: ClassVar[bool] = False
    summaries: ClassVar[bool] = True
    bar: ClassVar[float] = 0.6  # agreement with the labels of clouds of which clients have ten

    n_components: Annotated[int, Ge(1)] | Literal["facts", "auto", "bic"] = "auto"
    max_components: Annotated[int, Ge(1)] | None = None
    rounds: Annotated[int, Ge(0)] = 10
    local_steps: Annotated[int, Ge(1)] = 1
    eta: Annotated[float, Ge(0), Le(1)] = math.sqrt(0.5)
    covariance: Covariance = "tied_full"
    sigma: Annotated[float, Gt(0)] = 1.0
    weights: Literal["own", "uniform"] = "own"
    seeds: Literal["k-means++", "k-means"] = "k-means++"
    consensus: Literal["mean", "pairwise"] = "mean"
    criterion: merging.Criterion = "icl"
    n_clusters: Annotated[int, Ge(1)] | None = None
    exclusivity: Annotated[float, Ge(0), Le(1)] | None = None
    radius: Literal["statistical", "published"] | Annotated[float, Ge(0)] = "statistical"
    factor: Annotated[float, Gt(0)] | None = None
    challenger: Annotated[float, Ge(0)] | Literal["auto"] | None = "auto"
    feedback: Annotated[int, Ge(0)] = 2
    slack: Annotated[float, Ge(0)] = 1.0
    refine: Annotated[int, Ge(0)] = 10
    min_count: Annotated[float, Ge(0)] = 5.0
    noise: Annotated[float, Gt(0)] | None = None
    clip: Annotated[float, Gt(0)] | None = None
    published: bool = False

    def check(self) -> None:
        for name, value in PUBLISHED.items() if self.published else ():
            object.__setattr__(self, name, value)
        if (self.criterion == "given") != (self.n_clusters is not None):
            raise ConfigError(
                "FedGEM: n_clusters goes with criterion='given', and with no other. Got "
                f"criterion={self.criterion!r}, n_clusters={self.n_clusters}."
            )
        if (self.noise is None) != (self.clip is None):
            raise ConfigError(f"FedGEM: noise needs clip. Got {self.noise} and {self.clip}.")

    @property
    def tolerance(self) -> float:
        """Exclusivity as it is used: off where local counts may be too large."""
        usual = 1.0 if self.n_components in OWN_COUNT else TOLERANCE
        return usual if self.exclusivity is None else self.exclusivity

    @property
    def margin(self) -> float | None:
        """By how many prices a client's own best fit must win; None: it is not tried."""
        if self.challenger == "auto":
            return 0.0 if self.criterion == "bic" else 3.0
        return self.challenger

    def init(self, fed: Federation) -> State:
        ids, reply = fed.map(self.count, to=fed.everyone())
        most, d = int(reply["count"].max()), int(reply["features"].max())
        if self.n_components == "auto":  # feedback may show clients more than they counted
            most = max(most, mixtures.MOST + 1)
        slots = self.max_components or most
        groups = pooling.no_groups(d, self.covariance)
        zeros = torch.zeros(fed.n_clients, slots, d, dtype=torch.float64)
        none = zeros[..., 0]  # [clients, slots]
        state = State(
            stage=torch.tensor(ROUNDS if self.rounds else MERGE),
            turn=torch.tensor(0),
            units=components.units(self, fed, ids, d),
            counts=fed.per_client(-1),
            centres=zeros,
            radii=none - 1,
            sizes=none,
            means=zeros,
            variances=zeros.new_ones(*none.shape, *groups.variance.shape[1:]),
            members=torch.full(none.shape, -1),
            groups=groups,
            merges=torch.tensor(0),
            curve=zeros.new_zeros(0, 3),
            gap=zeros.new_tensor(torch.inf),
            factor=zeros.new_tensor(self.factor or torch.nan),
        )
        return self.admit(fed, state, ids)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, stage, still = fed.cohort(), int(state.stage), False
        state = self.admit(fed, state, cohort[state.counts[cohort] < 0])
        ids = cohort[state.counts[cohort] > 0]
        if stage == ROUNDS:
            state, still = self.pull(fed, state, ids)
        elif stage == MERGE:
            told = fed.map(self.summarise, state.units, components.returned(state, ids), to=ids)
            state = self.merge(fed, state, *told)
        elif stage == FEEDBACK:
            given = state.units, state.groups.centres, pooling.common_variance(state.groups)
            state = self.merge(fed, state, *fed.map(self.adopt, *given, to=ids))
        elif self.refine:
            state = self.pool(fed, state, ids)
        state = self.after(state, still)
        info: Info = {"stage": STAGES[stage]}
        if len(state.groups.n):
            info["components"] = len(state.groups.n)
        if stage in (MERGE, FEEDBACK) and math.isfinite(float(state.gap)):
            info["gap"] = float(state.gap)
        if stage == REFINEMENT and self.noise is not None:
            info["epsilon"] = epsilon(self.noise, int(state.turn))
        return state, info

    def after(self, state: State, still: bool) -> State:
        """Where the next exchange finds itself: one further in this stage, or in the next."""
        stage, turn = int(state.stage), int(state.turn) + 1
        if stage == REFINEMENT:
            turn = turn if self.refine else 0
        elif still or turn >= (self.rounds, 1, self.feedback)[stage]:
            skipped = stage == MERGE and not self.feedback
            stage, turn = stage + 1 + skipped, 0
        return state._replace(stage=torch.tensor(stage), turn=torch.tensor(turn))

    def done(self, state: State) -> bool:
        return int(state.stage) == REFINEMENT and int(state.turn) >= self.refine

    def admit(self, fed: Federation, state: State, ids: Ids) -> State:
        """Clients that have no components yet seed some; after the merge they are placed."""
        if not len(ids):
            return state
        if int(state.stage) == REFINEMENT:
            return self.place(fed, state, ids)[0]
        slots, late = torch.zeros(state.radii.shape[1]), (state.stage > ROUNDS).clone()
        ids, reply = fed.map(self.seed, state.units, slots, late, to=ids, at_least=0)
        return state._replace(counts=put(state.counts, ids, reply["count"])) if len(ids) else state

    def pull(self, fed: Federation, state: State, ids: Ids) -> tuple[State, bool]:
        """Components whose balls overlap meet inside them; and whether nothing moves any more."""
        asked = fed.map(self.update, state.units, components.returned(state, ids), to=ids)
        ids, reply = finite(self, *asked)
        centres = put(state.centres, ids, components.pulled(self, ids, reply))
        state = state._replace(centres=centres, radii=put(state.radii, ids, reply["radii"]))
        return state, bool(reply["still"].all())

    def merge(self, fed: Federation, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        """Components into groups; then everyone is told which groups its components went to."""
        ids, reply = finite(self, ids, reply)
        state = state._replace(
            sizes=put(state.sizes, ids, reply["n"]),
            means=put(state.means, ids, reply["centres"]),
            variances=put(state.variances, ids, reply["variance"]),
        )
        state, holders = components.merged(self, fed, state)
        fed.map(self.note, each(state.members[holders]), state.merges, to=holders, at_least=0)
        return state

    def pool(self, fed: Federation, state: State, ids: Ids) -> State:
        """EM on everybody's data at once, each client restricted to its groups."""
        groups, ids = state.groups, ids[(state.members[ids] >= 0).any(1)]
        given = components.common(state), pooling.middle(groups), each(state.members[ids])
        total = Mean("sums", around=pooling.no_sums(groups))
        ids, reply = fed.map(self.sums, *given, to=ids, reduce=total)
        sums = {name: leaf * len(ids) for name, leaf in reply["sums"].items()}
        sums, least = components.noised(self, fed, sums), mixtures.EMPTY if not self.noise else 1.0
        kind = self.covariance, self.sigma**2, least
        return state._replace(groups=pooling.from_sums(groups, sums, *kind))

    def curves(self, state: State) -> list[Curve]:
        return merging.evidence(state.curve.numpy(), self.criterion)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """The groups each client holds; those who have none yet are given the ones they fit."""
        if not len(state.groups.n):
            return components.judged(state, ids, ids[:0], {})
        slots = torch.zeros(state.members.shape[1])
        asked = fed.map(self.settle, components.common(state), slots, to=ids, at_least=0)
        return components.judged(state, ids, *finite(self, *asked))

    def extend(self, fed: Federation, state: State, ids: Ids) -> State:
        """Take clients in with what fits no group: extra components for it, and a new merge."""
        given = components.common(state), torch.zeros(state.members.shape[1])
        heard, reply = fed.map(self.bring, *given, to=ids)
        counts = put(state.counts, heard, (reply["n"] > 0).sum(1))
        return self.merge(fed, state._replace(counts=counts), heard, reply)

    @task(stackable=False, phase="cluster")
    def count(self, client: Client) -> Reply:
        k, features = components.own_count(self, client), samples(client)[0].shape[1]
        return Reply({"count": k, "features": torch.tensor(features)}, keep={"count": k})

    @task(stackable=False, phase="cluster")
    def scatter(self, client: Client) -> dict[str, Tensor]:
        return unexplained(client, components.recalled_count(self, client))

    @task(stackable=False, phase="cluster")
    def seed(self, client: Client, units: Tensor, slots: Tensor, late: Tensor) -> Reply:
        mixture = components.first(self, client, units, len(slots), bool(late))
        memory = components.kept(mixture, len(slots))
        return Reply({"count": memory["count"]}, keep=memory)

    @task(phase="cluster")
    def update(self, client: Client, units: Tensor, given: dict[str, Tensor]) -> Reply:
        (x, mask), mixture = components.rows(client, units), components.recalled(client, given)
        kind = self.covariance, mixtures.variance_floor(x, mask), self.weights == "uniform"
        for _ in range(self.local_steps):
            old = mixture
            mixture, found = mixtures.step(x, mask, old, *kind)
        squared = mixtures.squared_radius(found, old, mixture, self.covariance)
        return components.offered(self, client, mixture, found.n, self.eta * squared.sqrt())

    @task(stackable=False, phase="cluster")
    def summarise(self, client: Client, units: Tensor, given: dict[str, Tensor]) -> Reply:
        x, mask = components.rows(client, units)
        mixture = components.unpadded(client, components.recalled(client, given))
        if self.margin is not None and self.rounds:
            best, value = components.own_best(self, client, x, len(mixture.weights))
            least = mixtures.log_likelihood(x, mask, mixture) + self.margin * mixtures.price(x)
            mixture = best if value > least else mixture
        return components.summary(self, client, units, mixture, len(given["use"]))

    @task(stackable=False, phase="cluster")
    def adopt(self, client: Client, units: Tensor, centres: Tensor, variance: Tensor) -> Reply:
        mixture = components.informed(self, client, units, centres, variance)
        return components.summary(self, client, units, mixture, len(client.state["weights"]))

    @task(phase="cluster")
    def note(self, client: Client, members: Tensor, merges: Tensor) -> Reply:
        return Reply({}, keep={"members": members, "merges": merges})

    @task(phase="cluster")
    def silhouette(self, client: Client, units: Tensor, banks: Tensor) -> dict[str, Tensor]:
        return {"score": overlap.silhouettes(*components.rows(client, units), banks)}

    @task
    def sums(self, client: Client, groups: Tree, origin: Tensor, members: Tensor) -> Reply:
        (x, mask), centres = components.rows(client, groups["units"]), groups["centres"]
        held = members[:, None] == torch.arange(len(centres))  # [slots, k]
        own = Mixture(centres, components.restricted(self, client, held), groups["variance"])
        share, _ = mixtures.estep(x, mask, own)
        sent = pooling.sums(components.clipped(x - origin, self.clip), share, NDIM[self.covariance])
        n = sent["n"]
        weights = (held * (n / n.sum() / held.sum(0).clamp(min=1))).sum(1)  # back into slots
        keep = {"weights": weights, "members": members, "merges": groups["merges"]}
        return Reply({"sums": sent}, keep=keep)

    @task(stackable=False, phase="cluster")
    def settle(self, client: Client, groups: Tree, slots: Tensor) -> Reply:
        return components.settled(client, groups, len(slots))

    @task(stackable=False, phase="cluster")
    def bring(self, client: Client, groups: Tree, slots: Tensor) -> Reply:
        mixture = components.with_extra(self, client, groups, len(slots))
        return components.summary(self, client, groups["units"], mixture, len(slots))

    def deploy(self, state: State, ids: Ids) -> Any:
        weights = state.groups.n / state.groups.n.sum().clamp(min=1e-300)
        return {**components.common(state), "weights": weights}

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """The groups with one's own weights; before the merge, one's own components."""
        return components.personal(self, client, given)

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Log of weight times density for each component: [n, k]; its softmax is the posterior."""
        mixture = Mixture(personal["centres"], personal["weights"], personal["variance"])
        x, units = x.reshape(len(x), -1).double(), personal["units"]
        rows, scale = (x @ units, units.logdet()) if units.numel() else (x, 0.0)
        return mixtures.log_joint(rows, mixture) + scale

    def surprise(self, output: Tensor) -> Tensor:
        """Minus the log-density of each sample, of what `predict` said: [n]."""
        return -output.logsumexp(1)

    @classmethod
    def example(cls, problem: Any) -> "FedGEM":
        k = min(4, int(problem.data.sizes("train").min()))
        return cls(n_components=k, max_components=4, rounds=2, feedback=1, refine=2, min_count=1.0)
