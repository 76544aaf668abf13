"""Plug-ins: packages that add data sets, networks, recipes or commands."""

import functools
from importlib.metadata import entry_points


@functools.cache
def load_plugins() -> None:
    """Import the modules that installed packages list under `coterie.plugins`, once.

    Importing such a module registers what it adds. Call this function before reporting that a name
    is unknown, and before listing all names.
    """
    for entry in entry_points(group="coterie.plugins"):
        entry.load()
