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

from coterie.clustering import proportions as mix
from coterie.clustering.evidence import REFUSAL
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, Mixture, PerClient, register
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation, each
from coterie.core.layers import current_mode
from coterie.core.model import Model
from coterie.core.random import normal, permutation
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, row, take, tree_map
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
        Which estimate is reported: `tail`, `count`, `anchor`, `em`.
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
    shares: Literal["tail", "count", "anchor", "em"] = "tail"
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
        names = torch.full((fed.n_clients,), -1)
        rows = nothing.expand(fed.n_clients, 0)
        alone = torch.full((fed.n_clients,), -1.0, dtype=torch.float64)
        return State(
            stage=torch.tensor(WARM if self.warm_rounds else MOMENTS),
            turn=torch.tensor(0),
            common=common,
            vaes={},
            experts={},
            offsets=nothing,
            scale=torch.ones((), dtype=torch.float64),
            labels=torch.tensor(False),
            cuts=nothing,
            profiles=nothing,
            eigenvalues=nothing,
            thresholds=nothing,
            centre=nothing,
            root=nothing,
            corners=nothing,
            empty=torch.zeros(0, dtype=torch.int64),
            restarted=torch.tensor(False),
            assignment=names,
            anchor=names,
            first=rows,
            own=rows,
            counts=rows,
            tail=rows,
            anchored=rows,
            em=rows,
            errors=rows,
            best=alone,
            size=alone,
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
        nats, kl = (_mean_of(reply[name]) for name in ("nats", "divergence"))
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
        d, vae = self._latent, state.common["vae"]
        classes = torch.zeros(self._n_classes(state.common))
        means = [Mean("scatter", torch.zeros(1, d, d).double(), weight="n", slots=True)]
        if self.labelled:
            around = torch.zeros(len(classes), d, d).double()
            means.append(Mean("class_scatter", around, weight="counts", slots=True))
        ids, reply = fed.map(self.moments, vae, classes, to=fed.everyone(), reduce=means)
        fine = _finite(reply["mean"], "moments")
        ids, n = ids[fine], reply["n"][fine].double()
        mean, within = reply["mean"][fine], reply["scatter"][0] * n.sum() / (n.sum() - len(n))
        k, inside = self.n_components, None
        if self.labelled:
            counts, sums = reply["counts"][fine].double(), reply["sums"][fine]
            if mix.labels_differ(counts):
                if float(n.mean()) / max(len(classes), 1) >= 20:
                    spare = counts.sum(0) / (counts.sum(0) - (counts > 0).sum(0)).clamp(min=1)
                    inner = reply["class_scatter"] * spare[:, None, None]
                    inside = mix.per_class(sums, counts, inner)
                    k = k or min(int(inside.median()), self.max_components)
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
        found = mix.simplex(mean, n, within, k, self.max_components)
        k = len(found.anchors)
        self._said(fed, ids, found, k, inside)
        unknown = torch.full((fed.n_clients, k), -1.0, dtype=torch.float64)
        nobody = torch.full((fed.n_clients,), -1)
        state = state._replace(
            vaes=tree_map(lambda leaf: leaf.expand(k, *leaf.shape).clone(), vae),
            experts={} if self.model is None else self.model.init_many(fed.key("experts"), k),
            offsets=torch.zeros(k, dtype=torch.float64),
            scale=torch.ones((), dtype=torch.float64),
            labels=torch.tensor(False),
            cuts=torch.zeros(k, self.bins - 1, dtype=torch.float64),
            profiles=torch.zeros(k, k * self.bins, dtype=torch.float64),
            eigenvalues=found.eigenvalues,
            thresholds=found.thresholds,
            centre=found.centre,
            root=found.root,
            corners=found.corners,
            empty=torch.zeros(k, dtype=torch.int64),
            assignment=nobody,
            anchor=put(nobody, ids[found.anchors], torch.arange(k)),
            first=put(unknown, ids, found.shares),
            own=unknown,
            counts=unknown,
            tail=unknown,
            anchored=unknown,
            em=unknown,
            errors=unknown,
        )
        shown = " ".join(f"{value:.3g}" for value in found.eigenvalues[: k + 2].tolist())
        above = float(found.thresholds[0]) if len(found.thresholds) else 0.0
        return _next(state, ANCHORS), {"eigenvalues": shown, "threshold": above}

    def _said(
        self, fed: Federation, ids: Ids, found: mix.Simplex, k: int, inside: Tensor | None
    ) -> None:
        """Warn of what the moments show and the user may not expect."""
        for client in ids[found.strange].tolist():
            warnings.warn(
                f"FedGMI: client '{fed.names[client]}' has data unlike all others; it is left out "
                "of the number of components.",
                stacklevel=3,
            )
        counted = found.counted if inside is None else int(inside.median())
        if self.n_components is not None and counted < k:
            warnings.warn(
                f"FedGMI: n_components is {k}, but clients differ in {counted - 1} directions, "
                f"which speaks for {counted}. Leave n_components out to use what is found.",
                stacklevel=3,
            )

    def found(self, fed: Federation, state: State) -> tuple[State, Info]:
        """A VAE for every component, from clients that stand for it."""
        if self.start != "moments" and not bool(state.restarted):
            return self.picked(fed, state)
        k = len(state.offsets)
        state = self._refit(fed, state, torch.arange(k))
        return state, {}

    def _refit(self, fed: Federation, state: State, components: Tensor) -> State:
        """Autoencoders of some components anew from their anchors; the silent are replaced."""
        at = torch.stack([(state.anchor == j).int().argmax() for j in components.tolist()])
        missing = ~torch.isin(components, state.anchor)
        for place in torch.nonzero(missing).flatten().tolist():  # the purest not asked yet
            free = state.anchor == -1
            if not bool(free.any()):
                state = state._replace(anchor=torch.where(state.anchor == -2, -1, state.anchor))
                free = state.anchor == -1
            purest = torch.where(free, state.first[:, components[place]], -torch.inf)
            at[place] = purest.argmax()
            state = state._replace(
                anchor=put(state.anchor, at[place : place + 1], components[place])
            )
        order = at.argsort()
        at, components = at[order], components[order]
        mean = Mean("vae", state.vaes, by=components)
        ids, reply = fed.map(self.fit_vae, state.common["vae"], to=at, reduce=mean, at_least=0)
        fine = torch.isfinite(reply["nats"]) if len(ids) else torch.zeros(0, dtype=torch.bool)
        silent = at[~torch.isin(at, ids[fine])]
        state = state._replace(anchor=put(state.anchor, silent, -2))
        if len(ids):
            state = state._replace(vaes=reply["vae"])
        return state if len(silent) else _next(state, ROUNDS)

    def picked(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Local VAEs of all clients, and those far apart (published), or that gain most."""
        k = len(state.offsets)
        ids, reply = fed.map(self.fit_vae, state.common["vae"], to=fed.everyone(), at_least=k)
        fine = _finite(reply["nats"], "local VAEs")
        ids, bank = ids[fine], tree_map(lambda leaf: leaf[fine], reply["vae"])
        # By name, so that which client comes first does not matter.
        order = fed.turns(ids, "pick").argsort()
        ids, bank = ids[order], take(bank, order)
        distance = self.distances(bank, fed.key("decoded"))
        if self.start == "published":
            chosen = mix.farthest(distance, k, self.symmetric)
        else:
            some = mix.farthest(distance, min(4 * k, len(ids)), symmetric=True)
            some = sorted(set(some))
            gained = self._gained(fed, take(bank, torch.tensor(some)), k)
            chosen = [some[j] for j in gained]
        self._judge_picks(state, ids[chosen])
        nobody = torch.full_like(state.anchor, -1)
        state = state._replace(
            vaes=take(bank, torch.tensor(chosen)),
            anchor=put(nobody, ids[chosen], torch.arange(k)),
        )
        return _next(state, ROUNDS), {"distance": float(distance.max())}

    def distances(self, bank: Params, key: Tensor) -> Tensor:
        """How much worse VAE j scores what VAE i decodes than VAE i itself does: [m, m], nats."""
        m = len(next(iter(bank.values())))
        code = normal(key, (self.n_decoded, self._latent), self.vae.dtype)  # the same for all
        with torch.no_grad():
            shown = [
                pixels(self.vae.apply(row(bank, i), {"code": code}), self.vae.loss)
                for i in range(m)
            ]
            batch = _as_batch(torch.cat(shown))
            scores = [
                self.vae.losses(row(bank, j), batch).double().reshape(m, -1).mean(1)
                for j in range(m)
            ]
        table = torch.stack(scores, 1)  # [i, j]
        return table - table.diagonal()[:, None]

    def _gained(self, fed: Federation, bank: Params, k: int) -> list[int]:
        """The candidates whose mixtures explain the clients' samples best: greedy, then swaps."""
        c = len(next(iter(bank.values())))

        def value(sets: list[list[int]]) -> Tensor:
            _ids, reply = fed.map(self.gain, bank, torch.tensor(sets), to=fed.everyone())
            fine = _finite(reply["gain"], "gains")
            return reply["gain"][fine].mean(0)

        chosen: list[int] = []
        while len(chosen) < k:
            others = [j for j in range(c) if j not in chosen]
            best = int(value([[*chosen, j] for j in others]).argmax())
            chosen.append(others[best])
        now = float(value([chosen])[0])
        for _ in range(2 * k):
            swaps = [
                [*chosen[:i], j, *chosen[i + 1 :]]
                for i in range(k)
                for j in range(c)
                if j not in chosen
            ]
            if not swaps:
                break
            values = value(swaps)
            if float(values.max()) <= now + 1e-9:
                break
            now, chosen = float(values.max()), swaps[int(values.argmax())]
        return chosen

    def _judge_picks(self, state: State, ids: Ids) -> None:
        """Warn if the clients picked are mixtures, going by the moments."""
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
        return _next(state, DONE), info

    # server: division

    def divide(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Info]:
        """Scores, offsets, parts and shares of all clients."""
        first = bool((state.assignment < 0).all())
        # Experts are random before the first parts, so labels say nothing then.
        joint = self.joint and not first
        ids, state = self._score(fed, state, ids, joint)
        k = len(state.offsets)
        reply = self._survey(fed, ids, state)
        state = state._replace(cuts=self._cuts(reply))
        if self.offset != "none" and k > 1:
            known = state.first[state.first[:, 0] >= 0]
            corners = self.start == "moments" or bool(state.restarted)
            if self.offset == "moments" or (first and corners):
                state, reply = self._balance(fed, ids, state, known.mean(0), reply)
            for _ in range(2 if self.offset == "tail" else 0):
                state = state._replace(cuts=self._cuts(reply))
                reply = self._survey(fed, ids, state)
                tail, _ = mix.tail_shares(reply["histogram"], self.pure_bins)
                target = (reply["n"][:, None] * tail).sum(0) / reply["n"].sum()
                state, reply = self._balance(fed, ids, state, target, reply)
        state = state._replace(cuts=self._cuts(reply))
        reply = self._survey(fed, ids, state)
        tail, profiles = mix.tail_shares(reply["histogram"], self.pure_bins)
        state = self._noted(state._replace(profiles=profiles), reply, tail)
        state = self._settle(fed, state, ids)
        return self._sound(fed, state)

    def _score(self, fed: Federation, state: State, ids: Ids, joint: bool) -> tuple[Ids, State]:
        """Clients score their samples and keep the scores; who can be divided."""
        scale = torch.tensor(self.label_scale if joint else 1.0, dtype=torch.float64)
        given = state.vaes, state.experts if joint else {}, scale
        ids, reply = fed.map(self.score, *given, to=ids)
        fine = _finite(reply["best"], "scores")
        ids = ids[fine]
        best, size = put(state.best, ids, reply["best"][fine]), reply["n"][fine].double()
        state = state._replace(scale=scale, labels=torch.tensor(joint))
        return ids, state._replace(best=best, size=put(state.size, ids, size))

    def _survey(self, fed: Federation, ids: Ids, state: State) -> dict[str, Tensor]:
        heard, reply = fed.map(self.survey, state.offsets, state.cuts, to=ids)
        fine = torch.isfinite(reply["histogram"]).all(2).all(1)
        return {**{name: leaf[fine] for name, leaf in reply.items()}, "ids": heard[fine]}

    def _cuts(self, reply: dict[str, Tensor]) -> Tensor:
        """Margins that cut every component's samples into equal parts: [k, bins - 1]."""
        at = torch.arange(1, self.bins) / self.bins
        n, margins = reply["histogram"].sum(2), reply["margins"]  # [m, k], [m, k, q]
        own = [mix.pooled_quantiles(margins[:, j], n[:, j], at) for j in range(n.shape[1])]
        return torch.stack(own).clamp(max=1e30)

    def _balance(
        self,
        fed: Federation,
        ids: Ids,
        state: State,
        target: Tensor,
        reply: dict[str, Tensor],
    ) -> tuple[State, dict[str, Tensor]]:
        """Offsets by which total counts match a target, one component at a time."""
        for _ in range(4 * len(target)):
            total = reply["histogram"].sum((0, 2))
            total = total / total.sum().clamp(min=1)
            if float((total - target).abs().max()) <= 0.003:
                break
            offsets = mix.moved(state.offsets, reply["room"], reply["n"], total, target)
            state = state._replace(offsets=offsets)
            reply = self._survey(fed, ids, state)
        return state, reply

    def _noted(self, state: State, reply: dict[str, Tensor], tail: Tensor) -> State:
        """The state with shares read off histograms."""
        ids, histogram = reply["ids"], reply["histogram"]
        counts = histogram.sum(2) / reply["n"][:, None].clamp(min=1)
        all_counts = put(state.counts, ids, counts)
        k = counts.shape[1]
        confusion = torch.eye(k, dtype=torch.float64)
        for j in range(k):
            at = torch.nonzero(state.anchor == j).flatten()
            if len(at) and float(all_counts[at[0], 0]) >= 0:
                confusion[j] = all_counts[at[0]]
        errors = mix.share_errors(tail, state.profiles, reply["n"])
        return state._replace(
            counts=all_counts,
            tail=put(state.tail, ids, tail),
            errors=put(state.errors, ids, errors),
            anchored=put(state.anchored, ids, mix.unconfused(counts, confusion)),
        )

    def _settle(self, fed: Federation, state: State, ids: Ids) -> State:
        """Clients divide their samples by score, offset and their own prior."""
        prior = each(state.own[ids])
        ids, reply = fed.map(self.settle, state.offsets, prior, to=ids)
        fine = torch.isfinite(reply["share"]).all(1)
        ids, share = ids[fine], reply["share"][fine]
        return state._replace(
            own=put(state.own, ids, share),
            em=put(state.em, ids, reply["em"][fine]),
            assignment=put(state.assignment, ids, share.argmax(1)),
        )

    def _sound(self, fed: Federation, state: State) -> tuple[State, Info]:
        """Warn of partitions that mean nothing, of empty components, of shares in dispute."""
        known = state.own[:, 0] >= 0
        own, size, k = state.own[known], state.size[known], len(state.offsets)
        total = (size[:, None] * own).sum(0) / size.sum()
        varies = mix.dispersion(own, size)
        tail, anchored = state.tail[known], state.anchored[known]
        apart = float((tail - anchored).abs().mean())
        info: Info = {
            "largest_share": float(total.max()),
            "dispersion": float(varies.max()),
            "tail_against_anchor": apart,
        }
        if k == 1:
            return state, info
        empty = torch.where(total == 0, state.empty + 1, 0)
        state = state._replace(empty=empty)
        differ = float(state.eigenvalues[0]) if len(state.eigenvalues) else 0.0
        alike = bool((varies < differ / 4).all()) and differ > float(state.thresholds[0])
        if float(total.max()) > 0.99 or alike:
            why = (
                f"one component takes {float(total.max()):.1%} of all samples"
                if float(total.max()) > 0.99
                else f"shares hardly vary between clients (dispersion {float(varies.max()):.1f}, "
                f"where clients differ by {differ:.1f})"
            )
            again = self.restart and self.start != "moments" and not bool(state.restarted)
            then = "Starting again from moments." if again else "Use start='moments'."
            if self.start == "moments" or bool(state.restarted):
                then = "Components may look alike, or n_components is wrong."
            warnings.warn(f"FedGMI: the partition is trivial: {why}. {then}", stacklevel=3)
            if again:
                nobody = torch.full_like(state.assignment, -1)
                state = state._replace(restarted=torch.tensor(True), assignment=nobody)
                return _next(state, WARM if self._cold else MOMENTS), info
        elif bool((empty > 0).any()):
            names = torch.nonzero(empty > 0).flatten()
            warnings.warn(
                f"FedGMI: component {names.tolist()} got no sample of anybody.", stacklevel=3
            )
            if bool((empty >= 2).any()):
                turn = state.turn
                state = self._refit(fed, state, torch.nonzero(empty >= 2).flatten())
                state = state._replace(stage=torch.tensor(ROUNDS), turn=turn)
        if apart > 0.05:
            warnings.warn(
                f"FedGMI: shares by tail and by anchor differ by {apart:.2f} on average: they are "
                "bracketed, not known. Quote both.",
                stacklevel=3,
            )
        return state, info

    @property
    def _cold(self) -> bool:
        """Whether the common VAE has never been trained."""
        return not self.warm_rounds

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        """Shares of clients not divided yet, and how well each fits."""
        m, nan = len(ids), torch.nan
        group = torch.zeros(m, dtype=torch.int64)
        unsure = torch.full((m,), nan, dtype=torch.float64)
        fits = torch.ones(m, dtype=torch.bool)
        if int(state.stage) < ROUNDS or not m:  # one model for all as yet
            new = torch.where(state.assignment[ids] < 0, 0, state.assignment[ids])
            state = state._replace(assignment=put(state.assignment, ids, new))
            return state, Evidence(group, unsure, unsure, fits)
        given = state.vaes, state.experts if bool(state.labels) else {}, state.scale
        heard, reply = fed.map(self.score, *given, to=ids, at_least=0)
        known = state.assignment >= 0
        if not len(heard):
            return state, Evidence(state.assignment[ids].clamp(min=0), unsure, unsure, fits)
        before, members = state, torch.nonzero(known & (state.size > 0)).flatten()
        new = heard[~known[heard] & torch.isfinite(reply["best"])]
        strange = self._strangeness(fed, state, heard, reply["best"], members)
        if len(new):
            seen = self._survey(fed, new, state)
            flat = seen["histogram"].flatten(1)
            even = torch.full((len(flat), len(state.offsets)), 1 / len(state.offsets)).double()
            tail, _ = mix.mixture_em(flat, even, state.profiles.clamp(min=1e-12), 200, fixed=True)
            state = self._noted(state, seen, tail)
            state = self._settle(fed, state, new)
            fresh = put(state.best, heard, reply["best"])
            state = state._replace(best=torch.where(known, before.best, fresh))
            size = put(state.size, heard, reply["n"].double())
            state = state._replace(size=torch.where(known, before.size, size))
        group = state.assignment[ids].clamp(min=0)
        two = state.own[ids].topk(min(2, state.own.shape[1]), dim=1).values
        margin = (two[:, 0] - (two[:, 1] if two.shape[1] > 1 else 0.0)).clamp(0, 1)
        answered = torch.isin(ids, heard)
        score = unsure.masked_scatter(answered, strange)
        return state, Evidence(group, margin, score, ~(score > REFUSAL))

    def _strangeness(
        self, fed: Federation, state: State, ids: Ids, best: Tensor, members: Ids
    ) -> Tensor:
        """How unlike the members clients are, 1 being the strangest of 100 members."""
        if len(members) < 4:
            return torch.full((len(ids),), torch.nan, dtype=torch.float64)
        usual = state.best[members]
        centre, far = usual.median(), usual.quantile(0.99)
        by_score = (best.double() - centre) / (far - centre).clamp(min=1e-6 + 1e-3 * centre.abs())
        heard, reply = fed.map(self.codes, state.common["vae"], to=ids, at_least=0)
        if not len(state.root) or not state.root.shape[1] or not len(heard):
            return by_score
        points = (reply["mean"] - state.centre) @ state.root
        units = mix.beyond(points, state.corners) * reply["n"].double().sqrt()
        # Outside the simplex by three standard deviations is where a client is refused.
        by_code = torch.zeros_like(by_score).masked_scatter(
            torch.isin(ids, heard), units / 3 * REFUSAL
        )
        return torch.maximum(by_score, by_code)

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
        batch, n = client.train, client.train.size
        code = self.vae.apply(vae, batch.x).mean.double()  # [n, d]
        share = batch.share()
        mean = (code * share[:, None]).sum(0)
        apart = code - mean
        scatter = torch.einsum("n,nd,ne->de", share, apart, apart)[None]
        sent = {"mean": mean, "n": n, "scatter": scatter}
        if not self.labelled:
            return sent
        member = batch.y.long()[:, None] == torch.arange(len(classes), device=code.device)
        member = (member & batch.mask[:, None]).double()  # [n, c]
        counts, sums = member.sum(0), member.T @ code
        means = sums / counts.clamp(min=1)[:, None]
        apart = (code - member @ means) * batch.mask[:, None]
        inner = torch.einsum("nc,nd,ne->cde", member, apart, apart)
        inner = inner / counts.clamp(min=1)[:, None, None]
        return {**sent, "counts": counts, "sums": sums, "class_scatter": inner}

    @task(phase="cluster")
    def gain(self, client: Client, bank: Params, sets: Tensor) -> dict[str, Tensor]:
        order = permutation(client.key, client.train.mask)[:40]
        some = client.train.rows(order, torch.ones_like(order, dtype=torch.bool))
        scores = self._nats_of(bank, some).double()  # [40, c]
        likely = (scores.min(1, keepdim=True).values - scores).exp()
        picked = torch.stack([likely.index_select(1, one) for one in sets])  # [s, 40, k]
        shares = torch.full((len(sets), 1, sets.shape[1]), 1 / sets.shape[1]).double()
        weight = some.share()[:, None]
        for _ in range(30):
            joint = picked * shares
            new = joint / joint.sum(2, keepdim=True).clamp(min=1e-300)
            shares = (new * weight).sum(1, keepdim=True)
        total = (picked * shares).sum(2).clamp(min=1e-300).log() - scores.min(1).values
        return {"gain": (total * some.share()).sum(1)}

    @task(phase="cluster")
    def score(self, client: Client, vaes: Params, experts: Params, scale: Tensor) -> Reply:
        batch = client.train
        scores = self._nats_of(vaes, batch) / scale.to(self.vae.dtype)
        if experts:
            assert self.model is not None
            wrong = [self.model.losses(row(experts, j), batch) for j in range(scores.shape[1])]
            scores = scores + torch.stack(wrong, 1).to(scores.dtype)
        k = scores.shape[1]
        best = batch.mean(scores.min(1).values.double())
        fill = client.state["samples"]["scores"][:, k:]
        samples = {**client.state["samples"], "scores": torch.cat([scores, fill], 1)}
        return Reply({"best": best, "n": batch.size}, keep={"samples": samples})

    def _nats_of(self, vaes: Params, batch: Batch) -> Tensor:
        """Score of every sample under every VAE: [n, k]."""
        k = len(next(iter(vaes.values())))
        return torch.stack([self.vae.losses(row(vaes, j), batch) for j in range(k)], 1)

    @task(phase="cluster")
    def survey(self, client: Client, offsets: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        """How the samples would be divided, and how far each offset could move."""
        k, real = len(offsets), client.train.mask
        scores = client.state["samples"]["scores"][:, :k].double() + offsets
        part, margin = mix.divided(scores)
        room = mix.pushes(scores)
        return {
            "n": client.train.size,
            "histogram": mix.histogram(scores, real, cuts),
            "margins": torch.stack(
                [mix.quantiles(margin, real & (part == j), 32) for j in range(k)]
            ),
            "room": torch.stack([mix.quantiles(room[:, j], real, 64) for j in range(k)]),
        }

    @task(phase="cluster")
    def settle(self, client: Client, offsets: Tensor, prior: Tensor) -> Reply:
        """Parts by score, offset and prior: the client's shares, or from a uniform one."""
        k, batch = len(offsets), client.train
        scores = client.state["samples"]["scores"][:, :k].double()
        known = prior[0] >= 0
        share = torch.where(known, prior, 1 / k)
        for _ in range(3):  # a prior that is known stays as it is
            cost = mix.penalties(scores, offsets, share, self.least_share)
            if self.division == "soft":
                weights = torch.softmax(-cost, 1)
            else:
                weights = (cost.argmin(1)[:, None] == torch.arange(k)).double()
            found = (weights * batch.share()[:, None]).sum(0)
            share = torch.where(known, prior, found)
        samples = {**client.state["samples"], "part": cost.argmin(1)}
        if self.division == "soft":
            room = client.state["samples"]["weights"][:, k:]
            samples["weights"] = torch.cat([weights, room], 1)
        own = torch.cat([found, client.state["prior"][k:]])
        em = mix.em_shares(scores + offsets, batch.mask)
        return Reply({"share": found, "em": em}, keep={"samples": samples, "prior": own})

    @task
    def train_experts(
        self, client: Client, vaes: Params, experts: Params, which: Tensor
    ) -> dict[str, Tree]:
        """Both models of every component on one's part of it; parts side by side."""
        k, batch = len(next(iter(vaes.values()))), client.train
        if self.train_parts == "facts":
            which = which & client.facts["trains"].bool()
        if self.division == "soft":
            weights = client.state["samples"]["weights"][:, :k].T  # [k, n]
        else:
            weights = (client.state["samples"]["part"] == torch.arange(k)[:, None]).double()

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
        scores = self._nats_of(personal["vaes"], _as_batch(x)).double() / personal["scale"]
        return -mix.penalties(scores, personal["offsets"], personal["prior"], self.least_share)

    def mixture(self, state: State, ids: Ids) -> Mixture | None:
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
        errors = _known(state.errors[ids])
        n = state.size[ids][:, None].clamp(min=1)
        if self.shares != "tail":  # of a share by count, as far as chance goes
            share = known[self.shares]
            errors = (share * (1 - share) / n).sqrt()
        evidence = {
            "n_components": len(state.offsets),
            "eigenvalues": state.eigenvalues.tolist(),
            "thresholds": state.thresholds.tolist(),
            "estimate": self.shares,
            "tail_against_anchor": float((known["tail"] - known["anchor"]).abs().nanmean()),
        }
        return Mixture(known[self.shares], errors, known, evidence)

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

    # small things

    @property
    def _latent(self) -> int:
        return int(self.vae.training_network.latent)  # type: ignore[arg-type]

    def _n_classes(self, common: dict[str, Params]) -> int:
        """Outputs of an expert, found on a decoded sample; 0 without labels."""
        if self.model is None or not self.labelled:
            return 0
        code = torch.zeros(1, self._latent, dtype=self.vae.dtype)
        sample = self.vae.apply(common["vae"], {"code": code})
        try:
            return int(self.model.apply(common["expert"], sample).shape[1])
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"FedGMI: samples of the VAE must fit the expert {self.model.title} "
                f"({str(error).splitlines()[0]}). Give the VAE the shape of a sample, such as "
                "VAE((1, 28, 28))."
            ) from error


def _next(state: State, stage: int) -> State:
    """The state one round on, in the same stage or at the beginning of another."""
    turn = state.turn + 1 if int(state.stage) == stage else torch.tensor(0)
    return state._replace(stage=torch.tensor(stage), turn=turn)


def _finite(values: Tensor, what: str) -> Tensor:
    """Which replies are numbers; warns of the others."""
    fine = torch.isfinite(values.reshape(len(values), -1).sum(1))
    if not bool(fine.all()):
        warnings.warn(
            f"FedGMI: {int((~fine).sum())} replies with {what} were not finite and were left out.",
            stacklevel=3,
        )
    return fine


def _mean_of(values: Tensor) -> float:
    return float(values[torch.isfinite(values)].double().mean())


def _known(values: Tensor) -> Tensor:
    return torch.where(values < 0, torch.nan, values)


def _as_batch(x: Any) -> Batch:
    n = len(x)
    ones = torch.ones(n, device=x.device)
    return Batch(x, torch.zeros(n, device=x.device), ones.bool(), ones)
