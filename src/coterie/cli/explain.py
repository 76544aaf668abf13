"""coterie explain"""

from typing import Annotated

import typer


def explain(
    name: Annotated[str, typer.Argument(help="A name from: coterie list; 'data' or 'policy'.")],
) -> None:
    """Explain a method, a network, a data set or a recipe, with all its options.

    Examples:

      coterie explain clove

      coterie explain data

      coterie explain policy
    """
    from coterie.catalogue import describe

    print(describe(name))
