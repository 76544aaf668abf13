"""Run the contract and report the results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from coterie.checks.contract import CHECKS, Broken, DoesNotApply
from coterie.checks.problem import Problem
from coterie.checks.trial import Make
from coterie.core.algorithm import Algorithm, find
from coterie.core.errors import ConfigError, unknown
from coterie.core.model import Model
from coterie.core.training import LocalSGD

ENGINES = ("loop", "stacked", "wire")
KERNELS = ("stacked:twins", "stacked:gram", "stacked:vmap", "stacked:loop")
"""The stacked engine with each of its kernels forced."""


class CheckResult(NamedTuple):
    """The result of one check."""

    check: str
    passed: bool
    sentence: str


class Report(list[CheckResult]):
    """The results of all checks of a method, in order."""

    def __init__(self, method: str, results: Iterable[CheckResult]) -> None:
        super().__init__(results)
        self.method = method

    @property
    def failures(self) -> list[CheckResult]:
        """The checks that did not pass."""
        return [result for result in self if not result.passed]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return not self.failures

    def __str__(self) -> str:
        if self.passed:
            return f"{self.method} keeps the contract: {len(self)} checks passed."
        lines = [
            f"{self.method} breaks the contract in {len(self.failures)} of {len(self)} checks."
        ]
        return "\n".join([*lines, *(f"  {r.check}: {r.sentence}" for r in self.failures)])


Subject = str | Algorithm | type[Algorithm] | Callable[[Problem], Algorithm]


def check_algorithm(
    method: Subject,
    engines: Sequence[str] = ENGINES,
    only: Iterable[str] | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Check that a method keeps the contract.

    Parameters
    ----------
    method
        A class with `example`, its registered name, a function that builds an instance for a
        `Problem`, or an instance. The networks and the local training of an instance are replaced
        by those of the problem.
    engines
        Engines for each check; "stacked:twins" and similar names force a kernel (`KERNELS`). "ray":
        clients on two shards, in this process where a check disturbs them, else in Ray's.
    only
        Names of the checks to run. None: all of `CHECKS`.
    on_result
        Function that is called with each result as soon as it is known.
    """
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise ConfigError(unknown("check", name, CHECKS))
    for engine in engines:
        if engine not in (*ENGINES, *KERNELS, "ray"):
            raise ConfigError(unknown("engine", engine, (*ENGINES, "ray")))
    title, make = _maker(method)
    results = []
    for name in names:
        results.append(_result(name, make, engines))
        if on_result is not None:
            on_result(results[-1])
    return Report(title, results)


def assert_contract(
    method: Subject, engines: Sequence[str] = ENGINES, only: Iterable[str] | None = None
) -> None:
    """`check_algorithm` for tests: raises an AssertionError with all failures."""
    report = check_algorithm(method, engines, only)
    if not report.passed:
        raise AssertionError(str(report))


def _maker(method: Subject) -> tuple[str, Make]:
    if isinstance(method, str):
        method = find(method, {method})
    if isinstance(method, Algorithm):
        return type(method).__name__, partial(_adapt, method)
    if isinstance(method, type):
        cls: type[Algorithm] = method
        return cls.__name__, cls.example
    return getattr(method, "__name__", "The method"), method


def _adapt(algorithm: Algorithm, problem: Problem) -> Algorithm:
    own: dict[type, Any] = {Model: problem.model, LocalSGD: problem.local}
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return replace(
        algorithm, **{name: own[type(v)] for name, v in values.items() if type(v) in own}
    )


def _result(name: str, make: Make, engines: Sequence[str]) -> CheckResult:
    check = CHECKS[name]
    explanation = " ".join((check.__doc__ or "").split())
    for engine in engines:
        try:
            check(make, engine)
        except Broken as broken:
            return CheckResult(name, False, f"{broken} (engine: {engine})")
        except DoesNotApply as reason:
            return CheckResult(name, True, f"Does not apply: {reason}")
        except Exception as error:  # raised by the method: a result, not an error of the check
            what = f"{type(error).__name__}: {error}"
            return CheckResult(
                name, False, f"{explanation} Instead it stopped with {what} (engine: {engine})"
            )
    return CheckResult(name, True, explanation)
