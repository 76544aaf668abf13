"""Runs side by side."""

from pathlib import Path
from typing import Any

from coterie.report.table import Table
from coterie.running.files import blame
from coterie.running.folder import RunFolder

FORMATS = {
    "accuracy": ".1%",
    "loss": ".4f",
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
