"""Every method keeps the contract, and for every check there is a fault that it finds."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import coterie.algorithms  # noqa: F401 - lists the methods
import newcomer
from coterie.checks import CHECKS, KERNELS, Problem, assert_contract, check_algorithm, tiny
from coterie.core.aggregate import Mean
from coterie.core.algorithm import REGISTRY, Algorithm, Fill, find
from coterie.core.client import Reply, task
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import put, tree_map

METHODS = [name for name in REGISTRY if REGISTRY[name].__module__.startswith("coterie.")]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_contract(method, check):
    assert_contract(method, only=[check])


NUMERIC = ["engines_agree", "batch_norm_and_dropout", "chunks_do_not_matter", "resume_is_exact"]


@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("method", ["fedavg", "ifca", "clove", "local_only"])
def test_the_contract_holds_with_every_kernel_forced(method, engine):
    assert_contract(method, [engine], NUMERIC)


@pytest.mark.parametrize("method", METHODS)
def test_the_contract_holds_on_shards(method):
    assert_contract(method, ["ray"], ["engines_agree"])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_contract_holds_on_shards_and_with_ray(method):
    assert_contract(method, ["ray"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_contract_holds_with_every_kernel_forced(method, engine):
    assert_contract(method, [engine])


# A FedAvg into which a fault can be put at any one place.


class State(NamedTuple):
    params: Any
    count: Annotated[Tensor, Fill(0)]  # [clients]  how often each was heard
    extra: Tensor  # for the faults


@dataclass(frozen=True)
class Plain(Algorithm):
    """Counts whom it heard, besides. Without a fault, a correct method."""

    bar: ClassVar[float] = 0.4
    model: Model
    local: LocalSGD
    fault: str = ""

    def at(self, place: str, *values: Any) -> Any:
        """What the fault does at a place; None where it does nothing."""
        hook = FAULTS[self.fault].at.get(place)
        return hook and hook(*values)

    def init(self, fed) -> State:
        params = self.model.init(fed.key("model"))
        state = State(params, fed.per_client(0), torch.zeros((), dtype=torch.float64))
        return self.at("init", fed, state) or state

    def step(self, fed, state):
        self.at("begin", fed, state)
        cohort = self.at("cohort", fed, state)
        cohort = fed.cohort() if cohort is None else cohort
        least = self.at("at_least", cohort) or 1
        by_hand = "mean" in FAULTS[self.fault].at
        mean = None if by_hand else Mean("params", state.params, weight="n")
        ids, reply = fed.map(self.update, state.params, to=cohort, reduce=mean, at_least=least)
        params = self.at("mean", fed, reply) or reply["params"]
        state = State(params, put(state.count, ids, state.count[ids] + 1), state.extra)
        return self.at("end", fed, state, ids, reply) or state, {}

    def client_init(self, client):
        return {"n": torch.tensor(0)}

    @task
    def update(self, client, params):
        trained = self.local(client, params, self.model.losses)
        reply = {"params": trained, "n": client.train.size}
        return self.at("task", client, params, reply) or reply

    def deploy(self, state, ids):
        return self.at("deploy", self, state) or state.params

    def predict(self, personal, x):
        return self.model.apply(personal, x)


@dataclass(frozen=True)
class Untyped(Algorithm):
    """Does not say what `init` returns, so a saved state comes back as a dict."""

    model: Model
    local: LocalSGD

    def init(self, fed):
        return State(self.model.init(fed.key("model")), fed.per_client(0), torch.zeros(()))

    def step(self, fed, state):
        mean = Mean("params", state.params, weight="n")
        _, reply = fed.map(self.update, state.params, to=fed.cohort(), reduce=mean)
        return state._replace(params=reply["params"]), {}

    @task
    def update(self, client, params):
        return {"params": self.local(client, params, self.model.losses), "n": client.train.size}

    def deploy(self, state, ids):
        return state.params

    def predict(self, personal, x):
        return self.model.apply(personal, x)


def with_fault(name: str) -> Callable[[Problem], Algorithm]:
    return lambda problem: Plain(problem.model, problem.local, name)


def plus(tree, value):
    return tree_map(lambda leaf: leaf + value if leaf.is_floating_point() else leaf, tree)


# The faults.


def averages_padding(client, params, reply):
    return {**reply, "params": plus(reply["params"], client.train.x.double().mean())}


def weighs_by_padded_size(client, params, reply):
    return {**reply, "n": torch.tensor(len(client.train.mask))}


def changes_what_it_was_handed(client, params, reply):
    for leaf in params.values():
        leaf.add_(0.1)


def branches_on_a_tensor(client, params, reply):
    if client.train.size > 8:
        return {**reply, "n": client.train.size * 2}
    return reply


def recalibrates_buffers_through_padding(client, params, reply):
    x = client.train.x.double()
    trained = {
        name: leaf + x.var() if name.endswith("running_mean") else leaf
        for name, leaf in reply["params"].items()
    }
    return {**reply, "params": trained}


HISTORY: list[int] = []


def forgets(fed, state):
    HISTORY.clear()


def counts_rounds_outside_the_state(fed, state, ids, reply):
    HISTORY.append(1)
    return state._replace(extra=torch.tensor(float(len(HISTORY)), dtype=torch.float64))


def remembers_attempts(fed, state):
    HISTORY.append(1)


def numbers_attempts(fed, state, ids, reply):
    return state._replace(extra=torch.tensor(float(len(HISTORY)), dtype=torch.float64))


def believes_all_answered(fed, state, ids, reply):
    return state._replace(count=put(state.count, fed.cohort(), reply["n"]))


def divides_by_those_asked(fed, reply):
    return tree_map(lambda leaf: leaf.sum(0) / len(fed.cohort()), reply["params"])


def divides_by_those_who_answered(fed, reply):
    return tree_map(lambda leaf: leaf.double().mean(0).to(leaf.dtype), reply["params"])


def averages_nobody(fed, state, ids, reply):
    return state._replace(extra=state.extra + reply["n"][ids == 0].double().mean())


def writes_memory_itself(fed, state):
    for client in fed.everyone().tolist():
        fed.memory.committed[client] = {"n": torch.tensor(fed.round + 9)}


def changes_state_in_place(fed, state):
    state.count.add_(1)


def asks_whom_it_knew_at_the_start(fed, state):
    return torch.arange(int(state.extra))


def remembers_how_many(fed, state):
    return state._replace(extra=torch.tensor(float(fed.n_clients)))


def indexes_a_field_that_does_not_grow(fed, state, ids, reply):
    extra = state.extra if state.extra.ndim else torch.zeros(fed.n_clients)
    return state._replace(extra=put(extra, ids, 1.0))


def hides_nan(fed, reply):
    return tree_map(lambda leaf: leaf.nan_to_num().mean(0), reply["params"])


def marks_the_state_when_deploying(method, state):
    state.extra.add_(1)


def weighs_by_client_number(fed, state, ids, reply):
    return state._replace(extra=state.extra + (ids * reply["n"]).sum())


def deals_by_position(fed, state):
    return fed.everyone()[::2]


def draws_without_a_key(fed, state, ids, reply):
    return state._replace(params=plus(state.params, random.random()))


def starts_the_same(fed, state):
    return state._replace(params=tree_map(torch.zeros_like, state.params))


def does_not_train(client, params, reply):
    return {**reply, "params": params}


def everyone(fed, state):
    return fed.everyone()


def task_draws_from_torch(client, params, reply):
    return {**reply, "params": plus(reply["params"], torch.rand(()))}


def server_draws_from_torch(fed, state):
    torch.rand(1)


def server_draws_from_numpy(fed, state):
    np.random.rand()


def server_draws_from_python(fed, state):
    random.random()


def shows_test_data(fed, state):
    fed.support = "test"


def reads_the_source(fed, state):
    fed.source.gather("test", fed.everyone())


def looks_for_the_truth(fed, state):
    assert fed.source.truth is not None


def sends_its_data(client, params, reply):
    return {**reply, "x": client.train.x}


def sends_the_model_twice(client, params, reply):
    return {**reply, "again": reply["params"]}


def keeps_a_model_per_client(fed, state, ids, reply):
    model = torch.cat([leaf.flatten() for leaf in state.params.values()])
    return state._replace(extra=model.repeat(fed.n_clients, 1))


def notes_on_itself(method, state):
    if not hasattr(method, "bias"):
        HISTORY.append(1)
        object.__setattr__(method, "bias", float(len(HISTORY)))
    return plus(state.params, method.bias)


def shrinks_models(fed, state, ids, reply):
    return state._replace(params=tree_map(lambda leaf: leaf * 0.9, state.params))


def moves_models_by_hand(client, params, reply):
    return {**reply, "params": plus(reply["params"], 0.01)}


def remembers_padding(client, params, reply):
    return Reply(reply, keep={"n": torch.tensor(len(client.train.mask))})


def forgets_who_it_is(client, params, reply):
    return Reply(reply, keep={"new": client.train.size})


class Fault(NamedTuple):
    check: str
    says: str  # must occur in the sentence
    at: dict[str, Callable[..., Any]]  # what goes wrong, by place in `Plain`
    engines: tuple[str, ...] = ("loop", "stacked", "wire")


FAULTS = {
    "": Fault("", "", {}),
    "averages by hand": Fault(
        "nan_replies_are_dropped", "'params/.*' has nan", {"mean": divides_by_those_who_answered}
    ),
    "averages padding": Fault(
        "engines_agree", "stacked engine .* mask", {"task": averages_padding}
    ),
    "weighs by padded size": Fault(
        "engines_agree", "stacked engine .* batch.size", {"task": weighs_by_padded_size}
    ),
    "changes what it was handed": Fault(
        "engines_agree", "was handed over", {"task": changes_what_it_was_handed}
    ),
    "branches on a tensor": Fault(
        "engines_agree", "no `if` on a tensor", {"task": branches_on_a_tensor}
    ),
    "remembers padding": Fault("engines_agree", "'memory/client-", {"task": remembers_padding}),
    "remembers a name it did not set up": Fault(
        "engines_agree", "client_init", {"task": forgets_who_it_is}
    ),
    "recalibrates buffers through padding": Fault(
        "batch_norm_and_dropout",
        "running_mean' differs",
        {"task": recalibrates_buffers_through_padding},
    ),
    "weighs by padded size, in chunks": Fault(
        "chunks_do_not_matter", "1 clients at once", {"task": weighs_by_padded_size}
    ),
    "averages padding, in chunks": Fault(
        "chunks_do_not_matter", "1 clients at once", {"task": averages_padding}
    ),
    "counts outside the state": Fault(
        "resume_is_exact",
        "state.safetensors",
        {"init": forgets, "end": counts_rounds_outside_the_state},
    ),
    "believes all answered": Fault(
        "lost_replies_do_no_harm", "stopped with", {"end": believes_all_answered}
    ),
    "divides by those asked": Fault(
        "lost_replies_do_no_harm",
        "alone must not change a model.*that answered",
        {"mean": divides_by_those_asked},
    ),
    "averages nobody": Fault(
        "lost_replies_do_no_harm", "'extra' has nan", {"end": averages_nobody}
    ),
    "writes memory itself": Fault(
        "lost_replies_do_no_harm", "memory of clients", {"begin": writes_memory_itself}
    ),
    "waits for all": Fault("lost_replies_do_no_harm", "at_least", {"at_least": len}),
    "changes state in place": Fault(
        "abandoned_rounds_leave_no_trace",
        "'state/count' differs by 1",
        {"begin": changes_state_in_place},
    ),
    "counts attempts": Fault(
        "abandoned_rounds_leave_no_trace",
        "in the next one: 'state/extra'",
        {"init": forgets, "begin": remembers_attempts, "end": numbers_attempts},
    ),
    "writes memory in an abandoned round": Fault(
        "abandoned_rounds_leave_no_trace", "memory/client-0/n", {"begin": writes_memory_itself}
    ),
    "asks whom it knew": Fault(
        "late_joiners_are_taken_in",
        "was not asked",
        {"init": remembers_how_many, "cohort": asks_whom_it_knew_at_the_start},
    ),
    "a field that does not grow": Fault(
        "late_joiners_are_taken_in", "IndexError", {"end": indexes_a_field_that_does_not_grow}
    ),
    "hides nan": Fault("nan_replies_are_dropped", "There was no warning", {"mean": hides_nan}),
    "marks the state when deploying": Fault(
        "evaluations_change_nothing", "'state/extra'", {"deploy": marks_the_state_when_deploying}
    ),
    "weighs by client number": Fault(
        "client_order_does_not_matter", "'state/extra'", {"end": weighs_by_client_number}
    ),
    "asks every other client": Fault(
        "client_order_does_not_matter", "fed.turns", {"cohort": deals_by_position}
    ),
    "draws without a key": Fault("seeds_decide", "The same seed", {"end": draws_without_a_key}),
    "ignores the seed": Fault(
        "seeds_decide",
        "Another seed",
        {"init": starts_the_same, "task": does_not_train, "cohort": everyone},
    ),
    "a task draws from torch": Fault(
        "global_generators_stay_untouched", "client.key", {"task": task_draws_from_torch}
    ),
    "the server draws from torch": Fault(
        "global_generators_stay_untouched", "of torch", {"begin": server_draws_from_torch}
    ),
    "the server draws from numpy": Fault(
        "global_generators_stay_untouched", "of numpy", {"begin": server_draws_from_numpy}
    ),
    "the server draws from Python": Fault(
        "global_generators_stay_untouched", "of Python", {"begin": server_draws_from_python}
    ),
    "shows test data": Fault(
        "only_evaluation_reads_test_data", "during a round", {"begin": shows_test_data}
    ),
    "reads the source": Fault(
        "only_evaluation_reads_test_data", "during a round", {"begin": reads_the_source}
    ),
    "looks for the truth": Fault(
        "only_evaluation_reads_test_data", "AttributeError", {"begin": looks_for_the_truth}
    ),
    "sends its data": Fault(
        "replies_do_not_grow_with_data", "update/x", {"task": sends_its_data}, ("stacked",)
    ),
    "sends its data, ragged": Fault(
        "replies_do_not_grow_with_data", "stopped with", {"task": sends_its_data}, ("loop",)
    ),
    "sends the model twice": Fault(
        "server_memory_does_not_grow_with_clients",
        "Use a Mean for every large part",
        {"task": sends_the_model_twice},
    ),
    "keeps a model per client": Fault(
        "server_memory_does_not_grow_with_clients",
        "none of them in State",
        {"end": keeps_a_model_per_client},
    ),
    "notes on itself": Fault(
        "saved_models_predict_the_same", "'output' differs", {"deploy": notes_on_itself}
    ),
    "shrinks models": Fault(
        "zero_epochs_change_no_model", "add up to one", {"end": shrinks_models}
    ),
    "moves models by hand": Fault(
        "zero_epochs_change_no_model", "state/params", {"task": moves_models_by_hand}
    ),
    "does not train": Fault(
        "the_tiny_problem_is_learnt", "accuracy of 0.40", {"task": does_not_train}
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_all_checks_pass(check):
    assert_contract(with_fault(""), only=[check])


def test_dividing_by_those_who_answered_is_right_when_replies_are_lost():
    assert_contract(with_fault("averages by hand"), only=["lost_replies_do_no_harm"])


HARMLESS = ("averages by hand", "hides nan")
"""Faults that no longer do harm: the server leaves out values that are not finite before a method
sees them, and names the client."""


@pytest.mark.parametrize("name", HARMLESS)
def test_a_method_never_sees_values_that_are_not_finite(name):
    assert_contract(with_fault(name), only=["nan_replies_are_dropped"])


@pytest.mark.parametrize("name", [name for name in FAULTS if name and name not in HARMLESS])
def test_a_fault_is_found_and_named(name):
    fault = FAULTS[name]
    (result,) = check_algorithm(with_fault(name), fault.engines, only=[fault.check])
    assert not result.passed
    assert re.search(fault.says, result.sentence), result.sentence


@pytest.mark.parametrize("check", ["resume_is_exact", "saved_models_predict_the_same"])
def test_a_state_whose_type_is_not_annotated_is_found(check):
    (result,) = check_algorithm(Untyped, only=[check])
    assert not result.passed
    assert "'dict' object has no attribute" in result.sentence


@pytest.mark.parametrize("check", CHECKS)
def test_there_is_a_fault_for_every_check(check):
    assert any(fault.check == check for fault in FAULTS.values())


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_explains_itself_in_a_sentence(check):
    text = " ".join((CHECKS[check].__doc__ or "").split())
    assert re.fullmatch(r"[A-Z].{20,100}\.", text)


# The report.


def test_a_method_may_be_a_name_a_class_an_instance_or_a_function():
    problem = tiny()
    fedavg = find("fedavg")
    instance = fedavg(problem.model, LocalSGD(), weights="equal")
    for method in ("fedavg", fedavg, instance, lambda problem: fedavg.example(problem)):
        assert check_algorithm(method, ("loop",), only=["seeds_decide"]).passed


def test_an_instance_keeps_its_options():
    method = Plain(tiny().model, LocalSGD(learning_rate=9.0), "shrinks models")
    only = ["the_tiny_problem_is_learnt", "zero_epochs_change_no_model"]
    report = check_algorithm(method, ("loop",), only)
    assert [result.passed for result in report] == [True, False]


def test_an_example_that_cannot_be_built_is_a_finding():
    def impossible(problem):
        raise ConfigError("CLoVE: max_groups must be at least 2, got 1.")

    (result,) = check_algorithm(impossible, ("loop",), only=["engines_agree"])
    assert not result.passed
    assert "max_groups must be at least 2" in result.sentence


def test_what_does_not_apply_passes_and_says_why():
    only = ["server_memory_does_not_grow_with_clients", "nan_replies_are_dropped"]
    report = check_algorithm("local_only", ("loop",), only)
    assert report.passed
    assert [result.sentence[:14] for result in report] == ["Does not apply"] * 2


def test_unknown_checks_and_engines_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'seeds_decide'"):
        check_algorithm("fedavg", only=["seed_decides"])
    with pytest.raises(ConfigError, match="Unknown engine"):
        check_algorithm("fedavg", ("stack",))


def test_an_assertion_lists_what_is_wrong():
    broken = with_fault("shrinks models")
    only = ["seeds_decide", "zero_epochs_change_no_model"]
    with pytest.raises(AssertionError, match=r"1 of 2 checks(?s:.*)zero_epochs_change_no_model: "):
        assert_contract(broken, ("loop",), only)


def test_a_newcomers_file_passes_the_contract():
    assert len(Path(newcomer.__file__).read_text().splitlines()) < 80
    report = check_algorithm(newcomer.Newcomer)
    assert report.passed, str(report)
