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

    Clients are recognised by their names; clients with new names are placed as newcomers. Without
    labels, only the inputs are compared. Nothing is trained.

    The new data are read with the options of the run. Only --unit, --names and the options for the
    file format may differ from the run; the others may be repeated, but not changed.

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
