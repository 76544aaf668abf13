"""What is shown while many files are read: how many are done, on a terminal."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

PATIENCE = 0.5
"""Seconds after which it is worth showing."""

Item = TypeVar("Item")


def show_progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Go through items; if it takes long, a line of the terminal says how many are done.

    >>> list(show_progress(["a.csv", "b.csv"], "files"))
    ['a.csv', 'b.csv']
    """
    began, shown = time.monotonic(), False
    try:
        for done, item in enumerate(items):
            if sys.stderr.isatty() and time.monotonic() - began > PATIENCE:
                shown = True
                print(f"\rReading: {done} of {len(items)} {what}", end="", file=sys.stderr)
                sys.stderr.flush()
            yield item
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr)
            sys.stderr.flush()
