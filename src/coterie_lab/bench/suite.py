"""The whole benchmark: runs all measurements and collects their results."""

import os
from collections.abc import Callable
from typing import Any

from coterie.core.errors import ConfigError
from coterie_lab.bench import goals, measure
from coterie_lab.bench.block import Failed, ask
from coterie_lab.bench.growth import SIZES
from coterie_lab.bench.images import images
from coterie_lab.bench.workloads import WORKLOADS, select

SCHEMA = 1
EXTRAS = {
    "W8": "the server: means of 100,000 updates, clustering of 100,000 clients",
    "server": "the same as W8",
    "scale100k": "CLoVE with 10 models of W9, 100,000 clients, 1 % per round",
    "ifca1200": "a round of IFCA's Table 1 with 1,200 clients, and the plain loop",
    "ifca4800": "memory of a round of IFCA's Table 1 with 4,800 clients",
}
DEFAULT = ("server", "scale100k", "ifca1200", "ifca4800")
PARTS = ("workloads", "extras", "growth", "peers")
Report = Callable[[str, dict[str, Any]], None]


def run(
    only: list[str] | None = None,
    threads: int | None = None,
    repeats: int = 5,
    scale: float = 1.0,
    growth: bool = False,
    peers: bool = False,
    memory: bool = True,
    before: dict[str, Any] | None = None,
    report: Report = lambda name, found: None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Measure, and return all results.

    `report` is called with every finished measurement, `keep` with all results so far.
    Measurements in `before`, the results of an interrupted run, are not repeated.
    """
    works, extras = select(only, tuple(EXTRAS)) if only is not None else ([*WORKLOADS], [*DEFAULT])
    cores = os.cpu_count() or 1
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": measure.machine(),
        "settings": {"repeats": repeats, "threads": threads, "scale": scale},
        "data": images().source,
        "foreign_limit": measure.FOREIGN,
        "workloads": {},
        "extras": {},
        "growth": {},
        "peers": {},
    }
    common = {"repeats": repeats, "scale": scale}
    if before is not None:
        _check_same(before, results)
        results |= {part: before.get(part, {}) for part in PARTS}

    def missing(part: str, name: str) -> bool:
        return "error" in results[part].get(name, {"error": "not yet"})

    def done(part: str, name: str, found: dict[str, Any]) -> None:
        results[part][name] = found
        results["goals"] = goals.of_results(results)
        keep(results)
        report(name, found)

    for work in works:
        counts = [threads] if threads else [min(t, cores) for t in work.threads]
        for number, count in enumerate(dict.fromkeys(counts)):
            key = work.name if number == 0 else f"{work.name}@{count}"
            if not missing("workloads", key):
                continue
            job = {"kind": "times", "name": work.name, "threads": count, **common}
            found = attempt(job)
            if memory and number == 0 and "variants" in found:
                for name in ("plain", "ours"):
                    job = {"kind": "memory", "name": work.name, "variant": name, "threads": count}
                    if name in found["variants"]:
                        found["variants"][name]["memory"] = attempt(job | common)
            done("workloads", key, found)
    count = threads or min(2, cores)
    for name in extras:
        name = "server" if name == "W8" else name
        if missing("extras", name):
            done("extras", name, extra(name, {**common, "threads": count}))
    for size in SIZES if growth else ():
        if not missing("growth", size):
            continue
        done("growth", size, attempt({"kind": "growth", "size": size, "threads": count, **common}))
    if peers:
        from coterie_lab.bench import peers as others

        for name in others.PEERS:
            if not missing("peers", name):
                continue
            done("peers", name, others.measure_peer(name, results, common))
    results["goals"] = goals.of_results(results)
    keep(results)
    return results


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a run continues on the same machine with the same settings."""
    for part in ("schema", "machine", "settings", "data"):
        if before.get(part) != now[part]:
            raise ConfigError(
                f"coterie bench: a run can only continue on the same machine with the same "
                f"settings. {part} was {before.get(part)} and is now {now[part]}. Write to another "
                "file."
            )


def attempt(job: dict[str, Any], seconds: float = 7200) -> dict[str, Any]:
    """Run a measurement; return its result or the reason why it failed."""
    try:
        return ask(job, seconds)
    except Failed as error:
        return {"error": str(error)}


def extra(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a further measurement by name."""
    if name == "server":
        parts = ("mean", "cluster", "choice", "matching")
        return {
            part: attempt({"kind": "server", "part": part, **job}, seconds=900) for part in parts
        }
    if name == "scale100k":
        return attempt({"kind": "large", "part": "scale100k", **job})
    clients, samples = {"ifca1200": (1200, 200), "ifca4800": (4800, 50)}[name]
    sizes = {"clients": clients, "samples": samples}
    found = {"memory": attempt({"kind": "large", "part": "ifca_memory", **sizes, **job})}
    if name == "ifca1200":
        # All clients are timed here; the plain loop holds its data as floats.
        clients = int(1200 * job["scale"]) // 4 * 4
        whole = {"changes": {"timed": None, "clients": clients}, "variants": ["plain", "ours"]}
        found["round"] = attempt({"kind": "times", "name": "W4", **whole, **job, "scale": 1.0})
        for variant in found["round"].get("variants", {}).values():
            if "seconds" in variant:
                variant["hours_for_300_rounds"] = variant["seconds"] * 300 / 3600
    return found
