"""What there is: methods, networks, data, recipes, each with the words that explain it."""

import importlib.util
import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from coterie import algorithms, data, models
from coterie.core.algorithm import REGISTRY, Algorithm
from coterie.core.errors import ConfigError, unknown

assert algorithms  # imported for the methods it lists

RECIPES = {
    "quickstart": "rotated digits, 40 clients, 4 hidden groups: four methods under one protocol",
}

WHEN = {
    "local_only": "as the yardstick: whether federating pays at all.",
    "fedavg": "if clients are alike; as the yardstick for grouping.",
    "ifca": "if the number of groups is known and several starts are affordable (run.restarts=10).",
    "survey": "if groups are coarse (other inputs, meanings or label shares): one cheap exchange.",
    "clove": "if groups are expected; the number may be unknown (max_groups).",
}


def catalogue() -> dict[str, dict[str, str]]:
    """Names by kind, each with a line."""
    return {
        "algorithms": {name: _first(cls) for name, cls in sorted(REGISTRY.items())},
        "models": {name: _first(maker) for name, maker in sorted(models.MODELS.items())},
        "data": {name: _first(maker) for name, maker in sorted(data.PROBLEMS.items())},
        "recipes": {**RECIPES, **_published()},
    }


def _published() -> dict[str, str]:
    """Published tables and figures, each with a line."""
    from coterie.experiments import recipes  # noqa: F401 - lists them
    from coterie.experiments.recipe import RECIPES as tables

    return {name: f"{recipe.paper}, {recipe.title}" for name, recipe in tables.items()}


def _first(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0].rstrip(".")


def explained(name: str) -> str:
    """What something does, when to use it, and its options."""
    for names in (REGISTRY, models.MODELS, data.PROBLEMS):
        if name in names:
            return _explained(name, names[name])
    if name in RECIPES:
        return f"{name}: {RECIPES[name]}\n\nRun it with: coterie run {name}"
    if name in (tables := _published()):
        return f"{name}: {tables[name]}\n\n{_recipe(name)}"
    known = [name for names in catalogue().values() for name in names]
    raise ConfigError(unknown("name", name, known))


def _recipe(name: str) -> str:
    """How to run a published table, how long it takes, and where it departs."""
    from coterie.experiments.recipe import find

    recipe = find(name)
    parts = [
        f"Run it with: coterie reproduce {name}",
        f"{len(recipe.studies())} studies with {len(recipe.seeds)} seeds, about "
        f"{recipe.hours():.1f} hours on one core. A quick look: --scale quick",
        *(f"Departure: {text}" for text in recipe.departures),
        *recipe.notes,
    ]
    return "\n".join(parts)


def _explained(name: str, thing: Any) -> str:
    module = sys.modules[thing.__module__]
    parts = [name]
    if isinstance(thing, type) and issubclass(thing, Algorithm):
        parts.append(inspect.getdoc(module) or "")
        if name in WHEN:
            parts.append(f"Use it {WHEN[name]}")
    parts.append(inspect.getdoc(thing) or "")
    parts.append("Options\n" + "\n".join(_options(thing)))
    return "\n\n".join(parts)


def _options(thing: Any) -> list[str]:
    if is_dataclass(thing):
        pairs = [(f.name, f.default) for f in fields(thing)]
        return [f"  {n}" + ("" if d is MISSING else f" = {d!r}") for n, d in pairs]
    parameters = inspect.signature(thing).parameters.values()
    return [f"  {p}" for p in parameters if p.name != "data"]


def load_file(path: Path) -> type[Algorithm]:
    """The method in a Python file: the one it registers, or the last it defines."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {error}.") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == path.stem
    ]
    if not found:
        raise ConfigError(f"{path} must define a subclass of coterie.Algorithm. It has none.")
    return found[-1]
