"""FedGMI: shared density models divide every client's samples among shared distributions.

A client's data are a mixture of a few distributions that all clients share. Each distribution has a
variational autoencoder and, with labels, an expert classifier. Every client gives each of its
samples to the autoencoder that explains it best, times the client's own share of it, and trains
both models on the parts; the server averages part by part. The result is a component for every
sample and shares for every client. `blend` is our own method that grew out of this one.

References: Hou, Shi, Fan, Letaief: FedGMI: generative model-driven federated learning for
probabilistic mixture inference, 2026, arXiv 2605.08760; Algorithm 1 (rounds), Algorithm 2
(Stable-Initialize), eq. 5 to 11.
Departures: with one component, for which Algorithm 2 has no farthest pair, the autoencoder nearest
to all others is taken. A client whose part of a component is empty has no weight in its mean, and a
component that no client trains stays as it is, where eq. 11 would divide by zero.
Notes: where the paper leaves something open, it is read like this.

- Scores (eq. 5 to 7) are sums over pixels and latents in nats, at the posterior mean, of x alone.
- Eq. 8 and 9 are evaluated as logarithms, which have the same maximum and do not underflow.
- Eq. 9 has no floor: a component that has lost all samples of a client never gets one back from it.
  Assumption 5 allows a smoother, but neither eq. 9 nor Algorithm 1 has one.
- Local autoencoders start from common weights.
- Eq. 10 uses the same codes for all pairs and takes decoder means as samples. Algorithm 2 reads the
  distance from the candidate to those chosen. Ties go to the lowest index.
- The terms against collapse are those of the note that the paper cites, with a weight of 0.1.
- A client that joins later divides its samples with a uniform prior.
- The paper prints neither tau nor B nor any setting of local training; these defaults are ours.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms import common_vae as shared
from coterie.algorithms.components import evidence_of, note_shares, report_counts
from coterie.algorithms.finite import find_finite
from coterie.core.algorithm import (
    Algorithm,
    ComponentShares,
    Evidence,
    Fill,
    Info,
    PerClient,
    register,
)
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.errors import FederationError
from coterie.core.federation import Federation, each
from coterie.core.layers import current_mode
from coterie.core.model import Model
from coterie.core.random import normal
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, n_rows, row, take, tree_map
from coterie.models.vae import guard_terms, pixels


class State(NamedTuple):
    turn: Tensor  # rounds so far, t
    vaes: Params  # [k, ...]  phi; before the first round k copies of what local VAEs start from
    experts: Params  # [k, ...]  G
    shares: Annotated[Tensor, Fill(-1)]  # [clients, k]  alpha; -1: not divided yet
    size: Annotated[Tensor, Fill(0)]  # [clients]  samples, |D|
    assignment: PerClient  # [clients]  component of the largest share, -1: not divided yet


@register("fedgmi")
@dataclass(frozen=True)
class FedGMI(Algorithm):
    """Divide each client's samples among shared distributions, and train an expert for each.

    Parameters
    ----------
    vae
        Density model of a component, phi.
    n_components
        Number of shared distributions, M in the paper.
    model
        Expert of a component, G. None: only the components are found, and nothing needs labels.
    local
        Training of an expert on one part.
    local_vae
        Training of an autoencoder on one part.
    interval
        Rounds between two divisions, tau.
    start_epochs
        Epochs by which each client trains its own autoencoder for Stable-Initialize.
    n_decoded
        Number of samples decoded for eq. 10, B.
    penalty
        Weight of the terms against a collapsed posterior in the training of autoencoders.
    train_parts
        "both": every client trains autoencoders and experts. "facts": each client trains what its
        fact `trains` says, a pair of 0 and 1 for autoencoders and experts.
    """

    bar: ClassVar[float] = 0.4  # the tiny problem's groups differ in y, and not at all in x
    vae: Model
    n_components: Annotated[int, Ge(1)]
    model: Model | None = None
    local: LocalSGD = shared.EXPERTS
    local_vae: LocalSGD = shared.AUTOENCODERS
    interval: Annotated[int, Ge(1)] = 5
    start_epochs: Annotated[int, Ge(0)] = 30
    n_decoded: Annotated[int, Ge(1)] = 512
    penalty: Annotated[float, Ge(0)] = 0.1
    train_parts: Literal["both", "facts"] = "both"

    def check(self) -> None:
        shared.check_vae("FedGMI", self.vae)

    # server

    def init(self, fed: Federation) -> State:
        shared.check_components("FedGMI", self.n_components, fed.n_clients)
        n, k = fed.n_clients, self.n_components
        return State(
            turn=torch.tensor(0),
            vaes=self.vae.init_many(fed.key("vae"), k, same=True),
            experts={} if self.model is None else self.model.init_many(fed.key("experts"), k),
            shares=torch.full((n, k), -1.0, dtype=torch.float64),
            size=torch.zeros(n, dtype=torch.float64),
            assignment=torch.full((n,), -1),
        )

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        # Algorithm 1
        info: Info = {}
        if int(state.turn) == 0:  # before the first round: Algorithm 2
            state, info["distance"] = self.initialize(fed, state)
        everyone = fed.everyone()
        if int(state.turn) % self.interval == 0:  # every tau rounds all clients divide their data
            state = self.divide_all(fed, state, everyone)
            info["largest_share"] = _warn_of_trivial(state)
        else:
            state, _ = self.place(fed, state, everyone[state.assignment < 0])
        # The clients of this round, S_t, train; eq. 11: means with weights |S(i, j)|.
        state = shared.train_cohort(fed, self.train_experts, state)
        info |= {"n_components": self.n_components, "assignment": state.assignment}
        return state._replace(turn=state.turn + 1), info

    def initialize(self, fed: Federation, state: State) -> tuple[State, float]:
        """Stable-Initialize (Algorithm 2): local autoencoders that lie far apart, and how far."""
        k, everyone = self.n_components, fed.everyone()
        ids, reply = fed.map(self.fit_vae, row(state.vaes, 0), to=everyone, at_least=k)
        fine = find_finite("FedGMI", "local VAEs", reply["nats"])
        if int(fine.sum()) < k:
            raise FederationError(
                f"FedGMI: at least {k} local VAEs must be finite. Got {int(fine.sum())}; lower the "
                "learning rate of local_vae."
            )
        ids, bank = ids[fine], tree_map(lambda leaf: leaf[fine], reply["vae"])
        # By name, so that the order of the clients does not matter.
        bank = take(bank, fed.turns(ids, "pick").argsort())
        distance = self.distances(bank, fed.key("decoded"))
        chosen = torch.tensor(choose_apart(distance, k))
        return state._replace(vaes=take(bank, chosen)), float(distance.max())

    def distances(self, bank: Params, key: Tensor) -> Tensor:
        """Estimate the divergence of VAE i from VAE j, in nats: [m, m] (eq. 10)."""
        vae, m = self.vae, n_rows(bank)
        code = normal(key, (self.n_decoded, shared.latent_size(vae)), vae.dtype)  # z, same for all
        with torch.no_grad():
            shown = [pixels(vae.apply(row(bank, i), {"code": code}), vae.loss) for i in range(m)]
            scores = shared.score(vae, bank, shared.unlabelled(torch.cat(shown)))  # [m * B, m]
        table = scores.double().reshape(m, self.n_decoded, m).mean(1)  # [i, j]
        return table - table.diagonal()[:, None]

    def divide_all(self, fed: Federation, state: State, ids: Ids, at_least: int = 1) -> State:
        """Shares of clients by their own division; a client that stays silent keeps its shares."""
        given = state.vaes, each(state.shares[ids])
        asked = fed.map(self.divide, *given, to=ids, at_least=at_least)
        return note_shares("FedGMI", state, *asked, size="n")

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        new = ids[state.assignment[ids] < 0]
        if int(state.turn) and len(new):
            state = self.divide_all(fed, state, new, at_least=0)
        return state, evidence_of(state.shares[ids])

    # client

    def client_init(self, client: Client) -> Tree:
        k = self.n_components
        part = torch.full((len(client.train.mask),), -1)
        return {"samples": {"part": part}, "prior": torch.full((k,), 1 / k, dtype=torch.float64)}

    @task(phase="cluster")
    def fit_vae(self, client: Client, vae: Params) -> dict[str, Tree]:
        epochs = self.start_epochs
        fitted = shared.fit(client, self.vae, vae, self.local_vae, epochs, self.penalised)
        return {"vae": fitted["vae"], "nats": fitted["nats"]}

    def penalised(self, params: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        """Loss of an autoencoder in training: its score, and terms against collapse."""
        coded = self.vae.apply(params, batch.x)
        terms = guard_terms(coded, batch.mask, current_mode().clients)
        return self.vae.loss_of(coded, batch) + self.penalty * terms

    @task(phase="cluster")
    def divide(self, client: Client, vaes: Params, prior: Tensor) -> Reply:
        batch, k = client.train, self.n_components
        prior = torch.where(prior[0] >= 0, prior, 1 / k)  # uniform before the first division
        part = affinity_cost(shared.score(self.vae, vaes, batch), prior).argmin(1)  # eq. 9
        member = part[:, None] == torch.arange(k)
        share = (member * batch.share()[:, None]).sum(0)  # alpha = |S(i, j)| / |D_i|
        keep = {"samples": {"part": part}, "prior": share}
        return Reply({"share": share, "n": batch.size}, keep=keep)

    @task
    def train_experts(self, client: Client, vaes: Params, experts: Params) -> dict[str, Tree]:
        which = torch.ones(2, dtype=torch.bool)
        if self.train_parts == "facts":
            which = client.facts["trains"].bool()
        part = client.state["samples"]["part"]
        expert = None if self.model is None else (self.local, self.model.losses)
        vae = self.local_vae, self.penalised
        return shared.train_parts(client, part, which, vaes, experts, vae, expert)

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        return {"vaes": state.vaes, "experts": state.experts}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        k = self.n_components
        even = torch.full((k,), 1 / k, dtype=torch.float64)
        return {**given, "prior": client.state["prior"] if client.state else even}

    def predict(self, personal: Tree, x: Any) -> Any:
        """Outputs of the expert of each sample's component, or a reconstruction without experts."""
        vaes, experts = personal["vaes"], personal["experts"]
        scores = shared.score(self.vae, vaes, shared.unlabelled(x))
        cost = affinity_cost(scores, personal["prior"])
        return shared.answer(self.vae, self.model, vaes, experts, cost, x)

    def mixture(self, state: State, ids: Ids) -> ComponentShares | None:
        if not int(state.turn):
            return None
        return report_counts(state.shares[ids], state.size[ids])

    @classmethod
    def example(cls, problem: Any) -> "FedGMI":
        epochs = problem.local.epochs or 0
        return cls(
            **shared.example(problem),
            n_components=problem.n_groups,
            interval=2,
            start_epochs=epochs,
            n_decoded=32,
        )


