"""Trackers, each with the real package."""

import sys
import time

import numpy as np
import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import ConfigError
from coterie.data import blobs
from coterie.running.trackers import MLflow, TensorBoard, WandB, choose_tracker


def fit(track, **options):
    data = blobs(n_groups=2, clients_per_group=2, n=12)
    return coterie.fit(data, "ifca", model="linear", n_groups=2, rounds=2, track=track, **options)


class Heard:
    """A user's own tracker."""

    def __init__(self) -> None:
        self.said: list[tuple] = []

    def start(self, run):
        self.said.append(("start", run["algorithm"]["name"]))

    def round(self, training, line):
        self.said.append((training, line["round"], line["loss"]))

    def finish(self, summary):
        self.said.append(("finish", summary and summary["rounds"]))


def test_an_own_tracker_hears_everything_in_order():
    tracker = Heard()
    found = fit(tracker)
    assert [line[0] for line in tracker.said] == [
        "start",
        *["ifca"] * 2,
        *["local_only"] * 2,
        *["fedavg"] * 2,
        "finish",
    ]
    assert tracker.said[2][1:] == (2, found.rounds[-1]["loss"])
    assert tracker.said[-1] == ("finish", 2)


def test_replicates_are_told_apart():
    tracker = Heard()
    fit(tracker, settings={"replicates": 2})
    assert {line[0] for line in tracker.said} >= {"ifca", "ifca (2)", "fedavg", "fedavg (2)"}


def test_a_tracker_hears_that_a_run_was_stopped():
    class Stops(Heard):
        def round(self, training, line):
            raise KeyboardInterrupt

    tracker = Stops()
    with pytest.raises(KeyboardInterrupt):
        fit(tracker)
    assert tracker.said[-1] == ("finish", None)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = fit(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [event.value for event in events.Scalars("ifca/loss")]
    assert losses == pytest.approx([line["loss"] for line in found.rounds])
    assert [event.step for event in events.Scalars("fedavg/loss")] == [1, 2]
    assert "summary/accuracy/mean" in events.Tags()["scalars"]


def test_mlflow_reads_what_was_written(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database
    uri = (tmp_path / "store").as_uri()
    found = fit(MLflow("trial", uri))
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.name"] == "ifca"
    history = client.get_metric_history(run.info.run_id, "ifca/loss")
    assert [metric.value for metric in history] == [line["loss"] for line in found.rounds]


def test_wandb_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit(WandB("trial", tmp_path))
    [log] = tmp_path.rglob("run-*.wandb")
    end = time.monotonic() + 20
    while b"fedavg/loss" not in (content := log.read_bytes()) and time.monotonic() < end:
        time.sleep(0.1)  # another process of wandb writes the file, shortly after the run has ended
    for word in (b"ifca/loss", b"fedavg/loss", b"algorithm.name"):
        assert word in content


def test_both_doors_take_the_name_of_a_tracker(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        x = np.random.default_rng(i).normal(size=(10, 2)).round(3)
        lines = [f"{a},{b},{int(a > 0)}" for a, b in x]
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{i}.csv").write_text("\n".join(["a,b,y", *lines]))
    words = "run --data sites --label y --algorithm fedavg --set run.rounds=1 --track tensorboard"
    monkeypatch.setattr(sys, "argv", ["coterie", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert list((tmp_path / "tensorboard").glob("events*"))


class Stops:
    """Progress of a run that is stopped after its first round."""

    def start(self, title, rounds, done):
        self.rounds = 0

    def round(self, line):
        self.rounds += 1
        if self.rounds > 1:
            raise KeyboardInterrupt

    def say(self, text):
        pass

    def end(self):
        pass


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped in its second round."""
    sites = tmp_path / "sites"
    sites.mkdir()
    for i in range(2):
        x = np.random.default_rng(i).normal(size=(10, 2)).round(3)
        lines = [f"{a},{b},{int(a > 0)}" for a, b in x]
        (sites / f"{i}.csv").write_text("\n".join(["a,b,y", *lines]))
    data = coterie.from_folder(sites, "y")
    with pytest.raises(KeyboardInterrupt):
        coterie.fit(data, "fedavg", rounds=3, progress=Stops(), out=tmp_path / "run")
    return tmp_path / "run"


def test_a_tracker_hears_the_rest_of_a_run_that_is_continued(stopped):
    tracker = Heard()
    found = coterie.resume(stopped, track=tracker)
    assert tracker.said[0] == ("start", "fedavg")
    heard = [line for line in tracker.said if line[0] == "fedavg"]
    assert heard[-1] == ("fedavg", 3, found.rounds[-1]["loss"])
    assert [line[1] for line in heard] == [*range(4 - len(heard), 4)]
    assert tracker.said[-1] == ("finish", 3)


def test_tensorboard_reads_a_run_that_was_continued(stopped, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", "resume", str(stopped), "--track", "tensorboard"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    last = events.Scalars("fedavg/loss")[-1]
    assert (last.step, last.value) == (3, pytest.approx(coterie.load(stopped).rounds[-1]["loss"]))


def test_mlflow_reads_a_run_that_was_continued(stopped, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    found = coterie.resume(stopped, track=MLflow("trial", uri))
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert run.info.status == "FINISHED"
    last = client.get_metric_history(run.info.run_id, "fedavg/loss")[-1]
    assert (last.step, last.value) == (3, found.rounds[-1]["loss"])


def test_wandb_writes_a_run_that_was_continued(stopped, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    coterie.resume(stopped, track=WandB("trial", tmp_path / "wandb"))
    [log] = (tmp_path / "wandb").rglob("run-*.wandb")
    end = time.monotonic() + 20
    while b"fedavg/loss" not in log.read_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    assert b"fedavg/loss" in log.read_bytes()


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'mlflow'"):
        choose_tracker("mlflo")
    assert choose_tracker(None) is None
