"""The four things that can go wrong, each saying what to do about it."""

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(CoterieError):
    """A name, an option or a combination of options that cannot be run."""


class DataError(CoterieError):
    """Data or files that cannot be used as they are."""


class TaskError(CoterieError):
    """Client work that failed; names method, task, client and round."""


class FederationError(CoterieError):
    """Too few clients answered an exchange."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that a name is unknown and offer the nearest one.

    >>> unknown("algorithm", "clov", ["clove", "fedavg"])
    "Unknown algorithm 'clov'. Did you mean 'clove'? Known: clove, fedavg."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {kind} '{name}'.{hint} Known: {', '.join(names) or 'none'}."
