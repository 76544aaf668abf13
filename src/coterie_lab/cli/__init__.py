"""The commands the laboratory adds to `coterie`: reproduce, bench, data."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Add the laboratory's commands to the command line."""
    from coterie_lab.cli import bench, data, reproduce

    app.command()(reproduce.reproduce)
    app.command()(bench.bench)
    app.add_typer(data.app, name="data")
