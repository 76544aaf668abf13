"""coterie why"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder, Json, show_found


def why(
    folder: Folder,
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the differences with their intervals to this file."),
    ] = None,
) -> None:
    """Say after a run in what each group, and each odd client, differs from the others.

    There are at most five statements about each, with the largest difference first: columns whose
    means differ, labels that are more or less frequent, and predictions of one group's model on the
    rows of another. Only rows that trained no model are compared. The end lists what clients sent
    for this; with `coterie run --why` they send less.

    Examples:

      coterie why runs/a

      coterie why runs/a --picture why.png

      coterie run --data sites/ --label outcome --out runs/b --why labels,predictions
    """
    from coterie.fitted import read_why
    from coterie.running.folder import RunFolder

    found = read_why(RunFolder(folder).final_files(), folder)
    if picture is not None:
        found.picture(picture)
    show_found(found, json, picture)
