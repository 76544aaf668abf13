"""Real clients, less the network: the same numbers as the simulation, and nothing left behind."""

import hashlib
import json
import warnings

import pytest
import torch

from coterie.algorithms.survey import seeded
from coterie.core import wire
from coterie.core.algorithm import grow
from coterie.core.errors import FederationError
from coterie.data.card import DataCard
from coterie.engines import Remote, Simulation
from coterie.running.build import build
from links import LocalLink, workers
from small_runs import described

METHODS = {
    "fedavg": {},
    "ifca": {},
    "clove": {},
    "census": {},
    "survey": {},
    "local_only": {},
    "fedsoft": {"algorithm": {"n_groups": 2}},
    "kfed": {"algorithm": {"n_clusters": 4, "n_components": 2}},
    "fedgem": {"algorithm": {"n_components": 2, "rounds": 2}},
    "mosaic": {"algorithm": {"rounds": 2}},
}


def plain(method, changes, participation=1.0):
    tables = described(method, 3, **changes)
    tables["run"]["participation"] = participation
    if method in ("kfed", "fedgem", "mosaic", "federated_kmeans", "federated_cmeans"):
        tables = {k: v for k, v in tables.items() if k not in ("model", "local")}
    return tables


def remote(tables, folder, allow=(), seconds=5.0, **options):
    ready = build(tables, trust=["newcomer:Newcomer"])
    setup = {"description": tables, "card": {**DataCard.of(ready.data).to_dict(), "truth": None}}
    link = LocalLink(workers(folder, list(ready.data.names), allow=allow))
    options = {"deadline": 0.2, "poll": 0.01, **options}
    fed = Remote(link, setup, "0a", participation=ready.settings.participation, **options)
    fed.meet(len(ready.data), seconds)
    return ready, link, fed


def rounds(algorithm, fed, n, start=0, state=None):
    if state is None:
        fed.begin(-1)
        state = algorithm.init(fed)
        fed.commit()
    for number in range(start, start + n):
        fed.begin(number)
        state = grow(state, fed.n_clients)
        state, _ = algorithm.step(fed, state)
        fed.commit()
    return state


def same(one, other):
    return hashlib.sha256(wire.dump(one)).digest() == hashlib.sha256(wire.dump(other)).digest()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", METHODS)
def test_messages_give_the_bits_of_the_wire_engine(method, tmp_path):
    tables = plain(method, METHODS[method], 0.5 if method in ("ifca", "clove", "census") else 1.0)
    ready, _, fed = remote(tables, tmp_path)
    simulated = Simulation(
        ready.data, participation=ready.settings.participation, stack=False, wire=True, chunk=64
    )
    simulated.simulated = False  # a survey keeps label counts on the clients, as here
    assert same(rounds(ready.algorithm, fed, 3), rounds(ready.algorithm, simulated, 3))
    assert fed.traffic.total() == simulated.traffic.total()


def test_real_clients_answer_a_survey_for_another_method(tmp_path):
    ready, _, fed = remote(plain("census", {"algorithm": {"first": "survey"}}), tmp_path)
    simulated = Simulation(ready.data, stack=False, wire=True, chunk=64)
    simulated.simulated = False
    assert same(rounds(ready.algorithm, fed, 1), rounds(ready.algorithm, simulated, 1))


def test_label_counts_stay_with_real_clients(tmp_path):
    ready, _, fed = remote(plain("survey", {}), tmp_path)
    fed.begin(0)
    _, answers = seeded.ask(ready.algorithm, fed, fed.everyone(), torch.tensor(3), 4)
    assert set(answers) == {"joint"}  # neither losses by class nor label shares
    assert answers["joint"].counts.shape[2] == 1
    with pytest.warns(UserWarning, match="refuses"):  # even if the server asks for them
        _, asked = seeded.ask(
            ready.algorithm, fed, fed.everyone(), torch.tensor(3), 4, "conditional"
        )
    assert not asked


def test_a_users_own_tasks_and_questions_are_deployed(tmp_path):
    ready, _, fed = remote(plain("newcomer:Newcomer", {}), tmp_path, allow=("newcomer",))
    simulated = Simulation(ready.data, stack=False, wire=True, chunk=64)
    assert same(rounds(ready.algorithm, fed, 2), rounds(ready.algorithm, simulated, 2))


def test_a_node_refuses_code_it_has_not_agreed_to(tmp_path):
    with (
        pytest.warns(UserWarning, match="start the node with --allow newcomer"),
        pytest.raises(FederationError, match="0 joined"),
    ):
        remote(plain("newcomer:Newcomer", {}), tmp_path, seconds=0.3)


