"""The client's room: what one client has, what a task is, what it replies."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import torch
from torch import Tensor

from coterie.core.errors import TaskError
from coterie.core.tree import Ids, Tree, named_leaves, tree_map


class Batch(NamedTuple):
    """Samples of one client, padded by repeats of a real row; reductions go through the mask."""

    x: Any  # [n, ...], or a dict of such
    y: Tensor  # [n, ...]   zeros where there are no labels
    mask: Tensor  # [n]     True for real rows
    weight: Tensor  # [n]   sample weights, ones unless a method sets them
    unit: Tree = ()  # [n]  number of the unit (patient, device) of each row; () if none are named

    @property
    def size(self) -> Tensor:
        """Number of real rows."""
        return self.mask.sum()

    def units(self) -> Tensor:
        """Number of the unit that each row belongs to: [n]; without units, each row is one."""
        if isinstance(self.unit, Tensor):
            return self.unit
        return torch.arange(self.mask.shape[0], device=self.mask.device)

    def share(self) -> Tensor:
        """Weight of each row in a mean over the real rows; all zeros if there is none."""
        weight = self.weight.double() * self.mask
        total = weight.sum()
        return torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of one value per row over the real rows, summed in double precision."""
        if values.shape != self.mask.shape:
            raise TaskError(
                f"Batch.mean: there must be one value per sample, shape {list(self.mask.shape)}. "
                f"Got {list(values.shape)}; a loss must not average over the samples itself."
            )
        # A padded row may hold anything, so it is replaced, not multiplied by zero.
        values = torch.where(self.mask, values, torch.zeros_like(values))
        return (values.double() * self.share()).sum().to(values.dtype)

    def where(self, condition: Tensor) -> "Batch":
        """The rows for which a condition holds."""
        return self._replace(mask=self.mask & condition)

    def proportions(self, label: Tensor, n_labels: int) -> Tensor:
        """Share of the real rows that carry each label."""
        member = label[:, None] == torch.arange(n_labels, device=label.device)  # [n, k]
        return (member * self.share()[:, None]).sum(0).to(torch.get_default_dtype())

    def part(self, start: int, size: int) -> "Batch":
        """Consecutive rows."""
        return tree_map(lambda leaf: leaf[start : start + size], self)

    def first_of(self, index: Tensor, count: int) -> "Batch":
        """The first rows an index names; all of them must be real (outside stacks)."""
        picked = tree_map(lambda leaf: leaf.index_select(0, index[:count]), self)
        return picked._replace(mask=torch.ones(count, dtype=torch.bool, device=index.device))

    def rows(self, index: Tensor, real: Tensor) -> "Batch":
        """The rows an index names, of which `real` says which count."""
        picked = tree_map(lambda leaf: leaf.index_select(0, index), self)
        return picked._replace(mask=picked.mask & real)


class Client(NamedTuple):
    """All a task sees. Test data and ground truth are not here."""

    train: Batch  # what it learns from
    validation: Batch  # held back from train; empty unless the run asks for it
    facts: Tree  # what it knows of itself and never sends
    state: Tree  # what it remembers; leaves under state["samples"] have a row per training sample
    key: Tensor  # its own randomness for this call
    run_key: Tensor  # the same for all clients
    round: Tensor
    local_key: Tensor  # randomness of local training: the same for every method (see `LocalSGD`)


@dataclass(frozen=True)
class Reply:
    """What a task sends, and what it keeps for the next time it is asked."""

    sent: dict[str, Tree]
    keep: Tree = None  # None: memory stays as it was


def natural(name: str) -> list[Any]:
    """Sorting key of client names that puts site-2 before site-10.

    >>> sorted(["site-10", "site-2"], key=natural)
    ['site-2', 'site-10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


class DataSource(Protocol):
    """What an engine asks of data: sizes and padded batches, by client id."""

    @property
    def names(self) -> Sequence[str]: ...

    def sizes(self, split: str) -> Tensor: ...  # [clients]

    def gather(self, split: str, ids: Ids) -> Batch: ...  # leaves [m, n, ...]

    def facts(self, ids: Ids) -> Tree: ...  # leaves [m, ...]


class TaskInfo(NamedTuple):
    """How a task wants to be run."""

    name: str  # label in the clients' keys
    stackable: bool = True
    phase: str = "train"
    split: str | None = None  # data passed as a last argument: the test data of an evaluation
    home: bool = False  # a real client also passes its folder
    finite: bool = True  # False: some values of a reply may be nan or infinite
    samples: tuple[str, ...] = ()  # parts of a reply, besides "n", that are numbers of samples
    losses: tuple[str, ...] = ()  # parts that are means of the model's loss, or the loss of rows
    shares: tuple[str, ...] = ()  # parts that lie between 0 and 1
    steady: bool = False  # the keys of clients are the same in every round
    reveals: str = ""  # what a reply tells about single classes or rows; nodes refuse to send it


F = TypeVar("F", bound=Callable[..., Any])


@overload
def task(function: F) -> F: ...
@overload
def task(
    *,
    stackable: bool = ...,
    phase: str = ...,
    finite: bool = ...,
    losses: tuple[str, ...] = ...,
    reveals: str = ...,
) -> Callable[[F], F]: ...
def task(
    function: Any = None,
    *,
    stackable: bool = True,
    phase: str = "train",
    finite: bool = True,
    losses: tuple[str, ...] = (),
    reveals: str = "",
) -> Any:
    """Mark a method `(self, client, *given) -> dict | Reply` as work of one client.

    Parameters
    ----------
    stackable
        False for work that breaks the five rules (no `if` on a tensor, no `.item()`, rows by
        `take`, numbers from `client.key`, reductions through the mask); it is run one client at
        a time.
    phase
        Heading in the traffic table: "cluster" for what serves grouping, "train" otherwise.
    finite
        False if a reply may have values that are nan or infinite. Otherwise such a reply is left
        out and its client named, unless half of the replies are like that.
    losses
        Parts of the reply that are losses of the method's model. If its loss is one of ours, which
        are never negative, a reply with a negative one is left out.
    reveals
        What a reply tells about single classes or rows, such as "label counts". Real clients
        refuse such a task unless their owner allows it.
    """

    def mark(function: F) -> F:
        function.__task__ = TaskInfo(  # type: ignore[attr-defined]
            function.__name__, stackable, phase, finite=finite, losses=losses, reveals=reveals
        )
        return function

    return mark if function is None else mark(function)


def task_info(function: Callable[..., Any]) -> TaskInfo:
    """How a task wants to be run; an error for a function that is not a task."""
    info = getattr(function, "__task__", None)
    if info is None:
        name = getattr(function, "__qualname__", repr(function))
        if hasattr(function, "__question__"):
            raise TaskError(f"fed.map: {name} is a question. Ask Question({name}, method).")
        raise TaskError(f"fed.map: {name} is not a task. Put @task above its definition.")
    return info  # type: ignore[no-any-return]


def as_reply(result: object, name: str) -> Reply:
    """Check what a task returned."""
    reply = result if isinstance(result, Reply) else Reply(result)  # type: ignore[arg-type]
    if not isinstance(reply.sent, dict):
        raise TaskError(
            f"{name}: a task must return a dict of tensors or a Reply. "
            f"Got {type(reply.sent).__name__}."
        )
    for path, leaf in [*named_leaves(reply.sent), *named_leaves(reply.keep or {})]:
        if not isinstance(leaf, Tensor):
            raise TaskError(
                f"{name}: every leaf of a reply must be a tensor. '{'/'.join(path)}' is "
                f"{type(leaf).__name__}; use torch.tensor(...)."
            )
    return reply
