"""The verdict by hand: what is recommended, who is better off otherwise, when it is provisional."""

import json

import pytest
import torch

import coterie
from coterie.core import wire
from coterie.core.errors import ConfigError
from coterie.data import from_arrays
from coterie.fitting import fit_run, resume_run, verdict_of
from coterie.report.verdict import Verdict, verdict_picture
from coterie.running.build import build
from coterie.running.folder import RunFolder
from coterie.running.held_out import HeldOut, rank_units
from coterie.running.rivals import score_rivals
from coterie.running.verdict import ODD_APART, Trained, judge
from small_runs import StopsAfter, content, described

SPREAD = torch.tensor([-0.1, -0.05, 0.0, 0.05, 0.1]).repeat(4)  # of the rows of a client


def arms(one, groups, alone, by_round=((9, 0.5), (10, 0.5)), stop="rounds", rows=5):
    """What three runs leave: mean losses of clients, with the same spread over rows."""
    about = {
        "clients": [f"c{i}" for i in range(len(one))],
        "trained_on": [100] * len(one),
        "rounds": 10,
        "best_round": 10,
        "split": "validation",
        "stop": stop,
        "by_round": [list(pair) for pair in by_round],
    }
    ways = {"one": one, "groups": groups, "alone": alone}
    return {
        name: [Trained(about, torch.tensor(means).double()[:, None] + SPREAD[:rows])]
        for name, means in ways.items()
    }


def rivals(m, loss=2.0, rows=5):
    return {"constant": torch.full((m, rows), loss).double()}


def varied(mean, m=8):
    """Losses with a little spread between clients."""
    return [mean + 0.01 * (i % 3) for i in range(m)]


def decide(one, groups, alone, n_groups=2, rows=5, **options):
    given = arms(one, groups, alone, rows=rows, **options)
    return judge(given, rivals(len(one), rows=rows), n_groups)


def test_a_gain_that_everybody_has_is_recommended():
    found = decide([0.5] * 8, [0.4] * 8, [0.9] * 8)
    assert found["recommendation"] == found["most"] == "groups"
    assert found["per_client"]["groups over one"] == pytest.approx([0.1] * 3)
    assert found["per_row"]["groups over one"] == pytest.approx([0.1] * 3)
    assert found["rounds"] == {"one": 10, "groups": 10, "alone": 10}
    assert found["learnt"]
    assert found["matters"] == pytest.approx(0.05 * 1.6)
    assert Verdict.of(found).headline == "Recommendation: a model per group."


def test_a_gain_too_small_to_matter_leaves_one_model():
    found = decide([0.5] * 8, [0.499, 0.501] * 4, [0.9] * 8, rows=1)
    assert found["recommendation"] == "one"


def test_gains_and_losses_that_alternate_decide_nothing():
    found = decide([0.5] * 8, [0.2, 0.8] * 4, [0.9] * 8, rows=1)
    assert found["recommendation"] == "undecided"
    assert found["most"] is None
    verdict = Verdict.of(found)
    assert verdict.headline == "Recommendation: undecided."
    assert "More clients or more held-out rows" in verdict.reasons


def test_training_alone_is_compared_with_what_is_left():
    assert decide([0.9] * 8, [0.5] * 8, [0.1] * 8)["recommendation"] == "alone"
    assert decide([0.5] * 8, [0.9] * 8, [0.1] * 8)["recommendation"] == "alone"
    assert decide([0.5] * 8, [0.9] * 8, [0.7] * 8)["recommendation"] == "one"


def test_one_group_is_not_compared_with_itself():
    found = decide([0.5] * 8, [0.4] * 8, [0.9] * 8, n_groups=1)
    assert found["recommendation"] == "one"
    assert list(found["per_client"]) == ["alone over one"]
    text = Verdict.of(found).sentence
    assert "There is one group" in text
    assert "a model per group (" not in text


def test_a_victim_is_named_with_what_to_do_instead():
    found = decide([0.5] * 20, [0.5] * 19 + [0.6], [0.8] * 19 + [0.1], rows=20)
    assert found["recommendation"] == "mixed"
    assert found["most"] == "one"
    assert [(one["client"], one["instead"]) for one in found["exceptions"]] == [("c19", "alone")]
    assert found["exceptions"][0]["gain"] == pytest.approx(0.4)
    assert found["clients"][19]["better"] == "alone"
    verdict = Verdict.of(found)
    said = "Recommendation: mixed. One model for most clients; c19 trains alone."
    assert verdict.headline == said
    assert "Better off with training alone: c19 (loss lower by 0.400)." in verdict.reasons


def test_tiny_clients_add_up():
    found = decide(varied(0.7, 300), varied(0.2, 300), varied(0.9, 300), rows=1)
    assert found["recommendation"] == "groups"


