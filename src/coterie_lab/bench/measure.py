"""Measure times, and how much other processes disturbed the measurement."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOREIGN = 0.08  # largest share of the processors that others may use during a sample
RETRIES = 3  # how often a disturbed sample is repeated
SHORTEST = 0.2  # seconds of a sample; processor counters have steps of 0.01 s


class Sample(NamedTuple):
    """One timing, per call."""

    seconds: float
    foreign: float | None  # share of all processors used by others; None if unknown


def busy_seconds() -> float | None:
    """Processor seconds used by all processes of the machine, from the kernel's counters."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, first[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds used by this process and its children, including running ones."""
    mine, ended = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = mine.ru_utime + mine.ru_stime + ended.ru_utime + ended.ru_stime
    return total + sum(map(_processor_seconds, _children(os.getpid())))


def _children(pid: int) -> list[int]:
    try:
        found = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return found + [grandchild for child in found for grandchild in _children(child)]


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sample(run: Callable[[], Any], calls: int = 1) -> Sample:
    """Time some calls, and measure the share of the processors that others used."""
    busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    after = busy_seconds()
    if busy is None or after is None:
        return Sample(elapsed / calls, None)
    others = max(0.0, after - busy - (own_seconds() - own))
    return Sample(elapsed / calls, min(1.0, others / (elapsed * (os.cpu_count() or 1))))


class Timing(NamedTuple):
    """The samples of one variant."""

    samples: list[Sample]
    repeated: int  # number of samples that were repeated because they were disturbed

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(s.seconds for s in self.samples)

    @property
    def spread(self) -> float:
        """Largest minus smallest time, divided by the median."""
        times = [s.seconds for s in self.samples]
        return (max(times) - min(times)) / self.seconds

    @property
    def foreign(self) -> float | None:
        """Largest share of the processors that others used during a sample."""
        known = [s.foreign for s in self.samples if s.foreign is not None]
        return max(known) if known else None


def time_in_turn(
    runs: Mapping[str, Callable[[], Any]],
    repeats: int,
    take: Callable[[Callable[[], Any], int], Sample] = sample,
) -> dict[str, Timing]:
    """Time variants in turn, so that a disturbance affects all of them.

    The first call of each is not timed. A sample during which others used more than 8 % of the
    processors is repeated up to three times, and at most `repeats` times over all samples. The
    least disturbed one is used.
    """
    calls = {}
    for name, run in runs.items():
        run()
        first = take(run, 1).seconds
        calls[name] = max(1, min(50, round(SHORTEST / max(first, 1e-9) + 0.5)))
    timings = {name: Timing([], 0) for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            old, tried = timings[name], [take(run, calls[name])]
            left = min(RETRIES, repeats - old.repeated)
            while (tried[-1].foreign or 0.0) > FOREIGN and len(tried) <= left:
                tried.append(take(run, calls[name]))
            best = min(tried, key=lambda s: s.foreign or 0.0)
            timings[name] = Timing([*old.samples, best], old.repeated + len(tried) - 1)
    return timings


def gemm_peak(repeats: int = 7, size: int = 2048) -> float:
    """The peak speed of the machine in GFLOP/s, from a large product of float32 matrices."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    out = a @ b
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times) / 1e9


def peak_memory() -> float:
    """Largest memory of this process so far, in MB."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_now() -> float:
    """Memory of this process, in MB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory()
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    import platform

    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
