"""Whatever one client sends concerns that client alone."""

import random
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import messages
from coterie.core import wire
from coterie.core.errors import DataError
from coterie.core.replies import find_misfit
from coterie.engines.relay import PROTOCOL, Envelope
from coterie.engines.remote import Remote, read_greeting

quick = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
heads = st.fixed_dictionaries(
    {},
    optional={
        name: st.just(value) | plain
        for name, value in {**messages.plain_head(), "missing": ["b"], "error": "x"}.items()
    },
)
blobs = st.integers(0, 2**32).map(lambda seed: messages.blob(random.Random(seed)))


@pytest.fixture(autouse=True)
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@quick
@given(st.binary(max_size=300) | blobs)
def test_bytes_are_a_tree_or_a_clear_error(data):
    tree, said = None, ""
    try:
        tree = wire.load(data, leaves=6)
    except DataError as error:
        said = str(error)
    assert len(said) < 500
    assert said or isinstance(tree, dict | list | torch.Tensor)


@quick
@given(heads | plain, blobs)
def test_an_answer_is_read_or_left_out_and_its_client_named(head, blob):
    fed = messages.server()
    reply = messages.read(Envelope(head, {"b": blob}), fed)
    if reply is not None:
        assert find_misfit(reply, messages.EXPECTED) is None
    named = {fault["client"] for fault in fed.record.new}
    assert named <= {"a"}


@quick
@given(heads | plain)
def test_a_greeting_is_a_claim_or_a_reason(head):
    name, reason = read_greeting(head)
    assert len(name) <= 200
    assert reason or {"train", "test"} <= head["sizes"].keys()


@pytest.mark.parametrize(
    "sizes",
    [
        None,
        {},
        {"train": 5},
        {"train": -1, "test": 2},
        {"train": 1e9, "test": 1},
        [5, 5],
        {"train": True, "test": 1},
    ],
)
def test_a_node_must_declare_whole_numbers_of_samples(sizes):
    assert "declare its numbers" in read_greeting({**messages.plain_head(), "sizes": sizes})[1]


def test_an_error_without_a_text_is_an_error():
    head = {**messages.plain_head(), "error": ""}
    assert "without a text" in read_greeting(head)[1]


@pytest.mark.parametrize("depth", [40, 5000, 100_000])
def test_a_deep_tree_is_refused(depth):
    tree = '{"tree": ' + '{"list": [' * depth + '"0"' + "]}" * depth + "}"
    with pytest.raises(DataError, match="must be a tree of tensors that Coterie wrote"):
        wire.load(messages.with_tree(tree))


def test_a_long_header_is_refused_before_it_is_parsed():
    with pytest.raises(DataError, match="is too long for 6 tensors"):
        wire.load(messages.with_tree({"tree": {"list": ["0"] * 10_000}}), leaves=6)


def test_a_tensor_is_used_once_and_none_is_left_over():
    for tree in ({"list": ["0", "0"]}, {"list": ["0"]}, {"dict": [["a", "0"], ["a", "1"]]}):
        with pytest.raises(DataError):
            wire.load(messages.with_tree({"tree": tree}))


def test_notes_are_few_and_short(recwarn):
    warnings.simplefilter("always")
    head = {**messages.plain_head(), "notes": ["x" * 9999] * 100_000}
    assert messages.read(Envelope(head, {"b": messages.GOOD})) is not None
    assert len(recwarn) == 20
    assert max(len(str(note.message)) for note in recwarn) < 600


@pytest.mark.slow
def test_a_million_messages_raise_no_foreign_exception():
    for figures in messages.fuzz(1_000_000):
        assert figures["foreign"] == 0
        assert figures["grown_mb"] < 100
        assert figures["slowest_cpu_ms"] < 2000


class Post(RuleBasedStateMachine):
    """A server and three clients, whose answers come twice, late, in any order, or from others."""

    NAMES = ("a", "b", "c")

    def __init__(self):
        super().__init__()
        self.letters = []  # number of the message and its answer, not yet delivered
        self.old = []
        self.number = 0
        self.round = -1
        self.state = dict.fromkeys(self.NAMES, 0)
        self.fed = Remote(self, {}, "r", names=self.NAMES, deadline=0.0, poll=0.0)
        self.fed._claims = {name: [i] for i, name in enumerate(self.NAMES)}
        self.fed._sizes = {name: {"train": 5, "test": 5} for name in self.NAMES}
        self.fed.policy = type(self.fed.policy)(strikes=1000)
        self.heard = None

    # the link

    def nodes(self):
        return dict(enumerate(self.NAMES))

    def push(self, sent, seconds):
        out = []
        for node, asked in sent:
            self.number += 1
            out.append(str(self.number))
            value = torch.tensor(float(asked.head["round"]))
            blob = wire.dump({"x": value, "n": torch.tensor(3)})
            head = {**asked.head, "client": self.NAMES[node], "results": [{"blob": "b"}]}
            head = {
                k: head[k] for k in ("protocol", "run", "round", "exchange", "client", "results")
            }
            self.letters.append((str(self.number), Envelope(head, {"b": blob}), node))
        self.plan(self.letters)
        return out

    def pull(self, numbers):
        got, self.ready = self.ready, []
        return got

    def plan(self, letters):
        self.ready = self.mix([(n, e) for n, e, _ in letters])
        self.old += self.ready
        self.letters = []

    # what may happen

    def mix(self, letters):
        draw = random.Random(self.luck)
        out = list(letters)
        draw.shuffle(out)
        out += draw.sample(self.old, min(len(self.old), 3))  # late ones
        out += out[:1]  # one twice
        if draw.random() < 0.5 and len(out) > 1:  # one answers in another's name
            out[0] = (out[0][0], out[1][1])
        if draw.random() < 0.3:
            out = out[1:]
        draw.shuffle(out)
        return out

    @rule(luck=st.integers(0, 2**32))
    def a_round(self, luck):
        from coterie.core.client import task

        class Method:
            @task
            def ask(self, client):
                raise AssertionError("done by the clients")

        self.luck, self.round = luck, self.round + 1
        self.fed._online = self.nodes()
        self.fed.round, self.fed._calls, self.fed._phase = self.round, {}, None
        self.fed._forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.heard = self.fed.map(Method().ask, to=self.fed.everyone(), at_least=0)

    @precondition(lambda self: self.heard is not None)
    @invariant()
    def only_this_rounds_answers_count_and_each_once(self):
        ids, reply = self.heard
        assert len(ids.unique()) == len(ids)
        if len(ids):
            assert reply["x"].tolist() == [float(self.round)] * len(ids)

    @precondition(lambda self: self.heard is not None)
    @invariant()
    def the_mean_is_that_of_the_clean_run_or_somebody_is_named(self):
        """Every honest answer is the round's number, so any mean of answers that count is it."""
        ids, reply = self.heard
        gone = set(self.fed.names) - {self.fed.names[i] for i in ids.tolist()}
        if gone:
            assert any(f"'{name}'" in self.fed.why_missing() for name in gone)
        else:
            assert reply["x"].mean() == float(self.round)
            assert reply["n"].tolist() == [3] * len(self.NAMES)

    @invariant()
    def the_version_is_ours(self):
        assert PROTOCOL == 3


TestPost = Post.TestCase
TestPost.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
