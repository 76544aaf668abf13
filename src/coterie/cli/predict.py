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
    out: Annotated[Path | None, typer.Option(help="CSV file to write. Default: print.")] = None,
    trust: Trust = None,
) -> None:
    """Predict for new rows with the model of a client or of a group.

    Example:

      coterie predict runs/a --client site-3 --data today.csv --out predictions.csv
    """
    if (folder / "personal.safetensors").exists():  # a client's own, of `coterie deploy pull`
        from coterie.deploy.personal import Personal

        values = Personal(folder, trust or ()).predict(str(data))
    else:
        from coterie.fitted import load

        values = load(folder, trust=trust or ()).predict(str(data), client=client, group=group)
    text = "prediction\n" + "".join(f"{value}\n" for value in values.tolist())
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        print(f"{len(values)} predictions saved to {out}")
