"""coterie verdict"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder, Json


def verdict(
    folder: Folder,
    json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the intervals and every client's gain to this file.")
    ] = None,
) -> None:
    """Say after a run what to use: one model, groups, or every client alone; and who gains.

    Losses on data that trained nothing are compared client by client. What the comparison lacks
    (one model for all, every client alone) is trained first, as many rounds as the run had; stop it
    and ask again to go on.

    Examples:

      coterie verdict runs/a

      coterie verdict runs/a --picture verdict.png

      coterie run --data sites/ --label outcome --out runs/a --set run.validation=0.2
    """
    from coterie import fitted

    found = fitted.verdict_of(folder, progress=not json)
    if picture is not None:
        from coterie.report.verdict import verdict_picture

        verdict_picture(found, picture)
    if json:
        import json as json_

        print(json_.dumps(found.to_json()))
        return
    print(found)
    if picture is not None:
        print(f"\nPicture: {picture}")
