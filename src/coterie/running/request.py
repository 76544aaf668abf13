"""From a request to a run: the one way in for `coterie.fit` and for `coterie run --data`.

Both fill in a `Request`. `resolve` adds what the request leaves open (the network, the local
training, the number of groups), so the same request gives the same run through either door.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie.core.algorithm import Algorithm, name_of
from coterie.core.config import construct, find_imports
from coterie.core.errors import ConfigError, unknown
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data.federated import FederatedData
from coterie.running.build import (
    Description,
    Run,
    Settings,
    as_model,
    build,
    build_model,
    check,
    find_parts,
    make_data,
    name_model,
)
from coterie.running.start import read_start
from coterie.running.survey import survey_clients

DEFAULT_METHOD = "census"
ROUNDS = 30
LOCAL = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 32}
"""Local training that suits small tables and images alike."""
MOST_GROUPS = 10
"""The largest number of groups that is looked for if none is named."""

Network = str | Mapping[str, Any] | nn.Module | Model | None


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Parameters
    ----------
    data
        The data, or the table [data] of a run file.
    algorithm
        Name of a method, or an instance.
    model
        Name of a network, its options, a module, or None: chosen from the kind of data.
    n_groups
        Number of groups; "auto": found by the method, or by a survey before training; None: the
        method's default.
    local
        Options of local training that differ from `LOCAL`.
    start
        Initial group of clients by name, or the path of a CSV file.
    options
        Further options of the method. The options of a further network, or of further local
        training, are a mapping.
    settings
        Options of the run (`Settings`).
    """

    data: FederatedData | Description
    algorithm: str | Algorithm = DEFAULT_METHOD
    model: Network = None
    n_groups: int | str | None = "auto"
    local: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, int] | str | Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def change(request: Request, tables: Mapping[str, Mapping[str, Any]]) -> Request:
    """The request with some options of a run file's tables changed, and nothing else.

    >>> request = Request({"name": "blobs"}, local={"batch_size": 8})
    >>> change(request, {"local": {"learning_rate": 0.1}, "run": {"rounds": 5}}).local
    {'batch_size': 8, 'learning_rate': 0.1}
    """
    for name, table in tables.items():
        new = dict(table)
        if name == "algorithm":
            for own in ("model", "local"):
                if own in new:
                    raise ConfigError(
                        f"algorithm: {own} is no option of a method, but a table of its own, such "
                        "as model.name or local.learning_rate."
                    )
            method, groups = new.pop("name", request.algorithm), new.pop("n_groups", None)
            n_groups = request.n_groups if groups is None else groups
            options = {**request.options, **new}
            request = replace(request, algorithm=method, n_groups=n_groups, options=options)
        elif name == "run":
            start = new.pop("start", request.start)
            request = replace(request, settings={**request.settings, **new}, start=start)
        elif name == "local":
            request = replace(request, local={**request.local, **new})
        elif name == "model":
            if isinstance(request.model, nn.Module | Model):
                raise ConfigError("model: a module has no options to change. Change it yourself.")
            old = {"name": request.model} if isinstance(request.model, str) else request.model
            request = replace(request, model={**(old or {}), **new})
        elif name == "data":
            if isinstance(request.data, FederatedData):
                raise ConfigError(
                    "data: these data are in memory. Read them again with the option."
                )
            request = replace(request, data={**request.data, **new})
        else:
            part = {**request.options.get(name, {}), **new}
            request = replace(request, options={**request.options, name: part})
    return request


def resolve(request: Request) -> Run:
    """The run that a request asks for."""
    settings = {"rounds": ROUNDS, **request.settings}
    if request.start is not None:
        settings["start"] = read_start(request.start)
    construct(Settings, settings)  # a mistake here is found before the data are read
    data = request.data
    if not isinstance(data, FederatedData):
        data = make_data(data)
    if isinstance(request.algorithm, Algorithm):
        _refuse_options(request, name_of(request.algorithm))
        ready = Run(request.algorithm, data, construct(Settings, settings))
        check(ready)
        return ready
    parts, given, notes = _parts(request, data)
    options, start, more = _groups(request, data, settings, parts, given)
    if start is not None:
        settings["start"] = start
    tables = {"algorithm": {"name": request.algorithm, **options}, **parts, "data": {}}
    noted = replace(data, notes=(*data.notes, *notes, *more))
    tables["run"] = settings
    # What a request names, the user has named in this process.
    return build(tables, find_imports(tables), data=noted, **given)


