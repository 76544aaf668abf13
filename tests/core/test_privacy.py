"""Differential privacy: the noise, the account, what is refused, and groups that are too small."""

import itertools

import dp_accounting
import pytest
import torch
from dp_accounting import rdp

import coterie
from coterie.checks import tiny
from coterie.core.aggregate import Mean
from coterie.core.algorithm import find
from coterie.core.errors import ConfigError, DataError, FederationError
from coterie.core.policy import Policy
from coterie.core.privacy import Budget, Privacy, spent
from coterie.data import blobs, from_arrays
from coterie.engines.simulation import Simulation
from coterie.export import export
from coterie.fitting import verdict_of
from coterie.report.html.contents import read_contents
from coterie.report.html.page import render
from coterie.running import loop
from coterie.running.build import Settings
from coterie.running.folder import RunFolder
from coterie.running.loop import resume, run
from coterie.running.privacy import count_releases
from coterie.running.reference import Reference

SECRET = b"0" * 32


def test_noise_is_normal_and_within_one_percent_of_its_nominal_size():
    drawn = Budget(Privacy(8), SECRET).draw((100_000,), 3)
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float((drawn.abs() < 1.959964).double().mean()) - 0.95) < 0.003


def test_noise_depends_on_the_secret_and_the_release():
    one, other = Budget(Privacy(8), SECRET), Budget(Privacy(8), b"1" * 32)
    assert torch.equal(one.draw((5,), 1), Budget(Privacy(8), SECRET).draw((5,), 1))
    assert not torch.equal(one.draw((5,), 1), one.draw((5,), 2))
    assert not torch.equal(one.draw((5,), 1), other.draw((5,), 1))


SETTINGS = list(itertools.product((0.5, 1, 2, 5, 20), (1, 3, 10, 40, 200), (1e-5, 1e-7)))


@pytest.mark.parametrize(("noise", "releases", "delta"), SETTINGS)
def test_the_account_is_that_of_dp_accounting(noise, releases, delta):
    accountant = rdp.RdpAccountant()
    for _ in range(releases):  # one by one, as a run spends it
        accountant.compose(dp_accounting.GaussianDpEvent(noise))
    assert spent(noise, releases, delta) == pytest.approx(accountant.get_epsilon(delta))


def federation(privacy: Privacy | None, **policy):
    problem = tiny()
    fed = Simulation(problem.data)
    fed.policy = Policy(**policy)
    if privacy is not None:
        fed.policy = privacy.limit(fed.policy)
        fed.budget = Budget(privacy, SECRET)
    fed.begin(0)
    return problem, fed


def test_a_mean_has_the_noise_of_its_number_of_members():
    privacy = Privacy(1000, noise=50.0, clip=1e-9)  # hardly any change but the noise
    problem, fed = federation(privacy)
    algorithm = find("fedavg").example(problem)
    params = algorithm.model.init(torch.tensor(0))
    sizes = []
    for _ in range(30):
        reply = fed.map(
            algorithm.update, params, to=fed.everyone(), reduce=Mean("params", params, weight="n")
        )[1]
        sizes.append(torch.cat([(reply["params"][k] - params[k]).flatten() for k in params]))
    nominal = privacy.noise * privacy.clip / len(problem.data)
    assert float(torch.cat(sizes).std()) == pytest.approx(nominal, rel=0.05)
    # One mean each; counts are made alike and cost nothing.
    assert fed.budget.releases == 30


def test_answers_are_clipped_and_blurred():
    budget = Budget(Privacy(1000, noise=1e-6, answers=2.0), SECRET)
    reply = {"losses": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "n": torch.tensor([10, 20])}
    out = budget.blur_answers(reply, (), "M.task", 0)
    torch.testing.assert_close(
        out["losses"], torch.tensor([[1.2, 1.6], [0.3, 0.4]]), atol=1e-4, rtol=0
    )
    assert out["n"].tolist() == [1, 1]


def test_choices_of_clients_are_refused():
    problem, fed = federation(Privacy(8))
    algorithm = find("ifca").example(problem)
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.begin(0)
    with pytest.raises(ConfigError, match="must not choose how they are averaged"):
        algorithm.step(fed, state)


def test_other_rules_for_means_are_refused():
    with pytest.raises(ConfigError, match='Got policy mean="median"'):
        Privacy(8).limit(Policy(mean="median"))


