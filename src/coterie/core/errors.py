"""The errors that Coterie raises. Each message says what to do."""

import difflib
from collections.abc import Iterable

LONGEST = 1500
"""Letters of a message; a value that it quotes may be as long as a file."""


class CoterieError(Exception):
    """Base class of all errors of this package.

    >>> len(str(CoterieError("x" * 100_000)))
    1500
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[:994]} [...] {text[-499:]}"


class ConfigError(CoterieError):
    """A name, an option or a combination of options that cannot be run."""


class DataError(CoterieError):
    """Data or files that cannot be used as they are."""


class TaskError(CoterieError):
    """Client work that failed; names method, task, client and round."""


class FederationError(CoterieError):
    """Too few clients answered an exchange."""


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters as escapes, lines and tabs as they are.

    >>> printable("\\x1b[31mred")
    '\\\\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text
    )


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A message that a name is unknown, with the most similar known name.

    >>> unknown("algorithm", "clov", ["clove", "fedavg"])
    "Unknown algorithm 'clov'. Did you mean 'clove'? Known: clove, fedavg."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {kind} '{name}'.{hint} Known: {', '.join(names) or 'none'}."
