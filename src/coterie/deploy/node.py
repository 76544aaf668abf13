"""A node on a client's machine: its processes are started, kept alive and stopped together.

By default this is one process, which talks to the SuperLink itself (`deploy.fleet`). A stock node
has Flower's SuperNode and, beside it, a worker; it needs nothing that Flower keeps private.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.deploy.processes import Backoff, environment, free_port, tool

REFUSED = "Exit Code: 305"  # Flower's output for a node that may not connect


@dataclass
class Part:
    """A process that the node keeps running."""

    name: str
    command: list[str]
    env: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    backoff: Backoff = field(default_factory=lambda: Backoff((1.0, 2.0, 5.0)))
    refused: bool = False

    def look(self) -> None:
        """Start the process, or start it again if it has ended."""
        if self.process is None:
            if time.monotonic() >= self.backoff.due:
                self.process = subprocess.Popen(
                    self.command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                self.refused = False
                self.backoff.started()
                threading.Thread(target=self.listen, args=(self.process,), daemon=True).start()
                print(f"{self.name} started, process {self.process.pid}", flush=True)
            return
        code = self.process.poll()
        if code is None:
            return
        self.process = None
        pause = self.backoff.failed()
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
    answers: tuple[str, ...] = (),
    stock: bool = False,
) -> None:
    """Keep a node running until it is stopped.

    `name` may be several names, separated by commas, unless the node is a stock node.
    """
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stock:
        parts = _stock_parts(home, name, data, superlink, certificate, key, allow, answers)
    else:
        command = node_command(home, name, data, superlink, certificate, key, allow, answers)
        parts = [Part("node", [*command, "--with-parent"], environment(home / "flower"))]
    _keep(parts)


def node_command(
    home: Path,
    names: str,
    data: str,
    superlink: str,
    certificate: Path | None,
    key: Path | None,
    allow: tuple[str, ...],
    answers: tuple[str, ...] = (),
    stock: bool = False,
) -> list[str]:
    """The command that runs a node."""
    module = "coterie.deploy.node" if stock else "coterie.deploy.fleet"
    command = [sys.executable, "-m", module, str(home), names, data, superlink]
    command += [] if certificate is None else ["--certificate", str(certificate)]
    command += [] if key is None else ["--key", str(key)]
    return command + _repeat("--allow", allow) + _repeat("--answer", answers)


def _repeat(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _stock_parts(
    home: Path,
    name: str,
    data: str,
    superlink: str,
    certificate: Path | None,
    key: Path | None,
    allow: tuple[str, ...],
    answers: tuple[str, ...],
) -> list[Part]:
    """The processes of a stock node: worker, relays and Flower's SuperNode."""
    if any(letter in f"{name}{home}" for letter in "\"'\n=,"):
        raise SystemExit(
            f"The name and the folder must not contain quotes, commas or =. Got {name}, {home}."
        )
    env = environment(home / "flower")
    worker = [sys.executable, "-m", "coterie.deploy.worker", str(home), name, data]
    worker += _repeat("--allow", allow) + _repeat("--answer", answers)
    node = [tool("flower-supernode"), "--superlink", superlink]
    node += ["--host", "127.0.0.1", "--port", str(free_port())]
    node += ["--node-config", f'name="{name}" home="{home}"']
    node += ["--insecure"] if certificate is None else ["--root-certificates", str(certificate)]
    node += [] if key is None else ["--auth-supernode-private-key", str(key)]
    quick = {**env, "PATH": f"{home / 'bin'}{os.pathsep}{env['PATH']}"}
    relays = [sys.executable, "-m", "coterie.deploy.relays"]
    relays += [str(home / "bin"), tool("flwr-clientapp")]
    return [
        Part("worker", worker, {**env, "OMP_NUM_THREADS": "1"}),
        Part("relays", relays, env),
        Part("supernode", node, quick),
    ]


def _keep(parts: list[Part]) -> None:
    """Keep processes running until this process is told to end."""
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
    """Run a stock node: python -m coterie.deploy.node HOME NAME DATA SUPERLINK."""
    parser = argparse.ArgumentParser(prog="coterie.deploy.node")
    parser.add_argument("home", type=Path)
    parser.add_argument("name")
    parser.add_argument("data")
    parser.add_argument("superlink")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--answer", action="append", default=[])
    given: Any = parser.parse_args(arguments)
    run_node(
        given.home,
        given.name,
        given.data,
        given.superlink,
        certificate=given.certificate,
        key=given.key,
        allow=tuple(given.allow),
        answers=tuple(given.answer),
        stock=True,
    )


if __name__ == "__main__":
    main()
