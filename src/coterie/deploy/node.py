"""A node: a SuperNode and its worker, which are started, kept alive and stopped together."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.deploy.processes import environment, free_port, tool

REFUSED = "Exit Code: 305"  # Flower's output for a node that may not connect
PATIENCE = (1.0, 2.0, 5.0)  # seconds before a process that ended is started again


@dataclass
class Part:
    """A process that the node keeps running."""

    name: str
    command: list[str]
    env: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    failures: int = 0
    due: float = 0.0
    since: float = 0.0
    refused: bool = False

    def look(self) -> None:
        """Start the process, or start it again if it has ended."""
        if self.process is None:
            if time.monotonic() >= self.due:
                self.process = subprocess.Popen(
                    self.command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                self.since, self.refused = time.monotonic(), False
                threading.Thread(target=self.listen, args=(self.process,), daemon=True).start()
                print(f"{self.name} started, process {self.process.pid}", flush=True)
            return
        code = self.process.poll()
        if code is None:
            return
        self.process = None
        self.failures = 0 if time.monotonic() - self.since > 60 else self.failures + 1
        pause = PATIENCE[min(self.failures, len(PATIENCE) - 1)]
        self.due = time.monotonic() + pause
        why = f"ended with code {code}"
        if self.refused:
            why = (
                "was refused: its key is not registered, or the SuperLink has not yet noticed that "
                "the previous connection has ended (this takes up to a minute)"
            )
        print(f"{self.name} {why}; next start in {pause:g} s", flush=True)

    def listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Print the output of the process."""
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace")
            self.refused = self.refused or REFUSED in text
            print(text, end="", flush=True)


def run_node(
    home: Path,
    name: str,
    data: str,
    superlink: str,
    *,
    certificate: Path | None,
    key: Path | None,
    allow: tuple[str, ...] = (),
) -> None:
    """Keep a node running until it is stopped."""
    home = home.resolve()
    if any(letter in f"{name}{home}" for letter in "\"'\n="):
        raise SystemExit(
            f"The name and the folder must not contain quotes or =. Got {name}, {home}."
        )
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    env = environment(home / "flower")
    worker = [sys.executable, "-m", "coterie.deploy.worker", str(home), name, data]
    worker += [word for package in allow for word in ("--allow", package)]
    node = [tool("flower-supernode"), "--superlink", superlink]
    node += ["--host", "127.0.0.1", "--port", str(free_port())]
    node += ["--node-config", f'name="{name}" home="{home}"']
    node += ["--insecure"] if certificate is None else ["--root-certificates", str(certificate)]
    node += [] if key is None else ["--auth-supernode-private-key", str(key)]
    quick = {**env, "PATH": f"{home / 'bin'}{os.pathsep}{env['PATH']}"}
    relays = [sys.executable, "-m", "coterie.deploy.relays"]
    relays += [str(home / "bin"), tool("flwr-clientapp")]
    parts = [
        Part("worker", worker, {**env, "OMP_NUM_THREADS": "1"}),
        Part("relays", relays, env),
        Part("supernode", node, quick),
    ]
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    while not stopping:
        for part in parts:
            part.look()
        time.sleep(0.2)
    for part in reversed(parts):
        if part.process is not None:
            part.process.terminate()
    end = time.monotonic() + 10.0
    for part in parts:
        if part.process is None:
            continue
        try:
            part.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.process.kill()
            part.process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Run a node: python -m coterie.deploy.node HOME NAME DATA SUPERLINK."""
    parser = argparse.ArgumentParser(prog="coterie.deploy.node")
    parser.add_argument("home", type=Path)
    parser.add_argument("name")
    parser.add_argument("data")
    parser.add_argument("superlink")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--allow", action="append", default=[])
    given: Any = parser.parse_args(arguments)
    run_node(
        given.home,
        given.name,
        given.data,
        given.superlink,
        certificate=given.certificate,
        key=given.key,
        allow=tuple(given.allow),
    )


if __name__ == "__main__":
    main()
