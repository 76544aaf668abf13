"""Runs that take a moment, and what must be equal between two of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from coterie.running.build import Run, build
from coterie.running.progress import Silent

GROUPS = {name: {"n_groups": 2} for name in ("ifca", "clove", "census")}
START = "import sys; from coterie.cli import main; sys.argv[0] = 'coterie'; main()"


def described(method: str = "ifca", rounds: int = 5, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run file: eight clients in two groups, half of them in each round."""
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"name": method, **GROUPS.get(method, {})},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"learning_rate": 0.1, "batch_size": 8},
        "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 4, "n": 24, "test": 8},
        "run": {"rounds": rounds, "participation": 0.5, "threads": 1},
    }
    for table, options in changes.items():
        tables.setdefault(table, {}).update(options)
    return tables


def ready(method: str = "ifca", rounds: int = 5, **changes: dict[str, Any]) -> Run:
    """The same, ready to start."""
    return build(described(method, rounds, **changes))


def content(folder: Path) -> dict[str, bytes]:
    """The files that may not depend on how often a run was stopped."""
    files = [*(folder / "final").iterdir(), folder / "summary.json", folder / "rounds.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def toml(tables: dict[str, Any]) -> str:
    """A run file as text."""
    words = {True: "true", False: "false"}
    lines = []
    for name, options in tables.items():
        lines.append(f"[{name}]")
        for key, value in options.items():
            text = words[value] if isinstance(value, bool) else repr(value).replace("'", '"')
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def command(*words: Any) -> list[str]:
    """The command line, in another process."""
    return [sys.executable, "-c", START, *map(str, words)]


def coterie(*words: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """What a command says, and its exit code."""
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, **options)


class StopsAfter(Silent):
    """Somebody presses Ctrl-C when a round of an attempt is shown."""

    def __init__(self, round: int, attempt: int = 1) -> None:
        self.when, self.attempt, self.started = round, attempt, 0
        self.said: list[str] = []

    def start(self, title: str, rounds: int, done: int) -> None:
        self.started += 1

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.when and self.started == self.attempt:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.said.append(text)
