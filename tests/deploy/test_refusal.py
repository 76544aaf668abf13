"""What the owner of a node does not want to send, the node does not send."""

import pytest
import torch

from coterie.core.question import Question
from coterie.deploy.node import node_command
from coterie.deploy.worker import Refusal, main, refuse
from coterie.engines.remote import Remote
from coterie.running.build import build
from coterie.running.evaluation import count_labels, score
from coterie.running.why import sum_labels
from coterie_lab.leaving import known_methods, list_parts
from links import LocalLink, workers
from small_runs import described


def server(tmp_path, algorithm="fedavg", answers=(), strict=None):
    """A server and four workers in this process; `strict` is the first one's own list."""
    ready = build(described(algorithm, 2))
    from coterie.data.card import DataCard

    setup = {"description": ready.description, "card": DataCard.of(ready.data).to_dict()}
    link = LocalLink(workers(tmp_path, list(ready.data.names)))
    for number, worker in enumerate(link.workers.values()):
        worker.answers = strict if strict is not None and not number else answers
    fed = Remote(link, setup, "0a", deadline=5.0, poll=0.0)
    fed.meet(len(link.workers), 5.0)
    fed.begin(0)
    return ready.algorithm, fed


def ask(fed, task, *given):
    return fed.map(task, *given, to=fed.everyone(), at_least=0)


def test_a_node_does_not_send_label_counts_and_the_server_says_so(tmp_path):
    method, fed = server(tmp_path)
    with pytest.warns(UserWarning, match=r"refuses: .* not let it answer .count_labels"):
        ids, _ = ask(fed, Question(count_labels, method, {"n_classes": 3}))
    assert not len(ids)
    assert "refuses" in fed.why_missing()
    assert "would send label counts" in fed.why_missing()
    assert not fed.record.counts  # a refusal is no fault


def test_an_owner_can_allow_it(tmp_path):
    method, fed = server(tmp_path, answers=("count_labels",))
    ids, reply = ask(fed, Question(count_labels, method, {"n_classes": 3}))
    assert len(ids) == fed.n_clients
    assert int(reply["counts"].sum()) > 0


def test_a_list_of_its_own_concerns_one_node_only(tmp_path):
    method, fed = server(tmp_path, strict=("score", "keep_model"))
    with pytest.warns(UserWarning, match="only score, keep_model"):
        ids, _ = ask(fed, method.update, method.init(fed).params)
    assert sorted(ids.tolist()) == list(range(1, fed.n_clients))
    own = method.deploy(method.init(fed), fed.everyone())
    ids, _ = ask(fed, Question(score, method, {"kind": "classification"}, "test"), own)
    assert len(ids) == fed.n_clients


def test_the_loss_of_each_row_is_not_sent(tmp_path):
    method, fed = server(tmp_path)
    own = method.deploy(method.init(fed), fed.everyone())
    question = Question(score, method, {"kind": "classification", "rows": 50}, "test")
    with pytest.warns(UserWarning, match="would send the loss of each row"):
        ids, _ = ask(fed, question, own)
    assert not len(ids)


def test_a_refused_round_is_abandoned_with_the_reason(tmp_path):
    from coterie.core.errors import FederationError

    method, fed = server(tmp_path, "fedproto")
    with (
        pytest.warns(UserWarning, match="label counts"),
        pytest.raises(FederationError, match="refuses: its owner does not let it answer 'update'"),
    ):
        method.step(fed, method.init(fed))


@pytest.mark.parametrize("lens", ["auto", "conditional", "joint", "inputs"])
def test_a_survey_is_answered_if_it_counts_no_labels(lens):
    from coterie.algorithms.survey.seeded import probe_seeded

    reveals = Question(probe_seeded, None, {"lens": lens}).info.reveals
    assert reveals == ("label counts" if lens in ("auto", "conditional") else "")
    described = Question(probe_seeded, None, {"lens": lens}).describe()
    if reveals:
        with pytest.raises(Refusal, match="--answer all"):
            refuse(described, reveals, ())
    else:
        refuse(described, reveals, ())
    refuse(described, reveals, ("all",))


def test_label_questions_say_what_they_reveal():
    assert Question(sum_labels, None).info.reveals == "label counts"


@pytest.mark.parametrize("name", known_methods())
@pytest.mark.filterwarnings("ignore")
def test_what_is_sent_per_class_is_declared(name):
    """Every task of every method is run; what has an entry per class must say so."""
    from coterie.algorithms.survey.seeded import probe_seeded
    from coterie.core.algorithm import REGISTRY

    for part in list_parts(name):
        if part.kind != "per class" or part.phase == "evaluation":
            continue
        if part.task == "probe_seeded":
            assert Question(probe_seeded, None).info.reveals
        else:
            assert getattr(REGISTRY[name], part.task).__task__.reveals, part


def test_the_list_reaches_the_worker(tmp_path, monkeypatch):
    command = node_command(tmp_path, "a", "run", "x:1", None, None, (), ("score", "update"))
    assert command[-4:] == ["--answer", "score", "--answer", "update"]
    found = []
    monkeypatch.setattr("coterie.deploy.worker.listen", found.append)
    main([str(tmp_path), "a", "run", "--answer", "score"])
    assert found[0].answers == ("score",)
    assert torch.get_num_threads() == 1
