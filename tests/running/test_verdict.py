"""The verdict by hand: who replaces whom, who has a say, when it is provisional."""

import json

import pytest

import coterie
from coterie.core.errors import ConfigError
from coterie.fitted import fit_run, resume_run, verdict_of
from coterie.report.verdict import Verdict, verdict_picture
from coterie.running.build import build
from coterie.running.folder import RunFolder
from coterie.running.verdict import judge
from small_runs import StopsAfter, content, described


def arms(one, groups, local, samples=None, by_round=((9, 0.5), (10, 0.5)), split="validation"):
    """What three runs leave."""
    names = [f"c{i}" for i in range(len(one))]
    common = {
        "clients": names,
        "samples": samples or [100] * len(one),
        "held": [20] * len(one),
        "rounds": 10,
        "split": split,
        "by_round": [list(pair) for pair in by_round],
    }
    return {
        "one": {**common, "loss": list(one)},
        "groups": {**common, "loss": list(groups)},
        "local": {**common, "loss": list(local)},
    }


def test_a_gain_that_everybody_has_moves_the_verdict():
    # D(one, groups) = .1 eight times: the interval is [.1, .1].
    found = judge(arms([0.5] * 8, [0.4] * 8, [0.9] * 8))
    assert found["choice"] == "groups"
    assert found["intervals"]["groups over one"] == pytest.approx([0.1] * 3)
    assert found["better_off"] == 1.0
    assert found["round"] == 10
    assert not found["provisional"]


def test_gains_and_losses_that_alternate_leave_one_model():
    found = judge(arms([0.5] * 8, [0.4, 0.6] * 4, [0.9] * 8))
    assert found["choice"] == "one"
    low, high = found["intervals"]["groups over one"][1:]
    assert low < 0 < high
    assert found["better_off"] == 0.5


def test_staying_alone_is_tried_against_what_is_left():
    assert judge(arms([0.9] * 8, [0.5] * 8, [0.1] * 8))["choice"] == "local"
    # Groups were refused, so alone is compared with one model.
    assert judge(arms([0.5] * 8, [0.9] * 8, [0.1] * 8))["choice"] == "local"
    assert judge(arms([0.5] * 8, [0.9] * 8, [0.7] * 8))["choice"] == "one"


def test_seven_clients_decide_nothing():
    found = judge(arms([0.5] * 7, [0.4] * 7, [0.9] * 7))
    assert found["choice"] == "undecided"
    assert "At least 8 clients with 20 samples" in found["why"]
    assert "Got 7." in found["why"]
    assert "undecided" in Verdict.of(found).sentence


def test_a_client_of_nineteen_samples_abstains():
    found = judge(arms([0.5] * 9, [0.4] * 9, [0.9] * 9, samples=[19] + [20] * 8))
    assert found["clients"][0]["best"] == "abstains"
    assert found["clients"][0]["gain"] is None
    assert found["choice"] == "groups"
    found = judge(arms([0.5] * 8, [0.4] * 8, [0.9] * 8, samples=[19] + [20] * 7))
    assert found["choice"] == "undecided"


def test_a_loss_that_is_no_number_has_no_say():
    found = judge(arms([0.5] * 9, [None] + [0.4] * 8, [0.9] * 9))
    assert found["clients"][0]["gain"] is None
    assert found["choice"] == "groups"


@pytest.mark.parametrize(
    ("by_round", "provisional"),
    [
        (((9, 1.0), (10, 0.97)), True),  # 3 % in a round
        (((9, 1.0), (10, 0.99)), False),
        (((5, 1.0), (10, 0.95)), False),  # 5 % in five
        (((5, 1.0), (10, 0.80)), True),
        (((1, 9.0), (5, 1.0), (10, 0.99)), False),  # what lies further back does not count
        (((10, 0.5),), True),  # not known
    ],
)
def test_it_is_provisional_while_one_model_improves(by_round, provisional):
    found = judge(arms([0.5] * 8, [0.4] * 8, [0.9] * 8, by_round=by_round))
    assert found["provisional"] is provisional
    assert ("Provisional" in Verdict.of(found).sentence) is provisional


def test_the_same_seed_draws_the_same_interval():
    one = [0.5, 0.6, 0.4, 0.8, 0.2, 0.9, 0.1, 0.3, 0.7]
    given = arms(one, [0.4] * 9, [0.9] * 9)
    assert judge(given) == judge(given)
    assert judge(given, seed=1)["intervals"] != judge(given)["intervals"]


