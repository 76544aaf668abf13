"""The time and the CPU seconds of a round on real nodes, with fast and with stock nodes, and cold.

For every setting (method, number of nodes, model) the same run is made in one process, on fast
nodes, and on stock nodes, one after the other, with TLS and node keys. Cold: a client app without a
worker, which loads torch and the data for every message. CPU seconds are read from /proc for every
process of the deployment. Lines are written to a file as they come, and replace older lines about
the same; `--page docs/deploying.md` writes the table of all lines into the page. With
`--parts bytes`, a proxy between the nodes and the SuperLink counts bytes, which are compared with
the counter of the run and with the data passed to Flower; the bytes that idle nodes send are
measured first and subtracted.
"""

import argparse
import itertools
import json
import os
import selectors
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import describe_run, federation, fill, keep, quiet, simulate_run, state_of

from coterie.deploy.app import write_app
from coterie.deploy.keys import node_key
from coterie.deploy.local import Deployment
from coterie.deploy.node import node_command
from coterie.deploy.processes import environment
from coterie.running.folder import RunFolder

FIGURES = Path(__file__).parents[1] / "figures" / "deployment-times.jsonl"
KEYS = ("method", "nodes", "model", "kind")
COLD = '''"""A client app without a worker: everything is loaded for every message."""

from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from coterie.deploy.worker import Worker
from coterie.engines.flower import from_records, to_records

app = ClientApp()


@app.query("coterie")
def work(message, context):
    home = Path(context.node_config["home"])
    asked = from_records(message.content)
    kept = home / "blobs"  # a process that ends cannot hold what it was sent
    kept.mkdir(exist_ok=True)
    for name, blob in asked.blobs.items():
        (kept / name).write_bytes(blob)
    wanted = {asked.head["setup"]}
    wanted |= {part["blob"] for call in asked.head["calls"] for part in call["given"]}
    known = {name: (kept / name).read_bytes() for name in wanted if (kept / name).exists()}
    worker = Worker(home, context.node_config["name"], "run")
    answer = worker.handle(asked._replace(blobs={**asked.blobs, **known}))
    return Message(to_records(answer), reply_to=message)
'''


class Proxy:
    """A proxy between nodes and the SuperLink that counts bytes."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self.target, self.counts = (host, int(port)), {"down": 0, "up": 0}
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
                far = socket.create_connection(self.target)
            except OSError:
                return
            threading.Thread(target=self._pass, args=(near, far), daemon=True).start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        chosen = selectors.DefaultSelector()
        chosen.register(near, selectors.EVENT_READ, (far, "up"))
        chosen.register(far, selectors.EVENT_READ, (near, "down"))
        with near, far:
            while True:
                for key, _ in chosen.select():
                    other, way = key.data
                    try:
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        other.sendall(data)
                    except OSError:
                        return
                    self.counts[way] += len(data)

    def total(self) -> int:
        return sum(self.counts.values())


def seconds(out: Path) -> list[float]:
    return [line["seconds"] for line in RunFolder(out).lines("timings.jsonl")]


def cpu_of(local: Deployment) -> dict[str, float]:
    """CPU seconds so far of the SuperLink, the server app with its executor, and the nodes."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with ended children
    roles = {e["pid"]: e["role"].split("-")[0] for e in local.book.read()}
    total: dict[str, float] = {}
    for pid, spent in used.items():
        above = pid
        while above not in roles and above in parents:
            above = parents[above]
        role = roles.get(above)
        if role is not None and not (role == "supervisor" and pid != above):
            total[role] = total.get(role, 0.0) + spent
    return total


def timed(place: Path, kind: str, tables: dict[str, Any], clients: int) -> dict[str, Any]:
    """One run on nodes: seconds of every round, and CPU seconds a round.

    The first round waits until everything is loaded, and the last has an evaluation of its own, so
    the median is over the others.
    """
    stock = kind in ("stock", "cold")
    options: dict[str, Any] = {"deadline": 240.0, "clients": clients, "stock": stock}
    options["database"] = kind in ("stock", "cold", "database")
    options["per_node"] = clients if kind == "shared" else 1
    with federation(place / kind, tables, **options) as local:
        if kind == "cold":
            (local.folder / "app" / "client_app.py").write_text(COLD)
            time.sleep(15)  # the quick command is there once its process has loaded Flower
            for shim in local.state.glob("nodes/*/bin/flwr-clientapp"):
                shim.unlink()
        marks, loads = [], []

        def say(text: str) -> None:
            quiet(text)
            if text.startswith("round"):
                marks.append((int(text.split()[1]), cpu_of(local)))
                loads.append(os.getloadavg()[0])

        config = {"wait": 900, "clients": clients}
        whole = local.run(config, attempts=1, seconds=1800.0, say=say)
        found = seconds(local.out)
        state = state_of(local.out)
    (first, before), (last, after) = marks[0], marks[-2]
    spent = {r: round((after[r] - before.get(r, 0.0)) / max(1, last - first), 2) for r in after}
    return {
        "finished": whole,
        "seconds": [round(value, 2) for value in found],
        "first": round(found[0], 2),
        "median": round(statistics.median(found[1:-1]), 2),
        "cpu_a_round": spent,
        "load": round(statistics.mean(loads), 1),
        "state": state,
    }


