"""Attacks and faults that the first version did not withstand, tried again: before and now.

    python -m coterie_lab.studies.drills [--only replies,folders,files] [--page docs/drills.md]

Replies: one of six clients lies, through bytes (server and workers in one process) and in the
simulator. Folders: a stranger's run folder is loaded and resumed. Files: data that ask for too
much. Each case is stored as a line; the page is written from the lines.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import struct
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import coterie
from coterie.core import wire
from coterie.core.errors import CoterieError, FederationError
from coterie.core.federation import Call
from coterie.core.tree import leaves, tree_map
from coterie.data.card import DataCard
from coterie.deploy.worker import Worker
from coterie.engines import Remote, Simulation
from coterie.engines.relay import Envelope
from coterie.fitting import fit_run
from coterie.running.build import Run, build

FIGURES = Path("benchmarks/figures/drills.jsonl")
PAGE = Path("docs/drills.md")
METHODS = ("fedavg", "ifca", "clove", "census")
LIAR = 0
ROUNDS = 3
HEARD = ("evaluation", "deliver")  # exchanges in which nobody lies

Lie = Callable[[Any], Any]


# Replies


def _models(change: Callable[[Tensor], Tensor]) -> Lie:
    """Change the models of a reply."""

    def lie(reply: Any) -> Any:
        return {k: tree_map(change, v) if isinstance(v, dict) else v for k, v in reply.items()}

    return lie


def _put(name: str, value: float, kind: torch.dtype | None = None) -> Lie:
    """Put a value in the place of a part of a reply."""

    def lie(reply: Any) -> Any:
        if name not in reply:
            return reply
        return {**reply, name: torch.full_like(reply[name], value, dtype=kind)}

    return lie


VALUES: dict[str, Lie] = {
    "weights NaN": _models(lambda leaf: leaf * torch.nan),
    "weights Inf": _models(lambda leaf: leaf + torch.inf),
    "weights 1e30": _models(lambda leaf: torch.full_like(leaf, 1e30)),
    "weights 1e6": _models(lambda leaf: torch.full_like(leaf, 1e6)),
    "n = 1e18": _put("n", 10**18),
    "n = -50": _put("n", -50),
    "n = -1e9": _put("n", -(10**9)),
    "n = 0": _put("n", 0),
    "group 99": _put("group", 99),
    "group -1": _put("group", -1),
    "losses NaN": _put("losses", torch.nan),
    "losses Inf": _put("losses", torch.inf),
    "losses -1e30": _put("losses", -1e30),
}
FORMS: dict[str, Lie] = {
    "wrong shape": _models(lambda leaf: leaf.flatten()[:-1]),
    "float64": _models(lambda leaf: leaf.double()),
    "a part is missing": lambda reply: dict(list(reply.items())[1:]),
    "a part too many": lambda reply: {**reply, "zz": torch.ones(3)},
    "empty": lambda reply: {},
    "a list": lambda reply: [torch.ones(2)],
}
HEADS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "head is a list": lambda head: [head],
    "notes = 5": lambda head: {**head, "notes": 5},
    "100,000 notes": lambda head: {**head, "notes": ["x" * 50] * 100_000},
    "missing = 5": lambda head: {**head, "missing": 5},
    "always missing": lambda head: {**head, "missing": ["z"]},
    "no results": lambda head: {**head, "results": None},
    "another's name": lambda head: {**head, "client": "client-03"},
}


def deep_blob() -> bytes:
    """A tree of 3,000 levels."""
    tree = '{"tree": ' + '{"list": [' * 3000 + '"0"' + "]}" * 3000 + "}"
    head = json.dumps({"__metadata__": {"coterie": tree}}).encode()
    return struct.pack("<Q", len(head)) + head


class Link:
    """Carries messages to workers in this process; spoils the answers of one."""

    def __init__(self, workers: list[Worker], lie: Lie | None, head: Any) -> None:
        self.workers, self.lie, self.head = workers, lie, head
        self.answers: dict[str, Envelope] = {}
        self.sent = 0

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(range(len(self.workers)), "")

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        numbers: list[str | None] = []
        for node, asked in messages:
            answer = self.workers[node].handle(asked)
            if node == LIAR and asked.head["calls"] and not answer.head.get("missing"):
                answer = self._spoil(asked, answer)
            self.sent += 1
            self.answers[str(self.sent)] = answer
            numbers.append(str(self.sent))
        return numbers

    def _spoil(self, asked: Envelope, answer: Envelope) -> Envelope:
        if self.head is not None:
            return Envelope(self.head(dict(answer.head)), answer.blobs)
        results, blobs = [], {}
        for call, result in zip(asked.head["calls"], answer.head["results"], strict=True):
            blob = answer.blobs[result["blob"]]
            if call["phase"] not in HEARD:
                blob = wire.dump(self.lie(wire.load(blob))) if self.lie else deep_blob()
            name = wire.checksum(blob)
            blobs[name] = blob
            results.append({"blob": name})
        return Envelope({**answer.head, "results": results}, blobs)

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope]]:
        return [(n, self.answers.pop(n)) for n in sorted(numbers) if n in self.answers]


class Lying(Simulation):
    """A simulation in which one client lies."""

    lie: Lie | None = None

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for position, reply in super().exchange(call):
            ids = call.ids[position].tolist()
            if self.lie is not None and LIAR in ids and call.phase not in HEARD:
                at = ids.index(LIAR)
                own = self.lie(tree_map(lambda leaf, at=at: leaf[at], reply))
                reply = tree_map(lambda leaf, new, at=at: _replace(leaf, at, new), reply, own)
            yield position, reply


def _replace(leaf: Tensor, at: int, new: Tensor) -> Tensor:
    leaf = leaf.clone()
    leaf[at] = new
    return leaf


def prepare(method: str) -> Run:
    """Six clients in two groups."""
    groups = {} if method == "fedavg" else {"n_groups": 2}
    return build(
        {
            "algorithm": {"name": method, **groups},
            "model": {"name": "linear"},
            "local": {"learning_rate": 0.1},
            "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 3, "n": 30},
            "run": {"rounds": ROUNDS, "threads": 1},
        }
    )


def federate(ready: Run, way: str, place: Path, lie: Lie | None, head: Any, lies: bool) -> Any:
    """The federation in which one client lies."""
    if way == "simulation":
        fed = Lying(ready.data, stack=False)
        fed.lie = lie
        return fed
    workers = []
    for name in ready.data.names:
        (place / name).mkdir()
        workers.append(Worker(place / name, name, "run", answers=("all",)))
    link = Link(workers, lie if lies else lambda reply: reply, head)
    setup = {"description": ready.description, "card": DataCard.of(ready.data).to_dict()}
    fed = Remote(link, setup, "0a", deadline=2.0, poll=0.0)  # type: ignore[arg-type]
    fed.meet(len(workers), 5.0)
    return fed


def lie_once(
    method: str, way: str, lie: Lie | None, head: Any, lies: bool = True
) -> dict[str, Any]:
    """A few rounds with a liar: how they end, who is named, and the models."""
    ready, end, abandoned = prepare(method), "finished", 0
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            fed = federate(ready, way, Path(place), lie, head, lies)
            state = None
            try:
                fed.begin(-1)
                state = ready.algorithm.init(fed)
                fed.commit()
                for number in range(ROUNDS):
                    fed.begin(number)
                    try:
                        state, _ = ready.algorithm.step(fed, state)
                        fed.commit()
                    except FederationError:
                        fed.rollback()
                        abandoned += 1
            except CoterieError as error:
                end = f"own error: {str(error)[:80]}"
            except Exception as error:
                end = f"FOREIGN {type(error).__name__}: {str(error)[:80]}"
    name = ready.data.names[LIAR]
    words = " ".join(str(warning.message) for warning in said)
    return {
        "end": end,
        "abandoned": abandoned,
        "named": name in fed.record.counts or name in fed.record.aside or f"'{name}'" in words,
        "others_blamed": sorted(set(fed.record.counts) - {name}),
        "warnings": len(said),
        "models": _weights(state),
    }


def _weights(state: Any) -> Tensor:
    """All weights of a state in one vector."""
    for name in ("models", "params"):
        if hasattr(state, name):
            return torch.cat([leaf.double().flatten() for leaf in leaves(getattr(state, name))])
    return torch.zeros(0)


def drill_replies() -> Iterator[dict[str, Any]]:
    """Every lie, for every method, both ways."""
    for method in METHODS:
        for way in ("bytes", "simulation"):
            truth = lie_once(method, way, None, None, lies=False)["models"]
            cases: dict[str, tuple[Lie | None, Any]] = {k: (v, None) for k, v in VALUES.items()}
            if way == "bytes":
                cases |= {name: (lie, None) for name, lie in FORMS.items()}
                cases |= {"3,000 levels": (None, None)}
                cases |= {name: (None, head) for name, head in HEADS.items()}
            for name, (lie, head) in cases.items():
                if method not in _senders(name):
                    continue
                found = lie_once(method, way, lie, head)
                models = found.pop("models")
                found["finite"] = bool(models.isfinite().all())
                found["moved"] = round(float((models - truth).norm() / truth.norm()), 4)
                yield {"part": "replies", "case": name, "way": way, "method": method, **found}


def _senders(case: str) -> tuple[str, ...]:
    """Methods whose clients send what a lie is about."""
    if case.startswith("group"):
        return ("ifca",)
    if case.startswith("losses"):
        return ("clove", "census")
    return ("fedavg", "clove", "census") if case.startswith("n = ") else METHODS


# Folders

TINY: dict[str, Any] = {
    "algorithm": {"name": "ifca", "n_groups": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"learning_rate": 0.1},
    "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 2, "n": 12, "test": 6},
    "run": {"rounds": 2, "threads": 1},
}


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def unfinish(folder: Path) -> None:
    """As if the last round had still to be done."""
    (folder / "summary.json").unlink()
    sorted((folder / "checkpoint").glob("0*.json"))[-1].unlink()


def command(folder: Path) -> None:
    touch = {"import": "os:system", "arguments": {"command": "touch PWNED"}}
    edit(folder / "run.json", lambda run: run.update(model=touch))


def module(folder: Path) -> None:
    (folder / "evil.py").write_text("open('PWNED', 'w').close()\n")
    edit(folder / "run.json", lambda run: run["model"].update(loss="evil:x"))


def link_checkpoint(folder: Path) -> None:
    unfinish(folder)
    away = folder.parent / "victim"
    shutil.move(folder / "checkpoint", away)
    (away / "thesis.tex").write_text("years of work")
    (folder / "checkpoint").symlink_to(away)


def link_part(folder: Path) -> None:
    unfinish(folder)
    _victim(folder)
    (folder / "summary.json.part").symlink_to(folder.parent / "victim" / "thesis.tex")


def link_report(folder: Path) -> None:
    _victim(folder)
    (folder / "report.html").symlink_to(folder.parent / "victim" / "thesis.tex")


def _victim(folder: Path) -> None:
    (folder.parent / "victim").mkdir()
    (folder.parent / "victim" / "thesis.tex").write_text("years of work")


def name_outside(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    sums = {"../../secret": hashlib.sha256(b"secret").hexdigest()}
    edit(folder / "final" / "manifest.json", lambda manifest: manifest["files"].update(sums))


def large_json(folder: Path) -> None:
    with (folder / "run.json").open("wb") as file:
        file.write(b'{"x": [' + b"1," * 40_000_000 + b"1]}")


def deep_json(folder: Path) -> None:
    (folder / "run.json").write_bytes(b'{"x":' * 100_000 + b"1" + b"}" * 100_000)


def no_files(folder: Path) -> None:
    (folder / "final" / "manifest.json").write_text('{"format": 1}')


def wide_network(folder: Path) -> None:
    edit(folder / "run.json", lambda run: run["model"].update(hidden=[3_000_000, 3_000_000]))


def _line(content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        unfinish(folder)
        lines = (folder / "rounds.jsonl").read_bytes().splitlines()
        (folder / "rounds.jsonl").write_bytes(b"\n".join([content, *lines[1:]]) + b"\n")

    return change


def escapes(folder: Path) -> None:
    def rename(rows: Any) -> None:
        rows["clients"][0]["client"] = "\x1b]0;owned\x07\x1b[31mred"

    edit(folder / "final" / "clients.json", rename)
    data = (folder / "final" / "clients.json").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    manifest = folder / "final" / "manifest.json"
    edit(manifest, lambda content: content["files"].update({"clients.json": digest}))


def use_load(folder: Path) -> str:
    return str(coterie.load(folder))


def use_resume(folder: Path) -> str:
    return str(coterie.resume(folder))


def use_report(folder: Path) -> str:
    from coterie.report.html import read_contents, write_report

    return str(write_report(read_contents(folder), folder / "report.html"))


def resume_twice(folder: Path) -> str:
    """Resume while another process, here another handle, has the folder."""
    import fcntl

    unfinish(folder)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return use_resume(folder)
    finally:
        os.close(handle)


def leave(folder: Path) -> None:
    """Change nothing."""


FOLDERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], str], str]] = {
    "run.json names os:system, load": (command, use_load, "the command ran"),
    "run.json names os:system, resume": (command, use_resume, "the command ran"),
    "a loss in a module in the folder, load": (module, use_load, "its code ran"),
    "a loss in a module in the folder, resume": (module, use_resume, "its code ran"),
    "checkpoint/ is a link": (link_checkpoint, use_resume, "deleted a foreign file"),
    "summary.json.part is a link": (link_part, use_resume, "overwrote that file"),
    "report.html is a link": (link_report, use_report, "overwrote that file (found later)"),
    "a manifest names ../../secret": (name_outside, use_load, "read from outside"),
    "run.json of 80 MB": (large_json, use_load, "16 to 54 s, 1 GB"),
    "JSON of 100,000 levels": (deep_json, use_load, "RecursionError"),
    "a manifest without files": (no_files, use_load, "KeyError"),
    "a network of 3M x 3M": (wide_network, use_load, "RuntimeError"),
    "rounds.jsonl: a line `5`": (_line(b"5"), use_resume, "TypeError"),
    "rounds.jsonl: another key": (_line(b'{"ruond": 1}'), use_resume, "KeyError"),
    "rounds.jsonl: byte 0xFF": (_line(b'{"round": "\xff"}'), use_resume, "UnicodeDecodeError"),
    "escapes in a client's name": (escapes, use_load, "not checked"),
    "resumed twice at once": (leave, resume_twice, "FileNotFoundError, 50 lines for 40 rounds"),
}


def drill_folders() -> Iterator[dict[str, Any]]:
    """What a stranger may put into a run folder."""
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit_run(build(json.loads(json.dumps(TINY))), whole)
        for number, (name, (change, use, before)) in enumerate(FOLDERS.items()):
            here = Path(place) / str(number)
            shutil.copytree(whole, here / "run")
            change(here / "run")
            old = Path.cwd()
            os.chdir(here / "run")
            found = _try(lambda use=use, here=here: use(here / "run"), str(here))
            os.chdir(old)
            victim = here / "victim" / "thesis.tex"
            harm = (here / "run" / "PWNED").exists()
            harm |= victim.parent.exists() and (
                not victim.exists() or victim.read_text() != "years of work"
            )
            escaped = "\x1b" in found.pop("text", "")
            yield {
                "part": "folders", "case": name, "before": before, **found,
                "harm": bool(harm or escaped),
            }  # fmt: skip


def _try(use: Callable[[], str], hide: str) -> dict[str, Any]:
    """How a use ends, in what time."""
    began, end, text = time.perf_counter(), "done", ""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            text = use()
    except CoterieError as error:
        end = "refused: " + _shorten(str(error).replace(hide, ""))
    except Exception as error:
        end = f"FOREIGN {type(error).__name__}: {str(error)[:100]}"
    return {"end": end, "seconds": round(time.perf_counter() - began, 2), "text": text}


def _shorten(text: str) -> str:
    """The first sentences of a message."""
    return text if len(text) <= 130 else text[:130].rsplit(" ", 1)[0] + " ..."


# Files


def _png(path: Path, side: int, data: bytes) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b""))


def bomb(folder: Path) -> None:
    for client in ("a", "b"):
        for kind in ("cat", "dog"):
            (folder / client / kind).mkdir(parents=True)
            for number in range(3):
                _png(folder / client / kind / f"{number}.png", 8, bytes(9 * 8))
    _png(folder / "a" / "cat" / "9.png", 50_000, bytes(1000))


def wide(folder: Path) -> None:
    for client in ("a", "b"):
        names = ",".join(f"c{j}" for j in range(100_000))
        rows = "".join(",".join(["1"] * 100_000) + f",{i % 2}\n" for i in range(10))
        (folder / f"{client}.csv").write_text(f"{names},y\n{rows}")


def declared(folder: Path) -> None:
    head = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (2**33, 4)}
    np.lib.format.write_array_header_1_0(head, about)
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("x.npy", head.getvalue() + bytes(64))


def packed(folder: Path) -> None:
    rows = 30_000_000
    x, y = np.zeros((rows, 4)), np.zeros(rows, dtype=int)
    np.savez_compressed(folder / "a.npz", x=x, y=y)


def _sites(folder: Path) -> None:
    for client in ("a", "b"):
        text = "u,v,y\n" + "".join(f"{i},{2 * i},{i % 2}\n" for i in range(12))
        (folder / f"{client}.csv").write_text(text)


def link_out(folder: Path) -> None:
    _sites(folder)
    (folder / "c.csv").symlink_to("/etc/passwd")


def pipe(folder: Path) -> None:
    _sites(folder)
    os.mkfifo(folder / "c.csv")


def read_folder(folder: Path) -> str:
    return str(coterie.from_folder(folder, label=None if (folder / "a").is_dir() else "y"))


def read_names(*names: str) -> Callable[[Path], str]:
    rows: dict[str, Any] = {"who": [n for n in names for _ in range(4)]}
    rows["a"] = [*range(4 * len(names))]

    def read(folder: Path) -> str:
        rows["y"] = [0, 1] * (2 * len(names))
        found = coterie.from_table(rows, client="who", label="y")
        return " ".join([*found.names, *found.notes])

    return read


FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], str], str]] = {
    "CSV of 100,000 columns": (wide, read_folder, "not done in 60 s"),
    "NPZ, 30M rows compressed": (packed, read_folder, "not done in 60 s"),
    "NPZ that declares 256 GiB": (declared, read_folder, "MemoryError"),
    "PNG that declares 50,000 x 50,000": (bomb, read_folder, "error of Pillow"),
    "a link to /etc/passwd": (link_out, read_folder, "followed"),
    "a pipe": (pipe, read_folder, "own error"),
    "names alike in Unicode": (leave, read_names("\u00c5", "A\u030a"), "accepted"),
    "a name of 300 letters": (leave, read_names("x" * 300, "b"), "accepted"),
    "names that differ in spaces": (leave, read_names("a", "a ", " a", "b"), "merged"),
}


def drill_files() -> Iterator[dict[str, Any]]:
    """Data that ask for too much."""
    for name, (make, use, before) in FILES.items():
        with tempfile.TemporaryDirectory() as place:
            make(Path(place))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = _try(lambda use=use, place=place: use(Path(place)), place)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
        del found["text"]
        yield {"part": "files", "case": name, "before": before, **found, "mb": grown // 1024}


# Page

BEFORE = {
    "head is a list": "the server died", "notes = 5": "the server died",
    "missing = 5": "the server died", "3,000 levels": "the server died",
    "group 99": "the run died", "group -1": "the run died",
    "a part is missing": "IFCA: the run died", "weights 1e30": "taken in, up to 7e29",
    "weights 1e6": "taken in", "n = 1e18": "taken in, model moves by up to 22 %",
    "n = -50": "taken in, up to 19 %", "n = -1e9": "taken in, up to 19 %",
    "n = 0": "taken in, up to 20 %", "weights NaN": "left out, not named",
    "weights Inf": "left out, not named", "losses NaN": "replaced, not named",
    "losses Inf": "replaced, not named", "losses -1e30": "no effect",
    "100,000 notes": "100,000 warnings",
}  # fmt: skip
"""What the first version did (commit 07d43ee); of others: left out and named."""


def write_page(lines: list[dict[str, Any]]) -> str:
    """The page, as Markdown."""
    out = [
        "# Attacks and faults, before and now",
        "",
        "This page is for those who judge how safe Coterie is. It lists attacks and faults,",
        "what they did to the first version (*before*, commit 07d43ee), and what happens now.",
        "`SECURITY.md` of the repository says what stops each attack, and what is not covered.",
        "`python -m coterie_lab.studies.drills` makes this page.",
    ]
    replies = [line for line in lines if line["part"] == "replies"]
    out += ["", "## One lying client of six", ""]
    out += [
        "Runs have three rounds of " + ", ".join(f"`{method}`" for method in METHODS) + ". *Moved*",
        "is the largest distance over methods between the final models and those of honest",
        "clients; in most rows it is that of leaving the client out. Lies in evaluations are in",
        "`tests/running/test_liars.py`.",
        "",
        "| reply | before | through bytes | in the simulation | client named | moved |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(line["case"] for line in replies):
        some = [line for line in replies if line["case"] == case]
        ends = [
            _ends([line for line in some if line["way"] == way]) for way in ("bytes", "simulation")
        ]
        named = sum(line["named"] for line in some)
        who = "always" if named == len(some) else f"{named} of {len(some)}"
        moved = f"{100 * max(line['moved'] for line in some):.0f} %"
        before = BEFORE.get(case, "left out, named")
        out.append(f"| {case} | {before} | {ends[0]} | {ends[1]} | {who} | {moved} |")
    for part, title in (("folders", "A run folder from somebody else"), ("files", "Data files")):
        out += ["", f"## {title}", "", "| case | before | now |", "|---|---|---|"]
        for line in (line for line in lines if line["part"] == part):
            harm = "**HARM** " if line.get("harm") else ""
            end = "done; nothing outside changed" if line["end"] == "done" else line["end"]
            now = end.replace("|", "\\|").replace("\n", " ")
            out.append(f"| {line['case']} | {line['before']} | {harm}{now} |")
    return "\n".join(out) + "\n"


def _ends(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return ""
    bad = [line["end"] for line in lines if line["end"] != "finished" or not line["finite"]]
    return bad[0] if bad else "run finished"


PARTS = {"replies": drill_replies, "folders": drill_folders, "files": drill_files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = options.only.split(",")
    there = options.json.read_text().splitlines() if options.json.exists() else []
    kept = [line for line in map(json.loads, there) if line["part"] not in chosen]
    found = []
    for part in chosen:
        for line in PARTS[part]():
            found.append(line)
            print(json.dumps(line), flush=True)
    lines = sorted(kept + found, key=lambda line: list(PARTS).index(line["part"]))
    options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options.page.write_text(write_page(lines))


if __name__ == "__main__":
    main()
