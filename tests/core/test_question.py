"""Questions: registered functions that are asked like tasks, here and by real clients."""

import json

import pytest
import torch

from coterie.core.errors import ConfigError, TaskError
from coterie.core.question import Question, describe_task, find_task, info_of, question
from coterie.engines import Simulation
from tiny import ragged

PACKAGE = __name__.split(".")[0]


class Method:
    """What a question is asked for."""

    factor = 3.0


@question(phase="cluster", key="old-name")
def add_up(method, client, more, *, times):
    return {"sum": (client.train.mask.sum() * method.factor + more) * times}


@question(stackable=False)
def draw(method, client):
    return {"key": client.key}


@question(home=True)
def keep_here(method, client, *, home):
    return {"there": torch.tensor(home == "folder")}


def test_a_question_is_asked_like_a_task():
    fed = Simulation(ragged(2, 5))
    fed.begin(0)
    _, reply = fed.map(
        Question(add_up, Method(), {"times": 2}), torch.tensor(1.0), to=fed.everyone()
    )
    assert reply["sum"].tolist() == [2 * (2 * 3 + 1), 2 * (5 * 3 + 1)]
    assert fed.traffic.total("cluster") > 0


def test_the_label_of_a_question_is_part_of_its_keys():
    info = info_of(Question(add_up, Method(), split="test", stackable=False))
    assert info.name == "old-name"
    assert (info.stackable, info.split) == (False, "test")
    assert info_of(Question(draw, Method())).name == "draw"


def test_a_question_travels_as_plain_data_and_is_found_again():
    method = Method()
    asked = Question(add_up, method, {"times": 2}, split="test")
    plain = json.loads(json.dumps(describe_task(asked)))
    found = find_task(plain, method, None, (PACKAGE,))
    assert (found.function, found.arguments, found.split) == (add_up, {"times": 2}, "test")
    assert info_of(found).stackable is False


def test_a_question_may_keep_something_in_the_folder_of_its_client():
    plain = describe_task(Question(keep_here, Method()))
    found = find_task(plain, Method(), "folder", (PACKAGE,))
    assert found(None)["there"]


def test_a_question_of_a_package_that_is_not_allowed_is_refused():
    plain = describe_task(Question(draw, Method()))
    with pytest.raises(ConfigError, match=f"start the node with --allow {PACKAGE}"):
        find_task(plain, Method(), None, ("coterie",))


def test_only_registered_functions_can_be_asked():
    with pytest.raises(ConfigError, match="os:system is not a question"):
        find_task({"question": "os:system", "arguments": {}, "split": None}, None, None, ("os",))
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_task({"question": "none_such:x", "arguments": {}}, None, None, ("none_such",))
    with pytest.raises(ConfigError, match="Method has no task 'factor'"):
        find_task({"name": "factor"}, Method(), None, ())
    with pytest.raises(TaskError, match="must be registered"):
        info_of(Question(lambda: None, Method()))
    fed = Simulation(ragged(2))
    with pytest.raises(TaskError, match=r"draw is a question. Ask Question\(draw, method\)"):
        fed.map(draw, to=fed.everyone())
