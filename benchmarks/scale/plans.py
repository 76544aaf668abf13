"""`coterie plan` against measured: time and bytes of a round, and memory, in eleven settings.

    python benchmarks/scale/plans.py --overheads    # measures running/overheads.json anew
    python benchmarks/scale/plans.py                # all settings that have no stored line

The plan is made in one process, then the run in another, both with one thread per process. The
overheads are measured on other, smaller runs than those of the comparison.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import load, store, stored

from coterie.cli.planning import Plan, predict
from coterie.engines import ray_pool
from coterie.running.build import build
from coterie.running.forecast import OVERHEADS, line, read_overheads, to_dict
from coterie.running.loop import begin
from coterie.running.sample import cores, peak_memory, weigh

LINK = 1e9  # bytes per second of the loopback interface, so that it does not matter


def digits(clients: int, per_client: int) -> dict[str, Any]:
    return {"name": "digits", "n_clients": clients, "n_groups": 4, "per_client": per_client}


def blobs(clients: int) -> dict[str, Any]:
    return {"name": "blobs", "n_groups": 2, "clients_per_group": clients // 2, "n": 20, "test": 5}


def setting(
    method: str, data: dict[str, Any], hidden: list[int], rounds: int = 8, **run: Any
) -> dict[str, Any]:
    known = {"n_groups": 2} if method in ("ifca", "clove", "census", "fesem") else {}
    return {
        "algorithm": {"name": method, **known},
        "model": {"name": "mlp", "hidden": hidden} if hidden else {"name": "linear"},
        "local": {"learning_rate": 0.05, "batch_size": 20, "epochs": 2},
        "data": data,
        "run": {"rounds": rounds, "threads": 1, **run},
    }


RAY = {"engine": "ray", "shards": 2}
SETTINGS: dict[str, tuple[dict[str, Any], int | None]] = {  # and number of real clients
    "ifca, 40 clients, 64-64-10": (setting("ifca", digits(40, 60), [64]), None),
    "clove, 40 clients, 64-256-10": (setting("clove", digits(40, 60), [256]), None),
    "ditto, 100 clients, 64-64-10": (setting("ditto", digits(100, 50), [64]), None),
    "census, 60 clients, 64-128-10": (setting("census", digits(60, 60), [128]), None),
    "fedavg, 2,000 clients, linear": (setting("fedavg", blobs(2000), []), None),
    "ifca, 20,000 clients, linear": (setting("ifca", blobs(20_000), [], 5), None),
    "fesem, 100 clients, 64-64-10": (setting("fesem", digits(100, 50), [64]), None),
    "ifca, 40 clients, 64-1024-1024-10, two shards": (
        setting("ifca", digits(40, 150), [1024, 1024], 4, **RAY),
        None,
    ),
    "clove, 20,000 clients, linear, two shards": (
        setting("clove", blobs(20_000), [], 6, **RAY),
        None,
    ),
    "clove, 4 nodes, 64-64-10": (setting("clove", digits(4, 100), [64]), 4),
    "ifca, 4 nodes, 64-512-512-10": (setting("ifca", digits(4, 100), [512, 512]), 4),
}


def forecast(tables: dict[str, Any], clients: int | None) -> dict[str, Any]:
    """The plan of a setting, as plain data."""
    ready = build(tables)
    found: Plan = predict(
        ready, 0, ready.settings.shards, clients, LINK, 0.0, places=cores() if clients else None
    )
    return to_dict(found.forecasts[-1])


class Stamps:
    """Progress that notes when rounds end, and what the processes of a run need."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.bytes: list[int] = []
        self.memory: dict[str, list[int]] = {}

    def start(self, title: str, rounds: int, done: int) -> None: ...

    def round(self, line: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())
        self.bytes.append(line["bytes"])
        self.memory = processes(os.getpid())

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


def largest(pid: int) -> int:
    """Largest memory of a process so far, in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def descendants(root: int) -> list[int]:
    """All processes that a process has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    out, new = [], [root]
    while new:
        new = [pid for pid, above in parents.items() if above in new]
        out += new
    return out


def processes(root: int) -> dict[str, list[int]]:
    """Largest memory of the processes that Ray has started below one: shards and the others."""
    found: dict[str, list[int]] = {}
    for pid in descendants(root):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        found.setdefault("each shard" if "ray::Host" in words else "Ray", []).append(largest(pid))
    return found


def measure(tables: dict[str, Any]) -> dict[str, Any]:
    """A run: median seconds from round to round, memory, bytes a round."""
    ready = build(tables)
    shards = ready.settings.shards
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as place:
        begin(ready, Path(place) / "run", stamps)
        memory = {"main process" if shards else "this process": peak_memory()}
        if shards:
            each = stamps.memory["each shard"]
            memory |= {"each shard": max(each), "Ray": sum(stamps.memory["Ray"])}
        gaps = [b - a for a, b in pairwise(stamps.times)]
        sent = stamps.bytes[-1] - stamps.bytes[-2]
        if shards:
            sent = count_traffic(tables)
    return {"seconds_a_round": statistics.median(gaps), "memory": memory, "bytes_a_round": sent}


def count_traffic(tables: dict[str, Any]) -> int:
    """Bytes between the processes in the third round, weighed on their way."""
    pool, counted, rounds = ray_pool.Actors, [0], []
    share, ask, take = pool.share, pool.ask, pool.take

    def heavier(value: Any, times: int = 1) -> Any:
        counted[0] += times * weigh(value)
        return value

    class Marks(Stamps):
        def round(self, line: dict[str, Any]) -> None:
            rounds.append(counted[0])

    pool.share = lambda self, value: share(self, heavier(value, len(self._hosts)))  # type: ignore
    pool.ask = (
        lambda self, shard, name, *given: (  # type: ignore
            heavier(given[1:] if name == "gather" else given) and None,
            ask(self, shard, name, *given),
        )[1]
    )
    pool.take = lambda self, ticket: heavier(take(self, ticket))  # type: ignore
    begin(build({**tables, "run": {**tables["run"], "rounds": 4}}), None, Marks())
    return rounds[2] - rounds[1]


