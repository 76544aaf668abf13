"""Messages between server and clients, and the socket between a node and its worker.

An envelope has plain data and named blobs of bytes. Nothing here needs torch or Flower, because a
Flower node starts a new process for every message, which only passes the message on.
"""

import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PROTOCOL = 3
"""Version of the messages; server and clients must have the same."""
UNREADABLE = "sent an answer that cannot be read"
"""How the reason begins if a link cannot read an answer: a fault, and not a missing reply."""
KEY_FILE, ADDRESS_FILE = "worker.key", "worker.address"


class Envelope(NamedTuple):
    """One message."""

    head: dict[str, Any]  # plain data: which run, round and exchange, and a list of calls
    blobs: dict[str, bytes]  # trees of tensors, as `core.wire` writes them, by checksum


class Link(Protocol):
    """A carrier of envelopes: Flower's grid, or a substitute in tests."""

    def nodes(self) -> dict[int, str]:
        """The connected nodes, and the registered name of each ("" if it has none)."""

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        """Send envelopes to nodes; the number of each message, None if it could not be sent."""

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope | str]]:
        """Answers that have arrived: number of the message, and the answer or an error text."""


def send(connection: Connection, message: Envelope) -> None:
    """Write an envelope to a socket: its head, then its blobs. Bytes only, no pickle."""
    blobs = list(message.blobs.items())
    connection.send_bytes(json.dumps([message.head, [name for name, _ in blobs]]).encode())
    for _, blob in blobs:
        connection.send_bytes(blob)


def receive(connection: Connection) -> Envelope:
    """Read an envelope from a socket."""
    head, names = json.loads(connection.recv_bytes())
    return Envelope(head, {name: connection.recv_bytes() for name in names})


def ask_worker(
    home: Path, message: Envelope, seconds: float, pause: Callable[[float], None] = time.sleep
) -> Envelope:
    """Pass a message to the worker of a node and wait for its answer.

    If the worker is not running, or dies, wait for the new worker that the node starts, and pass
    the message again. This is safe, because a worker undoes the work of an exchange whose answer
    the server did not receive.
    """
    end = time.monotonic() + seconds
    why: Exception | None = None
    while time.monotonic() < end:
        try:
            key = (home / KEY_FILE).read_bytes()
            address = (home / ADDRESS_FILE).read_text()
            with Client(address, "AF_UNIX", authkey=key) as connection:
                send(connection, message)
                if connection.poll(max(0.0, end - time.monotonic())):
                    return receive(connection)
        except (OSError, EOFError) as error:  # not running yet, or ended
            why = error
        pause(0.2)
    reason = f"; last: {type(why).__name__} {why}" if why is not None else ""
    raise TimeoutError(f"the worker in {home} did not answer within {seconds:.0f} s{reason}")


def live_file(out: Path) -> Path:
    """The file beside a run folder that says whose answers are missing."""
    return out.with_name(out.name + ".live.json")


def private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
