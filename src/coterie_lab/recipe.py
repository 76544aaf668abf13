"""Published tables and figures as data: the runs they need and the figures that were printed.

A `Study` is one experiment with one method. Several tables may use the same study. A `Recipe` is a
table or figure. Each of its entries compares a figure of a study with the published figure.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from coterie.core.algorithm import REGISTRY
from coterie.core.errors import ConfigError, unknown
from coterie.running.build import Description

SPEED = 20e9
"""Floating point operations per second of one core, used to estimate running times."""


@dataclass(frozen=True)
class Study:
    """One experiment with one method.

    Parameters
    ----------
    name
        Unique name in the form of a path, such as "clove/mnist/label-skew-1/ifca".
    describe
        `describe(seed, scale)` returns the run file.
    source
        The data set that the study needs; None if the data are generated from a seed.
    seconds
        Estimated time for one seed at paper scale, on one core.
    quick
        Whether the study has a quick version that takes seconds. Every study has a reduced one.
    after
        `after(result)` returns further figures of a finished run.
    trial
        For a study of many short runs: `trial(seed, scale)` returns all its figures. The run file
        then describes one of these runs.
    """

    name: str
    describe: Callable[[int, str], Description]
    source: str | None = None
    seconds: float = 60.0
    quick: bool = True
    after: Callable[[Any], dict[str, Any]] | None = None
    trial: Callable[[int, str], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Value:
    """A published figure: mean and standard deviation; no mean if the paper prints a dash."""

    mean: float | None
    std: float | None = None
    text: str = ""

    @classmethod
    def of(cls, text: str) -> "Value | None":
        """Read "99.8 ± 0.1", "2.0" or "—"; None for an empty text.

        >>> Value.of("99.8 ± 0.1").mean, Value.of("—").mean, Value.of("")
        (99.8, None, None)
        """
        text = text.strip()
        if not text:
            return None
        if text in ("—", "-"):
            return cls(None, None, "—")
        mean, _, std = text.partition("±")
        return cls(float(mean), float(std) if std else None, text)


@dataclass(frozen=True)
class Entry:
    """One cell of a table: a figure of a study. The study is None if its method does not exist."""

    part: str  # the block of the table, for example "Label skew 1"
    row: str  # the method
    column: str
    metric: str
    published: Value | None = None
    study: Study | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A published table or figure.

    Parameters
    ----------
    seeds
        The seeds of the publication.
    curves
        For a figure: the metric that is drawn over the rounds.
    departures
        How the runs differ from the publication, and why.
    notes
        Remarks on the results.
    reduced
        Sizes of the runs at reduced scale.
    compare
        Pairs of rows (method, rival) that the page compares in a sentence.
    """

    name: str
    title: str
    paper: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    curves: str | None = None
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reduced: str = ""
    compare: tuple[tuple[str, str], ...] = ()

    def studies(self) -> list[Study]:
        """All studies of the table, each once, in the order of the table."""
        found = {e.study.name: e.study for e in self.entries if e.study is not None}
        return list(found.values())

    def select(
        self, cells: str | None, methods: Iterable[str] | None, scale: str = "paper"
    ) -> list[Study]:
        """Select the studies whose name matches a pattern and whose method is in a list."""
        wanted = {_plain(name): name for name in methods or ()}
        known = {_plain(_method_of(study)): _method_of(study) for study in self.studies()}
        for method in wanted.keys() - known.keys():
            raise ConfigError(unknown(f"method of {self.name}", wanted[method], known.values()))
        return [
            study
            for study in self.studies()
            if (cells is None or any(_matches(study.name, part) for part in cells.split(",")))
            and (not wanted or _plain(_method_of(study)) in wanted)
            and (scale != "quick" or study.quick)
        ]

    def hours(self, seeds: int | None = None) -> float:
        """Estimated hours for the whole table on one core."""
        n = len(self.seeds) if seeds is None else seeds
        return sum(study.seconds for study in self.studies()) * n / 3600


def _method_of(study: Study) -> str:
    return study.name.rsplit("/", 1)[-1]


def _plain(name: str) -> str:
    """Normalise the name of a method, so that Mosaic-BIC and mosaic_bic are the same."""
    return name.lower().replace("-", "_")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*{pattern}*")


METHODS = {
    "FedAvg": "fedavg",
    "Local-only": "local_only",
    "Per-FedAvg": "per_fedavg",
    "FedProto": "fedproto",
    "FedALA": "fedala",
    "FedPAC": "fedpac",
    "CFL-S": "cfl",
    "FeSEM": "fesem",
    "FlexCFL": "flexcfl",
    "PACFL": "pacfl",
    "IFCA": "ifca",
    "CLoVE": "clove",
    "census": "census",
}
"""The names that the papers print, and the names of the methods."""


def is_built(row: str) -> bool:
    """Whether the method of a table row exists."""
    return METHODS.get(row, row.lower()) in REGISTRY


def method(row: str, n_groups: int | None, **options: dict[str, Any]) -> dict[str, Any]:
    """The [algorithm] table of a method; `options` are given by the name of the method."""
    from dataclasses import fields

    name = METHODS[row]
    known = {field.name for field in fields(REGISTRY[name])} if name in REGISTRY else set()
    out: dict[str, Any] = {"name": name}
    if "n_groups" in known and n_groups is not None:
        out["n_groups"] = n_groups
    return out | {k: v for k, v in options.get(name, {}).items() if k in known}


def local_training(row: str, local: dict[str, Any]) -> dict[str, Any]:
    """The [local] table of a method.

    CFL-S compares norms of updates with the thresholds of the authors' notebook, which suit the
    optimiser of that notebook only. All other methods have the same one.
    """
    notebook = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "decay": 0.99}
    return local | notebook if METHODS.get(row) == "cfl" else dict(local)


def estimate(
    rounds: int, samples: float, forward: float, epochs: float = 1, probes: float = 0
) -> float:
    """Estimate the seconds of a run.

    Parameters
    ----------
    rounds
        Number of rounds.
    samples
        Samples per round, over all clients.
    forward
        Floating point operations of one forward pass.
    epochs
        Local epochs per round.
    probes
        Models that every client evaluates in a round.
    """
    return rounds * samples * forward * (3 * epochs + probes) / SPEED


@dataclass
class Figures:
    """The values of one metric for all seeds of a study."""

    values: list[float | None] = field(default_factory=list)

    @property
    def numbers(self) -> list[float]:
        """The values; an empty list if one of them is missing."""
        found = [v for v in self.values if v is not None]
        return found if len(found) == len(self.values) else []

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if there is no value or one is missing."""
        return sum(self.numbers) / len(self.numbers) if self.numbers else None

    @property
    def std(self) -> float | None:
        """Population standard deviation, as in the papers; None for one seed."""
        mean = self.mean
        if mean is None or len(self.numbers) < 2:
            return None
        return math.sqrt(sum((v - mean) ** 2 for v in self.numbers) / len(self.numbers))

    def text(self, digits: int) -> str:
        """The figure as the papers print it: mean ± standard deviation."""
        if not self.values:
            return "not run yet"
        if self.mean is None:
            return "—"
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


RECIPES: dict[str, Recipe] = {}
"""The tables and figures by name."""


def add(recipe: Recipe) -> Recipe:
    """Register a recipe."""
    RECIPES[recipe.name] = recipe
    return recipe


def find(name: str) -> Recipe:
    """Find a recipe by name."""
    if name not in RECIPES:
        raise ConfigError(unknown("recipe", name, RECIPES))
    return RECIPES[name]
