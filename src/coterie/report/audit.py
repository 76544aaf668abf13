"""Audit a run folder: verify the chain of its record, and replay who was in which group when.

The record is compared with the other files of the folder. Nothing that the folder names is
imported, and nothing is trained.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core import wire
from coterie.core.errors import CoterieError, DataError
from coterie.running import record
from coterie.running.files import blame, read
from coterie.running.folder import PARTS, RECORD, RunFolder, identity


@dataclass
class Audit:
    """What an audit of one folder found."""

    folder: Path
    entries: int = 0
    head: str = record.FIRST  # hash of the last entry
    rounds: int = 0  # of the record
    repeated: int = 0  # rounds that were computed again after the run had stopped
    moves: dict[int, int] = field(default_factory=dict)  # clients that moved, by round
    assignment: dict[int, int] = field(default_factory=dict)  # as replayed
    kinds: dict[str, int] = field(default_factory=dict)  # entries of each kind
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    parts: "list[Audit]" = field(default_factory=list)  # baselines, replicates, attempts

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong, in the parts neither."""
        return not self.faults and all(part.passed for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        names = ("entries", "head", "rounds", "repeated", "moves", "kinds", "notes", "faults")
        plain = {"folder": str(self.folder), "passed": self.passed}
        plain |= {name: getattr(self, name) for name in names}
        return plain | {"parts": [part.to_json() for part in self.parts]}

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.entries} entries, {self.rounds} rounds."]
        if self.repeated:
            lines.append(f"  {self.repeated} rounds were computed again after the run had stopped.")
        moved = sum(self.moves.values())
        if self.assignment:
            changed = [number for number, n in self.moves.items() if n]
            last = f", the last in round {max(changed)}" if changed else ""
            lines.append(
                f"  Replayed the groups of {len(self.assignment)} clients: {moved} moves{last}."
            )
        usual = {"begun", "plan", "started", "round", "saved", "placed", "finished"}
        other = [f"{kind} {n}" for kind, n in self.kinds.items() if kind not in usual]
        lines += [f"  Other entries: {', '.join(other)}."] if other else []
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  FAULT: {fault}" for fault in self.faults]
        lines.append(f"  Last hash: {self.head}")
        return "\n".join([*lines, *map(str, self.parts)])


def audit(path: str | Path, expect: str | None = None) -> Audit:
    """Verify the record of a run folder, and of the runs inside it.

    Parameters
    ----------
    expect
        The last hash of an earlier audit, kept elsewhere. The record must contain it: a person who
        can change a folder can also write a new chain, but not one with this hash.
    """
    folder = RunFolder(path)
    description = folder.description()
    found = Audit(folder.path)
    try:
        with blame(folder.path / RECORD):
            _replay(folder, description, found, expect)
    except CoterieError as error:
        found.faults.append(str(error))
    for part in PARTS:
        for inner in sorted((folder.path / part).rglob("run.json")):
            if RunFolder(inner.parent).whole == folder.whole and _is_part(folder.path, inner):
                found.parts.append(audit(inner.parent))
    return found


def _is_part(folder: Path, inner: Path) -> bool:
    """Whether a run lies directly in a folder, not in a part of it."""
    between = inner.parent.relative_to(folder).parts[1:-1]
    return not any(name in PARTS for name in between)


def _replay(
    folder: RunFolder, description: dict[str, Any], found: Audit, expect: str | None
) -> None:
    lines: dict[int, str] = {}  # hash of the line of each round
    saved: dict[str, str] = {}  # hash of each file of a checkpoint
    done: dict[str, Any] = {}  # the entry of the end
    undo: list[tuple[int, dict[int, int | None]]] = []  # groups before each round
    begun: dict[str, Any] = {}
    plan: Any = None
    hashes = set()
    kinds: Counter[str] = Counter()
    for entry in record.entries(folder.path / RECORD):
        found.entries, found.head = entry["entry"], entry["hash"]
        hashes.add(entry["hash"])
        kind = entry["kind"]
        kinds[kind] += 1
        moved = {int(client): int(group) for client, group in entry.get("moved", {}).items()}
        number = int(entry.get("round", 0))
        if kind == "begun":
            begun = entry
        elif kind == "plan":
            plan = entry["plan"]
        elif kind == "resumed":
            while undo and undo[-1][0] > number:
                _, before = undo.pop()
                _apply(found.assignment, before)
        elif kind == "round":
            _check_repeat(lines, number, entry["line"], found)
            lines[number] = entry["line"]
            found.moves[number] = len(moved)
        elif kind == "saved":
            saved |= entry["files"]
        elif kind == "finished":
            done = {**entry, "names": {*done.get("names", ()), *entry["files"]}}
        if moved:
            undo.append((number, {c: found.assignment.get(c) for c in moved}))
            found.assignment |= moved
            if kind == "placed":  # not part of the rounds, which go on from the state before
                placed = undo.pop()
                undo.append((10**9, placed[1]))
    found.rounds, found.kinds = len(lines), dict(kinds)
    if not found.entries:
        raise DataError(f"{folder.path} has no record ({RECORD}), so nothing can be verified.")
    if expect is not None and expect not in hashes:
        found.faults.append(f"The record does not contain the expected hash {expect}.")
    if "names" in begun and begun["names"] != record.digest(folder.names()):
        found.faults.append("names.json does not have the names the run began with.")
    if begun.get("run") != record.digest(identity(description)):
        found.faults.append("run.json is not the one the run began with.")
    if "plan" in description and not kinds["copied"] and plan != description["plan"]:
        found.faults.append("The numeric plan in run.json is not the one of the record.")
    _compare_lines(folder, lines, kinds, found)
    _compare_files(folder, saved, done, found)
    _compare_groups(folder, found)


