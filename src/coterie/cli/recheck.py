"""coterie recheck"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import READING, Folder, Json


def recheck(
    folder: Folder,
    data: Annotated[
        Path, typer.Option(help="New data: a folder with a file per client, or one table.")
    ],
    label: Annotated[
        str | None, typer.Option(help="Column of the label. Default, and only choice: the run's.")
    ] = None,
    client: Annotated[str | None, typer.Option(help=READING["client"][1])] = None,
    unit: Annotated[list[str] | None, typer.Option(help=READING["unit"][1])] = None,
    json: Json = False,
) -> None:
    """Compare new data with the groups of a run: who stays, who moved, who fits nowhere.

    Clients are known by their names; those with other names are placed as newcomers. The label
    column is the one of the run. Without it inputs alone are compared. Nothing is trained.

    Examples:

      coterie recheck runs/a --data new/

      coterie recheck runs/a --data new.csv --client hospital --unit patient_id

      coterie recheck runs/a --data new/ --json
    """
    from coterie.core.errors import ConfigError, DataError
    from coterie.fitted import load

    if not data.exists():
        raise DataError(f"{data} does not exist. Check the path.")
    fit = load(folder)
    if label not in (None, fit.encoder.label):
        raise ConfigError(f"--label must be that of the run, {fit.encoder.label}. Got {label}.")
    found = fit.recheck(str(data), client=client, unit=unit or None)
    print(found.to_json() if json else found)
