"""coterie compare"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, print_json, reads_data


@reads_data
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Score all runs on these rows: a folder with a file per client, or one table. "
            "Default: each run on its own test rows."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw accuracy and agreement by round to this file.")
    ] = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Compare runs in one table and, if you like, in one picture.

    To compare runs on different data, or with different test rows, score all of them on the same
    new rows with --data. The new rows are read with the options of each run. Only --names and the
    options for the file format may differ; the others may be repeated, but not changed.

    Examples:

      coterie compare runs/a runs/b --picture both.png

      coterie compare runs/a runs/b --data new/
    """
    from coterie.core.errors import ConfigError
    from coterie.report.compare import compare_scores, comparison

    if data is None:
        for name in reading:
            raise ConfigError(
                f"compare: --{name.replace('_', '-')} says how new data are read. There are none. "
                "Name them: --data PATH"
            )
        table = comparison(folders)
    else:
        from coterie.cli.sources import check_data
        from coterie.fitted import load

        check_data(data, reading)
        runs = {str(folder): load(folder) for folder in folders}
        table = compare_scores(
            {name: run.evaluate(str(data), **reading) for name, run in runs.items()}
        )
    if json:
        print_json([dict(zip(table.columns, row, strict=True)) for row in table.rows])
    else:
        print(table)
    if picture is not None:
        from coterie.report.lines import compare_picture

        compare_picture(folders, picture)
        if not json:
            print(f"Picture: {picture}")
