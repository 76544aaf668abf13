"""coterie verdict"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder, Json, Trust, show_found


def verdict(
    folder: Folder,
    trust: Trust = None,
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the intervals and the gain of every client to this file."),
    ] = None,
) -> None:
    """Say after a run whether to use one model, a model per group, or a model per client.

    The verdict compares losses on held-out data, client by client. If the run was made with
    --no-compare, one model for all and every client alone are trained first, for the same number
    of rounds. You can stop this at any time; the same command continues it.

    Examples:

      coterie verdict runs/a

      coterie verdict runs/a --picture verdict.png

      coterie run --data sites/ --label outcome --out runs/a --set run.validation=0.2
    """
    from coterie.fitting import verdict_of

    found = verdict_of(folder, progress=not json, trust=trust or ())
    if picture is not None:
        from coterie.report.verdict import verdict_picture

        verdict_picture(found, picture)
    show_found(found, json, picture)
