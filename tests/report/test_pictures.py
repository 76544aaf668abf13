import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import coterie.report
from coterie.core.errors import ConfigError, DataError
from coterie.report.journey import (
    NOWHERE,
    OTHERS,
    _headline,
    journey,
    journey_figure,
    journey_picture,
    spaced,
)
from coterie.report.lines import apart, compare_figure, compare_picture
from coterie.report.record import Record, read
from coterie.running.build import build
from coterie.running.loop import run

pytest.importorskip("matplotlib")
METHODS = ("local_only", "fedavg", "ifca", "clove")
CLIENTS, ROUNDS = 8, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Three rounds of four methods on eight clients in two groups."""
    base = tmp_path_factory.mktemp("runs")
    for name in METHODS:
        grouped = {"n_groups": 2} if name in ("ifca", "clove") else {}
        built = build(
            {
                "algorithm": {"name": name, **grouped},
                "model": {"name": "mlp", "hidden": [8]},
                "local": {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 20},
                "data": {"name": "digits", "n_clients": CLIENTS, "n_groups": 2, "per_client": 40},
                "run": {"rounds": ROUNDS},
            }
        )
        run(built.algorithm, built.data, built.settings, base / name)
    return {name: base / name for name in METHODS}


def made(assignments, truth=None, **figures) -> Record:
    """A run with these groups by round."""
    rounds = [
        {"round": i + 1, "loss": 1.0 / (i + 1), "assignment": groups, **figures}
        for i, groups in enumerate(assignments)
    ]
    return Record(Path("run"), "run", rounds, truth)


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def dots(ax) -> int:
    """Dots are drawn at order 2, moves at order 1."""
    return sum(len(part.get_offsets()) for part in ax.collections if part.get_zorder() == 2)


def test_compare_writes_a_png_of_the_promised_size(folders, tmp_path):
    out = compare_picture(list(folders.values()), tmp_path / "new" / "compare.png")
    assert size(out) == (1200, 500)
    assert 10_000 < out.stat().st_size < 500_000


def test_compare_draws_a_line_per_run_and_agreement_only_for_methods_with_groups(folders):
    figure = compare_figure(read(list(folders.values())))
    accuracy, agreement = figure.axes
    assert [line.get_label() for line in accuracy.lines] == [
        "Local only",
        "FedAvg",
        "IFCA",
        "CLoVE",
    ]
    assert [line.get_label() for line in agreement.lines] == ["IFCA", "CLoVE"]
    assert len({line.get_color() for line in accuracy.lines}) == 4
    lines = (folders["clove"] / "rounds.jsonl").read_text().splitlines()
    expected = [json.loads(line)["accuracy"] for line in lines]
    assert accuracy.lines[3].get_ydata().tolist() == expected
    assert f"CLoVE  {expected[-1]:.1%}" in texts(accuracy)


def test_compare_leaves_agreement_out_when_no_run_has_it(folders):
    figure = compare_figure(read([folders["fedavg"], folders["local_only"]]))
    assert len(figure.axes) == 1


def test_loss_is_drawn_where_there_are_no_classes():
    figure = compare_figure([made([[0, 1]] * 3)])
    assert "Loss" in texts(figure.axes[0])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [1, 1 / 2, 1 / 3]


def test_rounds_without_an_exam_are_passed_over():
    record = made([[0]] * 4)
    for line in record.rounds[::2]:
        line["loss"] = None
    assert record.series("loss") == ([2, 4], [1 / 2, 1 / 4])


def test_journey_writes_a_png(folders, tmp_path):
    wide, tall = size(journey_picture(folders["clove"], tmp_path / "one.png"))
    assert 1000 < wide < 1500
    assert 500 < tall < 800
    several = journey_picture(list(folders.values()), tmp_path / "all.png")
    assert size(several)[1] > tall


def test_journey_has_a_dot_per_client_and_round_and_a_panel_per_method_with_groups(folders):
    figure = journey_figure(read(list(folders.values())))
    ifca, clove, accuracy, worst = figure.axes
    assert dots(ifca) == dots(clove) == CLIENTS * ROUNDS
    assert texts(ifca)[-2] == "IFCA"
    assert texts(clove)[-2] == "CLoVE"
    assert len(accuracy.lines) == len(worst.lines) == 4
    sentence = "8 clients, 2 hidden groups: how the groups form, round by round"
    assert sentence in [text.get_text() for text in figure.texts]
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["true group", "A", "B"]


def test_journey_of_methods_without_groups_is_their_accuracy(folders):
    figure = journey_figure(read([folders["fedavg"]]))
    assert len(figure.axes) == 1


def test_dots_of_a_group_are_in_its_band_and_none_lie_on_another():
    record = made([[0, 1, 0, 1], [1, 1, 0, 0]], truth=[0, 0, 1, 1])
    ax = journey_figure([record]).axes[0]
    places = [tuple(p) for part in ax.collections if part.get_zorder() == 2
              for p in part.get_offsets()]  # fmt: skip
    assert len({(round(x, 6), round(y, 6)) for x, y in places}) == 8
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["group 1", "group 0"]  # in the order of the true groups they end with
    moves = next(part for part in ax.collections if part.get_zorder() == 1)
    assert len(moves.get_paths()) == 2  # clients 0 and 3 change


def test_a_thousand_clients_stay_inside_their_bands():
    record = made([[i % 2 for i in range(1000)]] * 2)
    ax = journey_figure([record]).axes[0]
    band = ax.get_ylim()[0] / 2
    for part in ax.collections:
        if part.get_zorder() == 2:
            rows = part.get_offsets()[:, 1] // band
            assert len(set(rows.tolist())) == 1


def test_without_truth_colour_is_the_last_group():
    assert journey(made([[0, 0, 1], [1, 0, 1]]), truth_known=False).colours == [1, 0, 1]
    figure = journey_figure([made([[0, 0, 1], [1, 0, 1]])])
    assert figure.legends[0].get_texts()[0].get_text() == "last group"


def test_a_run_without_truth_beside_one_with_it_is_grey():
    known, unknown = made([[0, 1]], truth=[0, 1]), made([[0, 1]])
    assert journey(known, truth_known=True).colours == [0, 1]
    assert journey(unknown, truth_known=True).colours == [NOWHERE, NOWHERE]


def test_clients_not_yet_placed_or_not_yet_there_have_a_band_of_their_own():
    one = journey(made([[0, -1], [0, 1, 1]], truth=[0, 1, 1]), truth_known=True)
    assert one.bands == [0, 1, NOWHERE]
    assert one.columns == [[0, NOWHERE, NOWHERE], [0, 1, 1]]


def test_small_groups_share_a_band_when_there_are_too_many():
    groups = [i for i in range(15) for _ in range(20 - i)]
    one = journey(made([groups]), truth_known=False)
    assert set(one.bands) == {*range(12), OTHERS}
    assert one.columns[0].count(OTHERS) == 8 + 7 + 6


def test_headline_says_when_the_groups_were_found_for_good():
    record = made([[0, 1]] * 4, truth=[0, 1])
    for line, ari in zip(record.rounds, (1.0, 0.4, 1.0, 1.0), strict=True):
        line["ari"] = ari
    words = _headline(journey(record, True))[1]
    assert words == "finds the true groups exactly after 3 rounds"
    record.rounds[-1]["ari"] = 0.25
    words = _headline(journey(record, True))[1]
    assert words == "agreement with the true groups at the end: 0.25 of 1"


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 20, 1000])
def test_rounds_shown_rise_from_the_first_to_the_last(n):
    rounds = spaced(range(1, n + 1), 6)
    assert rounds[0] == 1
    assert rounds[-1] == n
    assert len(rounds) == min(n, 6)
    assert rounds == sorted(set(rounds))


def test_labels_keep_their_order_and_distance_and_stay_inside():
    places = apart([0.98, 0.99, 1.0, 0.2, 0.21], 0.1)
    assert places == pytest.approx([0.8, 0.9, 1.0, 0.155, 0.255])


def test_runs_of_one_method_are_told_apart_by_their_folders(folders, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    for name in ("run.json", "rounds.jsonl"):
        (again / name).write_bytes((folders["clove"] / name).read_bytes())
    labels = [record.label for record in read([folders["clove"], again, folders["ifca"]])]
    assert labels == ["CLoVE (clove)", "CLoVE (again)", "IFCA"]


def test_an_unfinished_run_is_drawn_without_truth(folders, tmp_path):
    for name in ("run.json", "rounds.jsonl"):
        (tmp_path / name).write_bytes((folders["ifca"] / name).read_bytes())
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write('{"round": 4, "lo')  # torn by a kill
    (record,) = read([tmp_path])
    assert record.truth is None
    assert len(record.rounds) == ROUNDS


def test_bad_input_gets_one_clear_sentence(folders, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="at least one run folder"):
        compare_picture([], tmp_path / "a.png")
    with pytest.raises(DataError, match=r"is not a run folder: it has no run.json"):
        compare_picture([tmp_path], tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"must end in .png, .svg, .pdf. Got 'a.xyz'"):
        compare_picture([folders["ifca"]], tmp_path / "a.xyz")
    (tmp_path / "run.json").write_text('{"algorithm": {"name": "ifca"}}')
    with pytest.raises(DataError, match="no round is finished yet"):
        journey_picture(tmp_path, tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"coterie\[plot\]"):
        compare_picture([folders["ifca"]], tmp_path / "a.png")
    assert not list(tmp_path.glob("a.*"))


def test_drawing_leaves_the_settings_of_matplotlib_alone(folders, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    compare_picture([folders["ifca"]], tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_one_client_and_one_round_can_be_drawn():
    record = replace(made([[0]], truth=[0], accuracy=0.5, ari=1.0), label="x" * 40)
    assert dots(journey_figure([record]).axes[0]) == 1
    assert len(compare_figure([record]).axes) == 2


def test_the_report_imports_neither_algorithms_nor_engines():
    for path in Path(coterie.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(("coterie.algorithms", "coterie.engines")), path
