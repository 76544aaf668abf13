import itertools
import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.options import parse_sets
from coterie.core.errors import ConfigError
from coterie.running.loop import run
from small_runs import START, StopsAfter, coterie, described, ready, toml

COMMANDS = [
    "advise",
    "run",
    "resume",
    "show",
    "why",
    "compare",
    "place",
    "recheck",
    "plan",
    "predict",
    "list",
    "explain",
    "check",
]


def rows(seed: int, group: int, n: int = 30) -> list[str]:
    """Two numbers, of which group 0 is judged by the first and group 1 by the second."""
    x = np.random.default_rng(seed).normal(size=(n, 2))
    answers = np.where(x[:, group] > 0, "yes", "no")
    return [f"{a:.3f},{b:.3f},{c}" for (a, b), c in zip(x, answers, strict=True)]


@pytest.fixture
def sites(tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    for i in range(6):
        text = "\n".join(["age,dose,ill", *rows(i, i % 2)]) + "\n"
        (folder / f"site-{i}.csv").write_text(text)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run on own files, and its files."""
    from coterie import fit, from_folder

    place = tmp_path_factory.mktemp("kept")
    (place / "sites").mkdir()
    for i in range(6):
        text = "\n".join(["age,dose,ill", *rows(i, i % 2)]) + "\n"
        (place / "sites" / f"site-{i}.csv").write_text(text)
    data = from_folder(place / "sites", label="ill")
    fit(data, "clove", n_groups=2, rounds=4, out=place / "run", compare=False)
    return place


# Help


def test_help_is_instant_and_imports_no_torch():
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", START, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    took = time.perf_counter() - began
    assert "coterie run quickstart" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "sklearn", "pandas"}
    assert took < 5  # about a quarter of a second on an idle machine


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"coterie {command}" in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "A run file"),
        ("place", "A run folder,"),
        ("reproduce", "Name of a table or figure"),
    ],
)
def test_help_explains_arguments(call, command, words):
    _, out, _ = call(command, "--help")
    assert words in out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["advise", "plan", "deploy node", "bench"])
def test_help_breaks_lines_only_where_the_terminal_does(call, command, width, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    _, out, _ = call(*command.split(), "--help")
    lines = [line.strip() for line in out.partition("Example")[0].splitlines()]
    assert max(map(len, lines)) > 60
    for line, after in itertools.pairwise(lines):
        if line and after:  # the next word did not fit
            assert len(f"{line} {after.split()[0]}") > width - 2


def test_the_version_is_told(call):
    code, out, _ = call("--version")
    assert code == 0
    assert out.startswith("coterie 0.")


def test_a_warning_is_a_sentence():
    warns = "app.app = lambda **given: warnings.warn('IFCA: nobody is left.')"
    start = f"import warnings; from coterie.cli import app, main; {warns}; main()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    assert done.stderr == "Warning: IFCA: nobody is left.\n"


def test_the_package_runs_as_the_command():
    said = subprocess.run(
        [sys.executable, "-m", "coterie", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("coterie 0.")


# Running


def test_the_quickstart_in_two_rounds(call, tmp_path):
    small = ["--set", "run.rounds=2", "--set", "data.n_max=400", "--set", "data.n_clients=8"]
    code, out, err = call("run", "quickstart", *small, "--out", tmp_path / "q")
    assert (code, err) == (0, "")
    for word in ("ifca", "clove", "census", "worst tenth", "MB moved", "Recommendation: "):
        assert word in out
    for method in ("local_only", "fedavg", "ifca", "clove", "census"):
        assert (tmp_path / "q" / method / "summary.json").exists()
    assert (tmp_path / "q" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = call("run", "quickstart", *small, "--out", tmp_path / "j", "--json")
    assert [row["method"] for row in json.loads(out)["methods"]] == [
        "local_only",
        "fedavg",
        "ifca",
        "clove",
        "census",
    ]


def test_a_run_file_with_a_change(call, tmp_path):
    (tmp_path / "study.toml").write_text(toml(described("ifca")))
    out_folder = tmp_path / "run"
    words = ["--set", "run.rounds=2", "--set", "algorithm.n_groups=3", "--no-compare"]
    code, out, err = call("run", tmp_path / "study.toml", *words, "--out", out_folder)
    assert (code, err) == (0, "")
    assert "round 2/2" in out
    assert f"coterie show {out_folder}" in out
    assert json.loads((out_folder / "run.json").read_text())["algorithm"]["n_groups"] == 3
    assert not (out_folder / "baselines").exists()
    more = ["--compare", "--out", tmp_path / "more"]  # the words count, not what the file says
    assert call("run", out_folder / "run.json", *more)[0] == 0
    assert (tmp_path / "more" / "baselines").exists()
    code, out, _ = call("run", out_folder / "run.json", "--json")  # a run folder's own file
    assert code == 0
    assert json.loads(out)["summary"]["rounds"] == 2


def test_own_files_by_one_command(call, sites, tmp_path):
    words = ["--data", sites, "--label", "ill", "--set", "run.rounds=3", "--groups", "2"]
    code, out, err = call("run", *words, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "180 rows of 6 clients. To predict: 'ill' (2 classes). Inputs: 2 numbers." in out
    assert "note:" not in out
    assert "gain over alone" in out
    assert "with training alone" in out


def test_advice_on_own_files(call, sites, tmp_path):
    picture = tmp_path / "evidence.png"
    code, out, _ = call("advise", sites, "--label", "ill", "--table", "--picture", picture)
    assert code == 0
    assert "Cost: " in out
    assert "unexplained share" in out
    assert picture.stat().st_size > 10_000
    code, out, _ = call("advise", sites, "--label", "ill", "--json")
    advice = json.loads(out)
    assert advice["kind"] in ("one", "meaning", "labels", "client by client")
    assert isinstance(advice["odd"], list)
    code, _, complaint = call("advise", tmp_path / "none")
    assert code == 2
    assert "does not exist" in complaint


def test_evidence_is_shown_and_drawn(call, sites, tmp_path):
    out, picture = tmp_path / "run", tmp_path / "evidence.png"
    data = ("--data", sites, "--label", "ill", "--algorithm", "survey", "--set", "run.rounds=1")
    assert call("run", *data, "--no-compare", "--out", out)[0] == 0
    code, said, _ = call("show", out, "--picture", picture)
    assert code == 0
    assert "Number of groups:" in said
    assert picture.stat().st_size > 10_000


def test_one_file_with_a_client_column(call, tmp_path):
    text = ["site,age,dose,ill"]
    text += [f"s{i},{row}" for i in range(4) for row in rows(i, i % 2)]
    (tmp_path / "all.csv").write_text("\n".join(text) + "\n")
    words = ["--data", tmp_path / "all.csv", "--label", "ill", "--no-compare", "--json"]
    code, out, _ = call("run", *words, "--client", "site", "--set", "run.rounds=1")
    assert code == 0
    assert [row["client"] for row in json.loads(out)["clients"]] == ["s0", "s1", "s2", "s3"]
    code, _, err = call("run", *words)
    assert code == 2
    assert "says which client a row belongs to: --client COLUMN" in err


def test_resume_goes_on_and_show_says_so_before(call, tmp_path):
    one = ready("clove", 4)
    with pytest.raises(KeyboardInterrupt):
        run(one.algorithm, one.data, one.settings, tmp_path / "run", StopsAfter(2))
    for words in (["show"], ["compare"], ["show", "--json"]):
        code, _, err = call(*words, tmp_path / "run")
        assert code == 2
        assert f"not finished. Continue it with `coterie resume {tmp_path / 'run'}`" in err
    code, out, _ = call("resume", tmp_path / "run")
    assert code == 0
    assert "clove: rounds 3 to 4" in out
    code, out, _ = call("resume", tmp_path / "run")
    assert code == 0
    assert "clove: all 4 rounds are done" in out


# Looking


def test_show_has_a_card_per_group(call, kept):
    code, out, _ = call("show", kept / "run")
    assert code == 0
    for word in ("2 groups among 6 clients", "Group 0:", "labels:", "loss on each model", "margin"):
        assert word in out
    assert "nearest other group" in out
    code, out, _ = call("show", kept / "run", "--json")
    shown = json.loads(out)
    assert {"summary", "groups", "clients"} <= set(shown)


def test_compare_has_a_table_and_a_picture(call, kept, tmp_path):
    picture = tmp_path / "both.png"
    code, out, _ = call("compare", kept / "run", kept / "run", "--picture", picture)
    assert code == 0
    assert out.count("clove") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = call("compare", kept / "run", "--json")
    assert json.loads(out)[0]["method"] == "clove"


def test_place_tells_the_group(call, kept):
    path = kept / "sites" / "site-1.csv"
    code, out, _ = call("place", kept / "run", "--data", path)
    assert code == 0
    assert out.startswith("site-1: group ")
    code, out, _ = call("place", kept / "run", "--data", path, "--json")
    assert set(json.loads(out)) == {"group", "margin", "fits", "score"}


def test_place_without_labels_says_that_they_are_needed(call, kept, tmp_path):
    lines = (kept / "sites" / "site-1.csv").read_text().splitlines()
    blind = tmp_path / "blind.csv"
    blind.write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    code, out, _ = call("place", kept / "run", "--data", blind)
    assert code == 0
    assert out.startswith("blind: labels are needed: its inputs fit groups 0 and 1")
    code, out, _ = call("place", kept / "run", "--data", blind, "--json")
    assert json.loads(out)["needs_labels"] is True
    assert json.loads(out)["candidates"] == [0, 1]


def test_recheck_names_who_moved(call, tmp_path):
    for part, seed in (("old", 0), ("new", 50)):
        (tmp_path / part).mkdir()
        for i in range(12):
            group = 1 - i % 2 if (part, i) == ("new", 3) else i % 2
            text = "\n".join(["age,dose,ill", *rows(seed + i, group, 60)]) + "\n"
            (tmp_path / part / f"site-{i}.csv").write_text(text)
    from coterie import fit, from_folder

    data = from_folder(tmp_path / "old", label="ill")
    fit(data, "survey", rounds=1, out=tmp_path / "run", compare=False)
    code, out, _ = call("recheck", tmp_path / "run", "--data", tmp_path / "new")
    assert code == 0
    assert "11 of 12 clients still fit the group they were in. site-3 was in group" in out
    code, out, _ = call("recheck", tmp_path / "run", "--data", tmp_path / "new", "--json")
    found = {line["client"]: line["change"] for line in json.loads(out)["clients"]}
    assert found == {f"site-{i}": "moved" if i == 3 else "stays" for i in range(12)}
    code, _, err = call("recheck", tmp_path / "run", "--data", tmp_path / "none")
    assert code == 2
    assert "does not exist" in err


def test_predict_prints_or_writes_a_line_per_row(call, kept, tmp_path):
    words = ["predict", kept / "run", "--client", "site-1"]
    words += ["--data", kept / "sites" / "site-1.csv"]
    code, out, _ = call(*words)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "row,prediction,probability of no,probability of yes"
    assert len(lines) == 31
    cells = [line.split(",") for line in lines[1:]]
    assert [int(line[0]) for line in cells] == list(range(2, 32))  # rows of the file
    assert {line[1] for line in cells} <= {"yes", "no"}
    assert all(abs(float(line[2]) + float(line[3]) - 1) < 1e-4 for line in cells)
    assert all((float(line[3]) > 0.5) == (line[1] == "yes") for line in cells)
    code, out, _ = call(*words, "--out", tmp_path / "p.csv")
    assert out == f"30 predictions saved to {tmp_path / 'p.csv'}\n"
    assert (tmp_path / "p.csv").read_text().splitlines() == lines


def test_list_has_a_line_each(call):
    code, out, _ = call("list")
    assert code == 0
    for word in ("algorithms", "models", "data", "recipes", "clove", "mlp", "digits", "quickstart"):
        assert word in out
    code, out, _ = call("list", "models", "--json")
    assert set(json.loads(out)) == {"models"}
    assert call("list", "modles")[0] == 2


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("clove", "stable_after = 3"),
        ("mlp", "hidden"),
        ("digits", "n_clients"),
        ("quickstart", "coterie run"),
    ],
)
def test_explain_says_what_it_does_and_its_options(call, name, word):
    code, out, _ = call("explain", name)
    assert code == 0
    assert word in out


# Check

COPY = Path(__file__).parents[2] / "src" / "coterie" / "algorithms" / "fedavg.py"


@pytest.mark.slow
def test_check_passes_a_copy_of_fedavg(tmp_path):
    (tmp_path / "mine.py").write_text(COPY.read_text().replace('"fedavg"', '"mine"'))
    done = coterie("check", tmp_path / "mine.py", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)


@pytest.mark.slow
def test_check_fails_a_broken_method_with_code_1(tmp_path):
    whole = COPY.read_text().replace('"fedavg"', '"mine"')
    broken = whole.replace(
        '"n": client.train.size}', '"n": client.train.size, "x": client.train.x}'
    )
    assert broken != whole  # it sends its data
    (tmp_path / "mine.py").write_text(broken)
    done = coterie("check", tmp_path / "mine.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_without_a_method_cannot_be_checked(call, tmp_path):
    (tmp_path / "empty_method.py").write_text("x = 1\n")
    code, _, err = call("check", tmp_path / "empty_method.py")
    assert code == 2
    assert "must define a subclass of coterie.Algorithm. Got none" in err
    (tmp_path / "torn_method.py").write_text("def (\n")
    code, _, err = call("check", tmp_path / "torn_method.py")
    assert code == 2
    assert "torn_method.py cannot be imported" in err
    assert call("check", "none.py")[0] == 2
    code, _, err = call("check", "clov")
    assert (code, "Did you mean 'clove'" in err) == (2, True)


# Bad input


def one_sentence(said: tuple[int, str, str], sentence: str) -> None:
    code, out, err = said
    assert sentence in err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert code == 2


def spoil(folder: Path, how: str) -> None:
    site = folder / "site-2.csv"
    lines = site.read_text().splitlines()
    match how:
        case "ragged":
            lines[4] += ",1"
        case "other columns":
            lines = ["age,ill", *(f"{line.split(',')[0]},yes" for line in lines[1:])]
        case "no label column":
            lines[0] = "age,dose,sick"
        case "infinite":
            lines[3] = "inf,1,no"
        case "wrong type":
            lines[3] = "old,1,no"
        case "empty client":
            lines = lines[:1]
        case "other labels":
            lines = [lines[0], *(line.replace("yes", "1").replace("no", "0") for line in lines[1:])]
        case "picture":
            site.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
            return
        case "same name":
            (folder / "site-2.tsv").write_text("age\tdose\till\n1\t2\tno\n")
        case "wrong ending":
            (folder / "notes.docx").write_text("hello")
    site.write_text("\n".join(lines) + "\n")
    for path in folder.glob("*.csv"):
        lines = path.read_text().splitlines()
        if how == "no value":
            lines = [lines[0], *(f",{line.split(',', 1)[1]}" for line in lines[1:])]
        elif how == "one class":
            lines = [line.replace("yes", "no") for line in lines]
        path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("ragged", "site-2.csv: every row must have 3 cells, as the header has. Row 5 has 4."),
        ("other columns", "site-0.csv has 'dose', site-2.csv has not. Add it there, or leave"),
        ("no label column", "site-2.csv must have the label column 'ill'"),
        ("infinite", "Column 'age' must hold finite numbers, at most 1e+30. Row 4 of site-2.csv"),
        ("no value", "Column 'age' must have a value somewhere"),
        ("empty client", "every client must have rows. site-2.csv has none. Fill or remove it."),
        ("one class", "at least two classes. Every row has 'no' in column 'ill'"),
        ("wrong type", "Column 'age' must hold numbers"),
        ("same name", "'site-2' is the name of site-2.csv and of site-2.tsv. Rename one."),
        ("other labels", "Column 'ill' has numbers in site-2.csv and "),
        ("picture", "site-2.csv: a .csv file must be text"),
        (
            "wrong ending",
            "client files must end in .csv, .tsv, .data, .txt, .jsonl, .parquet, .feather, .xlsx, "
            ".npz. Got 'notes.docx'",
        ),
    ],
)
def test_unusable_files_are_one_sentence_and_code_2(call, sites, tmp_path, how, sentence):
    spoil(sites, how)
    said = call("run", "--data", sites, "--label", "ill", "--out", tmp_path / "run")
    one_sentence(said, sentence)
    assert not (tmp_path / "run").exists()  # before any work


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--label", "il"], "Unknown column 'il'. Did you mean 'ill'"),
        (["--label", "ill", "--groups", "7"], "n_groups must be at most the number of clients, 6"),
        (["--label", "ill", "--groups", "many"], "n_groups must be a valid integer"),
        (["--label", "ill", "--algorithm", "clov"], "Did you mean 'clove'"),
        (["--label", "ill", "--set", "algorithm.n_group=2"], "Did you mean 'n_groups'"),
        (["--label", "ill", "--set", "algoritm.n_groups=2"], "Did you mean 'algorithm'"),
        (["--label", "ill", "--set", "model.name=mpl"], "Did you mean 'mlp'"),
        (["--label", "ill", "--set", "run.rounds=x"], "rounds must be a valid integer"),
        (["--label", "ill", "--set", "n_groups=2"], "--set must have the form table.option=value"),
        (["--label", "ill", "--set", "model.name=cnn"], "cnn: samples must be images"),
    ],
)
def test_wrong_options_are_one_sentence_and_code_2(call, sites, tmp_path, words, sentence):
    one_sentence(call("run", "--data", sites, *words, "--out", tmp_path / "run"), sentence)
    assert not (tmp_path / "run").exists()


def test_a_model_whose_output_does_not_fit_the_labels_is_refused(call, tmp_path):
    network = {"import": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 2}}
    (tmp_path / "a.json").write_text(json.dumps(described() | {"model": network}))
    one_sentence(call("run", tmp_path / "a.json"), "--trust torch.nn:Linear")
    words = ["run", tmp_path / "a.json", "--trust", "torch.nn:Linear"]
    one_sentence(call(*words), "must have 3 outputs, one per class. Got (2,).")


def test_folders_and_files_that_are_not_there_or_empty(call, tmp_path):
    (tmp_path / "empty").mkdir()
    empty = ["run", "--data", tmp_path / "empty", "--label", "ill"]
    one_sentence(call(*empty), "must hold a file or a folder per client. It is empty.")
    one_sentence(call("run", "--data", tmp_path / "none"), "none does not exist.")
    one_sentence(call("run", tmp_path / "none.toml"), "none.toml does not exist.")
    one_sentence(call("run", tmp_path / "empty"), "cannot be read")
    one_sentence(call("run"), "give either a run file or --data. Got neither.")


@pytest.mark.parametrize("command", ["resume", "show", "compare"])
def test_what_is_no_run_folder_is_said(call, tmp_path, command):
    one_sentence(call(command, tmp_path), "is not a run folder: it has no run.json")


def test_an_existing_run_folder_is_refused_and_untouched(call, sites, kept):
    before = (kept / "run" / "summary.json").read_bytes()
    said = call("run", "--data", sites, "--label", "ill", "--out", kept / "run", "--json")
    one_sentence(said, "exists and is not empty. Continue it with `coterie resume")
    assert (kept / "run" / "summary.json").read_bytes() == before


def test_an_existing_run_folder_is_refused_before_data_are_read(call, kept, tmp_path):
    (tmp_path / "broken.csv").write_bytes(b"\0")
    said = call("run", "--data", tmp_path, "--label", "ill", "--out", kept / "run", "--json")
    one_sentence(said, "exists and is not empty.")


def test_a_place_where_nothing_can_be_written_is_one_sentence(call, sites, kept, tmp_path):
    (tmp_path / "file").write_text("")
    there = tmp_path / "file" / "below"
    words = ["--label", "ill", "--set", "run.rounds=1", "--no-compare", "--json"]
    one_sentence(call("run", "--data", sites, *words, "--out", there / "run"), "cannot be made")
    one_sentence(
        call("report", kept / "run", "--out", there / "a.html"),
        "Give the path of a file in a folder that you can write to.",
    )


@pytest.mark.parametrize("command", [["place"], ["predict", "--client", "site-1"]])
def test_a_folder_of_files_is_not_the_rows_of_one_client(call, kept, command):
    first, *more = command
    said = call(first, kept / "run", "--data", kept / "sites", *more)
    one_sentence(said, "the rows of one client must be in one file, as in training.")


def test_a_version_that_is_not_released_is_not_said_to_be_on_the_package_index(
    call, kept, tmp_path
):
    assert call("report", kept / "run", "--out", tmp_path / "a.html")[0] == 0
    text = (tmp_path / "a.html").read_text()
    assert "coterie run run.json --out again" in text
    assert "pip install" not in text
    assert "which is not released: install it from its source" in text


def test_paragraphs_of_help_do_not_break_in_mid_line(call):
    _, out, _ = call("advise", "--help")
    lines = [line.strip() for line in out.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("Every client evaluates"))
    paragraph = lines[first : lines.index("", first)]
    width = max(map(len, paragraph))
    for line, after in pairwise(paragraph):
        assert len(line) + 1 + len(after.split()[0]) > width - 2


@pytest.mark.parametrize("file", ["run.json", "summary.json", "final/manifest.json"])
def test_a_damaged_run_folder_is_one_sentence(call, kept, tmp_path, file):
    shutil.copytree(kept / "run", tmp_path / "run")
    (tmp_path / "run" / file).write_text("{")
    one_sentence(call("show", tmp_path / "run"), f"{file} is damaged: it is not JSON")


def test_damaged_models_are_found(call, kept, tmp_path):
    shutil.copytree(kept / "run", tmp_path / "run")
    (tmp_path / "run" / "final" / "state.safetensors").write_bytes(b"1")
    words = ["--data", kept / "sites" / "site-1.csv"]
    one_sentence(call("place", tmp_path / "run", *words), "is missing or damaged. Resume the run")


def test_place_and_predict_refuse_unusable_rows_and_names(call, kept, tmp_path):
    (tmp_path / "new.csv").write_text("age,ill\n1,no\n")
    new = ["--data", tmp_path / "new.csv"]
    one_sentence(call("place", kept / "run", *new), "new.csv: there must be a column 'dose'")
    good = ["--data", kept / "sites" / "site-1.csv"]
    near = "Unknown client 'site1'. Did you mean 'site-1'"
    one_sentence(call("predict", kept / "run", "--client", "site1", *good), near)
    one_sentence(call("predict", kept / "run", *good), "name whose model to use")
    one_sentence(call("explain", "clov"), "Unknown name 'clov'. Did you mean 'clove'")
    none = call("place", kept / "run", "--data", tmp_path / "none.csv")
    one_sentence(none, "the file must exist. It does not.")


@pytest.mark.parametrize("pair", ["n_groups=3", "algorithm.=3", ".x=3", "algorithm.n_groups"])
def test_set_must_name_a_table_and_an_option(pair):
    with pytest.raises(ConfigError, match="--set must have the form"):
        parse_sets([pair])


def test_set_reads_numbers_lists_and_words():
    pairs = ["a.x=3", "a.y=[1, 2]", "a.z=true", "a.w=null", "a.v=0.5", "a.u=adam", "b.x='3'"]
    assert parse_sets(pairs) == {
        "a": {"x": 3, "y": [1, 2], "z": True, "w": None, "v": 0.5, "u": "adam"},
        "b": {"x": "3"},
    }


# Why


def test_why_in_words_as_json_and_as_a_picture(call, kept, tmp_path):
    code, out, _ = call("why", kept / "run")
    assert code == 0
    assert "Group 0 (3 clients" in out or "Group 0 (site-" in out
    assert "Each client sent:" in out
    code, out, _ = call("why", kept / "run", "--json")
    found = json.loads(out)
    assert [line["name"] for line in found["groups"]] == ["group 0", "group 1"]
    assert found["split"] == "test"
    if any(line["statements"] for line in found["groups"]):
        code, out, _ = call("why", kept / "run", "--picture", tmp_path / "why.png")
        assert code == 0
        assert (tmp_path / "why.png").exists()


def test_why_without_an_answer_says_what_to_do(call, sites, tmp_path):
    words = ["--data", sites, "--label", "ill", "--algorithm", "ifca", "--groups", "2"]
    words += ["--set", "run.rounds=1", "--no-compare", "--out", tmp_path / "run"]
    assert call("run", *words, "--why", "nothing")[0] == 0
    code, _, err = call("why", tmp_path / "run")
    assert code == 2
    assert "this run did not ask its clients" in err
    assert "run it again with --why" in err
    code, _, err = call("run", *words[:-1], tmp_path / "b", "--why", "label")
    assert code == 2
    assert "why must be 'columns', 'labels', 'predictions' or 'images'. Got 'label'" in err


def test_advise_says_in_what_groups_differ(call, sites):
    code, out, _ = call("advise", sites, "--label", "ill", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["why"]["split"] == "train"
    code, out, _ = call("advise", sites, "--label", "ill", "--why", "nothing")
    assert code == 0
    assert "Each client sent" not in out
