"""The page on speed, written from the figures."""

from pathlib import Path
from typing import Any


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page, with its picture beside it."""
    from coterie.bench import report

    report.picture(results, path.with_suffix(".png"))
    path.write_text(report.markdown(results))
