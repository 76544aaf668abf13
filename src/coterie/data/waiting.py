"""Read many files: several at a time, and on a terminal a line says how many are done."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

PATIENCE = 0.5
"""Seconds after which it is worth showing."""

AT_ONCE = 4
"""Files that are read at once, if there are as many processors."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def read_each(read: Callable[[Item], Found], items: Sequence[Item], what: str) -> list[Found]:
    """Read items, some at a time: unpacking and parsing leave Python's lock to one another.

    >>> read_each(len, ["a.csv", "bc.csv"], "files")
    [5, 6]
    """
    ahead = min(AT_ONCE, os.cpu_count() or 1)
    if ahead < 2 or len(items) < 2:
        return [read(item) for item in show_progress(items, what)]
    found: list[Found] = []
    with ThreadPoolExecutor(ahead) as pool:
        # No more are begun than the processors can take, so an error ends it soon.
        begun = deque(pool.submit(read, item) for item in items[:ahead])
        for place, _ in enumerate(show_progress(items, what)):
            found.append(begun.popleft().result())
            if place + ahead < len(items):
                begun.append(pool.submit(read, items[place + ahead]))
    return found


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
