"""coterie list"""

from enum import StrEnum
from typing import Annotated

import typer

from coterie.cli.options import Json, print_json


class Kind(StrEnum):
    """What can be listed."""

    algorithms = "algorithms"
    models = "models"
    data = "data"
    recipes = "recipes"


def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list. Default: everything.")] = None,
    json: Json = False,
) -> None:
    """List the methods, networks, data sets and recipes, with one line on each.

    Example:

      coterie list algorithms
    """
    from coterie.catalogue import catalogue

    found = catalogue()
    wanted = {str(kind): found[str(kind)]} if kind is not None else found
    if json:
        print_json(wanted)
        return
    for title, lines in wanted.items():
        print(title)
        width = max(map(len, lines), default=0)
        for name, line in lines.items():
            print(f"  {name:<{width}}  {line}")
