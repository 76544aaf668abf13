"""The exam: each client's own model on its own test data. Examining never changes a run."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coterie import metrics
from coterie.core.algorithm import Algorithm
from coterie.core.client import Batch, Client, TaskInfo
from coterie.core.errors import TaskError
from coterie.core.federation import Federation, Rows
from coterie.core.model import LOSSES
from coterie.core.tree import Ids, Tree, flat, put, row
from coterie.data.federated import FederatedData
from coterie.engines.remote import Remote

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


class Score:
    """The exam as a task: what each client is handed, its own model, its outputs, two numbers."""

    __name__ = "exam"

    def __init__(self, algorithm: Algorithm, kind: str, split: str | None, stackable: bool) -> None:
        self.__self__, self.kind = algorithm, kind
        self.__task__ = TaskInfo(stackable, "exam", split)
        self.described = {"name": "exam", "kind": kind, "split": split}  # for real clients

    def __call__(self, client: Client, given: Tree, test: Batch) -> dict[str, Tensor]:
        algorithm = self.__self__
        output = algorithm.predict(algorithm.personalise(client, given), test.x)
        right = agreement = test.mask * torch.nan
        if not algorithm.supervised:
            losses = algorithm.surprise(output)
            if self.kind == "classification":
                agreement = metrics.masked_rand(output.argmax(1), test.y, test.mask)
        else:
            model = getattr(algorithm, "model", None)
            loss = model.loss_of if model else LOSSES[LOSS_OF[self.kind]]
            losses = loss(output, test)
            if self.kind == "classification":
                right = output.argmax(1) == test.y
        return {
            "loss": test.mean(losses.double()),
            "accuracy": test.mean(right.double()),
            "agreement": agreement.double().mean(),
            "n": test.size,
        }


def examine(
    algorithm: Algorithm,
    fed: Federation,
    state: Any,
    kind: str,
    *,
    split: str = "test",
    support: str = "train",
    on: Batch | None = None,
) -> Scores:
    """Place whom nobody has placed, hand everyone its model, score it.

    Parameters
    ----------
    kind
        What the outputs are: "classification", "regression" or "reconstruction".
    split
        Data of each client that it is scored on.
    support
        Data a client shows where it has to be placed; "test" for clients that have nothing else.
    on
        Score everyone on this common batch instead.
    """
    ids = fed.everyone()
    with fed.aside(support=support):
        state = placed(algorithm, fed, state, ids)
        given = [algorithm.deploy(state, ids), *([] if on is None else [on])]
        stackable = algorithm.personalise.__func__.__task__.stackable  # type: ignore[attr-defined]
        ask = Score(algorithm, kind, split if on is None else None, stackable)
        try:
            ids, reply = fed.map(ask, *given, to=ids)
        except TaskError as error:
            if "cannot be stacked" not in str(error):
                raise
            warnings.warn(f"The exam runs one client after the other: {error}", stacklevel=2)
            ask = Score(algorithm, kind, split if on is None else None, False)
            ids, reply = fed.map(ask, *given, to=ids)
    return _scores(fed.everyone(), ids, reply)


def _scores(asked: Ids, heard: Ids, reply: dict[str, Tensor]) -> Scores:
    """Scores of all who were asked; of whoever stayed silent as if it had no samples."""
    if len(heard) < len(asked):
        at = torch.isin(asked, heard)
        blank = {name: leaf.new_zeros(len(asked)) for name, leaf in reply.items()}
        reply = {name: put(blank[name], at, leaf) for name, leaf in reply.items()}
    some = reply["n"] > 0
    names = "loss", "accuracy", "agreement"
    loss, accuracy, agreement = (torch.where(some, reply[name], torch.nan) for name in names)
    return Scores(asked, loss, accuracy, reply["n"], agreement)


def examine_later(
    algorithm: Algorithm, fed: Remote, state: Any, kind: str, then: Callable[[Scores], None]
) -> None:
    """Examine with the next messages, which go out anyway; whoever has no place waits."""
    ids = fed.everyone()
    assignment = getattr(state, "assignment", None)
    if assignment is not None:
        ids = ids[assignment[ids] >= 0]
    if len(ids):
        ask = Score(algorithm, kind, "test", False)
        fed.ride(ask, algorithm.deploy(state, ids), to=ids, then=lambda *s: then(_scores(ids, *s)))


class LabelCounts:
    """How often each class stands in a client's training data, for the description of groups."""

    __name__ = "labels"

    def __init__(self, algorithm: Algorithm, n_classes: int) -> None:
        self.__self__, self.n_classes = algorithm, n_classes
        # Labels need no memory, and clients nobody has asked yet have another than the rest.
        self.__task__ = TaskInfo(algorithm.supervised, "exam")
        self.described = {"name": "labels", "n_classes": n_classes}

    def __call__(self, client: Client) -> dict[str, Tensor]:
        classes = torch.arange(self.n_classes)
        hits = (client.train.y[:, None] == classes) & client.train.mask[:, None]
        return {"counts": hits.sum(0)}


