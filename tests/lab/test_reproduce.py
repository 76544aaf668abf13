"""Recipes name every cell once, run what is list_missing, and set both figures side by side."""

import json
import os
import re
from dataclasses import replace

import pytest

from coterie.core.errors import ConfigError, DataError
from coterie.running.build import Settings, build
from coterie_lab import drawing, tables
from coterie_lab import reproduce as module
from coterie_lab.pages import conclude, count_cells, orders, write_pages
from coterie_lab.recipe import RECIPES, Entry, Figures, Recipe, Study, Value, find
from coterie_lab.reproduce import Plan, list_missing, read_summary, reproduce
from small_runs import described

real = pytest.mark.skipif(
    "COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set: needs MNIST"
)


def tiny(rounds: int = 2) -> Recipe:
    """A table of two runs that take a moment."""

    def study(method: str) -> Study:
        return Study(
            f"tiny/blobs/{method}",
            lambda seed, scale: described(method, rounds, run={"seed": seed, "participation": 1.0}),
            seconds=1.0,
        )

    def entry(row: str, metric: str, printed: str, name: str | None) -> Entry:
        made = None if name is None else study(name)
        return Entry("Blobs", row, metric, metric, Value.of(printed), made, ("A note.",))

    return Recipe(
        "tiny",
        "Table 0: nothing",
        "Nobody",
        (
            entry("IFCA", "accuracy", "50.0 ± 60.0", "ifca"),
            entry("IFCA", "ari", "—", "ifca"),
            entry("FedAvg", "accuracy", "10.0 ± 0.1", "fedavg"),
            entry("Unheard", "accuracy", "1.0", None),
        ),
        seeds=(1, 2),
    )


def test_a_row_with_two_figures_has_one_curve(tmp_path):
    plan, recipe = Plan(tmp_path), replace(tiny(), curves="ari")
    reproduce(recipe, plan, seeds=1)
    (axes,) = drawing._curves(recipe, plan).axes
    assert [line.get_label() for line in axes.lines] == ["IFCA"]


def test_the_key_of_a_picture_names_what_is_drawn(tmp_path):
    def key(recipe):
        (legend,) = drawing._table(recipe, plan).legends
        return [text.get_text() for text in legend.get_texts()]

    plan, recipe = Plan(tmp_path), tiny()
    assert key(recipe) == [drawing.PRINTED]
    reproduce(recipe, replace(plan, rounds=1), seeds=1)
    assert key(recipe) == [drawing.PRINTED, drawing.SHORT]
    reproduce(recipe, plan, seeds=1)
    assert key(recipe) == [drawing.PRINTED, drawing.WHOLE]
    unpublished = tuple(replace(entry, published=None) for entry in recipe.entries)
    assert key(replace(recipe, entries=unpublished)) == [drawing.WHOLE]


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    plan, recipe = Plan(tmp_path), tiny()
    paths = reproduce(recipe, plan, seeds=1)
    assert {path.suffix for path in paths} == {".md", ".csv", ".tex", ".png"}
    assert all(path.stat().st_size > 0 for path in paths)
    assert "0 of 2 runs are finished" in capsys.readouterr().out
    monkeypatch.setattr(module, "perform", None)
    reproduce(recipe, plan, seeds=1)
    assert [task.seed for task in list_missing(plan, recipe.studies(), (1, 2))] == [2, 2]


def test_a_stopped_run_goes_on_to_the_same_figures(tmp_path):
    whole, cut = Plan(tmp_path / "a"), Plan(tmp_path / "b")
    recipe = tiny(rounds=4)
    reproduce(recipe, replace(cut, rounds=2), seeds=1, quiet=True)
    assert read_summary(cut, "tiny/blobs/ifca", 1)["rounds"] == 2
    assert "2 of 4 rounds" in tables.markdown(recipe, cut)
    assert "≠" not in tables.markdown(recipe, cut)  # too short to be judged
    for plan in (whole, cut):
        reproduce(recipe, plan, seeds=1, quiet=True)
    one, other = (read_summary(plan, "tiny/blobs/ifca", 1) for plan in (whole, cut))
    for name in ("accuracy", "loss", "ari", "by_round"):
        assert one[name] == other[name]


def test_tables_say_what_has_not_run(tmp_path):
    text = tables.markdown(tiny(), Plan(tmp_path))
    assert text.count('class="missing"') == 4
    assert text.count(tables.NOT_BUILT) == 1
    assert "A note." in text


def test_published_and_ours_stand_side_by_side(tmp_path):
    plan, recipe = Plan(tmp_path), tiny()
    reproduce(recipe, plan, quiet=True)
    lines = tables.comma_separated(recipe, plan).splitlines()
    assert lines[1].startswith("Blobs,IFCA,accuracy,50.0 ± 60.0,")
    assert ",yes," in lines[1]
    fedavg = next(line for line in lines if "FedAvg" in line)
    assert ",no," in fedavg  # no model is as bad as 10 % here
    assert r"$\pm$" in tables.latex(recipe, plan)


def test_a_cell_that_never_arrives_is_a_dash():
    ours = Figures([2.0, None])
    assert (ours.mean, ours.text(1)) == (None, "—")
    # (2 + 4) / 2 = 3, deviation of the population 1
    assert Figures([2.0, 4.0]).text(1) == "3.0 ± 1.0"
    assert Figures([]).text(1) == "not run yet"


def test_agreement_is_two_deviations_or_half_a_point():
    entry = Entry("", "CLoVE", "MNIST", "accuracy", Value.of("99.8 ± 0.1"))
    assert tables.agrees(entry, Figures([99.4]))  # 0.4 below: within 0.5
    assert not tables.agrees(entry, Figures([99.2]))
    wide = replace(entry, published=Value.of("95.9 ± 2.0"))
    assert tables.agrees(wide, Figures([92.0]))  # 3.9 below: within 4.0


def test_pages_are_made_from_summaries_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", tiny())
    plan = Plan(tmp_path / "results")
    reproduce(tiny(), plan, seeds=1, quiet=True)
    write_pages(plan, tmp_path / "docs")
    page = (tmp_path / "docs" / "tiny.md").read_text()
    assert "2 of 4 runs are finished" in page
    again = Plan(tmp_path / "elsewhere")
    write_pages(again, tmp_path / "docs")  # the folder's own summaries are enough
    assert (tmp_path / "docs" / "tiny.md").read_text() == page


def test_a_run_older_than_a_correction_says_so_until_it_runs_again(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", tiny())
    plan, docs = Plan(tmp_path / "results"), tmp_path / "docs"
    reproduce(tiny(), plan, seeds=1, quiet=True)
    write_pages(plan, docs)
    new = (docs / "tiny.md").read_text()
    store = docs / "summaries.jsonl"
    old = [json.loads(line) | {"remark": "An old run."} for line in store.read_text().splitlines()]
    store.write_text("".join(json.dumps(one) + "\n" for one in old))
    write_pages(Plan(tmp_path / "elsewhere"), docs)
    page = (docs / "tiny.md").read_text()
    assert "An old run." in page
    assert not re.search("≠<", page)  # it is not compared with the published figure
    write_pages(plan, docs)  # the new run replaces the old one
    assert (docs / "tiny.md").read_text() == new


def test_one_seed_alone(tmp_path):
    plan = Plan(tmp_path)
    reproduce(tiny(), plan, seed=2, quiet=True)
    kept = sorted(path.name for path in (tmp_path / "summaries" / "paper").iterdir())
    assert kept
    assert all(name.endswith("seed-2.json") for name in kept)
    with pytest.raises(ConfigError, match="unknown seed 9"):
        reproduce(tiny(), plan, seed=9, quiet=True)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="clove-table1"):
        find("clove-tabel1")
    with pytest.raises(ConfigError, match="method of"):
        RECIPES["clove-table1"].select(None, ["clov"])


def test_a_method_may_be_written_with_either_dash():
    for name in ("mosaic-bic", "mosaic_bic", "Mosaic-BIC"):
        chosen = RECIPES["fedgem-real"].select(None, [name])
        assert {study.name.rsplit("/", 1)[-1] for study in chosen} == {"mosaic-bic"}


