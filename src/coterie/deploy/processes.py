"""Processes that outlive a command: they are started, found and stopped by their process id."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Flower looks for work once a second; four times a second costs almost nothing.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}


def environment(flower_home: Path) -> dict[str, str]:
    """The environment of Flower's commands: tools of this Python first, and no telemetry.

    Modules in the current folder can be imported, for example a method of the user.
    """
    tools, here = str(Path(sys.executable).parent), str(Path.cwd())
    first = {"PATH": tools, "PYTHONPATH": here}
    paths = {
        name: os.pathsep.join(part for part in (place, os.environ.get(name)) if part)
        for name, place in first.items()
    }
    return {**os.environ, **OFFLINE, **paths, "FLWR_HOME": str(flower_home)}


def tool(name: str) -> str:
    """The path of a Flower command in the environment of this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        from coterie.core.errors import ConfigError  # loads torch, which a node does not need

        raise ConfigError(
            f"{name} is not installed. Install it with: pip install 'coterie[flower]'"
        )
    return str(path)


def free_port(host: str = "127.0.0.1") -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_port(host: str, port: int, seconds: float) -> bool:
    """Wait until a process listens on a port; False if the time is over first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return True
        time.sleep(0.2)
    return False


def start_time(pid: int) -> str | None:
    """Start time of a process, because ids are used again; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _alive_elsewhere(pid)
    state, *rest = text.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def _alive_elsewhere(pid: int) -> str | None:
    """The same on systems without /proc."""
    if sys.platform.startswith("linux"):
        return None
    said = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or None


class Backoff:
    """The time to wait before a process that ended is started again.

    It grows with every failure, and is short again after a minute without one.
    """

    def __init__(self, pauses: tuple[float, ...] = (1.0, 2.0, 5.0, 15.0, 30.0)) -> None:
        self.pauses, self.failures = pauses, 0
        self.due = self.since = 0.0  # when to start the process next, and when it was started

    def started(self) -> None:
        """Note that the process was started."""
        self.since = time.monotonic()

    def failed(self) -> float:
        """Note that the process ended; the seconds until it is started again."""
        self.failures = 1 if time.monotonic() - self.since > 60 else self.failures + 1
        pause = self.pauses[min(self.failures, len(self.pauses)) - 1]
        self.due = time.monotonic() + pause
        return pause


class Book:
    """The processes of a deployment, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "processes.json"

    def read(self) -> list[dict[str, Any]]:
        """All processes that were started and not yet stopped."""
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def start(
        self, role: str, command: list[str], env: dict[str, str], **note: Any
    ) -> dict[str, Any]:
        """Start a process in its own process group, with its output in a log file."""
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{role}.log"
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.add(role, process.pid, log=str(log), **note)

    def add(self, role: str, pid: int, **note: Any) -> dict[str, Any]:
        """Note a process; an earlier one with this role is replaced."""
        entry = {"role": role, "pid": pid, "started": start_time(pid), "at": time.time(), **note}
        entries = {e["role"]: e for e in self.read()}
        self._write([*(entries | {role: entry}).values()])  # it keeps its place
        return entry

    def stop(self, roles: list[str] | None = None, seconds: float = 20.0) -> list[str]:
        """Stop processes: first with a signal, then by killing their group; return those killed."""
        entries = self.read()
        chosen = [e for e in entries if roles is None or e["role"] in roles]
        for entry in reversed(chosen):
            if alive(entry):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry["pid"], signal.SIGTERM)
        end = time.monotonic() + seconds
        while any(map(alive, chosen)) and time.monotonic() < end:
            time.sleep(0.2)
            _reap(chosen)
        hard = []
        for entry in chosen:
            if alive(entry):
                hard.append(entry["role"])
            # Its child processes may still run; their group has its id. If another process has this
            # id now, nothing is done.
            if start_time(entry["pid"]) not in (None, entry["started"]):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(entry["pid"], signal.SIGKILL)
        _reap(chosen)
        self._write([e for e in entries if e not in chosen])
        return hard

    def _write(self, entries: list[dict[str, Any]]) -> None:
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(entries, indent=2) + "\n")
        os.replace(aside, self.path)


def alive(entry: dict[str, Any]) -> bool:
    """Whether the process that was started is still running."""
    return start_time(entry["pid"]) == entry["started"] is not None


def why_ended(entry: dict[str, Any]) -> str:
    """How a process ended, if it was a child of this process."""
    end = time.monotonic() + 2.0
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            pid, status = os.waitpid(entry["pid"], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            time.sleep(0.02)  # its other threads are still ending
    return "ended"


def _reap(entries: list[dict[str, Any]]) -> None:
    """Collect the exit codes of ended child processes of this process."""
    for entry in entries:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(entry["pid"], os.WNOHANG)
