"""Evaluation: each client's own model on its own test data. It never changes a run."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coterie import metrics
from coterie.core.algorithm import Algorithm
from coterie.core.client import Batch, Client, task_info
from coterie.core.errors import TaskError
from coterie.core.federation import BankRows, Federation
from coterie.core.model import LOSSES
from coterie.core.question import Question, question
from coterie.core.tree import Ids, Tree, flat, n_rows, put, row, tree_map
from coterie.data.federated import FederatedData

LOSS_OF = {
    "classification": "cross_entropy",
    "regression": "squared_error",
    "reconstruction": "reconstruction",
}


class Scores(NamedTuple):
    """One entry per client; nan for clients without samples to be scored on."""

    ids: Ids
    loss: Tensor
    accuracy: Tensor  # nan unless there are classes
    n: Tensor
    agreement: Tensor  # ARI of components with classes, for methods that learn without labels
    rows: Tensor | None = None  # [m, n]  loss of each row, nan in the padding; if asked for


# Part of the clients' keys: with another label, evaluations that draw would draw other numbers.
KEY = "exam"


def _reveal_rows(arguments: Mapping[str, Any]) -> str:
    return "the loss of each row" if arguments.get("rows") else ""


@question(
    phase="evaluation",
    key=KEY,
    losses=("loss", "rows"),
    shares=("accuracy",),
    reveals=_reveal_rows,
)
def score(
    algorithm: Algorithm, client: Client, given: Tree, test: Batch, *, kind: str, rows: int = 0
) -> dict[str, Tensor]:
    """Score a client's own model on a batch: loss, accuracy, agreement, number of samples.

    `rows`: also the loss of each row, padded to this length.
    """
    output = algorithm.predict(algorithm.personalise(client, given), test.x)
    right = agreement = test.mask * torch.nan
    if not algorithm.supervised:
        losses = algorithm.surprise(output)
        if kind == "classification":
            agreement = metrics.masked_rand(output.argmax(1), test.y, test.mask)
    else:
        model = getattr(algorithm, "model", None)
        loss = model.loss_of if model else LOSSES[LOSS_OF[kind]]
        losses = loss(output, test)
        if kind == "classification":
            right = output.argmax(1) == test.y
    scores = {
        "loss": test.mean(losses.double()),
        "accuracy": test.mean(right.double()),
        "agreement": agreement.double().mean(),
        "n": test.size,
    }
    if rows:
        own = torch.where(test.mask, losses.double(), torch.nan)
        scores["rows"] = functional.pad(own, (0, rows - own.shape[0]), value=torch.nan)
    return scores


def evaluate(
    algorithm: Algorithm,
    fed: Federation,
    state: Any,
    kind: str,
    *,
    split: str = "test",
    support: str = "train",
    on: Batch | None = None,
    rows: int = 0,
) -> Scores:
    """Assign unassigned clients to a group, give every client its model, and score it.

    Parameters
    ----------
    kind
        What the outputs are: "classification", "regression" or "reconstruction".
    split
        Data of each client that it is scored on.
    support
        Data a client uses to be assigned to a group; "test" for clients without training data.
    on
        Score everyone on this common batch instead.
    rows
        Also return the loss of each row, padded to this length. 0: do not.
    """
    ids = fed.everyone()
    with fed.aside(support=support):
        state = place_all(algorithm, fed, state, ids)
        given = [algorithm.deploy(state, ids), *([] if on is None else [on])]
        stackable = task_info(algorithm.personalise).stackable
        own = split if on is None else None
        more = {"rows": rows} if rows else {}
        ask = Question(score, algorithm, {"kind": kind, **more}, own, stackable)
        try:
            ids, reply = fed.map(ask, *given, to=ids)
        except TaskError as error:
            if "cannot be stacked" not in str(error):
                raise
            warnings.warn(f"The evaluation runs one client at a time: {error}", stacklevel=2)
            ids, reply = fed.map(replace(ask, stackable=False), *given, to=ids)
    return _scores(fed.everyone(), ids, reply)


def _scores(asked: Ids, heard: Ids, reply: dict[str, Tensor]) -> Scores:
    """Scores of all clients asked; a client that did not answer counts as one without samples."""
    if len(heard) < len(asked):
        at = torch.isin(asked, heard)
        blank = {name: leaf.new_zeros(len(asked), *leaf.shape[1:]) for name, leaf in reply.items()}
        reply = {name: put(blank[name], at, leaf) for name, leaf in reply.items()}
    some = reply["n"] > 0
    names = "loss", "accuracy", "agreement"
    loss, accuracy, agreement = (torch.where(some, reply[name], torch.nan) for name in names)
    return Scores(asked, loss, accuracy, reply["n"], agreement, reply.get("rows"))


def evaluate_later(
    algorithm: Algorithm, fed: Federation, state: Any, kind: str, then: Callable[[Scores], None]
) -> None:
    """Evaluate with the next messages, which go out anyway; unassigned clients are left out."""
    ids = fed.everyone()
    assignment = getattr(state, "assignment", None)
    if assignment is not None:
        ids = ids[assignment[ids] >= 0]
    if len(ids):
        ask = Question(score, algorithm, {"kind": kind}, "test", stackable=False)
        given = algorithm.deploy(state, ids)
        fed.ask_later(ask, given, to=ids, then=lambda *said: then(_scores(ids, *said)))


@question(phase="evaluation", key="labels", reveals="label counts")
def count_labels(algorithm: Algorithm, client: Client, *, n_classes: int) -> dict[str, Tensor]:
    """Count each class in a client's training data, for the description of groups."""
    classes = torch.arange(n_classes)
    hits = (client.train.y[:, None] == classes) & client.train.mask[:, None]
    return {"counts": hits.sum(0)}


