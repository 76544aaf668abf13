"""Real federations, as the documentation starts them: SuperLink, two nodes, TLS, node keys."""

import json
import os
import re
import signal
import socket
import ssl
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

import httpx

from coterie.deploy.keys import node_key
from coterie.deploy.local import Deployment
from coterie.deploy.node import node_command
from coterie.deploy.processes import environment, free_port, start_time, tool
from coterie.deploy.status import read_status

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
    trial = started(tmp_path)
    try:
        trained(trial)
        it_gives_the_bits_of_the_simulation(trial, tmp_path)
        everything_listens_on_this_machine_alone(trial)
        keys_and_runs_are_for_their_owner_alone(trial)
        a_node_with_an_unknown_key_is_refused(trial, tmp_path)
        a_stranger_cannot_give_commands(trial, tmp_path)
        a_stranger_is_refused_at_every_path(trial)
        an_app_of_a_stranger_runs_no_code_on_a_node(trial, tmp_path)
        what_is_killed_is_started_again(trial)
        a_client_fetches_its_model_and_predicts_with_it(trial, tmp_path)
        down_ends_every_process(trial)
    finally:
        coterie("deploy", "down", trial)


@pytest.mark.slow
def test_a_federation_of_stock_nodes_with_a_database(tmp_path):
    trial = started(tmp_path, "--stock", "--database")
    try:
        trained(trial)
        it_gives_the_bits_of_the_simulation(trial, tmp_path)
        assert (trial / "state" / "superlink.db").exists()
        for name in ("client-0", "client-1"):
            key = trial / "state" / "nodes" / name / "worker.key"
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
        a_stock_node_with_an_unknown_key_is_refused(trial, tmp_path)
        down_ends_every_process(trial)
    finally:
        coterie("deploy", "down", trial)


@pytest.mark.slow
def test_clients_can_share_a_node(tmp_path):
    trial = started(tmp_path, "--per-node", 2)
    try:
        trained(trial)
        it_gives_the_bits_of_the_simulation(trial, tmp_path)
        status = json.loads(coterie("deploy", "status", trial, "--json").stdout)
        (node,) = [entry for entry in status["processes"] if "clients" in entry]
        assert set(node["seen"]) == {"client-0", "client-1"}
        assert all(seen["seconds_ago"] < 60 for seen in node["seen"].values())
        for name in ("client-0", "client-1"):
            assert list((trial / "state" / "nodes" / name).glob("runs/*/memory"))
    finally:
        coterie("deploy", "down", trial)


def started(tmp_path, *options):
    (tmp_path / "study.toml").write_text(toml(tables()))
    trial = tmp_path / "trial"
    words = [trial, tmp_path / "study.toml", "--trust", "newcomer:Newcomer"]
    said = coterie("deploy", "init", *words, cwd=HERE)
    assert said.returncode == 0, said.stderr
    said = coterie("deploy", "up", trial, "--clients", 2, "--allow", "newcomer", *options, cwd=HERE)
    assert said.returncode == 0, said.stdout + said.stderr
    return trial


def trained(trial):
    said = coterie("deploy", "run", trial, "--seconds", 400, "--config", "wait=200")
    logs = coterie("deploy", "logs", trial, "--lines", 60).stdout
    assert said.returncode == 0, said.stdout + said.stderr + logs


def it_gives_the_bits_of_the_simulation(deployment, tmp_path):
    ready = build(tables(), trust=["newcomer:Newcomer"])
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


def keys_and_runs_are_for_their_owner_alone(deployment):
    keys = [p for p in (deployment / "state" / "keys").rglob("*") if p.is_file()]
    private = [p for p in keys if p.suffix not in (".crt", ".pub")]
    assert len(private) >= 6  # ca, server, the SuperExec's secret, the token, two nodes
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in private)
    for path in (deployment, deployment / "run", *(deployment / "run").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def a_node_with_an_unknown_key_is_refused(deployment, tmp_path):
    node_key(tmp_path / "stranger")
    local, home, log = Deployment(deployment), tmp_path / "stranger-node", tmp_path / "stranger.log"
    address = (local.address["superlink"], local.certificate, tmp_path / "stranger", ())
    with open(log, "wb") as file:
        process = subprocess.Popen(
            node_command(home, "client-0", "run", *address),
            env=environment(home / "flower"),
            stdout=file,
            stderr=file,
        )
    try:
        end = time.monotonic() + 90
        while "refused by the SuperLink" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.2)
        assert "refused by the SuperLink" in log.read_text()
        assert "connected" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def a_stock_node_with_an_unknown_key_is_refused(deployment, tmp_path):
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
        said = subprocess.run(command, env=env, stdout=file, stderr=file, timeout=300, check=False)
    assert said.returncode == 1
    assert "Exit Code: 305" in log.read_text()


