"""Damage run folders at random, as accidents and strangers do, and look at what reading them does.

    python -m coterie_lab.studies.folder_fuzz --folders 100000 --seed 0 --json folders.json

Each folder is a copy of one small run with up to three changes: bytes flipped, cut or removed, JSON
values replaced, nested or left out, files replaced by links and pipes, names that lead out of the
folder, code to import. In half of them all checksums fit again, as a stranger would set them. It is
then shown, loaded, audited, compared, reported, watched, asked for its verdict, or resumed. It must
be read, or refused by an error of Coterie, within ten seconds; no code may run, and nothing outside
the folder may change. The figures are written as they grow; the same command goes on with them.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from coterie.core.errors import CoterieError
from coterie.fitted import read_why
from coterie.fitting import fit_run, rebuild, verdict_of
from coterie.report.audit import audit
from coterie.report.cards import show_run
from coterie.report.compare import comparison
from coterie.report.html import live, read_contents, write_report
from coterie.running.build import build
from coterie.running.folder import RunFolder
from coterie_lab.studies.common import write

RUN: dict[str, Any] = {
    "algorithm": {"name": "ifca", "n_groups": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"learning_rate": 0.1},
    "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 2, "n": 12, "test": 6},
    "run": {"rounds": 2, "threads": 1, "compare": True},
}
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    5,
    2**40,
    1e300,
    float("nan"),
    "",
    "x",
    "../../victim.txt",
    "/etc/hostname",
    "\x1b[31mred\x1b[0m[bold]",
    "\ud800",
    "os:system",
    [],
    [None],
    [[]],
    [5, "x"],
    {},
    {"a": {"b": []}},
    {"import": "os:system", "arguments": {"command": "touch PWNED"}},
]
MEMORY_DISK = Path("/dev/shm")  # faster than a disk; the default place where there is none
SECONDS = 10  # that a use may take
MEMORY = 8 << 30  # bytes of addresses; a folder that asks for more ends in a MemoryError
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)


class Made:
    """A small run whose files are put back after every change."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "run"
        fit_run(build(json.loads(json.dumps(RUN))), self.folder)
        shutil.rmtree(self.folder / "baselines")
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        self.files = {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
        self.algorithm = coterie.load(self.folder).algorithm
        self.victim = place / "victim.txt"
        self.victim.write_text("years of work")
        new = coterie.load(self.folder).card
        self.newcomer = torch.zeros((6, *new.sample_shape)).numpy(), np.zeros(6, dtype=np.int64)

    def restore(self) -> None:
        """Make the folder what it was."""
        for path in set(self.place.iterdir()) - {self.folder, self.victim}:
            remove(path)
        self.victim.write_text("years of work")
        there = {str(p.relative_to(self.folder)) for p in self.folder.rglob("*")}
        for name in sorted(there - set(self.files) - {"checkpoint", "final"}, reverse=True):
            remove(self.folder / name)
        for name in ("checkpoint", "final"):
            if (self.folder / name).is_symlink() or not (self.folder / name).is_dir():
                remove(self.folder / name)
                (self.folder / name).mkdir()
        for name, data in self.files.items():
            path = self.folder / name
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                remove(path)
                path.write_bytes(data)

    def safe(self) -> bool:
        """Whether no code ran, and nothing outside changed."""
        strange = {path.name for path in self.place.iterdir()} - {"run", "victim.txt"}
        ran = strange or (self.folder / "PWNED").exists()
        return not ran and self.victim.read_text() == "years of work"


def remove(path: Path) -> None:
    """Remove whatever a path is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


# Changes


def flip(made: Made, path: Path, rng: random.Random) -> None:
    data = bytearray(read(path))
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def cut(made: Made, path: Path, rng: random.Random) -> None:
    data = read(path)
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def replace(made: Made, path: Path, rng: random.Random) -> None:
    deep = rng.choice((70, 1000, 100_000))
    contents = [b"", b"\0" * 100, b"null", b"[]", b"{}", b"5\n", b"\xff\xfe", b"[" * deep]
    contents += [b'{"files":' * deep + b"1" + b"}" * deep, b'{"round": 1}\n', rng.randbytes(50)]
    path.write_bytes(rng.choice(contents))


def replace_value(made: Made, path: Path, rng: random.Random) -> None:
    """Another value in a JSON file, in a line of a log, or in the header of a tensor file."""
    data = read(path)
    try:
        if path.suffix == ".safetensors":
            n = int.from_bytes(data[:8], "little")
            head = json.loads(data[8 : 8 + n])
            if rng.random() < 0.5:
                about = json.loads(head["__metadata__"]["coterie"])
                head["__metadata__"]["coterie"] = json.dumps(_change(about, rng))
            else:
                head = _change(head, rng)
            raw = json.dumps(head).encode()
            path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + n :])
        elif path.suffix == ".jsonl":
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(_change(json.loads(lines[at]), rng)).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_bytes(json.dumps(_change(json.loads(data), rng)).encode())
    except _BROKEN:
        flip(made, path, rng)  # changed before into something that is no JSON


def _change(value: Any, rng: random.Random) -> Any:
    """Plain data with one part replaced, left out, or put in."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(ODD)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.2:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.3:
            return {**value, str(rng.choice(ODD)): rng.choice(ODD)}
        return {**value, key: _change(value[key], rng)}
    at = rng.randrange(len(value))
    if rng.random() < 0.2:
        return value[:at] + value[at + 1 :]
    return [*value[:at], _change(value[at], rng), *value[at + 1 :]]


def gone(made: Made, path: Path, rng: random.Random) -> None:
    remove(path)


def link(made: Made, path: Path, rng: random.Random) -> None:
    target = rng.choice((made.victim, made.place, Path("/etc/hostname"), path, Path("nowhere")))
    others = path.with_name(path.name + ".part"), path.parent, made.folder / "report.html"
    path = rng.choice((path, path, *others))
    if path == made.folder:
        path = made.folder / "checkpoint"
    remove(path)
    path.symlink_to(target)


def special(made: Made, path: Path, rng: random.Random) -> None:
    remove(path)
    path.mkdir() if rng.random() < 0.5 else os.mkfifo(path)


CHANGES: list[Callable[[Made, Path, random.Random], None]] = [
    flip,
    flip,
    cut,
    replace,
    gone,
    link,
    special,
] + [replace_value] * 6


def read(path: Path) -> bytes:
    """A file's bytes; none if it is no file any more."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def reseal(made: Made) -> None:
    """Checksums that fit again."""
    for path in (made.folder / "checkpoint").glob("0*.json"):
        with contextlib.suppress(*_BROKEN):
            manifest = json.loads(read(path))
            for name in list(manifest["files"]):
                data = read(made.folder / "checkpoint" / name)
                manifest["files"][name] = hashlib.sha256(data).hexdigest()
            manifest.pop("sha256", None)
            text = json.dumps(manifest, sort_keys=True)
            manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
            path.write_text(json.dumps(manifest))
    path = made.folder / "final" / "manifest.json"
    with contextlib.suppress(*_BROKEN):
        manifest = json.loads(read(path))
        for name in list(manifest["files"]):
            data = read(made.folder / "final" / name)
            manifest["files"][name] = hashlib.sha256(data).hexdigest()
        path.write_text(json.dumps(manifest))


def change(made: Made, rng: random.Random) -> tuple[list[str], bool]:
    """Change the folder; what was done, and whether the checksums fit again."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name, how = rng.choice(sorted(made.files)), rng.choice(CHANGES)
        path = made.folder / name
        with contextlib.suppress(OSError):  # an earlier change has taken the place away
            if path.is_symlink() or path.parent.is_symlink() or path.is_fifo():
                continue  # or the change itself would write outside, or wait for ever
            how(made, path, rng)
        done.append(f"{how.__name__} {name}")
    fits = rng.random() < 0.5
    if fits:
        reseal(made)
    return done, fits


# Uses


def use_show(made: Made) -> None:
    show_run(RunFolder(made.folder)).encode()


def use_load(made: Made) -> None:
    fit = coterie.load(made.folder)
    f"{fit}{fit!r}{fit._repr_html_()}{fit.history}{fit.warnings}".encode()


def use_checkpoint(made: Made) -> None:
    folder = RunFolder(made.folder)
    folder.description()
    folder.load(made.algorithm)


def use_audit(made: Made) -> None:
    str(audit(made.folder)).encode()


def use_compare(made: Made) -> None:
    str(comparison([made.folder])).encode()


def use_report(made: Made) -> None:
    write_report(read_contents(made.folder), made.folder / "report.html")


def use_watch(made: Made) -> None:
    live.show(made.folder)


def use_why(made: Made) -> None:
    str(read_why(RunFolder(made.folder).final_files(), made.folder)).encode()


def use_build(made: Made) -> None:
    rebuild(RunFolder(made.folder))


def use_place(made: Made) -> None:
    fit = coterie.load(made.folder)
    rows = made.newcomer
    fit.place(*rows)
    fit.predict(rows[0], group=0)


def use_verdict(made: Made) -> None:
    str(verdict_of(made.folder)).encode()


def use_resume(made: Made) -> None:
    coterie.resume(made.folder)


def use_train(made: Made) -> None:
    """Resume after the first round, as if the process had been killed in the second."""
    for name in ("summary.json", "checkpoint/000002.json"):
        with contextlib.suppress(OSError):  # a change has removed it, or the whole folder
            (made.folder / name).unlink()
    coterie.resume(made.folder)


USES = [use_show, use_load, use_checkpoint, use_audit, use_compare, use_report, use_watch, use_why]
USES += [use_build, use_place, use_load]


def choose(made: Made, fits: bool, rng: random.Random) -> Callable[[Made], None]:
    """A use of the folder; what trains takes a hundred times as long, and is chosen less often."""
    # Training goes on from a state whose checksum fits; what is in it is the method's business.
    if not fits and rng.random() < 0.006:
        return rng.choice((use_resume, use_train, use_verdict))
    finished = (made.folder / "summary.json").is_file()
    return rng.choice([*USES, use_verdict] if finished else USES)


class Hung(Exception):
    """A use took too long."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End what takes longer."""

    def stop(*_: Any) -> None:
        raise Hung(f"more than {seconds:g} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def try_one(made: Made, rng: random.Random) -> dict[str, Any]:
    """Change the folder, use it, put it back; what happened."""
    done, fits = change(made, rng)
    use = choose(made, fits, rng)
    began = time.perf_counter()
    said = ""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with limit(SECONDS):
                use(made)
        end = "read"
    except CoterieError:
        end = "refused"
    except Exception as error:
        end, said = "foreign", f"{type(error).__name__}: {str(error)[:150]}"
    seconds = time.perf_counter() - began
    if not made.safe():
        end = "UNSAFE"
    made.restore()
    return {"use": use.__name__, "end": end, "done": done, "seconds": seconds, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    figures: dict[str, Any] = {
        "seed": options.seed,
        "folders": 0,
        "foreign": 0,
        "unsafe": 0,
        "ends": {},
        "largest_mb": 0.0,
        "growth_mb": 0.0,
        "slowest": {"seconds": 0.0},
        "seconds": 0.0,
        "odd": {},
    }
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as place:
        made = Made(Path(place))
        os.chdir(made.folder)
        before, began = largest_mb(), time.perf_counter()
        for number in range(figures["folders"], options.folders):
            note(figures, number, try_one(made, random.Random(f"{options.seed}/{number}")))
            if (number + 1) % 1000 == 0 or number + 1 == options.folders:
                now = time.perf_counter()
                figures["seconds"] = round(figures["seconds"] + now - began, 1)
                figures["largest_mb"] = max(figures["largest_mb"], largest_mb())
                figures["growth_mb"] = max(figures["growth_mb"], round(largest_mb() - before, 1))
                began = now
                write(options.json, figures)
                print(number + 1, figures["ends"], f"{figures['seconds']:.0f} s", flush=True)
        os.chdir("/")
    print(json.dumps(figures, indent=1))


def largest_mb() -> float:
    """The largest memory of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def note(figures: dict[str, Any], number: int, found: dict[str, Any]) -> None:
    """Count what happened to a folder; keep what must not happen, and the slowest."""
    ends, end = figures["ends"], found["end"]
    ends[f"{found['use']} {end}"] = ends.get(f"{found['use']} {end}", 0) + 1
    figures["folders"] = number + 1
    figures["foreign"] += end == "foreign"
    figures["unsafe"] += end == "UNSAFE"
    if end in ("foreign", "UNSAFE"):
        kind = f"{found['use']} {found['said'][:60]}"
        figures["odd"].setdefault(kind, {"number": number, **found})
    if found["seconds"] > figures["slowest"]["seconds"]:
        figures["slowest"] = {"number": number, **found}


if __name__ == "__main__":
    main()
