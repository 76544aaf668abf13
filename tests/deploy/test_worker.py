"""The worker beside a node, the socket to it, and what a client brings along."""

import os
import signal
import stat
import subprocess
import sys
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data import from_folder
from coterie.data.card import DataCard
from coterie.data.clients import client_file, one_client
from coterie.deploy.app import write_app
from coterie.deploy.personal import Personal, pull
from coterie.deploy.worker import Journal
from coterie.engines.relay import ADDRESS_FILE, KEY_FILE, PROTOCOL, Envelope, ask_worker
from small_runs import described

HELLO = Envelope({"protocol": PROTOCOL + 1, "run": "0a", "setup": "", "calls": []}, {"b": b"bytes"})


@pytest.fixture
def start(tmp_path):
    """Starts workers in processes of their own, and ends them."""
    began = []

    def one():
        words = [sys.executable, "-m", "coterie.deploy.worker", str(tmp_path), "ann", "run"]
        began.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        return began[-1]

    yield one
    for process in began:
        process.kill()
        process.wait()


def test_a_relay_waits_for_a_worker_that_died_and_hands_its_message_over_again(start, tmp_path):
    first = start()
    answer = ask_worker(tmp_path, HELLO, 60.0)
    assert answer.head["client"] == "ann"
    assert "version" in answer.head["error"]
    address = Path((tmp_path / ADDRESS_FILE).read_text())
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    with pytest.raises(AuthenticationError):
        Client(str(address), "AF_UNIX", authkey=b"another")
    assert ask_worker(tmp_path, HELLO, 30.0).head["client"] == "ann"  # a stranger did no harm
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with pytest.raises(TimeoutError, match="did not answer within 0 s"):
        ask_worker(tmp_path, HELLO, 0.3)
    second = start()
    assert ask_worker(tmp_path, HELLO, 60.0).head["client"] == "ann"
    second.terminate()
    second.wait(10)
    end = time.monotonic() + 5
    while Path((tmp_path / ADDRESS_FILE).read_text()).exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path((tmp_path / ADDRESS_FILE).read_text()).exists()


def test_nothing_on_the_way_of_a_message_loads_torch():
    code = (
        "import sys, coterie.engines.relay, coterie.deploy.relays, coterie.deploy.node\n"
        "import importlib.util\n"
        "if importlib.util.find_spec('flwr'): import coterie.engines.flower\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_journal_goes_back_to_what_was_heard(tmp_path):
    journal = Journal(tmp_path / "memory")
    for exchange in (10, 20, 30, 40):
        journal.add(exchange, {"x": torch.tensor(exchange)})
    assert int(journal.restore(heard=35, saved=0)["x"]) == 30
    assert journal.entries() == [10, 20, 30]  # 40 was never heard
    assert int(Journal(tmp_path / "memory").restore(heard=35, saved=25)["x"]) == 30
    assert journal.entries() == [20, 30]  # the last before 25 must stay: a server may go back to it
    assert journal.restore(heard=0, saved=0) is None
    assert journal.entries() == []


def sites(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        rows = [f"{rng.normal():.3f},{word},{rng.integers(2)}" for word in "xyxyxyxyxyxy"]
        (folder / f"{name}.csv").write_text("age,ward,ill\n" + "\n".join(rows) + "\n")
    return folder


def test_a_client_reads_its_own_rows_as_the_pilot_did(tmp_path):
    folder = sites(tmp_path / "sites")
    whole = from_folder(folder, "ill", split="stratified", seed=3)
    for number, name in enumerate(whole.names):
        for path in (folder, folder / f"{name}.csv"):
            own = one_client(
                client_file(path, name),
                name,
                DataCard.of(whole),
                {"split": "stratified", "seed": 3},
            )
            for split in ("train", "test"):
                one, other = (
                    own.gather(split, torch.tensor([0])),
                    whole.gather(split, torch.tensor([number])),
                )
                assert torch.equal(one.x, other.x)
                assert torch.equal(one.y, other.y)


def test_a_client_without_data_is_told_where_they_should_be(tmp_path):
    with pytest.raises(DataError, match="data of client 'c' must be in"):
        client_file(tmp_path / "nothing", "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must be a file"):
        client_file(tmp_path / "empty", "c")


def test_an_app_holds_neither_data_nor_truth(tmp_path):
    made = write_app(tmp_path / "app", described("ifca"), None, 60.0)
    assert made["clients"] == 8
    text = (tmp_path / "app" / "app" / "data.json").read_text()
    assert '"truth": null' in text
    assert '"names": []' in text
    assert (tmp_path / "app" / "pyproject.toml").read_text().count("fab-include") == 1


def test_a_model_that_was_never_handed_out_cannot_be_pulled(tmp_path):
    with pytest.raises(DataError, match="It has none yet"):
        pull(tmp_path, tmp_path / "mine")
    assert Personal.__doc__
