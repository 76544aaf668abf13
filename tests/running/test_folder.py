import json
import subprocess
import sys
import warnings

import pytest
import torch

from coterie.algorithms import LocalOnly
from coterie.algorithms.local_only import State
from coterie.core.errors import ConfigError, DataError
from coterie.core.memory import Memory
from coterie.core.training import LocalSGD
from coterie.report.audit import audit
from coterie.running import folder as folder_module
from coterie.running import record
from coterie.running.folder import SEGMENTS, RunFolder, no_nan, read_json
from coterie.running.loop import resume, run
from small_runs import content, ready
from tiny import mean_model


@pytest.fixture
def stopped(tmp_path):
    """A folder with checkpoints 2 and 3, the run it belongs to, and what it must end as."""
    short, whole = ready("local_only", 3), ready("local_only", 5)
    run(whole.algorithm, whole.data, whole.settings, tmp_path / "whole")
    run(short.algorithm, short.data, short.settings, tmp_path / "stopped")
    return tmp_path / "stopped", whole, content(tmp_path / "whole")


# Damage


@pytest.mark.parametrize(
    "how", ["torn manifest", "edited manifest", "truncated", "flipped", "gone"]
)
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(stopped, how):
    folder, whole, expected = stopped
    manifest = folder / "checkpoint" / "000003.json"
    state = folder / "checkpoint" / "state-000003.safetensors"
    memory = folder / "checkpoint" / "memory-000003.safetensors"
    match how:
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:40])
        case "edited manifest":
            manifest.write_text(manifest.read_text().replace('"round": 3', '"round": 4'))
        case "truncated":
            state.write_bytes(state.read_bytes()[:-1])
        case "flipped":
            data = bytearray(memory.read_bytes())
            data[len(data) // 2] ^= 1
            memory.write_bytes(data)
        case "gone":
            state.unlink()
    with pytest.warns(UserWarning, match="damaged"):
        resume(whole.algorithm, whole.data, whole.settings, folder)
    assert content(folder) == expected


def test_without_any_whole_checkpoint_the_error_says_how_to_start_again(stopped):
    folder, whole, _ = stopped
    for path in (folder / "checkpoint").glob("state-*"):
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(
            DataError, match=r"no undamaged checkpoint was found.*coterie run .*run\.json"
        ),
    ):
        resume(whole.algorithm, whole.data, whole.settings, folder)


