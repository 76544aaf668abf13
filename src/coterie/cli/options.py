"""Options that several commands share, and how commands print what they found."""

import ast
import functools
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Trust = Annotated[
    list[str] | None,
    typer.Option(
        help="Code of your own that the file names, as package.module:Name. Nothing else is "
        "imported. May be repeated."
    ),
]
Track = Annotated[
    str | None, typer.Option(help="Also log to: tensorboard, mlflow or wandb (offline).")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Folder = Annotated[Path, typer.Argument(help="A run folder, written by coterie run --out.")]
Data = Annotated[
    Path,
    typer.Option(
        help="Rows of one client: a CSV, Parquet or NPZ file, or a folder of class/image files."
    ),
]
Why = Annotated[
    str | None,
    typer.Option(
        help="What clients may send to explain how groups differ: 'nothing', or a list, separated "
        "by commas, of columns, labels, predictions and images."
    ),
]
Rows = Annotated[
    Path | None, typer.Option(help="Your data: a folder with a file per client, or one table.")
]
Method = Annotated[
    str | None, typer.Option(help="Name of the method for --data; see: coterie list.")
]
Groups = Annotated[
    str | None,
    typer.Option(help="Number of groups for --data. Default: 'auto', found from the data."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one option, e.g. run.rounds=50. May be repeated."),
]
PANEL = "How the data are read"
READING: dict[str, tuple[Any, Any]] = {
    "label": (str, "Column to predict."),
    "client": (str, "Column with the name of the client, if the data are one table."),
    "task": (str, "classification, regression or reconstruction. Default: by the label."),
    "test_fraction": (float, "Share of each client's rows for testing. Default: 0.2."),
    "validation_fraction": (float, "Share of the other rows for validation. Default: 0."),
    "split": (
        str,
        "random, stratified, time, or a column that says train, validation or test. "
        "Default: random.",
    ),
    "unit": (
        list[str],
        "Column that says which rows belong together, e.g. the patient. They stay on one side of "
        "every split and count once. May be repeated.",
    ),
    "time": (
        list[str],
        "Column that orders the rows. The latest are held back for testing. May be repeated, "
        "e.g. year, month, day.",
    ),
    "normalise": (bool, "Standardise numbers. Default: yes."),
    "names": (list[str], "Client to use. May be repeated. Default: all."),
    "categorical": (list[str], "Column to read as categories. May be repeated."),
    "text": (list[str], "Column to read as text. May be repeated."),
    "text_features": (int, "Largest number of features of all text together. Default: 100."),
    "drop": (list[str], "Column to leave out. May be repeated."),
    "separator": (str, "What separates cells: ',' ';' '|' 'tab' 'space'. Default: found."),
    "header": (bool, "Whether the first line names the columns. Default: found."),
    "encoding": (str, "Encoding of text files, e.g. latin-1. Default: found."),
    "na_values": (
        list[str],
        "Value that means missing, besides empty, ?, NA, N/A, NaN, null; e.g. -9. May be repeated.",
    ),
    "size": (str, "Height and width to scale images to, e.g. 32 or 32x48."),
}
"""The options of data, under the names they have in Python and in a run file."""


def reads_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `READING`; it gets those that were used as `reading`."""
    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.name != "reading"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                typer.Option(*_flags(name, kind), help=text, rich_help_panel=PANEL),
            ],
        )
        for name, (kind, text) in READING.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        used = {name: given.pop(name) for name in READING}
        reading = {name: value for name, value in used.items() if value not in (None, [])}
        if reading.get("separator") in SEPARATORS:
            reading["separator"] = SEPARATORS[reading["separator"]]
        if "size" in reading:
            reading["size"] = _size(reading["size"])
        command(**given, reading=reading)

    # Positional parameters come first, then options of the command, then those of the data.
    shown = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *added]
    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown} | {"return": None}
    return run


SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Separators by the names they have on the command line."""


def _flags(name: str, kind: Any) -> list[str]:
    flag = name.replace("_", "-")
    return [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]


def _size(text: str) -> list[int]:
    """Height and width of images.

    >>> _size("32"), _size("32x48")
    ([32, 32], [32, 48])
    """
    from coterie.core.errors import ConfigError

    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--size must be a number of pixels, or HEIGHTxWIDTH. Got '{text}'.")
    return [int(part) for part in (parts * 2)[:2]]


def check_source(
    command: str, example: str, file: str | None, data: Path | None, flags: dict[str, Any]
) -> None:
    """Refuse both a run file and data, or neither, and with a file the flags that are for data."""
    from coterie.core.errors import ConfigError

    if (file is None) == (data is None):
        got = "neither" if file is None else "both"
        raise ConfigError(
            f"coterie {command}: give either a run file or --data. Got {got}. For example: coterie "
            f"{command} {example}"
        )
    for flag, value in flags.items() if file is not None else ():
        if value is not None:
            instead = "" if file == "quickstart" else f" Change {file} instead, or use --set."
            raise ConfigError(f"coterie {command}: {flag} has no use with {file}.{instead}")


def parse_sets(pairs: list[str] | None) -> dict[str, dict[str, Any]]:
    """`table.option=value` pairs as tables.

    >>> parse_sets(["algorithm.n_groups=3", "run.rounds=5"])
    {'algorithm': {'n_groups': 3}, 'run': {'rounds': 5}}
    >>> parse_sets(["run.policy.mean=median", "run.policy.strikes=5"])
    {'run': {'policy': {'mean': 'median', 'strikes': 5}}}
    """
    from coterie.core.errors import ConfigError

    tables: dict[str, dict[str, Any]] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        table, dot, option = name.partition(".")
        if not (equals and dot and table and option):
            raise ConfigError(
                f"--set must have the form table.option=value, such as algorithm.n_groups=3. Got "
                f"'{pair}'."
            )
        place = tables.setdefault(table, {})
        *above, option = option.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[option] = _value(value)
    return tables


def as_options(text: str) -> str:
    """A sentence with the options in it written as on the command line, not as in Python.

    >>> as_options("Leave it out (drop=['No']), or split by it (time='No').")
    'Leave it out (--drop No), or split by it (--time No).'
    >>> as_options("It may stop by itself (settings={'stop': 'validation', 'validation': 0.2}).")
    'It may stop by itself (--set run.stop=validation --set run.validation=0.2).'
    """
    text = re.sub(r"settings=\{(['\"]\w+['\"]: [^{}]*)\}", _settings, text)
    return re.sub(_OPTION, _flag, text)


_SETS = {
    "model": "model.name",
    "rounds": "run.rounds",
    "stop": "run.stop",
    "replicates": "run.replicates",
}
_OPTION = re.compile(
    rf"(?<![\w.'-])({'|'.join([*READING, *_SETS])})=(\[[^\]]*\]|'[^']*'|\w+|\.\.\.)"
)


def _flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    listed = re.findall(r"'([^']*)'", value) or [value]
    if name in _SETS:
        return f"--set {_SETS[name]}={listed[0]}"
    flag = name.replace("_", "-")
    if READING[name][0] is bool:
        return f"--{flag}" if value == "True" else f"--no-{flag}"
    return " ".join(f"--{flag} {shlex.quote(one)}" for one in listed)


def _settings(found: re.Match[str]) -> str:
    pairs = re.findall(r"['\"](\w+)['\"]: ['\"]?([\w.]+)['\"]?", found[1])
    return " ".join(f"--set run.{name}={value}" for name, value in pairs)


def _value(text: str) -> Any:
    """Numbers, lists and words; `true`, `false` and `null` as in run files."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def print_json(content: Any) -> None:
    """Print plain data as JSON; what is not plain, such as a path, as text."""
    import json

    print(json.dumps(content, default=str))


def show_found(found: Any, json: bool, picture: Path | None) -> None:
    """Print what was found, as JSON or in words with the path of its picture."""
    if json:
        print_json(found.to_json())
        return
    print(as_options(str(found)))
    if picture is not None:
        print(f"\nPicture: {picture}")