def test_one_client_that_gains_much_does_not_hide_the_answer():
    one = [*varied(0.5, 19), 5.0]
    alone = [*varied(0.9, 19), 0.9]
    given = arms(one, [loss - 0.1 for loss in one[:-1]] + [0.4], alone, rows=20)
    groups = given["groups"][0]
    given["groups"][0] = groups._replace(losses=groups.losses.flip(1))  # rows differ in their gains
    found = judge(given, rivals(20, 9.0, 20), 2)
    low, high = found["per_client"]["groups over one"][1:]
    assert low < 0 < high
    assert found["recommendation"] == "groups"
    assert found["apart"] == ["c19"]
    assert found["without"]["groups over one"] == pytest.approx([0.1] * 3)
    assert "c19 is clearly better off with another strategy" in Verdict.of(found).reasons


def test_clients_are_left_out_only_as_a_minority():
    # 18 of 20 gain alone for certain: training alone is what most of them need.
    found = decide([0.5] * 20, [0.5] * 20, [0.2] * 18 + [0.9] * 2, rows=20)
    assert (found["recommendation"], found["most"]) == ("mixed", "alone")
    assert found["apart"] == ["c18", "c19"]
    said = "Training alone for most clients; c18 and c19 use the model of all clients."
    assert said in Verdict.of(found).headline
    # Half of them gain by groups, half lose: there is no way for most.
    found = decide([0.5, 0.3] * 4, [0.3, 0.5] * 4, [0.9] * 8, rows=20)
    assert found["recommendation"] == "undecided"


def test_one_group_with_odd_clients_is_said_plainly():
    given = arms([0.5] * 18 + [2.0] * 2, [0.3] * 20, [0.8] * 18 + [0.3] * 2, rows=20)
    odd = ["c18", "c19"]
    found = judge(given, rivals(20, 9.0, 20), 1, ODD_APART, odd)
    verdict = Verdict.of(found)
    assert verdict.headline == (
        "Recommendation: one model for all but c18 and c19, which train alone."
    )
    assert "c18 and c19 train alone, all others share one model" in verdict.reasons
    # Only the odd ones gain: they train alone, whatever the way is called.
    given = arms([0.5] * 18 + [2.0] * 2, [0.5] * 18 + [0.3] * 2, [0.8] * 20, rows=20)
    verdict = Verdict.of(judge(given, rivals(20, 9.0, 20), 1, ODD_APART, odd))
    said = "Recommendation: mixed. One model for most clients; c18 and c19 train alone."
    assert verdict.headline == said
    assert "Better off with training alone: c18" in verdict.reasons


def test_one_client_decides_nothing():
    found = decide([0.5], [0.4], [0.9])
    assert found["recommendation"] == "undecided"
    assert "At least two clients with held-out rows are needed. Got 1." in found["why"]


def test_where_nothing_was_learnt_nothing_is_recommended():
    found = judge(arms([0.5] * 8, [0.4] * 8, [0.9] * 8), rivals(8, 0.1), 2)
    assert found["recommendation"] == "undecided"
    assert found["learnt"] is False
    text = Verdict.of(found).sentence
    assert "Nothing was learnt yet" in text
    assert "one constant prediction for all has a loss of 0.100" in text


def test_rows_and_clients_that_disagree_decide_nothing():
    given = arms([0.5] * 9, [0.4] * 8 + [0.9], [2.0] * 9)
    for trained in given.values():
        long = trained[0].losses.repeat(1, 200)
        long[:8, 5:] = torch.nan  # the last client has almost all the rows
        trained[0] = trained[0]._replace(losses=long)
    found = judge(given, {"constant": torch.full((9, 1000), 3.0).double()}, 2)
    assert found["recommendation"] in ("undecided", "mixed")


def test_a_loss_that_is_no_number_has_no_say():
    given = arms([0.5] * 9, [0.4] * 9, [0.9] * 9)
    given["groups"][0].losses[0] = torch.nan
    found = judge(given, rivals(9), 2)
    assert found["clients"][0]["rows"] == 0
    assert found["recommendation"] == "groups"


@pytest.mark.parametrize(
    ("by_round", "falls"),
    [
        (((9, 1.0), (10, 0.97)), True),  # 3 % in a round
        (((9, 1.0), (10, 0.99)), False),
        (((5, 1.0), (10, 0.95)), False),  # 5 % in five
        (((5, 1.0), (10, 0.80)), True),
        (((1, 9.0), (5, 1.0), (10, 0.99)), False),  # what lies further back does not count
        (((10, 0.5),), False),  # not known
    ],
)
def test_it_is_provisional_while_a_way_improves(by_round, falls):
    verdict = Verdict.of(decide([0.5] * 8, [0.4] * 8, [0.9] * 8, by_round=by_round))
    assert verdict.provisional is falls
    assert ("Provisional" in verdict.sentence) is falls


