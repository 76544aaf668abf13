"""Answers that must not contradict each other, and how the study judges them."""

import numpy as np
import pytest

import coterie
from coterie_lab.studies import evidence_answers as answers
from coterie_lab.studies import evidence_cases as cases

SMALL = {
    "hospitals, one odd": (cases.hospitals, 6),
    "nine sites, three groups": (cases.nine_sites, 6),
    "ten alike": (cases.alike_hospitals, 6),
    "each its own rule": (cases.own_rules, 3),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SMALL)
def test_advice_and_fit_say_the_same(name):
    make, rounds = SMALL[name]
    data = cases.federation(make(np.random.default_rng(1)), 0.2)
    advice = coterie.advise(data, why="nothing")
    fit = coterie.fit(data, rounds=rounds, compare=False, quiet=True)
    stray = "No number of groups describes them well: clients differ one by one." in fit.sentence
    assert stray == (advice.n_groups is None)
    if not stray:
        assert list(advice.odd) == fit.odd
        assert advice.n_groups == fit.n_groups


def test_figures_that_contradict_a_recommendation():
    line = {"most": "one", "ways": {"one": [0.5, 0.5], "groups": [0.3, 0.4], "alone": [0.9, 0.9]}}
    assert answers.contradicts(line, {}, 0.05)
    assert not answers.contradicts(line, {}, 0.15)  # a gain per row too small to matter
    assert answers.contradicts(line, {"one": 0.80, "alone": 0.83}, 0.15)
    assert not answers.contradicts({**line, "most": None}, {"one": 0.80, "alone": 0.83}, 0.0)


def test_best_rounds_are_told_from_last_rounds():
    # Used round, best round, loss there and at the end: alone is .02 worse at best, .5 in the end.
    ways = {"one": [5, 5, 0.6, 1.0], "groups": [8, 8, 0.10, 0.2], "alone": [4, 4, 0.12, 0.7]}
    assert answers.is_best({**ways, "gain": -0.02})
    assert not answers.is_best({**ways, "gain": -0.5})
    assert not answers.is_best({**ways, "alone": [30, 4, 0.12, 0.7], "gain": -0.02})


def test_one_answer_whatever_the_rounds():
    def line(short, long):
        return {
            name: {"most": most, "recommendation": most or "undecided"}
            for name, most in (("short", short), ("long", long))
        }

    assert answers.same_answer(line("one", "one"))
    assert not answers.same_answer(line("one", None))
    assert not answers.two_answers(line("one", None))
    assert answers.two_answers(line("one", "groups"))
