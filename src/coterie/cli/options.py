"""Options that several commands share."""

import ast
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Folder = Annotated[Path, typer.Argument(help="A run folder, written by coterie run --out.")]
Data = Annotated[
    Path,
    typer.Option(
        help="Rows of one client: a CSV, Parquet or NPZ file, or a folder of class/image files."
    ),
]
Unit = Annotated[
    list[str] | None,
    typer.Option(
        help="Column whose rows belong together, e.g. the patient: kept on one side of every "
        "split, counted once. May be repeated."
    ),
]
Time = Annotated[
    list[str] | None,
    typer.Option(
        help="Column that orders the rows: the latest are held back for testing. May be repeated, "
        "e.g. year, month, day."
    ),
]


def parse_sets(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """`table.option=value` pairs as tables.

    >>> parse_sets(["algorithm.n_groups=3", "run.rounds=5"])
    {'algorithm': {'n_groups': 3}, 'run': {'rounds': 5}}
    """
    from coterie.core.errors import ConfigError

    tables: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        table, dot, option = name.partition(".")
        if not (equals and dot and table and option):
            raise ConfigError(
                f"--set must have the form table.option=value, such as algorithm.n_groups=3. Got "
                f"'{pair}'."
            )
        tables.setdefault(table, {})[option] = _value(value)
    return tables


def _value(text: str) -> Any:
    """Numbers, lists and words; `true`, `false` and `null` as in run files."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
