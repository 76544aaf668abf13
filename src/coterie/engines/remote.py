"""Real clients over a link: every task is a message, and some answers may be missing.

An exchange takes seconds, so an envelope has a list of calls: a call that is not urgent, such as an
evaluation, waits for the next message. A tree is sent to a client once per round; after that, only
its checksum is sent, and for a row of a bank that the client has, only the row number.

Clients keep their memory on their own disk. The server keeps, for each client, the last exchange
that it received an answer to, in the same transactional memory in which a simulation keeps the
memory itself. Every message contains this exchange, and the client drops what is newer. So a late
answer, an abandoned round and a server that returns to a checkpoint have no effect on the client.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import wire
from coterie.core.client import natural
from coterie.core.errors import FederationError
from coterie.core.federation import BankRows, Call, Each, Federation, Then
from coterie.core.question import describe_task
from coterie.core.random import codes, fold, seed_key
from coterie.core.replies import Inspector, Shapes, find_misfit, shapes_of
from coterie.core.tree import Ids, Tree, leaves, n_bytes, named_leaves, row, stack
from coterie.engines.relay import PROTOCOL, UNREADABLE, Envelope, Link

NOTES, NOTE = 20, 500  # notes of a client that are shown, and letters of each
AGAIN = 3  # times that a client may say, in one exchange, that it lacks what it was sent
NAME = 200  # letters of a client's name
MOST_LEAVES = 10_000  # of a reply whose structure is not known beforehand
MOST_BYTES = 1 << 30  # likewise


class Rider(NamedTuple):
    """A call that waits for the next message."""

    call: Call
    round: int
    then: Then


@dataclass
class Parcel:
    """The message to one client in an exchange, and its answer."""

    client: int
    calls: list[tuple[int, int]]  # number of the call, index of the client among those asked
    described: list[dict[str, Any]]
    needed: dict[str, Callable[[], bytes]]  # blobs the calls refer to, by checksum
    names: list[str]  # of the tasks, for messages
    expected: list[Shapes | None]  # structure of each reply, if it is known
    replies: list[dict[str, Any] | None] = field(default_factory=list)
    asked: int = 0  # times that the message was sent


class Remote(Federation):
    """A federation of real clients.

    Parameters
    ----------
    link
        Carrier of the messages.
    setup
        What clients need to take part, as plain data: the run file and the data card.
    run
        Name of the run, under which clients keep their memory.
    names
        Clients known from an earlier part of the run.
    deadline
        Seconds that an exchange may take; later answers are lost.
    at_least
        Smallest number of answers; with fewer, a round is abandoned. A method may ask for more.
    poll
        Seconds between two requests for answers.
    chunk
        Number of answers that are added to a mean at a time.
    on_join
        Function that is called with all names, in the order of their ids, when a client joins.
    rehearse
        Function that does a call as a client would, on made-up data, and returns its reply: the
        structure that replies must have. None, or an error in it: that of most replies.
    known
        Structures of replies that an earlier part of the run has found (`plan["replies"]`).
    """

    defers = True
    simulated = False

    def __init__(
        self,
        link: Link,
        setup: dict[str, Any],
        run: str,
        seed: int = 0,
        participation: float = 1.0,
        *,
        names: Sequence[str] = (),
        deadline: float = 60.0,
        at_least: int = 1,
        poll: float = 0.1,
        chunk: int = 64,
        on_join: Callable[[tuple[str, ...]], None] | None = None,
        rehearse: Callable[[Call], Tree] | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(names, seed, participation)
        self.link, self.run = link, run
        self.deadline, self.at_least, self.poll, self.chunk = deadline, at_least, poll, chunk
        self.wire_bytes = {"down": 0, "up": 0}  # bytes of blobs that were sent over the link
        self._on_join, self._rehearse = on_join, rehearse
        self._structures: dict[str, Shapes | None] = {
            name: shapes and {leaf: (kind, tuple(size)) for leaf, (kind, size) in shapes.items()}
            for name, shapes in (known or {}).items()
        }
        self._sizes: dict[str, dict[str, int]] = {}  # samples that each client has declared
        self._setup = json.dumps(setup, sort_keys=True).encode()
        self._setup_name = wire.checksum(self._setup)
        self._claims: dict[str, list[int]] = {}  # nodes with a name, oldest first
        self._greeted: dict[int, str] = {}  # nodes, and the greeting that was sent to each
        self._online: dict[int, str] = {}
        self._riders: list[Rider] = []
        self._clock = 0
        self._saved: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._missing = ""
        self._refusals: set[tuple[int, str]] = set()
        self._forget()

    # clients that are connected

    def meet(self, clients: int, seconds: float) -> None:
        """Wait until this number of clients has joined; ids follow the order of the names.

        A resumed run waits for one client, and for at most `deadline` for all clients it knew.
        """
        end = time.monotonic() + seconds
        hoped, patience = len(self.names), time.monotonic() + self.deadline
        while True:
            self._look()
            present = len(self._present())
            if present >= max(clients, hoped):
                break
            if present >= clients and time.monotonic() >= patience:
                break
            if time.monotonic() >= end:
                raise FederationError(
                    f"{clients} clients must join first. {len(self._present())} joined "
                    f"within {seconds:.0f} s: {', '.join(sorted(self._present())) or 'none'}. "
                    "Start the others, or ask for fewer (run config: clients)."
                )
            time.sleep(5 * self.poll)
        self._admit()

    def _present(self) -> list[str]:
        return [name for name in self._claims if self._node_of(name) is not None]

    def _admit(self) -> None:
        """Give new clients an id."""
        new = sorted(set(self._claims) - set(self.names), key=natural)
        if not new:
            return
        self.names = (*self.names, *new)
        self._name_keys = fold(seed_key(0), codes(self.names))
        if self._on_join is not None:
            self._on_join(self.names)

    def _look(self) -> None:
        """Greet new nodes, and record the name of each node."""
        self._online = self.link.nodes()
        waiting = {number: node for node, number in self._greeted.items() if number}
        for number, answer in self.link.pull(set(waiting)) if waiting else ():
            node = waiting.get(number)
            if node is None:
                continue
            self._greeted[node] = ""
            if isinstance(answer, str):
                del self._greeted[node]  # greet it again next time
            else:
                self._claim(node, answer.head)
        gone = [node for node in self._greeted if node not in self._online]
        for node in gone:
            del self._greeted[node]
        for name, nodes in self._claims.items():
            self._claims[name] = [node for node in nodes if node in self._online]
        new = [node for node in self._online if node not in self._greeted]
        seconds = max(self.deadline, 60.0)  # a new worker must read its data first
        head = {**self._head(None, -1, 0, []), "deadline": seconds}
        hello = Envelope(head, {self._setup_name: self._setup})
        sent = self.link.push([(node, hello) for node in new], seconds) if new else []
        self._greeted |= {node: number for node, number in zip(new, sent, strict=True) if number}

    def declared(self, split: str) -> Tensor:
        """What clients said when they joined."""
        sizes = [self._sizes.get(name, {}).get(split, -1) for name in self.names]
        return torch.tensor(sizes, dtype=torch.int64)

    def _claim(self, node: int, head: Any) -> None:
        registered = self._online.get(node, "")
        name, reason = read_greeting(head)
        if reason:
            warnings.warn(f"Node {node} ('{name}') cannot take part: {reason}.", stacklevel=3)
        elif registered and registered != name:
            warnings.warn(
                f"Node {node} has the name '{name}', but its key is registered for '{registered}'. "
                "The node is ignored. Start it with its registered name.",
                stacklevel=3,
            )
        else:
            others = self._claims.setdefault(name, [])
            if node not in others:
                others.append(node)
            if others[0] == node:  # of several nodes with a name, the first is asked
                self._sizes[name] = {split: int(n) for split, n in head["sizes"].items()}

    def _node_of(self, name: str) -> int | None:
        """The node of a client: of several nodes with its name, the first that is connected."""
        return next((n for n in self._claims.get(name, []) if n in self._online), None)

    # rounds

    def begin(self, round: int) -> None:
        super().begin(round)
        self._forget()
        self._look()
        self._admit()

    def _forget(self) -> None:
        self._held: dict[int, set[str]] = {}
        self._trees: dict[tuple[Any, int | None], tuple[Tree, str, bytes]] = {}

    def note_saved(self) -> None:
        """Record a checkpoint; clients may delete what is older than the last two checkpoints."""
        heard = {c: int(tree["heard"]) for c, tree in self.memory.committed.items() if tree}
        self._saved = (self._saved[1], heard)

    def fewest(self, at_least: int, asked: int) -> int:
        if not at_least or self._phase == "evaluation":
            return at_least
        return max(at_least, min(self.at_least, asked))

    def ask_later(self, task: Callable[..., Any], *given: Any, to: Ids, then: Then) -> None:
        """Ask with the next message, between rounds and without a change of memory."""
        with self.aside():
            call = self.call(task, given, to)
            self.traffic.count_sent(call)
        self._riders.append(Rider(call, self.round, then))

    def exchange(self, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        riders, self._riders = self._riders, []
        answers = self._ask([*((rider.call, rider.round) for rider in riders), (call, self.round)])
        for rider, said in zip(riders, answers, strict=False):
            self._tell(rider.call, said, rider.then)
        said = answers[-1]
        for start in range(0, len(said), self.chunk):
            part = sorted(said)[start : start + self.chunk]
            yield torch.tensor(part), stack([said[place] for place in part])

    def _tell(self, call: Call, said: dict[int, dict[str, Any]], then: Then) -> None:
        if not said:
            return
        places = torch.tensor(sorted(said))
        replies = [said[place] for place in sorted(said)]
        sizes = torch.tensor([n_bytes(reply) for reply in replies])
        self.traffic.add(call.phase, "up", call.ids[places], sizes)
        declared = self.declared(call.info.split or "train")[call.ids]
        inspector = Inspector((), declared, call.info.samples, False, call.limits)
        places, reply = inspector.check(places, stack(replies))
        for place, why in inspector.faults:
            self.note_fault(int(call.ids[place]), call.name, why)
        if len(places):
            then(call.ids[places], reply)

    def why_missing(self) -> str:
        return self._missing

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that affect the last bits of the result."""
        return {
            "engine": "flower",
            "chunk": self.chunk,
            "threads": torch.get_num_threads(),
            "replies": self._structures,
        }

    # messages

    def _ask(self, calls: list[tuple[Call, int]]) -> list[dict[int, dict[str, Any]]]:
        """Send calls, of which only the last is urgent; for each call, the answers by index."""
        self._missing = ""
        if not self._clock:  # later than all earlier exchanges, even if the clock was set back
            heard = [int(tree["heard"]) for tree in self.memory.committed.values() if tree]
            self._clock = max(heard, default=0)
        self._clock = number = max(self._clock + 1, time.time_ns())
        parcels = self._parcels(calls)
        end = time.monotonic() + self.deadline
        waiting: dict[str, Parcel] = {}
        first = []
        for parcel in parcels:
            node = self._node_of(self.names[parcel.client])
            if node is None:
                self._note(parcel, "is not connected")
            else:
                first.append((node, parcel))
        self._send(first, number, end, waiting)
        while waiting:
            over = time.monotonic() >= end
            again = []
            for message, answer in self.link.pull(set(waiting)):
                parcel = waiting.pop(message, None)  # type: ignore[arg-type]
                if parcel is None:
                    continue  # an answer to another message, or a second answer
                lacks = self._read(parcel, answer, number)
                node = self._node_of(self.names[parcel.client])
                if lacks and parcel.asked > AGAIN:
                    self._blame(parcel, "says again and again that it lacks what it was sent")
                elif lacks and node is not None:
                    self._held[parcel.client] = self._held.get(parcel.client, set()) - set(lacks)
                    again.append((node, parcel))
            self._send(again, number, end, waiting)
            if over:
                break
            if waiting:
                time.sleep(self.poll)
        for parcel in waiting.values():
            self._note(parcel, f"did not answer within {self.deadline:g} s")
        out: list[dict[int, dict[str, Any]]] = [{} for _ in calls]
        for parcel in parcels:
            for (number, place), reply in zip(parcel.calls, parcel.replies, strict=False):
                if reply is not None:
                    out[number][place] = reply
        return [self._keep_usual(calls[i][0], said) for i, said in enumerate(out)]

    def _keep_usual(self, call: Call, said: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Where no structure was known beforehand: keep the replies with the most frequent one."""
        shapes = {place: tuple(shapes_of(reply).items()) for place, reply in said.items()}
        if len(set(shapes.values())) <= 1:
            return said
        usual, _ = Counter(shapes.values()).most_common(1)[0]
        for place in said:
            if (why := find_misfit(said[place], dict(usual))) is not None:
                self.note_fault(int(call.ids[place]), call.name, f"{why}, unlike most clients")
        return {
            place: reply for place, reply in said.items() if not find_misfit(reply, dict(usual))
        }

    def _expect(self, call: Call) -> Shapes | None:
        """The structure of replies to a call; None if it cannot be known beforehand."""
        name = _signature(call)
        if name not in self._structures:
            self._structures[name] = None
            if self._rehearse is not None:
                try:
                    reply = wire.load(wire.dump(self._rehearse(call)))
                    self._structures[name] = shapes_of(reply)
                except Exception as error:  # made-up data may not suit a task
                    self._structures[name] = None
                    print(f"{call.name}: the form of replies is that of most clients ({error!r}).")
        return self._structures[name]

    def _parcels(self, calls: list[tuple[Call, int]]) -> list[Parcel]:
        parcels: dict[int, Parcel] = {}
        for number, (call, round) in enumerate(calls):
            aside = number < len(calls) - 1
            task = describe_task(call.task)
            expected = self._expect(call) if len(call.ids) else None
            for place, client in enumerate(call.ids.tolist()):
                parcel = parcels.setdefault(client, Parcel(client, [], [], {}, [], []))
                parcel.names.append(call.name)
                parcel.expected.append(expected)
                given = [self._refer(parcel, part, place) for part in call.given]
                parcel.calls.append((number, place))
                parcel.described.append(
                    {
                        "task": task,
                        "phase": call.phase,
                        "support": "train" if aside else self.support,
                        "round": round,
                        "key": int(call.key),
                        "local_key": int(call.local_key),
                        "aside": aside,
                        "given": given,
                    }
                )
        return list(parcels.values())

    def _refer(self, parcel: Parcel, given: Any, place: int) -> dict[str, Any]:
        """Refer to a tree by its checksum, or as a row of a bank that the client has."""
        if isinstance(given, Each):
            tree = row(given.tree, place)
        elif isinstance(given, BankRows):
            number = int(given.index[place])
            bank = self._trees.get((_identity(given.bank), None))
            if bank is not None and bank[1] in self._held.get(parcel.client, set()):
                parcel.needed[bank[1]] = lambda: bank[2]
                return {"blob": bank[1], "row": number}
            name, blob = self._dump(given.bank, number)
            parcel.needed[name] = lambda: blob
            return {"blob": name}
        else:
            tree = given
        name, blob = self._dump(tree, None)
        parcel.needed[name] = lambda: blob
        return {"blob": name}

    def _dump(self, tree: Tree, number: int | None) -> tuple[str, bytes]:
        """A tree, or a row of a bank, as bytes; computed once per round."""
        identity = _identity(tree), number
        if identity not in self._trees:
            blob = wire.dump(tree if number is None else row(tree, number))
            # The tree is kept with its bytes, so that no other tensor can get the same identity.
            self._trees[identity] = (tree, wire.checksum(blob), blob)
        _, name, blob = self._trees[identity]
        return name, blob

    def _head(
        self, client: int | None, round: int, number: int, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        known = client is not None and self.memory.knows(client)
        tree = self.memory.get(client) if known else {}  # type: ignore[arg-type]
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "setup": self._setup_name,
            "client": None if client is None else self.names[client],
            "round": round,
            "exchange": number,
            "deadline": self.deadline,
            "heard": int(tree["heard"]) if tree else 0,
            "saved": self._saved[0].get(client, 0) if client is not None else 0,
            "calls": calls,
        }

    def _send(
        self,
        parcels: list[tuple[int, Parcel]],
        number: int,
        end: float,
        waiting: dict[str, Parcel],
    ) -> None:
        messages = []
        for node, parcel in parcels:
            held = self._held.setdefault(parcel.client, set())
            blobs = {name: get() for name, get in parcel.needed.items() if name not in held}
            head = self._head(parcel.client, self.round, number, parcel.described)
            parcel.asked += 1
            messages.append((node, Envelope(head, blobs)))
            self.wire_bytes["down"] += sum(map(len, blobs.values()))
        if not messages:
            return
        sent = self.link.push(messages, max(1.0, end - time.monotonic()))
        for (_, parcel), message in zip(parcels, sent, strict=True):
            if message is None:
                self._note(parcel, "could not be sent its message")
            else:
                waiting[message] = parcel

    def _read(self, parcel: Parcel, answer: Envelope | str, number: int) -> list[str]:
        """Read an answer; return the blobs that the client reports as missing.

        Whatever is wrong with it concerns this client alone.
        """
        if isinstance(answer, str):
            if answer.startswith(UNREADABLE):
                self._blame(parcel, answer)
            else:
                self._note(parcel, f"failed: {_cut(answer)}")
            return []
        try:
            return self._read_answer(parcel, answer, number)
        except Exception as error:
            parcel.replies = []
            self._blame(parcel, f"{UNREADABLE} ({_cut(str(error)) or type(error).__name__})")
            return []

    def _read_answer(self, parcel: Parcel, answer: Envelope, number: int) -> list[str]:
        head = answer.head
        if not isinstance(head, dict):
            raise FederationError(f"its head is a {type(head).__name__}, not a dict")
        mine = {"protocol": PROTOCOL, "run": self.run, "round": self.round, "exchange": number}
        mine["client"] = self.names[parcel.client]
        if any(head.get(key) != value for key, value in mine.items()):
            self._blame(parcel, "answered another message")
            return []
        if head.get("missing"):
            lacks = _texts(head["missing"], "missing", len(parcel.needed) + 1, NAME)
            if self._setup_name in lacks:
                parcel.needed[self._setup_name] = lambda: self._setup
            return lacks
        size = sum(map(len, answer.blobs.values()))
        self.wire_bytes["up"] += size
        for said in _texts(head.get("notes", []), "notes", NOTES, NOTE):
            warnings.warn(f"Client '{mine['client']}': {said}", stacklevel=4)
        results = head.get("results")
        if not isinstance(results, list) or len(results) != len(parcel.calls):
            raise FederationError(f"it must have {len(parcel.calls)} results")
        if size > _most_bytes(parcel.expected):
            raise FederationError(f"{size} bytes are too many")
        replies: list[dict[str, Any] | None] = []
        for result, name, expected in zip(results, parcel.names, parcel.expected, strict=True):
            if "error" in result:
                replies.append(None)
                said = _cut(str(result["error"]))
                if result.get("refused") is True:
                    self._note(parcel, f"refuses: {said}")
                    self._warn_of_refusal(parcel.client, name, said)
                else:
                    self._note(parcel, f"failed: {said}")
                continue
            most = MOST_LEAVES if expected is None else len(expected)
            reply = wire.load(answer.blobs[result["blob"]], leaves=most)
            why = find_misfit(reply, shapes_of(reply) if expected is None else expected)
            if why is not None:
                self.note_fault(parcel.client, name, why)
                self._note(parcel, why)
            replies.append(None if why is not None else reply)
        parcel.replies = replies
        self._held[parcel.client] |= set(parcel.needed)
        self.memory.keep(parcel.client, {"heard": torch.tensor(number)})
        return []

    def _warn_of_refusal(self, client: int, task: str, said: str) -> None:
        """Say once that a client does not answer a task; that is its right, and no fault."""
        if (client, task) not in self._refusals:
            self._refusals.add((client, task))
            warnings.warn(f"{task}: '{self.names[client]}' refuses: {said}.", stacklevel=5)

    def _blame(self, parcel: Parcel, why: str) -> None:
        """Count a fault of a client; its answer is lost."""
        self._note(parcel, why)
        self.note_fault(parcel.client, parcel.names[-1], why)

    def _note(self, parcel: Parcel, why: str) -> None:
        """Keep the first reason for a missing answer."""
        self._missing = self._missing or f"; '{self.names[parcel.client]}' {why}"


def _identity(tree: Tree) -> Any:
    """The identities of the tensors of a tree, with their places."""
    return (
        repr(tree) if not leaves(tree) else "",
        *((p, id(leaf)) for p, leaf in named_leaves(tree)),
    )


def _signature(call: Call) -> str:
    """A task and the shapes of what it is handed, on which the structure of replies depends."""
    task = describe_task(call.task)
    shapes = []
    for given in call.given:
        tree, rows = given, False
        if isinstance(given, BankRows | Each):
            tree, rows = (given.bank if isinstance(given, BankRows) else given.tree), True
        shapes.append([[leaf.shape[int(rows) :] for leaf in leaves(tree)], str(type(given))])
    # Small whole numbers, such as the number of networks of a survey, decide shapes, too.
    numbers = [
        int(leaf) for given in call.given if isinstance(given, Tensor)
        for leaf in leaves(given) if leaf.ndim == 0 and not leaf.is_floating_point()
    ]  # fmt: skip
    numbers = [number for number in numbers if abs(number) < 1 << 20]
    text = json.dumps([task, shapes, numbers], sort_keys=True, default=str)
    return f"{call.name} {wire.checksum(text.encode())[:12]}"


def _most_bytes(expected: Sequence[Shapes | None]) -> int:
    """Bytes that an answer may have: twice what its replies take, and some for headers."""
    total = 0
    for shapes in expected:
        if shapes is None:
            return MOST_BYTES
        for kind, shape in shapes.values():
            each = getattr(torch, kind).itemsize if kind not in ("dict", "list") else 0
            total += wire.PER_LEAF + each * torch.Size(shape).numel()
    return 2 * total + 65_536


def read_greeting(head: Any) -> tuple[str, str]:
    """The name in a node's first answer, and why the node cannot take part ("": it can)."""
    if not isinstance(head, dict):
        return "", f"its first answer is a {type(head).__name__}, not a dict"
    name, version = head.get("client"), head.get("protocol")
    if not isinstance(name, str) or not 0 < len(name) <= NAME:
        return "", f"a name must be a text of at most {NAME} letters"
    if "error" in head:
        return name, _cut(str(head["error"])) or "it reports an error without a text"
    if version != PROTOCOL:
        return name, f"its messages have version {_cut(repr(version), 40)}, the server's {PROTOCOL}"
    sizes = head.get("sizes")
    fine = isinstance(sizes, dict) and {"train", "test"} <= sizes.keys() and len(sizes) <= 10
    if not fine or not all(type(n) is int and 0 <= n < 1 << 40 for n in sizes.values()):  # type: ignore[union-attr]
        return name, "it must declare its numbers of samples, whole numbers from 0"
    return name, ""


def _texts(value: Any, name: str, most: int, letters: int) -> list[str]:
    """A list of texts in a head; further ones and further letters are dropped."""
    if not isinstance(value, list):
        raise FederationError(f"'{name}' must be a list of texts")
    return [_cut(str(text), letters) for text in value[:most] if isinstance(text, str)]


def _cut(text: str, most: int = NOTE) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
