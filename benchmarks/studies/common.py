"""What the studies share: a run driven by hand, and tables."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coterie.core import Algorithm, Federation, Info


def options(description: str, seeds: int) -> argparse.ArgumentParser:
    """The options every study has. One thread, so that studies may run side by side."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds, from 0")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    return parser


def run(
    algorithm: Algorithm, fed: Federation, rounds: int, state: Any = None
) -> Iterator[tuple[Any, Info]]:
    """State and info after each round, from `init` or from a given state."""
    if state is None:
        fed.begin(-1)
        state = algorithm.init(fed)
        fed.commit()
    for number in range(rounds):
        fed.begin(number)
        state, info = algorithm.step(fed, state)
        fed.commit()
        yield state, info


def stays(values: list[float | None], level: float = 1.0) -> int | None:
    """First round, from 1, from which on a value is at this level in every round; None: never."""
    below = [i for i, value in enumerate(values) if value is None or value < level - 1e-12]
    first = below[-1] + 2 if below else 1
    return first if first <= len(values) else None


def table(title: str, names: list[str], lines: list[list[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(names) + " |")
    print("|" + " --- |" * len(names))
    for line in lines:
        print("| " + " | ".join(_shown(value) for value in line) + " |", flush=True)


def write(path: Path | None, figures: Any) -> None:
    """Keep all figures, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_shown(part) for part in value)
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