def test_a_whole_folder_gives_no_warning(stopped):
    folder, whole, expected = stopped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(whole.algorithm, whole.data, whole.settings, folder)
    assert content(folder) == expected


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_damage_to_the_final_files_is_found(stopped, how):
    folder, *_ = stopped
    path = folder / "final" / "clients.json"
    path.write_bytes(b"{}") if how == "changed" else path.unlink()
    with pytest.raises(DataError, match=r"clients\.json is missing or damaged\. Resume the run"):
        RunFolder(folder).final_files()


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_run_file_is_one_sentence(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run\.json is damaged: it"):
        RunFolder(tmp_path).description()
    with pytest.raises(DataError, match=r"other is not a run folder: it has no run\.json"):
        read_json(tmp_path / "other" / "run.json")


def test_a_torn_last_line_of_the_log_is_passed_over(stopped):
    folder, whole, expected = stopped
    with open(folder / "rounds.jsonl", "a") as log:
        log.write('{"round": 4, "lo')
    assert [line["round"] for line in RunFolder(folder).lines()] == [1, 2, 3]
    resume(whole.algorithm, whole.data, whole.settings, folder)
    assert content(folder) == expected


def test_lines_past_the_checkpoint_are_written_anew(stopped):
    folder, whole, expected = stopped
    with open(folder / "rounds.jsonl", "a") as log:
        log.write('{"round": 4, "loss": 1.0}\n')
    resume(whole.algorithm, whole.data, whole.settings, folder)
    assert content(folder) == expected


# A full disk

FULL = """
import resource, sys, warnings
from pathlib import Path
from coterie.core.errors import DataError
from coterie.running.loop import run
from coterie.running.progress import Silent
sys.path.insert(0, sys.argv[1])
from small_runs import ready

class Filling(Silent):
    def __init__(self, limit):
        self.limit = limit
    def round(self, line):
        if line["round"] == 2:  # from here on no file may be larger
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))

for name, limit in (("log", 250), ("checkpoint", 9000)):
    whole = ready("local_only", 5, model={"hidden": [400]})
    try:
        run(whole.algorithm, whole.data, whole.settings, Path(sys.argv[2]) / name, Filling(limit))
    except DataError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(error)
"""


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path, request):
    tests = str(request.config.rootpath / "tests")
    done = subprocess.run(
        [sys.executable, "-c", FULL, tests, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    log, checkpoint = done.stdout.splitlines()
    assert "record.jsonl could not be written (File too large)" in log
    assert "the disk is full, so memory-000003.safetensors could not be written" in checkpoint
    for sentence in (log, checkpoint):
        assert sentence.endswith("Free some space, then resume.")
    whole = ready("local_only", 5, model={"hidden": [400]})
    run(whole.algorithm, whole.data, whole.settings, tmp_path / "whole")
    for name in ("log", "checkpoint"):
        folder = RunFolder(tmp_path / name)
        assert folder.load(whole.algorithm)[0] == 2
        assert not list((tmp_path / name).rglob("*.part"))
        resume(whole.algorithm, whole.data, whole.settings, tmp_path / name)
        assert content(tmp_path / name) == content(tmp_path / "whole")


# Memory in segments


def remembering(memory: Memory, client: int, value: float) -> None:
    memory.keep(client, {"params": {"centre": torch.tensor(value)}})
    memory.commit()


@pytest.fixture
def checkpoints(tmp_path):
    return RunFolder(tmp_path)


ALONE = LocalOnly(mean_model(), LocalSGD())


def files(folder: RunFolder, start: str) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob(f"{start}*"))


def test_only_memory_that_changed_is_written(checkpoints):
    memory = Memory()
    for client in range(3):
        remembering(memory, client, float(client))
    checkpoints.save(0, State(), {}, memory)
    remembering(memory, 1, 10.0)
    checkpoints.save(1, State(), {}, memory)
    checkpoints.save(2, State(), {}, memory)  # nothing changed: no new file
    first, second = "memory-000000.safetensors", "memory-000001.safetensors"
    assert files(checkpoints, "memory") == [first, second]
    manifest = json.loads((checkpoints.checkpoints / "000002.json").read_text())
    assert manifest["memory"] == {"0": first, "1": second, "2": first}
    done, state, _, loaded, *_ = checkpoints.load(ALONE)
    assert (done, state) == (2, State())
    values = {c: float(tree["params"]["centre"]) for c, tree in loaded.committed.items()}
    assert values == {0: 0.0, 1: 10.0, 2: 2.0}


def test_after_eight_segments_memory_is_written_as_one(checkpoints):
    memory = Memory()
    for number in range(SEGMENTS):
        remembering(memory, number, float(number))
        checkpoints.save(number, State(), {}, memory)
    assert len(files(checkpoints, "memory")) == SEGMENTS
    remembering(memory, 0, 100.0)
    checkpoints.save(SEGMENTS, State(), {}, memory)
    manifest = json.loads((checkpoints.checkpoints / f"{SEGMENTS:06d}.json").read_text())
    assert set(manifest["memory"].values()) == {f"memory-{SEGMENTS:06d}.safetensors"}
    checkpoints.save(SEGMENTS + 1, State(), {}, memory)
    # The checkpoint before still named the old segments; now nobody does.
    assert files(checkpoints, "memory") == [f"memory-{SEGMENTS:06d}.safetensors"]
    loaded = checkpoints.load(ALONE)[3]
    assert float(loaded.committed[0]["params"]["centre"]) == 100.0
    assert sorted(loaded.committed) == list(range(SEGMENTS))


def test_two_checkpoints_are_kept(checkpoints):
    for number in range(5):
        checkpoints.save(number, State(), {}, Memory())
    assert files(checkpoints, "") == [
        "000003.json",
        "000004.json",
        "state-000003.safetensors",
        "state-000004.safetensors",
    ]


# Creating


def test_an_existing_run_is_never_overwritten(stopped):
    folder, whole, _ = stopped
    before = content(folder)
    with pytest.raises(ConfigError, match=r"exists and is not empty.*coterie resume .*stopped"):
        run(whole.algorithm, whole.data, whole.settings, folder)
    assert content(folder) == before


def test_an_empty_folder_and_one_killed_at_birth_may_be_used(tmp_path):
    RunFolder(tmp_path / "a").create({})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json.part").write_text("{")
    RunFolder(tmp_path / "b").create({})
    with pytest.raises(ConfigError, match="exists"):
        RunFolder(tmp_path / "a").create({})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists"):
        RunFolder(tmp_path / "file").create({})


def test_numbers_json_has_no_word_for_are_null():
    nested = {"a": [float("nan"), 1.0], "b": (float("inf"), {"c": float("-inf")})}
    assert no_nan(nested) == {"a": [None, 1.0], "b": [None, {"c": None}]}


@pytest.mark.parametrize("full", ["record.jsonl", "names.json", "run.json"])
def test_a_run_whose_first_files_did_not_fit_is_begun_anew(full, tmp_path, monkeypatch):
    folder, names = RunFolder(tmp_path / "run"), ("a", "b")
    write, append = folder_module.write, record.append

    def no_room(path, *given):
        if path.name == full:
            raise DataError("the disk is full")
        return (append if path.suffix == ".jsonl" else write)(path, *given)

    monkeypatch.setattr("coterie.running.folder.write", no_room)
    monkeypatch.setattr("coterie.running.record.append", no_room)
    with pytest.raises(DataError, match="full"):
        folder.create({}, names)
    assert not (folder.path / "run.json").exists()  # it is no run, so it need not be resumed
    monkeypatch.undo()
    folder.create({}, names)
    assert audit(folder.path).passed
    assert json.loads((folder.path / "names.json").read_text()) == list(names)


@pytest.mark.parametrize("number", ["2", "0", '"1"', "null", "1" + "0" * 5000])
def test_a_folder_of_another_version_is_refused(number, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    (folder.path / "run.json").write_text(f'{{"format": {number}}}')
    with pytest.raises(DataError, match=r"must have format 1|is not JSON"):
        folder.description()
