"""coterie report"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Folder


def report(
    folder: Folder,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: report.html in the run folder."),
    ] = None,
) -> None:
    """Write a page about a run, to hand over: one HTML file that needs no network.

    It contains the recommendation, the groups and how they differ, the gain of each client, odd
    clients, curves, the data with warnings, what left the clients, and how to repeat the run. For
    an unfinished run, it says what is missing.

    Examples:

      coterie report runs/a

      coterie report runs/a --out report.html
    """
    from coterie.report.html import read_contents, write_report

    written = write_report(read_contents(folder), out or folder / "report.html")
    print(f"Report: {written} ({written.stat().st_size / 1000:.0f} kB)")
