"""The user's own data on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.cli.options import as_options
from coterie.core.errors import ConfigError, DataError


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


def say_data(data: Any) -> None:
    """Print what was read in one line, and a line for each warning."""
    if data.reading:
        print(data.reading)
    for warning in data.warnings:
        print(f"Warning: {as_options(str(warning))}")
