"""Published tables and figures as data: which runs, which of their figures, what was printed.

A `Study` is one experiment with one method; several tables may show figures of the same study. A
`Recipe` is a table or figure: entries, each a figure of a study beside the published one.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from coterie.core.algorithm import REGISTRY
from coterie.core.errors import ConfigError, unknown
from coterie.running.build import Description

SCALES = ("paper", "quick")
SPEED = 20e9
"""Operations per second of one core, for estimates; studies state theirs in this unit."""


@dataclass(frozen=True)
class Study:
    """One experiment with one method.

    Parameters
    ----------
    name
        Path-like and unique, as "clove/mnist/label-skew-1/ifca".
    describe
        `describe(seed, scale)`: the run file.
    source
        Data set it needs; None for data made from a seed.
    seconds
        Estimate for one seed at paper scale, on one core.
    quick
        Whether there is a version that takes seconds.
    after, trial
        `after(result)` adds figures to those of the run; `trial(seed, scale)` gives all of them
        for a study that is no single run. Its run file stands for one of the runs.
    """

    name: str
    describe: Callable[[int, str], Description]
    source: str | None = None
    seconds: float = 60.0
    quick: bool = True
    after: Callable[[Any], dict[str, Any]] | None = None  # more figures from a finished run
    trial: Callable[[int, str], dict[str, Any]] | None = None  # figures of many short runs instead


@dataclass(frozen=True)
class Value:
    """A printed figure: mean and deviation; no mean for a dash (never reached)."""

    mean: float | None
    std: float | None = None
    text: str = ""

    @classmethod
    def of(cls, text: str) -> "Value | None":
        """Read "99.8 ± 0.1", "2.0" or "—"; None for nothing.

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
    """One place of a table: a figure of a study (None: its method is not built yet)."""

    part: str  # the block of the table, as "Label skew 1"
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
        Seeds of the publication.
    curves
        For a figure: the figure of each round that is drawn.
    departures
        Where the runs differ from the publication, and why.
    """

    name: str
    title: str
    paper: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    curves: str | None = None
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def studies(self) -> list[Study]:
        """What has to run, each once, in the order of the table."""
        found = {e.study.name: e.study for e in self.entries if e.study is not None}
        return list(found.values())

    def chosen(
        self, cells: str | None, methods: Iterable[str] | None, scale: str = "paper"
    ) -> list[Study]:
        """The studies whose name matches a pattern and whose method is wanted."""
        wanted = {_plain(name): name for name in methods or ()}
        known = {_plain(_method_of(study)): _method_of(study) for study in self.studies()}
        for method in wanted.keys() - known.keys():
            raise ConfigError(unknown(f"method of {self.name}", wanted[method], known.values()))
        return [
            study
            for study in self.studies()
            if (cells is None or any(_matches(study.name, part) for part in cells.split(",")))
            and (not wanted or _plain(_method_of(study)) in wanted)
            and (scale == "paper" or study.quick)
        ]

    def hours(self, seeds: int | None = None) -> float:
        """Estimate for the whole table on one core."""
        n = len(self.seeds) if seeds is None else seeds
        return sum(study.seconds for study in self.studies()) * n / 3600


def _method_of(study: Study) -> str:
    return study.name.rsplit("/", 1)[-1]


def _plain(name: str) -> str:
    """A method's name as people may write it: FedGEM-BIC, fedgem_bic."""
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
    "CLoVE (ours)": "clove_ours",
}
"""Names the papers print, and the methods here."""
VARIANTS = {"clove_ours": "clove"}
"""Rows that are another row's method with our own options."""


def built(row: str) -> bool:
    """Whether a method of a table is here."""
    name = METHODS.get(row, row.lower())
    return VARIANTS.get(name, name) in REGISTRY


def method(row: str, n_groups: int | None, **options: dict[str, Any]) -> dict[str, Any]:
    """The table [algorithm] of a method; `options` by the method's own name."""
    from dataclasses import fields

    variant = METHODS[row]
    name = VARIANTS.get(variant, variant)
    known = {field.name for field in fields(REGISTRY[name])} if name in REGISTRY else set()
    out: dict[str, Any] = {"name": name}
    if "n_groups" in known and n_groups is not None:
        out["n_groups"] = n_groups
    return out | {k: v for k, v in options.get(variant, {}).items() if k in known}


def estimate(
    rounds: int, samples: float, forward: float, epochs: float = 1, probes: float = 0
) -> float:
    """Seconds of a run: samples per round, flops of one forward pass, models that are probed."""
    return rounds * samples * forward * (3 * epochs + probes) / SPEED


@dataclass
class Figures:
    """What all seeds of a study gave for one metric."""

    values: list[float | None] = field(default_factory=list)

    @property
    def numbers(self) -> list[float]:
        """The values, none if one of them is missing."""
        found = [v for v in self.values if v is not None]
        return found if len(found) == len(self.values) else []

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if there are none, or one never got there."""
        return sum(self.numbers) / len(self.numbers) if self.numbers else None

    @property
    def std(self) -> float | None:
        """Population deviation, as the papers have it; None for one seed."""
        mean = self.mean
        if mean is None or len(self.numbers) < 2:
            return None
        return math.sqrt(sum((v - mean) ** 2 for v in self.numbers) / len(self.numbers))

    def text(self, digits: int) -> str:
        """As the papers print it, with the number of seeds if it is one."""
        if not self.values:
            return "not run yet"
        if self.mean is None:
            return "—"
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


RECIPES: dict[str, Recipe] = {}
"""The tables and figures by name."""


def add(recipe: Recipe) -> Recipe:
    """List a recipe."""
    RECIPES[recipe.name] = recipe
    return recipe


def find(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        raise ConfigError(unknown("recipe", name, RECIPES))
    return RECIPES[name]
