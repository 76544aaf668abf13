"""The worker of a client: it has torch, the data and the memory, and answers messages.

It is a simulation of one client that gets its calls from messages. It uses the same engine and the
same keys as a simulation, so it computes the same numbers. `deploy.fleet` connects workers to the
SuperLink. Beside a stock node, a worker is a process of its own: it listens on a Unix socket that
only its owner can open, and a process that connects must know the key in the node's folder.
"""

import argparse
import os
import re
import secrets
import signal
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch

from coterie.core import wire
from coterie.core.config import IMPORT, construct, find_imports, load
from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.federation import Call
from coterie.core.memory import Memory
from coterie.core.question import find_task, info_of
from coterie.core.tree import Tree, leaves, row
from coterie.data import FederatedData
from coterie.data.card import DataCard
from coterie.data.clients import client_file, one_client, read_options
from coterie.deploy.personal import prepare
from coterie.engines.relay import ADDRESS_FILE, KEY_FILE, PROTOCOL, Envelope, private, receive, send
from coterie.engines.simulation import Simulation
from coterie.running.build import Settings, build_algorithm, make_data
from coterie.running.files import parse_json
from coterie.running.folder import write

TRIAL = "run"
"""Data of a trial: the client's part of the data in the run file."""


class Journal:
    """A client's memory on disk: one file for each exchange that changed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._last: tuple[int, Tree] | None = None

    def entries(self) -> list[int]:
        """Exchanges that changed the memory, oldest first."""
        return sorted(int(p.stem) for p in self.folder.glob("*.safetensors") if p.stem.isdigit())

    def restore(self, heard: int, saved: int) -> Tree | None:
        """The memory after the last exchange that the server received; newer files are deleted."""
        entries = self.entries()
        for entry in entries:
            if entry > heard:
                self._path(entry).unlink()
        valid = [entry for entry in entries if entry <= heard]
        for entry in [entry for entry in valid if entry <= saved][:-1]:
            self._path(entry).unlink()
        if not valid:
            return None
        if self._last is None or self._last[0] != valid[-1]:
            self._last = valid[-1], wire.load(self._path(valid[-1]).read_bytes())
        return self._last[1]

    def add(self, exchange: int, tree: Tree) -> None:
        """Save the memory after an exchange."""
        write(self._path(exchange), wire.dump(tree))
        self._last = exchange, tree

    def _path(self, entry: int) -> Path:
        return self.folder / f"{entry:020d}.safetensors"


class Refusal(CoterieError):
    """A node does not answer what it is asked."""


def refuse(described: dict[str, Any], reveals: str, answers: tuple[str, ...]) -> None:
    """Raise an error if a node's owner does not want a task to be answered.

    `answers`: names of tasks and questions that may be answered, or "all". Empty: all but those
    that tell about single classes or rows.
    """
    name = task_name(described)
    if "all" in answers or name in answers:
        return
    if answers:
        raise Refusal(
            f"its owner does not let it answer '{name}', only {', '.join(answers)}. The "
            f"owner can add: --answer {name}"
        )
    if reveals:
        raise Refusal(
            f"its owner does not let it answer '{name}', which would send {reveals}. The owner can "
            "start the node with --answer all, or name what it answers"
        )


class Room:
    """One run of one client."""

    def __init__(
        self,
        name: str,
        data: FederatedData,
        setup: dict[str, Any],
        folder: Path,
        allow: tuple[str, ...],
        answers: tuple[str, ...] = (),
    ) -> None:
        description = setup["description"]
        settings = construct(Settings, dict(description.get("run", {})))
        if settings.validation:
            data = data.hold_out(settings.validation, seed=settings.seed)
        torch.set_num_threads(settings.threads or 1)
        card = DataCard.from_dict(setup["card"])
        if data.sample_shape != card.sample_shape or data.task != card.task:
            raise DataError(
                f"The data of '{name}' must be for {card.task}, with samples of shape "
                f"{card.sample_shape}, as in the run. Got {data.task}, with samples of shape "
                f"{data.sample_shape}. Start the node with other data."
            )
        self.folder, self.allow, self.answers = folder, allow, answers
        # The worker has refused code of packages that this node does not allow.
        self.algorithm = build_algorithm(description, card, find_imports(description))
        self.fed = Simulation(data, settings.seed, stack=False, chunk=1)
        self.sizes = {s: int(data.sizes(s)[0]) for s in ("train", "validation", "test")}
        self.journal = Journal(folder / "memory")
        prepare(folder, setup)

    def answer(self, head: dict[str, Any], trees: dict[str, Tree]) -> list[dict[str, Any]]:
        """Do the calls of a message; for each call, the reply or the reason why there is none."""
        memory = Memory()
        kept = self.journal.restore(head["heard"], head["saved"])
        if kept is not None:
            memory.committed[0] = kept
        self.fed.memory = memory
        results: list[dict[str, Any]] = []
        for call in head["calls"]:
            before = dict(memory.tentative)
            try:
                results.append({"sent": self._do(call, trees)})
            except Refusal as refusal:
                print(f"refused: {refusal}", flush=True)
                results.append({"error": str(refusal), "refused": True})
            except Exception as error:
                memory.tentative = before
                traceback.print_exc()
                results.append({"error": f"{type(error).__name__}: {error}"})
            if call["aside"]:
                memory.tentative = before
        changed = memory.tentative.get(0)
        if changed is not None and leaves(changed):
            self.journal.add(head["exchange"], changed)
        return results

    def _do(self, described: dict[str, Any], trees: dict[str, Tree]) -> Tree:
        task = find_task(described["task"], self.algorithm, self.folder, self.allow)
        refuse(described["task"], info_of(task).reveals, self.answers)
        given = tuple(
            row(trees[part["blob"]], part["row"]) if "row" in part else trees[part["blob"]]
            for part in described["given"]
        )
        self.fed.round, self.fed.support = described["round"], described["support"]
        keys = (torch.tensor(described[name], dtype=torch.int64) for name in ("key", "local_key"))
        call = Call(task, info_of(task), given, torch.tensor([0]), described["phase"], *keys)
        (_, sent), *_ = self.fed.exchange(call)
        return row(sent, 0)


class Worker:
    """Answers the messages of a node.

    Parameters
    ----------
    home
        The node's folder, with the memory and models of every run and the key of the socket.
    name
        The client's name.
    data
        A file or folder; "package.module:load", a function that is called with the client's name;
        or "run": the client's part of the data in the run file, for trials.
    allow
        Packages whose code a run file may use, in addition to Coterie.
    answers
        Names of the tasks and questions that are answered, or "all"; see `refuse`.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        data: str,
        allow: tuple[str, ...] = (),
        answers: tuple[str, ...] = (),
    ) -> None:
        self.home, self.name, self.data, self.allow = home, name, data, ("coterie", *allow)
        self.answers = answers
        self.round: Any = None
        self.trees: dict[str, Tree] = {}  # what the server sent in this round, by checksum
        self.rooms: dict[str, Room] = {}
        self.broken: dict[str, str] = {}  # runs in which this client cannot take part, and why

    def handle(self, message: Envelope) -> Envelope:
        """The answer to a message."""
        head = message.head
        answer = {"protocol": PROTOCOL, "client": self.name}
        answer |= {name: head.get(name) for name in ("run", "round", "exchange")}
        if head.get("protocol") != PROTOCOL:
            said = (
                f"server and node must use the same version of the messages. The node has version "
                f"{PROTOCOL}, the server another. Install the same version of Coterie on both"
            )
            return Envelope({**answer, "error": said, "results": []}, {})
        key = f"{head['run']}/{head['setup']}"
        blobs = {name: blob for name, blob in message.blobs.items() if wire.checksum(blob) == name}
        if key not in self.rooms and key not in self.broken:
            if head["setup"] not in blobs:
                return Envelope({**answer, "missing": [head["setup"]]}, {})
            self._open(key, head["run"], blobs.pop(head["setup"]))
        if key in self.broken:
            failed = [{"error": self.broken[key]} for _ in head["calls"]]
            return Envelope({**answer, "error": self.broken[key], "results": failed}, {})
        if not head["calls"]:  # a greeting, without information about what the server received
            return Envelope({**answer, "sizes": self.rooms[key].sizes, "results": []}, {})
        if (key, head["round"]) != self.round:
            self.round, self.trees = (key, head["round"]), {}
        blobs.pop(head["setup"], None)
        self.trees |= {name: wire.load(blob) for name, blob in blobs.items()}
        wanted = {part["blob"] for call in head["calls"] for part in call["given"]}
        if missing := sorted(wanted - set(self.trees)):
            return Envelope({**answer, "missing": missing}, {})
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            results = self.rooms[key].answer(head, self.trees)
        out, sent = [], {}
        for result in results:
            if "sent" in result:
                blob = wire.dump(result["sent"])
                sent[wire.checksum(blob)] = blob
                out.append({"blob": wire.checksum(blob)})
            else:
                out.append(result)
        notes = sorted({str(note.message) for note in warned})
        return Envelope({**answer, "results": out, "notes": notes}, sent)

    def _open(self, key: str, run: str, blob: bytes) -> None:
        try:
            setup = parse_json(blob, "the description of the run")
            if not re.fullmatch(r"[0-9a-f]{1,64}", run):
                raise ConfigError("the name of a run must be a hexadecimal number")
            self._refuse_foreign(setup["description"])
            data = self._read(setup)
            folder = self.home / "runs" / run
            self.rooms = {key: Room(self.name, data, setup, folder, self.allow, self.answers)}
        except (CoterieError, AttributeError, KeyError, TypeError, ValueError) as error:
            traceback.print_exc()
            self.broken[key] = f"{type(error).__name__}: {error}"

    def _refuse_foreign(self, value: Any) -> None:
        """Raise an error if a server asks for code that this node does not allow."""
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, dict | list):
                self._refuse_foreign(part)
            elif isinstance(part, str) and IMPORT.fullmatch(part):
                package = re.split(r"[.:]", part)[0]
                if package not in self.allow:
                    raise ConfigError(
                        f"the run uses code of '{package}' ({part}), which this node does not "
                        f"allow. If you trust it, start the node with --allow {package}"
                    )

    def _read(self, setup: dict[str, Any]) -> FederatedData:
        description, card = setup["description"], DataCard.from_dict(setup["card"])
        options = description.get("data", {})
        if self.data == TRIAL:
            whole = make_data(options)
            if self.name not in whole.names:
                raise DataError(
                    f"the name of the node must be a client in the data of the run file. There is "
                    f"no client '{self.name}'"
                )
            return whole.subset(torch.tensor([whole.names.index(self.name)]))
        if IMPORT.fullmatch(self.data):  # named by the owner of this node
            load_data = load(self.data, {self.data})
            return one_client(load_data(self.name), self.name, card, options)
        how = read_options(options).format
        table = client_file(Path(self.data), self.name, card.sample_shape, how)
        return one_client(table, self.name, card, options)


