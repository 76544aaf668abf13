"""Envelopes as Flower's records."""

import ast
import time
from pathlib import Path

import pytest

import coterie

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'coterie[flower]'")

from flwr.app import ConfigRecord, Metadata
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

from coterie.engines.flower import PIECE, SMALL, TYPE, from_records, to_records
from coterie.engines.flower_private import check_version, pull_quickly, take_up
from coterie.engines.relay import Envelope


def message_of(asked, node=7):
    """A message as Flower carries it."""
    about = Metadata(
        run_id=1,
        message_id="",
        src_node_id=1,
        dst_node_id=node,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=30,
        message_type=TYPE,
    )
    message = make_message(about, content=to_records(asked))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_small_blobs_travel_in_the_head_and_others_are_shared():
    small, large, huge = b"\x00\xff" * 10, bytes(SMALL + 1), bytes(PIECE + 1)
    asked = Envelope({"round": 1, "calls": []}, {"a1": small, "b2": large, "c3": b"", "d4": huge})
    known = {}
    first, second = to_records(asked, known), to_records(asked, known)
    assert list(first.config_records) == ["head", "b2"]
    assert list(first.array_records) == ["d4"]
    assert all(first[name] is second[name] for name in ("b2", "d4"))  # Flower uploads them once
    assert from_records(first) == asked


def test_a_blob_must_be_bytes():
    records = to_records(Envelope({"round": 1}, {}))
    records["b2"] = ConfigRecord({"data": "text"})
    with pytest.raises(ValueError, match="must be bytes"):
        from_records(records)


def test_a_small_message_is_three_objects():
    asked = Envelope({"round": 1, "calls": []}, {f"{n:02x}": bytes(1000) for n in range(20)})
    assert len(get_all_nested_objects(message_of(asked))) == 3
    asked.blobs["99"] = bytes(SMALL + 1)
    assert len(get_all_nested_objects(message_of(asked))) == 4


def test_a_piece_that_is_not_uploaded_yet_is_asked_for_again_soon():
    before, asked = dict(pull_objects.__kwdefaults__), []

    def pull(number):
        asked.append(time.monotonic())
        if len(asked) < 4:
            raise ObjectUnavailableError(number)
        return b"piece"

    try:
        pull_quickly(30.0)
        assert pull_objects.__kwdefaults__.keys() == before.keys()  # or they would be ignored
        assert pull_objects(["a"], pull) == {"a": b"piece"}
    finally:
        pull_objects.__kwdefaults__.update(before)
    assert asked[1] - asked[0] < 0.9  # Flower waits a second, then two, then four
    assert asked[3] - asked[0] < 5.0


def test_a_message_is_taken_up_once_and_its_answer_is_always_sent(tmp_path):
    message = message_of(Envelope({}, {}))
    said = PullMessagesResponse(
        messages_list=[message_to_proto(message)], message_object_trees=[get_object_tree(message)]
    )
    (tmp_path / message.object_id).write_bytes(said.SerializeToString())
    (letter,) = take_up(tmp_path)  # the node was killed once
    assert letter.message.metadata.dst_node_id == 7
    assert len(letter.numbers) == 3
    assert 0 < letter.left <= 30
    letter.answer.write_bytes(b"")
    (tmp_path / f"{message.object_id}.part.answer").write_bytes(b"")
    (again,) = take_up(tmp_path)  # it has an answer, which must be sent
    assert again.answer == letter.answer
    letter.answer.unlink()
    assert take_up(tmp_path) == []  # killed twice: the message may be the reason
    assert list(tmp_path.iterdir()) == []


def test_only_one_file_uses_what_flower_keeps_private():
    package = Path(coterie.__file__).parent
    for path in package.rglob("*.py"):
        if path.name == "flower_private.py":
            continue
        tree = ast.parse(path.read_text())
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        flower = {name for name in names if name.split(".")[0] == "flwr"}
        assert flower <= PUBLIC, path
        assert not flower or path.name == "flower.py", path


def test_another_version_of_flower_is_refused(monkeypatch):
    check_version()
    monkeypatch.setattr("flwr.__version__", "1.42.0")
    with pytest.raises(coterie.core.errors.ConfigError, match=r"Flower 1\.42\.0 is installed"):
        check_version()
