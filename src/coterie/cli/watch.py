"""coterie watch"""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    folder: Annotated[
        Path,
        typer.Argument(help="A run folder, of a simulation or a deployment; may not exist yet."),
    ],
    port: Annotated[int, typer.Option(help="Port on this machine; 0: any free one.")] = 8765,
) -> None:
    """Show a run in the browser while it goes on: groups, curves, time left, late clients, bytes.

    The page is served on this machine only (127.0.0.1). It updates itself, can only be read, and
    loads nothing from elsewhere. It also shows finished runs. End it with Ctrl-C.

    Examples:

      coterie watch runs/a

      coterie watch runs/a --port 9000
    """
    from coterie.report.html.live import serve

    serve(folder, port)
