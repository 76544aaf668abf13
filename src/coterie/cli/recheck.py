"""coterie recheck"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Folder, Json, reads_data


@reads_data
def recheck(
    folder: Folder,
    data: Annotated[
        Path, typer.Option(help="New data: a folder with a file per client, or one table.")
    ],
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Compare new data with the groups of a run: who stays, who moved, who fits nowhere.

    Clients are known by their names; those with other names are placed as newcomers. Without
    labels inputs alone are compared. Nothing is trained.

    New data are read as the data of the run were. How files are written, --unit and --names may
    differ; all other options below may be repeated, but not changed.

    Examples:

      coterie recheck runs/a --data new/

      coterie recheck runs/a --data new.csv --client hospital --unit patient_id

      coterie recheck runs/a --data new/ --json
    """
    from coterie.cli.sources import check_data
    from coterie.fitted import load

    check_data(data, reading)
    found = load(folder).recheck(str(data), **reading)
    print(found.to_json() if json else found)
