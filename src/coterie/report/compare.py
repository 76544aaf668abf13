"""Runs side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.report.table import Table
from coterie.running.files import blame
from coterie.running.folder import RunFolder

FORMATS = {
    "accuracy": ".1%",
    "loss": ".4f",
    "error": ".4g",
    "worst client": ".1%",
    "worst error": ".4g",
    "worst tenth": ".1%",
    "ARI": ".2f",
    "MB moved": ".1f",
    "seconds": ".1f",
}


def comparison(folders: list[Path]) -> Table:
    """One row per run: scores, agreement with the truth, traffic, time."""
    rows = []
    for folder in folders:
        with blame(folder):
            rows.append(_row(RunFolder(folder)))
    used = [name for name in rows[0] if any(line[name] is not None for line in rows)]
    return Table(used, [[line[name] for name in used] for line in rows], FORMATS)


def _row(folder: RunFolder) -> dict[str, Any]:
    summary = folder.summary()
    accuracy = summary.get("accuracy", {})
    return {
        "run": folder.path.name,
        "method": summary["algorithm"],
        "accuracy": accuracy.get("mean"),
        "worst tenth": accuracy.get("worst_decile"),
        "loss": None if accuracy else summary["loss"],
        "groups": len(summary["groups"]) if "groups" in summary else None,
        "ARI": summary.get("ari"),
        "ARI >= 0.9 from": summary.get("first_round_ari_0.9"),
        "rounds": summary["rounds"],
        "MB moved": summary["bytes"] / 1e6,
        "seconds": sum(line["seconds"] for line in folder.lines("timings.jsonl")) or None,
    }


def compare_scores(scored: Mapping[str, Table]) -> Table:
    """Runs that were scored on the same new rows: a row per run, means over their common clients.

    Parameters
    ----------
    scored
        For each run, what `Fitted.evaluate` gave.

    >>> columns = ["client", "rows", "accuracy"]
    >>> a = Table(columns, [["ann", 10, 0.9], ["bob", 10, 0.7]])
    >>> b = Table(columns, [["bob", 10, 0.8]])
    >>> print(compare_scores({"runs/a": a, "runs/b": b}))
    run     clients  rows  accuracy  worst client
    ------  -------  ----  --------  ------------
    runs/a        1    10     70.0%         70.0%
    runs/b        1    10     80.0%         80.0%
    """
    columns = {table.columns[-1] for table in scored.values()}
    if len(columns) > 1:
        raise DataError("compare: runs must predict the same. Some predict classes, some numbers.")
    [column] = columns
    lines = {run: {line["client"]: line for line in table} for run, table in scored.items()}
    common = set.intersection(*(set(of_run) for of_run in lines.values()))
    if not common:
        raise DataError(
            "compare: runs must have clients in common that have new rows. They have none. Compare "
            "their names."
        )
    rows = []
    for run, of_run in lines.items():
        scores = [line[column] for name, line in of_run.items() if name in common]
        n = sum(line["rows"] for name, line in of_run.items() if name in common)
        worst = min(scores) if column == "accuracy" else max(scores)
        rows.append([run, len(common), n, sum(scores) / len(scores), worst])
    last = "worst client" if column == "accuracy" else "worst error"
    return Table(["run", "clients", "rows", column, last], rows, FORMATS)
