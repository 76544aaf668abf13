"""An audit passes what a run wrote, however often it was stopped, and finds every change."""

import json
import shutil

import pytest

import coterie
from coterie.core.errors import DataError
from coterie.fitting import fit_run
from coterie.report.audit import audit
from coterie.running import record
from coterie.running.build import build
from coterie.running.folder import RunFolder
from small_runs import StopsAfter, described
from small_runs import coterie as command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run in which clients moved, and the runs it is compared with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit_run(build(described("ifca", 4, run={"compare": True})), folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def entries(folder):
    return list(record.entries(folder / "record.jsonl"))


def rechain(folder, change):
    """Change entries and write a new, valid chain, as somebody with the folder could."""
    changed = [one for one in (change(entry) for entry in entries(folder)) if one is not None]
    (folder / "record.jsonl").unlink()
    for entry in changed:
        rest = {k: v for k, v in entry.items() if k not in ("entry", "previous", "hash", "kind")}
        record.add(folder / "record.jsonl", entry["kind"], **rest)


def test_a_run_as_it_was_written_passes(whole):
    found = audit(whole)
    assert found.passed, str(found)
    assert found.rounds == 4
    assert len(found.parts) == 2  # alone, and one model
    assert sum(found.moves.values()) >= 1
    rows = coterie.load(whole).state.assignment.tolist()
    assert found.assignment == dict(enumerate(rows))
    assert [entry["kind"] for entry in entries(whole)][-1] == "finished"


def test_a_run_that_was_stopped_passes_and_says_so(tmp_path):
    ready = build(described("ifca", 5, run={"save_every": 2}))
    with pytest.raises(KeyboardInterrupt):
        fit_run(ready, tmp_path / "run", StopsAfter(3))
    assert "The run is not finished." in str(audit(tmp_path / "run"))
    with open(tmp_path / "run" / "record.jsonl", "a") as file:
        file.write('{"entry": 99, "ki')  # killed while it wrote
    coterie.resume(tmp_path / "run")
    found = audit(tmp_path / "run")
    assert found.passed, str(found)
    assert found.repeated == 1  # round 3
    assert found.kinds["resumed"] == 1


def test_attempts_are_audited_too(tmp_path):
    fit_run(build(described("ifca", 2, run={"restarts": 2})), tmp_path / "run")
    found = audit(tmp_path / "run")
    assert found.passed, str(found)
    assert len(found.parts) == 2


TAMPERS = {
    "a byte of the record": (
        lambda f: _replace(f / "record.jsonl", b'"kind": "round"', b'"kind": "rouns"'),
        "was changed: it does not have the hash",
    ),
    "an entry removed": (
        lambda f: _lines(f / "record.jsonl", lambda lines: lines[:3] + lines[4:]),
        "entries were removed, added or exchanged",
    ),
    "two entries exchanged": (
        lambda f: _lines(f / "record.jsonl", lambda lines: [*lines[:3], lines[4], lines[3]]),
        "entries were removed, added or exchanged",
    ),
    "the end of the record cut off": (
        lambda f: _lines(f / "record.jsonl", lambda lines: lines[:6]),
        "is not in the record",
    ),
    "a figure of a round": (
        lambda f: _lines(f / "rounds.jsonl", _better),
        "rounds.jsonl, round 2, was changed",
    ),
    "a round removed": (
        lambda f: _lines(f / "rounds.jsonl", lambda lines: lines[:-1]),
        "rounds.jsonl, round 4, was removed",
    ),
    "the run file": (
        lambda f: _replace(f / "run.json", b'"n_groups": 2', b'"n_groups": 3'),
        "run.json is not the one the run began with",
    ),
    "the summary": (
        lambda f: _replace(f / "summary.json", b'"rounds": 4', b'"rounds": 5'),
        "summary.json is missing, or is not the file of the record",
    ),
    "a model": (
        lambda f: (f / "final" / "model-0.safetensors").write_bytes(b"other"),
        "model-0.safetensors is missing, or is not the file of the record",
    ),
    "a checkpoint": (
        lambda f: (f / "checkpoint" / "state-000004.safetensors").write_bytes(b"other"),
        "state-000004.safetensors is missing, or is not",
    ),
    "a move, in a new chain": (
        lambda f: rechain(f, _other_move),
        "but the record says",
    ),
    "a part": (
        lambda f: (f / "baselines" / "fedavg" / "summary.json").unlink(),
        "summary.json is missing",
    ),
    "the end of the record and the results": (
        lambda f: (
            _lines(f / "record.jsonl", lambda lines: [x for x in lines if b'"finished"' not in x]),
            _replace(f / "summary.json", b'"rounds": 4', b'"rounds": 5'),
        ),
        "summary.json is there, but the record does not say that it ended",
    ),
    "a result that the run did not have": (
        lambda f: (f / "final" / "why_images.safetensors").write_bytes(b"other"),
        "why_images.safetensors is not in the record",
    ),
    "the names of two clients": (
        lambda f: (f / "names.json").write_text(json.dumps([*reversed(_names(f))])),
        "names.json does not have the names the run began with",
    ),
    "the record removed": (lambda f: (f / "record.jsonl").unlink(), "has no record"),
}


def _replace(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def _names(folder):
    return json.loads((folder / "names.json").read_text())


def _lines(path, change):
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")


def _better(lines):
    line = json.loads(lines[1])
    line["accuracy"] = 0.99
    return [lines[0], json.dumps(line).encode(), *lines[2:]]


def _other_move(entry):
    if entry["kind"] in ("started", "round") and entry["moved"]:
        entry["moved"] = {client: 1 - group for client, group in entry["moved"].items()}
    return entry


@pytest.mark.parametrize("how", TAMPERS)
def test_every_change_is_found(folder, how):
    change, sentence = TAMPERS[how]
    change(folder)
    found = audit(folder)
    assert not found.passed
    assert sentence in str(found)


def test_a_new_chain_does_not_have_the_hash_that_was_kept(folder):
    kept = audit(folder).head
    assert audit(folder, expect=kept).passed
    rechain(folder, lambda entry: None if entry["kind"] == "saved" else entry)
    assert f"does not contain the expected hash {kept}" in str(audit(folder, expect=kept))


def test_a_copy_says_that_its_rounds_are_not_covered(whole, tmp_path):
    coterie.load(whole).save(tmp_path / "copy")
    found = audit(tmp_path / "copy")
    assert found.passed, str(found)
    assert "A copy, made by Fitted.save" in str(found)


def test_a_damaged_last_line_stops_a_resume(folder):
    _lines(folder / "record.jsonl", lambda lines: [*lines, b"{}"])
    with pytest.raises(DataError, match=r"The last line of .*record\.jsonl is not an entry"):
        coterie.resume(folder)


def test_the_writer_takes_any_kind(folder):
    RunFolder(folder).record("budget", round=4, epsilon=1.5)
    assert audit(folder).kinds["budget"] == 1


@pytest.mark.slow
def test_the_command_says_what_was_changed_by_its_code(folder):
    said = command("audit", folder)
    assert said.returncode == 0, said.stderr
    assert "Nothing was changed." in said.stdout
    (folder / "final" / "clients.csv").write_text("")
    said = command("audit", folder, "--json")
    assert said.returncode == 1
    assert not json.loads(said.stdout)["passed"]