def test_a_gain_that_more_rounds_would_make_up_for_decides_nothing():
    # One model falls by 10 % per round: five more rounds are worth .5 (1 - .9^5) = .205.
    pace = (9, 1.0), (10, 0.9)
    found = decide([0.5] * 8, [0.4] * 8, [0.9] * 8, by_round=pace)
    assert found["recommendation"] == "undecided"
    assert (
        "5 more rounds at the present pace would lower its loss by 0.205"
        in Verdict.of(found).reasons
    )
    found = decide([0.5] * 8, [0.2] * 8, [0.9] * 8, by_round=pace)
    assert found["recommendation"] == "groups"


def test_a_loss_that_rises_again_is_said():
    by_round = (5, 0.5), (10, 0.6)
    verdict = Verdict.of(decide([0.5] * 8, [0.4] * 8, [0.9] * 8, by_round=by_round))
    assert verdict.rises == ["one", "groups", "alone"]
    assert "'stop': 'validation'" in verdict.sentence
    kept = decide([0.5] * 8, [0.4] * 8, [0.9] * 8, by_round=by_round, stop="validation")
    assert kept["rises"] == []


def test_replicates_widen_the_interval_by_what_training_varies():
    given = arms(varied(0.5), varied(0.4), varied(0.9))
    again = arms(varied(0.5), varied(0.7), varied(0.9))
    both = {arm: [*given[arm], *again[arm]] for arm in given}
    found = judge(both, rivals(8), 2)
    low, high = found["per_client"]["groups over one"][1:]
    assert low < -0.5
    assert high > 0.5
    assert found["replicates"] == 2
    assert "and the randomness of training" in Verdict.of(found).sentence
    once = Verdict.of(judge(given, rivals(8), 2))
    assert "The intervals leave out the randomness of training" in once.sentence


def test_words_table_and_file(tmp_path):
    verdict = Verdict.of(decide(varied(0.5, 11), varied(0.4, 11), varied(0.9, 11)))
    text = str(verdict)
    assert "0.509 with one model for all (best round 10), 0.409 with a model per group" in text
    assert "the loss is lower by 0.100" in text
    assert "each client's validation rows" in text
    assert "took 20 more rounds; 55 rows were held out" in text
    assert verdict.table["client"][0] == "c0"
    assert verdict.compared["strategy"][-1] == "one constant prediction for all"
    assert Verdict.of(json.dumps(verdict.to_json()).encode()) == verdict
    assert verdict_picture(verdict, tmp_path / "verdict.png").stat().st_size > 5000
    with pytest.raises(ConfigError, match="no verdict to draw"):
        verdict_picture(Verdict.of(decide([1.0], [1.0], [1.0])), tmp_path / "none.png")


# the best round


def test_each_half_is_scored_at_the_round_that_the_other_half_chose():
    held = HeldOut(torch.tensor([[0, 1], [0, 1]]))
    assert held.half.tolist() == [[0, 1], [1, 0]]
    ids = torch.arange(2)
    held.see(1, ids, torch.tensor([[1.0, 5.0], [5.0, 1.0]]))  # half 0: 1, half 1: 5, all: 3
    held.see(2, ids, torch.tensor([[4.0, 1.0], [1.0, 4.0]]))  # half 0: 4, half 1: 1, all: 2.5
    assert held.round.tolist() == [1, 2, 2]
    assert held.best == 2
    # Half 1 at round 1, which half 0 chose; half 0 at round 2.
    assert held.losses.tolist() == [[4.0, 5.0], [5.0, 4.0]]


def test_rows_of_a_unit_count_once():
    x, y = torch.zeros(6, 1), torch.tensor([0, 1, 0, 1, 0, 1])
    data = from_arrays([x], [y], test_fraction=0.0, unit=[torch.tensor([3, 3, 3, 8, 8, 9])])
    rank = rank_units(data, "train")
    assert rank.tolist() == [[0, 0, 0, 1, 1, 2]]
    held = HeldOut(rank)
    held.see(1, torch.tensor([0]), torch.tensor([[1.0, 2.0, 3.0, 4.0, 6.0, 7.0]]))
    assert held.losses.tolist() == [[2.0, 5.0, 7.0]]


def test_rivals_by_hand():
    x = [torch.tensor([[0.0], [1.0], [0.0], [1.0]])] * 2
    y = [torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1, 1, 1])]
    data = from_arrays(x, y, test_fraction=0.0, n_outputs=2)
    found = score_rivals(data, "train", "cross_entropy")
    # Six of eight are 1: shares 3/10 and 7/10 with a row of each class added.
    whole = torch.tensor([0.3, 0.7]).double().log()
    assert found["constant"][1].tolist() == pytest.approx([-float(whole[1])] * 4)
    own = torch.tensor((4 + 0.7) / 5).log()
    assert found["own constant"][1].tolist() == pytest.approx([-float(own)] * 4)
    assert "last value" not in found
    assert float(found["linear"].mean()) < float(found["constant"].mean())
    assert score_rivals(data, "train", "squared_error") == {}


