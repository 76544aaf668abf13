"""The commands `coterie data list`, `get`, `check` and `show`."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Json, parse_sets

app = typer.Typer(
    help="Public data sets: list, download and check them, and draw their partitions.",
    no_args_is_help=True,
)
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data sets; by default COTERIE_DATA, then the cache."),
]
Name = Annotated[str, typer.Argument(help="Name of a data set; see: coterie data list")]


@app.command("list")
def list_(data_dir: DataDir = None, json: Json = False) -> None:
    """List the data sets, whether they were found, and what is missing in incomplete copies.

    Example:

      coterie data list
    """
    import json as json_

    from coterie.report.table import text_table
    from coterie_lab.sources import SOURCES
    from coterie_lab.sources.files import folders

    rows = []
    for source in SOURCES.values():
        found = source.find(data_dir)
        state = "missing" if found is None else "partial" if found[1].note else "found"
        where = "" if found is None else str(found[0])
        rows.append([source.name, source.title, state, source.licence, where])
    columns = ["name", "title", "state", "licence", "folder"]
    if json:
        print(json_.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    print(text_table(columns, rows))
    for source in SOURCES.values():
        found = source.find(data_dir)
        if found is not None and found[1].note:
            print(f"note: {found[1].note}")
    print(f"\nSearched in: {', '.join(map(str, folders(data_dir)))}")


@app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set from its public address; an interrupted download continues.

    Example:

      coterie data get mnist
    """
    import sys

    from coterie.running.progress import megabytes
    from coterie_lab.sources import source
    from coterie_lab.sources.get import get as fetch

    def report(file: str, done: int, whole: int | None) -> None:
        if sys.stdout.isatty():
            of = f" of {megabytes(whole)}" if whole else ""
            print(f"\r{file}: {megabytes(done)}{of}   ", end="", flush=True)

    for path in fetch(source(name), data_dir, report):
        print(f"\r{path}")


@app.command()
def check(
    name: Annotated[
        str | None, typer.Argument(help="Name of a data set; by default all that were found.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Compare the files with the published checksums; exit code 1 if one is damaged.

    Example:

      coterie data check mnist
    """
    from coterie.core.errors import DataError
    from coterie_lab.sources import SOURCES, source
    from coterie_lab.sources.files import verdict

    bad = False
    wanted = list(SOURCES.values()) if name is None else [source(name)]
    for one in wanted:
        found = one.find(data_dir)
        if found is None:
            if name is not None:
                raise DataError(one.missing(data_dir))
            print(f"{one.name}: missing")
            continue
        folder, layout = found
        for file in layout.files:
            path = file.locate(folder)
            assert path is not None
            state = verdict(file, path)
            bad |= state == "damaged"
            print(f"{one.name}: {path.relative_to(folder)}: {state}")
        if layout.note:
            print(f"note: {layout.note}")
    if bad:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a partition; see: coterie list data")],
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("data.png"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the partition, for example kind=2.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Draw a partition: the number of samples and the label frequencies of each client.

    Example:

      coterie data show published_label_skew --set kind=4 --out skew.png
    """
    from coterie.data.registry import make
    from coterie.report.data_picture import data_picture

    options = parse_sets([f"data.{pair}" for pair in set_ or []]).get("data", {})
    if data_dir is not None:
        options["data_dir"] = str(data_dir)
    data = make(name, **options)
    print(data)
    for note in data.notes:
        print(f"note: {note}")
    print(f"Picture: {data_picture(data, out)}")
