"""The supervisor of a deployment: it starts every process of the plan, and starts it again.

A process that ends is started again, after a pause that grows with every failure. What happened is
written to `state/events.jsonl`, and `coterie deploy run` and `coterie deploy status` show it. The
processes survive a supervisor that is killed; the next one takes them over.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.deploy.local import SUPERLINK, SUPERVISOR, Deployment, Role
from coterie.deploy.processes import Backoff, alive, wait_for_port, why_ended


class Supervisor:
    """Keeps the processes of a deployment running."""

    def __init__(self, local: Deployment) -> None:
        self.local, self.book = local, local.book
        self.backoffs: dict[str, Backoff] = {}
        self.ended: set[str] = set()  # processes that ended and are not started again yet
        self.stopping = False

    def run(self) -> None:
        """Start everything, and watch it until this process is told to end."""
        os.umask(0o077)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self.book.add(SUPERVISOR, os.getpid(), log=str(self.local.state / "logs/supervisor.log"))
        roles = self.local.roles()
        for role in roles:
            self.look(role)
        self._say(SUPERVISOR, "ready", "ready")
        while not self.stopping:
            time.sleep(0.5)
            for role in roles:
                self.look(role)
        others = [e["role"] for e in self.book.read() if e["role"] != SUPERVISOR]
        self.book.stop(others)
        self._say(SUPERVISOR, "ended", "stopped everything")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def look(self, role: Role) -> None:
        """Start a process that is not running, unless it is too early."""
        entry = next((e for e in self.book.read() if e["role"] == role.name), None)
        if self.stopping or (entry is not None and alive(entry)):
            return
        backoff = self.backoffs.setdefault(role.name, Backoff())
        if entry is not None and role.name not in self.ended:
            self.ended.add(role.name)
            why, pause = why_ended(entry), backoff.failed()
            if role.name.startswith("node-"):  # the parts of a stock node
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(entry["pid"], signal.SIGKILL)
            self._say(role.name, "ended", f"{why}; start again in {pause:g} s")
        if time.monotonic() < backoff.due:
            return
        begun = self.book.start(role.name, role.command, role.env, **role.note)
        backoff.started()
        if role.name == SUPERLINK:
            self._open(begun)
        if role.name in self.ended:
            self.ended.discard(role.name)
            self._say(role.name, "started", f"started again, process {begun['pid']}")

    def _open(self, superlink: dict[str, Any]) -> None:
        """Wait for the SuperLink, and tell it which nodes may connect."""
        host, _, port = self.local.address["superlink"].rpartition(":")
        end = time.monotonic() + 90.0
        while not wait_for_port(host, int(port), 1.0):
            if not alive(superlink):
                return  # seen again, and said, in half a second
            if self.stopping or time.monotonic() >= end:
                self._say(SUPERLINK, "failed", f"does not listen on port {port}")
                return
        for name, why in self.local.register_keys().items():
            self._say(SUPERLINK, "failed", f"did not register the key of '{name}': {why}")

    def _say(self, role: str, kind: str, text: str) -> None:
        print(f"{time.strftime('%F %T')} {role}: {text}", flush=True)
        line: dict[str, Any] = {"time": time.time(), "role": role, "kind": kind, "text": text}
        with open(self.local.events_file, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Run it: python -m coterie.deploy.supervisor FOLDER."""
    Supervisor(Deployment(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
