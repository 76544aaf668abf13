"""The record of a run: an append-only log whose entries are chained by their hashes.

Every entry names the hash of the entry before it, so an entry that is changed, removed or put in
later breaks the chain. An entry has a kind and data:

    begun       the run: a hash of run.json without its numeric plan
    plan        the numeric plan of run.json
    started     the first state: which clients have which group
    round       a round: a hash of its line in rounds.jsonl, and which clients moved where
    saved       a checkpoint: the hash of the state, that is of all aggregates, and of memory
    resumed     the run goes on after a round; later rounds are computed again
    placed      groups of the final state that differ from those of the last round
    finished    the hashes of the results

Others are added where they happen: faults, policies, a spent budget. There are no times, so equal
runs have equal records.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.running.files import LOG, append, cut, no_nan, parse_json, plain, read

FIRST = "0" * 64
"""What the first entry has in place of the hash of an entry before it."""


def digest(value: Any) -> str:
    """SHA-256 of plain data; equal content gives equal hashes.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(no_nan(value), sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


def add(path: Path, kind: str, **data: Any) -> str:
    """Add an entry; its hash."""
    number, previous = _last(path)
    entry = {"entry": number + 1, "kind": kind, **no_nan(data), "previous": previous}
    entry = json.loads(json.dumps(entry, default=plain))  # as it will be read
    text = digest(entry)
    append(path, json.dumps({**entry, "hash": text}) + "\n")
    return text


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a record, each checked against the one before it.

    An incomplete last line, of a process that was killed, is ignored.
    """
    previous = FIRST
    try:
        data = read(path, LOG)
    except FileNotFoundError:
        return
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        source = f"{path}, line {number},"
        entry = parse_json(text, source)
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise DataError(f"{source} is not an entry of a record.")
        rest = {key: value for key, value in entry.items() if key != "hash"}
        if entry.get("hash") != digest(rest):
            raise DataError(f"{source} was changed: it does not have the hash it was written with.")
        if entry.get("previous") != previous or entry.get("entry") != number:
            raise DataError(
                f"{source} does not follow the entry before it: entries were removed, added or "
                "exchanged."
            )
        previous = entry["hash"]
        yield entry


def moves(before: Tensor | None, after: Tensor | None) -> dict[int, int]:
    """The clients whose group is new or another, and that group.

    >>> import torch
    >>> moves(torch.tensor([0, 1, -1]), torch.tensor([0, 0, 1, -1]))
    {1: 0, 2: 1}
    """
    if after is None:
        return {}
    old = torch.full_like(after, -1)
    if before is not None:
        old[: len(before)] = before
    return {client: int(after[client]) for client in (after != old).nonzero().flatten().tolist()}


def _last(path: Path) -> tuple[int, str]:
    """Number and hash of the last entry; what a killed process left of another one is cut off."""
    try:
        size, length = path.lstat().st_size, 4096
    except FileNotFoundError:
        return 0, FIRST
    tail = read(path, last=length)
    while tail.count(b"\n") < 2 and len(tail) < size:
        length *= 8
        tail = read(path, last=length)
    end = tail.rfind(b"\n") + 1
    if end < len(tail):
        cut(path, size - len(tail) + end)
    if not end:
        return 0, FIRST
    line = tail[:end].rstrip(b"\n").rpartition(b"\n")[2]
    source = f"The last line of {path}"
    entry = parse_json(line, source)
    if not (isinstance(entry, dict) and type(entry.get("entry")) is int and "hash" in entry):
        raise DataError(f"{source} is not an entry of a record. Restore it, or move it away.")
    return entry["entry"], str(entry["hash"])
