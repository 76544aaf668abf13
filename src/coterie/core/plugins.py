"""Packages that add to this one: data sets, networks, recipes, commands."""

import functools
from importlib.metadata import entry_points


@functools.cache
def load_plugins() -> None:
    """Import the modules that installed packages list under `coterie.plugins`, once.

    Importing such a module registers what it brings. Call this before saying that a name is
    unknown, and before listing all names.
    """
    for entry in entry_points(group="coterie.plugins"):
        entry.load()
