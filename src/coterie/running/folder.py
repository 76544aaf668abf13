"""The run folder: the files of a run, safe if the process is killed or the disk is full.

    run.json            everything needed to run it again, and the numeric plan
    names.json          names of the clients
    rounds.jsonl        a line per round
    timings.jsonl       seconds per round (apart, so that all else is the same in every run)
    checkpoint/         the last two states, checksummed
    final/              state, models and groups, with a manifest
    summary.json        the figures

A file is written under another name, forced to disk and renamed. A checkpoint is valid as soon as
its manifest exists.
"""

import contextlib
import errno
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core import wire
from coterie.core.algorithm import Algorithm, state_type
from coterie.core.errors import ConfigError, DataError
from coterie.core.memory import Memory
from coterie.core.tree import Tree

FORMAT = 1
NAMES = "names.json"
SEGMENTS = 8  # files of client memory before they are written anew as one


def write(path: Path, data: bytes) -> str:
    """Write a file whole or not at all; its checksum."""
    aside = path.with_name(path.name + ".part")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{path.parent}: the disk is full, so {path.name} could not be written. Earlier "
                "checkpoints are intact. Free some space, then resume."
            ) from error
        raise
    return hashlib.sha256(data).hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: Any) -> bytes:
    """Indented JSON; equal content gives equal bytes."""
    return (json.dumps(value, indent=2, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def no_nan(value: Any) -> Any:
    """NaN and infinity as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: no_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [no_nan(part) for part in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


class Checkpoint(NamedTuple):
    """What is known after some rounds."""

    done: int  # rounds
    state: Any
    traffic: Any
    memory: Memory
    held_out: Any  # losses on held-out rows so far; empty if there are none
    best: Any  # state and memory after the best round; None if they are not kept


class RunFolder:
    """Reads and writes a run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoint"
        self.final = self.path / "final"

    def create(self, description: dict[str, Any]) -> None:
        """Start a run; an existing one is never overwritten."""
        # What a run leaves that was killed before its first file stands is no run.
        begun = [self.path / "run.json.part"]
        if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - set(begun)):
            raise ConfigError(
                f"Run folder {self.path} exists and is not empty. Continue it with "
                f"`coterie resume {self.path}`, or choose another folder."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.describe(description)

    def describe(self, description: dict[str, Any]) -> None:
        """Write run.json."""
        write(self.path / "run.json", to_json({"format": FORMAT, **description}))

    def name_clients(self, names: Sequence[str]) -> None:
        """Write names.json, so that an unfinished run can be shown with the names of clients."""
        write(self.path / NAMES, to_json(list(names)))

    def description(self) -> dict[str, Any]:
        """Read run.json."""
        return read_json(self.path / "run.json")

    # rounds

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to a log."""
        text = json.dumps(no_nan(line), default=_plain) + "\n"
        try:
            with open(self.path / name, "a") as file:
                file.write(text)
                file.flush()
        except OSError as error:
            raise DataError(
                f"{self.path}: {name} could not be written ({error.strerror}). Earlier checkpoints "
                "are intact. Free some space, then resume."
            ) from error

    def lines(self, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
        """The complete lines of a log; an incomplete last line is ignored."""
        path = self.path / name
        if not path.exists():
            return []
        out = []
        for text in path.read_text().splitlines():
            try:
                out.append(json.loads(text))
            except ValueError:
                break
        return out

    def trim(self, rounds: int) -> None:
        """Remove lines after a round; the run will write them again."""
        for name in ("rounds.jsonl", "timings.jsonl"):
            kept = [line for line in self.lines(name) if line["round"] <= rounds]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            if (self.path / name).exists():
                write(self.path / name, text.encode())

    # checkpoints

    def save(
        self,
        round: int,
        state: Tree,
        traffic: Tree,
        memory: Memory,
        held_out: Tree | None = None,
        best: tuple[int, Tree] | None = None,
    ) -> None:
        """Save a checkpoint; of client memory only what has changed since the last one.

        `held_out`: losses on held-out rows so far. `best`: the best round, and the state and
        memory after it.
        """
        self.checkpoints.mkdir(exist_ok=True)
        name = f"state-{round:06d}.safetensors"
        content = {"state": state, "traffic": traffic, "held_out": held_out or {}}
        files = {name: write(self.checkpoints / name, wire.dump(content))}
        latest = self._manifests()[-1:]
        kept = None
        if best is not None:
            kept = f"best-{best[0]:06d}.safetensors"
            known = latest[0][1]["files"].get(kept) if latest else None
            files[kept] = known or write(self.checkpoints / kept, wire.dump(best[1]))
        held = latest[0][1]["memory"] if latest else {}
        if memory.unsaved:
            changed = memory.unsaved
            if len(set(held.values())) >= SEGMENTS:
                changed = {client for client, tree in memory.committed.items() if tree}
            segment = f"memory-{round:06d}.safetensors"
            rows = {str(client): memory.committed[client] for client in sorted(changed)}
            files[segment] = write(self.checkpoints / segment, wire.dump(rows))
            held = {**held, **dict.fromkeys(rows, segment)}
        old = latest[0][1]["files"] if latest else {}
        files |= {file: old[file] for file in set(held.values()) - set(files)}
        manifest = {"round": round, "state": name, "memory": held, "best": kept, "files": files}
        manifest["sha256"] = _checksum(manifest)
        write(self.checkpoints / f"{round:06d}.json", to_json(manifest))
        memory.unsaved = set()
        self._sweep()

    def _manifests(self) -> list[tuple[Path, dict[str, Any]]]:
        """Whole manifests, oldest first."""
        found = []
        for path in sorted(self.checkpoints.glob("[0-9]*.json")):
            try:
                manifest = read_json(path)
                whole = manifest.get("sha256") == _checksum(manifest)
            except (DataError, OSError):
                whole = False
            if whole:
                found.append((path, manifest))
            else:
                warnings.warn(f"{path} is damaged and is not used.", stacklevel=3)
        return found

    def _sweep(self) -> None:
        """Keep the last two checkpoints and the files they name."""
        keep = self._manifests()[-2:]
        names = {path.name for path, _ in keep}
        names |= {file for _, manifest in keep for file in manifest["files"]}
        for path in self.checkpoints.iterdir():
            if path.name not in names:
                path.unlink()

    def load(self, algorithm: Algorithm) -> "Checkpoint":
        """The newest whole checkpoint."""
        for path, manifest in reversed(self._manifests()):
            try:
                return self._read(manifest, algorithm)
            except (DataError, OSError) as error:
                warnings.warn(
                    f"{path}: this checkpoint is damaged ({error}). An earlier one is used.",
                    stacklevel=2,
                )
        raise DataError(
            f"{self.checkpoints}: no undamaged checkpoint was found. Start the run again with "
            f"`coterie run {self.path / 'run.json'}`."
        )

    def _read(self, manifest: dict[str, Any], algorithm: Algorithm) -> "Checkpoint":
        content = {}
        for name, checksum in manifest["files"].items():
            data = (self.checkpoints / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != checksum:
                raise DataError(f"{name} does not have the checksum it was saved with")
            content[name] = data
        like = {"state": state_type(algorithm)}
        saved = wire.load(content[manifest["state"]], like=like)
        memory = Memory()
        segments = {name: wire.load(content[name]) for name in set(manifest["memory"].values())}
        for client, segment in manifest["memory"].items():
            memory.committed[int(client)] = segments[segment][client]
        best = manifest.get("best")
        return Checkpoint(
            manifest["round"],
            saved["state"],
            saved["traffic"],
            memory,
            saved.get("held_out") or {},
            None if best is None else wire.load(content[best], like=like),
        )

    # the end

    def finish(self, files: dict[str, bytes], summary: dict[str, Any]) -> None:
        """Write final/ and summary.json; the summary last, as the sign that all is there."""
        self.final.mkdir(exist_ok=True)
        manifest = {name: write(self.final / name, data) for name, data in sorted(files.items())}
        write(self.final / "manifest.json", to_json({"format": FORMAT, "files": manifest}))
        write(self.path / "summary.json", to_json(no_nan(summary)))

    @property
    def whole(self) -> Path:
        """The folder to resume: for an attempt or a baseline, the folder that contains it."""
        for above in self.path.parents:
            if above.name in ("restarts", "baselines", "replicates"):
                return RunFolder(above.parent).whole
        return self.path

    def check_finished(self) -> None:
        """Refuse a folder without a run, or with a run that is not finished."""
        self.description()  # says so if this is no run folder
        if not (self.path / "summary.json").exists():
            raise DataError(
                f"{self.path}: this run is not finished. Continue it with "
                f"`coterie resume {self.whole}`."
            )

    def final_files(self) -> dict[str, bytes]:
        """The files of final/, each checked against the manifest."""
        self.check_finished()
        manifest = read_json(self.final / "manifest.json")
        out = {}
        for name, checksum in manifest["files"].items():
            path = self.final / name
            data = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(data).hexdigest() != checksum:
                raise DataError(f"{path} is missing or damaged. Resume the run, or run it again.")
            out[name] = data
        return out

    def summary(self) -> dict[str, Any]:
        """Read summary.json."""
        self.check_finished()
        return read_json(self.path / "summary.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, or a clear error."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path.parent} is not a run folder: it has no {path.name}.") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it does not hold a JSON object.")
    return content


def _checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
