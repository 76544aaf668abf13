"""Damage run folders at random, as accidents and strangers do, and look at what reading them does.

    python -m coterie_lab.studies.folder_fuzz --folders 100000 --seed 0 --json folders.json

Each folder is a copy of one small run with up to three changes: bytes flipped, cut or removed, JSON
values replaced, nested or left out, files replaced by links and pipes, names that lead out of the
folder, code to import. In half of them all checksums fit again, as a stranger would set them. It is
then shown, loaded, audited, compared, or resumed. It must be read, or refused by an error of
Coterie; no code may run, and nothing outside the folder may change.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.core.errors import CoterieError
from coterie.fitted import fit_run
from coterie.report.audit import audit
from coterie.report.cards import show_run
from coterie.report.compare import comparison
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

    def restore(self) -> None:
        """Make the folder what it was."""
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
        strange = (self.place / "PWNED").exists() or (self.folder / "PWNED").exists()
        return not strange and self.victim.read_text() == "years of work"


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
    path = rng.choice((path, path, path.with_name(path.name + ".part"), path.parent))
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
    show_run(RunFolder(made.folder))


def use_load(made: Made) -> None:
    str(coterie.load(made.folder))


def use_checkpoint(made: Made) -> None:
    folder = RunFolder(made.folder)
    folder.description()
    folder.load(made.algorithm)


def use_audit(made: Made) -> None:
    str(audit(made.folder))


def use_compare(made: Made) -> None:
    str(comparison([made.folder]))


def use_resume(made: Made) -> None:
    coterie.resume(made.folder)


USES = [use_show, use_show, use_load, use_load, use_load, use_checkpoint, use_audit, use_compare]


def try_one(made: Made, rng: random.Random) -> dict[str, Any]:
    """Change the folder, use it, put it back; what happened."""
    done, fits = change(made, rng)
    # Training goes on from a state whose checksum fits; what is in it is the method's business.
    use = use_resume if not fits and rng.random() < 0.02 else rng.choice(USES)
    began = time.perf_counter()
    said = ""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
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
    tally: collections.Counter[str] = collections.Counter()
    odd: dict[str, dict[str, Any]] = {}
    slowest: dict[str, Any] = {"seconds": 0.0}
    began = time.time()
    with tempfile.TemporaryDirectory() as place:
        made = Made(Path(place))
        os.chdir(made.folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for number in range(options.folders):
            found = try_one(made, random.Random(f"{options.seed}/{number}"))
            tally[f"{found['use']} {found['end']}"] += 1
            tally[found["end"]] += 1
            if found["end"] in ("foreign", "UNSAFE"):
                odd.setdefault(f"{found['use']} {found['said'][:60]}", {"number": number, **found})
            slowest = max(slowest, found, key=lambda one: one["seconds"])
            if (number + 1) % 5000 == 0:
                print(number + 1, dict(tally), f"{time.time() - began:.0f} s", flush=True)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        os.chdir("/")
    figures = {
        "folders": options.folders,
        "seed": options.seed,
        "ends": dict(sorted(tally.items())),
        "largest_mb": round(after, 1),
        "growth_mb": round(after - before, 1),
        "slowest": slowest,
        "seconds": round(time.time() - began),
        "odd": odd,
    }
    write(options.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
