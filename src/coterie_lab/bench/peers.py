"""Other packages on the same workloads, each in its own environment.

The scripts are in `benchmarks/peers` of the source tree. They do not import Coterie; they receive
the problem as a file of arrays.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from coterie_lab.bench import variants
from coterie_lab.bench.block import Failed, ask
from coterie_lab.bench.workloads import NAMES

SOURCE = Path(__file__).parents[3]
SCRIPTS = SOURCE / "benchmarks" / "peers"
PEERS = {"flower": ("W1",), "pfl": ("W1", "W3")}
"""The workloads of each package."""
PACKAGES = {"flower": ("flwr", "ray"), "pfl": ("pfl",)}
ROUNDS = 5  # the first is listed separately: it starts workers and loads libraries
TOLERANCE = 1e-4


def measure_peer(name: str, results: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds per round of a package and ours; or the reason why it failed."""
    try:
        python = environment(name)
    except Failed as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"package": _versions(python, PACKAGES[name])}
    threads = min(2, os.cpu_count() or 1)
    for work in PEERS[name]:
        try:
            found[work] = _one(name, python, work, threads, common["scale"])
            ours = _ours(work, results, threads, common)
            found[work] |= {"ours_seconds": ours, "ratio": found[work]["seconds"] / ours}
        except Failed as error:
            found[work] = {"error": str(error)}
    return found


def environment(name: str) -> Path:
    """The Python interpreter of a package's environment, which is created if necessary."""
    wanted = SCRIPTS / f"{name}.txt"
    if not wanted.exists():
        raise Failed(f"{wanted.name} is only in the source tree; run this from a checkout")
    bounds = SOURCE / "constraints.txt"
    text = wanted.read_text() + bounds.read_text() + sys.version
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    base = Path(os.environ.get("COTERIE_CACHE") or Path.home() / ".cache" / "coterie")
    folder = base / "bench" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    _do([sys.executable, "-m", "venv", "--clear", str(folder)], 300)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    _do([*install, "-r", str(wanted), "-c", str(bounds)], 1800)
    (folder / "complete").touch()
    return python


def export(work: str, scale: float, path: Path) -> None:
    """Write data, batches, initial weights and the mean of the plain loop after a round."""
    problem = variants.prepare(NAMES[work].scale(scale))
    mean = variants.make(variants.PLAIN, problem).run()
    arrays = {f"mean/{leaf}": value[0] for leaf, value in mean.items()}
    arrays |= {f"start/{leaf}": value for leaf, value in problem.state.params.items()}
    arrays |= {"x": problem.batch.x, "y": problem.batch.y, "order": problem.steps.flatten(1)}
    np.savez(path, **{name: leaf.detach().numpy() for name, leaf in arrays.items()})  # type: ignore[arg-type]


def _one(name: str, python: Path, work: str, threads: int, scale: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        export(work, scale, problem)
        command = [str(python), str(SCRIPTS / f"{name}_peer.py"), str(problem)]
        # A clean path, so that Coterie is not imported there. Ray's workers need the scripts.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        path = {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": str(threads)}
        output = _do([*command, str(ROUNDS), str(threads)], 1200, clean | quiet | path)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed("the script printed no result")
    found = json.loads(lines[-1])
    if not found["seconds"] or found.get("apart") is None:
        raise Failed("the script finished no round")
    if not found["apart"] <= TOLERANCE:
        raise Failed(f"its first round differs from the plain loop by {found['apart']:.1e}")
    later = found["seconds"][1:]
    return {
        "seconds": statistics.median(later),
        "first_seconds": found["seconds"][0],
        "spread": (max(later) - min(later)) / statistics.median(later),
        "rounds": found["seconds"],
        "apart": found["apart"],
        "threads": threads,
    }


def _ours(work: str, results: dict[str, Any], threads: int, common: dict[str, Any]) -> float:
    """Our seconds on the same workload, from this run or measured now."""
    found = results["workloads"].get(work, {})
    if found.get("threads") != threads:
        pair = ["plain", "ours"]
        found = ask({"name": work, "threads": threads, "variants": pair, **common})
    ours = found.get("variants", {}).get("ours", {})
    if "seconds" not in ours:
        raise Failed(f"our engine was not measured: {ours.get('error', 'no result')}")
    return ours["seconds"]


def _versions(python: Path, packages: tuple[str, ...]) -> str:
    code = (
        "import sys; from importlib.metadata import version;"
        "print(', '.join(f'{p} {version(p)}' for p in sys.argv[1:]))"
    )
    return _do([str(python), "-c", code, *packages], 60).strip()


def _do(command: list[str], seconds: float, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; an error carries its last line."""
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=seconds, cwd=SCRIPTS
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{Path(command[0]).name} did not finish within {seconds:.0f} s") from None
    except OSError as error:
        raise Failed(str(error)) from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout
