"""In what groups differ: what clients send, and what is said of it."""

import json
import math

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError
from coterie.core.question import Question
from coterie.data import DataCard, from_arrays, from_table
from coterie.engines.remote import Remote
from coterie.running.build import Settings, build
from coterie.running.folder import RunFolder
from coterie.running.loop import conduct
from coterie.running.why import (
    average_images,
    list_columns,
    sum_columns,
    sum_labels,
    sum_predictions,
)
from links import LocalLink, workers
from small_runs import described
from tiny import alone, everywhere, ragged


def sites(m=12, n=60, seed=0):
    """Clients with a number, a category and a label; every third labels the other way round."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(m):
        dose, ward = rng.normal(20, 5, n), rng.choice(["a", "b"], n)
        ill = np.where((dose > 20) ^ (i % 3 == 0), "yes", "no")
        dose = dose + 60 if i == 7 else dose
        age = np.where(rng.random(n) < (0.5 if i % 3 == 0 else 0.0), np.nan, rng.normal(50, 9, n))
        rows.append((np.repeat(f"site-{i}", n), dose, age, ward, ill))
    names = ("site", "dose", "age", "ward", "ill")
    return dict(zip(names, map(np.concatenate, zip(*rows, strict=True)), strict=True))


@pytest.fixture(scope="module")
def table():
    return sites()


@pytest.fixture(scope="module")
def fit(table):
    data = from_table(table, client="site", label="ill")
    return coterie.fit(data, rounds=15, compare=False)


# what clients send


def test_columns_by_hand():
    # Unit 0 has the rows 1 and 3, unit 1 the row 5: means 2 and 5, around 3.5. The second feature
    # is missing in the last row, which the third one says.
    x = torch.tensor([[1.0, 4.0, 0.0], [3.0, 8.0, 0.0], [5.0, 0.0, 1.0]])
    data = from_arrays([x], test_fraction=0.0)
    client = alone(data, 0)
    batch = client.train._replace(unit=torch.tensor([7, 7, 9]))
    sent = sum_columns(None, client, batch, markers=[-1, 2, -1], images=False, least=1)
    assert sent["count"].tolist() == [2, 1, 2]
    assert sent["mean"].tolist() == [3.5, 6, 0.5]
    assert sent["square"].tolist() == [4.5, 0, 0.5]
    few = sum_columns(None, client, batch, markers=[-1, 2, -1], images=False, least=2)
    assert few["count"].tolist() == [2, 0, 2]
    assert few["mean"].tolist() == [3.5, 0, 0.5]


def test_labels_and_predictions_by_hand():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    client = alone(from_arrays([x], [[0, 1, 1]], test_fraction=0.0), 0)

    class Method:
        def predict(self, personal, x):
            return torch.stack([x[:, 0], personal["bar"].expand(len(x))], 1)  # 0 above the bar

    models = {"bar": torch.tensor([1.5, 9.0])}
    sent = sum_predictions(Method(), client, models, client.train, n_classes=2, least=5)
    assert sent["count"].tolist() == [[[0, 1], [2, 0]], [[0, 1], [0, 2]]]
    assert sum_labels(None, client, client.train, n_classes=2, least=5)["count"].tolist() == [1, 2]
    unit = client.train._replace(unit=torch.tensor([0, 0, 1]))
    assert sum_labels(None, client, unit, n_classes=2, least=5)["count"].tolist() == [0.5, 1.5]


def test_mean_images_need_enough_rows():
    x = torch.rand(7, 1, 2, 2)
    client = alone(from_arrays([x], [[0, 0, 0, 0, 0, 1, 1]], test_fraction=0.0), 0)
    sent = average_images(None, client, client.train, n_classes=2, least=5)
    assert sent["count"].tolist() == [5, 0]
    assert torch.allclose(sent["mean"][0], x[:5].mean(0))
    assert not sent["mean"][1].any()


def test_every_engine_sends_the_same():
    data = ragged(3, 9, 6)
    method = None
    asks = [
        (
            Question(
                sum_columns, method, {"markers": [-1] * 4, "images": False, "least": 5}, "train"
            )
        ),
        (Question(sum_labels, method, {"n_classes": 3, "least": 5}, "train")),
    ]
    for ask in asks:
        replies = everywhere(data, ask)
        for name in replies["loop"]:
            assert torch.equal(replies["loop"][name], replies["stacked"][name])
            assert torch.equal(replies["loop"][name], replies["wire"][name])


def test_a_client_with_few_rows_sends_no_means():
    method = None
    ask = Question(sum_columns, method, {"markers": [-1], "images": False, "least": 5}, "train")
    reply = everywhere(ragged(4, 6, shape=(1,)), ask)["loop"]
    assert reply["count"][:, 0].tolist() == [0, 6]
    assert reply["mean"][0].tolist() == [0]
    assert reply["square"][0].tolist() == [0]


def test_what_is_sent_does_not_grow_with_the_rows(fit):
    sent = {line["part"]: line["numbers"] for line in fit.why.sent}
    features = 3 + 2  # dose, age, age is missing, ward=a, ward=b
    assert sent == {"columns": 3 * features, "labels": 2, "predictions": 2 * 2 * 2}


# what is said


def test_groups_and_the_odd_client_are_described(fit):
    assert fit.odd == ["site-7"]
    lines = {line["name"]: line["statements"] for line in fit.why.groups}
    assert list(lines) == ["group 0", "group 1", "site-7"]
    for name, other in (("group 0", "group 1"), ("group 1", "group 0")):
        meaning = next(one for one in lines[name] if one["kind"] == "prediction")
        assert meaning["inverted"]
        assert meaning["model"] == other
        missing = next(one for one in lines[name] if one["kind"] == "missing")
        assert missing["name"] == "age"
        assert abs(missing["here"] - missing["elsewhere"]) > 0.3
    dose = lines["site-7"][0]
    assert (dose["kind"], dose["name"]) == ("number", "dose")
    assert 75 < dose["here"] < 85  # in the unit of the table
    assert 15 < dose["elsewhere"] < 25
    assert dose["low"] < dose["here"] - dose["elsewhere"] < dose["high"]
    assert all(len(told) <= 5 for told in lines.values())


def test_the_cross_table_has_every_held_out_row_once(fit):
    counts = torch.tensor(fit.why.cross["counts"])  # [models, sets, c, c]
    assert counts.shape == (2, 3, 2, 2)
    assert counts[0].sum() == counts[1].sum() == 12 * 12
    assert fit.why.table(0, 1)["says yes"] == counts[0, 1, :, 1].tolist()
    with pytest.raises(ConfigError, match="Unknown group '5'"):
        fit.why.table(0, 5)


def test_rows_that_trained_nothing_are_compared(table):
    data = from_table(table, client="site", label="ill")
    options = {"rounds": 1, "compare": False, "n_groups": 2}
    assert coterie.fit(data, "ifca", **options).why.split == "test"
    held = coterie.fit(data, "ifca", settings={"validation": 0.2}, **options)
    assert held.why.split == "validation"
    none = from_table(table, client="site", label="ill", test_fraction=0.0)
    why = coterie.fit(none, "ifca", **options).why
    assert why.split == "train"
    assert "No rows are held out" in why.notes[-1]


def test_regression_compares_the_target_and_the_errors():
    rng = np.random.default_rng(0)
    site, x = np.repeat(np.arange(8), 80), rng.normal(size=640)
    cost = 100 + 10 * x * (-1.0) ** site + 30 * (site % 2) + rng.normal(size=640)
    data = from_table({"site": site, "x": x, "cost": cost}, client="site", label="cost")
    why = coterie.fit(data, "survey", model="linear", n_groups=2, rounds=60, compare=False).why
    high = next(line for line in why.groups if "1" in line["clients"])
    one = {line["kind"]: line for line in high["statements"]}
    assert one["target"]["name"] == "cost"
    assert one["target"]["here"] - one["target"]["elsewhere"] == pytest.approx(30, abs=5)
    assert one["error"]["here"] > 2 * one["error"]["elsewhere"]
    assert one["error"]["bias"] < -10
    assert one["error"]["low"] < one["error"]["here"] < one["error"]["high"]


def test_images_are_sent_only_if_asked_for():
    g = torch.Generator().manual_seed(0)
    xs = [torch.rand(60, 1, 4, 4, generator=g) / 2 + (i % 2) / 2 for i in range(6)]
    ys = [torch.arange(60) % 2 for _ in range(6)]
    data = from_arrays(xs, ys)
    options = {"model": "linear", "n_groups": 2, "rounds": 2, "compare": False}
    why = coterie.fit(data, "survey", **options).why
    assert not why.images
    assert why.kept == ["images"]
    odd_ones = next(line for line in why.groups if "client-1" in line["clients"])
    bright = odd_ones["statements"][0]
    assert bright["name"] == "brightness"
    assert bright["here"] - bright["elsewhere"] == pytest.approx(0.5, abs=0.05)
    parts = ["columns", "images"]
    shown = coterie.fit(data, "survey", settings={"why": parts}, **options).why
    assert {name: part.shape for name, part in shown.images.items()} == {
        "0": (2, 1, 4, 4),
        "1": (2, 1, 4, 4),
    }
    dark, bright = sorted(float(part.mean()) for part in shown.images.values())
    assert bright - dark == pytest.approx(0.5, abs=0.05)
    assert [line["part"] for line in shown.sent] == parts


def test_text_is_compared_without_words():
    rng = np.random.default_rng(0)
    words = [["rain wind storm", "fever cough pain"], ["price stock bank", "goal match team"]]
    notes, desk, kind = [], [], []
    for i in range(8):
        for j in range(40):
            pick = rng.integers(0, 2)
            notes.append(f"{words[i % 2][pick]} number {j} {rng.integers(0, 99)}")
            desk.append(f"desk-{i}")
            kind.append(str(pick))
    data = from_table({"desk": desk, "note": notes, "kind": kind}, client="desk", label="kind")
    columns, pixels, _ = list_columns(DataCard.of(data))
    assert {column.kind for column in columns} == {"text"}
    assert not pixels
    why = coterie.fit(data, "survey", n_groups=2, rounds=1, compare=False).why
    told = [one for one in why.groups[0]["statements"] if one["kind"] == "text"]
    assert len(told) == 1  # the strongest of its features speaks for the column
    assert "which words, hashes do not tell" in str(why)


# asking less


@pytest.mark.parametrize(
    ("asked", "parts"),
    [("labels", ["labels"]), (["predictions", "columns"], ["columns", "predictions"])],
)
def test_clients_send_only_what_they_may(table, asked, parts):
    data = from_table(table, client="site", label="ill")
    fit = coterie.fit(data, "ifca", n_groups=2, rounds=1, compare=False, settings={"why": asked})
    assert [line["part"] for line in fit.why.sent] == parts


def test_nothing_is_asked_if_nothing_may_be_sent(table, tmp_path):
    data = from_table(table, client="site", label="ill")
    options = {"n_groups": 2, "rounds": 1, "compare": False}
    for none in ("nothing", [], None):
        fit = coterie.fit(data, "ifca", settings={"why": none}, **options)
        with pytest.raises(ConfigError, match="this run did not ask its clients"):
            fit.why  # noqa: B018
        assert "why.json" not in fit.files
    with pytest.raises(ConfigError, match=r"why must be 'columns', 'labels'"):
        Settings(why="colums")


def test_one_group_has_nothing_to_compare(table):
    data = from_table(table, client="site", label="ill")
    why = coterie.fit(data, "fedavg", rounds=1).why
    assert why.sent == []
    assert str(why) == "There is one group and no odd client, so there is nothing to compare."


def test_a_run_of_an_older_version_gets_it_by_resuming(tmp_path):
    tables = described("ifca", 2, run={"participation": 1.0})
    ready = build(tables)
    from coterie.fitted import load
    from coterie.fitting import fit_run, resume_run

    first = fit_run(ready, tmp_path / "run").files["why.json"]
    folder = RunFolder(tmp_path / "run")
    files = {name: data for name, data in folder.final_files().items() if name != "why.json"}
    (folder.final / "why.json").unlink()
    folder.finish(files, folder.summary())
    with pytest.raises(ConfigError, match="coterie resume"):
        load(tmp_path / "run").why  # noqa: B018
    assert resume_run(ready, tmp_path / "run").files["why.json"] == first


# advice


def test_advice_says_what_the_survey_and_columns_tell(table):
    data = from_table(table, client="site", label="ill")
    advice = coterie.advise(data)
    assert advice.n_groups == 2
    lines = {line["name"]: line["statements"] for line in advice.why.groups}
    assert lines["site-7"][0]["name"] == "dose"
    kinds = {one["kind"] for one in lines["group 1"]}
    assert {"class", "missing"} <= kinds
    assert advice.why.split == "train"
    plain = json.loads(advice.to_json())
    assert plain["why"]["groups"][0]["statements"][0]["text"]
    assert "why" not in plain["evidence"]


def test_a_column_that_names_the_client_is_warned_of_and_explains_nothing(table):
    named = {**table, "place": table["site"]}
    data = from_table(named, client="site", label="ill")
    advice = coterie.advise(data)
    assert [one.column for one in data.warnings] == ["place"]
    said = [one["name"] for line in advice.why.groups for one in line["statements"]]
    assert "dose" in said
    assert "place" not in said


def test_advice_may_ask_for_less(table):
    data = from_table(table, client="site", label="ill")
    none = coterie.advise(data, why="nothing")
    assert none.why.sent == []
    assert "asked nothing" in str(none.why)
    assert none.evidence["exchanges"] == coterie.advise(data).evidence["exchanges"] - 1
    with pytest.raises(ConfigError, match="Unknown part 'predictions'"):
        coterie.advise(data, why="predictions")


# chance


def test_groups_that_were_formed_at_random_do_not_differ():
    said, n = 0, 25
    for seed in range(n):
        rng = np.random.default_rng(seed)
        xs = [rng.normal(size=(50, 5)) for _ in range(8)]
        ys = [(x[:, 0] + rng.normal(size=50) > 0).astype(int) for x in xs]
        data = from_arrays(xs, ys)
        options = {"model": "linear", "n_groups": 2, "rounds": 1, "compare": False}
        start = {name: i % 2 for i, name in enumerate(data.names)}
        why = coterie.fit(data, "ifca", start=start, seed=seed, **options).why
        said += any(line["statements"] for line in why.groups)
    assert said <= 1 + 3 * math.sqrt(n * 0.05)


# real clients


def test_real_clients_are_asked_only_if_the_run_says_so_and_send_the_same(tmp_path):
    tables = described("ifca", 2, run={"participation": 1.0, "why": ["columns", "predictions"]})
    found = {}
    for name, why in (("asked", tables["run"]["why"]), ("auto", "auto")):
        described_run = {**tables, "run": {**tables["run"], "why": why}}
        ready = build(described_run)
        card = DataCard.of(ready.data)
        plain = {**card.to_dict(), "truth": None}
        card = DataCard.from_dict(plain)
        link = LocalLink(workers(tmp_path / name, list(ready.data.names), answers=("all",)))
        setup = {"description": described_run, "card": plain}
        fed = Remote(link, setup, "0a", deadline=0.2, poll=0.01)
        fed.meet(len(ready.data), 5.0)
        folder = RunFolder(tmp_path / f"{name}-run")
        folder.create(described_run)
        result = conduct(ready.algorithm, card, ready.settings, fed, folder.path)
        found[name] = result.files.get("why.json")
    assert found["auto"] is None
    simulated = coterie.fit(
        ready.data,
        ready.algorithm,
        rounds=2,
        compare=False,
        settings={"why": ["columns", "predictions"], "engine": "wire", "threads": 1},
    )
    one, other = json.loads(found["asked"]), json.loads(simulated.files["why.json"])
    assert one == other
    assert one["compared"] > 0
