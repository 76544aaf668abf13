"""FedGMI: shared density models divide every client's samples among shared distributions.

A client's data are a mixture of a few distributions that all clients share. Each has a variational
autoencoder and, with labels, an expert classifier. Clients give each sample to the autoencoder that
explains it best, train both on the parts they have, and the server averages part by part. Out come
a component for every sample and shares for every client.

References: Hou, Shi, Fan, Letaief: FedGMI: generative model-driven federated learning for
probabilistic mixture inference; Stable-Initialize and the division rule.
Departures: `published=True` is the method as printed. The rest is ours: a start from the clients'
mean codes, which counts the components, too (`start="moments"`), because the printed start takes
clients of mixed content where there are three components; offsets that give the scores a common
zero; shares read off histograms of margins (`"tail"`), because counts shrink towards the middle;
labels in the score (`evidence`). The maths is in `clustering/proportions.py`.
Notes: scores are sums over pixels and latents, in nats, at the posterior mean. The prior is
smoothed in the logarithm only. The paper leaves open how often is divided, and all local training.
"""

import warnings
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.algorithms import divisions, starts
from coterie.algorithms.divisions import as_batch
from coterie.clustering import proportions as mix
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, Mixture, PerClient, register
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.layers import current_mode
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, row, tree_map
from coterie.models.vae import VAE, divergence, gaussian, guard_terms, pixels

WARM, MOMENTS, ANCHORS, ROUNDS, REPORT, DONE = range(6)
STAGES = ("warm", "moments", "anchors", "rounds", "report", "done")
# Measured on digits with 300 samples a client; with 1,000 or more, 2 epochs and 0.001 for both.
EXPERTS = LocalSGD(0.003, epochs=5, batch_size=32, optimizer="adam")
AUTOENCODERS = LocalSGD(0.001, epochs=5, batch_size=32, optimizer="adam")
PUBLISHED: dict[str, Any] = {
    "start": "published",
    "warm_rounds": 0,
    "anchor_epochs": 30,
    "n_decoded": 512,
    "penalty": 0.1,
    "evidence": "x",
    "offset": "none",
    "shares": "count",
    "restart": False,
}
Unknown = Annotated[Tensor, Fill(-1)]


class State(NamedTuple):
    stage: Tensor
    turn: Tensor  # rounds of this stage so far
    common: dict[str, Params]  # the warmed up autoencoder, and an expert until there are others
    vaes: Params  # [k, ...]
    experts: Params  # [k, ...]
    offsets: Tensor  # [k]  added to the scores
    scale: Tensor  # nats per unit of the scores
    labels: Tensor  # whether labels are part of the scores
    cuts: Tensor  # [k, bins - 1]  of the margins
    profiles: Tensor  # [k, k * bins]  how a component's samples spread over the bins
    eigenvalues: Tensor  # evidence for the number of components
    thresholds: Tensor
    centre: Tensor  # [d]  of the codes
    root: Tensor  # [d, k - 1]  from codes to the axes in which clients differ
    corners: Tensor  # [k, k - 1]  the anchors on these axes
    empty: Tensor  # [k]  divisions in a row that gave a component nothing
    restarted: Tensor
    assignment: PerClient  # [clients]  largest component, -1 until divided
    anchor: PerClient  # [clients]  component it stands for; -1: none, -2: was asked in vain
    first: Unknown  # [clients, k]  shares from moments
    own: Unknown  # [clients, k]  shares by the client's own division; its prior
    counts: Unknown  # [clients, k]  shares by count, with a uniform prior
    tail: Unknown  # [clients, k]  shares from histograms of margins
    anchored: Unknown  # [clients, k]  counts undone by those of the anchors
    em: Unknown  # [clients, k]  shares of highest likelihood, if the scores were log densities
    errors: Unknown  # [clients, k]  standard errors of tail
    best: Unknown  # [clients]  mean score of the best component; means nothing without a size
    size: Unknown  # [clients]  samples


