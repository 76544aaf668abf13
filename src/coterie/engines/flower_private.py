"""The parts of Flower that are not its public interface. Only this file names them.

They were read and tried in Flower 1.41, and `pyproject.toml` allows no other version. Flower 1.42
requires a newer certifi than was available where Coterie is tested; its code, loaded in spite of
that, carried short runs with the same bits. For another version, compare this file with it, run
`tests/deploy` and `benchmarks/flower/drills.py`, and then change `VERSION`. Until then,
`coterie deploy up --stock` uses nothing of this file on the nodes.

- A node talks to the SuperLink through Flower's Fleet client: TLS, signatures and heartbeats are
  Flower's. It never asks for an app, so it runs no code of an app.
- The SuperLink asks for a token before it obeys a command of its control interface.
"""

import hmac
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    HEARTBEAT_PATIENCE,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from coterie.engines.flower import TYPE, from_records, to_records
from coterie.engines.relay import Envelope

VERSION = "1.41"
SOON = 1.0  # seconds in which a message that is being uploaded should be whole
NUMBER, INBOX, AGAIN, ANSWER, REQUEST = "node.number", "inbox", ".again", ".answer", "request"


def check_version() -> None:
    """Raise an error if the installed Flower is not the one this file was written for."""
    if not flwr.__version__.startswith(f"{VERSION}."):
        from coterie.core.errors import ConfigError  # loads torch, which a relay does not need

        raise ConfigError(
            f"A fast node needs Flower {VERSION}. Flower {flwr.__version__} is installed. Install "
            "the other with: pip install 'coterie[flower]'. Or use Flower's own nodes: --stock."
        )


def pull_quickly(seconds: float) -> None:
    """Ask for an object that is not uploaded yet again after 0.05 s instead of 1 s.

    Pauses grow to 0.5 s, and end when it has been missing for a number of seconds.
    """
    defaults: Any = pull_objects.__kwdefaults__
    defaults.update(initial_backoff=0.05, backoff_cap=0.5, max_time=seconds)
    defaults.update(max_tries_per_object=None)


# nodes


class Refused(Exception):
    """The SuperLink does not accept this node, or does not know it any more."""


class Letter:
    """A message that is not answered yet, in a file, its parts as they arrive, and its answer."""

    def __init__(self, path: Path) -> None:
        self.path, self.parts = path, dict[str, bytes]()
        self.answer = path.with_name(path.stem + ANSWER)
        said = PullMessagesResponse.FromString(path.read_bytes())
        self.message = message_from_proto(said.messages_list[0])
        self.numbers = [
            part.object_id for part in iterate_object_tree(said.message_object_trees[0])
        ]

    @property
    def left(self) -> float:
        """Seconds until nobody waits for the answer any more."""
        about = self.message.metadata
        return float(about.created_at + about.ttl - time.time())


class Asked(NamedTuple):
    """A message from the SuperLink that has arrived as a whole."""

    letter: Letter
    message: Message
    envelope: Envelope | None  # None: the message is not for Coterie
    began: float


def take_up(inbox: Path) -> list[Letter]:
    """The messages that a killed node left, without those that were taken up once before.

    Such a message may be what kills the node. If there is an answer, it is only to be sent.
    """
    letters = []
    for path in inbox.glob(f"*.part{ANSWER}"):
        path.unlink()
    for path in sorted(path for path in inbox.iterdir() if path.suffix != ANSWER):
        letter = Letter(path)
        if not letter.answer.exists():
            if path.suffix == AGAIN:
                path.unlink()
                continue
            letter = Letter(path.rename(path.with_suffix(AGAIN)))
        letters.append(letter)
    return letters


