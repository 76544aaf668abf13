"""A whole federation on this machine: SuperLink, nodes, certificates and keys.

`coterie deploy up` writes a plan and starts a supervisor, which starts everything else and starts
again what ends (`deploy.supervisor`).
"""

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import ConfigError
from coterie.deploy.node import node_command
from coterie.deploy.processes import (
    Book,
    alive,
    environment,
    free_port,
    tool,
    wait_for_port,
)
from coterie.deploy.server import DELIVERED, locked
from coterie.engines.relay import private
from coterie.running.folder import RunFolder, read_json
from coterie.running.progress import list_sizes

CONNECTION = "deployment"
SUPERVISOR, SUPERLINK, SERVER = "supervisor", "superlink", "server"


class Role(NamedTuple):
    """A process of a deployment."""

    name: str
    command: list[str]
    env: dict[str, str]
    note: dict[str, Any]


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
        last = self.state / "last_run"  # the run folder that was used last
        self.out = Path(last.read_text()) if last.exists() else self.folder / "run"
        self.events_file = self.state / "events.jsonl"

    # starting

    def up(
        self,
        names: list[str],
        data: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        insecure: bool = False,
        allow: tuple[str, ...] = (),
        answers: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
        database: bool = False,
        stock: bool = False,
        per_node: int = 1,
        foreground: bool = False,
    ) -> dict[str, Any]:
        """Start a supervisor, which starts a SuperLink and nodes for all names.

        Parameters
        ----------
        data
            The data of the clients, as for a worker.
        host, port
            Where the SuperLink listens.
        insecure
            Use no TLS and no node keys.
        allow
            Packages whose code nodes may run.
        answers
            Tasks and questions that nodes answer, as for a worker.
        also
            Further names of this machine, for its certificate.
        database
            Keep the SuperLink's state in a file instead of in memory.
        stock
            Use Flower's own nodes.
        per_node
            Number of clients that share a process.
        foreground
            Supervise in this process, until it is told to end.
        """
        entries = {entry["role"]: entry for entry in self.book.read() if alive(entry)}
        if SUPERVISOR in entries:
            raise ConfigError(
                f"{self.folder} is already running. See: coterie deploy status {self.folder}"
            )
        if not entries:
            tool("flower-superlink")  # raises an error if Flower is not installed
            self.state.mkdir(exist_ok=True, mode=0o700)
            self.book.stop()  # removes processes that have ended
            plan = {
                "host": host,
                "port": port or free_port(_near(host)),
                "insecure": insecure,
                "allow": allow,
                "answers": answers,
                "database": database,
                "stock": stock,
                "data": data,
                "nodes": [names[i : i + per_node] for i in range(0, len(names), per_node)],
            }
            self._prepare(plan, also)
        if foreground:
            from coterie.deploy.supervisor import Supervisor

            Supervisor(self).run()
            return self.address
        command = [sys.executable, "-m", "coterie.deploy.supervisor", str(self.folder)]
        since = len(self.events())
        self.book.start(SUPERVISOR, command, environment(self.home))
        self._wait_until_ready(since)
        return self.address

    def _prepare(self, plan: dict[str, Any], also: tuple[str, ...]) -> None:
        """Write certificates, keys, addresses, and the plan for the supervisor."""
        from coterie.deploy.keys import certificates, node_key, secret
        from coterie.engines.flower_private import check_version, keep_token

        check_version()
        host, near = plan["host"], _near(plan["host"])
        for folder in (self.keys, self.home):
            folder.mkdir(exist_ok=True, mode=0o700)
        if not plan["insecure"] and not (self.keys / "server.crt").exists():
            hosts = dict.fromkeys([host, *also, "127.0.0.1", "localhost"])
            certificates(self.keys, [name for name in hosts if name != "0.0.0.0"])
        if not (self.keys / "superexec.secret").exists():
            secret(self.keys / "superexec.secret")
        if not (self.keys / "control.token").exists():
            private(self.keys / "control.token", secrets.token_hex(32).encode())
        self._write_address(near, plan["port"], plan["insecure"])
        keep_token(self.home, f"{near}:{plan['port']}", self.token)
        for name in [name for node in plan["nodes"] for name in node]:
            if not plan["insecure"] and not (self.keys / "nodes" / name).exists():
                node_key(self.keys / "nodes" / name)
        private(self.state / "plan.json", json.dumps(plan, indent=1).encode())
        self.events_file.unlink(missing_ok=True)

    def _write_address(self, host: str, port: int, insecure: bool) -> None:
        """Write the address at which `flwr` and nodes find the SuperLink."""
        lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
        lines.append(f'address = "{host}:{port}"')
        if insecure:
            lines.append("insecure = true")
        else:
            lines.append(f'root-certificates = "{self.keys / "ca.crt"}"')
        (self.home / "config.toml").write_text("\n".join(lines) + "\n")
        content = {"superlink": f"{host}:{port}", "insecure": insecure}
        (self.state / "address.json").write_text(json.dumps(content))

    def _wait_until_ready(self, since: int, seconds: float = 180.0) -> None:
        """Wait until the supervisor has started everything."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            new = self.events()[since:]
            if any(event["text"] == "ready" for event in new):
                return
            supervisor = [e for e in self.book.read() if e["role"] == SUPERVISOR and alive(e)]
            if not supervisor:
                break
            time.sleep(0.2)
        self.down()
        raise ConfigError(
            f"The deployment did not start. For the reason: coterie deploy logs {self.folder}"
        )

    @property
    def address(self) -> dict[str, Any]:
        """The address of the SuperLink, and whether it runs without TLS."""
        return read_json(self.state / "address.json")

    @property
    def token(self) -> str:
        """The token without which the SuperLink obeys no command."""
        return (self.keys / "control.token").read_text()

    @property
    def certificate(self) -> Path | None:
        """The certificate that nodes need; None without TLS."""
        return None if self.address["insecure"] else self.keys / "ca.crt"

    # what the supervisor starts

    def roles(self) -> list[Role]:
        """The processes in the plan, in the order in which they start."""
        plan = read_json(self.state / "plan.json")
        env = environment(self.home)
        shared = ["--superexec-auth-secret-file", str(self.keys / "superexec.secret")]
        link = [sys.executable, "-m", "coterie.deploy.superlink", str(self.keys / "control.token")]
        link += ["--host", plan["host"], "--port", str(plan["port"]), *shared]
        link += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        if plan["database"]:
            link += ["--database", str(self.state / "superlink.db")]
        # The executor is a separate process, so that the server app outlives a SuperLink that ends.
        runs = [tool("flower-superexec"), *shared]
        runs += ["--runtime-api-address", f"{_near(plan['host'])}:{plan['port']}"]
        if plan["insecure"]:
            link, runs = [*link, "--insecure"], [*runs, "--insecure"]
        else:
            link += ["--ssl-ca-certfile", str(self.keys / "ca.crt")]
            link += ["--ssl-certfile", str(self.keys / "server.crt")]
            link += ["--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth"]
            runs += ["--root-certificates", str(self.keys / "ca.crt")]
        listens = f"{plan['host']}:{plan['port']}"
        roles = [Role(SUPERLINK, link, env, {"listens": listens}), Role(SERVER, runs, env, {})]
        return roles + [self.node_role(names, plan) for names in plan["nodes"]]

    def node_role(self, names: list[str], plan: dict[str, Any]) -> Role:
        """The process of a node on this machine."""
        home, key = self.state / "nodes", self.keys / "nodes"
        if len(names) == 1:
            home, key = home / names[0], key / names[0]
        command = node_command(
            home,
            ",".join(names),
            plan["data"],
            self.address["superlink"],
            self.certificate,
            None if plan["insecure"] else key,
            tuple(plan["allow"]),
            tuple(plan.get("answers", ())),
            plan["stock"],
        )
        more = f"-and-{len(names) - 1}-more" if len(names) > 1 else ""
        env = {**environment(home / "flower"), "OMP_NUM_THREADS": "1"}
        return Role(f"node-{names[0]}{more}", command, env, {"clients": names})

    def register_keys(self) -> dict[str, str]:
        """Register the public keys of all nodes; return those that were refused, and why."""
        from coterie.engines.flower_private import Control

        known = [*self.keys.glob("nodes/*.pub"), *self.keys.glob("registered/*.pub")]
        if not known or self.address["insecure"]:
            return {}
        control = Control(self.address["superlink"], self.certificate, self.token)
        return control.register({path.stem: path for path in known})

    def register(self, name: str, public: Path) -> None:
        """Register the public key of a node on another machine under a name."""
        kept = self.keys / "registered" / f"{name}.pub"
        kept.parent.mkdir(exist_ok=True, mode=0o700)
        if public.resolve() != kept:
            shutil.copyfile(public, kept)
        refused = self.register_keys()
        if name in refused:
            kept.unlink()
            raise ConfigError(f"The key {public} could not be registered: {refused[name]}")

    def down(self) -> list[str]:
        """Stop all processes; return those that had to be killed."""
        return [*self.book.stop([SUPERVISOR], seconds=45.0), *self.book.stop()]

    def events(self) -> list[dict[str, Any]]:
        """What the supervisor noticed and did."""
        if not self.events_file.exists():
            return []
        return [json.loads(line) for line in self.events_file.read_text().splitlines()]

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
        end = time.monotonic() + 120.0
        while True:
            said = self.flwr(*words, *(["--run-config", pairs] if pairs else []))
            with contextlib.suppress(ValueError, KeyError):
                answer = json.loads(said.stdout[said.stdout.index("{") :])
                return str(answer["run-id"])
            # The supervisor may be starting the SuperLink again.
            if self.answers() or time.monotonic() >= end:
                raise ConfigError(
                    f"The run could not be started: {(said.stdout + said.stderr).strip()}"
                )
            time.sleep(1.0)

    def answers(self) -> bool:
        """Whether the SuperLink accepts connections."""
        host, _, port = self.address["superlink"].rpartition(":")
        return wait_for_port(host, int(port), 1.0)

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
        self.out = Path(config.get("out", self.folder / "run"))
        private(self.state / "last_run", str(self.out).encode())
        folder = RunFolder(self.out)
        told = before = len(folder.lines())
        noticed = len(self.events())
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
                events = self.events()
                for event in events[noticed:]:
                    say(f"{event['role']}: {event['text']}")
                noticed = len(events)
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
        parts.append("groups " + list_sizes(line["sizes"]))
    if "abandoned" in line:
        parts.append(f"abandoned: {line['abandoned']}")
    return "  ".join(parts)


def _near(host: str) -> str:
    """The address at which processes of this machine reach a host's SuperLink."""
    return "127.0.0.1" if host == "0.0.0.0" else host
