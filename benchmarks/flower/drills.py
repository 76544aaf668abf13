"""Drills: a process of a federation is killed during a round, and the run must continue.

All drills use one federation on loopback, with TLS and node keys: four clients with digits in two
orientations, and six rounds of `census` each. Killed processes restart by themselves. A drill is
passed if the run finishes, the groups are the two orientations (adjusted Rand index 1 over all
clients that trained), no client is counted twice in an exchange, and the final state has the bits
of a simulation. A client that does not answer within the deadline is missing in this exchange: then
the simulation leaves out the same replies. In the first twenty drills a node, the server app, or
both are killed, or a node stops answering. In the others the SuperLink is killed, and the
supervisor starts it again. `--stock` repeats the drills with Flower's own nodes.
"""

import argparse
import json
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    describe_run,
    federation,
    fill,
    guess_lost,
    keep,
    quiet,
    simulate_run,
    simulate_without,
    state_of,
)

from coterie import metrics
from coterie.core import wire
from coterie.deploy.local import Deployment
from coterie.running.build import make_data
from coterie.running.folder import RunFolder

ROUNDS = 6
KINDS = ("node killed", "server app killed", "both killed", "never answers", "worker killed")
LINK = "SuperLink killed"
TWENTY = 20
DEADLINE = 25
PHASES = ("cluster", "train")
FIGURES = Path(__file__).parents[1] / "figures" / "deployment-drills.jsonl"


def process_of(local: Deployment, client: str, part: str) -> int:
    """The process number of a node; of a stock node, of one of its parts, from its log."""
    entry = next(e for e in local.book.read() if e["role"] == f"node-{client}")
    text = (local.state / "logs" / f"node-{client}.log").read_text(errors="replace")
    if "supernode started, process" not in text:
        return int(entry["pid"])
    return int(re.findall(rf"^{part} started, process (\d+)", text, re.M)[-1])


def server_app(local: Deployment) -> int | None:
    """The process number of the server app."""
    parent = next(e["pid"] for e in local.book.read() if e["role"] == "server")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            words = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == parent and b"flwr-serverapp" in words:
            return int(path.parent.name)
    return None


def kill(number: int | None, what: int = signal.SIGKILL) -> str:
    """Send a signal to a process that this script started."""
    if number is None:
        return "not there"
    try:
        os.kill(number, what)
    except ProcessLookupError:
        return "gone already"
    return f"process {number}"


def strike(local: Deployment, out: Path, kind: str, client: str, after: int, pause: float) -> None:
    """Wait for a number of rounds and a short time, then cause the failure."""
    end = time.monotonic() + 240
    began = out / "names.json"  # all have joined
    while (not began.exists() or len(RunFolder(out).lines()) < after) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(pause)
    if kind == LINK:
        link = next(e["pid"] for e in local.book.read() if e["role"] == "superlink")
        quiet(f"SuperLink: {kill(link)}")
    if kind in ("node killed", "both killed"):
        quiet(f"node of {client}: {kill(process_of(local, client, 'supernode'))}")
    if kind in ("server app killed", "both killed"):
        quiet(f"server app: {kill(server_app(local))}")
    if kind == "worker killed":
        quiet(f"worker of {client}: {kill(process_of(local, client, 'worker'))}")
    if kind == "never answers":
        quiet(f"worker of {client} stops: {kill(process_of(local, client, 'worker'), 19)}")