@register("fedgmi")
@dataclass(frozen=True)
class FedGMI(Algorithm):
    """Divide each client's samples among shared distributions, and train an expert for each.

    Parameters
    ----------
    vae, model
        Density model of a component, and its expert; without an expert nothing needs labels.
    local, local_vae
        Training of experts and of density models.
    n_components, max_components
        Number of shared distributions; None: counted by the moments, up to a bound.
    start, symmetric, n_decoded
        Purest clients by mean codes; or far apart by local VAEs, as printed, perhaps with both
        directions of so many decoded samples averaged; or by the gain of likelihood.
    warm_rounds, warm_cohort, warm_epochs, anchor_epochs
        Averaging of one common VAE first; epochs by which an anchor makes it its own.
    rounds, interval, freeze_after
        Rounds of training; rounds between divisions; when only experts are trained, on parts that
        stay (None: never).
    evidence, label_scale
        Divide by x alone, or by x and the expert's loss on y, nats of x divided by the scale.
    division, least_share
        Parts, or weights; floor of the log prior.
    offset, bins, pure_bins
        Let total counts match the shares by `tail`, those of the moments, or nothing; bins of a
        component's margins, and how many of the clearest are its own.
    shares
        Which estimate is reported: `tail`, `count`, `anchor`, `em`, or `moments`, which rests on
        clients' mean codes alone and stands where samples cannot be divided.
    train_parts
        What clients train; "facts": each as its fact `trains` says, (VAE, expert) as 0 and 1.
    penalty
        Weight of terms against a collapsed posterior.
    prediction
        By the expert of a sample's component, or by all in their shares (mixed).
    restart
        Start again from moments if a partition turns out trivial.
    published
        The method as printed: options left at their default take the paper's values.
    """

    bar: ClassVar[float] = 0.4  # the tiny problem's groups differ in y, and not at all in x
    vae: Model
    model: Model | None = None
    local: LocalSGD = EXPERTS
    local_vae: LocalSGD = AUTOENCODERS
    n_components: Annotated[int, Ge(1)] | None = None
    max_components: Annotated[int, Ge(1), Le(32)] = 8
    start: Literal["moments", "published", "gain"] = "moments"
    symmetric: bool = False
    n_decoded: Annotated[int, Ge(1)] = 64
    warm_rounds: Annotated[int, Ge(0)] = 10
    warm_cohort: Annotated[int, Ge(1)] = 10
    warm_epochs: Annotated[int, Ge(0)] = 2
    anchor_epochs: Annotated[int, Ge(0)] = 5
    rounds: Annotated[int, Ge(1)] | None = 40
    interval: Annotated[int, Ge(1)] = 5
    freeze_after: Annotated[int, Ge(1)] | None = None
    evidence: Literal["auto", "joint", "x"] = "auto"
    label_scale: Annotated[float, Gt(0)] = 10.0
    division: Literal["hard", "soft"] = "hard"
    least_share: Annotated[float, Ge(0), Le(1)] = 1e-3
    offset: Literal["tail", "moments", "none"] = "tail"
    bins: Annotated[int, Ge(2)] = 8
    pure_bins: Annotated[int, Ge(0)] = 2
    shares: Literal["tail", "count", "anchor", "em", "moments"] = "tail"
    train_parts: Literal["both", "vaes", "experts", "facts"] = "both"
    penalty: Annotated[float, Ge(0)] = 0.0
    prediction: Literal["expert", "mixed"] = "expert"
    restart: bool = True
    published: bool = False

    def check(self) -> None:
        if not hasattr(self.vae.training_network, "decode") or isinstance(self.vae.loss, str):
            raise ConfigError(
                f"FedGMI: vae must be a density model. Got {self.vae.title} with loss "
                f"{self.vae.loss!r}; use Model(VAE(784), loss=bernoulli), or [vae] in a run file."
            )
        if self.published:
            for field in fields(self):
                if field.name in PUBLISHED and getattr(self, field.name) == field.default:
                    object.__setattr__(self, field.name, PUBLISHED[field.name])
        if self.start != "moments" and self.n_components is None:
            raise ConfigError(
                f"FedGMI: n_components must be given with start='{self.start}'; only "
                "start='moments' finds it."
            )
        if self.evidence == "joint" and not self.labelled:
            raise ConfigError("FedGMI: evidence='joint' needs a model with cross-entropy.")
        if self.pure_bins >= self.bins:
            raise ConfigError(
                f"FedGMI: pure_bins must be below bins, {self.bins}. Got {self.pure_bins}."
            )

    @property
    def labelled(self) -> bool:
        """Whether experts give the probability of a label."""
        return self.model is not None and self.model.loss == "cross_entropy"

    @property
    def joint(self) -> bool:
        """Whether labels enter the score."""
        return self.labelled and self.evidence != "x"

    @property
    def most(self) -> int:
        """Components there is room for."""
        return self.n_components or self.max_components

    @property
    def latent(self) -> int:
        """Numbers of a code."""
        return int(self.vae.training_network.latent)  # type: ignore[arg-type]

    # server

    def init(self, fed: Federation) -> State:
        if self.n_components is not None and self.n_components > fed.n_clients:
            raise ConfigError(
                f"FedGMI: n_components must be at most the number of clients, {fed.n_clients}. "
                f"Got {self.n_components}."
            )
        expert = {} if self.model is None else self.model.init(fed.key("expert"))
        common = {"vae": self.vae.init(fed.key("vae")), "expert": expert}
        nothing = torch.zeros(0, dtype=torch.float64)
        alone = torch.full((fed.n_clients,), -1.0, dtype=torch.float64)
        return State(
            stage=torch.tensor(WARM if self.warm_rounds else MOMENTS),
            turn=torch.tensor(0),
            common=common,
            vaes={},
            experts={},
            eigenvalues=nothing,
            thresholds=nothing,
            centre=nothing,
            root=nothing,
            corners=nothing,
            restarted=torch.tensor(False),
            anchor=torch.full((fed.n_clients,), -1),
            best=alone,
            size=alone,
            **divisions.nothing_known(fed.n_clients, 0, self.bins),
        )

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        stage = int(state.stage)
        run = (self.warm_up, self.look, self.found, self.train, self.report, self.rest)[stage]
        state, info = run(fed, state)
        about: Info = {"stage": STAGES[stage]}
        if state.vaes:
            about["n_components"] = len(state.offsets)
            about["assignment"] = state.assignment
        return state, {**about, **info}

    def done(self, state: State) -> bool:
        return int(state.stage) == DONE

    def rest(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Nothing is left to do."""
        return state, {}

    def warm_up(self, fed: Federation, state: State) -> tuple[State, Info]:
        """One common VAE by averaging."""
        everyone = fed.everyone()
        cohort = everyone[fed.turns(everyone, "warm") < self.warm_cohort]
        mean = Mean("vae", state.common["vae"], weight="n")
        _, reply = fed.map(self.warm, state.common["vae"], to=cohort, reduce=mean)
        state = state._replace(common={**state.common, "vae": reply["vae"]})
        finite = [reply[name][torch.isfinite(reply[name])] for name in ("nats", "divergence")]
        nats, kl = (float(values.double().mean()) for values in finite)
        last = int(state.turn) + 1 >= self.warm_rounds
        if last and kl < 0.1:
            warnings.warn(
                f"FedGMI: the common VAE's codes say nothing of the samples ({kl:.2g} nats). Train "
                "it longer (warm_rounds), or more gently (local_vae).",
                stacklevel=2,
            )
        return _next(state, MOMENTS if last else WARM), {"score": nats}

    def look(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Mean codes: how many components there are, who is purest, first shares."""
        d, vae = self.latent, state.common["vae"]
        classes = torch.zeros(starts.n_classes(self, state.common))
        means = starts.asked_moments(self, d, len(classes))
        asked = fed.map(self.moments, vae, classes, to=fed.everyone(), reduce=means)
        ids, found = starts.counted(self, fed, *asked)
        k = len(found.anchors)
        unknown = divisions.nothing_known(fed.n_clients, k, self.bins)
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

    def found(self, fed: Federation, state: State) -> tuple[State, Info]:
        """A VAE for every component, from clients that stand for it."""
        if self.start != "moments" and not bool(state.restarted):
            state, apart = starts.pick(self, fed, state)
            return _next(state, ROUNDS), {"distance": apart}
        state, complete = starts.refit(self, fed, state, torch.arange(len(state.offsets)))
        return _next(state, ROUNDS) if complete else state, {}

    def train(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Divide every so often; clients of the cohort train the parts they have."""
        turn = int(state.turn)
        info: Info = {}
        frozen = self.freeze_after is not None and turn >= self.freeze_after
        everyone = fed.everyone()
        if turn % self.interval == 0 and not frozen:
            state, info = self.divide(fed, state, everyone)
            if int(state.stage) != ROUNDS:
                return state, info
        else:
            state, _ = self.place(fed, state, everyone[state.assignment < 0])
        cohort = fed.cohort()
        cohort = cohort[state.assignment[cohort] >= 0]
        if len(cohort):
            which = torch.tensor([self.train_parts != "experts" and not frozen, True])
            which[1] = self.train_parts != "vaes"
            means = [Mean("vaes", state.vaes, weight="n_vae", slots=True)]
            if self.model is not None:
                means.append(Mean("experts", state.experts, weight="n_expert", slots=True))
            given = state.vaes, state.experts, which
            _, reply = fed.map(self.train_experts, *given, to=cohort, reduce=means)
            state = state._replace(vaes=reply["vaes"])
            if self.model is not None:
                state = state._replace(experts=reply["experts"])
        last = self.rounds is not None and turn + 1 >= self.rounds
        return _next(state, REPORT if last else ROUNDS), info

    def report(self, fed: Federation, state: State) -> tuple[State, Info]:
        """One last division, whose shares are reported."""
        state, info = self.divide(fed, state, fed.everyone())
        divisions.warn_of_dispute(info["tail_against_anchor"])
        return _next(state, DONE), info

    def divide(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Info]:
        """Scores, offsets, parts and shares of clients, and whether they mean anything."""
        return self.sound(fed, divisions.divided(self, fed, state, ids))

    def sound(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Start again if a partition is trivial; renew components that are given nothing."""
        state, info, again, barren = divisions.judged(self, state)
        if again:
            nobody = torch.full_like(state.assignment, -1)
            state = state._replace(restarted=torch.tensor(True), assignment=nobody)
            # Without warm rounds the common VAE has never been trained.
            return _next(state, MOMENTS if self.warm_rounds else WARM), info
        return starts.refit(self, fed, state, barren)[0] if len(barren) else state, info

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """Shares of clients not divided yet, and how well each fits."""
        if int(state.stage) >= ROUNDS and len(ids):
            return divisions.placed(self, fed, state, ids)
        unsure = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        fits = torch.ones(len(ids), dtype=torch.bool)  # one model for all as yet
        new = torch.where(state.assignment[ids] < 0, 0, state.assignment[ids])
        state = state._replace(assignment=put(state.assignment, ids, new))
        return state, Evidence(torch.zeros(len(ids), dtype=torch.int64), unsure, unsure, fits)

    # client

    def client_init(self, client: Client) -> Tree:
        n, k = len(client.train.mask), self.most
        samples = {
            "scores": torch.zeros(n, k, dtype=self.vae.dtype),
            "part": torch.full((n,), -1),
        }
        if self.division == "soft":
            samples["weights"] = torch.zeros(n, k, dtype=torch.float64)
        return {"samples": samples, "prior": torch.full((k,), 1 / k, dtype=torch.float64)}

    @task(phase="cluster")
    def warm(self, client: Client, vae: Params) -> dict[str, Tree]:
        return self._fitted(client, vae, self.warm_epochs)

    @task(phase="cluster")
    def fit_vae(self, client: Client, vae: Params) -> dict[str, Tree]:
        return self._fitted(client, vae, self.anchor_epochs)

    def _fitted(self, client: Client, vae: Params, epochs: int) -> dict[str, Tree]:
        local = replace(self.local_vae, epochs=epochs, steps=None)
        vae = local(client, vae, self.nats)
        coded, batch = self.vae.apply(vae, client.train.x), client.train
        nats = batch.mean(self.vae.loss_of(coded, batch))
        apart = batch.mean(divergence(coded))
        return {"vae": vae, "n": batch.size, "nats": nats, "divergence": apart}

    def nats(self, params: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        """What training of a VAE makes small: its score, and terms against collapse."""
        coded = self.vae.apply(params, batch.x)
        losses = self.vae.loss_of(coded, batch)
        if not self.penalty:
            return losses
        return losses + self.penalty * guard_terms(coded, batch.mask, current_mode().clients)

    @task(phase="cluster")
    def codes(self, client: Client, vae: Params) -> dict[str, Tensor]:
        batch = client.train
        code = self.vae.apply(vae, batch.x).mean.double()
        return {"mean": (code * batch.share()[:, None]).sum(0), "n": batch.size}

    @task(phase="cluster")
    def moments(self, client: Client, vae: Params, classes: Tensor) -> dict[str, Tensor]:
        code = self.vae.apply(vae, client.train.x).mean.double()  # [n, d]
        sent = starts.moments(code, client.train)
        if not self.labelled:
            return sent
        return {**sent, **starts.class_moments(code, client.train, len(classes))}

    @task(phase="cluster")
    def gain(self, client: Client, bank: Params, sets: Tensor) -> dict[str, Tensor]:
        return {"gain": starts.gain(self, client, bank, sets)}

    @task(phase="cluster")
    def score(self, client: Client, vaes: Params, experts: Params, scale: Tensor) -> Reply:
        batch = client.train
        scores = self.nats_of(vaes, batch) / scale.to(self.vae.dtype)
        if experts:
            assert self.model is not None
            wrong = [self.model.losses(row(experts, j), batch) for j in range(scores.shape[1])]
            scores = scores + torch.stack(wrong, 1).to(scores.dtype)
        k = scores.shape[1]
        best = batch.mean(scores.min(1).values.double())
        fill = client.state["samples"]["scores"][:, k:]
        samples = {**client.state["samples"], "scores": torch.cat([scores, fill], 1)}
        return Reply({"best": best, "n": batch.size}, keep={"samples": samples})

    def nats_of(self, vaes: Params, batch: Batch) -> Tensor:
        """Score of every sample under every VAE: [n, k]."""
        k = len(next(iter(vaes.values())))
        return torch.stack([self.vae.losses(row(vaes, j), batch) for j in range(k)], 1)

    @task(phase="cluster")
    def survey(self, client: Client, offsets: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        return divisions.surveyed(client, offsets, cuts)

    @task(phase="cluster")
    def settle(self, client: Client, offsets: Tensor, prior: Tensor) -> Reply:
        return divisions.settled(self, client, offsets, prior)

    @task
    def train_experts(
        self, client: Client, vaes: Params, experts: Params, which: Tensor
    ) -> dict[str, Tree]:
        """Both models of every component on one's part of it; parts side by side."""
        k, batch = len(next(iter(vaes.values()))), client.train
        if self.train_parts == "facts":
            which = which & client.facts["trains"].bool()
        weights = divisions.parts(self, client, k)  # [k, n]

        def one(vae: Params, expert: Params, j: Tensor, weight: Tensor) -> tuple[Tree, ...]:
            own = batch.where(weight > 1e-3)
            own = own._replace(weight=own.weight * weight.to(own.weight.dtype))
            size = (weight * own.mask).sum()
            vae = self.local_vae(client, vae, self.nats, on=own.where(which[0]), salt=j)
            if self.model is not None:
                on = own.where(which[1])
                expert = self.local(client, expert, self.model.losses, on=on, salt=j)
            return vae, expert, size * which[0], size * which[1]

        trained = torch.vmap(one)(vaes, experts, torch.arange(k), weights)
        return dict(zip(("vaes", "experts", "n_vae", "n_expert"), trained, strict=True))

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        if int(state.stage) < ROUNDS:  # one model for all as yet
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
        chances = self.responsibilities(personal, x)
        k = chances.shape[1]
        if self.model is None:
            outputs = [self.vae.apply(row(personal["vaes"], j), x).output for j in range(k)]
            outputs = [pixels(output, self.vae.loss) for output in outputs]
        else:
            outputs = [self.model.apply(row(personal["experts"], j), x) for j in range(k)]
        every = torch.stack(outputs, 1)  # [n, k, ...]
        shape = (*chances.shape, *(1,) * (every.ndim - 2))
        if self.prediction == "mixed":
            cold = torch.softmax(chances / (10.0 / personal["scale"]), 1)  # in tens of nats
            cold = cold.reshape(shape).to(every.dtype)
            if self.labelled:
                return (every.softmax(2) * cold).sum(1).clamp(min=1e-12).log()
            return (every * cold).sum(1)
        chosen = chances.argmax(1)[:, None] == torch.arange(k)
        return torch.where(chosen.reshape(shape), every, torch.zeros_like(every)).sum(1)

    def responsibilities(self, personal: Tree, x: Any) -> Tensor:
        """Minus the cost of each component for each sample, by x alone: [n, k]."""
        scores = self.nats_of(personal["vaes"], as_batch(x)).double() / personal["scale"]
        return -mix.penalties(scores, personal["offsets"], personal["prior"], self.least_share)

    def mixture(self, state: State, ids: Ids) -> Mixture | None:
        return divisions.estimates(self, state, ids) if state.vaes else None

    @classmethod
    def example(cls, problem: Any) -> "FedGMI":
        shape = tuple(problem.data.sample_shape)

        def net() -> VAE:
            return VAE(shape, latent=2, hidden=(8,), likelihood="gaussian")

        work = LocalSGD(0.01, epochs=problem.local.epochs, batch_size=8, optimizer="adam")
        epochs = problem.local.epochs or 0
        return cls(
            Model(net, gaussian, dtype=problem.dtype),
            problem.model,
            problem.local,
            work,
            n_components=problem.n_groups,
            warm_rounds=0,
            warm_epochs=epochs,
            anchor_epochs=epochs,
            interval=2,
        )


def _next(state: State, stage: int) -> State:
    """The state one round on, in the same stage or at the beginning of another."""
    turn = state.turn + 1 if int(state.stage) == stage else torch.tensor(0)
    return state._replace(stage=torch.tensor(stage), turn=turn)
