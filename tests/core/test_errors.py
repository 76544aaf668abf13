import pytest

from coterie.core import errors
from coterie.core.errors import CoterieError, unknown


def test_an_unknown_name_comes_with_the_nearest_known_one():
    text = unknown("option", "learning_rat", ["momentum", "learning_rate"])
    assert text == (
        "Unknown option 'learning_rat'. Did you mean 'learning_rate'? "
        "Known: learning_rate, momentum."
    )


def test_a_name_like_no_other_gets_no_suggestion():
    assert unknown("model", "zzz", ["mlp"]) == "Unknown model 'zzz'. Known: mlp."
    assert unknown("model", "zzz", []) == "Unknown model 'zzz'. Known: none."


@pytest.mark.parametrize("name", ["ConfigError", "DataError", "TaskError", "FederationError"])
def test_every_error_is_caught_by_one_name(name):
    assert issubclass(getattr(errors, name), CoterieError)
