from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Le

from coterie.core.config import check_fields, construct
from coterie.core.errors import ConfigError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from tiny import mean_model


@dataclass(frozen=True)
class Options:
    model: Model
    local: LocalSGD
    n_groups: Annotated[int, Ge(1)] = 2
    share: Annotated[float, Ge(0), Le(1)] = 0.5
    weights: Literal["samples", "equal"] = "samples"
    limit: Annotated[int, Ge(1)] | None = None
    derived: int = field(init=False, default=0)

    def __post_init__(self):
        check_fields(self)


MODEL, LOCAL = mean_model(), LocalSGD()


def test_an_option_out_of_range_is_named_with_its_owner():
    with pytest.raises(ConfigError) as error:
        LocalSGD(learning_rate=-1)
    assert str(error.value) == (
        "LocalSGD: learning_rate must be greater than or equal to 0. Got -1."
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_groups": 0}, "Options: n_groups must be greater than or equal to 1. Got 0."),
        ({"n_groups": "many"}, "Options: n_groups must be a valid integer"),
        ({"n_groups": 2.5}, "Options: n_groups must be a valid integer"),
        ({"share": float("nan")}, "Options: share must be "),
        ({"weights": "sample"}, "Options: weights must be 'samples' or 'equal'. Got 'sample'."),
        ({"local": 0.1}, "Options: local must be an instance of LocalSGD. Got 0.1."),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ConfigError) as error:
        construct(Options, {"model": MODEL, "local": LOCAL} | options)
    assert str(error.value).startswith(sentence)


def test_text_becomes_what_is_meant():
    options = Options(MODEL, LOCAL, n_groups="3", share="0.25", limit="7")
    assert (options.n_groups, options.share, options.limit) == (3, 0.25, 7)
    assert type(options.n_groups) is int


def test_parts_are_taken_as_they_are():
    assert Options(MODEL, LOCAL).model is MODEL


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"LocalSGD: Unknown option 'learning_rat'. Did you mean"):
        construct(LocalSGD, {"learning_rat": 0.1})


def test_what_is_derived_is_no_option():
    with pytest.raises(ConfigError, match="Unknown option 'derived'"):
        construct(Options, {"model": MODEL, "local": LOCAL, "derived": 1})


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match=r"Options: local must be given"):
        construct(Options, {"model": MODEL})