class Fleet:
    """The connection of one client to the SuperLink, through Flower's own client of its Fleet API.

    Parameters
    ----------
    superlink
        Address of the SuperLink, host:port.
    certificate
        Certificate of the authority that signed the SuperLink's; None: no TLS.
    key
        The node's private key. Without TLS the node makes a key of its own.
    home
        The client's folder. It keeps the number that the SuperLink gave the node, and the messages
        that are not answered yet, so that a node that was killed continues where it was.
    """

    def __init__(self, superlink: str, certificate: Path | None, key: Path, home: Path) -> None:
        self.home, self.insecure = home, certificate is None
        secret = load_ssh_private_key(key.read_bytes(), None)
        if not isinstance(secret, ec.EllipticCurvePrivateKey):
            raise Refused(f"the key must be an elliptic-curve key, as `deploy key` makes it: {key}")
        self.public = public_key_to_bytes(secret.public_key())
        self.client = FleetHttpClient.from_server_address(
            superlink,
            self.insecure,
            None if certificate is None else certificate.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(secret, secret.public_key()),
            ],
        )
        self.node = Node()
        self.heart: HeartbeatSender | None = None
        self.heard = time.monotonic()  # when the last message came
        self.inbox = home / INBOX
        self.inbox.mkdir(exist_ok=True)
        self.letters = take_up(self.inbox)

    def connect(self) -> int:
        """Connect under the earlier number, if the SuperLink knows it, or else under a new one."""
        number = self.home / NUMBER
        try:
            if not (number.exists() and self._beat(int(number.read_text()))):
                self.node = Node(node_id=self._activate())
                number.write_text(str(self.node.node_id))
        except httpx.HTTPStatusError as error:
            raise Refused(_reason(error)) from None
        self.heart = HeartbeatSender(lambda: self._beat(self.node.node_id))
        self.heart.start()
        return int(self.node.node_id)

    def _activate(self) -> int:
        if self.insecure:
            with suppress(httpx.HTTPStatusError):  # it is registered already
                self.client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public))
        asked = ActivateNodeRequest(
            public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        return int(self.client.ActivateNode(asked).node_id)

    def _beat(self, number: int) -> bool:
        """Send a heartbeat; False if it did not arrive, or if the number is not known."""
        node = Node(node_id=number)
        asked = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            known = bool(self.client.SendNodeHeartbeat(asked).success)
        except (httpx.TransportError, httpx.HTTPStatusError):
            return False
        if known:
            self.node = node
        return known

    def receive(self) -> Asked | None:
        """A message that has arrived as a whole, if there is one.

        The SuperLink shows a message before its parts are uploaded. Such a message does not keep
        the node from others: the server that was sending it may have died.
        """
        try:
            for letter in list(self.letters):
                if letter.left <= 0:
                    self.done(letter)
                elif letter.answer.exists():
                    self._send(letter)
                elif (asked := self._open(letter)) is not None:
                    return asked
            if self.letters and time.monotonic() - self.heard < SOON:
                return None
            said = self.client.PullMessages(PullMessagesRequest(node=self.node))
        except httpx.HTTPStatusError as error:
            raise Refused(_reason(error)) from None
        if not said.messages_list:
            return None
        self.heard = time.monotonic()
        path = self.inbox / said.messages_list[0].metadata.message_id
        path.write_bytes(said.SerializeToString())
        self.letters.append(Letter(path))
        return self._open(self.letters[-1])

    def _open(self, letter: Letter) -> Asked | None:
        """A message, if all its parts are there."""
        about = letter.message.metadata
        if about.message_type != TYPE:
            return Asked(letter, letter.message, None, time.time())
        get = make_pull_object_fn_protobuf(self.client.PullObject, self.node, about.run_id)
        late = []

        def pull(number: str) -> bytes:
            try:
                letter.parts[number] = get(number)
            except ObjectUnavailableError:
                late.append(number)
                raise
            return letter.parts[number]

        try:
            missing = [number for number in letter.numbers if number not in letter.parts]
            pull_objects(missing, pull, max_tries_per_object=1)
            whole: Any = inflate_object_from_contents(about.message_id, letter.parts)
            whole.metadata.__dict__["_message_id"] = about.message_id
            return Asked(letter, whole, from_records(whole.content), time.time())
        except httpx.TransportError:
            raise
        except (Exception, RunNotRunningException) as error:
            if not late:  # the run has ended, or the message cannot be read
                print(f"a message was dropped: {type(error).__name__} {error}", flush=True)
                self.done(letter)
            return None

    def reply(self, asked: Asked, answer: Envelope | str) -> None:
        """Answer a message, with an envelope or with the reason why there is none.

        The answer is written to a file first. A node that is killed while it sends must send the
        same bytes again, because the SuperLink takes no second answer.
        """
        content = Error(0, answer) if isinstance(answer, str) else to_records(answer)
        reply = Message(content, reply_to=asked.message)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            parts = {number: part.deflate() for number, part in objects.items()}
        bare = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            messages_list=[message_to_proto(bare)],
            message_object_trees=[tree],
            clientapp_runtime_list=[time.time() - asked.began],
        )
        part = asked.letter.answer.with_suffix(".part" + ANSWER)
        with zipfile.ZipFile(part, "w") as file:
            file.writestr(REQUEST, request.SerializeToString())
            for number, piece in parts.items():
                file.writestr(number, piece)
        part.replace(asked.letter.answer)
        self._send(asked.letter)

    def _send(self, letter: Letter) -> None:
        """Send an answer, and confirm that the message needs nothing more."""
        with zipfile.ZipFile(letter.answer) as file:
            parts = {name: file.read(name) for name in file.namelist()}
        request = PushMessagesRequest.FromString(parts.pop(REQUEST))
        request.node.CopyFrom(self.node)
        about = letter.message.metadata
        try:
            said = self.client.PushMessages(request)
            push_object_contents_from_iterable(
                [(number, parts[number]) for number in said.objects_to_push],
                make_push_object_fn_protobuf(
                    self.client.PushObject, self.node, about.run_id, said.session_id
                ),
            )
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self.node, run_id=about.run_id, message_object_id=about.message_id
                )
            )
        except (httpx.HTTPStatusError, ObjectPushError) as error:  # the run has ended
            why = _reason(error) if isinstance(error, httpx.HTTPStatusError) else str(error)
            print(f"an answer was not accepted: {why}", flush=True)
        self.done(letter)

    def done(self, letter: Letter) -> None:
        """Forget a message."""
        self.letters.remove(letter)
        for path in (letter.path, letter.answer):
            path.unlink(missing_ok=True)

    def close(self, leave: bool = True) -> None:
        """End the connection; `leave`: tell the SuperLink that the node has left."""
        if self.heart is not None and self.heart.is_running:
            self.heart.stop()
        if leave and self.node.node_id:
            with suppress(httpx.HTTPError):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()