def a_stranger_cannot_give_commands(deployment, tmp_path):
    local, home = Deployment(deployment), tmp_path / "strange"
    home.mkdir()
    (home / "config.toml").write_text((local.home / "config.toml").read_text())
    assert not (home / "credentials.yaml").exists()
    for words in (["ls"], ["run", str(deployment)], ["supernode", "list"]):
        command = [tool("flwr"), words[0], *words[1:], "deployment"]
        said = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, check=False
        )
        assert said.returncode != 0, said.stdout
    assert local.flwr("ls", "deployment").returncode == 0  # the owner can


def a_stranger_is_refused_at_every_path(deployment):
    local = Deployment(deployment)
    context = ssl.create_default_context(cafile=str(local.certificate))
    address, answers = f"https://{local.address['superlink']}", {}
    with httpx.Client(verify=context, base_url=address) as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for method, about in methods.items():
                kinds = about.get("requestBody", {}).get("content", {"application/json": {}})
                headers = {"content-type": next(iter(kinds))}
                answers[path] = client.request(method, path, headers=headers).status_code
    rooms = {path.split("/")[2] for path in answers if path.startswith("/v1/")}
    assert rooms == {"control", "fleet", "runtime"}
    assert {path for path, code in answers.items() if code != 401} == {
        "/health",
        "/v1/control/get-login-details",  # says that there is no login
        "/v1/control/get-auth-tokens",  # likewise
    }


SERVER = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    out = [Message(RecordDict(), n, kind, ttl=30) for n in nodes for kind in ("train", "query")]
    waiting, found, end = set(grid.push_messages(out)), [], time.time() + 30
    while waiting and time.time() < end:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            found.append(reply.error.reason if reply.has_error() else "answered")
        time.sleep(0.2)
    Path("FOLDER/heard.part").write_text(json.dumps([len(nodes), found]))
    Path("FOLDER/heard.part").rename("FOLDER/heard.json")
"""
CLIENT = """
import os
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

open(f"FOLDER/ran-{os.getpid()}", "w").close()
app = ClientApp()

@app.train()
@app.query()
def work(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def an_app_of_a_stranger_runs_no_code_on_a_node(deployment, tmp_path):
    # The token of the owner is used, as if it had been stolen.
    folder, local = tmp_path / "strange-app", Deployment(deployment)
    (folder / "app").mkdir(parents=True)
    text = (deployment / "pyproject.toml").read_text().replace('name = "coterie', 'name = "strange')
    (folder / "pyproject.toml").write_text(text)
    (folder / "app" / "__init__.py").write_text("")
    (folder / "app" / "data.json").write_text("{}")  # the patterns of the app must match
    (folder / "app" / "server_app.py").write_text(SERVER.replace("FOLDER", str(folder)))
    (folder / "app" / "client_app.py").write_text(CLIENT.replace("FOLDER", str(folder)))
    said = local.flwr("run", str(folder), "deployment")
    assert said.returncode == 0, said.stdout + said.stderr
    end = time.monotonic() + 90
    while not (folder / "heard.json").exists() and time.monotonic() < end:
        time.sleep(0.3)
    nodes, found = json.loads((folder / "heard.json").read_text())
    assert nodes == 2
    assert len(found) == 4
    assert all("runs no apps" in reason for reason in found)
    assert not list(folder.glob("ran-*"))


def what_is_killed_is_started_again(deployment):
    local = Deployment(deployment)
    before = {entry["role"]: entry["pid"] for entry in local.book.read()}
    for role in ("superlink", "node-client-0"):
        os.kill(before[role], signal.SIGKILL)
    end = time.monotonic() + 90
    while time.monotonic() < end:
        time.sleep(0.5)
        status = read_status(local)
        now = {entry["role"]: entry for entry in status["processes"]}
        online = {node["name"] for node in status["nodes"] if node["status"] == "online"}
        if now["superlink"].get("answers") and online == {"client-0", "client-1"}:
            break
    for role in ("superlink", "node-client-0"):
        assert now[role]["alive"]
        assert now[role]["pid"] != before[role]
        assert now[role]["restarts"] == 1
        assert "killed by signal 9" in now[role]["last_end"]
    assert now["node-client-1"]["pid"] == before["node-client-1"]  # it connected again
    assert online == {"client-0", "client-1"}  # the SuperLink was told their keys again


def a_client_fetches_its_model_and_predicts_with_it(deployment, tmp_path):
    out = tmp_path / "mine"
    said = coterie("deploy", "pull", deployment, "--client", "client-1", "--out", out)
    assert said.returncode == 0, said.stderr
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 2), dtype=np.float32))
    words = ["--data", tmp_path / "new.npz", "--trust", "newcomer:Newcomer"]
    said = coterie("predict", out, *words, cwd=HERE)
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
