"""A run folder from a stranger: no code runs, nothing outside is touched, every refusal is ours."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

import coterie
from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.fitting import fit_run
from coterie.report.cards import show_run
from coterie.report.html import live, read_contents, write_report
from coterie.running.build import build
from coterie.running.files import RUN_FILE, blame, read
from coterie.running.folder import RunFolder
from coterie.running.loop import resume
from small_runs import described


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small finished run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit_run(build(described("fedavg", 3)), folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    """A copy of it, in which one stands."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "run"), *sys.path])
    return tmp_path / "run"


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def reseal(folder):
    """Checksums of final/ as a stranger would set them."""
    files = [path for path in (folder / "final").iterdir() if path.name != "manifest.json"]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "final" / "manifest.json").write_text(json.dumps({"format": 1, "files": sums}))


def unfinish(folder):
    """As if the last round had still to be done."""
    (folder / "summary.json").unlink()
    sorted((folder / "checkpoint").glob("0*.json"))[-1].unlink()


def refused(folder, act, sentence):
    with pytest.raises(CoterieError, match=sentence) as error:
        act(folder)
    assert "\n" not in str(error.value)


# Code

NAMES = {
    "network": (
        {"model": {"import": "evil:run", "arguments": {"command": "touch PWNED"}}},
        "evil:run",
    ),
    "loss": ({"model": {"name": "mlp", "loss": "evil:run"}}, "evil:run"),
    "local training": ({"local": {"learning_rate": 0.1, "augment": "evil:run"}}, "evil:run"),
    "method": ({"algorithm": {"name": "evil:Method"}}, "evil:Method"),
    "own code": ({"model": {"import": "coterie.core.config:import_module"}}, "coterie.core.config"),
}


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("act", [coterie.load, coterie.resume, show_run])
def test_no_code_runs_because_a_folder_names_it(folder, where, act):
    tables, name = NAMES[where]
    (folder / "evil.py").write_text("open('PWNED', 'w').close()\n")
    edit(folder / "run.json", lambda run: run.update(tables))
    if act is show_run:
        show_run(RunFolder(folder))
    else:
        refused(folder, act, rf"pass trust=\['{name}.*--trust {name}")
    assert not (folder / "PWNED").exists()
    assert "evil" not in sys.modules


def test_code_that_is_trusted_is_imported(folder, tmp_path):
    network = {"import": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 3}}
    method = {"algorithm": {"name": "newcomer:Newcomer"}, "model": network}
    trust = ["newcomer:Newcomer", "torch.nn:Linear"]
    ready = build(described(rounds=1) | method, trust)
    fit = fit_run(ready, tmp_path / "own")
    for act in (coterie.load, coterie.resume):
        refused(tmp_path / "own", act, "--trust newcomer:Newcomer")
        assert act(tmp_path / "own", trust=trust).rows == fit.rows
        with pytest.raises(ConfigError, match=r"--trust torch\.nn:Linear"):
            act(tmp_path / "own", trust=trust[:1])


def test_what_a_process_passes_itself_needs_no_trust(tmp_path):
    from torch import nn

    import newcomer
    from coterie.core.training import LocalSGD
    from coterie.data import blobs

    data = blobs(n_groups=2, clients_per_group=2, n=20)
    own = newcomer.Newcomer(coterie.Model(nn.Linear(2, 3), "cross_entropy"), LocalSGD(0.1))
    assert coterie.fit(data, own, rounds=1, out=tmp_path / "a", compare=False).rounds
    by_name = coterie.fit(data, "newcomer:Newcomer", model=nn.Linear(2, 3), rounds=1, compare=False)
    assert type(by_name.algorithm) is newcomer.Newcomer


# Names and links


def test_a_manifest_cannot_name_files_outside(folder):
    (folder.parent / "secret").write_text("secret")
    sums = {"../../secret": hashlib.sha256(b"secret").hexdigest()}
    edit(folder / "final" / "manifest.json", lambda one: one["files"].update(sums))
    refused(folder, coterie.load, r"must be named by its name alone.*'\.\./\.\./secret'")
    refused(RunFolder(folder), show_run, "must be named by its name alone")


def test_a_checkpoint_outside_is_not_used(folder):
    path = sorted((folder / "checkpoint").glob("0*.json"))[-1]
    manifest = json.loads(path.read_text())
    name = manifest["state"]
    shutil.move(folder / "checkpoint" / name, folder.parent / name)
    manifest["state"] = f"../../{name}"
    manifest["files"][f"../../{name}"] = manifest["files"].pop(name)
    del manifest["sha256"]
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="must be named by its name alone"):
        coterie.resume(folder)
    assert (folder.parent / name).exists()