def test_a_row_of_a_bank_that_a_client_has_is_named_not_sent(tmp_path):
    ready, link, fed = remote(plain("clove", {}), tmp_path)
    fed.begin(-1)
    state = ready.algorithm.init(fed)
    fed.begin(0)
    link.sent.clear()
    ready.algorithm.step(fed, state)
    asked, trained = link.sent[:8], link.sent[8:]
    # The bank goes to eight clients: one blob for `shared`, one for the models. Then rows of it.
    assert {len(m.blobs) for _, m in asked} == {2}
    assert [len(m.blobs) for _, m in trained] == [0] * 8
    assert all("row" in m.head["calls"][0]["given"][1] for _, m in trained)


def test_a_worker_that_was_restarted_is_sent_again_what_it_lacks(tmp_path):
    ready, link, fed = remote(plain("clove", {}), tmp_path, deadline=60.0)
    whole = rounds(ready.algorithm, remote(plain("clove", {}), tmp_path / "b")[2], 2)
    count = {"n": 0}

    def restart(node, asked, answer):
        count["n"] += 1
        if count["n"] in (3, 12):  # after its third and its twelfth message a worker is new
            old = link.workers[node]
            link.workers[node] = type(old)(old.home, old.name, old.data)
        return answer

    link.spoil = restart
    assert same(rounds(ready.algorithm, fed, 2), whole)


def test_an_answer_lost_on_the_way_leaves_no_memory(tmp_path):
    # fedsoft's clients remember their models. What a client kept for an answer that nobody heard
    # must be dropped, as in the simulation, where a lost client does no work.
    ready, link, fed = remote(plain("fedsoft", METHODS["fedsoft"]), tmp_path)
    state = rounds(ready.algorithm, fed, 1)
    client = 3
    before = link.workers[100 + client].rooms
    room = next(iter(before.values()))
    kept = room.journal.restore(int(fed.memory.get(client)["heard"]), 0)
    link.spoil = lambda node, asked, answer: None if node == 100 + client else answer
    state = rounds(ready.algorithm, fed, 1, 1, state)
    link.spoil = None
    assert len(room.journal.entries()) >= 1
    assert same(room.journal.restore(int(fed.memory.get(client)["heard"]), 0), kept)
    rounds(ready.algorithm, fed, 1, 2, state)  # and it takes part again


def test_an_abandoned_round_leaves_no_trace(tmp_path):
    tables = plain("local_only", {})
    ready, link, fed = remote(tables, tmp_path, at_least=8)
    state = rounds(ready.algorithm, fed, 1)
    link.spoil = lambda node, asked, answer: "error 5: gone" if node == 100 else answer
    fed.begin(1)
    with pytest.raises(
        FederationError, match=r"at least 8 of 8 .* 7 did; 'client-0' failed: error 5"
    ):
        ready.algorithm.step(fed, state)
    fed.rollback()
    link.spoil = None
    rounds(ready.algorithm, fed, 1, 1, state)
    whole = remote(tables, tmp_path / "b")
    rounds(whole[0].algorithm, whole[2], 2)
    for number in range(8):
        one, other = (
            next(iter(f.link.workers[100 + number].rooms.values())).journal.restore(2**62, 0)
            for f in (fed, whole[2])
        )
        assert same(one, other)


def test_a_server_that_goes_back_takes_its_clients_with_it(tmp_path):
    tables = plain("local_only", {})
    ready, link, fed = remote(tables, tmp_path)
    state = rounds(ready.algorithm, fed, 1)
    checkpoint = {c: dict(tree) for c, tree in fed.memory.committed.items()}
    rounds(ready.algorithm, fed, 1, 1, state)  # and then the server dies
    setup = json.loads(fed._setup)
    again = Remote(link, setup, "0a", names=fed.names, deadline=0.2, poll=0.01)
    again.meet(1, 5.0)
    again.memory.committed = checkpoint
    rounds(ready.algorithm, again, 1, 1, state)
    whole = remote(tables, tmp_path / "b")
    rounds(whole[0].algorithm, whole[2], 2)
    one, other = (
        next(iter(one.workers[102].rooms.values())).journal.restore(2**62, 0)
        for one in (link, whole[1])
    )
    assert same(one, other)


def test_late_double_and_foreign_answers_are_ignored(tmp_path):
    ready, link, fed = remote(plain("fedavg", {}), tmp_path)
    state = rounds(ready.algorithm, fed, 1)
    late = {}

    def spoil(node, asked, answer):
        if node == 100:
            late[node] = answer  # never comes
            return None
        if node == 101:
            return answer._replace(head={**answer.head, "round": answer.head["round"] - 1})
        if node == 102:
            return answer._replace(head={**answer.head, "client": "client-0"})
        return answer

    link.spoil = spoil
    fed.begin(1)
    ids, _ = fed.map(ready.algorithm.update, state.params, to=fed.everyone())
    assert ids.tolist() == [3, 4, 5, 6, 7]
    link.spoil = None
    link.answers["1"] = late[100]  # an answer to a message nobody waits for any more
    ids, _ = fed.map(ready.algorithm.update, state.params, to=fed.everyone())
    assert ids.tolist() == list(range(8))


