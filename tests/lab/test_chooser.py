"""The chooser ranks methods by stored runs, and no single model beats what is possible."""

import json
from pathlib import Path

import pytest

from coterie import measured
from coterie_lab import chooser
from coterie_lab.partitions.published import CONCEPT_SWAPS, swap_labels

STORE = Path(__file__).parents[2] / "docs" / "results" / "summaries.jsonl"


def run(study: str, accuracy: float, scale: str = "reduced", **more: object) -> dict[str, object]:
    kept = {"study": study, "accuracy": accuracy, "scale": scale, "rounds": 5, "bytes": 2e6}
    return {**kept, "published_rounds": 5, "seconds": 3.0, "worst_decile": accuracy - 10, **more}


def test_methods_are_ranked_within_one_scale(monkeypatch):
    monkeypatch.setitem(chooser.KINDS, "none", ("nothing", ("kinds/*/none",), 2))
    runs = [run(f"kinds/x/none/{name}", value) for name, value in (("a", 90), ("b", 95))]
    runs += [run("kinds/x/none/a", 99, "paper"), run("kinds/x/none/c", 99, rounds=3)]
    found = chooser.measure(runs)["none"]
    # two methods ran at reduced scale, one at paper scale, and c was cut short
    assert found["accuracy"] == [["b", 95.0], ["a", 90.0]]
    assert found["megabytes"] == [["a", 2.0], ["b", 2.0]]
    assert "`b`\u00a095.0<br>`a`\u00a090.0" in chooser.section({"none": found})


def test_methods_are_compared_on_the_same_seeds(monkeypatch):
    monkeypatch.setitem(chooser.KINDS, "none", ("nothing", ("kinds/*/none",), 2))
    runs = [
        run(f"kinds/x/none/{name}", value, seed=seed)
        for name, values in (("a", (90, 92, 10)), ("b", (91, 93)))
        for seed, value in enumerate(values)
    ]
    found = chooser.measure(runs)["none"]
    # the third seed has not run with b, so it does not count for a either
    assert found["accuracy"] == [["b", 92.0], ["a", 91.0]]
    assert (found["seeds"], found["spread"]) == (2, 1.41)
    assert "| 2 | 2 | 1.4 points |" in chooser.section({"none": found})


def test_a_method_knows_where_it_was_good(monkeypatch):
    kept = {"x": {"accuracy": [["a", 90.0], ["b", 89.5], ["c", 70.0]]}, "y": {"accuracy": []}}
    monkeypatch.setattr(measured, "measurements", lambda: kept)
    assert measured.best_methods("x") == [("a", 90.0), ("b", 89.5)]
    assert measured.say_best("x").endswith("a (90 %), b (90 %).")
    assert measured.say_best("y") == measured.say_best("unknown") == ""
    assert "within 1 point of the best accuracy for: x" in measured.say_where("b")
    assert "points behind the best for: x (20)" in measured.say_where("c")
    assert measured.say_where("d") == ""


def test_the_shipped_figures_are_those_of_the_stored_runs():
    if not STORE.exists():
        pytest.skip("the documentation is not here")
    found = chooser.measure([json.loads(line) for line in STORE.open()])
    assert json.loads(measured.FILE.read_text()) == json.loads(json.dumps(found))


def test_under_concept_shift_no_single_model_exceeds_three_fifths():
    # The best single model gives each image the label that most of the four groups give it.
    tables = [swap_labels(swaps, 10).tolist() for swaps in CONCEPT_SWAPS]
    best = [max(own.count(label) for label in own) for own in zip(*tables, strict=True)]
    assert sum(best) / 40 == pytest.approx(0.6)
    if not STORE.exists():
        pytest.skip("the documentation is not here")
    runs = [json.loads(line) for line in STORE.open()]
    single = [one["accuracy"] for one in runs if one["study"].endswith("/concept-shift/fedavg")]
    assert single
    assert max(single) <= 63  # three standard deviations of 2,400 test images