def place_all(algorithm: Algorithm, fed: Federation, state: Any, ids: Ids) -> Any:
    """Give every client that has no group one; the new state."""
    assignment = getattr(state, "assignment", None)
    if assignment is None or not bool((assignment[ids] < 0).any()):
        return state
    return algorithm.place(fed, state, ids[assignment[ids] < 0])[0]


class Oracle:
    """Questions that only a simulation can answer, because it knows the truth."""

    def __init__(self, algorithm: Algorithm, fed: Federation, state: Any, data: Any) -> None:
        self.algorithm, self.fed, self.state, self.data = algorithm, fed, state, data

    def ari(self, on: Ids | None = None) -> float | None:
        """Agreement of the groups found with the true ones; None where it is undefined."""
        found = getattr(self.state, "assignment", None)
        if found is None or self.data.truth is None:
            return None
        return metrics.adjusted_rand(found, self.data.truth[: len(found)], on=on)

    def identity(self) -> float | None:
        """Share of clients in the right group under the best naming of groups."""
        found = getattr(self.state, "assignment", None)
        if found is None or self.data.truth is None:
            return None
        return metrics.identity_accuracy(found, self.data.truth[: len(found)])

    def pooled(self, group: int) -> Batch:
        """All test data of a true group."""
        assert self.data.truth is not None
        batch = self.data.gather("test", torch.nonzero(self.data.truth == group).flatten())
        keep = batch.mask.flatten()
        return _rows(batch, keep)

    def client_matrix(self) -> Tensor:
        """Accuracy (or loss, without classes) of each client's model on each true group: [m, g]."""
        columns = []
        for group in self.groups():
            scores = evaluate(
                self.algorithm, self.fed, self.state, self.data.task, on=self.pooled(group)
            )
            columns.append(scores.accuracy if self.data.task == "classification" else scores.loss)
        return torch.stack(columns, 1)

    def groups(self) -> list[int]:
        """The true groups."""
        assert self.data.truth is not None
        return sorted(set(self.data.truth.tolist()))

    def on_own_group(self) -> Tensor:
        """Score of each client's model on all test data of its true group (IFCA's local model)."""
        assert self.data.truth is not None
        names = torch.tensor(self.groups())
        column = torch.searchsorted(names, self.data.truth)
        return self.client_matrix().gather(1, column[:, None]).squeeze(1)

    def mixture(self) -> dict[str, Any] | None:
        """Shares and experts of components against the truth; groups count as pure shares."""
        ids = self.fed.everyone()
        found = self.algorithm.mixture(self.state, ids)
        true = self.data.extra.get("shares")
        out: dict[str, Any] = {} if found is None else dict(found.evidence)
        if true is None:
            return out or None
        true = torch.as_tensor(true)[: len(ids)]
        if found is not None:
            shares, others = found.shares, found.others
        else:
            group = getattr(self.state, "assignment", None)
            if group is None or int(group.max()) >= true.shape[1]:
                return out or None
            shares = functional.one_hot(group.clamp(min=0), true.shape[1]).double()
            others = {"group": shares}
        if shares.shape != true.shape or bool(shares.isnan().any()):
            return out or None
        out |= metrics.mixture_error(shares, true)
        for name, values in others.items():
            if not bool(values.isnan().any()):
                error = metrics.mixture_error(values, true)
                out[f"by_{name}"] = {"mae": error["mae"], "slope": error["slope"]}
        matrix = self.expert_matrix()
        if matrix is not None and matrix.shape[0] == matrix.shape[1]:
            out["experts"] = matrix.tolist()
            out |= metrics.expert_scores(matrix, metrics.match_components(shares, true))
        return out

    def expert_matrix(self) -> Tensor | None:
        """Accuracy of every component's expert on the test rows of each true component: [k, k]."""
        component = self.data.extra.get("component")
        bank = getattr(self.state, "experts", None)
        if bank is None:
            given = self.algorithm.deploy(self.state, self.fed.everyone())
            rest = given.get("models") if isinstance(given, dict) else None
            bank = given.bank if isinstance(given, BankRows) else rest
        model = getattr(self.algorithm, "model", None)
        if component is None or not bank or model is None or self.data.task != "classification":
            return None
        ids = self.fed.everyone()
        batch = self.data.gather("test", ids)
        real = batch.mask.flatten()
        x, y = _rows(batch.x, real), batch.y.flatten()[real]
        true = torch.as_tensor(component)[self.data.rows["test"].of_clients(ids).index]
        k = n_rows(bank)
        with torch.no_grad():
            answers = [model.apply(row(bank, j), x).argmax(1) for j in range(k)]
        right = torch.stack([answer == y for answer in answers]).double()  # [k, n]
        columns = [right[:, true == c].mean(1) for c in range(int(true.max()) + 1)]
        return torch.stack(columns, 1)

    def parameter_distance(self, nearest: bool = False) -> float | None:
        """Mean distance of linear models to their true vectors, matched one to one."""
        targets = self.data.extra.get("targets")
        given = self.algorithm.deploy(self.state, self.fed.everyone())
        if targets is None or not isinstance(given, BankRows):
            return None
        k = n_rows(given.bank)
        models = torch.stack([flat(row(given.bank, j)) for j in range(k)])
        return metrics.parameter_distance(models.double(), targets.double(), nearest=nearest)


