"""coterie run"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import (
    Groups,
    Json,
    Method,
    Rows,
    Sets,
    Track,
    Trust,
    Why,
    as_options,
    check_source,
    parse_sets,
    print_json,
    reads_data,
)


@reads_data
def run(
    file: Annotated[
        str | None,
        typer.Argument(help="A run file (TOML or JSON), or 'quickstart' for the demonstration."),
    ] = None,
    data: Rows = None,
    algorithm: Method = None,
    groups: Groups = None,
    start: Annotated[
        Path | None,
        typer.Option(help="CSV file with the columns client and group: the groups to begin with."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How means resist clients that lie: plain, clipped, trimmed, median, "
            "geometric_median, krum or centred_clipping. Further options: --set run.policy.cap=100."
        ),
    ] = None,
    set_: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write. It must not exist.")
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            help="Also train every client alone and one model for all, for the verdict. "
            "Default: yes, or what the run file says."
        ),
    ] = None,
    why: Why = None,
    engine: Annotated[
        str | None,
        typer.Option(help="How to run clients: stacked (default), loop, wire, or ray."),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Number of processes of --engine ray. Default: one per core."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster for --engine ray. Default: this machine."),
    ] = None,
    trust: Trust = None,
    track: Track = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Find groups of clients and train a model for each group.

    Run it on your own data, with a run file, or as a demonstration.

    Examples:

      coterie run quickstart

      coterie run --data sites/ --label outcome --out runs/a

      coterie run --data all.csv --client hospital --label outcome --groups 3

      coterie run study.toml --set algorithm.n_groups=3 --set run.rounds=50 --out runs/b

      coterie run study.toml --engine ray --shards 8 --out runs/c
    """
    flags: dict[str, Any] = {"--algorithm": algorithm, "--groups": groups}
    if file == "quickstart":
        flags |= {"--start": start, "--track": track}
        flags |= {f"--{name.replace('_', '-')}": value for name, value in reading.items()}
    check_source("run", "quickstart", file, data, flags)
    changes = parse_sets(set_)
    if policy is not None:
        changes.setdefault("run", {}).setdefault("policy", {})["mean"] = policy
    own: dict[str, Any] = {
        "why": why,
        "engine": engine,
        "shards": shards,
        "address": address,
        "compare": compare,
    }
    own["start"] = start and str(start)
    given = {name: value for name, value in own.items() if value is not None}
    if given:
        changes["run"] = {**changes.get("run", {}), **given}
    if file == "quickstart":
        from coterie.quickstart import quickstart

        quickstart(out, as_json=json, changes=changes)
        return
    if not json:
        # Before torch is imported, which takes long.
        print(f"Reading {data or file} ...", flush=True)
    from coterie.cli.sources import make_run, say_data
    from coterie.fitting import fit_run
    from coterie.running.folder import RunFolder
    from coterie.running.trackers import choose_tracker

    if out is not None:
        RunFolder(out).refuse_existing()  # before data are read, which may take long
    wanted: dict[str, Any] = {"algorithm": algorithm, "groups": groups, "trust": trust}
    ready = make_run(file, data, reading, changes, **wanted, compare=True)
    if not json:
        say_data(ready.data)
    fit = fit_run(ready, out, progress=not json, tracker=choose_tracker(track))
    if json:
        print_json({"summary": fit.summary, "clients": fit.rows})
        return
    verdict = f"\n{as_options(fit.verdict.reasons)}" if "verdict.json" in fit.files else ""
    print(f"\n{fit.sentence}{verdict}\n\n{fit.groups}")
    for warning in fit.warnings[len(ready.data.warnings) :]:
        print(f"Warning: {as_options(str(warning))}")
    if out is None:
        print("\nNothing was saved. To keep models and figures: --out FOLDER")
    else:
        print(f"\nSaved to {out}. For details: coterie show {out}")
        if len(fit.cards) > 1 and "why.json" in fit.files:
            print(f"In what the groups differ: coterie why {out}")
