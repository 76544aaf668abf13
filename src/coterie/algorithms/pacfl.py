"""PACFL: clients whose data span similar subspaces share a model.

Before training, every client sends a few directions that its inputs lie along, class by class. The
server clusters the clients by the angles between the subspaces, once, and then runs FedAvg inside
each cluster. Labels enter only through `angle="sum"`: if clients give the same inputs different
labels, the smallest angle does not show it.

References
----------
Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin: Efficient distribution similarity
identification in clustered federated learning via principal angles between client data subspaces,
AAAI 2023, arXiv 2209.10526, Algorithms 1 and 2.

Departures
----------
- A client sends zeros for classes that it does not have, so that all messages have one size.
- `n_groups` cuts the tree at a number of clusters instead of a threshold.
- The sum of angles counts 90 degrees for a class that only one of two clients has; the paper
  compares clients with equally many classes.
- A target without classes counts as one class.

Faults of public code that are avoided: the smallest arc cosine of the signed entries of a product
of bases, where singular vectors have arbitrary signs and the bases of several classes are not
orthogonal; an average linkage that ignores the sizes of clusters.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.algorithms.vectors import order_by_name
from coterie.clustering.linkage import agglomerate
from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Batch, Client, task
from coterie.core.errors import ConfigError, TaskError
from coterie.core.federation import Federation, rows
from coterie.core.model import Model
from coterie.core.random import initial_key
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, n_rows, put, tree_map

TINY = 1e-6  # singular values below this share of the largest are rounding in single precision


class State(NamedTuple):
    models: Params  # [k, ...]
    assignment: PerClient  # [clients]  cluster of each client, -1 until first contact
    bases: Annotated[Tensor, Fill(0)]  # [clients, c, p, d]  what each client sent
    start: Params  # the model that every cluster begins with


@register("pacfl")
@dataclass(frozen=True)
class PACFL(Algorithm):
    """Cluster clients once by the angles between the subspaces of their data.

    Parameters
    ----------
    model
        The network and its loss.
    local
        Local training.
    n_groups
        Number of clusters. Give this or `threshold`.
    threshold
        Mean angle in degrees up to which clusters are merged, beta. It must be tuned for each data
        set; the paper takes 4.9 for CIFAR-10 with two labels a client.
    n_vectors
        Directions that a client sends for each class, p.
    angle
        "smallest": the smallest principal angle between the subspaces of all classes together.
        "sum": the sum of the angles between directions of the same class and rank.
    """

    summaries: ClassVar[bool] = True
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] | None = None
    threshold: Annotated[float, Gt(0)] | None = None
    n_vectors: Annotated[int, Ge(1)] = 3
    angle: Literal["smallest", "sum"] = "smallest"

    def check(self) -> None:
        given = self.n_groups, self.threshold
        if given.count(None) != 1:
            raise ConfigError(
                "PACFL: give n_groups or threshold, and None for the other. Got "
                f"n_groups={given[0]}, threshold={given[1]}."
            )

    # server

    def init(self, fed: Federation) -> State:
        start = self.model.init(initial_key(fed.run_key))
        ids, reply = fed.map(self.directions, to=order_by_name(fed, fed.everyone()))
        good = find_finite("PACFL", "replies", reply["bases"])
        ids, sent = ids[good], reply["bases"][good].double()
        between = angles(sent, sent, self.angle)
        limit = torch.inf if self.threshold is None else self.threshold
        labels = agglomerate(between, "average", self.n_groups or 1, limit)
        k = max(len(labels.unique()), 1)
        models = tree_map(lambda leaf: leaf.expand(k, *leaf.shape).clone(), start)
        bases = torch.zeros(fed.n_clients, *sent.shape[1:], dtype=sent.dtype)
        return State(models, put(fed.per_client(-1), ids, labels), put(bases, ids, sent), start)

    def step(self, fed: Federation, state: State) -> tuple[State, Info]:
        cohort = order_by_name(fed, fed.cohort())
        state, _ = self.place(fed, state, cohort[state.assignment[cohort] < 0])
        cohort = cohort[state.assignment[cohort] >= 0]  # clients that did not answer wait
        group = state.assignment[cohort]
        mean = Mean("params", state.models, by=group, weight="n")
        ids, reply = fed.map(self.update, rows(state.models, group), to=cohort, reduce=mean)
        info = {"assignment": state.assignment, "participants": ids.sort().values}
        used = len(state.assignment[ids].unique())
        return state._replace(models=reply["params"]), info | {"groups_used": used}

    def place(self, fed: Federation, state: State, ids: Ids) -> tuple[State, Evidence]:
        heard, reply = fed.map(self.directions, to=ids, at_least=0)
        sent = reply["bases"].double() if len(heard) else state.bases[:0]
        good = find_finite("PACFL", "replies", sent)
        heard, sent = heard[good], sent[good]
        new = state.assignment[heard] < 0
        bases = put(state.bases, heard[new], sent[new])
        models, assignment = state.models, state.assignment
        limit = torch.inf if self.threshold is None else self.threshold
        nearest = fed.per_client(torch.nan).double()  # mean angle to the nearest cluster
        margin = nearest.clone()
        for client, between in zip(heard, angles(sent, bases, self.angle), strict=True):
            k = n_rows(models)
            cost = mean_angles(between, put(assignment, client[None], -1), k)
            least, second, *_ = [*cost.sort().values.tolist(), torch.inf]
            nearest[client] = least
            gap = (second - least) / max(second + least, TINY)
            margin[client] = 1.0 if second == torch.inf else gap
            if assignment[client] >= 0:
                continue
            assignment = put(assignment, client[None], cost.argmin())
            if least > limit:  # a cluster of its own
                assignment = put(assignment, client[None], k)
                more = tree_map(lambda leaf: leaf[None], state.start)
                models = tree_map(lambda *leaf: torch.cat(leaf), models, more)
        score = nearest[ids] / (self.threshold or torch.nan)
        found = Evidence(assignment[ids], margin[ids], score, ~(nearest[ids] > limit))
        return State(models, assignment, bases, state.start), found

    # client

    @task(stackable=False, phase="cluster", reveals="directions of each class")
    def directions(self, client: Client) -> dict[str, Tensor]:
        """The leading directions of the inputs of each class, [c, p, d]; the rest is zero."""
        batch = client.train
        if not isinstance(batch.x, Tensor):
            raise TaskError("PACFL: inputs must be one tensor. Got several; join them into one.")
        x = batch.x[batch.mask].flatten(1).double()
        label, n_classes = read_classes(self.model, batch)
        bases = x.new_zeros(n_classes, self.n_vectors, x.shape[1])
        for c in range(n_classes):
            _, size, vectors = torch.linalg.svd(x[label == c], full_matrices=False)
            vectors = vectors[size > TINY * size.max()] if len(size) else vectors
            bases[c, : len(vectors)] = vectors[: self.n_vectors]
        return {"bases": bases.to(self.model.dtype)}

    @task
    def update(self, client: Client, params: Params) -> dict[str, Tree]:
        return {"params": self.local(client, params, self.model.losses), "n": client.train.size}

    # use

    def deploy(self, state: State, ids: Ids) -> Any:
        return rows(state.models, state.assignment[ids].clamp(min=0))

    @classmethod
    def example(cls, problem: Any) -> "PACFL":
        return cls(problem.model, problem.local, problem.n_groups, n_vectors=1, angle="sum")


def read_classes(model: Model, batch: Batch) -> tuple[Tensor, int]:
    """The class of each real row, and the number of classes; one unless there are labels."""
    y = batch.y[batch.mask]
    if y.ndim == 1 and not y.is_floating_point() and model.loss == "cross_entropy":
        return y, model.n_outputs(batch.x)
    return torch.zeros(len(y), dtype=torch.int64), 1


def mean_angles(between: Tensor, assignment: Tensor, k: int) -> Tensor:
    """Mean angle to the members of each cluster, [k]; infinite for a cluster without members."""
    member = assignment[:, None] == torch.arange(k)  # [clients, k]
    size = member.sum(0)
    return torch.where(size > 0, between @ member.double() / size.clamp(min=1), torch.inf)


def angles(a: Tensor, b: Tensor, kind: Literal["smallest", "sum"]) -> Tensor:
    """Angles in degrees, [m, k], between directions of clients, [m, c, p, d] and [k, c, p, d].

    >>> plane = torch.tensor([[[[1.0, 0, 0], [0, 1, 0]]]])
    >>> line = torch.tensor([[[[0.0, 0, 0], [0, 1, 1]]]]) / 2**0.5
    >>> angles(plane, line, "smallest").round(), angles(plane, line, "sum").round()
    (tensor([[45.]], dtype=torch.float64), tensor([[135.]], dtype=torch.float64))
    """
    a, b = a.double(), b.double()
    if kind == "sum":
        between = torch.einsum("mcpd,kcpd->mkcp", a, b).abs().clamp(max=1).arccos().rad2deg()
        known = a.any(3)[:, None] | b.any(3)  # [m, k, c, p]
        return torch.where(known, between, 0.0).sum((2, 3))
    ours, theirs = orthonormal(a), orthonormal(b)
    cosine = [
        torch.linalg.matrix_norm(q @ theirs.mT, ord=2) for q in ours
    ]  # largest singular value
    if not cosine:
        return torch.zeros(0, len(b), dtype=torch.float64)
    return torch.stack(cosine).clamp(max=1).arccos().rad2deg()


def orthonormal(bases: Tensor) -> Tensor:
    """An orthonormal basis of all directions of each client, [m, r, d]; the other rows are zero."""
    _, size, vectors = torch.linalg.svd(bases.flatten(1, 2), full_matrices=False)
    return vectors * (size > TINY * size.amax(1, keepdim=True))[:, :, None]