def placed(algorithm: Algorithm, fed: Federation, state: Any, ids: Ids) -> Any:
    """A state in which everyone has a group."""
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
        return Batch(*(_rows(leaf, keep) for leaf in batch))

    def client_matrix(self) -> Tensor:
        """Accuracy (or loss, without classes) of each client's model on each true group: [m, g]."""
        columns = []
        for group in self.groups():
            scores = examine(
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

    def cross_matrix(self) -> Tensor:
        """Score of every group's model on each true group: [k, g]; nan for unused models."""
        found = placed(self.algorithm, self.fed, self.state, self.fed.everyone()).assignment
        per_client = self.client_matrix()
        out = torch.full(
            (int(found.max()) + 1, per_client.shape[1]), torch.nan, dtype=torch.float64
        )
        for model in found.unique().tolist():
            out[model] = per_client[int((found == model).nonzero()[0])]
        return out

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
            bank = given.bank if isinstance(given, Rows) else rest
        model = getattr(self.algorithm, "model", None)
        if component is None or not bank or model is None or self.data.task != "classification":
            return None
        ids = self.fed.everyone()
        batch = self.data.gather("test", ids)
        real = batch.mask.flatten()
        x, y = _rows(batch.x, real), batch.y.flatten()[real]
        true = torch.as_tensor(component)[self.data.rows["test"].of_clients(ids).index]
        k = len(next(iter(bank.values())))
        with torch.no_grad():
            answers = [model.apply(row(bank, j), x).argmax(1) for j in range(k)]
        right = torch.stack([answer == y for answer in answers]).double()  # [k, n]
        columns = [right[:, true == c].mean(1) for c in range(int(true.max()) + 1)]
        return torch.stack(columns, 1)

    def parameter_distance(self, nearest: bool = False) -> float | None:
        """Mean distance of linear models to their true vectors, matched one to one."""
        targets = self.data.extra.get("targets")
        given = self.algorithm.deploy(self.state, self.fed.everyone())
        if targets is None or not isinstance(given, Rows):
            return None
        k = len(next(iter(given.bank.values())))
        models = torch.stack([flat(row(given.bank, j)) for j in range(k)])
        return metrics.parameter_distance(models.double(), targets.double(), nearest=nearest)


def _rows(leaf: Any, keep: Tensor) -> Any:
    if isinstance(leaf, dict):
        return {name: _rows(value, keep) for name, value in leaf.items()}
    return leaf.flatten(0, 1)[keep]


class Labels:
    """The component of each of a client's training samples, as a task of the examiner."""

    __name__ = "components"

    def __init__(self, algorithm: Algorithm) -> None:
        self.__self__ = algorithm
        self.__task__ = TaskInfo(False, "exam")

    def __call__(self, client: Client, given: Tree, length: Tensor) -> dict[str, Tensor]:
        algorithm = self.__self__
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
        _, reply = fed.map(Labels(algorithm), algorithm.deploy(state, ids), length, to=ids)
    found = [line[:n].numpy() for line, n in zip(reply["component"], sizes.tolist(), strict=True)]
    rows = data.rows["train"]
    truth = [part.numpy() for part in data.y[rows.index].split(sizes.tolist())]
    return found, truth
