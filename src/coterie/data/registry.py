"""Data by name, as a run file has it."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from coterie.core.errors import ConfigError, unknown
from coterie.core.plugins import load_plugins
from coterie.data.assemble import Reading
from coterie.data.federated import FederatedData
from coterie.data.readers import from_folder, from_table
from coterie.data.synthetic import PROBLEMS

READERS: dict[str, Callable[..., FederatedData]] = {"folder": from_folder, "table": from_table}
"""Own data by the name they go by in a run file."""


def make(name: str, **options: Any) -> FederatedData:
    """Data by name; `make(data.name, **data.options)` makes the same data again.

    >>> data = make("blobs", n_groups=2, clients_per_group=3)
    >>> len(data), data.options["n_groups"]
    (6, 2)
    """
    if name not in PROBLEMS and name not in READERS:
        load_plugins()
    known = {**PROBLEMS, **READERS}
    if name not in known:
        raise ConfigError(unknown("problem", name, known))
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(known[name]).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    allowed = set(parameters)
    if name in READERS:
        allowed |= {field.name for field in fields(Reading)}
    for option in options:
        if option not in allowed:
            raise ConfigError(unknown(f"option of {name}", option, allowed))
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"{name}: {option} must be given.")
    return known[name](**options)