def test_a_reply_of_another_shape_is_left_out_with_a_warning(tmp_path):
    ready, link, fed = remote(plain("fedavg", {}), tmp_path)
    state = rounds(ready.algorithm, fed, 1)

    def spoil(node, asked, answer):
        if node != 104:
            return answer
        blob = wire.dump({"n": torch.ones(3)})
        name = hashlib.sha256(blob).hexdigest()
        return answer._replace(
            head={**answer.head, "results": [{"blob": name}]}, blobs={name: blob}
        )

    link.spoil = spoil
    fed.begin(1)
    with pytest.warns(
        UserWarning, match="'client-4' did not send 'params/.*', unlike most clients"
    ):
        ids, _ = fed.map(ready.algorithm.update, state.params, to=fed.everyone())
    assert ids.tolist() == [0, 1, 2, 3, 5, 6, 7]


def test_a_client_that_joins_late_gets_a_number_and_takes_part(tmp_path):
    tables = plain("ifca", {})
    ready = build(tables)
    setup = {"description": tables, "card": {**DataCard.of(ready.data).to_dict(), "truth": None}}
    link = LocalLink(workers(tmp_path, list(ready.data.names)))
    link.away = {102, 107}
    told = []
    fed = Remote(link, setup, "0a", deadline=0.2, poll=0.01, on_join=told.append)
    fed.meet(6, 5.0)
    state = rounds(ready.algorithm, fed, 1)
    assert (state.assignment >= 0).tolist() == [True] * 6
    link.away = set()
    state = rounds(ready.algorithm, fed, 1, 1, state)  # greeted in this round
    state = rounds(ready.algorithm, fed, 1, 2, state)
    assert fed.names[6:] == ("client-2", "client-7")
    assert told[-1] == fed.names
    assert (state.assignment >= 0).tolist() == [True] * 8


def test_a_node_that_returns_under_another_number_is_known_by_its_name(tmp_path):
    ready, link, fed = remote(plain("local_only", {}), tmp_path)
    state = rounds(ready.algorithm, fed, 2)
    link.away = {103}
    state = rounds(ready.algorithm, fed, 1, 2, state)
    old = link.workers[103]
    link.workers[555] = type(old)(old.home, old.name, old.data)
    for number in (3, 4):
        state = rounds(ready.algorithm, fed, 1, number, state)
    assert fed.n_clients == 8
    assert len(next(iter(link.workers[555].rooms.values())).journal.entries()) >= 1


def test_a_node_must_have_the_name_its_key_is_registered_for(tmp_path):
    tables = plain("fedavg", {})
    ready = build(tables)
    setup = {"description": tables, "card": {**DataCard.of(ready.data).to_dict(), "truth": None}}
    link = LocalLink(workers(tmp_path, list(ready.data.names)))
    link.registered = {100: "client-0", 101: "client-7"}
    fed = Remote(link, setup, "0a", deadline=0.2, poll=0.01)
    with pytest.warns(UserWarning, match="has the name 'client-1', but its key is registered for"):
        fed.meet(7, 5.0)
    assert "client-1" not in fed.names


def test_too_few_clients_to_begin_is_an_error_that_names_them(tmp_path):
    _, _, fed = remote(plain("fedavg", {}), tmp_path)
    with pytest.raises(FederationError, match=r"9 clients must join first\. 8 joined"):
        fed.meet(9, 0.1)


def test_the_exam_rides_on_the_next_message_and_leaves_no_trace(tmp_path):
    from coterie.running.evaluation import evaluate, evaluate_later

    tables = plain("ifca", {})
    ready, link, fed = remote(tables, tmp_path)
    state = rounds(ready.algorithm, fed, 1)
    told = []
    evaluate_later(ready.algorithm, fed, state, "classification", told.append)
    before = len(link.sent)
    after = rounds(ready.algorithm, fed, 1, 1, state)
    assert len(link.sent) - before == 8  # one message each, for exam and training
    simulated = Simulation(ready.data, stack=False, wire=True)
    with warnings.catch_warnings():
        scores = evaluate(ready.algorithm, simulated, state, "classification")
    assert torch.equal(told[0].accuracy, scores.accuracy)
    whole = remote(tables, tmp_path / "b")
    assert same(after, rounds(whole[0].algorithm, whole[2], 2))


def test_a_run_may_not_name_code_the_node_did_not_allow(tmp_path):
    tables = plain("fedavg", {"model": {"import": "os:system"}})
    ready = build(plain("fedavg", {}))
    setup = {"description": tables, "card": {**DataCard.of(ready.data).to_dict(), "truth": None}}
    link = LocalLink(workers(tmp_path, ["client-0"]))
    fed = Remote(link, setup, "0a", deadline=0.2, poll=0.01)
    with pytest.warns(UserWarning, match="uses code of 'os'"), pytest.raises(FederationError):
        fed.meet(1, 0.1)
