"""Does a long run grow? Memory, open files and threads of thousands of rounds.

    python -m coterie_lab.studies.soak --rounds 3000 10000 --json benchmarks/figures/soak.json

CLoVE with half of 18 clients a round, evaluation and a checkpoint after every round, in a process
of its own for each length. The slope is that of a line through memory after the first 30 % of the
rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from coterie.data import blobs
from coterie.running.progress import Silent
from coterie_lab.studies.common import Store

SAMPLES = 20  # in a run


class Look(Silent):
    """Notes the state of the process now and then."""

    def __init__(self, every: int, folder: Path) -> None:
        self.every, self.folder = every, folder
        self.seen: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] % self.every:
            return
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        self.seen.append(
            {
                "round": line["round"],
                "mb": round(memory_mb(), 2),
                "handles": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "files": len(files),
                "folder_kb": round(sum(path.stat().st_size for path in files) / 1000),
                "seconds": round(time.perf_counter() - self.began),
            }
        )
        print(json.dumps(self.seen[-1]), file=sys.stderr, flush=True)


def memory_mb() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def measure(rounds: int) -> dict[str, Any]:
    """One run; its samples and the slope of its memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        look = Look(max(rounds // SAMPLES, 1), Path(place) / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            coterie.fit(
                blobs(),
                "clove",
                model="mlp",
                n_groups=3,
                rounds=rounds,
                out=look.folder,
                compare=False,
                settings={"participation": 0.5},
                progress=look,
            )
    late = [one for one in look.seen if one["round"] > 0.3 * rounds]
    slope = np.polyfit([one["round"] for one in late], [one["mb"] for one in late], 1)[0]
    ends = look.seen[0], look.seen[-1]
    return {
        "rounds": rounds,
        "mb_per_1000_rounds": round(1000 * float(slope), 3),
        "handles": [one["handles"] for one in ends],
        "threads": [one["threads"] for one in ends],
        "files": [one["files"] for one in ends],
        "seconds": look.seen[-1]["seconds"],
        "samples": look.seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="*", default=[3000, 10_000])
    parser.add_argument("--one", type=int, help="one run in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    store = Store(options.json)
    for rounds in options.rounds:
        if str(rounds) not in store:
            command = [sys.executable, "-m", "coterie_lab.studies.soak", "--one", str(rounds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            store.put(str(rounds), json.loads(done.stdout))
        found = store.figures[str(rounds)]
        print(
            f"{rounds:>7,} rounds: {found['mb_per_1000_rounds']:+.3f} MB per 1,000 rounds, "
            f"{found['handles'][1]} handles, {found['threads'][1]} threads, "
            f"{found['files'][1]} files"
        )


if __name__ == "__main__":
    main()
