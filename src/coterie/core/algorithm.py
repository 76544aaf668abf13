"""The base class of methods, and the registry of methods."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor

from coterie.core.client import Client, task
from coterie.core.config import check_fields, load
from coterie.core.errors import ConfigError, unknown
from coterie.core.federation import Federation
from coterie.core.tree import Ids, Tree


class Fill(NamedTuple):
    """Marks a state field with one entry per client; `value` is the entry of late joiners."""

    value: float


PerClient: TypeAlias = Annotated[Tensor, Fill(-1)]
"""A state field indexed by client id; -1 for clients that were not asked yet."""


class Evidence(NamedTuple):
    """The group of each client, and how certain it is."""

    group: Tensor  # [m]    group of each client
    margin: Tensor  # [m]   0: between two groups, 1: certain
    score: Tensor  # [m]    strangeness; members have at most about 1, nan if unknown
    fits: Tensor  # [m]     False: the client fits no group


class ComponentShares(NamedTuple):
    """Shares of common components in each client's data, for methods that estimate them."""

    shares: Tensor  # [m, k]  the estimate
    errors: Tensor  # [m, k]  its standard errors; nan if unknown
    others: dict[str, Tensor]  # further estimates by name, each [m, k]
    evidence: dict[str, Any]  # why this number of components, as plain values


class Curve(NamedTuple):
    """Why this number of groups: a criterion for each number, and the number chosen."""

    name: str  # what was compared: "conditional", "joint", "losses", ...
    criterion: str  # "noise ratio", "silhouette", ...
    ks: tuple[int, ...]
    values: tuple[float, ...]
    chosen: int | None  # None: no number satisfies the rule
    runner_up: int | None
    close: tuple[int, ...]  # numbers that these samples cannot distinguish from the chosen one
    threshold: tuple[float, ...] = ()  # for each number; the first at or below it is chosen
    note: str = ""  # additional information, as a sentence


Info: TypeAlias = dict[str, Any]
"""Values to report after a round: `assignment`, `stable`, ..."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """Base class of methods: options as fields, methods for the server, tasks for one client."""

    title: ClassVar[str] = ""
    bar: ClassVar[float] = 0.9  # accuracy that `example()` must reach in the contract
    supervised: ClassVar[bool] = True  # False: no labels; scored by `surprise` and agreement
    starts: ClassVar[bool] = False  # True: starts with the groups in `fed.start`, if given
    summaries: ClassVar[bool] = False  # True: State has a summary of each client, to cluster them
    policy: ClassVar[Mapping[str, Any]] = {}  # options of `Policy` unless the run has its own

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027 - a method may leave it out
        """Raise an error for options that cannot be combined; default: nothing is checked."""

    # server: sees `fed`, never data

    @abstractmethod
    def init(self, fed: Federation) -> Any:
        """The state before the first round; may already ask clients."""

    @abstractmethod
    def step(self, fed: Federation, state: Any) -> tuple[Any, Info]:
        """One communication round."""

    def done(self, state: Any) -> bool:
        """Whether the method has finished."""
        return False

    def place(self, fed: Federation, state: Any, ids: Ids) -> tuple[Any, Evidence]:
        """Assign unassigned clients to groups, and report how well they fit; default: one group."""
        m = len(ids)
        zeros = torch.zeros(m, dtype=torch.int64)
        ones = torch.ones(m, dtype=torch.float64)
        return state, Evidence(zeros, ones, ones * torch.nan, torch.ones(m, dtype=torch.bool))

    @abstractmethod
    def deploy(self, state: Any, ids: Ids) -> Any:
        """What each client receives in order to predict."""

    def mixture(self, state: Any, ids: Ids) -> ComponentShares | None:
        """Estimated shares of components in clients' data; None if the method estimates none."""
        return None

    def curves(self, state: Any) -> list[Curve]:
        """Evidence for the number of groups; empty if the method did not choose the number."""
        return []

    def odd(self, state: Any) -> Ids:
        """Clients that are unlike all others and are trained alone; none by default."""
        return torch.zeros(0, dtype=torch.int64)

    def profiles(self, state: Any) -> Tensor | None:
        """Mean losses of each group's members on each group's model, [k, k], nan where unknown."""
        return None

    # client: sees one `client`

    def client_init(self, client: Client) -> Tree:
        """What a client remembers before it is first asked."""
        return {}

    @task
    def personalise(self, client: Client, given: Tree) -> Tree:
        """A client's own model, from what it received."""
        return given

    # mathematics

    def predict(self, personal: Tree, x: Any) -> Any:
        """Outputs for some inputs, by default of `self.model`; needs no client or federation."""
        return self.model.apply(personal, x)  # type: ignore[attr-defined]

    def surprise(self, output: Any) -> Any:
        """Loss of each sample without labels, from the output of `predict`: [n]."""
        raise NotImplementedError(
            f"{type(self).__name__} learns from labels. Use the loss of its model."
        )

    # for the contract

    @classmethod
    def example(cls, problem: Any) -> "Algorithm":
        """A small instance for a small problem; fields that `checks.Problem` also has are set."""
        options = {field.name: getattr(problem, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if value is not None})


