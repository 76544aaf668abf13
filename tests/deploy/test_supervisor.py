"""The supervisor of a deployment, with ordinary processes in place of Flower's."""

import os
import signal
import sys
import time

import pytest

from coterie.deploy.local import Deployment, Role
from coterie.deploy.processes import Backoff, alive
from coterie.deploy.status import describe_status, read_status
from coterie.deploy.supervisor import Supervisor


@pytest.fixture
def local(tmp_path):
    """A deployment without Flower; its processes are stopped at the end."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "run.json").write_text('{"run": {"rounds": 3}}')
    (tmp_path / "state").mkdir()
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.book.stop(seconds=2.0)


def role(name, code="import time; time.sleep(60)"):
    return Role(name, [sys.executable, "-c", code], dict(os.environ), {})


def entry_of(local, name):
    return next(entry for entry in local.book.read() if entry["role"] == name)


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_killed_process_is_started_again_after_a_pause_and_it_is_said(local):
    supervisor, server = Supervisor(local), role("server")
    supervisor.backoffs["server"] = Backoff((0.2,))
    supervisor.look(server)
    first = entry_of(local, "server")
    supervisor.look(server)
    assert entry_of(local, "server") == first  # it is running
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: not alive(first))
    supervisor.look(server)
    assert entry_of(local, "server") == first  # too early
    time.sleep(0.25)
    supervisor.look(server)
    second = entry_of(local, "server")
    assert second["pid"] != first["pid"]
    assert alive(second)
    said = [event["text"] for event in local.events()]
    assert said[0] == "killed by signal 9; start again in 0.2 s"
    assert said[1] == f"started again, process {second['pid']}"


def test_another_supervisor_takes_running_processes_over(local):
    Supervisor(local).look(role("server"))
    first = entry_of(local, "server")
    Supervisor(local).look(role("server"))
    assert entry_of(local, "server") == first


def test_pauses_grow_with_every_failure_until_a_process_lasts():
    backoff = Backoff((1.0, 2.0, 5.0))
    backoff.started()
    assert [backoff.failed() for _ in range(4)] == [1.0, 2.0, 5.0, 5.0]
    backoff.since = time.monotonic() - 61
    assert backoff.failed() == 1.0


def test_status_tells_what_is_down_and_what_ended(local):
    supervisor, server = Supervisor(local), role("node-a", "raise SystemExit(3)")
    supervisor.look(server)
    entry = entry_of(local, "node-a")
    until(lambda: not alive(entry))
    supervisor.look(server)
    lines = describe_status(read_status(local))
    assert "DOWN" in lines[0]
    assert "ended once, last: ended with code 3; start again in 1 s" in lines[0]
    assert lines[-1] == "0 of 3 rounds done, no run is active"
