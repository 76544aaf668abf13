"""coterie export"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder


def export(
    folder: Folder,
    to: Annotated[Path, typer.Option(help="Folder to write. It must not exist, or be empty.")],
    format: Annotated[
        str,
        typer.Option(
            help="onnx (whole networks), torch (torch.export), or safetensors (weights only)."
        ),
    ] = "onnx",
    licence: Annotated[
        str, typer.Option(help="Licence of the models, for the manifest and the model cards.")
    ] = "",
) -> None:
    """Export the models of a run, to use them without Coterie.

    The folder has a model per group with a model card, the rules that turn rows into inputs, a
    router that finds the group of a new client, a manifest with checksums, and an example. Every
    model is run from its file and compared with the predictions of the run.

    Examples:

      coterie export runs/a --to models/

      coterie export runs/a --to models/ --format torch --licence Apache-2.0
    """
    from coterie.export import export as write
    from coterie.fitted import load

    fit = load(folder)
    write(fit, to, format, licence)  # type: ignore[arg-type]
    print(f"Exported to {to}. To use it: {to / 'README.md'}")