def _apply(assignment: dict[int, int], before: dict[int, int | None]) -> None:
    for client, group in before.items():
        if group is None:
            assignment.pop(client, None)
        else:
            assignment[client] = group


def _check_repeat(lines: dict[int, str], number: int, line: str, found: Audit) -> None:
    if number in lines:
        found.repeated += 1
        if lines[number] != line:
            found.faults.append(f"Round {number} was computed twice, with different results.")


def _compare_lines(
    folder: RunFolder, lines: dict[int, str], kinds: Counter[str], found: Audit
) -> None:
    """Compare rounds.jsonl with the record."""
    there = folder.lines()
    unknown = [line["round"] for line in there if line["round"] not in lines]
    if unknown and kinds["copied"]:
        found.notes.append("A copy, made by Fitted.save: its rounds are not in the record.")
    elif unknown:
        found.faults.append(f"rounds.jsonl, round {unknown[0]}, is not in the record.")
    for line in there:
        if lines.get(line["round"], record.digest(line)) != record.digest(line):
            found.faults.append(f"rounds.jsonl, round {line['round']}, was changed.")
    gone = sorted(set(lines) - {line["round"] for line in there})
    if gone and (folder.path / "summary.json").exists():
        found.faults.append(f"rounds.jsonl, round {gone[0]}, was removed.")


def _compare_files(
    folder: RunFolder, saved: dict[str, str], done: dict[str, Any], found: Audit
) -> None:
    """Compare checkpoints and results with the record."""
    for path, manifest in folder.manifests():
        for name, checksum in manifest["files"].items():
            if saved.get(name) != checksum:
                found.faults.append(f"{path.name} names {name} with a hash that is not recorded.")
    for name, checksum in saved.items():
        _compare(folder.checkpoints / name, checksum, found, must=False)
    if not done:
        found.notes.append("The run is not finished.")
        if (folder.path / "summary.json").exists():
            found.faults.append("summary.json is there, but the record does not say that it ended.")
        return
    there = {path.name.removesuffix(".part") for path in folder.final.glob("*")}
    for name in sorted(there - done["names"] - {"manifest.json"}):
        found.faults.append(f"{folder.final / name} is not in the record.")
    _compare(folder.path / "summary.json", done["summary"], found)
    for name, checksum in done["files"].items():
        _compare(folder.final / name, checksum, found)


def _compare(path: Path, checksum: str, found: Audit, must: bool = True) -> None:
    try:
        same = wire.checksum(read(path)) == checksum
    except FileNotFoundError:
        same = not must
    if not same:
        found.faults.append(f"{path} is missing, or is not the file of the record.")


def _compare_groups(folder: RunFolder, found: Audit) -> None:
    """Compare the groups as replayed with those of the final state."""
    path = folder.final / "state.safetensors"
    if not path.exists() or not found.assignment:
        return
    state = wire.load(read(path))["state"]
    groups = state["assignment"].tolist() if "assignment" in state else []
    now = {client: group for client, group in enumerate(groups) if group >= 0}
    known = {client: group for client, group in found.assignment.items() if group >= 0}
    if now != known:
        wrong = next(c for c in sorted({*now, *known}) if now.get(c) != known.get(c))
        found.faults.append(
            f"The final group of client {wrong} is {now.get(wrong)}, but the record says "
            f"{known.get(wrong)}."
        )