def _reason(error: httpx.HTTPStatusError) -> str:
    """The SuperLink's words, without a traceback."""
    return f"{error.response.status_code} {error.response.text[:300]}"


def away(error: Exception) -> bool:
    """Whether an error says that the SuperLink cannot be reached at the moment."""
    return isinstance(error, httpx.TransportError)


# the SuperLink and its control interface


def run_superlink(token: str, arguments: list[str]) -> None:
    """Run Flower's SuperLink, which obeys only commands that come with a token.

    Flower has an interface for such a check, and the version that anyone can install has no
    implementation of it.
    """
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from flwr.superlink.cli import flower_superlink

    class Token(NoOpControlAuthnPlugin):
        """Accepts one token."""

        def validate_tokens_in_metadata(self, metadata: Any) -> tuple[bool, AccountInfo | None]:
            given = [value for _, value in metadata]
            if len(given) == 1 and hmac.compare_digest(str(given[0]), token):
                return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)
            return False, None

        def refresh_tokens(self, metadata: Any) -> tuple[None, None]:
            return None, None

    module: Any = sys.modules[flower_superlink.__module__]
    module.load_control_authn_plugin = Token
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def keep_token(flower_home: Path, superlink: str, token: str) -> None:
    """Write a token where the command `flwr` looks for it."""
    from flwr.cli.constant import (
        ACCESS_TOKEN_STORE_KEY,
        AUTHN_TYPE_STORE_KEY,
        REFRESH_TOKEN_STORE_KEY,
    )
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    store = FileCredentialStore(flower_home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % superlink, str(AuthnType.OIDC).encode())
    store.set(ACCESS_TOKEN_STORE_KEY % superlink, token.encode())
    store.set(REFRESH_TOKEN_STORE_KEY % superlink, token.encode())


class Control:
    """Flower's control interface: registers nodes and lists them."""

    def __init__(self, superlink: str, certificate: Path | None, token: str) -> None:
        from flwr.supercore.control import ControlHttpClient

        class Bearer:
            def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
                context.request.headers["Authorization"] = f"Bearer {token}"
                return call_next(context)

        self.client = ControlHttpClient.from_server_address(
            superlink,
            certificate is None,
            None if certificate is None else certificate.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), Bearer()],
        )

    def register(self, keys: Mapping[str, Path]) -> dict[str, str]:
        """Register public keys under names; return those that were refused, and why."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        refused = {}
        for name, path in keys.items():
            public: Any = load_ssh_public_key(path.read_bytes())
            asked = RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name)
            try:
                self.client.RegisterNode(asked)
            except httpx.HTTPStatusError as error:
                if "already" not in error.response.text:
                    refused[name] = _reason(error)
        return refused

    def nodes(self) -> list[dict[str, Any]]:
        """The registered nodes: name, status, and seconds since the last heartbeat."""
        from flwr.proto.control_pb2 import ListNodesRequest

        found = []
        for node in self.client.ListNodes(ListNodesRequest()).nodes_info:
            beat = node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval
            ago = max(0.0, round(time.time() - beat, 1)) if node.online_until else None
            found.append({"name": node.name, "status": node.status, "heartbeat": ago})
        return found


def clientapp() -> Callable[[], None]:
    """Flower's command `flwr-clientapp`, loaded and ready, for stock nodes."""
    from flwr.supernode.cli import flwr_clientapp

    run: Callable[[], None] = flwr_clientapp
    return run
