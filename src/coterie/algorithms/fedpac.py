"""FedPAC: a common body, features aligned by class, and for each client a mixture of all heads.

A client first trains its head and then the body, with a term that pulls features towards the common
prototype of their class. The server averages the bodies, and gives each client the mixture of the
clients' heads that should predict best on its data, from means of features by class.

References
----------
Xu, Tong, Huang: Personalized federated learning with feature alignment and classifier
collaboration, ICLR 2023, arXiv 2306.11867, Algorithm 1.

Departures: the server keeps each client's head until the client takes part again, and mixes the
heads of those who took part in the round. A client without a head uses the average head.

Faults of public code that are avoided: a head looked up by client number where the order of replies
is meant; shares that are set to zero and not normalised again; prototypes averaged without the
number of samples.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.algorithms.prototypes import class_means, head_shape, row_of_class, with_head
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Fill, Info, register
from coterie.core.client import Batch, Client, task
from coterie.core.federation import Each, Federation, each
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, flat, put

NO_SHARE = 1e-3  # smaller shares of a head count as none, as in the authors' code


class State(NamedTuple):
    body: Params
    head: Params  # average of the heads
    heads: Annotated[Tensor, Fill(torch.nan)]  # [clients, weights of a head]  nan: none yet
    prototypes: Tensor  # [c, d]
    known: Tensor  # [c]  whether any client has sent one


@register("fedpac")
@dataclass(frozen=True)
class FedPAC(Algorithm):
    """Share the body, align its features, and mix a head for each client.

    Parameters
    ----------
    model
        The network and its loss, cross-entropy. Its head must be a linear layer; without a head,
        the last linear layer is taken.
    local
        Local training of the body.
    strength
        Weight of the pull towards the prototypes, lambda.
    head_epochs
        Epochs of the head, before the body is trained.
    head_rate
        Step size of the head.
    """

    summaries: ClassVar[bool] = True  # the server keeps a head for each client
    model: Model
    local: LocalSGD
    strength: Annotated[float, Ge(0)] = 1.0
    head_epochs: Annotated[int, Ge(0)] = 1
    head_rate: Annotated[float, Ge(0)] = 0.1

    def check(self) -> None:
        object.__setattr__(self, "model", with_head(self.model, "FedPAC"))

    # server

    def init(self, fed: Federation) -> State:
        body, head = self.model.split(self.model.init(initial_key(fed.run_key)))
        n_classes, n_features = head_shape(self.model)
        heads = torch.full((fed.n_clients, len(flat(head))), torch.nan, dtype=self.model.dtype)
        prototypes = torch.zeros(n_classes, n_features, dtype=self.model.dtype)
        return State(body, head, heads, prototypes, torch.zeros(n_classes, dtype=torch.bool))

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = fed.cohort()
        means = [
            Mean("body", state.body, weight="n"),
            Mean("prototypes", state.prototypes, weight="counts", slots=True),
        ]
        given = state.body, each(heads_of(state, cohort)), state.prototypes, state.known
        ids, reply = fed.map(self.update, *given, to=cohort, reduce=means)
        heads, shares, variance = flat_rows(reply["head"]), reply["shares"], reply["variance"]
        fine = find_finite("FedPAC", "heads", heads, shares, variance)
        use = fine & (reply["n"] > 0)
        known = state.known | (reply["counts"] > 0).any(0)
        state = state._replace(body=reply["body"], prototypes=reply["prototypes"], known=known)
        if bool(use.any()):
            heads, ids = heads[use].double(), ids[use]
            mixture = mix_shares(shares[use].double(), variance[use].double())  # [m, m]
            n = reply["n"][use].double()
            mean = unflat((n / n.sum()) @ heads, state.head)
            state = state._replace(head=mean, heads=put(state.heads, ids, mixture @ heads))
        return state, {}

    # client

    @task(reveals="label counts")
    def update(
        self, client: Client, body: Params, head: Params, prototypes: Tensor, known: Tensor
    ) -> dict[str, Any]:
        batch, n_classes = client.train, len(known)
        features = self.model.features({**body, **head}, batch.x)
        means, counts = class_means(features, batch, n_classes)
        n = batch.size.clamp(min=1)
        shares = counts[:, None] / n * means  # h: share of each class times its mean
        second = batch.mean(features.square().sum(1))
        variance = (second - shares.square().sum()) / n  # V
        work = replace(
            self.local, epochs=self.head_epochs, steps=None, learning_rate=self.head_rate
        )
        head = work(client, head, self.head_losses, salt=1, given=(body,))
        table = torch.where(known[:, None], prototypes, means)  # one's own where none is known
        body = self.local(client, body, self.body_losses, given=(head, table))
        features = self.model.features({**body, **head}, batch.x)
        means, _ = class_means(features, batch, n_classes)
        counts = (counts * torch.isfinite(means).all()).to(means.dtype)
        sent = {"body": body, "head": head, "shares": shares, "variance": variance}
        return {**sent, "prototypes": means, "counts": counts, "n": batch.size}

    def head_losses(self, head: Params, batch: Batch, key: Tensor | None, body: Params) -> Tensor:
        """Cross-entropy as a function of the head; the body stays as it is."""
        return self.model.losses({**body, **head}, batch, key)

    def body_losses(
        self, body: Params, batch: Batch, key: Tensor | None, head: Params, table: Tensor
    ) -> Tensor:
        """Cross-entropy and the pull towards the prototypes; the head stays as it is."""
        features, output = self.model.features_and_output({**body, **head}, batch.x)
        pull = (features - row_of_class(table, batch.y.long())).square().mean(1)
        return self.model.loss_of(output, batch) + self.strength * pull

    # use

    def deploy(self, state: State, ids: Ids) -> Each:
        body = {name: leaf.expand(len(ids), *leaf.shape) for name, leaf in state.body.items()}
        return each({**body, **heads_of(state, ids)})

    @classmethod
    def example(cls, problem: Any) -> "FedPAC":
        work = {"head_epochs": problem.local.epochs, "head_rate": problem.local.learning_rate}
        return cls(problem.model, problem.local, **work)


def heads_of(state: State, ids: Ids) -> Params:
    """The heads of some clients, or the average for clients that have none: [m, ...]."""
    own = state.heads[ids]
    return unflat(torch.where(own.isnan(), flat(state.head).to(own.dtype), own), state.head)


def flat_rows(heads: Params) -> Tensor:
    """Heads as rows: [m, weights]."""
    return torch.cat([leaf.flatten(1) for leaf in heads.values()], 1)


def unflat(rows: Tensor, like: Params) -> Params:
    """The inverse of `flat`, for one head or for a row per client."""
    parts = rows.split([leaf.numel() for leaf in like.values()], -1)
    pairs = zip(like.items(), parts, strict=True)
    return {n: p.reshape(*rows.shape[:-1], *leaf.shape).to(leaf.dtype) for (n, leaf), p in pairs}


def mix_shares(shares: Tensor, variance: Tensor) -> Tensor:
    """Share of every head in each client's mixture: [m, m], rows sum to one."""
    rows = shares.flatten(1)
    inner = rows @ rows.mT
    own = inner.diagonal()
    # <h_i - h_j, h_i - h_l> for each i
    apart = own[:, None, None] - inner[:, :, None] - inner[:, None, :] + inner
    mixture = torch.cat([least_on_simplex(q + variance.diag()) for q in apart.split(64)])
    mixture = torch.where(mixture < NO_SHARE, 0.0, mixture)
    mixture = mixture / mixture.sum(1, keepdim=True)
    alone = torch.eye(len(mixture), dtype=mixture.dtype)
    return torch.where(torch.isfinite(mixture).all(1, keepdim=True), mixture, alone)


