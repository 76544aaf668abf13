"""Drills: a process of a federation is killed during a round, and the run must continue.

All drills use one federation on loopback, with TLS and node keys: four clients with digits in two
orientations, and six rounds of `census` each. Killed processes restart by themselves. A drill is
passed if the run finishes, the groups are the two orientations (adjusted Rand index 1 over all
clients that trained), and no client is counted twice in an exchange. In the first twenty drills a
node, the server app, or both are killed, or a node stops answering. In the others the SuperLink is
killed, and the supervisor starts it again. `--stock` repeats the twenty with Flower's own nodes.
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
from common import describe_run, federation, note, quiet, simulate_run, state_of

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
    saved = RunFolder(out)._manifests()[-1][1]
    content = wire.load((out / "checkpoint" / saved["state"]).read_bytes())
    found, order = content["state"]["assignment"], [int(name.split("-")[1]) for name in names]
    trained = torch.zeros(len(found))
    trained[: len(content["traffic"]["train/up"])] = content["traffic"]["train/up"].float()
    # The first round assigns groups at random, so only clients that trained count.
    some = (found >= 0) & (trained > 0)
    line |= {"rounds": saved["round"], "trained": int(some.sum())}
    line["ari"] = metrics.adjusted_rand(found[some], truth[order][some])
    line["abandoned"] = sum("abandoned" in entry for entry in RunFolder(out).lines())
    # All answers to a task have one size, so bytes tell how often each client was counted.
    counted = {p: (content["traffic"][f"{p}/up"] / sizes[p]).tolist() for p in sizes}
    line["counted"] = {p: [round(c, 3) for c in counts] for p, counts in counted.items()}
    line["once"] = all(c <= ROUNDS and c == int(c) for part in counted.values() for c in part)
    line["lost"] = int(sum(ROUNDS - c for c in counted["train"]))
    line["state"] = state_of(out)[1]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--drills", type=int, default=TWENTY + 4)
    parser.add_argument("--stock", action="store_true", help="with Flower's own nodes")
    parser.add_argument("--database", action="store_true", help="SuperLink with a database")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    options = parser.parse_args()
    tables = describe_run("census", ROUNDS)
    truth = make_data(tables["data"]).truth
    lines = []
    with tempfile.TemporaryDirectory() as place:
        expected = simulate_run(tables, Path(place) / "simulated")[1]
        simulate_run(describe_run("census", 1), Path(place) / "one")  # in a round all answer once
        traffic = RunFolder(Path(place) / "one").summary()["traffic"]
        sizes = {phase: traffic[phase]["up"] / 4 for phase in ("train", "cluster")}
        kinds = {"stock": options.stock, "database": options.database}
        with federation(Path(place) / "real", tables, deadline=DEADLINE, **kinds) as local:
            for number in range(options.first, options.drills):
                kind = KINDS[number % len(KINDS)] if number < TWENTY else LINK
                quiet(f"drill {number + 1}: {kind}")
                line = {
                    "drill": number + 1,
                    **drill(local, number, kind, truth, sizes, options.stock),
                }
                line["as_undisturbed"] = line.pop("state", None) == expected
                lines.append(line)
                print(json.dumps(line), flush=True)
                note(options.json, lines)
    print("| drill | what | finished | ARI | counted once | replies lost | as undisturbed | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in lines:
        shown = [line["drill"], f"{line['kind']}, round {line['round']}", line["finished"]]
        shown += [line.get(k) for k in ("ari", "once", "lost", "as_undisturbed", "seconds")]
        print("| " + " | ".join(map(str, shown)) + " |")


if __name__ == "__main__":
    main()
