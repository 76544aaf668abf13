"""coterie predict"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Data, Folder, Trust


def predict(
    folder: Folder,
    data: Data,
    client: Annotated[str | None, typer.Option(help="Use the model of this client.")] = None,
    group: Annotated[int | None, typer.Option(help="Use the model of this group.")] = None,
    id: Annotated[
        str | None, typer.Option(help="Column of the rows that names them. Default: their number.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write. Default: print.")] = None,
    trust: Trust = None,
) -> None:
    """Predict for new rows with the model of a client or of a group.

    The result is CSV: row or file name, prediction, and the probability of each class.

    Example:

      coterie predict runs/a --client site-3 --data today.csv --out predictions.csv
    """
    from coterie.report.table import Table

    if (folder / "personal.safetensors").exists():  # a client's own, of `coterie deploy pull`
        from coterie.deploy.personal import Personal

        table = Personal(folder, trust or ()).predict_table(str(data), id=id)
    else:
        from coterie.fitted import load

        fitted = load(folder, trust=trust or ())
        table = fitted.predict_table(str(data), client=client, group=group, id=id)
    text = table.to_csv() if isinstance(table, Table) else table.to_csv(index=False)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        print(f"{len(table)} predictions saved to {out}")
