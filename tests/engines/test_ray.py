"""Engine "ray" with Ray itself: bits, killed processes, two nodes. Slow: every shard imports torch.

Ray is started once for all tests that run in this process.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import coterie.algorithms
from coterie.checks import tiny
from coterie.checks.problem import plain
from coterie.checks.trial import difference
from coterie.core.algorithm import REGISTRY, find
from coterie.core.model import Model
from coterie.running.build import Settings, build
from coterie.running.folder import RunFolder
from coterie.running.loop import begin, run
from coterie.running.progress import Silent
from small_runs import command, content, coterie, described, toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
METHODS = [name for name in REGISTRY if REGISTRY[name].__module__.startswith("coterie.")]
EXACT = Settings(rounds=4, threads=1)


def problem():
    """Twelve clients of unequal size, with weights of single precision."""
    return replace(tiny(clients_per_group=6), model=Model(plain, dtype=torch.float32))


ROUNDED = {"blend", "federated_cmeans", "fedgmi", "fedgmm", "mosaic"}
"""Methods whose numbers are equal to rounding: two shards add up in another order than one process,
and multiply stacks of other sizes. All other methods give the same bits here."""


@pytest.mark.parametrize("method", METHODS)
def test_two_shards_write_the_files_of_one_process(method):
    made = problem()
    one = run(find(method).example(made), made.data, EXACT)
    two = run(find(method).example(made), made.data, replace(EXACT, engine="ray", shards=2))
    assert one.files.keys() == two.files.keys()
    if method not in ROUNDED:
        assert [name for name in one.files if one.files[name] != two.files[name]] == []
        return
    for name, data in one.files.items():
        if name.endswith(".safetensors"):
            assert difference(load(data), load(two.files[name]), 1e-5) == ""


@pytest.fixture
def long(tmp_path):
    """A run file with rounds that take a second or so on two shards, and its path."""
    tables = described("ditto", 6)
    tables["model"] = {"name": "mlp", "hidden": [512, 512]}
    tables["data"] = {"name": "digits", "n_clients": 16, "n_groups": 4, "per_client": 100}
    tables["local"] = {"learning_rate": 0.05, "batch_size": 10, "epochs": 4}
    tables["run"] = {"rounds": 6, "threads": 1, "engine": "ray", "shards": 2}
    path = tmp_path / "long.toml"
    path.write_text(toml(tables))
    return tables, path


def test_a_shard_that_is_killed_in_a_round_misses_it_and_comes_back(long, tmp_path):
    tables, _ = long

    class Killer(Silent):
        """Kills a shard soon after the third round has begun."""

        def round(self, line):
            if line["round"] == 2:
                threading.Timer(0.2, lambda: os.kill(max(shards()), signal.SIGKILL)).start()

    with pytest.warns(UserWarning, match=r"Shard . of 2 has stopped; its clients missed round 3"):
        begin(build(tables), tmp_path / "run", Killer())
    lines = RunFolder(tmp_path / "run").lines()
    assert len(lines) == 6
    assert [len(line.get("missing", [])) for line in lines] == [0, 0, 8, 0, 0, 0]


def shards() -> list[int]:
    """The processes of the shards of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"ray::Host" in path.read_bytes() and _below(int(path.parent.name), os.getpid()):
                found.append(int(path.parent.name))
    return found


def _below(pid: int, root: int) -> bool:
    """Whether a process was started, directly or not, by another."""
    while pid > 1:
        if pid == root:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return False


def test_a_killed_main_process_is_resumed_exactly(long, tmp_path):
    _, path = long
    whole = coterie("run", path, "--no-compare", "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    words = command("run", path, "--no-compare", "--out", tmp_path / "killed")
    with open(tmp_path / "log", "w") as log:
        main = subprocess.Popen(words, stdout=log, stderr=log)
    rounds = tmp_path / "killed" / "rounds.jsonl"
    end = time.monotonic() + 300
    while not (rounds.exists() and rounds.read_text().count("\n") >= 3):
        assert main.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    main.kill()
    main.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    again = coterie("resume", tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def _free() -> int:
    with socket.create_server(("127.0.0.2", 0)) as server:
        return server.getsockname()[1]


def test_two_ray_nodes_write_the_files_of_one_process(long, tmp_path):
    tables, path = long
    place = Path("/tmp") / f"ray-{secrets.token_hex(4)}"  # a socket's path must be short
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "200",  # a busy machine is slow, not wrong
    }
    head = f"127.0.0.2:{_free()}"  # Ray replaces 127.0.0.1 by an address of the network
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
    shared = ["--num-cpus=1", "--object-store-memory=200000000"]
    first = [
        "--head",
        "--include-dashboard=false",
        "--node-ip-address=127.0.0.2",
        f"--port={head.split(':')[1]}",
    ]
    first.append(f"--temp-dir={place}")
    second = ["--node-ip-address=127.0.0.3", f"--address={head}"]
    nodes = []
    try:
        for own in (first, second):
            with open(tmp_path / f"node-{len(nodes)}.log", "w") as log:
                nodes.append(
                    subprocess.Popen([*ray, *own, *shared], stdout=log, stderr=log, env=environment)
                )
            time.sleep(5)
        words = ["run", path, "--no-compare", "--out", tmp_path / "two", "--address", head]
        end = time.monotonic() + 300
        two = coterie(*words, env=environment, timeout=400)
        while "needs a core" in two.stderr and time.monotonic() < end:  # a node starts slowly
            two = coterie(*words, env=environment, timeout=400)
        said = "".join(log.read_text() for log in tmp_path.glob("node-*.log"))
        assert two.returncode == 0, two.stderr + said
    finally:
        for node in nodes[::-1]:
            node.terminate()
        for node in nodes:
            node.wait(60)
    tables["run"] = {"rounds": 6, "threads": 1}
    path.write_text(toml(tables))
    one = coterie("run", path, "--no-compare", "--out", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    ours, theirs = content(tmp_path / "one"), content(tmp_path / "two")
    assert {n for n in ours if ours[n] != theirs.get(n)} <= {"final/why.json"} | _naming(theirs)
    plan = json.loads((tmp_path / "two" / "run.json").read_text())["plan"]
    assert plan["shards"] == 2


def _naming(files: dict[str, bytes]) -> set[str]:
    """Files that name the engine, which differ in that alone."""
    return {name for name, data in files.items() if b'"ray"' in data}
