"""Blend: find the components inside clients, divide their samples, and calibrate the shares.

A client's data are a mixture of a few distributions, the components, which all clients share. Blend
finds the number of components and trains an autoencoder for each and, with labels, an expert. It
assigns every sample to a component and estimates the shares of the components in every client's
data. A run has five stages:

- warm: clients train one common autoencoder by averaging.
- moments: clients send the mean code of their data. These means lie in a simplex. Its dimension
  gives the number of components; its corners are the purest clients, the anchors.
- anchors: the anchor of each component trains the common autoencoder on its own data.
- rounds: clients divide their samples every few rounds and train both models on each part.
- report: clients divide their samples once more, and the shares are computed from this division.

References: ours. The models, the division and the averaging by parts are those of FedGMI (Hou, Shi,
Fan, Letaief, 2026, arXiv 2605.08760), registered as `fedgmi`. New are:

- the start from moments;
- an offset for each component, because the scores of two autoencoders are not comparable;
- labels in the score;
- shares from histograms of margins, because counts are biased towards equal shares.

Notes: scores are sums over pixels and latents, in nats, at the posterior mean.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common_vae as common
from coterie.algorithms.blend import division, shares, start
from coterie.algorithms.finite import find_finite
from coterie.core.aggregate import Mean
from coterie.core.algorithm import (
    Algorithm,
    ComponentShares,
    Evidence,
    Fill,
    Info,
    PerClient,
    register,
)
from coterie.core.client import Client, Reply, task
from coterie.core.federation import Federation, each
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, row, tree_map

WARM, MOMENTS, ANCHORS, ROUNDS, REPORT, DONE = range(6)
STAGES = ("warm", "moments", "anchors", "rounds", "report", "done")
MOST = 8  # largest number of components that can be found
WARM_CLIENTS = 10  # clients in a round of the warm stage
LABEL_SCALE = 10.0  # nats of x that count as one nat of y, as autoencoders are overconfident
Unknown = Annotated[Tensor, Fill(-1)]


class State(NamedTuple):
    stage: Tensor
    turn: Tensor  # rounds of this stage so far
    common: dict[str, Params]  # the common autoencoder, and the expert used before the anchors
    vaes: Params  # [k, ...]
    experts: Params  # [k, ...]
    offsets: Tensor  # [k]  added to the scores
    scale: Tensor  # nats per unit of the scores
    labels: Tensor  # whether labels are part of the scores
    cuts: Tensor  # [k, bins - 1]  of the margins
    profiles: Tensor  # [k, k * bins]  distribution of a component's samples over the bins
    eigenvalues: Tensor  # evidence for the number of components
    thresholds: Tensor
    centre: Tensor  # [d]  of the codes
    root: Tensor  # [d, k - 1]  maps codes to the axes along which clients differ
    corners: Tensor  # [k, k - 1]  the anchors on these axes
    empty: Tensor  # [k]  number of divisions in a row in which a component got no samples
    assignment: PerClient  # [clients]  largest component; -1 before the first division
    anchor: PerClient  # [clients]  component it is the anchor of; -1: none, -2: did not answer
    first: Unknown  # [clients, k]  shares from moments
    own: Unknown  # [clients, k]  shares by the client's own division; used as its prior
    counts: Unknown  # [clients, k]  shares by count, with a uniform prior
    tail: Unknown  # [clients, k]  shares from histograms of margins
    anchored: Unknown  # [clients, k]  counts corrected by those of the anchors
    em: Unknown  # [clients, k]  maximum-likelihood shares, with scores taken as log densities
    errors: Unknown  # [clients, k]  standard errors of tail
    best: Unknown  # [clients]  mean score of the best component; only valid where size is known
    size: Unknown  # [clients]  samples


@register("blend")
@dataclass(frozen=True)
class Blend(Algorithm):
    """Find the components in clients' data and their shares, and train an expert for each.

    Parameters
    ----------
    vae
        Density model of a component.
    model
        Expert of a component. None: only the components are found, and no labels are needed.
    local
        Training of an expert on one part.
    local_vae
        Training of an autoencoder on one part.
    n_components
        Number of components. None: it is found, up to 8.
    warm_rounds
        Number of rounds in which the common autoencoder is trained.
    warm_epochs
        Number of epochs of each client in such a round.
    anchor_epochs
        Number of epochs for which an anchor trains the common autoencoder on its own data.
    rounds
        Number of training rounds. None: until the run ends, without a last division.
    interval
        Number of rounds between two divisions.
    evidence
        "joint": samples are divided by x and, if there are labels, from the second division on also
        by the expert's loss on y. "x": by x alone.
    """

    bar: ClassVar[float] = 0.4  # the groups of the tiny problem differ in y only, not in x
    vae: Model
    model: Model | None = None
    local: LocalSGD = common.EXPERTS
    local_vae: LocalSGD = common.AUTOENCODERS
    n_components: Annotated[int, Ge(1)] | None = None
    warm_rounds: Annotated[int, Ge(0)] = 10
    warm_epochs: Annotated[int, Ge(0)] = 2
    anchor_epochs: Annotated[int, Ge(0)] = 5
    rounds: Annotated[int, Ge(1)] | None = 40
    interval: Annotated[int, Ge(1)] = 5
    evidence: Literal["joint", "x"] = "joint"

    def check(self) -> None:
        common.check_vae("Blend", self.vae)

    @property
    def labelled(self) -> bool:
        """Whether experts predict the probabilities of labels."""
        return self.model is not None and self.model.loss == "cross_entropy"

    # server

    def init(self, fed: Federation) -> State:
        common.check_components("Blend", self.n_components, fed.n_clients)
        expert = {} if self.model is None else self.model.init(fed.key("expert"))
        nothing = torch.zeros(0, dtype=torch.float64)
        alone = torch.full((fed.n_clients,), -1.0, dtype=torch.float64)
        return State(
            stage=torch.tensor(WARM if self.warm_rounds else MOMENTS),
            turn=torch.tensor(0),
            common={"vae": self.vae.init(fed.key("vae")), "expert": expert},
            vaes={},
            experts={},
            eigenvalues=nothing,
            thresholds=nothing,
            centre=nothing,
            root=nothing,
            corners=nothing,
            anchor=torch.full((fed.n_clients,), -1),
            best=alone,
            size=alone,
            **_clear_division(fed.n_clients, 0),
        )

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        stage = int(state.stage)
        stages = self.warm_up, self.find_components, self.fit_anchors, self.train, self.report
        state, info = stages[stage](fed, state) if stage < DONE else (state, {})
        about: Info = {"stage": STAGES[stage]}
        if state.vaes:
            about["n_components"] = len(state.offsets)
            about["assignment"] = state.assignment
        return state, {**about, **info}

    def done(self, state: State) -> bool:
        return int(state.stage) == DONE

    def warm_up(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Train the common autoencoder by averaging."""
        everyone = fed.everyone()
        cohort = everyone[fed.turns(everyone, "warm") < WARM_CLIENTS]
        mean = Mean("vae", state.common["vae"], weight="n")
        _, reply = fed.map(self.warm, state.common["vae"], to=cohort, reduce=mean)
        state = state._replace(common={**state.common, "vae": reply["vae"]})
        finite = [reply[name][torch.isfinite(reply[name])] for name in ("nats", "divergence")]
        nats, kl = (float(values.double().mean()) for values in finite)
        last = int(state.turn) + 1 >= self.warm_rounds
        if last and kl < 0.1:
            warnings.warn(
                "Blend: the codes of the common VAE contain no information about the samples "
                f"({kl:.2g} nats). Train it longer (warm_rounds) or at a lower learning rate "
                "(local_vae).",
                stacklevel=2,
            )
        return _next(state, MOMENTS if last else WARM), {"score": nats}

    def find_components(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Find the number of components, the purest clients and initial shares from mean codes."""
        d, vae, n_classes = common.latent_size(self.vae), state.common["vae"], 0
        if self.model is not None and self.labelled:
            n_classes = start.count_classes(self.vae, self.model, vae, state.common["expert"])
        means = [Mean("scatter", torch.zeros(1, d, d).double(), weight="n", slots=True)]
        if self.labelled:
            around = torch.zeros(n_classes, d, d).double()
            means.append(Mean("class_scatter", around, weight="counts", slots=True))
        given = vae, torch.zeros(n_classes)
        ids, reply = fed.map(self.moments, *given, to=fed.everyone(), reduce=means)
        fine = find_finite("Blend", "moments", reply["mean"])
        ids = ids[fine]
        seen = start.find_components(reply, fine, self.n_components, MOST)
        self._warn_of_moments([fed.names[i] for i in ids[seen.simplex.strange].tolist()], seen)
        found, k = seen.simplex, len(seen.simplex.anchors)
        unknown = _clear_division(fed.n_clients, k)
        unknown["first"] = put(unknown["first"], ids, found.shares)
        state = state._replace(
            vaes=tree_map(lambda leaf: leaf.expand(k, *leaf.shape).clone(), vae),
            experts={} if self.model is None else self.model.init_many(fed.key("experts"), k),
            eigenvalues=found.eigenvalues,
            thresholds=found.thresholds,
            centre=found.centre,
            root=found.root,
            corners=found.corners,
            anchor=put(unknown["assignment"], ids[found.anchors], torch.arange(k)),
            **unknown,
        )
        shown = " ".join(f"{value:.3g}" for value in found.eigenvalues[: k + 2].tolist())
        above = float(found.thresholds[0]) if len(found.thresholds) else 0.0
        return _next(state, ANCHORS), {"eigenvalues": shown, "threshold": above}

    def _warn_of_moments(self, strange: list[str], seen: start.Found) -> None:
        """Warn about what the moments show and the user may not expect."""
        if seen.few and self.n_components is None:
            warnings.warn(
                "Blend: labels differ between clients, and there are too few samples per class to "
                "count components inside classes, so labels may be counted as components. Set "
                "n_components.",
                stacklevel=3,
            )
        for name in strange:
            warnings.warn(
                f"Blend: client '{name}' has data unlike all others; it is ignored when the "
                "components are counted.",
                stacklevel=3,
            )
        k = len(seen.simplex.anchors)
        if self.n_components is not None and seen.counted < k:
            warnings.warn(
                f"Blend: n_components is {k}, but clients differ in {seen.counted - 1} directions, "
                f"which suggests {seen.counted}. Leave n_components out to use this number.",
                stacklevel=3,
            )

    def fit_anchors(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Let the anchor of every component train its autoencoder."""
        state, complete = self.refit(fed, state, torch.arange(len(state.offsets)))
        return _next(state, ROUNDS) if complete else state, {}

    def refit(self, fed: Federation, state: State, components: Tensor) -> tuple[State, bool]:
        """Train autoencoders of some components again from their anchors; whether all answered."""
        anchor, at = start.choose_anchors(state.anchor, state.first, components)
        order = at.argsort()
        at, components = at[order], components[order]
        mean = Mean("vae", state.vaes, by=components)
        ids, reply = fed.map(self.fit_vae, state.common["vae"], to=at, reduce=mean, at_least=0)
        fine = torch.isfinite(reply["nats"]) if len(ids) else torch.zeros(0, dtype=torch.bool)
        silent = at[~torch.isin(at, ids[fine])]
        state = state._replace(anchor=put(anchor, silent, -2))
        return state._replace(vaes=reply["vae"]) if len(ids) else state, not len(silent)

    def train(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Divide every `interval` rounds; the clients of the round train on their parts."""
        turn = int(state.turn)
        info: Info = {}
        everyone = fed.everyone()
        if turn % self.interval == 0:
            state, info = self.divide(fed, state, everyone)
        else:
            state, _ = self.place(fed, state, everyone[state.assignment < 0])
        state = common.train_cohort(fed, self.train_experts, state)
        last = self.rounds is not None and turn + 1 >= self.rounds
        return _next(state, REPORT if last else ROUNDS), info

    def report(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Divide the samples once more, for the reported shares."""
        state, info = self.divide(fed, state, fed.everyone())
        if info["tail_against_anchor"] > 0.05:
            warnings.warn(
                f"Blend: the shares called 'tail' and 'anchor' differ by "
                f"{info['tail_against_anchor']:.2f} on average; the true shares lie between them. "
                "Report both.",
                stacklevel=2,
            )
        return _next(state, DONE), info

    # server: division

    def divide(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Info]:
        """Divide the samples of clients: scores, offsets, parts, shares, and a check of these."""
        first = bool((state.assignment < 0).all())
        # Experts are untrained before the first division, so labels carry no information then.
        joint = self.labelled and self.evidence == "joint" and not first
        ids, state = self.score_all(fed, state, ids, joint)
        reply = self.survey_all(fed, state, ids)
        state = _cut(state, reply)
        if len(state.offsets) > 1:
            if first:
                target = state.first[state.first[:, 0] >= 0].mean(0)
                state, reply = self.balance(fed, state, ids, target, reply)
            for _ in range(2):
                state = _cut(state, reply)
                reply = self.survey_all(fed, state, ids)
                tail, _ = shares.tail_shares(reply["histogram"], division.PURE_BINS)
                target = (reply["n"][:, None] * tail).sum(0) / reply["n"].sum()
                state, reply = self.balance(fed, state, ids, target, reply)
        state = _cut(state, reply)
        reply = self.survey_all(fed, state, ids)
        tail, profiles = shares.tail_shares(reply["histogram"], division.PURE_BINS)
        state = _read_shares(state._replace(profiles=profiles), reply, tail)
        return self.judge(fed, self.settle_all(fed, state, ids))

    def score_all(self, fed: Federation, state: State, ids: Ids, joint: bool) -> tuple[Ids, State]:
        """Let clients score their samples and keep the scores; return those with finite scores."""
        scale = torch.tensor(LABEL_SCALE if joint else 1.0, dtype=torch.float64)
        given = state.vaes, state.experts if joint else {}, scale
        ids, reply = fed.map(self.score, *given, to=ids)
        fine = find_finite("Blend", "scores", reply["best"])
        ids = ids[fine]
        best, size = put(state.best, ids, reply["best"][fine]), reply["n"][fine].double()
        state = state._replace(scale=scale, labels=torch.tensor(joint))
        return ids, state._replace(best=best, size=put(state.size, ids, size))

    def survey_all(self, fed: Federation, state: State, ids: Ids) -> dict[str, Tensor]:
        """Histograms of margins and ids of the clients whose answers are finite."""
        heard, reply = fed.map(self.survey, state.offsets, state.cuts, to=ids)
        fine = torch.isfinite(reply["histogram"]).all(2).all(1)
        return {**{name: leaf[fine] for name, leaf in reply.items()}, "ids": heard[fine]}

    def balance(
        self, fed: Federation, state: State, ids: Ids, target: Tensor, reply: dict[str, Tensor]
    ) -> tuple[State, dict[str, Tensor]]:
        """Find offsets for which the total counts match a target, one component at a time."""
        for _ in range(4 * len(target)):
            total = reply["histogram"].sum((0, 2))
            total = total / total.sum().clamp(min=1)
            if float((total - target).abs().max()) <= 0.003:
                break
            given = reply["room"], reply["n"], total, target
            state = state._replace(offsets=shares.move_offset(state.offsets, *given))
            reply = self.survey_all(fed, state, ids)
        return state, reply

    def settle_all(self, fed: Federation, state: State, ids: Ids) -> State:
        """Let clients divide their samples by score, offset and own prior."""
        ids, reply = fed.map(self.settle, state.offsets, each(state.own[ids]), to=ids)
        fine = torch.isfinite(reply["share"]).all(1)
        ids, share = ids[fine], reply["share"][fine]
        return state._replace(
            own=put(state.own, ids, share),
            em=put(state.em, ids, reply["em"][fine]),
            assignment=put(state.assignment, ids, share.argmax(1)),
        )

    def judge(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Warn about a trivial partition; train components that are empty twice again."""
        known = state.own[:, 0] >= 0
        own, size = state.own[known], state.size[known]
        total = (size[:, None] * own).sum(0) / size.sum()
        varies = shares.dispersion(own, size)
        info: Info = {
            "largest_share": float(total.max()),
            "dispersion": float(varies.max()),
            "tail_against_anchor": float((state.tail[known] - state.anchored[known]).abs().mean()),
        }
        if len(state.offsets) == 1:
            return state, info
        state = state._replace(empty=torch.where(total == 0, state.empty + 1, 0))
        why = division.explain_trivial(total, varies, state.eigenvalues, state.thresholds)
        if why:
            warnings.warn(
                f"Blend: the partition is trivial: {why}. Components may look alike, or "
                "n_components is wrong. Compare with the shares called 'moments', which depend on "
                "mean codes alone.",
                stacklevel=3,
            )
            return state, info
        if bool((state.empty > 0).any()):
            names = torch.nonzero(state.empty > 0).flatten().tolist()
            warnings.warn(f"Blend: component {names} got no samples.", stacklevel=3)
        again = torch.nonzero(state.empty >= 2).flatten()
        return self.refit(fed, state, again)[0] if len(again) else state, info

    # server: newcomers

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """Shares of clients without a division, and how well each client fits."""
        unsure = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        fits = torch.ones(len(ids), dtype=torch.bool)
        if int(state.stage) < ROUNDS or not len(ids):  # so far there is one model for all
            new = torch.where(state.assignment[ids] < 0, 0, state.assignment[ids])
            state = state._replace(assignment=put(state.assignment, ids, new))
            return state, Evidence(torch.zeros(len(ids), dtype=torch.int64), unsure, unsure, fits)
        given = state.vaes, state.experts if bool(state.labels) else {}, state.scale
        heard, reply = fed.map(self.score, *given, to=ids, at_least=0)
        if not len(heard):
            return state, Evidence(state.assignment[ids].clamp(min=0), unsure, unsure, fits)
        known = state.assignment >= 0
        strange = self.estimate_strangeness(fed, state, heard, reply["best"])
        new = heard[~known[heard] & torch.isfinite(reply["best"])]
        if len(new):
            before, seen = state, self.survey_all(fed, state, new)
            flat = seen["histogram"].flatten(1)
            even = torch.full((len(flat), len(state.offsets)), 1 / len(state.offsets)).double()
            profiles = state.profiles.clamp(min=1e-12)
            tail, _ = shares.mixture_em(flat, even, profiles, 200, fixed=True)
            state = self.settle_all(fed, _read_shares(state, seen, tail), new)
            best = put(state.best, heard, reply["best"])
            size = put(state.size, heard, reply["n"].double())
            state = state._replace(
                best=torch.where(known, before.best, best),
                size=torch.where(known, before.size, size),
            )
        group = state.assignment[ids].clamp(min=0)
        two = state.own[ids].topk(min(2, state.own.shape[1]), dim=1).values
        margin = (two[:, 0] - (two[:, 1] if two.shape[1] > 1 else 0.0)).clamp(0, 1)
        odd = unsure.masked_scatter(torch.isin(ids, heard), strange)
        return state, Evidence(group, margin, odd, ~(odd > division.REFUSAL))

    def estimate_strangeness(self, fed: Federation, state: State, ids: Ids, best: Tensor) -> Tensor:
        """How different clients are from the members, by their scores and by their mean codes."""
        members = torch.nonzero((state.assignment >= 0) & (state.size > 0)).flatten()
        if len(members) < 4:
            return torch.full((len(ids),), torch.nan, dtype=torch.float64)
        by_score = division.measure_strangeness(best, state.best[members])
        heard, reply = fed.map(self.codes, state.common["vae"], to=ids, at_least=0)
        if not len(state.root) or not state.root.shape[1] or not len(heard):
            return by_score
        points = (reply["mean"] - state.centre) @ state.root
        outside = division.measure_distance(points, reply["n"], state.corners)
        by_code = torch.zeros_like(by_score).masked_scatter(torch.isin(ids, heard), outside)
        return torch.maximum(by_score, by_code)

    # client

    def client_init(self, client: Client) -> Tree:
        n, k = len(client.train.mask), self.n_components or MOST
        samples = {
            "scores": torch.zeros(n, k, dtype=self.vae.dtype),
            "part": torch.full((n,), -1),
        }
        return {"samples": samples, "prior": torch.full((k,), 1 / k, dtype=torch.float64)}

    @task(phase="cluster")
    def warm(self, client: Client, vae: Params) -> dict[str, Tree]:
        loss = self.vae.losses
        return common.fit(client, self.vae, vae, self.local_vae, self.warm_epochs, loss)

    @task(phase="cluster")
    def fit_vae(self, client: Client, vae: Params) -> dict[str, Tree]:
        loss = self.vae.losses
        return common.fit(client, self.vae, vae, self.local_vae, self.anchor_epochs, loss)

    @task(phase="cluster")
    def codes(self, client: Client, vae: Params) -> dict[str, Tensor]:
        batch = client.train
        code = self.vae.apply(vae, batch.x).mean.double()
        return {"mean": (code * batch.share()[:, None]).sum(0), "n": batch.size}

    @task(phase="cluster", reveals="label counts")
    def moments(self, client: Client, vae: Params, classes: Tensor) -> dict[str, Tensor]:
        code = self.vae.apply(vae, client.train.x).mean.double()  # [n, d]
        sent = start.describe_codes(code, client.train)
        if not self.labelled:
            return sent
        return {**sent, **start.describe_classes(code, client.train, len(classes))}

    @task(phase="cluster")
    def score(self, client: Client, vaes: Params, experts: Params, scale: Tensor) -> Reply:
        batch = client.train
        scores = common.score(self.vae, vaes, batch) / scale.to(self.vae.dtype)
        k = scores.shape[1]
        if experts:
            assert self.model is not None
            wrong = [self.model.losses(row(experts, j), batch) for j in range(k)]
            scores = scores + torch.stack(wrong, 1).to(scores.dtype)
        best = batch.mean(scores.min(1).values.double())
        fill = client.state["samples"]["scores"][:, k:]
        samples = {**client.state["samples"], "scores": torch.cat([scores, fill], 1)}
        return Reply({"best": best, "n": batch.size}, keep={"samples": samples})

    @task(phase="cluster")
    def survey(self, client: Client, offsets: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        return division.survey(client, offsets, cuts)

    @task(phase="cluster")
    def settle(self, client: Client, offsets: Tensor, prior: Tensor) -> Reply:
        return division.settle(client, offsets, prior)

    @task
    def train_experts(self, client: Client, vaes: Params, experts: Params) -> dict[str, Tree]:
        part, which = client.state["samples"]["part"], torch.ones(2, dtype=torch.bool)
        expert = None if self.model is None else (self.local, self.model.losses)
        vae = self.local_vae, self.vae.losses
        return common.train_parts(client, part, which, vaes, experts, vae, expert)

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        if int(state.stage) < ROUNDS:  # so far there is one model for all
            one = tree_map(lambda leaf: leaf[None], state.common)
            zero = torch.zeros(1, dtype=torch.float64)
            bank = {"vaes": one["vae"], "experts": one["expert"]}
            return {**bank, "offsets": zero, "scale": zero[0] + 1}
        bank = {"vaes": state.vaes, "experts": state.experts}
        return {**bank, "offsets": state.offsets, "scale": state.scale}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        k = len(given["offsets"])
        even = torch.full((k,), 1 / k, dtype=torch.float64)
        return {**given, "prior": client.state["prior"][:k] if client.state else even}

    def predict(self, personal: Tree, x: Any) -> Any:
        """Outputs of the expert of each sample's component, or a reconstruction without experts."""
        vaes, experts = personal["vaes"], personal["experts"]
        scores = common.score(self.vae, vaes, common.unlabelled(x)).double() / personal["scale"]
        given = personal["offsets"], personal["prior"], division.LEAST_SHARE
        cost = shares.penalties(scores, *given)
        return common.answer(self.vae, self.model, vaes, experts, cost, x)

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        if not state.vaes:
            return None
        estimates = {
            "tail": state.tail,
            "count": state.counts,
            "anchor": state.anchored,
            "em": state.em,
            "moments": state.first,
        }
        known = {name: _known(value[ids]) for name, value in estimates.items()}
        evidence = {
            "n_components": len(state.offsets),
            "eigenvalues": state.eigenvalues.tolist(),
            "thresholds": state.thresholds.tolist(),
            "estimate": "tail",
            "tail_against_anchor": float((known["tail"] - known["anchor"]).abs().nanmean()),
        }
        return ComponentShares(known["tail"], _known(state.errors[ids]), known, evidence)

    @classmethod
    def example(cls, problem: Any) -> "Blend":
        epochs = problem.local.epochs or 0
        return cls(
            **common.example(problem),
            n_components=problem.n_groups,
            warm_rounds=0,
            warm_epochs=epochs,
            anchor_epochs=epochs,
            interval=2,
        )


def _next(state: State, stage: int) -> State:
    """The state after a round: in the same stage, or at the start of another stage."""
    turn = state.turn + 1 if int(state.stage) == stage else torch.tensor(0)
    return state._replace(stage=torch.tensor(stage), turn=turn)


def _clear_division(n_clients: int, k: int) -> dict[str, Any]:
    """Initial values of the state fields that a division fills."""
    zeros, ones = torch.zeros(k, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    unknown = torch.full((n_clients, k), -1.0, dtype=torch.float64)
    estimates = "first", "own", "counts", "tail", "anchored", "em", "errors"
    return {
        "offsets": zeros,
        "scale": ones,
        "labels": torch.tensor(False),
        "cuts": zeros.new_zeros(k, division.BINS - 1),
        "profiles": zeros.new_zeros(k, k * division.BINS),
        "empty": torch.zeros(k, dtype=torch.int64),
        "assignment": torch.full((n_clients,), -1),
        **dict.fromkeys(estimates, unknown),
    }


def _cut(state: State, reply: dict[str, Tensor]) -> State:
    """The state with new cuts of the margins, from what clients sent."""
    return state._replace(cuts=division.choose_cuts(reply["histogram"], reply["margins"]))


def _read_shares(state: State, reply: dict[str, Tensor], tail: Tensor) -> State:
    """The state with shares computed from the clients' histograms."""
    ids = reply["ids"]
    counts = reply["histogram"].sum(2) / reply["n"][:, None].clamp(min=1)
    all_counts = put(state.counts, ids, counts)
    confusion = division.find_confusion(all_counts, state.anchor)
    errors = shares.share_errors(tail, state.profiles, reply["n"])
    return state._replace(
        counts=all_counts,
        tail=put(state.tail, ids, tail),
        errors=put(state.errors, ids, errors),
        anchored=put(state.anchored, ids, shares.undo_confusion(counts, confusion)),
    )


def _known(values: Tensor) -> Tensor:
    return torch.where(values < 0, torch.nan, values)
