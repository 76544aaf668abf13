"""A whole federation on this machine, for trials: SuperLink, nodes, certificates and keys."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.deploy.processes import (
    Book,
    alive,
    environment,
    free_port,
    tool,
    wait_for_port,
)
from coterie.deploy.server import DELIVERED, locked
from coterie.running.folder import RunFolder, read_json

CONNECTION = "deployment"


class Deployment:
    """A folder written by `coterie deploy init`, and its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not (self.folder / "app" / "run.json").exists():
            raise ConfigError(
                f"The folder must have a deployment. {folder} has none. Create one with: coterie "
                f"deploy init {folder}"
            )
        self.state = self.folder / "state"
        self.book = Book(self.state)
        self.keys = self.state / "keys"
        self.home = self.state / "flower"
        self.out = self.folder / "run"  # the run folder
        self.also: list[str] = []  # additional names of this machine for the certificate

    # starting

    def up(
        self,
        names: list[str],
        data: str,
        *,
        host: str,
        port: int | None,
        insecure: bool,
        allow: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Start a SuperLink and a node for each name; `allow`: packages whose code nodes run."""
        if any(map(alive, self.book.read())):
            raise ConfigError(
                f"{self.folder} is already running. See: coterie deploy status {self.folder}"
            )
        self.state.mkdir(exist_ok=True, mode=0o700)
        self.book.stop()  # removes processes that have ended
        self.start_server(host=host, port=port, insecure=insecure)
        for name in names:
            self.start_node(name, data, allow)
        return self.address

    def start_server(self, *, host: str, port: int | None, insecure: bool) -> None:
        """Start the SuperLink and, as a separate process, the executor of the server app.

        As a separate process, the server app survives a restart of the SuperLink.
        """
        tool("flower-superlink")  # raises an error if Flower is not installed
        from coterie.deploy.keys import certificates, secret

        port = port or free_port("127.0.0.1" if host == "0.0.0.0" else host)
        self.state.mkdir(exist_ok=True, mode=0o700)
        self.keys.mkdir(exist_ok=True, mode=0o700)
        if not insecure and not (self.keys / "server.crt").exists():
            names = dict.fromkeys([host, *self.also, "127.0.0.1", "localhost"])
            certificates(self.keys, [name for name in names if name != "0.0.0.0"])
        if not (self.keys / "superexec.secret").exists():
            secret(self.keys / "superexec.secret")
        near = "127.0.0.1" if host == "0.0.0.0" else host
        self._address(near, port, insecure)
        env = environment(self.home)
        shared = ["--superexec-auth-secret-file", str(self.keys / "superexec.secret")]
        link = [tool("flower-superlink"), "--host", host, "--port", str(port), *shared]
        link += ["--database", str(self.state / "superlink.db"), "--isolation", "process"]
        link += ["--disable-runtime-dependency-installation"]
        runs = [tool("flower-superexec"), "--runtime-api-address", f"{near}:{port}", *shared]
        if insecure:
            link += ["--insecure"]
            runs += ["--insecure"]
        else:
            link += ["--ssl-ca-certfile", str(self.keys / "ca.crt")]
            link += ["--ssl-certfile", str(self.keys / "server.crt")]
            link += ["--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth"]
            runs += ["--root-certificates", str(self.keys / "ca.crt")]
        self.book.start("superlink", link, env, listens=f"{host}:{port}")
        if not wait_for_port(near, port, 90.0):
            self.book.stop()
            raise ConfigError(f"The SuperLink did not start. See {self.state}/logs/superlink.log")
        self.book.start("server", runs, env)

    def _address(self, host: str, port: int, insecure: bool) -> None:
        """Write the address at which `flwr` and nodes find the SuperLink."""
        self.home.mkdir(parents=True, exist_ok=True)
        lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
        lines.append(f'address = "{host}:{port}"')
        if insecure:
            lines.append("insecure = true")
        else:
            lines.append(f'root-certificates = "{self.keys / "ca.crt"}"')
        (self.home / "config.toml").write_text("\n".join(lines) + "\n")
        content = {"superlink": f"{host}:{port}", "insecure": insecure}
        (self.state / "address.json").write_text(json.dumps(content))

    @property
    def address(self) -> dict[str, Any]:
        """The address of the SuperLink, and whether it runs without TLS."""
        return read_json(self.state / "address.json")

    def register(self, name: str, public: Path) -> None:
        """Register the public key of a node under a name."""
        said = self.flwr("supernode", "register", str(public), CONNECTION, "--name", name)
        if said.returncode and "already" not in said.stdout + said.stderr:
            raise ConfigError(
                f"The key {public} could not be registered: {(said.stdout + said.stderr).strip()}"
            )

    def start_node(self, name: str, data: str, allow: tuple[str, ...] = ()) -> None:
        """Start a node on this machine, with its own key."""
        from coterie.deploy.keys import node_key

        home, address = self.state / "nodes" / name, self.address
        command = [sys.executable, "-m", "coterie.deploy.node", str(home), name, data]
        command.append(address["superlink"])
        command += [word for package in allow for word in ("--allow", package)]
        if not address["insecure"]:
            key = self.keys / "nodes" / name
            if not key.exists():
                self.register(name, node_key(key))
            command += ["--certificate", str(self.keys / "ca.crt"), "--key", str(key)]
        self.book.start(f"node-{name}", command, environment(home / "flower"), client=name)

    # running

    def flwr(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a Flower command on this deployment."""
        return subprocess.run(
            [tool("flwr"), *words],
            env=environment(self.home),
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def submit(self, config: dict[str, Any]) -> str:
        """Start the server app; return Flower's number of the run."""
        words = ["run", str(self.folder), CONNECTION, "--format", "json"]
        pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        said = self.flwr(*words, *(["--run-config", pairs] if pairs else []))
        try:
            answer = json.loads(said.stdout[said.stdout.index("{") :])
            return str(answer["run-id"])
        except (ValueError, KeyError):
            raise ConfigError(
                f"The run could not be started: {(said.stdout + said.stderr).strip()}"
            ) from None

    def flower_status(self, run: str) -> str:
        """Flower's status of a run: pending, starting, running, finished:completed, ..."""
        said = self.flwr("ls", CONNECTION, "--run-id", run, "--format", "json")
        try:
            answer = json.loads(said.stdout[said.stdout.index("{") :])
            return str(answer["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            return "unknown"

    def run(
        self, config: dict[str, Any], *, attempts: int, seconds: float, say: Callable[[str], None]
    ) -> bool:
        """Run until the end, and start the server app again if it dies."""
        end = time.monotonic() + seconds
        self.out = Path(config.get("out", self.out))
        folder = RunFolder(self.out)
        told = before = len(folder.lines())
        for attempt in range(attempts):
            began = time.time()
            number = self.submit(config)
            say(f"Flower run {number}" + (f", start {attempt + 1}" if attempt else ""))
            seen, asked, dead = False, time.monotonic(), False
            while not dead and not self._has_delivered(began):
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"The run must end within {seconds:.0f} s. It has not. Allow more seconds."
                    )
                time.sleep(0.5)
                lines = folder.lines()
                for line in lines[told:]:
                    say(_format_line(line))
                told = len(lines)
                # A server has the lock of its run folder, and loses it when it dies.
                busy = locked(self.out)
                dead = seen and not busy and not self._has_delivered(began)
                seen = seen or busy
                if not seen and time.monotonic() - asked >= 30.0:
                    asked = time.monotonic()
                    dead = self.flower_status(number).startswith("finished")
            if not dead:
                return True
            say(f"The server app ended too early. See its log: coterie deploy logs {self.folder}")
            if attempt and told == before:
                return False  # no third start after two starts without a round
            before = told
        return False

    def _has_delivered(self, since: float) -> bool:
        """Whether a server has finished since a point in time."""
        path = self.out / DELIVERED
        return path.exists() and path.stat().st_mtime >= since

    # looking

    def status(self) -> list[dict[str, Any]]:
        """The processes, and whether they are alive."""
        return [{**entry, "alive": alive(entry)} for entry in self.book.read()]

    def node_home(self, client: str) -> Path:
        """The folder of a client's node."""
        return self.state / "nodes" / client


def _format_line(line: dict[str, Any]) -> str:
    parts = [f"round {line['round']}"]
    if "loss" in line and line["loss"] is not None:
        parts.append(f"loss after round {line['evaluated']}: {line['loss']:.4f}")
    if "accuracy" in line:
        parts.append(f"accuracy {line['accuracy']:.1%}")
    if "sizes" in line:
        parts.append("groups " + "/".join(map(str, line["sizes"])))
    if "abandoned" in line:
        parts.append(f"abandoned: {line['abandoned']}")
    return "  ".join(parts)
