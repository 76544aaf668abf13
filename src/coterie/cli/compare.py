"""coterie compare"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Json


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.")],
    picture: Annotated[
        Path | None, typer.Option(help="PNG of accuracy and agreement by round.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare runs in one table, and in one picture.

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