def drill(
    local: Deployment,
    number: int,
    kind: str,
    truth: torch.Tensor,
    sizes: dict[str, float],
    stock: bool,
) -> dict[str, Any]:
    """One run with one failure."""
    client = f"client-{number % 4}"
    after = number % 3  # in round 1, 2 or 3
    pause = (1.0 + 1.7 * (number % 4)) / (1 if stock else 5)  # stock: 1 to 6 s into it
    out = local.folder / f"run-{number:02d}"
    thread = threading.Thread(target=strike, args=(local, out, kind, client, after, pause))
    began = time.monotonic()
    thread.start()
    line: dict[str, Any] = {"kind": kind, "client": client, "round": after + 1}
    try:
        config = {"out": str(out), "deadline": DEADLINE, "clients": 4, "wait": 240}
        line["finished"] = local.run(config, attempts=4, seconds=600.0, say=quiet)
    except Exception as error:
        line |= {"finished": False, "error": str(error)}
    thread.join()
    if kind == "never answers":
        stopped = process_of(local, client, "worker")
        kill(stopped, signal.SIGCONT)
        kill(stopped)
    line["seconds"] = round(time.monotonic() - began)
    if not line["finished"]:
        return line
    names = json.loads((out / "names.json").read_text())
    saved = RunFolder(out).manifests()[-1][1]
    content = wire.load((out / "checkpoint" / saved["state"]).read_bytes())
    found, order = content["state"]["assignment"], [int(name.split("-")[1]) for name in names]
    trained = torch.zeros(len(found))
    trained[: len(content["traffic"]["train/up"])] = content["traffic"]["train/up"].float()
    # The first round assigns groups at random, so only clients that trained count.
    some = (found >= 0) & (trained > 0)
    line |= {"rounds": saved["round"], "trained": int(some.sum())}
    line["ari"] = metrics.adjusted_rand(found[some], truth[order][some])
    # All answers to a task have one size, so bytes tell how often each client was counted.
    counted = {p: (content["traffic"][f"{p}/up"] / sizes[p]).tolist() for p in sizes}
    line["counted"] = {p: [round(c, 3) for c in counts] for p, counts in counted.items()}
    line["once"] = all(c <= ROUNDS and c == int(c) for part in counted.values() for c in part)
    missing: dict[str, list[int]] = {}
    for entry in RunFolder(out).lines():
        for name in entry.get("missing", ()):
            missing.setdefault(name, []).append(entry["round"] - 1)
    line["missing"] = {name: [number + 1 for number in rounds] for name, rounds in missing.items()}
    return line


def compare(tables: dict[str, Any], out: Path, line: dict[str, Any], place: Path) -> dict[str, Any]:
    """Whether a simulation without the same replies ends with the same bits, and how many."""
    found = state_of(out)
    missing = {name: [n - 1 for n in rounds] for name, rounds in line["missing"].items()}
    for number, lost in enumerate(guess_lost(missing, PHASES)):
        if simulate_without(tables, place / f"{out.name}-{number}", lost) == found:
            return {"same_bits": True, "lost": len(lost)}
    return {"same_bits": False, "lost": None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    every = list(range(1, TWENTY + 5))
    parser.add_argument("--drills", nargs="+", type=int, default=every, help="their numbers")
    parser.add_argument("--stock", action="store_true", help="with Flower's own nodes")
    parser.add_argument("--database", action="store_true", help="SuperLink with a database")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="file for the lines")
    parser.add_argument("--page", type=Path, help="write the table into this page, and run nothing")
    options = parser.parse_args()
    if options.page:
        fill(options.page, "drills", table(options.figures))
        return
    tables = describe_run("census", ROUNDS)
    truth = make_data(tables["data"]).truth
    lines = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        simulate_run(describe_run("census", 1), place / "one")  # in a round all answer once
        traffic = RunFolder(place / "one").summary()["traffic"]
        sizes = {phase: traffic[phase]["up"] / 4 for phase in PHASES}
        kinds = {"stock": options.stock, "database": options.database}
        with federation(place / "real", tables, deadline=DEADLINE, **kinds) as local:
            for number in (drill - 1 for drill in options.drills):
                kind = KINDS[number % len(KINDS)] if number < TWENTY else LINK
                quiet(f"drill {number + 1}: {kind}")
                line = {
                    "drill": number + 1,
                    **kinds,
                    "load": round(os.getloadavg()[0], 1),
                    **drill(local, number, kind, truth, sizes, options.stock),
                }
                if line["finished"]:
                    out = local.folder / f"run-{number:02d}"
                    line |= compare(tables, out, line, place)
                lines.append(line)
                print(json.dumps(line), flush=True)
                keep(options.figures, lines, ("drill", "stock", "database"))
    print("\n".join(table(options.figures)))


def table(figures: Path) -> list[str]:
    """The drills by nodes and failure, as a table."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for text in figures.read_text().splitlines():
        line = json.loads(text)
        nodes = "stock" if line["stock"] else "fast"
        nodes += ", database" if line["database"] else ""
        rows.setdefault((nodes, line["kind"]), []).append(line)
    heads = "nodes", "failure", "drills", "finished", "right groups", "counted once", "same bits"
    said = ["| " + " | ".join((*heads, "replies lost")) + " |", "| --- " * 8 + "|"]
    for (nodes, kind), lines in rows.items():
        right = sum(line.get("ari") == 1 for line in lines)
        once, same = (sum(bool(line.get(key)) for line in lines) for key in ("once", "same_bits"))
        lost = sorted(line["lost"] for line in lines if line.get("lost") is not None)
        span = " to ".join(map(str, sorted({lost[0], lost[-1]}))) if lost else ""
        finished = sum(line["finished"] for line in lines)
        shown = (nodes, kind, len(lines), finished, right, once, same, span)
        said.append("| " + " | ".join(map(str, shown)) + " |")
    return said


if __name__ == "__main__":
    main()