def listen(worker: Worker) -> None:
    """Answer messages until the node ends."""
    key = secrets.token_bytes(32)
    private(worker.home / KEY_FILE, key)
    # The path of a socket may have at most 107 characters, so it is not in the node's folder.
    place = Path(tempfile.mkdtemp(prefix="coterie-"))
    address = place / "worker.sock"
    old = os.umask(0o177)
    try:
        listener = Listener(str(address), "AF_UNIX", backlog=16, authkey=key)
    finally:
        os.umask(old)
    private(worker.home / ADDRESS_FILE, str(address).encode())
    print(f"worker of '{worker.name}' listens on {address}", flush=True)

    def leave(*_: Any) -> None:
        listener.close()
        address.unlink(missing_ok=True)
        place.rmdir()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=follow, args=(os.getppid(), leave), daemon=True).start()
    while True:
        try:
            with listener.accept() as connection:
                asked = receive(connection)
                began = time.perf_counter()
                answer = worker.handle(asked)
                seconds = time.perf_counter() - began
                print(
                    f"round {asked.head.get('round', -1) + 1}: {describe_calls(asked.head)} "
                    f"in {seconds:.2f} s",
                    flush=True,
                )
                send(connection, answer)
        except Exception as error:  # a relay has died, or an unknown process has connected
            print(f"a message was lost: {type(error).__name__} {error}", flush=True)


def describe_calls(head: dict[str, Any]) -> str:
    """The names of the tasks and questions of a message, for the log."""
    return " ".join(task_name(call["task"]) for call in head.get("calls", ())) or "hello"


def task_name(described: dict[str, Any]) -> str:
    """The name of a task, or of a question without its module."""
    return str(described.get("name") or described["question"].partition(":")[2])


def follow(parent: int, leave: Any) -> None:
    """End when the parent process does."""
    while os.getppid() == parent:
        time.sleep(1.0)
    leave()


def main(arguments: list[str] | None = None) -> None:
    """Run a worker: python -m coterie.deploy.worker HOME NAME DATA."""
    parser = argparse.ArgumentParser(prog="coterie.deploy.worker")
    parser.add_argument("home", type=Path)
    parser.add_argument("name")
    parser.add_argument("data")
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--answer", action="append", default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    allow, answers = tuple(options.allow), tuple(options.answer)
    listen(Worker(options.home, options.name, options.data, allow, answers))


if __name__ == "__main__":
    main()
