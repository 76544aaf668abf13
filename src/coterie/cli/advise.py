"""coterie advise"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Json


def advise(
    folder: Annotated[
        Path, typer.Argument(help="Your data: a folder with a file per client, or one table.")
    ],
    label: Annotated[str | None, typer.Option(help="Column that is to be predicted.")] = None,
    client: Annotated[
        str | None, typer.Option(help="Column that names the client, if the data are one table.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Network you mean to train: linear, mlp, cnn.")
    ] = None,
    max_groups: Annotated[int, typer.Option(help="Largest number of groups considered.")] = 10,
    networks: Annotated[int, typer.Option(help="Seeded networks that clients evaluate.")] = 16,
    threshold: Annotated[
        float, typer.Option(help="Noise ratio up to which clients count as alike.")
    ] = 1.3,
    seed: Annotated[int, typer.Option(help="Seed of the networks.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the evidence to this file (PNG, SVG, PDF).")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the evidence by number.")] = False,
    json: Json = False,
) -> None:
    """Should the clients be grouped? Say so before anything is trained.

    Every client evaluates a few networks that are drawn from a seed and never trained. How their
    losses differ, class by class and measured in units of chance, tells whether there are groups
    (one model is an answer), how many, and in what they differ: inputs or the meaning of labels,
    label shares alone, or client by client. It costs one exchange of a few kilobytes.

    Examples:

      coterie advise sites/ --label outcome

      coterie advise all.csv --client hospital --label outcome --picture evidence.png

      coterie advise sites/ --label outcome --json
    """
    from coterie.advice import advise as advise_on
    from coterie.cli.sources import name_data
    from coterie.running.build import make_data

    data = make_data(name_data(folder, label, client))
    advice = advise_on(
        data,
        model=model,
        max_groups=max_groups,
        networks=networks,
        threshold=threshold,
        seed=seed,
    )
    if picture is not None:
        advice.picture(picture)
    if json:
        print(advice.to_json())
        return
    for note in data.notes:
        print(f"note: {note}")
    print(advice)
    if table:
        print(f"\n{advice.curves}")