@pytest.mark.parametrize(
    "name", ["checkpoint", "final", "rounds.jsonl", "run.json", "record.jsonl"]
)
def test_links_in_a_folder_are_not_followed(folder, name):
    victim = folder.parent / "victim"
    shutil.move(folder / name, victim)
    if victim.is_dir():
        (victim / "thesis.tex").write_text("years of work")
    before = {p: p.read_bytes() for p in victim.parent.rglob("victim*/**/*") if p.is_file()}
    before |= {victim: victim.read_bytes()} if victim.is_file() else {}
    (folder / name).symlink_to(victim)
    if name != "final":
        (folder / "summary.json").unlink()
    refused(folder, coterie.resume, f"{name} is a link, and links in a run folder are not followed")
    assert {path: path.read_bytes() for path in before} == before


def test_a_temporary_file_that_is_a_link_is_replaced(folder):
    victim = folder.parent / "victim.txt"
    victim.write_text("years of work")
    (folder / "summary.json").unlink()
    (folder / "summary.json.part").symlink_to(victim)
    coterie.resume(folder)
    assert victim.read_text() == "years of work"


def test_a_linked_baseline_is_not_written(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "victim").mkdir()
    shutil.copytree(whole, tmp_path / "victim" / "fedavg")
    (tmp_path / "run" / "baselines").symlink_to(tmp_path / "victim")
    refused(RunFolder(tmp_path / "run" / "baselines" / "fedavg"), show_run, "baselines is a link")


def test_a_foreign_file_among_the_checkpoints_is_left_alone(folder):
    (folder / "checkpoint" / "thesis.tex").write_text("years of work")
    (folder / "checkpoint" / "more").mkdir()
    unfinish(folder)
    coterie.resume(folder)
    assert (folder / "checkpoint" / "thesis.tex").read_text() == "years of work"


# Sizes, nesting, damage


@pytest.mark.parametrize("name", ["run.json", "final/manifest.json", "summary.json"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 64 levels deep"),
        (b'{"x": "\xff"}', "is damaged"),
        (b"[1]", "does not hold a JSON object"),
        (b"", "is damaged: it is not JSON"),
    ],
)
def test_json_that_is_no_json_object_is_named(folder, name, content, sentence):
    (folder / name).write_bytes(content)
    refused(folder, coterie.load, rf"{name.split('/')[-1]}.*{sentence}|{sentence}")


def test_the_size_of_a_file_is_looked_at_before_its_content(folder):
    with open(folder / "run.json", "wb") as file:
        file.truncate(RUN_FILE + 1)
    refused(folder, coterie.load, r"run\.json must have at most 16 MB\. It has 16\.")


def test_a_pipe_is_not_waited_for(folder):
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    refused(folder, coterie.load, "must be a plain file")


@pytest.mark.parametrize(
    "line", [b"5", b'{"ruond": 1}', b'{"round": "\xff"}', b"{", b'{"round": 1']
)
def test_a_damaged_line_of_the_log_is_named(folder, line):
    lines = (folder / "rounds.jsonl").read_bytes().splitlines()
    (folder / "rounds.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[2:]]) + b"\n")
    refused(folder, coterie.load, r"rounds\.jsonl, line 2, is damaged")
    refused(folder, coterie.resume, r"rounds\.jsonl, line 2, is damaged")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("clients.json", {"clients": [5]}),
        ("clients.json", {"clients": [{}]}),
        ("groups.json", {"groups": [{"group": 1}]}),
        ("data.json", {"task": "classification"}),
        ("state.safetensors", {}),
    ],
)
def test_results_with_other_content_are_named(folder, name, content):
    (folder / "final" / name).write_text(json.dumps(content))
    reseal(folder)
    if name in ("clients.json", "groups.json"):
        refused(RunFolder(folder), show_run, "is damaged")
    else:
        refused(folder, coterie.load, "is damaged")


def test_a_manifest_must_name_the_results(folder):
    (folder / "final" / "manifest.json").write_text('{"format": 1}')
    refused(folder, coterie.load, r"manifest\.json is damaged: it names no files")
    (folder / "final" / "manifest.json").write_text('{"files": {}}')
    refused(folder, coterie.load, r"it lacks state\.safetensors")


def test_an_error_of_another_kind_names_the_file_and_keeps_its_cause(folder):
    with (
        pytest.raises(DataError, match=r"a\.json is damaged.*KeyError: 'x'") as error,
        blame("a.json"),
    ):
        {}["x"]
    assert isinstance(error.value.__cause__, KeyError)


# One at a time, and for its owner only


def test_a_folder_is_for_its_owner_only(tmp_path):
    old = os.umask(0)
    try:
        fit_run(build(described("ifca", 1, run={"compare": True})), tmp_path / "run")
    finally:
        os.umask(old)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_two_resumes_at_once_are_refused(folder):
    unfinish(folder)
    code = "import coterie; coterie.resume('.')"
    with RunFolder(folder).lock():
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder
        )
        assert done.returncode == 1
        assert "another process is writing to this run folder" in done.stderr
        said = []
        thread = threading.Thread(target=lambda: said.append(_error(coterie.resume, folder)))
        thread.start()
        thread.join()
        assert "another process is writing" in str(said[0])
        coterie.resume(folder)  # the one that holds it
    assert [line["round"] for line in RunFolder(folder).lines()] == [1, 2, 3]


