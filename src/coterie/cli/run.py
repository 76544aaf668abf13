"""coterie run"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, Track, Trust, Why, as_options, parse_sets, reads_data


@reads_data
def run(
    file: Annotated[
        str | None,
        typer.Argument(help="A run file (TOML or JSON), or 'quickstart' for the demonstration."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Your data: a folder with a file per client, or one table."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Name of the method for --data; see: coterie list.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Number of groups for --data. Default: 'auto', found from the data."),
    ] = None,
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
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one option, e.g. run.rounds=50. May be repeated."),
    ] = None,
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
    from coterie.core.errors import ConfigError

    if (file is None) == (data is None):
        got = "neither" if file is None else "both"
        raise ConfigError(
            f"coterie run: give either a run file or --data. Got {got}. To see an example: coterie "
            "run quickstart"
        )
    if file is not None:
        used = {"--algorithm": algorithm, "--groups": groups}
        if file == "quickstart":
            used |= {"--start": start, "--track": track} | {
                f"--{n.replace('_', '-')}": reading[n] for n in reading
            }
        for flag, value in used.items():
            if value is not None:
                instead = f"Change {file} instead, or use --set." if file != "quickstart" else ""
                raise ConfigError(f"coterie run: {flag} has no use with {file}. {instead}".strip())
    changes = parse_sets(set_ or [])
    if policy is not None:
        changes.setdefault("run", {}).setdefault("policy", {})["mean"] = policy
    carried = {"why": why, "engine": engine, "shards": shards, "address": address}
    given = {name: value for name, value in carried.items() if value is not None}
    if given:
        changes["run"] = {**changes.get("run", {}), **given}
    if file == "quickstart":
        from coterie.quickstart import quickstart

        quickstart(out, as_json=json, changes=changes)
        return
    import json as json_

    if not json:
        print(
            f"Reading {data or file} ...", flush=True
        )  # before torch is imported, which takes long
    from coterie.cli.sources import say_data
    from coterie.core.config import find_imports
    from coterie.fitting import fit_run
    from coterie.running.build import build, read
    from coterie.running.folder import RunFolder
    from coterie.running.request import DEFAULT_METHOD, Request, change, resolve
    from coterie.running.trackers import choose_tracker

    if out is not None:
        RunFolder(out).refuse_existing()  # before data are read, which may take long
    if file is not None:
        if start is not None:
            changes.setdefault("run", {})["start"] = str(start)
        description = {k: v for k, v in read(Path(file)).items() if isinstance(v, dict)}
        description.pop("plan", None)
        description.setdefault("data", {}).update(reading)
        for table, options in changes.items():
            description.setdefault(table, {}).update(options)
        if compare is not None:
            description.setdefault("run", {})["compare"] = compare
        description.setdefault("run", {}).setdefault("compare", True)
        ready = build(description, {*(trust or ()), *find_imports(changes)})
    else:
        from coterie.cli.sources import name_data

        request = Request(
            name_data(data, reading),
            algorithm or DEFAULT_METHOD,
            n_groups=groups or "auto",
            start=start,
            settings={"compare": compare is not False},
        )
        ready = resolve(change(request, changes))
    if not json:
        say_data(ready.data)
    fit = fit_run(ready, out, progress=not json, tracker=choose_tracker(track))
    if json:
        print(json_.dumps({"summary": fit.summary, "clients": fit.rows}, default=str))
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
