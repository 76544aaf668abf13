"""coterie explain"""

from typing import Annotated

import typer


def explain(
    name: Annotated[str, typer.Argument(help="A name from: coterie list; or 'data'.")],
) -> None:
    """Explain a method, a network, a data set or a recipe, with all its options.

    Examples:

      coterie explain clove

      coterie explain data
    """
    from coterie.catalogue import describe

    print(describe(name))
