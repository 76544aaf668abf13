"""Log a run to your own tools: TensorBoard, MLflow, Weights & Biases, or anything else.

A tracker has three methods. A run calls `start` once, `round` after every round of every training
(the run itself, and those it is compared with), and `finish` once, also if the run is stopped. An
own tracker is a class with these methods:

    class Print:
        def start(self, run):
            print(run["algorithm"])

        def round(self, training, line):
            print(training, line["round"], line.get("loss"))

        def finish(self, summary):
            print("stopped" if summary is None else summary["verdict"])
"""

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from coterie.core.errors import ConfigError, unknown
from coterie.running.progress import Progress


class Tracker(Protocol):
    """Receives what a run does."""

    def start(self, run: dict[str, Any]) -> None:
        """The run as plain data, as in run.json."""

    def round(self, training: str, line: dict[str, Any]) -> None:
        """A round of a training, as in rounds.jsonl; `training` names its method."""

    def finish(self, summary: dict[str, Any] | None) -> None:
        """The main figures, as in summary.json; None if the run was stopped."""


def numbers(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in plain data, with their places; lists are left out.

    >>> dict(numbers({"loss": 0.5, "accuracy": {"mean": 0.9}, "sizes": [3, 4], "stable": True}))
    {'loss': 0.5, 'accuracy/mean': 0.9, 'stable': 1.0}
    """
    for name, value in content.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{above}{name}", float(value)


def options(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a run, with their places; the numeric plan is left out."""
    for name, value in content.items():
        if isinstance(value, dict) and name != "plan":
            yield from options(value, f"{above}{name}.")
        elif not isinstance(value, dict | list):
            yield f"{above}{name}", value


class TensorBoard:
    """Write event files for TensorBoard.

    Parameters
    ----------
    folder
        Where to write. Show it with: tensorboard --logdir FOLDER
    """

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        _need("tensorboard", "TensorBoard")
        self.folder = Path(folder)

    def start(self, run: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(self.folder))
        lines = [f"    {name} = {value}" for name, value in options(run)]
        self.writer.add_text("run", "\n".join(lines))

    def round(self, training: str, line: dict[str, Any]) -> None:
        for name, value in numbers(line):
            if name != "round":
                self.writer.add_scalar(f"{training}/{name}", value, line["round"])

    def finish(self, summary: dict[str, Any] | None) -> None:
        for name, value in numbers(summary or {}):
            self.writer.add_scalar(f"summary/{name}", value)
        self.writer.close()


class MLflow:
    """Log a run of MLflow.

    Parameters
    ----------
    experiment
        Name of the experiment.
    uri
        Address or folder of the tracking server. None: what MLflow's own settings say.
    """

    def __init__(self, experiment: str = "coterie", uri: str | None = None) -> None:
        _need("mlflow", "MLflow")
        self.experiment, self.uri = experiment, uri

    def start(self, run: dict[str, Any]) -> None:
        import mlflow

        self.client: Any = mlflow.MlflowClient(self.uri)
        found = self.client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else self.client.create_experiment(self.experiment)
        self.run_id = self.client.create_run(place).info.run_id
        for name, value in options(run):
            self.client.log_param(self.run_id, _plain_name(name), str(value)[:500])

    def round(self, training: str, line: dict[str, Any]) -> None:
        for name, value in numbers(line):
            if name != "round":
                place = _plain_name(f"{training}/{name}")
                self.client.log_metric(self.run_id, place, value, step=line["round"])

    def finish(self, summary: dict[str, Any] | None) -> None:
        for name, value in numbers(summary or {}):
            self.client.log_metric(self.run_id, _plain_name(f"summary/{name}"), value)
        status = "KILLED" if summary is None else "FINISHED"
        self.client.set_terminated(self.run_id, status)


class WandB:
    """Log a run of Weights & Biases.

    Parameters
    ----------
    project
        Name of the project.
    folder
        Where files are written.
    mode
        "offline" writes files and sends nothing (`wandb sync` sends them later); "online" sends.
    """

    def __init__(
        self, project: str = "coterie", folder: str | Path = "wandb", mode: str = "offline"
    ) -> None:
        _need("wandb", "Weights & Biases")
        self.project, self.folder, self.mode = project, Path(folder), mode

    def start(self, run: dict[str, Any]) -> None:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        mode: Any = self.mode
        self.run: Any = wandb.init(
            project=self.project, dir=str(self.folder), mode=mode, config=dict(options(run))
        )

    def round(self, training: str, line: dict[str, Any]) -> None:
        found = {f"{training}/{name}": value for name, value in numbers(line)}
        self.run.define_metric(f"{training}/*", step_metric=f"{training}/round")
        self.run.log(found)

    def finish(self, summary: dict[str, Any] | None) -> None:
        self.run.summary.update(dict(numbers(summary or {})))
        self.run.finish(exit_code=1 if summary is None else 0)


TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
"""Trackers by name, for the command line."""


def choose_tracker(tracker: "str | Tracker | None") -> "Tracker | None":
    """A tracker by name, or one that is given."""
    if not isinstance(tracker, str):
        return tracker
    if tracker not in TRACKERS:
        raise ConfigError(unknown("tracker", tracker, TRACKERS))
    chosen: Tracker = TRACKERS[tracker]()
    return chosen


class Tracked:
    """Progress that a tracker hears of, too."""

    def __init__(self, shown: Progress, tracker: Tracker) -> None:
        self.shown, self.tracker = shown, tracker
        self.training, self.seen = "", dict[str, int]()

    def start(self, title: str, rounds: int, done: int) -> None:
        self.seen[title] = self.seen.get(title, 0) + 1
        again = self.seen[title]
        self.training = title if again == 1 else f"{title} ({again})"  # replicates
        self.shown.start(title, rounds, done)

    def round(self, line: dict[str, Any]) -> None:
        self.tracker.round(self.training, line)
        self.shown.round(line)

    def say(self, text: str) -> None:
        self.shown.say(text)

    def end(self) -> None:
        self.shown.end()


@contextmanager
def tracked(
    tracker: "Tracker | None", shown: Progress, run: dict[str, Any]
) -> Iterator[tuple[Progress, dict[str, Any]]]:
    """Progress for a run, and a dict to fill with its summary; the tracker hears of all of it."""
    summary: dict[str, Any] = {}
    if tracker is None:
        yield shown, summary
        return
    tracker.start(run)
    try:
        yield Tracked(shown, tracker), summary
    finally:
        tracker.finish(summary or None)


def _need(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{name}: the package {package} is needed and not installed. Install it with: pip "
            f"install 'coterie[{package}]'"
        )


def _plain_name(name: str) -> str:
    """A name that MLflow accepts."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
