"""The page that shows a run while it goes on: read-only, safe, and right at every moment."""

import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import coterie
from coterie.data import blobs
from coterie.report.html import live
from coterie.report.html.contents import read_contents
from coterie.report.html.live import HOST, describe_progress, make_app, show

pytest.importorskip("starlette")
pytest.importorskip("httpx")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NAME = "<script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("live") / "a"
    data = blobs(n_groups=2, clients_per_group=2, n=12)
    coterie.fit(data, "ifca", model="linear", n_groups=2, rounds=4, out=out)
    return out


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """The same run after two of four rounds; one client has a hostile name and is late."""
    out = tmp_path / "a"
    shutil.copytree(finished, out)
    for name in ("final", "baselines"):
        shutil.rmtree(out / name)
    (out / "summary.json").unlink()
    for name in ("rounds.jsonl", "timings.jsonl"):
        lines = (out / name).read_text().splitlines()[:2]
        (out / name).write_text("".join(f"{line}\n" for line in lines))
    names = json.loads((out / "names.json").read_text())
    (out / "names.json").write_text(json.dumps([NAME, *names[1:]]))
    return out


def grow(folder: Path, **more) -> None:
    """One more round."""
    line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    with open(folder / "rounds.jsonl", "a") as file:
        file.write(json.dumps({**line, "round": line["round"] + 1, **more}) + "\n")


def client(folder: Path):
    from starlette.testclient import TestClient

    return TestClient(make_app(folder), base_url=f"http://{HOST}")


def test_the_page_follows_a_run(folder, finished):
    browser = client(folder)
    first = browser.get("/run").text
    assert "running (ifca)" in first.lower()
    assert "round 2 of 4" in first
    assert "left for everything" in first
    assert "Groups after the last round" in first
    grow(folder, missing=[NAME])
    second = browser.get("/run").text
    assert "round 3 of 4" in second
    assert second.count("late or sent faulty replies") == 1
    assert "coterie resume" not in second  # it goes on by itself
    assert "1 of the last 3 rounds, last in round 3" in second
    done = client(finished).get("/run").text
    assert "finished" in done
    assert "data-over" in done
    assert "left for everything" not in done
    assert "What each client gains" in done
    for text in (first, second, done):
        assert text.count("<h1") == 1
        levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
        assert levels[0] == 1
        assert all(deeper - level <= 1 for level, deeper in pairwise(levels))


def test_the_page_says_who_a_deployment_waits_for(folder):
    now = time.time()
    waiting = [{"client": NAME, "since": now - 12}, {"client": "quick", "since": now}]
    folder.with_name(folder.name + ".live.json").write_text(json.dumps(waiting))
    text = client(folder).get("/run").text
    assert "Waiting for" in text
    assert "(12 s)" in text
    assert "quick" not in text
    assert "<script" not in text
    folder.with_name(folder.name + ".live.json").write_text('[{"client"')  # being written
    assert "Waiting for" not in client(folder).get("/run").text


def test_a_hostile_name_is_text(folder):
    grow(folder, missing=[NAME], abandoned=f"{NAME} did not answer")
    text = client(folder).get("/run").text
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 4


def test_the_page_can_only_be_read(folder):
    browser = client(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in ("/", "/run", "/style.css", "/live.js"):
        assert browser.get(path).status_code == 200
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MKCOL", "ANY"):
            assert browser.request(method, path).status_code == 405
    for path in (
        "/run.json",
        "/../run.json",
        "/%2e%2e/run.json",
        "/final/data.json",
        "//etc/passwd",
    ):
        assert browser.get(path).status_code == 404
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_no_other_host_and_nothing_from_elsewhere(folder):
    browser = client(folder)
    answer = browser.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http:" not in answer.text + browser.get("/live.js").text
    assert browser.get("/run", headers={"host": "evil.example"}).status_code == 400


def test_an_unchanged_run_is_not_sent_again(folder):
    browser = client(folder)
    mark = browser.get("/run").headers["etag"]
    assert browser.get("/run", headers={"if-none-match": mark}).status_code == 304
    grow(folder)
    assert browser.get("/run", headers={"if-none-match": mark}).status_code == 200


def test_a_run_that_has_not_begun_and_one_that_was_stopped(folder, tmp_path):
    assert "no run here yet" in client(tmp_path / "later").get("/run").text
    import os

    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert "no sign of life" in describe_progress(read_contents(folder))["state"]


@contextmanager
def served(folder: Path):
    """The address of a server of this folder."""
    import socket

    import uvicorn

    with socket.socket() as door:
        door.bind((HOST, 0))
        server = uvicorn.Server(uvicorn.Config(make_app(folder), log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{door.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)


def browse(address: str, *words: str) -> str:
    """The page as Chromium has it after two seconds."""
    with tempfile.TemporaryDirectory() as profile:
        quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
        options = [f"--disable-{name}" for name in quiet]
        options += ["--headless", "--no-sandbox", "--no-first-run", f"--user-data-dir={profile}"]
        options += ["--virtual-time-budget=4000", *words]
        command = [CHROMIUM, *options, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_real_browser_shows_the_run_as_it_grows(folder, monkeypatch):
    asked = []

    def show_and_grow(path):
        asked.append(path)
        if len(asked) == 2:  # while the page is open
            grow(folder)
        return show(path)

    monkeypatch.setattr(live, "show", show_and_grow)
    with served(folder) as address:
        page = browse(address, "--dump-dom")
    assert len(asked) >= 2
    assert "round 3 of 4" in page
    assert "&lt;script&gt;document.title" in page
    assert "<title>taken" not in page
