"""coterie explain"""

from typing import Annotated

import typer


def explain(
    name: Annotated[str, typer.Argument(help="A name from: coterie list.")],
) -> None:
    """Explain a method, a network, a data set or a recipe, with all its options.

    Example:

      coterie explain clove
    """
    from coterie.catalogue import describe

    print(describe(name))
