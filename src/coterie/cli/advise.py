"""coterie advise"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, parse_sets, reads_data


@reads_data
def advise(
    folder: Annotated[
        Path, typer.Argument(help="Your data: a folder with a file per client, or one table.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Network you want to train, e.g. linear, mlp or cnn.")
    ] = None,
    max_groups: Annotated[int, typer.Option(help="Largest number of groups considered.")] = 10,
    networks: Annotated[
        int, typer.Option(help="Largest number of random networks that every client evaluates.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the networks.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the evidence to this file (PNG, SVG or PDF).")
    ] = None,
    why: Annotated[
        str,
        typer.Option(
            help="What clients may send to explain how groups differ: 'columns,labels', one of "
            "them, or 'nothing'."
        ),
    ] = "auto",
    table: Annotated[
        bool, typer.Option("--table", help="Also print the evidence as a table.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one option of the data, e.g. data.seed=1."),
    ] = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Find out before training whether the clients should be grouped.

    Every client evaluates a few random networks, which are never trained, and sends a few
    kilobytes. Differences that appear again in other rows of the same clients are real; the others
    are chance. The advice says which clients are unlike all others, how many groups the rest
    form, and in what the groups differ.

    Examples:

      coterie advise sites/ --label outcome

      coterie advise all.csv --client hospital --label outcome --picture evidence.png

      coterie advise sites/ --label outcome --json
    """
    if not json:
        print(f"Reading {folder} ...", flush=True)  # before torch is imported, which takes long
    from coterie.advice import advise as advise_on
    from coterie.cli.sources import name_data, say_data
    from coterie.core.errors import ConfigError, unknown
    from coterie.running.build import make_data

    changes = parse_sets(set_ or [])
    for name in changes:
        if name != "data":
            raise ConfigError("coterie advise --set: " + unknown("table", name, ["data"]))
    data = make_data({**name_data(folder, reading), **changes.get("data", {})})
    advice = advise_on(
        data,
        model=model,
        max_groups=max_groups,
        networks=networks,
        seed=seed,
        why=why,
    )
    if picture is not None:
        advice.picture(picture)
    if json:
        print(advice.to_json())
        return
    say_data(data)
    print(f"\n{advice}")
    if advice.why.sent:
        print(f"\nIn what they differ\n\n{advice.why}")
    if table:
        print(f"\n{advice.curves}")
