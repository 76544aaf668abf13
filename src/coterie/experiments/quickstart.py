"""The demonstration: rotated digits, four methods, one protocol, one table, one picture."""

import json
import time
from pathlib import Path
from typing import Any

from coterie.experiments.catalogue import RECIPES
from coterie.report.compare import comparison
from coterie.report.words import quickstart_words
from coterie.running.build import build
from coterie.running.loop import run
from coterie.running.progress import Silent

METHODS = ("local_only", "fedavg", "ifca", "clove")


def tables(method: str, changes: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The run file of one method."""
    groups = {"n_groups": 4} if method in ("ifca", "clove") else {}
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
    """Run the four methods and show what came out."""
    out = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S") if out is None else out
    if not as_json:
        print(f"Quickstart: {RECIPES['quickstart']}.", flush=True)
    folders = []
    for method in METHODS:
        folder = out / method
        began = time.perf_counter()
        ready = build(tables(method, changes))
        run(ready.algorithm, ready.data, ready.settings, folder, Silent())
        folders.append(folder)
        if not as_json:
            seconds = time.perf_counter() - began
            print(f"  {method}: {ready.settings.rounds} rounds in {seconds:.1f} s", flush=True)
    table = comparison(folders)
    picture = _picture(folders, out / "quickstart.png")
    if as_json:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        print(json.dumps({"methods": rows, "picture": str(picture) if picture else None}))
        return
    print(f"\n{table}\n\n{quickstart_words(table)}")
    if picture is not None:
        print(f"\nPicture: {picture}")
    print(f"Runs: {out}. Look closer: coterie show {out / 'clove'}")


def _picture(folders: list[Path], path: Path) -> Path | None:
    """The picture, where matplotlib is there."""
    from coterie.core.errors import ConfigError
    from coterie.report.pictures import journey_picture

    try:
        journey_picture(folders, path)
    except ConfigError as error:
        print(f"No picture: {error}")
        return None
    return path