REGISTRY: dict[str, type[Algorithm]] = {}
A = TypeVar("A", bound=type[Algorithm])


def register(name: str) -> Callable[[A], A]:
    """Register a method under a name."""

    def add(cls: A) -> A:
        REGISTRY[name] = cls
        return cls

    return add


def play(algorithm: Algorithm, fed: Federation) -> Iterator[tuple[Any, Info]]:
    """Run a method in memory until it is done; yields every state and the info of its round."""
    fed.begin(-1)
    state, number = algorithm.init(fed), 0
    fed.commit()
    yield state, {}
    while not algorithm.done(state):
        fed.begin(number)
        state, info = algorithm.step(fed, state)
        fed.commit()
        number += 1
        yield state, info


def find(name: str, trust: Iterable[str] = ()) -> type[Algorithm]:
    """The method with a name: built in, from an installed package, or "package.module:Class".

    Installed packages list their methods under the entry point `coterie.algorithms`. A class that
    is not listed is imported only if it is among those to trust.
    """
    if ":" in name:
        cls = load(name, trust)
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise ConfigError(f"{name} must be a subclass of coterie.Algorithm. Got {cls!r}.")
        return cls
    if name not in REGISTRY:
        for entry in entry_points(group="coterie.algorithms"):
            if entry.name == name:
                entry.load()
    if name not in REGISTRY:
        raise ConfigError(unknown("algorithm", name, REGISTRY))
    return REGISTRY[name]


def name_of(algorithm: Algorithm | type[Algorithm]) -> str:
    """The name a method is registered under, or the name of its class."""
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    return next((name for name, known in REGISTRY.items() if known is cls), cls.__name__.lower())


def address_of(algorithm: Algorithm) -> str:
    """The name by which another process finds a method: registered, or "package.module:Class"."""
    cls, name = type(algorithm), name_of(algorithm)
    listed = cls.__module__.startswith("coterie.") or any(
        entry.name == name for entry in entry_points(group="coterie.algorithms")
    )
    module = sys.modules.get(cls.__module__)
    if listed or cls.__module__ == "__main__" or getattr(module, cls.__name__, None) is not cls:
        return name
    return f"{cls.__module__}:{cls.__name__}"


def state_type(algorithm: Algorithm) -> Any:
    """The state class of a method, from the annotation of `init`; None without an annotation."""
    return get_type_hints(type(algorithm).init).get("return")


def per_client_fields(state: Any) -> dict[str, float]:
    """Names and fill values of the fields with one entry per client."""
    try:
        hints = get_type_hints(type(state), include_extras=True)
    except TypeError:
        return {}
    marks = {
        name: mark.value
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Fill)
    }
    return marks


def grow(state: Any, n_clients: int) -> Any:
    """A state with entries for clients that joined late."""
    for name, fill in per_client_fields(state).items():
        values = getattr(state, name)
        missing = n_clients - len(values)
        if missing > 0:
            more = values.new_full((missing, *values.shape[1:]), fill)
            state = state._replace(**{name: torch.cat([values, more])})
    return state
