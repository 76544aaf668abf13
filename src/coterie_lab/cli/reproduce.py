"""The command `coterie reproduce`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import Json


class Scale(StrEnum):
    """Size of the runs."""

    paper = "paper"
    reduced = "reduced"
    quick = "quick"


class Engine(StrEnum):
    """Engine of the simulation."""

    stacked = "stacked"
    loop = "loop"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Name of a table or figure, for example clove-table2.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List all tables and figures, with hours on one core.")
    ] = False,
    cells: Annotated[
        str | None,
        typer.Option(help="Only studies whose name contains this pattern, 'mnist/label-skew-*'."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Only these methods, for example clove,ifca.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds; by default all.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Only this seed, to share the work among machines.")
    ] = None,
    scale: Annotated[
        Scale,
        typer.Option(help="The published size, a few minutes per table, or a few seconds per run."),
    ] = Scale.paper,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of rounds; the tables say so.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Number of threads per run.")] = 1,
    engine: Annotated[Engine, typer.Option(help="Engine of the simulation.")] = Engine.stacked,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the data sets; by default COTERIE_DATA, then the cache."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, summaries and tables.")] = Path(
        "results"
    ),
    pages: Annotated[
        Path | None, typer.Option(help="Write a page for each table with results to this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a published table again and compare our figures with the published ones.

    Finished runs are not repeated; an interrupted run continues where it stopped.

    Examples:

      coterie reproduce --list

      coterie reproduce clove-table2 --scale quick

      coterie reproduce clove-table1 --cells 'mnist/label-skew-1' --methods clove,ifca --seeds 1
    """
    import json as json_

    from coterie.core.errors import ConfigError
    from coterie_lab.recipe import RECIPES, find
    from coterie_lab.reproduce import Plan
    from coterie_lab.reproduce import reproduce as work

    where = str(data_dir) if data_dir is not None else None
    plan = Plan(out, str(scale), str(engine), threads, rounds, where)
    if list_:
        _list(json)
        return
    if pages is not None:
        from coterie_lab.pages import write_pages

        for path in write_pages(plan, pages):
            print(path)
        return
    if name is None:
        raise ConfigError(
            f"coterie reproduce: give the name of a table. Known: {', '.join(RECIPES)}. See: --list"
        )
    recipe = find(name)
    wanted = None if methods is None else [part.strip() for part in methods.split(",")]
    if seeds is not None and seed is not None:
        raise ConfigError(
            "coterie reproduce: --seeds (how many) and --seed (which one) cannot be combined. "
            "Got both; give one of them."
        )
    chosen = {"cells": cells, "methods": wanted, "seeds": seeds, "seed": seed}
    paths = work(recipe, plan, **chosen, jobs=jobs, quiet=json)  # type: ignore[arg-type]
    if json:
        from coterie_lab.tables import Notes, line

        notes = Notes()
        lines = [line(entry, recipe, plan, notes) for entry in recipe.entries]
        print(json_.dumps({"recipe": name, "entries": lines, "notes": notes.texts}))
        return
    print(f"\n{_text(recipe, plan)}\n\nWritten: {', '.join(str(path) for path in paths)}")


def _text(recipe: object, plan: object) -> str:
    """The table for a terminal: one line per finished entry, and the number of the others."""
    from coterie.report.table import text_table
    from coterie_lab.recipe import Recipe
    from coterie_lab.reproduce import Plan
    from coterie_lab.tables import NOT_BUILT, NOT_RUN, Notes, line

    assert isinstance(recipe, Recipe)
    assert isinstance(plan, Plan)
    notes = Notes()
    lines = [line(entry, recipe, plan, notes) for entry in recipe.entries]
    ran = [one for one in lines if one["ours"] not in (NOT_RUN, NOT_BUILT)]
    fields = ["part", "row", "column", "published", "ours", "difference", "agrees", "notes"]
    table = text_table(
        ["", "method", "column", "published", "ours", "difference", "agrees", "notes"],
        [[one[f] for f in fields] for one in ran],
    )
    rest = (
        f"{len(lines) - len(ran)} of {len(lines)} entries have not run yet, or their method does "
        "not exist."
    )
    below = "\n".join(f"{i}. {text}" for i, text in enumerate(notes.texts, start=1))
    return f"{table}\n\n{below}\n{rest}".replace("\n\n\n", "\n\n")


def _list(as_json: bool) -> None:
    import json as json_

    from coterie.report.table import text_table
    from coterie_lab.recipe import RECIPES
    from coterie_lab.recipes import clove_images  # noqa: F401 - registers them

    rows = [
        [name, recipe.paper, recipe.title, len(recipe.studies()), len(recipe.seeds), recipe.hours()]
        for name, recipe in RECIPES.items()
    ]
    columns = ["name", "paper", "title", "studies", "seeds", "hours"]
    if as_json:
        print(json_.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    print(text_table(columns, rows, {"hours": ".1f"}))
    print("\nHours are estimates for all seeds on one core. Tables of the same paper share runs.")
