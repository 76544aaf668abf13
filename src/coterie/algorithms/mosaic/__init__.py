"""Mosaic: find the groups in the unlabelled data of all clients, and their number. Ours.

Every client fits a Gaussian mixture to its own samples. Five stages follow one another:

- units: clients send the scatter within their components; common units make components round.
- rounds: clients make EM steps and send their centres and, for each centre, the radius of the ball
  in which it may move without loss to the client. The server moves overlapping components towards
  each other, inside the balls.
- merge: the server merges components into groups; a criterion (ICL) decides how many groups.
- feedback: clients receive the centres of the groups, and adopt those they missed.
- refinement: EM on the sums of all clients, each client restricted to the groups it has.

Only centres, radii, counts, variances and sums leave a client.

References: grown out of Ibrahim, Gebraeel, Xie: A federated generalized expectation-maximization
algorithm for mixture models with an unknown number of components, ICLR 2026, arXiv 2601.21160,
which is `fedgem` here. The balls and the rounds come from there.
Notes: the rounds only improve the start of each client's EM; at convergence each client is at a
fixed point of its own EM. The number of groups is found by the merge.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms.mosaic import client as local
from coterie.algorithms.mosaic import merging, pooling, server
from coterie.algorithms.mosaic import mixture as mixtures
from coterie.algorithms.mosaic.mixture import NDIM, Covariance, Mixture
from coterie.algorithms.mosaic.pooling import Groups
from coterie.algorithms.mosaic.privacy import epsilon
from coterie.algorithms.samples import keep_finite, samples
from coterie.clustering.lloyd import plus_plus
from coterie.clustering.ward import TOLERANCE
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Curve, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Each, Federation, each
from coterie.core.random import fold
from coterie.core.tree import Ids, Tree, put

STAGES = ("rounds", "merge", "feedback", "refinement")
ROUNDS, MERGE, FEEDBACK, REFINEMENT = range(4)
OWN_COUNT = ("auto", "bic")  # clients choose their number of components
ETA = math.sqrt(0.5)  # part of the radius that clients send: half of EM's gain is kept
MARGIN = {"icl": 3.0, "bic": 0.0}  # how much better a client's own fit must be, in BIC prices


class State(NamedTuple):
    stage: Tensor  # place in STAGES
    turn: Tensor  # exchanges done in this stage
    units: Tensor  # [d, d]  samples @ units have round components; [0, 0]: units of the samples
    counts: PerClient  # [clients]  components of each client; -1 before it has any
    centres: Annotated[Tensor, Fill(0)]  # [clients, slots, d]  as returned by the server
    radii: Annotated[Tensor, Fill(-1)]  # [clients, slots]  of the last round; -1: no component
    sizes: Annotated[Tensor, Fill(0)]  # [clients, slots]  counts of the last summaries
    means: Annotated[Tensor, Fill(0)]  # [clients, slots, d]  centres of the last summaries
    variances: Annotated[Tensor, Fill(1)]  # [clients, slots, ...]
    members: PerClient  # [clients, slots]  group of each component
    groups: Groups
    merges: Tensor  # number of merges so far; each renumbers the groups
    curve: Tensor  # [p, 3]  number of groups, criterion, cost of the merge
    gap: Tensor  # criterion of the runner-up minus that of the chosen number


@register("mosaic")
@dataclass(frozen=True)
class Mosaic(Algorithm):
    """Find the components of all clients' unlabelled data, and their number.

    Parameters
    ----------
    n_components
        Number of components of each client: one number for all clients, "facts" (each client's own
        fact `n_components`), or chosen by every client: "auto" (the number with the best silhouette
        plus one; feedback may add more) or "bic" (for data that are really Gaussian).
    max_components
        Largest number of components of a client. None: the largest number at the start, and with
        "auto" at least 11.
    rounds
        Number of rounds in which overlapping components move towards each other. 0: one shot.
    covariance
        Structure of the components: "tied" (round, one variance for all components of a client),
        "tied_full" (the same, in units in which the components of all clients are round; needs one
        more exchange, in which clients send a covariance), "spherical", "diagonal" or "full".
    criterion
        Where to stop merging: "icl", or "bic" for Gaussian groups that lie close together.
    n_clusters
        Number of groups, if it is known. None: found by `criterion`.
    exclusivity
        A group may have two components of one client for at most this share of its clients. 0:
        never, 1: always. None: 0.05, and 1 where clients choose their own number of components.
    feedback
        Number of rounds of feedback.
    refine
        Number of rounds of EM on the sums of all clients.
    min_count
        Components with fewer expected samples never leave the client.
    noise
        Multiplier of the Gaussian noise on the sums of refinement. Earlier stages are not private.
        None: no noise.
    clip
        Bound on the distance of a sample from the mean of all, in the units of the components.
        Needed with `noise`.
    """

    title: ClassVar[str] = "Mixture of all clients' samples, its number of components found"
    supervised: ClassVar[bool] = False
    summaries: ClassVar[bool] = True
    bar: ClassVar[float] = 0.6  # agreement with the labels of clusters; clients have ten samples

    n_components: Annotated[int, Ge(1)] | Literal["facts", "auto", "bic"] = "auto"
    max_components: Annotated[int, Ge(1)] | None = None
    rounds: Annotated[int, Ge(0)] = 10
    covariance: Covariance = "tied_full"
    criterion: merging.Criterion = "icl"
    n_clusters: Annotated[int, Ge(1)] | None = None
    exclusivity: Annotated[float, Ge(0), Le(1)] | None = None
    feedback: Annotated[int, Ge(0)] = 2
    refine: Annotated[int, Ge(0)] = 10
    min_count: Annotated[float, Ge(0)] = 5.0
    noise: Annotated[float, Gt(0)] | None = None
    clip: Annotated[float, Gt(0)] | None = None

    def check(self) -> None:
        if (self.noise is None) != (self.clip is None):
            raise ConfigError(
                f"Mosaic: noise and clip must be given together. Got noise={self.noise}, "
                f"clip={self.clip}."
            )

    @property
    def tolerance(self) -> float:
        """`exclusivity`, or its default, which depends on `n_components`."""
        usual = 1.0 if self.n_components in OWN_COUNT else TOLERANCE
        return usual if self.exclusivity is None else self.exclusivity

    # server

    def init(self, fed: Federation) -> State:
        ids, reply = fed.map(self.count, to=fed.everyone())
        most, d = int(reply["count"].max()), int(reply["features"].max())
        if self.n_components == "auto":  # feedback may add components
            most = max(most, mixtures.MOST + 1)
        slots = self.max_components or most
        groups = pooling.no_groups(d, self.covariance)
        zeros = torch.zeros(fed.n_clients, slots, d, dtype=torch.float64)
        none = zeros[..., 0]  # [clients, slots]
        state = State(
            stage=torch.tensor(ROUNDS if self.rounds else MERGE),
            turn=torch.tensor(0),
            units=self.find_units(fed, ids, d),
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
        )
        return self.admit(fed, state, ids)

    def find_units(self, fed: Federation, ids: Ids, d: int) -> Tensor:
        """Units in which the components of all clients are round: [d, d]; [0, 0] if not used."""
        if self.covariance != "tied_full":
            return torch.zeros(0, 0, dtype=torch.float64)
        within = Mean("within", torch.zeros(d, d, dtype=torch.float64), weight="n")
        return pooling.common_units(fed.map(self.scatter, to=ids, reduce=within)[1]["within"])

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort, stage, still = fed.cohort(), int(state.stage), False
        state = self.admit(fed, state, cohort[state.counts[cohort] < 0])
        ids = cohort[state.counts[cohort] > 0]
        if stage == ROUNDS:
            state, still = self.pull(fed, state, ids)
        elif stage == MERGE:
            given = state.units, returned_centres(state, ids)
            state = self.merge(fed, state, *fed.map(self.summarise, *given, to=ids))
        elif stage == FEEDBACK:
            groups = state.groups.centres, pooling.common_variance(state.groups)
            state = self.merge(fed, state, *fed.map(self.adopt, state.units, *groups, to=ids))
        elif self.refine:
            state = self.pool(fed, state, ids)
        state = self.advance(state, still)
        info: Info = {"stage": STAGES[stage]}
        if len(state.groups.n):
            info["components"] = len(state.groups.n)
        if stage in (MERGE, FEEDBACK) and math.isfinite(float(state.gap)):
            info["gap"] = float(state.gap)
        if stage == REFINEMENT and self.noise is not None:
            info["epsilon"] = epsilon(self.noise, int(state.turn))
        return state, info

    def advance(self, state: State, still: bool) -> State:
        """Count the exchange, and after the last exchange of a stage start the next stage."""
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
        """Let clients without components draw initial ones; during refinement, place them."""
        if not len(ids):
            return state
        if int(state.stage) == REFINEMENT:
            return self.place(fed, state, ids)[0]
        slots, late = torch.zeros(state.radii.shape[1]), (state.stage > ROUNDS).clone()
        ids, reply = fed.map(self.seed, state.units, slots, late, to=ids, at_least=0)
        return state._replace(counts=put(state.counts, ids, reply["count"])) if len(ids) else state

    def pull(self, fed: Federation, state: State, ids: Ids) -> tuple[State, bool]:
        """Move overlapping components together; the state, and whether all radii are tiny."""
        asked = fed.map(self.update, state.units, returned_centres(state, ids), to=ids)
        ids, reply = keep_finite("Mosaic", *asked)
        centres, radii, n = reply["centres"], reply["radii"], reply["n"]
        owner = ids.repeat_interleave(radii.shape[1]).numpy()
        flat = centres.flatten(0, 1).numpy(), radii.flatten().numpy(), n.flatten().numpy()
        moved = torch.from_numpy(server.pull(*flat, owner)).reshape(centres.shape)
        centres = put(state.centres, ids, moved)
        state = state._replace(centres=centres, radii=put(state.radii, ids, radii))
        return state, bool(reply["still"].all())

    def merge(self, fed: Federation, state: State, ids: Ids, reply: dict[str, Any]) -> State:
        """Merge components into groups, and tell every client the groups of its components."""
        ids, reply = keep_finite("Mosaic", ids, reply)
        sizes = put(state.sizes, ids, reply["n"])
        means = put(state.means, ids, reply["centres"])
        variances = put(state.variances, ids, reply["variance"])
        real = sizes > mixtures.EMPTY
        if not bool(real.any()):
            raise ConfigError(
                f"Mosaic: at least one component must have min_count={self.min_count} samples. "
                "Got none. Lower min_count or n_components."
            )
        options = self.covariance, self.criterion, self.tolerance, self.n_clusters
        found, groups, members = server.merge_summaries(sizes, means, variances, real, *options)
        state = state._replace(
            sizes=sizes,
            means=means,
            variances=variances,
            groups=groups,
            members=members,
            merges=state.merges + 1,
            curve=torch.from_numpy(found.curve),
            gap=torch.tensor(found.gap, dtype=torch.float64),
        )
        holders = real.any(1).nonzero().flatten()
        fed.map(self.note, each(state.members[holders]), state.merges, to=holders, at_least=0)
        return state

    def pool(self, fed: Federation, state: State, ids: Ids) -> State:
        """One step of EM on the data of all clients, each restricted to its groups."""
        groups, ids = state.groups, ids[(state.members[ids] >= 0).any(1)]
        given = describe_groups(state), pooling.middle(groups), each(state.members[ids])
        total = Mean("sums", around=pooling.no_sums(groups))
        ids, reply = fed.map(self.sums, *given, to=ids, reduce=total)
        sums, least = (
            {name: leaf * len(ids) for name, leaf in reply["sums"].items()},
            mixtures.EMPTY,
        )
        if self.noise is not None and self.clip is not None:
            sums, least = server.add_noise(sums, self.noise, self.clip, fed.key("noise")), 1.0
        return state._replace(groups=pooling.from_sums(groups, sums, self.covariance, least))

    def curves(self, state: State) -> list[Curve]:
        known = self.n_clusters is not None
        return [] if known else merging.evidence(state.curve.numpy(), self.criterion)

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """Find the groups of each client; unassigned clients get the groups that they fit."""
        heard: Ids = ids[:0]
        reply: dict[str, Any] = {}
        if len(state.groups.n):
            given = describe_groups(state), torch.zeros(state.members.shape[1])
            heard, reply = keep_finite("Mosaic", *fed.map(self.settle, *given, to=ids, at_least=0))
        m = len(ids)
        group, margin = torch.zeros(m, dtype=torch.int64), torch.ones(m, dtype=torch.float64)
        evidence = Evidence(group, margin, margin * torch.nan, torch.ones(m, dtype=torch.bool))
        if not len(heard):  # clients that do not answer count as fitting
            return state, evidence
        new = (state.counts[heard] < 0) | (state.members[heard] < 0).all(1)
        counts = put(state.counts, heard[new], reply["held"][new])
        members = put(state.members, heard[new], reply["members"][new])
        at = torch.isin(ids, heard)
        return state._replace(counts=counts, members=members), Evidence(
            put(group, at, reply["group"]),
            put(margin, at, reply["margin"]),
            put(evidence.score, at, reply["outside"] / local.OUTSIDE),
            put(evidence.fits, at, reply["outside"] <= local.OUTSIDE),
        )

    # client

    @task(stackable=False, phase="cluster")
    def count(self, client: Client) -> Reply:
        k, features = torch.tensor(self.own_count(client)), samples(client)[0].shape[1]
        return Reply({"count": k, "features": torch.tensor(features)}, keep={"count": k})

    @task(stackable=False, phase="cluster")
    def scatter(self, client: Client) -> dict[str, Tensor]:
        return local.within_scatter(client, self.own_count(client))

    @task(stackable=False, phase="cluster")
    def seed(self, client: Client, units: Tensor, slots: Tensor, late: Tensor) -> Reply:
        """Initial components: k-means++ seeds, or the client's own best fit if no rounds follow."""
        (x, mask), k = local.rows(client, units), self.own_count(client)
        if k > len(slots):
            raise ValueError(
                f"it has {k} components, but a client may have at most {len(slots)}. Set "
                "max_components to a larger number"
            )
        if self.rounds and not bool(late):
            centres = plus_plus(fold(client.key, "seeds"), x, k)[0]
            floor = mixtures.variance_floor(x, mask)
            mixture = mixtures.from_seeds(x, centres, self.covariance, floor)
        else:
            mixture = local.own_best(client, x, k, self.covariance)[0]
        memory = local.remember(mixture, len(slots))
        return Reply({"count": memory["count"]}, keep=memory)

    @task(phase="cluster")
    def update(self, client: Client, units: Tensor, given: dict[str, Tensor]) -> Reply:
        """One EM step, and the ball in which each centre may move without loss to the client."""
        (x, mask), old = local.rows(client, units), local.recall(client, given)
        floor = mixtures.variance_floor(x, mask)
        mixture, found = mixtures.step(x, mask, old, self.covariance, floor)
        squared = mixtures.squared_radius(found, old, mixture, self.covariance)
        return local.offer(client, mixture, found.n, ETA * squared.sqrt(), self.min_count)

    @task(stackable=False, phase="cluster")
    def summarise(self, client: Client, units: Tensor, given: dict[str, Tensor]) -> Reply:
        """Summaries of the components, or of the client's own best fit if it is clearly better."""
        x, mask = local.rows(client, units)
        mixture = local.unpad(client, local.recall(client, given))
        if self.rounds:
            best, value = local.own_best(client, x, len(mixture.weights), self.covariance)
            margin = MARGIN[self.criterion] * mixtures.price(x)
            better = value > mixtures.log_likelihood(x, mask, mixture) + margin
            mixture = best if better else mixture
        options = len(given["use"]), self.covariance, self.min_count
        return local.summarise(client, units, mixture, *options)

    @task(stackable=False, phase="cluster")
    def adopt(self, client: Client, units: Tensor, centres: Tensor, variance: Tensor) -> Reply:
        counted = self.n_components == "auto"
        told = units, centres, variance, self.covariance, counted
        mixture, slots = local.take_feedback(client, *told), len(client.state["weights"])
        return local.summarise(client, units, mixture, slots, self.covariance, self.min_count)

    @task(phase="cluster")
    def note(self, client: Client, members: Tensor, merges: Tensor) -> Reply:
        return Reply({}, keep={"members": members, "merges": merges})

    @task
    def sums(self, client: Client, groups: Tree, origin: Tensor, members: Tensor) -> Reply:
        """Counts, sums and squares of the samples for each group of the client."""
        (x, mask), centres = local.rows(client, groups["units"]), groups["centres"]
        held = members[:, None] == torch.arange(len(centres))  # [slots, k]
        weights = local.restrict(client, held, uniform=self.noise is not None)
        share, _ = mixtures.estep(x, mask, Mixture(centres, weights, groups["variance"]))
        sent = pooling.sums(local.clip_norms(x - origin, self.clip), share, NDIM[self.covariance])
        n = sent["n"]
        own = (held * (n / n.sum() / held.sum(0).clamp(min=1))).sum(1)  # back into slots
        keep = {"weights": own, "members": members, "merges": groups["merges"]}
        return Reply({"sums": sent}, keep=keep)

    @task(stackable=False, phase="cluster")
    def settle(self, client: Client, groups: Tree, slots: Tensor) -> Reply:
        return local.settle(client, groups, len(slots))

    def own_count(self, client: Client) -> int:
        """The number of components of a client: as it remembers it, or found now."""
        if "count" in client.state:
            return int(client.state["count"])
        rule = self.n_components, self.covariance, self.max_components
        return local.own_count(client, *rule)

    # prediction

    def deploy(self, state: State, ids: Ids) -> Any:
        weights = state.groups.n / state.groups.n.sum().clamp(min=1e-300)
        return {**describe_groups(state), "weights": weights}

    @task(stackable=False)
    def personalise(self, client: Client, given: Tree) -> Tree:
        """The groups with the client's own weights; before the merge, its own components."""
        centres, units = given["centres"], given["units"]
        if not len(centres):
            if "weights" in client.state:
                own = local.recall(client)
            else:
                x, k = local.rows(client, units)[0], self.own_count(client)
                own = local.own_best(client, x, k, self.covariance)[0]
            return {**own._asdict(), "units": units}
        weights = local.group_weights(client, given["merges"], len(centres))
        if weights is None and client.train.x.ndim > 1 and len(client.train.x):
            x, _ = local.rows(client, units)
            weights = mixtures.fitting_weights(x, centres, given["variance"])
        weights = given["weights"] if weights is None else weights
        own = Mixture(centres, weights, given["variance"])
        return {**own._asdict(), "units": units}

    def predict(self, personal: Tree, x: Any) -> Tensor:
        """Log of weight times density for each component: [n, k]; its softmax is the posterior."""
        mixture = Mixture(personal["centres"], personal["weights"], personal["variance"])
        x, units = x.reshape(len(x), -1).double(), personal["units"]
        rows, scale = (x @ units, units.logdet()) if units.numel() else (x, 0.0)
        return mixtures.log_joint(rows, mixture) + scale

    def surprise(self, output: Tensor) -> Tensor:
        """Minus the log-density of each sample, from what `predict` returned: [n]."""
        return -output.logsumexp(1)

    @classmethod
    def example(cls, problem: Any) -> "Mosaic":
        k = min(4, int(problem.data.sizes("train").min()))
        return cls(n_components=k, max_components=4, rounds=2, feedback=1, refine=2, min_count=1.0)


def describe_groups(state: State) -> Tree:
    """The groups as sent to clients, with the number of their merge and their units."""
    centres, variance, _ = state.groups
    told = {"centres": centres, "variance": variance}
    return {**told, "merges": state.merges, "units": state.units}


def returned_centres(state: State, ids: Ids) -> Each:
    """Each client's centres as returned by the server, and whether there are any."""
    return each({"centres": state.centres[ids], "use": state.radii[ids] >= 0})