def test_a_part_of_a_run_has_the_lock_of_the_whole(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(whole, tmp_path / "run" / "baselines" / "fedavg")
    part = RunFolder(tmp_path / "run" / "baselines" / "fedavg")
    assert part.whole == tmp_path / "run"
    ready = build(described("fedavg", 3))
    with RunFolder(tmp_path / "run").lock():
        said = []
        args = ready.algorithm, ready.data, ready.settings, part.path
        thread = threading.Thread(target=lambda: said.append(_error(resume, *args)))
        thread.start()
        thread.join()
    assert "another process is writing" in str(said[0])
    assert read(part.path / "summary.json")


def test_a_folder_that_lies_below_one_called_baselines_is_whole(tmp_path):
    (tmp_path / "baselines" / "a").mkdir(parents=True)
    assert RunFolder(tmp_path / "baselines" / "a").whole == tmp_path / "baselines" / "a"


def _error(act, *args):
    try:
        act(*args)
    except CoterieError as error:
        return error
    return None


# The page about a run, and the live one


def test_a_report_replaces_a_link_and_does_not_follow_it(folder):
    victim = folder.parent / "victim.txt"
    victim.write_text("years of work")
    (folder / "report.html").symlink_to(victim)
    write_report(read_contents(folder), folder / "report.html")
    assert victim.read_text() == "years of work"
    assert not (folder / "report.html").is_symlink()
    assert "<html" in (folder / "report.html").read_text()


def test_a_report_needs_room_for_a_file(folder):
    (folder / "report.html").mkdir()
    refused(folder, lambda _: write_report(read_contents(folder), folder / "report.html"),
            r"report\.html could not be written")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("clients.json", b'{"clients": [5'),
        ("clients.json", b'{"clients": [5]}'),
        ("clients.json", b"[]"),
        ("groups.json", b'{"groups": "\xff"}'),
        ("groups.json", b'{"groups": [{"group": 1}]}'),
        ("data.json", b'{"names": 5}'),
        ("data.json", b'{"names": ["\\ud800"]}'),
        ("held_out.json", b'{"by_round": 5}'),
    ],
)
def test_a_page_about_damaged_results_is_refused(folder, name, content):
    (folder / "final" / name).write_bytes(content)
    reseal(folder)
    out = folder.parent / "page.html"
    if name == "held_out.json":
        with contextlib.suppress(CoterieError):  # not every page shows it
            write_report(read_contents(folder), out)
    else:
        refused(folder, lambda _: write_report(read_contents(folder), out), "is damaged")
    assert "<main" in live.show(folder)  # says that it cannot be read


def test_a_list_of_names_that_is_a_pipe_is_not_waited_for(folder):
    (folder / "summary.json").unlink()
    (folder / "names.json").unlink()
    os.mkfifo(folder / "names.json")
    assert read_contents(folder).names == []


@pytest.mark.parametrize("name", ["why.json", "verdict.json"])
@pytest.mark.parametrize("content", [b"{", b"{}", b'"\xff"', b"[" * 100_000, b'{"groups": [5]}'])
def test_damaged_answers_are_named(folder, name, content):
    (folder / "final" / name).write_bytes(content)
    reseal(folder)
    fit = coterie.load(folder)
    refused(fit, lambda fit: fit.why if name == "why.json" else fit.verdict, f"{name} is damaged")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"names": [["a"]]}, "names"),
        ({"n_outputs": "x"}, "n_outputs"),
        ({"truth": ["x"]}, "truth"),
        ({"notes": [5]}, "notes"),
    ],
)
def test_a_data_card_of_other_types_is_refused(folder, change, field):
    edit(folder / "final" / "data.json", lambda card: card.update(change))
    reseal(folder)
    refused(folder, coterie.load, rf"final/data\.json is damaged.*{field}")


def test_rules_of_other_types_are_refused(folder):
    edit(folder / "final" / "data.json", lambda card: card["encoder"].update(dtype=5.0))
    reseal(folder)
    refused(folder, coterie.load, r"final/data\.json is damaged.*dtype")


def test_half_a_character_is_no_text(folder):
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "note": "\ud800"}))
    refused(folder, coterie.load, r"run\.json is damaged: it contains text that is not Unicode")


def test_a_group_without_its_clients_is_named_when_its_model_is_asked_for(folder):
    edit(folder / "final" / "groups.json", lambda rows: rows["groups"][0].pop("clients"))
    reseal(folder)
    rows = np.zeros((4, 2), dtype=np.float32)
    refused(
        folder, lambda path: coterie.load(path).predict(rows, group=0), r"groups\.json is damaged"
    )


def test_a_group_that_is_no_number_is_named_when_a_client_is_placed(folder):
    edit(folder / "final" / "groups.json", lambda rows: rows["groups"][0].update(model={"a": 1}))
    reseal(folder)
    rows = np.zeros((4, 2), dtype=np.float32), np.zeros(4, dtype=np.int64)
    refused(folder, lambda path: coterie.load(path).place(*rows), r"groups\.json is damaged")
