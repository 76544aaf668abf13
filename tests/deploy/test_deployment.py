"""One real federation, as the documentation starts it: SuperLink, two nodes, TLS, node keys."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import newcomer
from coterie.running.build import build
from coterie.running.loop import run as simulate
from small_runs import coterie, described, toml

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'coterie[flower]'")

from coterie.deploy.keys import node_key
from coterie.deploy.local import Deployment
from coterie.deploy.processes import environment, free_port, start_time, tool

HERE = Path(newcomer.__file__).parent


def tables():
    """A user's own method on two clients for two rounds, through bytes in the simulation."""
    return described(
        "newcomer:Newcomer",
        2,
        data={"n_groups": 2, "clients_per_group": 1, "n": 40, "test": 10},
        run={"participation": 1.0, "engine": "wire"},
    )


def listening(pids: set[int]) -> set[str]:
    """Addresses on which processes listen for anybody on the network."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
            except OSError:
                continue
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] in ("0A", "07"):
                family = socket.AF_INET6 if name.endswith("6") else socket.AF_INET
                words = re.findall("." * 8, fields[1].split(":")[0])
                raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                found.add(socket.inet_ntop(family, raw))
    return found


def family(pids: set[int]) -> set[int]:
    """Processes and all that descend from them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids = pids | more
    return pids


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_federation(tmp_path):
    # One test, because starting a federation takes half a minute and tests may run side by side.
    (tmp_path / "study.toml").write_text(toml(tables()))
    trial = tmp_path / "trial"
    said = coterie("deploy", "init", trial, tmp_path / "study.toml", cwd=HERE)
    assert said.returncode == 0, said.stderr
    try:
        said = coterie("deploy", "up", trial, "--clients", 2, "--allow", "newcomer", cwd=HERE)
        assert said.returncode == 0, said.stderr
        said = coterie("deploy", "run", trial, "--seconds", 400, "--config", "wait=200")
        logs = coterie("deploy", "logs", trial, "--lines", 60).stdout
        assert said.returncode == 0, said.stdout + said.stderr + logs
        it_gives_the_bits_of_the_simulation(trial, tmp_path)
        everything_listens_on_this_machine_alone(trial)
        keys_are_for_their_owner_alone(trial)
        a_node_with_an_unknown_key_is_refused(trial, tmp_path)
        a_client_fetches_its_model_and_predicts_with_it(trial, tmp_path)
        down_ends_every_process(trial)
    finally:
        coterie("deploy", "down", trial)


def it_gives_the_bits_of_the_simulation(deployment, tmp_path):
    ready = build(tables())
    simulate(ready.algorithm, ready.data, ready.settings, tmp_path / "simulated")
    name = "final/state.safetensors"
    assert (deployment / "run" / name).read_bytes() == (tmp_path / "simulated" / name).read_bytes()
    rounds = [json.loads(line) for line in (deployment / "run" / "rounds.jsonl").open()]
    assert [line["round"] for line in rounds] == [1, 2]
    assert "accuracy" in rounds[1]


def everything_listens_on_this_machine_alone(deployment):
    book = Deployment(deployment).book.read()
    addresses = listening(family({entry["pid"] for entry in book}))
    assert addresses == {"127.0.0.1"}
    for socket_file in Path("/tmp").glob("coterie-*/*.sock"):
        if socket_file.owner() == Path.home().owner():
            assert stat.S_IMODE(socket_file.stat().st_mode) & 0o077 == 0


def keys_are_for_their_owner_alone(deployment):
    keys = [p for p in (deployment / "state" / "keys").rglob("*") if p.is_file()]
    private = [p for p in keys if p.suffix not in (".crt", ".pub")]
    assert len(private) >= 5  # ca, server, the SuperExec's secret, two nodes
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in private)
    for name in ("client-0", "client-1"):
        key = deployment / "state" / "nodes" / name / "worker.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def a_node_with_an_unknown_key_is_refused(deployment, tmp_path):
    node_key(tmp_path / "stranger")
    local = Deployment(deployment)
    command = [
        tool("flower-supernode"),
        *("--superlink", local.address["superlink"]),
        *("--root-certificates", str(local.keys / "ca.crt")),
        *("--auth-supernode-private-key", str(tmp_path / "stranger")),
        *("--host", "127.0.0.1", "--port", str(free_port())),
    ]
    log = tmp_path / "stranger.log"
    with open(log, "wb") as file:
        env = environment(tmp_path / "flower")
        said = subprocess.run(command, env=env, stdout=file, stderr=file, timeout=90, check=False)
    assert said.returncode == 1
    assert "Exit Code: 305" in log.read_text()


def a_client_fetches_its_model_and_predicts_with_it(deployment, tmp_path):
    out = tmp_path / "mine"
    said = coterie("deploy", "pull", deployment, "--client", "client-1", "--out", out)
    assert said.returncode == 0, said.stderr
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 2), dtype=np.float32))
    said = coterie("predict", out, "--data", tmp_path / "new.npz", cwd=HERE)
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.splitlines()) == 4  # a heading and three predictions


def down_ends_every_process(deployment):
    local = Deployment(deployment)
    status = json.loads(coterie("deploy", "status", deployment, "--json").stdout)
    assert status["finished"]
    assert all(entry["alive"] for entry in status["processes"])
    pids = family({entry["pid"] for entry in local.book.read()})
    said = coterie("deploy", "down", deployment)
    assert said.returncode == 0, said.stderr
    end = time.monotonic() + 10
    while any(start_time(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.2)
    assert not [pid for pid in pids if start_time(pid)]
