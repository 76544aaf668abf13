"""Messages as a hostile client may write them: strategies for hypothesis, and a fuzzer.

    python tests/messages.py 1000000 benchmarks/figures/fuzz-messages.json

drives the fuzzer by hand: blobs into `wire.load`, answers into `Remote._read`, greetings into
`Remote._claim`. It counts what was read, what was refused, and foreign exceptions, of which there
must be none, and prints the growth of memory and the slowest message, in CPU time; with a second
argument the figures are written to a file.
"""

import collections
import json
import random
import resource
import struct
import sys
import time
import warnings
from pathlib import Path

import torch

from coterie.core import wire
from coterie.core.errors import CoterieError
from coterie.core.replies import shapes_of
from coterie.engines.relay import PROTOCOL, Envelope
from coterie.engines.remote import Parcel, Remote

REPLY = {
    "models": {"a.weight": torch.randn(8, 4), "a.bias": torch.randn(8)},
    "n": torch.tensor(12),
    "losses": torch.randn(4),
    "nested": [torch.ones(2), [torch.zeros(3), torch.tensor(1.5)]],
}
GOOD = wire.dump(REPLY)
HEAD = int.from_bytes(GOOD[:8], "little")
HEADER = json.loads(GOOD[8 : 8 + HEAD])
BODY = GOOD[8 + HEAD :]
EXPECTED = shapes_of(wire.load(GOOD))