def test_what_would_exceed_the_budget_is_not_released():
    budget = Budget(Privacy(epsilon=spent(1.0, 2, 1e-5), noise=1.0), SECRET)
    budget.pay("M.task", 2)
    with pytest.raises(FederationError, match="budget is used up"):
        budget.pay("M.task", 1)
    assert budget.used_up
    assert budget.releases == 2


def test_a_private_run_stops_when_its_budget_is_used_up_and_resumes_exactly(tmp_path):
    problem = tiny()
    algorithm = find("fedavg").example(problem)
    budget = {"epsilon": spent(2.0, 3, 1e-5) + 1e-6, "noise": 2.0, "clip": 0.5}
    settings = Settings(10, privacy=budget)
    whole = run(algorithm, problem.data, settings, tmp_path / "whole")
    spends = [line["epsilon"] for line in whole.rounds]
    assert spends == sorted(spends)
    assert spends[2] == pytest.approx(budget["epsilon"], abs=1e-5)
    assert "budget is used up" in whole.rounds[-1]["abandoned"]
    assert len(whole.rounds) == 4
    key = tmp_path / "whole" / "noise.key"
    assert key.stat().st_mode & 0o077 == 0
    # Stopped after one round, with the secret that the other run drew.
    run(algorithm, problem.data, Settings(0, privacy=budget), tmp_path / "part")
    (tmp_path / "part" / "noise.key").write_bytes(key.read_bytes())
    again = resume(algorithm, problem.data, settings, tmp_path / "part")
    assert again.files == whole.files
    assert again.rounds == whole.rounds


def private_run(folder, rounds=2):
    problem = tiny()
    algorithm, settings = find("fedavg").example(problem), Settings(rounds, privacy={"epsilon": 99})
    run(algorithm, problem.data, settings, folder)
    return lambda: resume(algorithm, problem.data, Settings(4, privacy={"epsilon": 99}), folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("noise.key", None, "is missing"),
        ("noise.key", b"", "must hold 64 hexadecimal digits"),
        ("noise.key", b"z" * 64, "must hold 64 hexadecimal digits"),
        ("record.jsonl", None, "what was spent up to round 2 is missing"),
        ("record.jsonl", (b'"releases": 2', b'"releases": 0'), "was changed"),
        ("rounds.jsonl", None, "a line for each of the first 2 rounds"),
    ],
)
def test_a_budget_is_not_forgotten(name, content, sentence, tmp_path):
    go_on = private_run(tmp_path / "run")
    path = tmp_path / "run" / name
    old = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(old.replace(*content) if isinstance(content, tuple) else content)
    with pytest.raises(DataError, match=sentence):
        go_on()


def test_real_clients_are_paid_for_again_when_a_round_is_asked_again(tmp_path):
    private_run(tmp_path / "run", 3)
    folder = RunFolder(tmp_path / "run")
    assert count_releases(folder, 1, simulated=True) == 1
    folder.record("budget", releases=9)  # before a release of a round that did not end
    assert count_releases(folder, 1, simulated=False) == 9


def test_what_is_spent_with_real_clients_is_written_down_before(tmp_path):
    private_run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    _, fed = federation(Privacy(99))
    fed.simulated = False
    loop._recall_budget(folder, fed, 2)
    assert fed.budget.releases == 2
    fed.budget.pay("M.task", 3)
    _, again = federation(Privacy(99))
    again.simulated = False
    loop._recall_budget(folder, again, 2)
    assert again.budget.releases == 5


def test_other_answers_never_have_the_same_noise():
    budget = Budget(Privacy(8), SECRET)
    members, zero, one = torch.ones(1), torch.zeros(5), torch.ones(5)

    def noise(value):
        return budget.blur_mean(value, members, False, 0) - value

    assert torch.equal(noise(zero), noise(zero))
    assert not torch.allclose(noise(zero), noise(one), atol=1e-3)
    some = [{"losses": torch.full((2, 3), x)} for x in (0.1, 0.1, 0.2)]
    sent = [budget.blur_answers(x, (), "M.task", 0)["losses"] - x["losses"] for x in some]
    assert torch.equal(sent[0], sent[1])
    assert not torch.allclose(sent[0], sent[2], atol=1e-3)