def _refuse_options(request: Request, name: str) -> None:
    """An instance has its options already; to pass over others in silence would mislead."""
    given = {"model": request.model is not None, "local": bool(request.local)}
    given["n_groups"] = request.n_groups not in ("auto", None)
    given |= dict.fromkeys(request.options, True)
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{name}: the method is given as an instance, so {option} must be set there. "
                f"Leave {option} out, or give the method by name."
            )


def _parts(
    request: Request, data: FederatedData
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The tables of the method's networks and local training, objects, and notes on choices."""
    assert isinstance(request.algorithm, str)
    cls, parts = find_parts(request.algorithm, {request.algorithm})
    optional = {one.name for one in fields(cls) if one.default is not MISSING}
    tables: dict[str, Any] = {}
    given: dict[str, Any] = {}
    notes: list[str] = []
    wanted = {"model": request.model, "local": request.local or None}
    for name, value in wanted.items():
        if name not in parts and value is not None:
            raise ConfigError(f"{request.algorithm} has no option {name}. Leave {name} out.")
    if "local" in parts:
        tables["local"] = {**LOCAL, **request.local}
    # Without labels a method that can do without a classifier has none.
    unlabelled = data.task == "reconstruction" and "model" in optional
    if "model" in parts and not (request.model is None and unlabelled):
        if isinstance(request.model, nn.Module | Model):
            given["model"], tables["model"] = as_model(request.model, data.task), {}
        else:
            tables["model"] = name_model(request.model, data)
            if not isinstance(request.model, str) and "name" not in (request.model or {}):
                notes += _note_model(tables["model"])
    known = {one.name for one in fields(cls)}
    for name, value in request.options.items():
        if isinstance(value, Mapping) and name not in known:
            names = {"algorithm", "data", "run", *parts}
            raise ConfigError(unknown("table of a run file", name, names))
        if name in parts and isinstance(value, Mapping):
            tables[name] = dict(value)
        elif name in parts and isinstance(value, nn.Module | Model):
            given[name], tables[name] = as_model(value, data.task), {}
    return tables, given, notes


def _note_model(table: Description) -> list[str]:
    return [f"Model '{table['name']}', chosen from the kind of data."] if "name" in table else []


def _groups(
    request: Request,
    data: FederatedData,
    settings: Mapping[str, Any],
    parts: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, int] | None, list[str]]:
    """Options of the method with the number of groups, initial groups, and notes on both."""
    assert isinstance(request.algorithm, str)
    cls, tables = find_parts(request.algorithm, {request.algorithm})
    known = {one.name for one in fields(cls)}
    options = {
        name: value
        for name, value in request.options.items()
        if name not in tables or isinstance(value, LocalSGD)
    }
    if "n_groups" not in known:
        if request.n_groups not in ("auto", None):
            raise ConfigError(
                f"{request.algorithm} has no option n_groups. Leave the number of groups out."
            )
        return options, None, []
    if request.n_groups != "auto":
        groups = {} if request.n_groups is None else {"n_groups": request.n_groups}
        return {**groups, **options}, None, []
    if "max_groups" in known:  # the method finds the number
        found: dict[str, Any] = {"max_groups": max(2, min(MOST_GROUPS, len(data) - 1))}
        if request.algorithm == "census" and "start" not in settings:
            found["first"] = "survey"
        return {**found, **options}, None, []
    if "start" in settings:
        k = max(settings["start"].values(), default=0) + 1
        return {"n_groups": k, **options}, None, [f"n_groups={k}, as in start."]
    model = given.get("model") or build_model(parts.get("model"), data)
    findings = survey_clients(data, model, seed=int(settings.get("seed", 0)))
    k, assignment = findings.proposal
    note = f"n_groups={k}, found by a survey before training ({findings.kind})."
    return {"n_groups": k, **options}, assignment if cls.starts else None, [note]