def pack(head, body=BODY, size=None):
    """A blob with another header."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if size is None else size) + raw + body


def with_tree(tree):
    head = json.loads(json.dumps(HEADER))
    head["__metadata__"]["coterie"] = tree if isinstance(tree, str) else json.dumps(tree)
    return pack(head)


ODD_SHAPES = ([2**40], [2**62] * 2, [-1], [-8, -4], [0], [1e9], ["8"], [[8]], None, [2**64])
ODD_PLACES = ([0, 2**40], [-4, 8], [8, 4], [0, 0], [0], "x", [2**63] * 2, [0, 2**64])
ODD_TYPES = ("F64", "I64", "BOOL", "F8_E4M3", "U64", "BF16", "C64", "X", "", 5, None, "U16")
ODD_TREES = (
    {"tree": {"dict": [["a", "0"], ["a", "1"]]}}, {"tree": {"dict": {"a": "0"}}},
    {"tree": {"dict": 5}}, {"tree": {"dict": [["a"]]}}, {"tree": {"dict": [[["x"], "0"]]}},
    {"tree": 5}, {"tree": None}, {"tree": []}, {"tree": "99"}, {"tree": {"list": "0123"}},
    {"tree": {"list": None}}, {"tree": {}}, {}, [], 5, "0", {"tree": True}, {"tree": 1.5},
    {"tree": {"list": ["0"] * 10}}, {"tree": {"dict": [[5, "0"], [None, "1"]]}},
    {"tree": "__metadata__"}, {"tree": {"dict": [], "list": []}},
)  # fmt: skip
ODD = (
    None, 5, -1, 1e300, "x", "", [], {}, [None], [5], ["x"], [[]], {"a": 1}, True,
    [{"blob": None}], [{"blob": ["b"]}], [{"blob": "c"}], [{"error": 5}], [{"error": {"a": []}}],
    [{}], [{"blob": "b"}] * 50, float("nan"), "\x00" * 50, "é" * 10, [["blob"]], ["x" * 50] * 2000,
)  # fmt: skip


def flips(draw):
    data = bytearray(GOOD)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def head_bytes(draw):
    data = bytearray(GOOD)
    for _ in range(draw.choice((1, 2, 4))):
        data[draw.randrange(8 + HEAD)] = draw.randrange(256)
    return bytes(data)


def cut(draw):
    more = draw.randbytes(draw.randrange(20)) if draw.random() < 0.3 else b""
    return GOOD[: draw.randrange(len(GOOD))] + more


def shapes(draw):
    head = json.loads(json.dumps(HEADER))
    name = draw.choice([name for name in head if name != "__metadata__"])
    head[name]["shape"] = draw.choice(ODD_SHAPES)
    if draw.random() < 0.5:
        head[name]["data_offsets"] = draw.choice(ODD_PLACES)
    return pack(head)


def types(draw):
    head = json.loads(json.dumps(HEADER))
    name = draw.choice([name for name in head if name != "__metadata__"])
    head[name]["dtype"] = draw.choice(ODD_TYPES)
    return pack(head)


def values(draw):
    data = bytearray(GOOD)
    at = 8 + HEAD + 4 * draw.randrange((len(data) - 8 - HEAD) // 4)
    number = draw.choice((float("nan"), float("inf"), -float("inf"), 1e30, -1e30))
    data[at : at + 4] = struct.pack("<f", number)
    return bytes(data)


def trees(draw):
    return with_tree(draw.choice(ODD_TREES))


def deep(draw):
    depth = draw.choice((50, 400, 900, 5000, 50_000))
    return with_tree('{"tree": ' + '{"list": [' * depth + '"0"' + "]}" * depth + "}")


def deep_head(draw):
    depth = draw.choice((100, 2000, 100_000))
    return pack(b'{"__metadata__":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}")


def long_lists(draw):
    return with_tree({"tree": {"list": ["0"] * draw.choice((10, 1000, 100_000))}})


def sizes(draw):
    return pack(HEADER, size=draw.choice((0, 1, 7, 2**31, 2**40, 2**63, 2**64 - 1, HEAD - 1)))


def twice(draw):
    raw = json.dumps(HEADER)
    return pack((raw[:-1] + "," + raw[1:]).encode())


def junk(draw):
    return draw.choice(
        (b"", draw.randbytes(draw.randrange(200)), struct.pack("<Q", 2) + b"{}",
         struct.pack("<Q", 4) + b"null", struct.pack("<Q", 2) + b"[]")
    )  # fmt: skip


BLOBS = [
    *[flips] * 5, *[head_bytes] * 5, *[cut] * 4, *[shapes] * 3, *[types] * 2, *[values] * 2,
    *[trees] * 3, deep, deep_head, long_lists, *[sizes] * 2, twice, *[junk] * 2,
]  # fmt: skip


def blob(draw):
    """A blob that is damaged in one of many ways, or not at all."""
    return draw.choice(BLOBS)(draw)


def plain_head(client="a"):
    return {
        "protocol": PROTOCOL, "run": "r", "round": 0, "exchange": 7, "client": client,
        "results": [{"blob": "b"}], "notes": [], "sizes": {"train": 9, "test": 3},
    }  # fmt: skip


def odd_head(draw):
    head = plain_head()
    for _ in range(draw.choice((1, 1, 2))):
        head[draw.choice((*head, "missing", "error", "extra"))] = draw.choice(ODD)
    return Envelope(head, {"b": GOOD})


def no_head(draw):
    return Envelope(draw.choice(([], 5, "x", None, [plain_head()], {}, True)), {"b": GOOD})


def odd_blob(draw):
    return Envelope(plain_head(), {"b": blob(draw)})


def odd_envelope(draw):
    lacks = {**plain_head(), "missing": ["z"] * draw.choice((1, 1000))}
    return draw.choice(("error 0: x", Envelope(plain_head(), {}), Envelope(lacks, {})))


ANSWERS = [odd_head, odd_head, no_head, odd_blob, odd_blob, odd_envelope]


def answer(draw):
    """The answer of a client, damaged in one of many ways."""
    return draw.choice(ANSWERS)(draw)


class NoLink:
    """A link over which nothing comes."""

    def nodes(self):
        return {1: ""}

    def push(self, messages, seconds):
        return ["1"] * len(messages)

    def pull(self, numbers):
        return []


def server():
    """A server in round 0 that knows one client."""
    fed = Remote(NoLink(), {}, "r", names=["a"])
    fed._online, fed._claims, fed.round = {1: ""}, {"a": [1]}, 0
    fed._held[0] = set()
    return fed


def read(message, fed=None, expected=EXPECTED):
    """What a server makes of an answer: the reply, or None if it is left out."""
    fed = fed or server()
    parcel = Parcel(0, [(0, 0)], [], {}, ["M.update"], [expected])
    fed._read(parcel, message, 7)
    return parcel.replies[0] if parcel.replies else None


def claim(message):
    """What a server makes of a greeting."""
    fed = server()
    fed._claim(1, message.head)
    fed._admit()
    return fed._sizes.get("a")


def drive(name, make, act, number, seed):
    """Send so many messages; counts, times and memory."""
    draw = random.Random(seed)
    counts, slowest, times = collections.Counter(), (0.0, ""), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(number):
        message = make(draw)
        began = time.process_time()
        try:
            counts["read" if act(message) is not None else "left out"] += 1
        except CoterieError:
            counts["refused"] += 1
        except Exception as error:  # the count that must be zero
            counts[f"FOREIGN {type(error).__name__}"] += 1
        taken = time.process_time() - began
        times.append(taken)
        slowest = max(slowest, (taken, type(message).__name__))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    times.sort()
    figures = {
        "part": name, "messages": number, **counts,
        "foreign": sum(n for key, n in counts.items() if key.startswith("FOREIGN")),
        "median_cpu_ms": round(1e3 * times[number // 2], 3),
        "p99_cpu_ms": round(1e3 * times[int(0.99 * number)], 2),
        "slowest_cpu_ms": round(1e3 * slowest[0], 1), "grown_mb": round(grown, 1),
    }  # fmt: skip
    print(json.dumps(figures), flush=True)
    return figures


def fuzz(number, seed=0):
    """Blobs, answers and greetings, together so many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            drive("wire.load", blob, lambda data: wire.load(data, leaves=6), number // 2, seed),
            drive("Remote._read", answer, read, number - number // 2 - number // 10, seed + 1),
            drive(
                "Remote._claim", lambda draw: draw.choice((odd_head, no_head))(draw), claim,
                number // 10, seed + 2,
            ),
        ]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
