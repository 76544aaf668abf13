"""coterie explain"""

from typing import Annotated

import typer


def explain(
    name: Annotated[str, typer.Argument(help="Name of a method, a network, data or a recipe.")],
) -> None:
    """Say what something does, when to use it, and what its options are.

    Example:

      coterie explain clove
    """
    from coterie.catalogue import explained

    print(explained(name))
