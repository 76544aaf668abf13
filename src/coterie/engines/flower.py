"""Messages over Flower. Only this module imports `flwr`.

On the server, a Flower grid becomes a `Link` for `engines.remote`. On a client, a relay passes
every message to the worker of its node. Neither side imports torch, because the relay is a new
process for every message and must start quickly.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.relay import Envelope, Link, ask_worker

TYPE = "query.coterie"
HEAD, JSON, DATA = "head", "json", "data"


def to_records(message: Envelope, known: dict[str, ArrayRecord] | None = None) -> RecordDict:
    """An envelope as Flower's records.

    Blobs become arrays of bytes. Flower splits them into pieces, and an array that goes to several
    nodes (the same object, from `known`) is sent once.
    """
    known = {} if known is None else known
    records = RecordDict({HEAD: ConfigRecord({JSON: json.dumps(message.head)})})
    for name, blob in message.blobs.items():
        if name not in known:
            array = Array("uint8", (len(blob),), "coterie.wire", blob)
            known[name] = ArrayRecord({DATA: array})
        records[name] = known[name]
    return records


def from_records(records: RecordDict) -> Envelope:
    """The envelope in Flower's records."""
    head = json.loads(str(records.config_records[HEAD][JSON]))
    return Envelope(head, {name: r[DATA].data for name, r in records.array_records.items()})


class GridLink:
    """A Flower grid as a link. An answer is identified by the message that it replies to."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, str]:
        if not hasattr(self.grid, "get_nodes"):
            return dict.fromkeys(self.grid.get_node_ids(), "")
        return {node.node_id: node.name for node in self.grid.get_nodes()}

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        known: dict[str, ArrayRecord] = {}
        out = [
            Message(to_records(envelope, known), node, TYPE, ttl=seconds)
            for node, envelope in messages
        ]
        numbers = list(self.grid.push_messages(out)) if out else []
        return [number or None for number in numbers] or [None] * len(out)

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope | str]]:
        answers: list[tuple[str, Envelope | str]] = []
        for reply in self.grid.pull_messages(list(numbers)):
            # Answers of the SuperLink itself do not contain the node that was asked.
            number = reply.metadata.reply_to_message_id
            if reply.has_error():
                answers.append((number, f"error {reply.error.code}: {reply.error.reason}"))
                continue
            try:
                answers.append((number, from_records(reply.content)))
            except (KeyError, ValueError, TypeError) as error:
                answers.append((number, f"the answer cannot be read ({error!r})"))
        return answers


def server_app(serve: Callable[[Link, Path, Mapping[str, Any]], None], folder: Path) -> ServerApp:
    """A Flower server app that runs the app in a folder (see `coterie.deploy`)."""

    def main(grid: Grid, context: Context) -> None:
        serve(GridLink(grid), folder, context.run_config)

    app = ServerApp()
    app.main()(main)
    return app


def client_app() -> ClientApp:
    """A Flower client app that passes every message to the worker of its node."""

    def relay(message: Message, context: Context) -> Message:
        asked = from_records(message.content)
        # After the deadline the answer is not needed; the node must be free for the next message.
        seconds = min(float(asked.head["deadline"]), message.metadata.ttl)
        home = Path(str(context.node_config["home"]))
        return Message(to_records(ask_worker(home, asked, seconds)), reply_to=message)

    app = ClientApp()
    app.query("coterie")(relay)
    return app


def clientapp() -> Callable[[], None]:
    """Flower's command `flwr-clientapp`, loaded and ready, with the relay's own modules."""
    from flwr.supernode.cli import flwr_clientapp

    run: Callable[[], None] = flwr_clientapp
    return run