def compare(place: Path, options: argparse.Namespace) -> None:
    """All settings, each in one process and on every kind of node in turn."""
    for nodes, size, method in itertools.product(options.nodes, options.models, options.methods):
        tables = describe_run(method, options.rounds)
        tables["data"] = {**tables["data"], "n_clients": nodes}
        if size == "large":
            tables["model"] = {"name": "mlp", "hidden": [512, 512]}
        about = {"method": method, "nodes": nodes, "model": size}
        here = place / "-".join(map(str, about.values()))
        expected = simulate_run(tables, here / "process")
        own = seconds(here / "process")
        alone = {"first": round(own[0], 2), "median": round(statistics.median(own[1:-1]), 2)}
        load = round(os.getloadavg()[0], 1)
        keep(options.figures, [{**about, "kind": "in process", **alone, "load": load}], KEYS)
        for kind in options.kinds:
            quiet(f"{about} {kind}")
            found = timed(here, kind, tables, nodes)
            found["same_bits"] = found.pop("state") == expected
            line = {**about, "kind": kind, **found}
            print(json.dumps(line), flush=True)
            keep(options.figures, [line], KEYS)


def table(figures: Path) -> list[str]:
    """All lines as a table: a row for each setting, and columns for each kind of node."""
    found = {tuple(line[k] for k in KEYS): line for line in map(json.loads, figures.open())}
    kinds = [k for k in ("fast", "shared", "stock", "cold") if any(key[3] == k for key in found)]
    heads = ["method", "nodes", "model", "in one process", *kinds]
    said = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for setting in sorted({key[:3] for key in found}, key=lambda k: (k[1], k[2] != "small", k[0])):
        shown = [f"`{setting[0]}`", *setting[1:]]
        alone = found.get((*setting, "in process"))
        shown.append("" if alone is None else f"{alone['median']:g} s")
        for kind in kinds:
            line = found.get((*setting, kind))
            if line is None:
                shown.append("")
                continue
            cpu = line["cpu_a_round"]
            parts = "/".join(f"{cpu.get(role, 0):.1f}" for role in ("superlink", "server", "node"))
            bits = "" if line["same_bits"] else ", OTHER BITS"
            shown.append(f"{line['median']:g} s ({line['first']:g}), {parts}, {line['load']}{bits}")
        said.append("| " + " | ".join(map(str, shown)) + " |")
    return said


def counted(place: Path, rounds: int) -> dict[str, Any]:
    """The bytes of a run with models of 1.2 MB, by the proxy, by Flower and by the counter."""
    tables = {**describe_run("census", rounds), "model": {"name": "mlp", "hidden": [512, 512]}}
    folder = place / "bytes"
    write_app(folder, tables, 4, 120.0)
    local = Deployment(folder)
    try:
        for number in range(4):
            node_key(local.keys / "nodes" / f"client-{number}")
        local.up([], "run")
        proxy = Proxy(local.address["superlink"])
        for number in range(4):
            name = f"client-{number}"
            home, key = local.state / "nodes" / name, local.keys / "nodes" / name
            command = node_command(home, name, "run", proxy.address, local.certificate, key, ())
            local.book.start(f"node-{name}", command, environment(home / "flower"))
        time.sleep(40)
        before = proxy.total()
        time.sleep(30)
        idle = (proxy.total() - before) / 30
        start, began = dict(proxy.counts), time.monotonic()
        local.run({}, attempts=1, seconds=900.0, say=quiet)
        moved = {way: proxy.counts[way] - start[way] for way in start}
        lasted = time.monotonic() - began
        summary = RunFolder(local.out).summary()
        last = RunFolder(local.out).lines()[-1]
    finally:
        local.down()
    phases = summary["traffic"]
    counter = sum(amount for phase in phases.values() for amount in phase.values())
    return {
        "proxy": moved,
        "idle_per_second": round(idle),
        "proxy_less_idle": round(sum(moved.values()) - idle * lasted),
        "counter_all_phases": counter,
        "counter": phases,
        "blobs_until_last_round": last["wire"],
        "seconds": round(lasted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--parts", nargs="+", default=["rounds", "bytes"])
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["fast", "stock", "cold"],
        help="fast, shared (all clients in one process), database, stock, cold",
    )
    parser.add_argument("--methods", nargs="+", default=["clove", "ifca"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--models", nargs="+", default=["small", "large"])
    parser.add_argument("--figures", type=Path, default=FIGURES, help="file for the lines")
    parser.add_argument("--page", type=Path, help="write the table into this page, and run nothing")
    options = parser.parse_args()
    if options.page:
        fill(options.page, "times", table(options.figures))
        return
    with tempfile.TemporaryDirectory() as name:
        if "rounds" in options.parts:
            compare(Path(name), options)
            print("\n".join(table(options.figures)))
        if "bytes" in options.parts:
            print("bytes", json.dumps(counted(Path(name), 3)), flush=True)


if __name__ == "__main__":
    main()
