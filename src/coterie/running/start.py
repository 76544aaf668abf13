"""Initial groups that are given to a run: from advice, a mapping or a CSV file."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.algorithm import Algorithm, name_of
from coterie.core.errors import ConfigError, DataError


def read_start(start: Mapping[str, int] | str | Path) -> dict[str, int]:
    """Initial groups of clients as plain data: a mapping, or a CSV file.

    A CSV file has the columns client and group, as the clients.csv of a run folder has. An empty
    cell, or -1, means that the client has no initial group.

    >>> read_start({"ann": 0, "bob": 1})
    {'ann': 0, 'bob': 1}
    """
    if isinstance(start, Mapping):
        pairs: list[tuple[str, Any]] = [(str(name), group) for name, group in start.items()]
        where = "start"
    else:
        pairs, where = _read_csv(Path(start)), str(start)
    out: dict[str, int] = {}
    for name, group in pairs:
        if name in out:
            raise DataError(f"{where}: every client must occur once. '{name}' occurs again.")
        try:
            out[name] = int(group)
        except (TypeError, ValueError):
            out[name] = -2
        if out[name] < -1 or (isinstance(group, float) and not group.is_integer()):
            raise DataError(
                f"{where}: a group must be a whole number from 0, or -1 for none. Client '{name}' "
                f"has {group!r}."
            )
    return {name: group for name, group in out.items() if group >= 0}


def _read_csv(path: Path) -> list[tuple[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            columns = lines.fieldnames or []
            rows = list(lines)
    except (OSError, UnicodeError, csv.Error) as error:
        raise DataError(
            f"start: {path} cannot be read ({error}). Give a CSV file with the columns client and "
            "group."
        ) from None
    for name in ("client", "group"):
        if name not in columns:
            raise DataError(
                f"{path}: the file must have the columns client and group. Got "
                f"{', '.join(columns) or 'none'}."
            )
    return [(row["client"], row["group"] or "-1") for row in rows]


def initial_groups(start: Mapping[str, int] | None, names: Sequence[str]) -> Tensor | None:
    """The initial group of each client, -1 where none is given; None if there are none at all.

    >>> initial_groups({"bob": 1}, ["ann", "bob"])
    tensor([-1,  1])
    """
    return None if start is None else torch.tensor([start.get(name, -1) for name in names])


def check_start(start: Mapping[str, int], algorithm: Algorithm, names: Sequence[str]) -> None:
    """Refuse initial groups for a method without groups, and for clients nobody knows."""
    if not algorithm.starts:
        raise ConfigError(
            f"start: {name_of(algorithm)} cannot begin with given groups. Leave start out, or "
            "choose a method that groups clients, such as ifca."
        )
    strange = [f"'{name}'" for name in start if name not in set(names)]
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise DataError(
            f"start: every client must be a client of the data. These are not: "
            f"{', '.join(strange[:5])}{more}. The data have {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}."
        )