def test_missing_data_are_named_with_what_works_without(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    plan = Plan(tmp_path, data_dir=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"mnist/train-images.*coterie data get.*quickstart"):
        reproduce(RECIPES["clove-table2"], plan, cells="/mnist/", quiet=True)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_whole(name):
    recipe = RECIPES[name]
    places = [(e.part, e.row, e.column) for e in recipe.entries]
    assert len(places) == len(set(places))
    assert recipe.hours() > 0
    for study in recipe.studies():
        tables_ = module.description(study, 1, Plan())
        assert Settings(**tables_["run"]).rounds > 0
        json.dumps(tables_)  # plain data
        small = module.description(study, 1, Plan(scale="reduced"))
        assert small["run"]["rounds"] <= tables_["run"]["rounds"]
        assert small["data"].get("n", 0) <= tables_["data"].get("n", 1000)
        # the published kind of network; large ones are narrower
        assert small.get("model", {}).get("name") == tables_.get("model", {}).get("name")


def test_reduced_runs_stand_beside_those_of_the_paper_and_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", tiny())
    plan, docs = Plan(tmp_path / "results"), tmp_path / "docs"
    reproduce(tiny(), plan, methods=["fedavg"], seeds=1, quiet=True)
    reproduce(tiny(), replace(plan, scale="reduced"), quiet=True)
    write_pages(plan, docs)
    page = (docs / "tiny.md").read_text()
    assert "1 of 4 runs are finished at the published size, and 2 of 2 at reduced scale" in page
    fedavg = next(line for line in page.splitlines() if "<th>FedAvg</th>" in line)
    assert len(re.findall("≠<", fedavg)) == 1  # the run at the published size
    scales = [json.loads(line)["scale"] for line in (docs / "summaries.jsonl").open()]
    assert sorted(scales) == ["paper", "reduced", "reduced"]
    assert "| tiny" in (docs / "index.md").read_text().replace("[tiny]", "tiny")
    assert count_cells(tiny(), plan) == (4, 1, 2)  # one method does not exist


def test_the_order_of_methods_is_set_beside_the_published_one(tmp_path):
    recipe, plan = tiny(), Plan(tmp_path)

    def cell(row, printed, study):
        return Entry("Blobs", row, "accuracy", "accuracy", Value.of(printed), study)

    studies = [replace(recipe.studies()[0], name=f"tiny/blobs/{name}") for name in "abcd"]
    rows = zip("ABCD", ("4", "3", "2", "1"), studies, strict=True)
    recipe = replace(recipe, entries=tuple(cell(*row) for row in rows), compare=(("A", "B"),))
    for study, accuracy in zip(studies, (90.0, 70.0, 80.0, 10.0), strict=True):
        path = module.summary_path(plan, study.name, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"accuracy": accuracy, "rounds": 1, "published_rounds": 1}))
    (found,) = orders(recipe, plan)
    assert (found["published"], found["ours"]) == (list("ABCD"), list("ACBD"))
    assert found["correlation"] == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    text = conclude(recipe, plan)
    assert text.startswith("Most often best in our runs: A (1 of 1). A is at least as good as B in")


@real
def test_a_cut_down_table_2_finds_the_groups(tmp_path):
    plan = Plan(tmp_path, scale="quick", engine="loop")
    recipe = RECIPES["clove-table2"]
    reproduce(recipe, plan, cells="clove/mnist/label-skew-1", methods=["clove"], quiet=True)
    assert read_summary(plan, "clove/mnist/label-skew-1/clove", 1)["ari"] == 1.0


@real
@pytest.mark.parametrize("name", ["clove-table1", "clove-table8", "ifca-table1"])
def test_quick_cells_build(name):
    for study in RECIPES[name].select(None, ["fedavg"], "quick"):
        assert build(module.description(study, 1, Plan(scale="quick"))).settings.rounds > 0


@pytest.mark.slow
def test_runs_at_the_same_time_give_the_same_figures(tmp_path):
    recipe = RECIPES["clove-fig3a"]
    alone, together = (Plan(tmp_path / name, scale="quick") for name in ("a", "b"))
    reproduce(recipe, alone, cells="linear/1/,linear/0.1/", quiet=True)
    reproduce(recipe, together, cells="linear/1/,linear/0.1/", jobs=2, quiet=True)
    for name in ("clove/linear/1/clove", "clove/linear/0.1/clove"):
        one, other = (read_summary(plan, name, 1) for plan in (alone, together))
        assert one["by_round"] == other["by_round"]
        assert one["loss"] == other["loss"]
