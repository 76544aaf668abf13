"""coterie place"""

from typing import Annotated

import typer

from coterie.cli.options import Data, Folder, Json


def place(
    folder: Folder,
    data: Data,
    label: Annotated[
        str | None, typer.Option(help="Label column; default: the one the run used.")
    ] = None,
    json: Json = False,
) -> None:
    """Say which group a new client belongs to, and whether it fits any.

    Example:

      coterie place runs/a --data new-site.csv
    """
    from coterie.cli.sources import rows_of
    from coterie.fitted import load

    fit = load(folder)
    x, y = rows_of(data, fit.card, label)
    spot = fit.place(x, y)
    if json:
        import json as json_

        print(json_.dumps(spot._asdict()))
    else:
        print(f"{data.stem}: {spot}")
