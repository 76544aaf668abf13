"""Clients that lie in whole runs: who is named, who is not, and what is left for the others."""

import warnings

import pytest
import torch

import coterie
from coterie import metrics
from coterie.data import digits
from coterie_lab.attacks import ATTACKS, hostile, swap_labels

LIARS = [1, 8]
TRUTH = torch.tensor([0] * 6 + [1] * 6)


def attack(name, rounds=2, liars=LIARS, **given):
    data = digits(n_clients=12, n_groups=2, seed=3)
    with warnings.catch_warnings(), hostile(name, liars, TRUTH, 0):
        warnings.simplefilter("ignore")
        return coterie.fit(data, rounds=rounds, compare=False, progress=False, **given)


def index(fit, liars=LIARS):
    honest = [i for i in range(12) if i not in liars]
    group = torch.tensor([fit.rows[i]["group"] for i in honest])
    return metrics.adjusted_rand(group, TRUTH[honest])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("permuted", "and not as losses do"),
        ("random, survey", "and not as losses do"),
        ("constant, survey", "hardly differ from row to row"),
    ],
)
def test_those_who_made_up_their_answers_are_named_with_the_reason(name, why, tmp_path):
    fit = attack(name)
    names = [fit.names[i] for i in LIARS]
    assert sorted(fit.aside) == sorted(names)
    assert all(why in text for text in fit.aside.values())
    assert sorted(fit.odd) == sorted(names)
    assert index(fit) == 1.0
    assert fit.n_groups == 2
    assert f"{names[0]} and {names[1]} gave answers that cannot be true" in fit.sentence
    fit.save(tmp_path / "run")
    assert coterie.load(tmp_path / "run").aside == fit.aside
    page = (fit.report(tmp_path / "page.html")).read_text()
    assert "cannot be true:</p>" in page
    assert all(f"<b>{name}</b>: {why}" in page for name, why in fit.aside.items())


def test_losses_that_are_false_in_training_only_are_unlike_all_others():
    fit = attack("constant, training", rounds=4)
    names = [fit.names[i] for i in LIARS]
    assert fit.aside == dict.fromkeys(names, "its losses are unlike those of all others")
    assert index(fit) == 1.0


@pytest.mark.parametrize("name", ["crafted", "copied", "labels"])
def test_consistent_lies_pull_no_honest_client_out_of_its_group(name):
    if name == "labels":
        data = swap_labels(digits(n_clients=12, n_groups=2, seed=3), LIARS)
        fit = coterie.fit(data, rounds=2, compare=False, progress=False)
    else:
        fit = attack(name)
    assert index(fit) == 1.0
    assert not set(fit.odd) - {fit.names[i] for i in LIARS}


def test_nobody_is_set_aside_without_a_lie():
    fit = attack("permuted", liars=[])
    assert fit.aside == {}
    assert fit.odd == []


def test_a_cap_bounds_what_a_lie_about_samples_does():
    names = digits(n_clients=12, n_groups=2, seed=3).names
    start = dict(zip(names, TRUTH.tolist(), strict=True))
    right = {}
    for cap in (None, 150):  # clients have 239 rows, and some say that they have 20 times as many
        policy = {"mean": "plain", "cap": cap}
        fit = attack("samples", rounds=4, policy=policy, start=start, n_groups=2)
        assert not fit.summary.get("faults")
        right[cap] = sum(row["accuracy"] for row in fit.rows) / 12
    assert right[150] > right[None] + 0.2


def test_every_attack_repeats_itself():
    a, b = (attack("permuted, training", rounds=2).summary["accuracy"] for _ in range(2))
    assert a == b
    assert len(set(ATTACKS)) == len(ATTACKS)
