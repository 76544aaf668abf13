"""The catalogue of methods, networks, data sets and recipes, with their descriptions."""

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from coterie import algorithms, data, models
from coterie.core.algorithm import REGISTRY, Algorithm
from coterie.core.errors import ConfigError, unknown
from coterie.core.plugins import load_plugins
from coterie.core.policy import Policy
from coterie.data.assemble import Reading
from coterie.data.formats import ENDINGS
from coterie.measured import say_where

assert algorithms  # imported for the methods it lists

QUICKSTART = "rotated digits, 40 clients, 4 hidden groups: five methods under one protocol"


class Entry(NamedTuple):
    """A recipe: a line for the list, and a description."""

    line: str
    text: str


OWN_DATA = f"""data: your own files

Data are a folder with a file per client, or one table in which a column names the client:

  coterie run --data sites/ --label outcome
  coterie run --data all.csv --client hospital --label outcome

Files end in {", ".join(ENDINGS)},
each also compressed (.gz, .zip). Images are in client/class/image.png. Separator, header, encoding
and missing values are detected and reported in one line. Rows without a label are left out.

The options below have the same names everywhere:

  command line                 --drop id --drop name --na-values -9 --no-header
    (run, advise, compare, recheck)
  Python                       coterie.from_folder("sites/", "outcome", drop=["id", "name"])
  run file                     [data]
                               name = "folder"    # or "table"
                               path = "sites/"    # or table = "all.csv" and client = "hospital"
                               label = "outcome"
                               drop = ["id", "name"]

Python also takes data frames (pandas, polars), Hugging Face datasets, arrays and functions:
from_table, from_arrays, from_partitions, from_function."""

OF_READERS = """\
label
    Column to predict. None: the inputs are reconstructed.
client
    Column with the name of the client, if the data are one table.
size
    Height and width to scale images to. None: all images must have one size."""

RECIPE_LISTS: list[Callable[[], dict[str, Entry]]] = []
"""Functions that list recipes by name; packages add their own when they are loaded."""

WHEN = {
    "local_only": "as a baseline, to see whether federated learning helps at all.",
    "fedavg": "if clients are alike, or as a baseline for grouping.",
    "fedprox": "if you want one model for all and clients drift apart in long local training.",
    "ditto": "if each client needs its own model, which should benefit from a common model.",
    "per_fedavg": "if clients can take a gradient step on their own data before they predict.",
    "fedproto": "if messages must be small, or clients must not send weights.",
    "fedala": "if clients share most features and differ in the last layers.",
    "fedpac": "if clients have similar inputs and different labels; slow with many clients.",
    "fedem": "if each client's data mix a few rules of labelling, with its own shares.",
    "fedgmm": "like fedem, if the components also differ in their inputs.",
    "ifca": "if you know the number of groups and can try several starts (run.restarts=10).",
    "cfl": "if groups contradict each other, all clients take part, and there is time to converge.",
    "fesem": "if you know the number of groups and their trained models are far apart.",
    "pacfl": "if groups differ in inputs of one size; it does not see differences in labels.",
    "flexcfl": "if you know the number of groups and a short training tells them apart.",
    "oneshot": "if a linear model of the raw inputs already differs between groups.",
    "survey": "if groups differ clearly (inputs, meanings or label shares): one cheap exchange.",
    "census": "if you expect groups; their number may be unknown (max_groups), even one.",
    "clove": "to compare with the paper; the number of groups may be unknown (max_groups).",
    "fedsoft": "if clients mix several groups and only their own accuracy matters.",
    "blend": "if each client's data are a mixture and you want to know the shares.",
    "fedgmi": "to compare with the paper; the number of components is given.",
    "mosaic": "if samples have no labels and the number of clusters is unknown.",
    "fedgem": "to compare with the paper; each client knows its number of components.",
    "kfed": "if samples have no labels and you know the number of clusters; one exchange.",
    "federated_kmeans": "like kfed, in several rounds.",
    "federated_cmeans": "like federated_kmeans, with fuzzy memberships.",
}


def catalogue() -> dict[str, dict[str, str]]:
    """All names by kind, each with a one-line description."""
    load_plugins()
    return {
        "algorithms": {name: _first(cls) for name, cls in sorted(REGISTRY.items())},
        "models": {name: _first(maker) for name, maker in sorted(models.MODELS.items())},
        "data": {name: _first(maker) for name, maker in sorted(data.PROBLEMS.items())},
        "recipes": {name: entry.line for name, entry in list_recipes().items()},
    }


def list_recipes() -> dict[str, Entry]:
    """The quickstart, and the recipes of other packages."""
    load_plugins()
    found = {"quickstart": Entry(QUICKSTART, "Run it with: coterie run quickstart")}
    for recipes in RECIPE_LISTS:
        found |= recipes()
    return found


def _first(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0].rstrip(".")


def describe(name: str) -> str:
    """Describe what something does, when to use it, and its options."""
    load_plugins()
    if name in ("data", *data.READERS):
        return describe_data()
    if name == "policy":
        return _describe(name, Policy)
    for names in (REGISTRY, models.MODELS, data.PROBLEMS):
        if name in names:
            return _describe(name, names[name])
    recipes = list_recipes()
    if name in recipes:
        return f"{name}: {recipes[name].line}\n\n{recipes[name].text}"
    known = ["data", "policy", *(name for names in catalogue().values() for name in names)]
    raise ConfigError(unknown("name", name, known))


def describe_data() -> str:
    """Describe how your own data are read, with all options."""
    options = inspect.getdoc(Reading) or ""
    options = options[options.index("task\n") :].rstrip()
    return f"{OWN_DATA}\n\nOptions\n\n{options}\n{OF_READERS}"


def _describe(name: str, thing: Any) -> str:
    module = sys.modules[thing.__module__]
    parts = [name]
    if isinstance(thing, type) and issubclass(thing, Algorithm):
        parts.append(inspect.getdoc(module) or "")
        if name in WHEN:
            parts.append(f"Use it {WHEN[name]}")
        if measured := say_where(name):
            parts.append(textwrap.fill(measured, 100))
    parts.append(inspect.getdoc(thing) or "")
    parts.append("Options\n" + "\n".join(_options(thing)))
    return "\n\n".join(parts)


def _options(thing: Any) -> list[str]:
    if is_dataclass(thing):
        pairs = [(f.name, f.default) for f in fields(thing)]
        return [f"  {n}" + ("" if d is MISSING else f" = {d!r}") for n, d in pairs]
    parameters = inspect.signature(thing).parameters.values()
    return [f"  {p}" for p in parameters if p.name != "data"]


def import_file(path: Path, what: str = "defines a method") -> ModuleType:
    """The module in a Python file; `what` says what the file is for, should it be missing."""
    if not path.exists():
        raise ConfigError(f"{path} must be a Python file that {what}. It does not exist.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {error}.") from error
    return module


def load_file(path: Path) -> type[Algorithm]:
    """The method in a Python file: the last one that it defines."""
    module = import_file(path)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == path.stem
    ]
    if not found:
        raise ConfigError(f"{path} must define a subclass of coterie.Algorithm. Got none.")
    return found[-1]
