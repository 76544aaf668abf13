"""Questions: client work that is not a method of an algorithm, such as an evaluation.

A question is a registered function with plain arguments. It is asked like a task, by `fed.map`, and
a real client finds the function again by its module and name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coterie.core.client import Reply, TaskInfo, task_info
from coterie.core.config import import_module
from coterie.core.errors import ConfigError, TaskError

QUESTIONS: dict[str, Callable[..., Any]] = {}
"""Registered functions by "package.module:name"."""

F = TypeVar("F", bound=Callable[..., Any])


def question(
    *,
    stackable: bool = True,
    phase: str = "train",
    key: str | None = None,
    home: bool = False,
    finite: bool = True,
    samples: tuple[str, ...] = (),
    losses: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
    steady: bool = False,
    reveals: str | Callable[[Mapping[str, Any]], str] = "",
) -> Callable[[F], F]:
    """Register a function `(method, client, *given, **arguments) -> dict | Reply`.

    Parameters
    ----------
    stackable
        As in `task`.
    phase
        As in `task`.
    key
        Label in the clients' keys; default: the function's name. A function that is renamed keeps
        its random numbers by keeping its label.
    home
        True: a real client also passes `home`, the folder of the run on its own disk.
    finite
        As in `task`.
    samples
        Names in the reply, besides "n", of numbers of samples. They are checked against what the
        client declared when it joined.
    losses
        As in `task`.
    shares
        Names in the reply of values between 0 and 1.
    steady
        Clients draw the same numbers in whichever round they are asked.
    reveals
        As in `task`; or a function of the arguments that returns it.
    """

    def register(function: F) -> F:
        label = key or function.__name__
        function.__question__ = TaskInfo(  # type: ignore[attr-defined]
            label,
            stackable,
            phase,
            home=home,
            finite=finite,
            samples=samples,
            losses=losses,
            shares=shares,
            steady=steady,
        )
        function.__reveals__ = reveals  # type: ignore[attr-defined]
        QUESTIONS[f"{function.__module__}:{function.__name__}"] = function
        return function

    return register


@dataclass(frozen=True)
class Question:
    """A registered function, the method it is asked for, and its arguments.

    Parameters
    ----------
    function
        Registered by `@question`.
    method
        The method whose clients are asked; a real client passes its own copy.
    arguments
        Keyword arguments, as plain data.
    split
        Data that each client passes as a last positional argument: "train", "test", ...
    stackable
        False: one client at a time. None: as registered.
    """

    function: Callable[..., Any]
    method: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
    stackable: bool | None = None

    @property
    def info(self) -> TaskInfo:
        """How to run it."""
        found = getattr(self.function, "__reveals__", "")
        reveals = found(self.arguments) if callable(found) else found
        info = _registered(self.function)._replace(split=self.split, reveals=reveals)
        return info if self.stackable is None else info._replace(stackable=self.stackable)

    def __call__(self, client: Any, *given: Any) -> "dict[str, Any] | Reply":
        answer: dict[str, Any] | Reply = self.function(
            self.method, client, *given, **self.arguments
        )
        return answer

    def describe(self) -> dict[str, Any]:
        """The question as plain data."""
        place = f"{self.function.__module__}:{self.function.__name__}"
        return {"question": place, "arguments": dict(self.arguments), "split": self.split}


def _registered(function: Callable[..., Any]) -> TaskInfo:
    info: TaskInfo | None = getattr(function, "__question__", None)
    if info is None:
        name = getattr(function, "__qualname__", repr(function))
        raise TaskError(
            f"Question: the function must be registered. Got {name}. Put @question() above it."
        )
    return info


def info_of(task: Callable[..., Any]) -> TaskInfo:
    """How to run a question or a method's own task."""
    return task.info if isinstance(task, Question) else task_info(task)


def describe_task(task: Callable[..., Any]) -> dict[str, Any]:
    """A task as plain data: a question, or the name of a method's own task."""
    return task.describe() if isinstance(task, Question) else {"name": task.__name__}


def find_task(
    described: Mapping[str, Any], method: Any, home: Any, allow: tuple[str, ...]
) -> Callable[..., Any]:
    """The task that plain data describe; the inverse of `describe_task`.

    Parameters
    ----------
    described
        What `describe_task` returned.
    method
        The method the task belongs to.
    home
        Folder for questions that keep something on the client's disk.
    allow
        Packages whose questions may be asked.
    """
    if "question" not in described:
        name = str(described["name"])
        if not hasattr(getattr(type(method), name, None), "__task__"):
            raise ConfigError(
                f"{type(method).__name__} has no task '{name}'. Install the same version of the "
                "method on the server and on this node."
            )
        task: Callable[..., Any] = getattr(method, name)
        return task
    place = str(described["question"])
    module, _, _ = place.partition(":")
    package = module.split(".")[0]
    if package not in allow:
        raise ConfigError(
            f"The question {place} is code of '{package}', which this node does not allow. If you "
            f"trust it, start the node with --allow {package}"
        )
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"The question {place} cannot be imported: {error}.") from error
    if place not in QUESTIONS:
        raise ConfigError(f"{place} is not a question. Put @question() above its definition.")
    arguments = dict(described["arguments"])
    function = QUESTIONS[place]
    if _registered(function).home:
        arguments["home"] = home
    return Question(function, method, arguments, described["split"], stackable=False)
