"""The privacy budget of a run: its secret, and what was spent before a run is resumed."""

import re
import secrets

from coterie.core.errors import DataError
from coterie.core.privacy import Budget
from coterie.running.build import Settings
from coterie.running.files import read, write
from coterie.running.folder import RECORD, RunFolder
from coterie.running.record import entries

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
    secret = read(path, 100)
    if not re.fullmatch(rb"[0-9a-f]{64}", secret):
        raise DataError(
            f"{path} is damaged: it must hold 64 hexadecimal digits. Put the old file back, or "
            "start a new run."
        )
    return Budget(privacy, bytes.fromhex(secret.decode()))


def count_releases(folder: RunFolder, done: int, simulated: bool) -> int:
    """What was released before a run goes on after a round, by its record.

    A simulation computes later rounds again, with the same answers and the same noise. Real clients
    may answer otherwise: what was released to them before is paid for, too.
    """
    spent, rounds = 0, 0
    for entry in entries(folder.path / RECORD):
        number = int(entry.get("round", 0))
        if entry["kind"] == "budget" and (number <= done or not simulated):
            spent, rounds = max(spent, int(entry["releases"])), max(rounds, number)
    if rounds < done:
        raise DataError(
            f"{folder.path / RECORD}: what was spent up to round {done} is missing, so a private "
            "run cannot be resumed. Restore the file from a copy, or start a new run."
        )
    return spent