def test_words_say_who_gains_and_who_loses(tmp_path):
    groups = [0.4] * 9 + [0.55, 0.9]
    verdict = Verdict.of(judge(arms([0.5] * 11, groups, [0.9] * 11)))
    assert verdict.losing == ["c10", "c9"]
    assert len(verdict.gaining) == 9
    text = str(verdict)
    assert "9 of 11 clients have a lower loss with groups than with one model" in text
    assert "worst off with groups: c10, c9." in text
    assert "0.500 with one model for all, 0.459 with a model per group, and 0.900 if" in text
    assert "neither clearly better nor worse than one model for all (95% interval: -0.0" in text
    assert "the loss is higher by 0.400 (95% interval: 0.400 to 0.400)" in text
    assert "each client's validation rows, which were not used for training" in text
    assert "took 20 more rounds and holds out 20% of the data" in text
    assert verdict.table["client"][0] == "c0"
    assert Verdict.of(json.dumps(verdict.to_json()).encode()) == verdict
    assert verdict_picture(verdict, tmp_path / "verdict.png").stat().st_size > 5000
    with pytest.raises(ConfigError, match="no verdict to draw"):
        verdict_picture(Verdict.of(judge(arms([1.0], [1.0], [1.0]))), tmp_path / "none.png")


# runs


def tables(method="clove", rounds=3, **run):
    """Two groups of five blobs, thirty samples each."""
    given = described(method, rounds)
    given["data"] = {"name": "blobs", "n_groups": 2, "clients_per_group": 5, "n": 30, "test": 10}
    given["run"] |= {"participation": 1.0, **run}
    return given


@pytest.mark.parametrize("method", ["clove", "ifca", "fedsoft"])
def test_any_method_with_a_network_gets_a_verdict(method, tmp_path):
    given = tables(method, compare=True)
    given["algorithm"]["n_groups"] = 2
    fit = fit_run(build(given), tmp_path / "run")
    verdict = fit.verdict
    assert verdict.choice in ("one", "groups", "local")
    assert verdict.round == 3
    assert len(verdict.clients) == 10
    assert verdict.split == "test"
    assert verdict.sentence in str(fit)
    assert fit.summary["verdict"]["choice"] == verdict.choice
    assert coterie.load(tmp_path / "run").verdict == verdict


def test_rows_that_are_held_out_train_nobody_and_are_the_same_in_all_arms(tmp_path):
    ready = build(tables(compare=True, validation=0.2))
    fit = fit_run(ready, tmp_path / "run")
    assert fit.verdict.split == "validation"
    assert fit.verdict.cost["held"] == pytest.approx(0.2)
    held = [
        json.loads(RunFolder(folder).final_files()["held_out.json"])
        for folder in (tmp_path / "run", *(tmp_path / "run" / "baselines").iterdir())
    ]
    assert len(held) == 3
    for one in held:
        assert one["held"] == [6] * 10
        assert one["samples"] == [30] * 10
        assert len(one["by_round"]) == 3
    data = ready.data.hold_out(0.2, seed=ready.settings.seed)
    trained, kept = (set(data.rows[split].index.tolist()) for split in ("train", "validation"))
    assert not trained & kept


def test_a_run_without_comparison_is_compared_when_asked(tmp_path):
    fit = fit_run(build(tables(compare=False)), tmp_path / "run")
    with pytest.raises(ConfigError, match="coterie verdict FOLDER"):
        _ = fit.verdict
    verdict = verdict_of(tmp_path / "run")
    assert (tmp_path / "run" / "baselines" / "fedavg" / "summary.json").exists()
    whole = fit_run(build(tables(compare=True)), tmp_path / "whole")
    assert verdict.clients == whole.verdict.clients
    assert verdict_of(tmp_path / "run") == verdict  # now it is there


def test_an_interrupted_comparison_goes_on(tmp_path):
    given = tables(compare=True)
    whole = fit_run(build(given), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit_run(
            build(given), tmp_path / "run", StopsAfter(2, attempt=2)
        )  # while every client trains alone
    verdict = verdict_of(tmp_path / "run")
    assert verdict == whole.verdict
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert resume_run(build(given), tmp_path / "run").verdict == verdict


def test_one_model_alone_has_no_verdict(tmp_path):
    fit_run(build(tables("fedavg")), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"a network per group\. fedavg does not"):
        verdict_of(tmp_path / "run")


def test_no_held_out_data_is_said(tmp_path):
    given = tables(compare=True)
    given["data"]["test"] = 0
    fit = fit_run(build(given), tmp_path / "run")
    assert fit.verdict.choice == "undecided"
    assert "run.validation=0.2" in fit.verdict.why
