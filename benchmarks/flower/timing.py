"""The time of a round of `census` on four clients: cold, warm and in one process; and its traffic.

Cold: a client app without a worker, which loads torch and the data for every message. Warm: with
the worker of each node. Bytes are counted by a proxy between the nodes and the SuperLink, and
compared with the counter of the run and with the data passed to Flower. The bytes that idle nodes
send are measured first and subtracted.
"""

import argparse
import json
import selectors
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import describe_run, federation, note, quiet, simulate_run

from coterie.deploy.app import write_app
from coterie.deploy.local import Deployment
from coterie.running.folder import RunFolder

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


def timed(place: Path, kind: str, rounds: int) -> dict[str, Any]:
    """Run warm or cold; the seconds of every round, and the median without first and last."""
    tables = describe_run("census", rounds)
    with federation(place / kind, tables, deadline=120.0) as local:
        if kind == "cold":
            (local.folder / "app" / "client_app.py").write_text(COLD)
            time.sleep(15)  # the quick command is there once its process has loaded Flower
            for shim in local.state.glob("nodes/*/bin/flwr-clientapp"):
                shim.unlink()
        whole = local.run({}, attempts=1, seconds=1500.0, say=quiet)
        found = seconds(local.out)
    # The first round waits for all to be loaded; the last has an exam of its own.
    return {"finished": whole, "seconds": found, "median": statistics.median(found[1:-1])}


def counted(place: Path, rounds: int) -> dict[str, Any]:
    """The bytes of a run with models of 1.2 MB, by the proxy, by Flower and by the counter."""
    tables = {**describe_run("census", rounds), "model": {"name": "mlp", "hidden": [512, 512]}}
    folder = place / "bytes"
    write_app(folder, tables, 4, 120.0)
    local = Deployment(folder)
    try:
        local.start_server(host="127.0.0.1", port=None, insecure=False)
        direct = (local.state / "address.json").read_text()
        proxy = Proxy(json.loads(direct)["superlink"])
        through = {"superlink": proxy.address, "insecure": False}
        (local.state / "address.json").write_text(json.dumps(through))
        for number in range(4):
            local.start_node(f"client-{number}", "run")
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
        local.book.stop()
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
    parser.add_argument("--parts", nargs="+", default=["process", "warm", "cold", "bytes"])
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for part in options.parts:
            if part == "process":
                simulate_run(describe_run("census", options.rounds), place / "process")
                figures[part] = {"seconds": seconds(place / "process")}
            elif part == "bytes":
                figures[part] = counted(place, 3)
            else:
                figures[part] = timed(place, part, options.rounds)
            print(part, json.dumps(figures[part]), flush=True)
            note(options.json, figures)


if __name__ == "__main__":
    main()