def _rows(tree: Any, keep: Tensor) -> Any:
    return tree_map(lambda leaf: leaf.flatten(0, 1)[keep], tree)


@question(stackable=False, phase="evaluation", key="components", reveals="a component per row")
def label_samples(
    algorithm: Algorithm, client: Client, given: Tree, length: Tensor
) -> dict[str, Tensor]:
    """Give the component of each of a client's training samples, -1 in the padding."""
    output = algorithm.predict(algorithm.personalise(client, given), client.train.x)
    found, missing = output.argmax(1), len(length) - len(output)
    return {"component": torch.cat([found, found.new_full((missing,), -1)])}


def components(
    algorithm: Algorithm, fed: Federation, state: Any, data: FederatedData
) -> tuple[list[Any], list[Any]]:
    """Component of every training sample and its label, client by client; simulations only."""
    ids, sizes = fed.everyone(), data.sizes("train")
    with fed.aside():
        length = torch.zeros(int(sizes.max()))
        ask = Question(label_samples, algorithm)
        _, reply = fed.map(ask, algorithm.deploy(state, ids), length, to=ids)
    found = [line[:n].numpy() for line, n in zip(reply["component"], sizes.tolist(), strict=True)]
    rows = data.rows["train"]
    truth = [part.numpy() for part in data.y[rows.index].split(sizes.tolist())]
    return found, truth
