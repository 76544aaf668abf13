"""What the studies of scale share: cases in processes of their own, and stored lines."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "figures" / "scale.jsonl"


def stored(part: str) -> dict[str, dict[str, Any]]:
    """The lines of a part that are on disk, by case; of a case measured again, the last."""
    lines = FIGURES.read_text().splitlines() if FIGURES.exists() else []
    found = [json.loads(line) for line in lines]
    return {line["case"]: line for line in found if line["part"] == part}


def store(part: str, case: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Write a line at once, so that an interruption loses none."""
    line = {"part": part, "case": case, **figures}
    FIGURES.parent.mkdir(exist_ok=True)
    with FIGURES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
    return line


def load() -> float:
    """Load of the machine, to judge a time by."""
    return round(os.getloadavg()[0], 1)


def peak() -> int:
    """Largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def alone(script: str, part: str, case: str, seconds: float = 3600.0) -> None:
    """Run a case in a process of its own, unless its line is on disk; its last line is stored."""
    if case in stored(part) and "failed" not in stored(part)[case]:
        return
    before = load()
    command = [sys.executable, script, "--case", case]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        text = (done.stderr.strip().splitlines() or ["ended without a word"])[-1]
        figures = {"failed": f"exit code {done.returncode}: {text[:200]}"}
    else:
        figures = json.loads(done.stdout.strip().splitlines()[-1])
    store(part, case, {**figures, "load": before, "process_seconds": round(time.time() - began, 1)})
