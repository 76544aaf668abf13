"""Own data on the command line, as the tables of a run file."""

from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, DataError


def table(data: Path | None, label: str | None, client: str | None) -> dict[str, Any]:
    """A folder (a file per client), or one table with a client column, as a run file's [data]."""
    if data is None or not data.exists():
        raise DataError(f"{data} does not exist.")
    path = str(data.resolve())
    if data.is_dir():
        return {"name": "folder", "path": path, "label": label}
    if client is None:
        raise ConfigError(
            f"{data} is one file: say which column names the client, --client COLUMN."
        )
    return {"name": "table", "table": path, "label": label, "client": client}


def described(
    data: Path | None, label: str | None, client: str | None, algorithm: str, groups: str
) -> dict[str, Any]:
    """A run on a folder (a file per client) or on one table with a client column."""
    source = table(data, label, client)
    from dataclasses import fields

    from coterie import algorithms  # noqa: F401 - lists the methods
    from coterie.core.algorithm import find
    from coterie.fitted import counted, default_groups, default_local, suggested
    from coterie.running.build import make_data

    made = make_data(source)
    _, found = counted(made, algorithm, groups)
    known = {field.name for field in fields(find(algorithm))}
    found = found or default_groups(algorithm, known, groups, len(made))
    return {
        "algorithm": {"name": algorithm, **found},
        "model": {"name": suggested(made)},
        "local": default_local(),
        "data": source,
        "run": {"rounds": 30},
    }
