"""coterie plan"""

from typing import Annotated, Any

import typer

from coterie.cli.options import (
    Groups,
    Json,
    Method,
    Rows,
    Sets,
    Trust,
    check_source,
    parse_sets,
    reads_data,
)


@reads_data
def plan(
    file: Annotated[str | None, typer.Argument(help="A run file (TOML or JSON).")] = None,
    data: Rows = None,
    algorithm: Method = None,
    groups: Groups = None,
    set_: Sets = None,
    shards: Annotated[
        int | None, typer.Option(help="Also plan for this number of processes (engine ray).")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Also plan a deployment with this number of real clients.")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="Mbit per second of the server's line, for --clients. Default: 100."),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(help="Milliseconds that a message is under way, for --clients. Default: 20."),
    ] = None,
    trust: Trust = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Predict the time and the bytes of a round, and the memory, before a long run.

    It runs a few rounds with some of your clients, then with more, and extrapolates to all of
    them. This takes a few seconds, and nothing is saved. The plan says what limits the run first,
    and what to do about it.

    For a deployment (--clients), every client is assumed to have its own machine, as fast as this
    one. The network connection of the server carries the messages of all clients.

    Examples:

      coterie plan study.toml

      coterie plan study.toml --shards 8

      coterie plan study.toml --clients 200 --link 100 --latency 30

      coterie plan --data sites/ --label outcome --set run.participation=0.1
    """
    from coterie.core.errors import ConfigError

    flags = {"--algorithm": algorithm, "--groups": groups}
    check_source("plan", "study.toml", file, data, flags)
    for flag, count in {"--shards": shards, "--clients": clients}.items():
        if count is not None and count < 1:
            raise ConfigError(f"coterie plan: {flag} must be at least 1. Got {count}.")
    for flag, speed in {"--link": link, "--latency": latency}.items():
        if speed is not None and clients is None:
            raise ConfigError(
                f"coterie plan: {flag} is for a deployment. Say of how many clients: --clients M."
            )
        if speed is not None and not (speed > 0 or (flag == "--latency" and speed == 0)):
            raise ConfigError(f"coterie plan: {flag} must be above 0. Got {speed:g}.")
    if not json:
        print(f"Reading {data or file} ...", flush=True)
    from coterie.cli.planning import make_plan, show_plan
    from coterie.cli.sources import make_run

    changes = parse_sets(set_)
    wanted: dict[str, Any] = {"algorithm": algorithm, "groups": groups, "trust": trust}
    found = make_plan(
        lambda: make_run(file, data, reading, changes, **wanted),
        shards=shards,
        clients=clients,
        link=100.0 if link is None else link,
        latency=20.0 if latency is None else latency,
        say=not json,
    )
    show_plan(found, json)
