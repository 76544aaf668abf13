from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from annotated_types import Ge
from torch import Tensor

from coterie.core.algorithm import (
    REGISTRY,
    Algorithm,
    Fill,
    PerClient,
    find,
    grow,
    name_of,
    per_client_fields,
    play,
    register,
    state_type,
)
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.engines import Simulation
from tiny import mean_model, points


class State(NamedTuple):
    models: Tensor
    assignment: PerClient
    repeats: Annotated[Tensor, Fill(0)]


@dataclass(frozen=True)
class Mine(Algorithm):
    model: Model
    n_groups: Annotated[int, Ge(1)] = 2

    def check(self) -> None:
        if self.n_groups == 13:
            raise ConfigError("Mine: n_groups must not be 13.")

    def init(self, fed: Any) -> State:
        return State(torch.zeros(2), fed.per_client(-1), fed.per_client(0))

    def step(self, fed: Any, state: State) -> Any:
        return state, {}

    def deploy(self, state: State, ids: Tensor) -> Any:
        return {}

    def predict(self, personal: Any, x: Any) -> Tensor:
        return x


STATE = State(torch.zeros(2), torch.tensor([1, 0]), torch.tensor([[3.0, 3.0], [4.0, 4.0]]))


def test_marked_fields_are_found_with_their_fill():
    assert per_client_fields(STATE) == {"assignment": -1, "repeats": 0}
    assert per_client_fields({"a": torch.ones(1)}) == {}


def test_a_state_grows_by_its_fill_values():
    grown = grow(STATE, 4)
    assert grown.assignment.tolist() == [1, 0, -1, -1]
    assert grown.assignment.dtype == torch.int64
    assert grown.repeats.tolist() == [[3.0, 3.0], [4.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    assert torch.equal(grown.models, STATE.models)


def test_a_state_that_is_large_enough_stays_itself():
    assert grow(STATE, 2) is STATE


def test_options_are_checked_on_construction():
    with pytest.raises(ConfigError, match=r"Mine: n_groups must be greater than or equal to 1"):
        Mine(mean_model(), n_groups=0)
    with pytest.raises(ConfigError, match=r"must not be 13"):
        Mine(mean_model(), n_groups=13)
    assert Mine(mean_model(), n_groups="3").n_groups == 3


def test_the_registry_finds_by_name_and_names_by_class():
    register("mine")(Mine)
    try:
        assert find("mine") is Mine
        assert name_of(Mine(mean_model())) == name_of(Mine) == "mine"
    finally:
        del REGISTRY["mine"]
    assert name_of(Mine) == "mine"  # unlisted: the class's own name


def test_an_unknown_method_gets_the_nearest_name():
    import coterie.algorithms  # noqa: F401  fills the registry

    with pytest.raises(ConfigError, match=r"Unknown algorithm 'fedavgg'. Did you mean 'fedavg'?"):
        find("fedavgg")


def test_the_state_type_is_read_off_init():
    assert state_type(Mine(mean_model())) is State


def test_by_default_everybody_fits_one_model():
    method, fed = Mine(mean_model()), Simulation(points([0.0], [1.0]))
    state = method.init(fed)
    same, evidence = method.place(fed, state, torch.arange(2))
    assert same is state
    assert evidence.group.tolist() == [0, 0]
    assert evidence.fits.tolist() == [True, True]
    assert not method.done(state)


def test_an_example_takes_what_a_problem_has():
    model = mean_model()
    example = Mine.example(SimpleNamespace(model=model, n_clients=4))
    assert example == Mine(model)


def test_a_run_in_memory_is_played_to_its_end():
    class Counts(Mine):
        """Is done after three rounds."""

        def step(self, fed: Any, state: State) -> Any:
            return state._replace(models=state.models + 1), {"round": fed.round}

        def done(self, state: State) -> bool:
            return bool(state.models[0] >= 3)

    seen = list(play(Counts(mean_model()), Simulation(points([0.0], [1.0]), 0)))
    assert [float(state.models[0]) for state, _ in seen] == [0, 1, 2, 3]
    assert [info for _, info in seen] == [{}, {"round": 0}, {"round": 1}, {"round": 2}]
