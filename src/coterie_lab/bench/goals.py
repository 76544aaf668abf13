"""The goals of the benchmark, and whether they are met."""

from typing import Any

from coterie_lab.bench.workloads import FLOOR, NAMES

SLACK = 0.85  # of a goal counts as "nearly": speed-ups vary by as much within one run
PEERS = {("flower", "W1"): 15.0, ("pfl", "W1"): 6.0, ("pfl", "W3"): 2.5}
SERVER = 2.5  # speed-up over the plain loop, for the mean of 100,000 updates
AT_REST_MB, PEAK_MB = 60.0, 700.0  # rotated digits with 1,200 or 4,800 clients
LINEAR = 0.20  # largest deviation from a straight line


def goal(
    where: str,
    kind: str,
    measure: str,
    wanted: float,
    reached: float | None,
    by: str = "ours",
    slack: float = SLACK,
    at_most: bool = False,
) -> dict[str, Any]:
    """One goal with the figure that was reached.

    >>> close = goal("W1", "general", "ratio", 4.0, 3.5)  # 85 % of 4 is 3.4
    >>> close["met"], close["close"]
    (False, True)
    >>> goal("W1", "general", "ratio", 4.0, 3.3)["close"]
    False
    """
    met = close = False
    if reached is not None:
        met = reached <= wanted if at_most else reached >= wanted
        close = met or (not at_most and reached >= slack * wanted)
    return {
        "where": where,
        "kind": kind,
        "measure": measure,
        "goal": wanted,
        "at_most": at_most,
        "reached": reached,
        "by": by,
        "met": met,
        "close": close,
    }


def of_workload(key: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of a workload at a number of threads."""
    work = NAMES[key.partition("@")[0]]
    timed = {n: v for n, v in found["variants"].items() if "seconds" in v}
    out = []
    for wanted in work.goals:
        if wanted.threads != found["threads"]:
            continue
        for measure, value in (("ratio", wanted.ratio), ("peak_fraction", wanted.peak)):
            if value is None:
                continue
            able = {n: timed[n][measure] for n in wanted.variants if n in timed}
            best = max(able, key=lambda n: able[n]) if able else wanted.variants[0]
            out.append(goal(key, wanted.kind, measure, value, able.get(best), best))
    ours = timed.get("ours", {}).get("ratio")
    out.append(goal(key, "floor", "ratio", FLOOR, ours, slack=1.0))
    return out


def of_results(results: dict[str, Any]) -> list[dict[str, Any]]:
    """All goals for which there are results."""
    out = [
        line
        for key, found in results.get("workloads", {}).items()
        if "variants" in found
        for line in of_workload(key, found)
    ]
    extras = results.get("extras", {})
    mean = extras.get("server", {}).get("mean", {})
    if "variants" in mean:
        reached = mean["variants"].get("ours", {}).get("ratio")
        out.append(goal("W8", "general", "ratio", SERVER, reached))
    for name in ("ifca1200", "ifca4800"):
        memory = extras.get(name, {}).get("memory", {})
        for measure, wanted in (("at_rest_mb", AT_REST_MB), ("peak_mb", PEAK_MB)):
            if measure in memory:
                out.append(goal(name, "memory", measure, wanted, memory[measure], at_most=True))
    for size, curve in results.get("growth", {}).items():
        if "deviation" in curve:
            out.append(
                goal(
                    f"growth {size}",
                    "linear",
                    "deviation",
                    LINEAR,
                    curve["deviation"],
                    at_most=True,
                )
            )
    for (peer, work), wanted in PEERS.items():
        seconds = results.get("peers", {}).get(peer, {}).get(work, {}).get("ratio")
        if seconds is not None:
            out.append(goal(f"{work} against {peer}", "peer", "ratio", wanted, seconds))
    return out
