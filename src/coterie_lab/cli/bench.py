"""The command `coterie bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    only: Annotated[
        str | None, typer.Option(help="Workloads to measure, for example W1,W9 or scale100k.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also measure other packages.")] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also measure how the time grows with the size.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="File for all figures; writes a .md and a .png file, too."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of threads; by default that of each goal.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of samples of each variant.", min=1)] = 5,
    more: Annotated[bool, typer.Option("--more", help="Continue the file of --json.")] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Explain how a network is trained instead of measuring: the name of a model, "
            "package.module:Name or file.py:Name."
        ),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Read the figures from this file instead of measuring."),
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write the page on performance to this file (Markdown).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure memory, too.")] = True,
    scale: Annotated[float, typer.Option(hidden=True, min=0.0001, max=1.0)] = 1.0,
) -> None:
    """Measure the time of a round: a plain loop over clients, our engine, and other packages.

    All variants of a workload train the same model on the same batches. Their results are compared
    before they are timed. A complete run takes about an hour. The machine should be idle.

    Examples:

      coterie bench --only W1,W9

      coterie bench --peers --growth --json results/bench.json

      coterie bench --explain cnn

      coterie bench --from results/bench.json --docs docs/performance.md
    """
    import json as json_

    from coterie.core.errors import ConfigError

    if explain is not None:
        from coterie_lab.bench.explain import explain_name

        print(explain_name(explain))
        return
    from coterie_lab.bench import report

    if from_ is not None:
        if not from_.exists():
            raise ConfigError(
                f"coterie bench: the file given with --from must exist. {from_} does not exist."
            )
        from coterie_lab.bench import goals

        results = json_.loads(from_.read_text())
        results["goals"] = goals.of_results(results)  # by the current rules
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
        results = suite.run(*options, report=_say, keep=keep)
        if results["goals"]:
            print(report.goals(results["goals"]))
        if json is not None:
            json.with_suffix(".md").write_text(report.markdown(results))
            report.picture(results, json.with_suffix(".png"))
            print(f"\nWritten: {json}, and the same name with .md and .png")
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
