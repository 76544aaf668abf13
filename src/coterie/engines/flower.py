"""Messages over Flower, through its public interface (for the rest see `flower_private`).

On the server, a Flower grid becomes a `Link` for `engines.remote`. On a stock node, a relay passes
every message to the worker of its node. Neither side imports torch, because the relay is a new
process for every message and must start quickly.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.relay import UNREADABLE, Envelope, Link, ask_worker, live_file, private

TYPE = "query.coterie"
HEAD, JSON, DATA, PACKED = "head", "json", "data", "blob-"
SMALL, PIECE = 256 * 1024, 4 * 1024 * 1024
"""Largest blob, in bytes, that travels inside the head, and the largest in one piece."""


def to_records(
    message: Envelope, known: dict[str, ArrayRecord | ConfigRecord] | None = None
) -> RecordDict:
    """An envelope as Flower's records.

    Flower sends every record, array and piece of an array as a request of its own. A small blob
    therefore travels inside the head, and a larger one is one record, which is sent once if it goes
    to several nodes (the same object, from `known`). A very large one becomes an array of bytes,
    which Flower cuts into pieces.
    """
    known = {} if known is None else known
    head = ConfigRecord({JSON: json.dumps(message.head)})
    records = RecordDict({HEAD: head})
    for name, blob in message.blobs.items():
        if len(blob) <= SMALL:
            head[PACKED + name] = blob
            continue
        if name not in known and len(blob) <= PIECE:
            known[name] = ConfigRecord({DATA: blob})
        elif name not in known:
            array = Array("uint8", (len(blob),), "coterie.wire", blob)
            known[name] = ArrayRecord({DATA: array})
        records[name] = known[name]
    return records


def from_records(records: RecordDict) -> Envelope:
    """The envelope in Flower's records."""
    blobs: dict[str, Any] = {name: r[DATA].data for name, r in records.array_records.items()}
    single = dict(records.config_records)
    record = single.pop(HEAD)
    blobs |= {name: other[DATA] for name, other in single.items()}
    blobs |= {name.removeprefix(PACKED): blob for name, blob in record.items() if name != JSON}
    if not all(isinstance(blob, bytes) for blob in blobs.values()):
        raise ValueError("a blob must be bytes")
    return Envelope(json.loads(str(record[JSON])), blobs)


class GridLink:
    """A Flower grid as a link. An answer is identified by the message that it replies to.

    `live` is a file for the answers that are being waited for, which `coterie deploy status` reads.
    """

    def __init__(self, grid: Grid, live: Path | None = None) -> None:
        self.grid, self.live = grid, live
        self._waiting: dict[str, dict[str, Any]] = {}
        self._told = ""

    def nodes(self) -> dict[int, str]:
        if not hasattr(self.grid, "get_nodes"):
            return dict.fromkeys(self.grid.get_node_ids(), "")
        return {node.node_id: node.name for node in self.grid.get_nodes()}

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        known: dict[str, ArrayRecord | ConfigRecord] = {}
        out = [
            Message(to_records(envelope, known), node, TYPE, ttl=seconds)
            for node, envelope in messages
        ]
        numbers = list(self.grid.push_messages(out)) if out else []
        now = time.time()
        self._waiting = {k: v for k, v in self._waiting.items() if v["until"] > now}
        for (node, asked), number in zip(messages, numbers, strict=False):
            if not number:
                continue
            who = asked.head["client"] or f"node {node}"
            about = {"client": who, "round": asked.head["round"] + 1, "since": now}
            self._waiting[number] = {**about, "until": now + seconds}
        self._tell()
        return [number or None for number in numbers] or [None] * len(out)

    def _tell(self) -> None:
        """Write who has not answered yet."""
        text = json.dumps(list(self._waiting.values()))
        if self.live is not None and text != self._told:
            private(self.live, text.encode())
            self._told = text

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope | str]]:
        answers: list[tuple[str, Envelope | str]] = []
        for reply in self.grid.pull_messages(list(numbers)):
            # Answers of the SuperLink itself do not contain the node that was asked.
            number = reply.metadata.reply_to_message_id
            self._waiting.pop(number, None)
            if reply.has_error():
                answers.append((number, f"error {reply.error.code}: {reply.error.reason}"))
                continue
            try:
                answers.append((number, from_records(reply.content)))
            except Exception as error:  # whatever one node sent concerns that node alone
                answers.append((number, f"{UNREADABLE} ({type(error).__name__})"))
        self._tell()
        return answers


def server_app(serve: Callable[[Link, Path, Mapping[str, Any]], None], folder: Path) -> ServerApp:
    """A Flower server app that runs the app in a folder (see `coterie.deploy`)."""

    def main(grid: Grid, context: Context) -> None:
        from coterie.engines.flower_private import pull_quickly

        pull_quickly(float(context.run_config["deadline"]))
        out = Path(str(context.run_config["out"])).expanduser()
        serve(GridLink(grid, live_file(out)), folder, context.run_config)

    app = ServerApp()
    app.main()(main)
    return app


def client_app() -> ClientApp:
    """The client app of stock nodes, which passes every message to the worker of its node."""

    def relay(message: Message, context: Context) -> Message:
        asked = from_records(message.content)
        # After the deadline the answer is not needed; the node must be free for the next message.
        seconds = min(float(asked.head["deadline"]), message.metadata.ttl)
        home = Path(str(context.node_config["home"]))
        return Message(to_records(ask_worker(home, asked, seconds)), reply_to=message)

    app = ClientApp()
    app.query("coterie")(relay)
    return app