def affinity_cost(scores: Tensor, prior: Tensor) -> Tensor:
    """Minus the logarithm of eq. 8's affinity times the prior, up to a constant: [n, k].

    >>> affinity_cost(torch.tensor([[10.0, 12.0]]), torch.tensor([0.1, 0.9]))
    tensor([[12.3026, 12.1054]], dtype=torch.float64)
    """
    # A diverged autoencoder explains nothing.
    return scores.double().nan_to_num(torch.inf, torch.inf) - prior.double().log()


def choose_apart(distance: Tensor, k: int) -> list[int]:
    """The farthest pair, then again and again the candidate farthest from all chosen (Algorithm 2).

    `distance[i, j]` is the divergence of i from j. With k = 1: the nearest to all others.

    >>> choose_apart(torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 3.0], [4.0, 1.0, 0.0]]), 3)
    [0, 2, 1]
    """
    m = len(distance)
    if k == 1:
        others = distance.masked_fill(torch.eye(m, dtype=torch.bool), 0.0)
        return [int(others.sum(1).argmin())]
    apart = distance.masked_fill(torch.eye(m, dtype=torch.bool), -torch.inf)
    first = int(apart.argmax())
    chosen = [first // m, first % m]
    while len(chosen) < k:
        least = distance[:, chosen].min(1).values
        least[chosen] = -torch.inf
        chosen.append(int(least.argmax()))
    return chosen


def _warn_of_trivial(state: State) -> float:
    """Largest share of all samples that a component has; warn if nothing is left for the others."""
    known = state.assignment >= 0
    size = state.size[known]
    total = (size[:, None] * state.shares[known]).sum(0) / size.sum()
    largest = float(total.max())
    if largest > 0.99 and len(total) > 1:
        warnings.warn(
            f"FedGMI: the partition is trivial: one component takes {largest:.1%} of all samples. "
            "Start from another seed, or use the method 'blend', which starts from mean codes.",
            stacklevel=3,
        )
    return largest
