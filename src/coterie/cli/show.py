"""coterie show"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder, Json, as_options

Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw to this file why this number of groups was chosen, or each client's shares of "
        "the components (FedGMI, blend, FedSoft)."
    ),
]


def show(folder: Folder, json: Json = False, picture: Picture = None) -> None:
    """Show a finished run: the result, its groups and its clients.

    Examples:

      coterie show runs/a

      coterie show runs/a --picture how-many-groups.png

      coterie show runs/mixtures --picture shares.png
    """
    from coterie.report.cards import draw, show_run
    from coterie.running.folder import RunFolder

    target = RunFolder(folder)
    if picture is not None:
        draw(target, picture)
    if json:
        import json as json_

        files = target.final_files()
        content = {"summary": target.summary(), **json_.loads(files["groups.json"])}
        print(json_.dumps({**content, **json_.loads(files["clients.json"])}))
        return
    print(as_options(show_run(target)))
