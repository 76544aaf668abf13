"""One workload in one process: `python -m coterie_lab.bench.block '{"name": "W1", "threads": 2}'`.

Threads and memory belong to a process, so every workload and every memory figure has its own.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from coterie_lab.bench import measure, variants
from coterie_lab.bench.workloads import NAMES, Workload


def workload(job: dict[str, Any]) -> Workload:
    """The workload of a job, with the changes of the job."""
    work = NAMES[job["name"]].scale(job.get("scale", 1.0))
    return replace(work, **job.get("changes", {}))


def times(job: dict[str, Any]) -> dict[str, Any]:
    """Compare all variants with the plain loop, then time them in turn."""
    work = workload(job)
    problem = variants.prepare(work)
    found: dict[str, Any] = {}
    runs: dict[str, variants.Variant] = {}
    plain = variants.make(variants.PLAIN, problem, exact=True).run()
    for name in job.get("variants") or variants.names_of(work):
        try:
            agrees = variants.agreement(problem, variants.make(name, problem, True).run(), plain)
            found[name] = {"agreement": agrees._asdict()}
            if not agrees.holds:
                found[name]["error"] = (
                    f"differs from the plain loop: {agrees.largest:.1e}, allowed "
                    f"{agrees.tolerance:.0e}; {agrees.relative:.1e} of the change, allowed "
                    f"{variants.RELATIVE:g}"
                )
                continue
            runs[name] = variants.make(name, problem)
        except variants.Unavailable as reason:
            found[name] = {"absent": str(reason)}
        except Exception as error:  # a failing variant must not stop the others
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    peak = measure.gemm_peak()
    timings = measure.time_in_turn({n: v.run for n, v in runs.items()}, job.get("repeats", 5))
    peak = max(peak, measure.gemm_peak())
    base = timings[variants.PLAIN].seconds
    for name, timing in timings.items():
        rate = problem.gflop / timing.seconds
        found[name] |= {
            "seconds": timing.seconds,
            "ratio": base / timing.seconds,
            "gflops": rate,
            "peak_fraction": rate / peak,
            "spread": timing.spread,
            "samples": [s.seconds for s in timing.samples],
            "foreign": timing.foreign,
            "repeated": timing.repeated,
            "plan": runs[name].plan,
        }
    return {
        "title": work.title,
        "threads": torch.get_num_threads(),
        "clients": len(problem.data),
        "clients_of_workload": work.clients,
        "gflop": problem.gflop,
        "peak_gflops": peak,
        "variants": found,
    }


def memory(job: dict[str, Any]) -> dict[str, Any]:
    """The peak memory of two rounds of one variant, and the memory before."""
    work = workload(job)
    bare = measure.memory_now()
    problem = variants.prepare(work)
    if job["variant"] not in (variants.PLAIN, variants.LAYOUT):
        problem = replace(problem, batch=problem.batch._replace(x=torch.empty(0)))
    variant = variants.make(job["variant"], problem)
    ready = measure.memory_now()
    start = time.perf_counter()
    variant.run()
    first = time.perf_counter() - start
    variant.run()
    return {
        "peak_mb": measure.peak_memory(),
        "libraries_mb": bare,
        "ready_mb": ready,
        "first_seconds": first,
        "seconds": time.perf_counter() - start - first,
    }


def server(job: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement of the server."""
    from coterie_lab.bench.server import PARTS

    return PARTS[job["part"]](job)


def large(job: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement with many clients."""
    from coterie_lab.bench.large import PARTS

    return PARTS[job["part"]](job)


def growth(job: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement of growth."""
    from coterie_lab.bench.growth import curve

    return curve(job)


KINDS = {f.__name__: f for f in (times, memory, server, large, growth)}


class Failed(Exception):
    """Raised when a measurement ended without a result."""


def ask(job: dict[str, Any], seconds: float = 7200) -> dict[str, Any]:
    """Run a job in its own process, with the number of threads it asks for."""
    threads = str(job.get("threads", 1))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, threads)
    command = [sys.executable, "-m", "coterie_lab.bench.block", json.dumps(job)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"did not finish within {seconds:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(lines[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run the job in the first argument and print its result as one line of JSON."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job.get("threads", 1))
    print(json.dumps(KINDS[job.get("kind", "times")](job)))


if __name__ == "__main__":
    main()