def deploy(tables: dict[str, Any], clients: int) -> dict[str, Any]:
    """A deployment on loopback: mean seconds of a round, memory, bytes a round."""
    from coterie.running.folder import RunFolder

    where = Path(__file__).parents[1] / "flower" / "common.py"
    federation = runpy.run_path(str(where))["federation"]

    stamps: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as place:
        options = {"deadline": 240.0, "clients": clients}
        with federation(Path(place), tables, **options) as local:

            def say(text: str) -> None:
                if text.startswith("round"):
                    for entry in local.book.read():
                        own = [entry["pid"], *descendants(entry["pid"])]
                        stamps[entry["role"]] = [largest(pid) for pid in own]

            local.run({"wait": 900, "clients": clients}, attempts=1, seconds=600.0, say=say)
            lines = RunFolder(local.out).lines()
            gaps = [line["seconds"] for line in RunFolder(local.out).lines("timings.jsonl")]
            wire = [line["wire"] for line in lines]
    nodes = [max(found) for role, found in stamps.items() if role.startswith("node")]
    server = max(m for role, found in stamps.items() if role == "superlink" for m in found)
    sent = statistics.fmean(b - a for a, b in pairwise(wire[:-1]))
    return {
        "seconds_a_round": statistics.fmean(gaps[1:-1]),
        "memory": {"server": server, "each client": max(nodes)},
        "bytes_a_round": int(sent),
        "roles": {role: [m // 2**20 for m in found] for role, found in stamps.items()},
    }


def compare(name: str) -> None:
    """Plan and measure a setting, each in a process of its own, and store both."""
    figures: dict[str, Any] = {"load": load()}
    for what in ("plan", "measure"):
        command = [sys.executable, __file__, "--part", what, "--case", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            store("plan", name, {"failed": f"{what}: {done.stderr.strip()[-300:]}"})
            return
        figures[what] = json.loads(done.stdout.strip().splitlines()[-1])
    planned, found = figures["plan"], figures["measure"]
    ratios = {
        "seconds": planned["seconds_a_round"] / found["seconds_a_round"],
        "memory": sum(planned["memory"].values()) / sum(found["memory"].values()),
        "bytes": planned["bytes_a_round"] / found["bytes_a_round"],
    }
    store("plan", name, {**figures, "ratios": {k: round(v, 3) for k, v in ratios.items()}})


def overheads() -> None:
    """Measure what Ray and Flower cost on small runs, and write `running/overheads.json`."""
    small = setting("fedavg", blobs(40), [], 12)
    costs = dict(read_overheads())
    run = lambda *words: json.loads(  # noqa: E731
        subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
    )
    alone = run("--part", "plan", "--tables", json.dumps(small))
    costs["process"] = sum(alone["memory"].values())
    shards = {**small, "run": {**small["run"], **RAY}}
    planned = run("--part", "plan", "--tables", json.dumps(shards))
    found = run("--part", "measure", "--tables", json.dumps(shards))
    costs["ray_main"] = found["memory"]["main process"]
    costs["ray_shard"] = found["memory"]["each shard"]
    costs["ray_rest"] = found["memory"]["Ray"]
    others = sum(planned["seconds"].values()) - planned["seconds"]["traffic between processes"]
    costs["ray_call"] = round(max(1e-4, (found["seconds_a_round"] - others) / 4), 5)
    OVERHEADS.write_text(json.dumps(costs, indent=1) + "\n")
    print(json.dumps(costs))
    few, many, long = (
        run("--part", "measure", "--tables", json.dumps(tables), "--nodes", str(clients))
        for clients, tables in (
            (4, setting("fedavg", blobs(4), [], 10)),
            (10, setting("fedavg", blobs(10), [], 10)),
            (4, setting("fedavg", digits(4, 40), [512, 512], 10)),
        )
    )
    fixed, slope = line([4, 10], [found["seconds_a_round"] for found in (few, many)])
    costs["flower_exchange"] = round(max(1e-3, fixed), 4)
    costs["flower_message"] = round(max(1e-4, slope), 4)
    longer = long["seconds_a_round"] - few["seconds_a_round"]
    costs["flower_byte"] = float(f"{max(1e-12, longer / long['bytes_a_round']):.2g}")
    costs["flower_server"] = few["memory"]["server"]
    costs["flower_client"] = few["memory"]["each client"]
    OVERHEADS.write_text(json.dumps(costs, indent=1) + "\n")
    print(json.dumps(costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overheads", action="store_true")
    parser.add_argument("--only", nargs="*", help="words that a setting's name contains")
    parser.add_argument("--part")
    parser.add_argument("--case")
    parser.add_argument("--tables", type=json.loads)
    parser.add_argument("--nodes", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.overheads:
        overheads()
    elif options.part is None:
        for name in SETTINGS:
            wanted = not options.only or any(word in name for word in options.only)
            if wanted and name not in stored("plan"):
                compare(name)
    else:
        tables, clients = options.tables, options.nodes
        if options.case:
            tables, clients = SETTINGS[options.case]
        if options.part == "plan":
            print(json.dumps(forecast(tables, clients)))
        else:
            found = deploy(tables, clients) if clients else measure(tables)
            print(json.dumps(found))


if __name__ == "__main__":
    main()
