"""The run folder: the files of a run, safe if the process is killed or the disk is full.

    run.json            everything needed to run it again, and the numeric plan
    names.json          names of the clients
    rounds.jsonl        a line per round
    timings.jsonl       seconds per round (apart, so that all else is the same in every run)
    record.jsonl        what happened, in a chain of hashes (see `running.record`)
    checkpoint/         the last two states, checksummed
    final/              state, models and groups, with a manifest
    summary.json        the figures

A file is written under another name, forced to disk and renamed. A checkpoint is valid as soon as
its manifest exists. A folder may come from a stranger: see `running.files`.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core import wire
from coterie.core.algorithm import Algorithm, state_type
from coterie.core.errors import ConfigError, DataError
from coterie.core.memory import Memory
from coterie.core.tree import Tree
from coterie.running import record
from coterie.running.files import (
    JSON,
    LOG,
    RUN_FILE,
    append,
    blame,
    inside,
    locked,
    make_folder,
    no_nan,
    parse_json,
    plain,
    read,
    read_json,
    refuse_links,
    sync,
    to_json,
    write,
)

__all__ = ["RunFolder", "no_nan", "read_json", "to_json", "write"]

FORMAT = 1
NAMES = "names.json"
SEGMENTS = 8  # files of client memory before they are written anew as one
PARTS = ("restarts", "baselines", "replicates")  # folders of runs inside a run folder
NEEDED = ("state.safetensors", "data.json", "clients.json", "groups.json")  # of final/
RECORD = "record.jsonl"
_OURS = re.compile(r"(\d+\.json|(state|memory|best)-\d+\.safetensors)(\.part)?")


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

    def refuse_existing(self) -> None:
        """Refuse a folder with something in it; an existing run is never overwritten."""
        # What a run leaves that ended before run.json, its last file, is no run.
        files = (RECORD, NAMES, "run.json")
        begun = [self.path / (name + end) for name in files for end in ("", ".part")]
        begun.remove(self.path / "run.json")
        if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - set(begun)):
            raise ConfigError(
                f"Run folder {self.path} exists and is not empty. Continue it with "
                f"`coterie resume {self.path}`, or choose another folder."
            )

    def create(self, description: dict[str, Any], names: Sequence[str] = ()) -> None:
        """Start a run."""
        self.refuse_existing()
        whole = self.whole
        refuse_links(whole, self.path)
        for part in reversed([self.path, *self.path.parents]):
            if part == whole or whole in part.parents:
                make_folder(part)
        (self.path / RECORD).unlink(missing_ok=True)
        entry: dict[str, Any] = {"run": record.digest(identity(description)), "format": FORMAT}
        if names:
            self.name_clients(names)
            entry["names"] = record.digest(list(names))
        self.record("begun", **entry)
        self.describe(description)

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from writing to the run, also to the runs it is part of."""
        whole = self.whole
        if whole.exists() and not whole.is_dir():
            raise ConfigError(f"{whole} must be a folder. It is a file. Choose another.")
        make_folder(whole)
        return locked(whole)

    def describe(self, description: dict[str, Any]) -> None:
        """Write run.json."""
        write(self.path / "run.json", to_json({"format": FORMAT, **description}))

    def name_clients(self, names: Sequence[str]) -> None:
        """Write names.json, so that an unfinished run can be shown with the names of clients."""
        write(self.path / NAMES, to_json(list(names)))

    def names(self) -> Any:
        """The content of names.json; None without it."""
        try:
            return parse_json(read(self.path / NAMES, JSON), str(self.path / NAMES))
        except FileNotFoundError:
            return None

    def description(self) -> dict[str, Any]:
        """Read run.json."""
        refuse_links(self.whole, self.path)
        found = read_json(self.path / "run.json")
        if found.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{self.path / 'run.json'} must have format {FORMAT}. Got "
                f"{str(found['format'])[:20]}, of another version of Coterie. Use that version."
            )
        return found

    # what happened

    def record(self, kind: str, **data: Any) -> None:
        """Add an entry to the record, such as a fault, a policy or a spent budget."""
        record.add(self.path / RECORD, kind, **data)

    # rounds

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to a log."""
        append(self.path / name, json.dumps(no_nan(line), default=plain) + "\n")

    def lines(self, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
        """The lines of a log; a last line that is incomplete is ignored."""
        path = self.path / name
        refuse_links(self.whole, self.path)
        try:
            data = read(path, LOG)
        except FileNotFoundError:
            return []
        out = []
        for number, text in enumerate(data.split(b"\n")[:-1], start=1):
            source = f"{path}, line {number},"
            if len(text) > RUN_FILE:
                raise DataError(f"{source} is damaged: it is too long.")
            line = parse_json(text, source)
            if not isinstance(line, dict) or type(line.get("round")) is not int:
                raise DataError(
                    f"{source} is damaged: it does not hold a round. Restore the file from a copy, "
                    f"or start the run again with `coterie run {self.path / 'run.json'}`."
                )
            out.append(line)
        return out

    def trim(self, rounds: int) -> None:
        """Remove lines after a round; the run will write them again."""
        for name in ("rounds.jsonl", "timings.jsonl"):
            kept = [line for line in self.lines(name) if line["round"] <= rounds]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            there = [line["round"] for line in kept]
            if name == "rounds.jsonl" and there != [*range(1, rounds + 1)]:
                raise DataError(
                    f"{self.path / name} is damaged: it must have a line for each of the first "
                    f"{rounds} rounds. Restore it from a copy, or start the run again with "
                    f"`coterie run {self.path / 'run.json'}`."
                )
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
        refuse_links(self.path, self.checkpoints)
        make_folder(self.checkpoints)
        name = f"state-{round:06d}.safetensors"
        content = {"state": state, "traffic": traffic, "held_out": held_out or {}}
        files = {name: write(self.checkpoints / name, wire.dump(content))}
        latest = self.manifests()[-1:]
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
        self.record("saved", round=round, files=files)
        for log in ("rounds.jsonl", RECORD):
            sync(self.path / log)
        write(self.checkpoints / f"{round:06d}.json", to_json(manifest))
        memory.unsaved = set()
        self._sweep()

    def manifests(self) -> list[tuple[Path, dict[str, Any]]]:
        """Whole manifests, oldest first."""
        refuse_links(self.path, self.checkpoints)
        found = []
        for path in sorted(self.checkpoints.glob("[0-9]*.json")):
            try:
                manifest = read_json(path, JSON)
                whole = manifest.get("sha256") == _checksum(manifest)
                _check_manifest(manifest)
            except (DataError, OSError, TypeError, ValueError):
                whole = False
            if whole:
                found.append((path, manifest))
            else:
                warnings.warn(f"{path} is damaged and is not used.", stacklevel=3)
        return found

    def _sweep(self) -> None:
        """Keep the last two checkpoints and the files they name."""
        keep = self.manifests()[-2:]
        names = {path.name for path, _ in keep}
        names |= {file for _, manifest in keep for file in manifest["files"]}
        for path in self.checkpoints.iterdir():
            if path.name not in names and _OURS.fullmatch(path.name) and not path.is_dir():
                path.unlink()

    def load(self, algorithm: Algorithm) -> "Checkpoint":
        """The newest whole checkpoint."""
        for path, manifest in reversed(self.manifests()):
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
            data = read(inside(self.checkpoints, name))
            if hashlib.sha256(data).hexdigest() != checksum:
                raise DataError(f"{name} does not have the checksum it was saved with")
            content[name] = data
        with blame(self.checkpoints / manifest["state"]):
            return self._parse(manifest, content, algorithm)

    def _parse(
        self, manifest: dict[str, Any], content: dict[str, bytes], algorithm: Algorithm
    ) -> "Checkpoint":
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
        refuse_links(self.path, self.final)
        make_folder(self.final)
        manifest = {name: write(self.final / name, data) for name, data in sorted(files.items())}
        write(self.final / "manifest.json", to_json({"format": FORMAT, "files": manifest}))
        end = write(self.path / "summary.json", to_json(no_nan(summary)))
        self.record("finished", files=manifest, summary=end)

    @property
    def whole(self) -> Path:
        """The folder to resume: for an attempt or a baseline, the folder that contains it."""
        for above in self.path.parents:
            if above.name in PARTS and (above.parent / "run.json").exists():
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
        refuse_links(self.path, self.final)
        path = self.final / "manifest.json"
        files = read_json(path, JSON).get("files")
        if not isinstance(files, dict) or (gone := [name for name in NEEDED if name not in files]):
            what = "it names no files" if not isinstance(files, dict) else f"it lacks {gone[0]}"
            raise DataError(f"{path} is damaged: {what}. Resume the run, or run it again.")
        out = {}
        for name, checksum in files.items():
            path = inside(self.final, name)
            data = b""
            with suppress(FileNotFoundError):
                data = read(path, JSON if name.endswith(".json") else None)
            if hashlib.sha256(data).hexdigest() != checksum:
                raise DataError(f"{path} is missing or damaged. Resume the run, or run it again.")
            out[name] = data
        return out

    def summary(self) -> dict[str, Any]:
        """Read summary.json."""
        self.check_finished()
        return read_json(self.path / "summary.json", JSON)


def read_rows(files: dict[str, bytes], name: str) -> list[dict[str, Any]]:
    """The rows of groups.json or clients.json among the files of final/."""
    content = parse_json(files[f"{name}.json"], f"final/{name}.json")
    rows = content.get(name) if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"final/{name}.json is damaged: it must hold a list of {name}.")
    if name == "clients" and any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(f"final/{name}.json is damaged: its rows must have the same columns.")
    return rows


def identity(description: dict[str, Any]) -> dict[str, Any]:
    """What a run is, without how it is computed."""
    return {key: value for key, value in description.items() if key not in ("plan", "format")}


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Refuse a manifest that is not one, whatever its checksum."""
    files, memory, best = manifest.get("files"), manifest.get("memory"), manifest.get("best")
    if not (
        type(manifest.get("round")) is int
        and isinstance(files, dict)
        and isinstance(memory, dict)
        and all(isinstance(name, str) for name in (*memory.values(), *files.values()))
        and {manifest.get("state"), *memory.values(), *([] if best is None else [best])}
        <= set(files)
        and all(client.isdecimal() for client in memory)
    ):
        raise DataError("a manifest must name the files of a checkpoint")


def _checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
