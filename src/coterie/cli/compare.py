"""coterie compare"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Json


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw accuracy and agreement by round to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare runs in one table and, if you like, in one picture.

    Example:

      coterie compare runs/a runs/b --picture both.png
    """
    from coterie.report.compare import comparison

    table = comparison(folders)
    if json:
        import json as json_

        print(json_.dumps([dict(zip(table.columns, row, strict=True)) for row in table.rows]))
    else:
        print(table)
    if picture is not None:
        from coterie.report.lines import compare_picture

        compare_picture(folders, picture)
        if not json:
            print(f"Picture: {picture}")
