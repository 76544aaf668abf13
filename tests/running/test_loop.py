import json
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest
import torch

from coterie.algorithms import FedAvg, LocalOnly
from coterie.core.errors import DataError
from coterie.running import evaluation, final, loop
from coterie.running.build import build, read
from coterie.running.folder import RunFolder
from coterie.running.loop import resume, run
from small_runs import StopsAfter, command, content, described, ready, toml


def start(one, out, progress=False):
    return run(one.algorithm, one.data, one.settings, out, progress)


def again(one, out, progress=False):
    return resume(one.algorithm, one.data, one.settings, out, progress)


# Resume


@pytest.mark.parametrize("method", ["ifca", "clove", "local_only"])
def test_three_rounds_and_two_are_five_to_the_byte(tmp_path, method):
    start(ready(method, 5), tmp_path / "whole")
    start(ready(method, 3), tmp_path / "parts")
    again(ready(method, 5), tmp_path / "parts")
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


@pytest.mark.parametrize("method", ["clove", "census"])
def test_a_finished_run_resumes_to_itself(method, tmp_path):
    one = ready(method)
    start(one, tmp_path / "run")
    before = content(tmp_path / "run")
    again(one, tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_writing_nothing_changes_nothing(tmp_path):
    one = ready("clove")
    kept, unkept = start(one, tmp_path / "run"), start(one, None)
    assert unkept.files == kept.files
    assert unkept.summary == kept.summary
    assert (unkept.folder, kept.folder) == (None, tmp_path / "run")


@pytest.mark.parametrize("save_every", [1, 4])
def test_ctrl_c_says_how_to_go_on_and_loses_no_byte(tmp_path, save_every):
    one = ready("local_only", 6, run={"save_every": save_every})
    start(one, tmp_path / "whole")
    stops = StopsAfter(3)
    with pytest.raises(KeyboardInterrupt):
        start(one, tmp_path / "run", stops)
    saved = 3 if save_every == 1 else 0
    path = tmp_path / "run"
    assert stops.said == [
        f"Stopped. {saved} of 6 rounds are saved. Continue with: coterie resume {path}"
    ]
    again(one, tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


class Interrupted(LocalOnly):
    """Local training in whose third exam somebody presses Ctrl-C, when memory is committed."""

    exams = 0

    def predict(self, personal, x):
        Interrupted.exams += 1
        if Interrupted.exams == 3:
            raise KeyboardInterrupt
        return super().predict(personal, x)


def test_ctrl_c_between_commit_and_checkpoint_resumes_exactly(tmp_path):
    one = ready("local_only", 6, run={"save_every": 4})
    start(one, tmp_path / "whole")
    broken = Interrupted(one.algorithm.model, one.algorithm.local)
    with pytest.raises(KeyboardInterrupt):
        run(broken, one.data, one.settings, tmp_path / "run")
    again(one, tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def wait_for_rounds(folder, n, process):
    log = folder / "rounds.jsonl"
    while not log.exists() or log.read_text().count("\n") < n:
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.005)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_stopped_at_any_moment_resumes_exactly(tmp_path, how):
    tables = described("clove", 30)
    (tmp_path / "run.toml").write_text(toml(tables))
    words = ["run", tmp_path / "run.toml", "--out", tmp_path / "run", "--no-compare"]
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True)
    wait_for_rounds(tmp_path / "run", 2, process)
    time.sleep(random.uniform(0, 0.1))
    process.send_signal(how)
    said, _ = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"Continue with: coterie resume {tmp_path / 'run'}" in said
    assert not (tmp_path / "run" / "summary.json").exists()
    one = ready("clove", 30)
    again(one, tmp_path / "run")
    start(one, tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("turned", [False, True])
def test_ctrl_c_counts_even_where_it_is_swallowed_or_turned_into_another_error(tmp_path, turned):
    one = ready("fedavg", 3)

    class Deaf(FedAvg):
        def step(self, fed, state):
            with suppress(KeyboardInterrupt):  # as a callback from C does
                signal.raise_signal(signal.SIGINT)
            if turned:  # as NumPy does in a comparison
                raise TypeError("cannot compare")
            return super().step(fed, state)

    deaf = Deaf(one.algorithm.model, one.algorithm.local)
    with pytest.raises(KeyboardInterrupt):
        run(deaf, one.data, one.settings, tmp_path / "run")
    again(one, tmp_path / "run")
    start(one, tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_changed_data_are_refused_on_resume(tmp_path):
    start(ready("ifca", 2), tmp_path / "run")
    other = ready("ifca", 4, data={"seed": 1})
    with pytest.raises(DataError, match=r"They have changed\. Restore the old"):
        again(other, tmp_path / "run")


# The run file


@pytest.mark.parametrize("method", ["ifca", "clove", "local_only", "fedavg"])
def test_the_run_file_alone_gives_the_same_run(tmp_path, method):
    start(ready(method, 3), tmp_path / "first")
    start(build(read(tmp_path / "first" / "run.json")), tmp_path / "second")
    assert content(tmp_path / "second") == content(tmp_path / "first")
    first, second = ((tmp_path / name / "run.json").read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_plan_is_written_down_and_kept(tmp_path):
    start(ready("ifca", 1, run={"chunk": 3}), tmp_path / "run")
    plan = RunFolder(tmp_path / "run").description()["plan"]
    kernels = plan.pop("kernels")
    assert plan.pop("policy")["mean"] == "plain"  # a later version may have another default
    fixed = {"engine": "stacked", "chunk": 3, "threads": 1, "workers": 1, "device": "cpu"}
    assert plan == fixed
    assert [choice["path"] for choice in kernels.values()] == ["twins"]
    # Another chunk on resume is overruled: it would change the last bits.
    result = again(ready("ifca", 2, run={"chunk": 5}), tmp_path / "run")
    assert result.fed.chunk == 3
    assert result.fed.plan["kernels"] == kernels


# Restarts


def test_of_several_attempts_the_lowest_training_loss_is_kept_and_resumes(tmp_path):
    one = ready("ifca", 3, run={"restarts": 3})
    result = start(one, tmp_path / "whole")
    losses = result.summary["restart_losses"]
    assert len(losses) == len(set(losses)) == 3
    assert result.summary["train_loss"] == min(losses)
    assert result.summary["restart"] == losses.index(min(losses))
    kept = tmp_path / "whole" / "restarts" / f"{result.summary['restart']:02d}"
    assert content(kept)["final/state.safetensors"] == result.files["state.safetensors"]
    alone = start(ready("ifca", 3), None)
    assert alone.summary["train_loss"] == losses[0]  # attempt 1 is the run without restarts
    stops = StopsAfter(2, attempt=2)
    with pytest.raises(KeyboardInterrupt):
        start(one, tmp_path / "run", stops)
    assert stops.said[0].endswith(f"coterie resume {tmp_path / 'run'}")  # not the attempt's folder
    again(one, tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


# Rounds that fail, exams, checkpoints


def test_an_abandoned_round_leaves_the_state_and_says_why(tmp_path):
    one = ready("ifca", 2, run={"drop": 1.0})
    start(ready("ifca", 0), tmp_path / "untouched")
    result = start(one, tmp_path / "run")
    assert result.summary["abandoned_rounds"] == 2
    for line in RunFolder(tmp_path / "run").lines():
        assert "at least 1 of 4 clients must answer" in line["abandoned"]
        assert "did not answer" in line["abandoned"]
    untouched = start(ready("ifca", 0), None)
    for name, leaf in result.state.models.items():
        assert torch.equal(leaf, untouched.state.models[name])
    with_memory = start(ready("local_only", 2, run={"drop": 1.0}), None)
    first = start(ready("local_only", 0), None)
    assert with_memory.files.get("memory.safetensors") == first.files.get("memory.safetensors")


def test_validation_data_are_held_out_of_training():
    plain, held = ready("fedavg", 1), ready("fedavg", 1, run={"validation": 0.25})
    source = start(held, None).fed.source
    assert source.sizes("train").tolist() == [18] * 8
    assert source.sizes("validation").tolist() == [6] * 8
    assert plain.data.sizes("train").tolist() == [24] * 8


def rounds_with_loss(lines):
    return [line["round"] for line in lines if "loss" in line]


@pytest.mark.parametrize(("every", "examined"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (0, [5])])
def test_exams_come_every_so_often_and_at_the_end_and_change_nothing(every, examined):
    result = start(ready("clove", run={"evaluate_every": every}), None)
    assert rounds_with_loss(result.rounds) == examined
    always = start(ready("clove"), None)
    assert result.files["state.safetensors"] == always.files["state.safetensors"]
    assert result.summary["bytes"] == always.summary["bytes"]


@pytest.mark.parametrize(("every", "kept"), [(1, [4, 5]), (2, [4, 5]), (3, [3, 5]), (0, [0, 5])])
def test_checkpoints_come_every_so_often_and_at_the_end(tmp_path, every, kept):
    start(ready("ifca", run={"save_every": every}), tmp_path / "run")
    found = sorted((tmp_path / "run" / "checkpoint").glob("[0-9]*.json"))
    assert [int(path.stem) for path in found] == kept


def test_traffic_of_exams_is_counted_apart():
    result = start(ready("clove", 3), None)
    phases = result.summary["traffic"]
    sums = {phase: sum(amounts.values()) for phase, amounts in phases.items()}
    assert sums["evaluation"] > 0
    assert result.summary["bytes"] == sum(sums.values()) - sums["evaluation"]
    assert result.rounds[-1]["bytes"] == result.summary["bytes"]


def test_lines_tell_sizes_churn_and_agreement():
    result = start(ready("clove", 6, run={"participation": 1.0}), None)
    last, truth = result.rounds[-1], result.data.truth
    assert sorted(last["sizes"]) == [4, 4]
    assert (last["ari"], last["identity"], last["churn"]) == (1.0, 1.0, 0.0)
    assert torch.tensor(last["assignment"]).unique(return_inverse=True)[1].shape == truth.shape
    assert result.summary["ari"] == 1.0
    first = next(line["round"] for line in result.rounds if line["ari"] >= 0.9)
    assert result.summary["first_round_ari_0.9"] == first


def test_a_run_without_test_data_has_no_scores_and_goes_on():
    result = start(ready("ifca", 2, data={"test": 0}), None)
    assert result.summary["loss"] is None
    assert "accuracy" not in result.summary
    rows = json.loads(result.files["clients.json"])["clients"]
    assert {row["accuracy"] for row in rows} == {None}


def test_no_rounds_is_a_run():
    result = start(ready("clove", 0), None)
    assert result.rounds == []
    assert result.summary["rounds"] == 0


# Evaluation


def count_evaluations(monkeypatch):
    """The splits that are evaluated, in order."""
    splits = []

    def counted(*given, split="test", **options):
        splits.append(split)
        return evaluation.evaluate(*given, split=split, **options)

    for module in (loop, final):
        monkeypatch.setattr(module, "evaluate", counted)
    return splits


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("method", ["fedavg", "ifca", "clove", "census", "local_only"])
def test_the_last_models_are_evaluated_once(method, share, monkeypatch):
    splits = count_evaluations(monkeypatch)
    one = ready(method, 1, run={"participation": share, "validation": 0.2})
    result = run(one.algorithm, one.data, one.settings)
    assert splits == ["test", "validation", "train"]
    fresh = evaluation.evaluate(result.algorithm, result.fed, result.state, "classification")
    assert torch.equal(result.scores.loss, fresh.loss)


def test_a_run_without_rounds_is_evaluated(monkeypatch):
    splits = count_evaluations(monkeypatch)
    one = ready("fedavg", 0)
    run(one.algorithm, one.data, one.settings)
    assert splits == ["test", "train"]


def test_a_run_stopped_after_its_last_round_has_the_same_files(tmp_path):
    one = ready("ifca", 3)
    run(one.algorithm, one.data, one.settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(one.algorithm, one.data, one.settings, tmp_path / "run", StopsAfter(3))
    resume(one.algorithm, one.data, one.settings, tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")
