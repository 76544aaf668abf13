"""The privacy budget of a run: its secret, and what was spent before a run is resumed."""

import secrets
from typing import Any

from coterie.core.errors import DataError
from coterie.core.privacy import Budget
from coterie.running.build import Settings
from coterie.running.files import read, write
from coterie.running.folder import RunFolder

SECRET = "noise.key"
"""File of a run folder from which the noise is drawn; a person who has it can remove the noise."""


def start_budget(settings: Settings, folder: RunFolder | None) -> Budget | None:
    """The budget that the settings ask for; a resumed run draws the same noise again."""
    privacy = settings.as_privacy()
    if privacy is None:
        return None
    if folder is None:
        return Budget(privacy, secrets.token_bytes(32))
    path = folder.path / SECRET
    if not path.exists():
        if any(folder.checkpoints.glob("*.json")):
            raise DataError(
                f"{path} is missing: without it a private run cannot be resumed. Put it back, or "
                "start a new run."
            )
        write(path, secrets.token_hex(32).encode())
    return Budget(privacy, bytes.fromhex(read(path, 100).decode()))


def count_releases(lines: list[dict[str, Any]], plan: dict[str, Any]) -> int:
    """What was released before the next round, from the log or, before round 1, from the plan."""
    return int(lines[-1]["releases"]) if lines else int(plan.get("releases", 0))
