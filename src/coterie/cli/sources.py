"""The user's own data on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import as_options
from coterie.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coterie.running.build import Run


def check_data(data: Path | None, reading: Mapping[str, Any]) -> None:
    """Refuse a path that does not exist, and options of the other kind of data."""
    if data is None or not data.exists():
        raise DataError(f"{data} does not exist. Check the path.")
    if data.is_dir():
        if "client" in reading:
            raise ConfigError(
                f"{data} is a folder with a file or folder per client, whose name is the client's. "
                "--client is for one table. Leave it out."
            )
    elif "client" not in reading:
        raise ConfigError(
            f"{data} is one file for all clients. Name the column that says which client a row "
            "belongs to: --client COLUMN."
        )
    elif "size" in reading:
        raise ConfigError(f"--size is for folders of images. {data} is one table. Leave it out.")


def name_data(data: Path | None, reading: Mapping[str, Any]) -> dict[str, Any]:
    """The table [data] of a run file for a folder with a file per client, or for one table.

    `reading` holds the options of `coterie.cli.options.READING` that were used.
    """
    check_data(data, reading)
    assert data is not None
    path = str(data.resolve())
    if data.is_dir():
        return {"name": "folder", "path": path, "label": None, **reading}
    return {"name": "table", "table": path, "label": None, **reading}


def make_run(
    file: str | None,
    data: Path | None,
    reading: dict[str, Any],
    changes: dict[str, Any],
    *,
    algorithm: str | None,
    groups: str | None,
    trust: list[str] | None,
    **settings: Any,
) -> "Run":
    """The run that the options of a command ask for: that of a file, or one on the user's data.

    `settings` are options of the run unless the file or `changes` say otherwise.
    """
    from coterie.core.config import find_imports
    from coterie.running.build import build, read
    from coterie.running.request import DEFAULT_METHOD, Request, change, resolve

    if file is None:
        found = name_data(data, reading)
        wanted = algorithm or DEFAULT_METHOD, None, groups or "auto"
        return resolve(change(Request(found, *wanted, settings=settings), changes))
    tables = {name: table for name, table in read(Path(file)).items() if isinstance(table, dict)}
    tables.pop("plan", None)
    for name, options in [("data", reading), *changes.items()]:
        tables.setdefault(name, {}).update(options)
    tables["run"] = {**settings, **tables.get("run", {})}
    return build(tables, {*(trust or ()), *find_imports(changes)})


def say_data(data: Any) -> None:
    """Print what was read in one line, and a line for each warning."""
    if data.reading:
        print(data.reading)
    for warning in data.warnings:
        print(f"Warning: {as_options(str(warning))}")
