"""coterie bench"""

from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    only: Annotated[
        str | None, typer.Option(help="Workloads by name, as W1,W9; also scale100k, ifca1200, ...")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also measure other packages.")] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also time rounds as clients, data, models grow.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="File for all figures; a table (.md) and a picture (.png) beside it."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads; default: as many as each goal is set for.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Samples of each variant.", min=1)] = 5,
    more: Annotated[
        bool, typer.Option("--more", help="Keep what the file of --json has; measure the rest.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Do not measure; say how a network is trained: a model's name, "
            "package.module:Name or file.py:Name."
        ),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Do not measure; read figures from this file.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write the page on speed to this file (Markdown).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure memory too, a process each.")] = True,
    scale: Annotated[float, typer.Option(hidden=True, min=0.0001, max=1.0)] = 1.0,
) -> None:
    """Measure how fast rounds are: the loop everybody writes, this engine, and other packages.

    All variants of a workload train the same model on the same batches, are compared before they
    are timed, and take turns. Everything takes about an hour; the machine should be idle.

    Examples:

      coterie bench --only W1,W9

      coterie bench --peers --growth --json results/bench.json

      coterie bench --explain cnn

      coterie bench --from results/bench.json --docs docs/performance.md
    """
    import json as json_

    from coterie.core.errors import ConfigError

    if explain is not None:
        from coterie_lab.bench.explain import explained

        print(explained(explain))
        return
    from coterie_lab.bench import report

    if from_ is not None:
        if not from_.exists():
            raise ConfigError(f"coterie bench: {from_} does not exist.")
        from coterie_lab.bench import goals

        results = json_.loads(from_.read_text())
        results["goals"] = goals.of_results(results)  # by the rules of today
        print(report.markdown(results))
    else:
        from coterie_lab.bench import suite

        def keep(results: dict[str, Any]) -> None:
            if json is not None:
                json.parent.mkdir(parents=True, exist_ok=True)
                json.write_text(json_.dumps(results, indent=1) + "\n")

        names = only.split(",") if only else None
        before = None
        if more and json is not None and json.exists():
            before = json_.loads(json.read_text())
        options = names, threads, repeats, scale, growth, peers, memory, before
        results = suite.run(*options, told=_say, keep=keep)
        if results["goals"]:
            print(report.goals(results["goals"]))
        if json is not None:
            json.with_suffix(".md").write_text(report.markdown(results))
            report.picture(results, json.with_suffix(".png"))
            print(f"\nWritten: {json}, and beside it .md and .png")
    if docs is not None:
        from coterie_lab.bench.page import write

        write(results, docs)
        print(f"Written: {docs}")


def _say(name: str, found: dict[str, Any]) -> None:
    from coterie_lab.bench import growth, peers, report, suite

    if name in growth.SIZES:
        text = report.growth({name: found})
    elif name in peers.PEERS:
        text = report.peers({name: found})
    elif name in suite.EXTRAS:
        text = report.extra(name, found)
    else:
        text = report.block(name, found)
    print(f"{text}\n", flush=True)
