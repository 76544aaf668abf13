"""The demonstration: rotated digits, five methods, one protocol, one table, one picture."""

import json
import time
from pathlib import Path
from typing import Any

from coterie.catalogue import QUICKSTART
from coterie.report.compare import comparison
from coterie.report.verdict import Verdict
from coterie.report.words import describe_quickstart
from coterie.running.build import build
from coterie.running.final import Result
from coterie.running.folder import RunFolder, no_nan, to_json
from coterie.running.loop import run
from coterie.running.progress import Silent
from coterie.running.verdict import ARMS, HEADLINE, as_trained, judge, rivals_of

METHODS = ("local_only", "fedavg", "ifca", "clove", "census")


def tables(method: str, changes: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The run file of one method."""
    groups = {"n_groups": 4} if method in ("ifca", "clove", "census") else {}
    description: dict[str, dict[str, Any]] = {
        "algorithm": {"name": method, **groups},
        "model": {"name": "mlp", "hidden": [32]},
        "local": {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 20},
        "data": {"name": "digits", "n_clients": 40, "n_groups": 4},
        "run": {"rounds": 20, "threads": 1},  # tiny models gain nothing from a second one
    }
    for table, options in (changes or {}).items():
        description.setdefault(table, {}).update(options)
    return description


def quickstart(
    out: Path | None = None,
    as_json: bool = False,
    changes: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Run the methods and show what came out."""
    out = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S") if out is None else out
    if not as_json:
        print(f"Quickstart: {QUICKSTART}.", flush=True)
    folders, results = [], {}
    for method in METHODS:
        folder = out / method
        began = time.perf_counter()
        ready = build(tables(method, changes))
        results[method] = run(ready.algorithm, ready.data, ready.settings, folder, Silent())
        folders.append(folder)
        if not as_json:
            seconds = time.perf_counter() - began
            print(f"  {method}: {ready.settings.rounds} rounds in {seconds:.1f} s", flush=True)
    table = comparison(folders)
    verdict = _verdict(out, results)
    picture = _picture(folders, out / "quickstart.png")
    if as_json:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        found = {"methods": rows, "picture": str(picture) if picture else None}
        print(json.dumps({**found, "verdict": no_nan(verdict.to_json())}))
        return
    print(f"\n{table}\n\n{describe_quickstart(table)}\n\n{verdict.sentence}")
    if picture is not None:
        print(f"\nPicture: {picture}")
    print(f"Runs: {out}. Look closer: coterie show {out / 'census'}")


def _verdict(out: Path, results: dict[str, Result]) -> Verdict:
    """What to use, by the runs that are there; kept with the run of census."""
    own = results["census"]
    arms = {arm: [as_trained(results[name or "census"])] for arm, name in ARMS.items()}
    verdict = judge(arms, rivals_of(own), len(json.loads(own.files["groups.json"])["groups"]))
    folder = RunFolder(out / "census")
    files = folder.final_files() | {"verdict.json": to_json(no_nan(verdict))}
    folder.finish(files, folder.summary() | {"verdict": {n: verdict[n] for n in HEADLINE}})
    return Verdict.of(verdict)


def _picture(folders: list[Path], path: Path) -> Path | None:
    """The picture, where matplotlib is there."""
    from coterie.core.errors import ConfigError
    from coterie.report.journey import journey_picture

    try:
        journey_picture(folders, path)
    except ConfigError as error:
        print(f"No picture: {error}")
        return None
    return path