def test_nothing_else_is_learnt_in_a_private_run(tmp_path):
    fit = coterie.fit(
        blobs(n_groups=2, clients_per_group=2),
        "clove",
        n_groups=2,
        rounds=1,
        settings={"privacy": {"epsilon": 99}},
        out=tmp_path / "run",
        quiet=True,
    )
    assert not (tmp_path / "run" / "baselines").exists()
    assert {"why.json", "verdict.json", "reference.safetensors"}.isdisjoint(fit.files)
    assert "labels" not in fit.cards[0]
    assert fit.summary["epsilon"] == fit.rounds[-1]["epsilon"]
    with pytest.raises(ConfigError, match="cannot be compared"):
        verdict_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="there is one training"):
        Settings(privacy={"epsilon": 8}, restarts=2)


def test_groups_that_are_too_small_keep_their_model_and_have_no_figures(tmp_path):
    problem = tiny()
    algorithm = find("fedavg").example(problem)
    result = run(algorithm, problem.data, Settings(1, policy={"min_group": 7}))
    first = run(algorithm, problem.data, Settings(0))
    for name, leaf in first.state.params.items():
        assert torch.equal(leaf, result.state.params[name])
    assert all(line["accuracy"] is None for line in result.clients)
    ifca = run(find("ifca").example(problem), problem.data, Settings(2, policy={"min_group": 7}))
    cards = [name for name in ifca.files if name.startswith("model-")]
    assert cards == []


def unequal_groups():
    """Five clients that agree on what labels mean, and two that have them the other way round."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (7, 60), generator=draw)
    x = torch.randn(7, 60, 2, generator=draw)
    x[..., 0] += 4 * torch.where(torch.arange(7)[:, None] < 5, y, 1 - y)
    return from_arrays(list(x), list(y), names=[f"{'ab'[i > 4]}-{i}" for i in range(7)])


def test_nothing_of_a_group_that_is_too_small_leaves(tmp_path):
    fit = coterie.fit(
        unequal_groups(),
        "clove",
        n_groups=2,
        model="linear",
        rounds=3,
        policy={"min_group": 3},
        out=tmp_path / "run",
        quiet=True,
    )
    assert sorted(len(card["clients"]) for card in fit.cards) == [2, 5]
    # Those of the other group would tell those of this one: they are what is left of all.
    assert {card["loss"] for card in fit.cards} == {card["margin"] for card in fit.cards} == {None}
    assert {"labels", "accuracy", "loss_profile"}.isdisjoint(
        {name for c in fit.cards for name in c}
    )
    for line in fit.rows:
        assert {line[name] for name in line if name not in ("client", "group", "fits")} == {None}
    verdict = fit.verdict
    assert all(line["groups"] is line["one"] is line["alone"] is None for line in verdict.clients)
    assert not any("gains" in line for line in verdict.clients)
    assert verdict.per_client  # of all clients
    assert "why.json" not in fit.files
    assert set(fit.summary["accuracy"]) == {"mean", "std"}
    assert not any("worst_decile" in line for line in fit.rounds)
    kept = Reference.read(fit.files["reference.safetensors"])
    assert len(kept.labelled.number) == 1
    assert len(kept.own_labelled.number) == 0
    assert [name for name in fit.files if name.startswith("model-")] == ["model-0.safetensors"]
    export(fit, tmp_path / "bundle", "safetensors")
    assert [path.name for path in (tmp_path / "bundle").glob("group-*")] == ["group-0"]
    page = render(read_contents(tmp_path / "run"), "page.html")
    assert "NaN" not in page
    assert "worst tenth" not in page


def test_models_of_single_clients_are_not_exported(tmp_path):
    fit = coterie.fit(
        unequal_groups(), "ditto", rounds=1, policy={"min_group": 2}, compare=False, quiet=True
    )
    with pytest.raises(ConfigError, match="no group has so many clients"):
        export(fit, tmp_path / "bundle", "safetensors")
    assert not (tmp_path / "bundle").exists()


def test_a_rule_that_passes_on_one_model_does_not_fit_small_groups_that_are_hidden():
    with pytest.raises(ConfigError, match="min_group=3 needs a mean"):
        Policy(mean="krum", min_group=3)


def test_no_noise_is_used_twice():
    problem, fed = federation(Privacy(1000, noise=1.0))
    drawn, draw = [], fed.budget.draw
    fed.budget.draw = lambda shape, *labels: drawn.append(labels) or draw(shape, *labels)
    algorithm = find("clove").example(problem)  # an empty mean, a mean and losses
    fed.begin(-1)
    state = algorithm.init(fed)
    for number in range(3):
        fed.begin(number)
        state, _ = algorithm.step(fed, state)
    assert len(drawn) > 6
    assert len(set(drawn)) == len(drawn)
