"""Options are defined by the annotated fields of dataclasses; this module checks them."""

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from coterie.core.errors import ConfigError, unknown

T = TypeVar("T")


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    loose = ConfigDict(arbitrary_types_allowed=True)
    adapters = {}
    for field in fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        config = None if hasattr(hint, "__pydantic_config__") or _is_dataclass(hint) else loose
        adapters[field.name] = TypeAdapter(_instance_of(hint), config=config)
    return adapters


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "__dataclass_fields__")


def _instance_of(hint: Any) -> Any:
    """A type hint under which dataclasses are only checked by class, not converted."""
    if isinstance(hint, UnionType):
        return reduce(or_, [_instance_of(part) for part in hint.__args__])
    return InstanceOf[hint] if _is_dataclass(hint) else hint  # type: ignore[misc]


def check_fields(owner: Any) -> None:
    """Check the options of a frozen dataclass; text such as "3" is converted where needed."""
    cls: Any = type(owner)
    for name, adapter in _adapters(cls).items():
        value = getattr(owner, name)
        try:
            checked = adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ConfigError(f"{cls.__name__}: {name} must be {reason}. Got {value!r}.") from None
        if checked is not value:
            object.__setattr__(owner, name, checked)


def construct(cls: type[T], options: dict[str, Any]) -> T:
    """Build a dataclass from named options; unknown and missing names are errors."""
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ConfigError(f"{cls.__name__}: " + unknown("option", name, known))
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in options:
            raise ConfigError(f"{cls.__name__}: {name} must be given.")
    return cls(**options)


def import_module(name: str) -> ModuleType:
    """Import a module that is installed or in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


IMPORT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""How a file names an object to import: package.module:Name."""


def find_imports(value: Any) -> set[str]:
    """The names of objects to import in plain data.

    >>> find_imports({"algorithm": {"name": "mine:Mine"}, "run": {"rounds": 3}})
    {'mine:Mine'}
    """
    if isinstance(value, str):
        return {value} if IMPORT.fullmatch(value) else set()
    parts = value.values() if isinstance(value, Mapping) else value
    nested = isinstance(value, Mapping | list | tuple)
    return set().union(*map(find_imports, parts)) if nested else set()


def load(path: str, trust: Iterable[str] = ()) -> Any:
    """The object that "package.module:Name" names, if the user trusts it.

    A file can name any object, and importing a module runs its code. So nothing is imported unless
    its name is among those that the user has passed.
    """
    if path not in trust:
        raise ConfigError(
            f"'{path}' is code that is not part of Coterie, and nothing is imported because a file "
            f"names it. If you trust it, pass trust=['{path}'], or on the command line: --trust "
            f"{path}"
        )
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"'{path}' cannot be imported: {error}. Write it as package.module:Name."
        ) from error
