"""The user's own data on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, DataError


def name_data(
    data: Path | None,
    label: str | None,
    client: str | None,
    unit: Sequence[str] | None = None,
    time: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The table [data] of a run file for a folder with a file per client, or for one table."""
    if data is None or not data.exists():
        raise DataError(f"{data} does not exist. Check the path.")
    path = str(data.resolve())
    if data.is_dir():
        table: dict[str, Any] = {"name": "folder", "path": path, "label": label}
    elif client is None:
        raise ConfigError(
            f"{data} is one file for all clients. Name the column that says which client a row "
            "belongs to: --client COLUMN."
        )
    else:
        table = {"name": "table", "table": path, "label": label, "client": client}
    named = {"unit": unit, "time": time}
    return table | {name: list(columns) for name, columns in named.items() if columns}