def least_on_simplex(q: Tensor, steps: int = 1000) -> Tensor:
    """The shares a that make a' q a least, for each of some matrices: accelerated projected steps.

    >>> least_on_simplex(torch.tensor([[[1.0, 0.0], [0.0, 3.0]]]).double())
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    scale = q.flatten(1).norm(dim=1).clamp(min=1e-300)  # at least the largest eigenvalue
    q = q / scale[:, None, None]
    old = ahead = torch.full(q.shape[:2], 1 / q.shape[1], dtype=q.dtype)
    speed = torch.ones(len(q), 1, dtype=q.dtype)
    for _ in range(steps):
        new = project(ahead - torch.einsum("ijk,ik->ij", q, ahead))
        against = ((ahead - new) * (new - old)).sum(1, keepdim=True) > 0
        speed = torch.where(against, 1.0, speed)  # begin again where the momentum leads uphill
        faster = (1 + (1 + 4 * speed**2).sqrt()) / 2
        ahead = new + (speed - 1) / faster * (new - old)
        old, speed = new, faster
    return old


def project(rows: Tensor) -> Tensor:
    """The nearest points with entries of at least zero that sum to one."""
    ordered = rows.sort(1, descending=True).values
    over = (ordered.cumsum(1) - 1) / torch.arange(1, rows.shape[1] + 1)
    last = (ordered > over).sum(1, keepdim=True).clamp(min=1) - 1
    return (rows - over.gather(1, last)).clamp(min=0)