def test_rivals_of_numbers_and_the_last_value():
    y = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 0.0, 3.0])]
    time = [torch.tensor([3, 2, 1]), torch.tensor([1, 2, 3])]
    data = from_arrays([torch.zeros(3, 1)] * 2, y, test_fraction=0.0, time=time)
    data = coterie.data.FederatedData(
        data.x, torch.cat(y), data.rows, data.names, "regression", 1, time=data.time
    )
    found = score_rivals(data, "train", "squared_error")
    assert found["constant"][0].tolist() == pytest.approx([1.0, 0.0, 16.0])  # the mean is 2
    assert found["own constant"][0].tolist() == pytest.approx([4.0, 1.0, 9.0])  # 3
    assert found["last value"][0].tolist() == pytest.approx([0.0, 1.0, 25.0])  # 1, at time 3
    assert found["last value"][1].tolist() == pytest.approx([9.0, 9.0, 0.0])  # 3


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
    assert verdict.recommendation in ("one", "groups", "alone", "mixed", "undecided")
    assert max(verdict.rounds.values()) <= 3
    assert len(verdict.clients) == 10
    assert verdict.split == "test"
    assert verdict.reasons in str(fit)
    assert fit.sentence.endswith(verdict.headline)
    assert fit.summary["verdict"]["recommendation"] == verdict.recommendation
    assert coterie.load(tmp_path / "run").verdict == verdict


def test_rows_that_are_held_out_train_nobody_and_are_the_same_in_all_arms(tmp_path):
    ready = build(tables(compare=True, validation=0.2))
    fit = fit_run(ready, tmp_path / "run")
    assert fit.verdict.split == "validation"
    assert fit.verdict.cost["held"] == 60
    held = [
        RunFolder(folder).final_files()
        for folder in (tmp_path / "run", *(tmp_path / "run" / "baselines").iterdir())
    ]
    assert len(held) == 3
    for files in held:
        one = json.loads(files["held_out.json"])
        assert one["trained_on"] == [24] * 10
        assert len(one["by_round"]) == 3
        assert wire.load(files["held_out.safetensors"])["losses"].shape == (10, 6)
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
    assert fit.verdict.recommendation == "undecided"
    assert "run.validation=0.2" in fit.verdict.why


def test_the_best_round_is_kept_and_training_stops(tmp_path):
    given = tables("fedavg", rounds=40, validation=0.2, stop="validation", patience=2)
    given["local"]["learning_rate"] = 3.0  # it gets worse soon
    whole = fit_run(build(given), tmp_path / "whole")
    losses = [line["validation_loss"] for line in whole.rounds]
    best = losses.index(min(losses)) + 1
    assert whole.summary["kept_round"] == best
    assert len(losses) == best + 2 < 40
    # A run of that many rounds has the same model.
    short = tables("fedavg", rounds=best, validation=0.2)
    short["local"]["learning_rate"] = 3.0
    other = fit_run(build(short))
    for name, leaf in whole.state.params.items():
        assert torch.equal(leaf, other.state.params[name])


@pytest.mark.parametrize("method", ["local_only", "clove"])
def test_a_run_that_keeps_the_best_round_resumes_exactly(method, tmp_path):
    given = tables(method, rounds=6, validation=0.2, stop="validation", patience=3)
    fit_run(build(given), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit_run(build(given), tmp_path / "run", StopsAfter(3))
    resume_run(build(given), tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_stopping_needs_validation_rows():
    with pytest.raises(ConfigError, match=r"needs validation rows\. Got none"):
        build(tables(stop="validation"))
    with pytest.raises(ConfigError, match="evaluate_every=0"):
        build(tables(stop="validation", validation=0.2, evaluate_every=0))


def test_replicates_are_other_trainings_and_resume(tmp_path):
    given = tables(compare=True, replicates=2)
    whole = fit_run(build(given), tmp_path / "whole")
    assert whole.verdict.replicates == 2
    folders = sorted(path.name for path in (tmp_path / "whole" / "replicates" / "01").iterdir())
    assert folders == ["fedavg", "groups", "local_only"]
    once = fit_run(build(tables(compare=True)))
    assert once.rows == whole.rows  # the first training is the one that is kept
    assert once.verdict.per_client != whole.verdict.per_client
    with pytest.raises(KeyboardInterrupt):
        fit_run(build(given), tmp_path / "run", StopsAfter(2, attempt=4))
    assert verdict_of(tmp_path / "run") == whole.verdict
    assert content(tmp_path / "run") == content(tmp_path / "whole")
