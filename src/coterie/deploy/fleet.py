"""A node: workers that talk to the SuperLink themselves, through Flower's own connection.

One process has torch, the data and the memory of one or several clients. Each client has its own
key, folder and connection, and they work in turn. No process is started for a message, and no app
is fetched or executed.
"""

import argparse
import fcntl
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coterie.core.errors import ConfigError
from coterie.deploy.keys import node_key
from coterie.deploy.worker import Worker, describe_calls, follow
from coterie.engines.flower_private import Asked, Fleet, Refused, away, check_version
from coterie.engines.relay import Envelope, private

SEEN, LOCK, OWN_KEY = "seen.json", "node.lock", "own.key"
PAUSES = (1.0, 2.0, 5.0, 10.0)  # seconds until the SuperLink is tried again
SHORTEST, LONGEST, SHARE, GAP = 0.03, 3.0, 0.15, 4.0
"""Seconds between two polls: a share of the time since the last message, or of the time between the
last two (up to `GAP` seconds), if that is longer; within bounds. So a message waits little during a
run, many nodes do not keep the SuperLink busy with polls, and an idle node costs no more than
Flower's own."""


class Attendant:
    """One client of a node: its worker, and its connection."""

    def __init__(
        self,
        worker: Worker,
        superlink: str,
        certificate: Path | None,
        key: Path | None,
        turn: threading.Lock,
        stop: threading.Event,
    ) -> None:
        self.worker, self.turn, self.stop = worker, turn, stop
        worker.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if key is None:
            key = worker.home / OWN_KEY
            if not key.exists():
                node_key(key)
        self._connect: Callable[[], Fleet] = lambda: Fleet(superlink, certificate, key, worker.home)
        self._lock = open(worker.home / LOCK, "w")  # noqa: SIM115, it is held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Only one node may use {worker.home}. Another one does. Stop it first."
            ) from None
        self.fleet: Fleet | None = None
        self._told = 0.0

    def attend(self) -> None:
        """Answer messages, and connect again whenever the connection ends."""
        failures = 0
        while not self.stop.is_set():
            self.fleet = self._connect()
            began = time.monotonic()
            try:
                number = self.fleet.connect()
                self._say(f"connected as node {number}")
                self._answer(self.fleet)
            except Refused as error:
                self._say(f"refused by the SuperLink: {error}")
            except Exception as error:
                if not away(error):
                    traceback.print_exc()
                self._say(f"lost the SuperLink: {type(error).__name__} {error}")
            finally:
                self.fleet.close(leave=self.stop.is_set())
            failures = 0 if time.monotonic() - began > 60 else failures + 1
            self.stop.wait(PAUSES[min(failures, len(PAUSES)) - 1])

    def _answer(self, fleet: Fleet) -> None:
        since, gap = time.monotonic(), 0.0
        while not self.stop.is_set():
            asked = fleet.receive()
            waited = time.monotonic() - since
            if asked is None:
                self._note(None)
                if fleet.letters:  # one has come, and is not uploaded as a whole yet
                    waited, gap = time.monotonic() - fleet.heard, 0.0
                pause = SHARE * max(waited, gap)
                self.stop.wait(min(max(SHORTEST, pause), LONGEST))
                continue
            gap = min(waited, GAP)
            fleet.reply(asked, self._work(asked))
            since = time.monotonic()
            self._note(None, done=True)

    def _work(self, asked: Asked) -> Envelope | str:
        if asked.envelope is None:
            self._say(f"ignored a message of type {asked.message.metadata.message_type}")
            return "this node answers Coterie's messages only and runs no apps"
        head = asked.envelope.head
        self._note(asked.envelope)
        try:
            with self.turn:
                began = time.perf_counter()
                answer = self.worker.handle(asked.envelope)
            seconds = time.perf_counter() - began
            self._say(f"round {head['round'] + 1}: {describe_calls(head)} in {seconds:.2f} s")
            return answer
        except Exception as error:  # the message is not what it should be
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"

    def _note(self, asked: Envelope | None, done: bool = False) -> None:
        """Write when the SuperLink was last reached, and what the client is doing."""
        now = time.time()
        if asked is None and not done and now - self._told < 1.0:
            return
        about: dict[str, Any] = {"seen": now, "doing": None}
        if asked is not None:
            about |= {"doing": describe_calls(asked.head), "round": asked.head["round"] + 1}
        part = self.worker.home / f"{SEEN}.part"
        private(part, json.dumps(about).encode())
        os.replace(part, self.worker.home / SEEN)
        self._told = now

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%F %T')} {self.worker.name}: {text}", flush=True)


def run(attendants: list[Attendant], stop: threading.Event, with_parent: bool) -> None:
    """Attend to all clients until the process is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if with_parent:
        threading.Thread(target=follow, args=(os.getppid(), stop.set), daemon=True).start()
    threads = [threading.Thread(target=each.attend, daemon=True) for each in attendants]
    for thread in threads:
        thread.start()
    while not stop.wait(1.0):
        if not all(thread.is_alive() for thread in threads):
            os._exit(1)  # the supervisor starts this process again
    # A client in the middle of its work is not waited for: it takes the message up again.
    end = time.monotonic() + 5.0
    for each, thread in zip(attendants, threads, strict=True):
        thread.join(max(0.1, end - time.monotonic()) if not each.turn.locked() else 0.1)
        if thread.is_alive() and each.fleet is not None:
            each.fleet.close()
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Run a node: python -m coterie.deploy.fleet HOME NAMES DATA SUPERLINK."""
    parser = argparse.ArgumentParser(prog="coterie.deploy.fleet")
    parser.add_argument("home", type=Path)
    parser.add_argument("names", help="with several, HOME and --key have a part for each")
    parser.add_argument("data")
    parser.add_argument("superlink")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--answer", action="append", default=[])
    parser.add_argument("--with-parent", action="store_true", help="end when the parent ends")
    options = parser.parse_args(arguments)
    check_version()
    os.umask(0o077)
    torch.set_num_threads(1)
    names, turn, stop = options.names.split(","), threading.Lock(), threading.Event()
    attendants = []
    for name in names:
        home, key = options.home, options.key
        if len(names) > 1:
            home, key = home / name, None if key is None else key / name
        allow, answers = tuple(options.allow), tuple(options.answer)
        worker = Worker(home.resolve(), name, options.data, allow, answers)
        attendants.append(
            Attendant(worker, options.superlink, options.certificate, key, turn, stop)
        )
    run(attendants, stop, options.with_parent)


if __name__ == "__main__":
    main()
