"""Newcomers on the demo data, by the study in coterie_lab.studies.newcomers.

Members are cut from 70 % of the images, newcomers from the rest; the study says how.
"""

import pytest

from coterie_lab.studies import newcomers


@pytest.fixture
def study():
    return newcomers


def figures(study, method: str, n: int) -> dict[str, float]:
    fit, truth = study.members(method, seed=0)
    assert fit.summary["ari"] == 1.0
    return study.count_placed(fit, truth, study.newcomers(n, seed=0))


@pytest.mark.parametrize("method", ["census", "survey"])
def test_some_newcomers_are_placed_right_and_strangers_refused(study, method):
    counts = figures(study, method, 16)
    assert counts["right"] == 16
    assert counts["refused known"] == 0
    assert counts["refused inverted"] + counts["refused noise"] >= 29  # 90 of 100


@pytest.mark.slow
@pytest.mark.parametrize("method", ["census", "survey"])
def test_newcomers_meet_the_bars(study, method):
    counts = figures(study, method, 100)
    assert counts["right"] >= 99
    assert counts["refused known"] <= 5
    assert counts["refused inverted"] >= 90
    assert counts["refused noise"] >= 90


def test_no_member_has_an_image_of_a_newcomer(study):
    from coterie.data.synthetic import digits

    data = digits(40, 4, n_max=study.N_MEMBERS)
    used = {int(i) for split in ("train", "test") for i in data.rows[split].index}
    assert len(used) == study.N_MEMBERS
    images = {data.x[i].float().div(16).numpy().tobytes() for i in used}
    known = [guest for guest in study.newcomers(4, seed=0) if guest.kind == "known"]
    upright = next(guest for guest in known if guest.group == 0)
    assert 60 <= len(upright.x) <= 180
    assert not images & {row.tobytes() for row in upright.x}
