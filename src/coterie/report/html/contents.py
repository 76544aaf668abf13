"""What a page tells about a run, read from its folder or from a fitted federation."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.report.record import SPELLED, Record
from coterie.report.verdict import Verdict
from coterie.running.build import Settings
from coterie.running.files import JSON as JSON_BYTES
from coterie.running.files import blame, parse_json, read
from coterie.running.folder import NAMES, RunFolder

OTHERS = {"fedavg": "one", "local_only": "alone"}
"""Methods that a run is compared with, and the names of these ways of training."""
JSON = ("clients", "groups", "verdict", "data", "held_out", "why", "curves")


@dataclass(frozen=True)
class Contents:
    """A run as plain data; what an unfinished run does not have yet is empty."""

    name: str
    description: dict[str, Any]
    rounds: list[dict[str, Any]]
    others: dict[str, list[dict[str, Any]]]  # rounds of "one" and "alone"
    summary: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)  # content of the JSON files of final/
    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each round
    quiet: float | None = None  # seconds since the folder changed; None: not read from a folder
    waiting: list[tuple[str, float]] = field(default_factory=list)  # real clients, seconds

    @property
    def finished(self) -> bool:
        """Whether the run has its final results."""
        return bool(self.summary)

    @property
    def method(self) -> str:
        """The method as people spell it."""
        name = str(self.description.get("algorithm", {}).get("name", "own method"))
        return SPELLED.get(name, name)

    @property
    def wanted(self) -> int:
        """Number of rounds of each training."""
        return int(self.description.get("run", {}).get("rounds", Settings.rounds))

    @property
    def comparable(self) -> bool:
        """Whether the method trains a network as one model for all and training alone do."""
        name = self.description.get("algorithm", {}).get("name")
        return {"model", "local"} <= set(self.description) and name not in OTHERS

    @property
    def compares(self) -> bool:
        """Whether one model for all and training alone are trained, too."""
        wanted = self.description.get("run", {}).get("compare", False)
        return bool(wanted) and self.comparable

    @property
    def comparing(self) -> bool:
        """Whether the run is done, and those that it is compared with are not."""
        return self.finished and self.compares and self.verdict is None

    @property
    def clients(self) -> list[dict[str, Any]]:
        """A row per client."""
        return list(self.final.get("clients", {}).get("clients", []))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """A card per group."""
        return list(self.final.get("groups", {}).get("groups", []))

    @property
    def data(self) -> dict[str, Any]:
        """The data card."""
        return dict(self.final.get("data", {}))

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, if other ways of training were compared."""
        found = self.final.get("verdict")
        return None if found is None else Verdict.of(found)

    @property
    def record(self) -> Record:
        """The rounds, as pictures of journeys want them."""
        return Record(Path(self.name), self.method, self.rounds, self.data.get("truth"))


def read_contents(path: str | Path) -> Contents:
    """What the folder of a run tells, finished or not."""
    folder = RunFolder(path)
    description = folder.description()
    finished = (folder.path / "summary.json").exists()
    final = _read_final(folder.final_files()) if finished else {}
    others = {
        way: RunFolder(folder.path / "baselines" / method).lines() for method, way in OTHERS.items()
    }
    whole = folder.path.resolve()
    with blame(folder.path):
        return Contents(
            whole.parent.name if whole.name == "run" else whole.name,  # of a deployment
            description,
            folder.lines(),
            {way: lines for way, lines in others.items() if lines} or _curves(final),
            folder.summary() if finished else {},
            final,
            _names(folder, final),
            [float(line.get("seconds", 0)) for line in folder.lines("timings.jsonl")],
            _quiet(folder.path),
            [] if finished else _waiting(whole),
        )


def contents_of(
    name: str,
    description: dict[str, Any],
    rounds: list[dict[str, Any]],
    summary: dict[str, Any],
    files: dict[str, bytes],
) -> Contents:
    """What a fitted federation tells."""
    final = _read_final(files)
    names = list(final["data"]["names"])
    return Contents(name, description, rounds, _curves(final), summary, final, names)


def _read_final(files: dict[str, bytes]) -> dict[str, Any]:
    """The content of the JSON files of final/."""
    found = {}
    for name in [name for name in JSON if f"{name}.json" in files]:
        source = f"final/{name}.json"
        found[name] = parse_json(files[f"{name}.json"], source)
        if not isinstance(found[name], dict):
            raise DataError(f"{source} is damaged: it does not hold a JSON object.")
    return found


def _curves(final: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {OTHERS[method]: lines for method, lines in final.get("curves", {}).items()}


def _names(folder: RunFolder, final: dict[str, Any]) -> list[str]:
    """Names of the clients; a run writes them when it begins."""
    if "data" in final:
        return [str(name) for name in final["data"]["names"]]
    try:
        found = parse_json(read(folder.path / NAMES, JSON_BYTES), NAMES)
    except (OSError, DataError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _quiet(path: Path) -> float:
    """Seconds since a log of the run, or of the runs it is compared with, grew."""
    logs = [path / "run.json", *path.rglob("rounds.jsonl"), path / "summary.json"]
    times = [log.stat().st_mtime for log in logs if log.exists()]
    return max(0.0, time.time() - max(times)) if times else 0.0


def _waiting(path: Path) -> list[tuple[str, float]]:
    """Clients that a deployment waits for, and for how many seconds; it writes them beside it."""
    try:
        live = path.with_name(path.name + ".live.json")
        found = parse_json(read(live, JSON_BYTES), live.name)
        since = {str(one["client"]): float(one["since"]) for one in found}
    except (
        DataError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
    ):  # a simulation, or it is being written
        return []
    return sorted(((name, time.time() - at) for name, at in since.items()), key=lambda one: -one[1])
