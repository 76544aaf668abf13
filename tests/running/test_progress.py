import io

import pytest

import coterie
from coterie.data import blobs
from coterie.running.progress import (
    Clock,
    Live,
    Plain,
    Silent,
    cells,
    choose_progress,
    duration,
    megabytes,
)

LINE = {
    "round": 3,
    "loss": 0.51234,
    "accuracy": 0.876,
    "ari": 1.0,
    "sizes": [4, 0, 2],
    "churn": 0.25,
    "bytes": 2_500_000,
}


def test_the_cells_of_a_round():
    assert cells(LINE, 10, 75.0) == (
        "3/10",
        "0.5123",
        "87.6%",
        "1.00",
        "4/2",
        "25%",
        "",
        "2.5 MB",
        "1 min 15 s",
    )


def test_clients_whose_replies_were_left_out_are_named():
    faults = [{"client": name, "task": "t", "why": "w"} for name in ("ann", "bob", "ann", "cat")]
    assert cells({**LINE, "faults": faults[:3]}, 10, 0.0)[6] == "ann, bob"
    assert cells({**LINE, "faults": faults}, 10, 0.0)[6] == "ann, bob and 1 more"


def test_what_is_unknown_stays_empty():
    nothing = {"round": 1, "bytes": 0, "loss": None, "ari": float("nan")}
    assert cells(nothing, 2, 0.0) == ("1/2", "", "", "", "", "", "", "0 B", "0 s")


def test_an_abandoned_round_is_named():
    assert cells({**LINE, "abandoned": "nobody answered"}, 10, 0.0)[4] == "abandoned"


def test_plain_lines(capsys):
    plain = Plain()
    plain.start("clove", 4, 2)
    plain.round({"round": 3, "loss": 0.5, "bytes": 900})
    plain.say("A word.")
    plain.end()
    first, line, word = capsys.readouterr().out.splitlines()
    assert first == "clove: rounds 3 to 4"
    assert line == "round 3/4  loss 0.5000  sent 900 B  time left 0 s"
    assert word == "A word."


def test_a_run_with_nothing_left_says_so(capsys):
    Plain().start("clove", 5, 5)
    assert capsys.readouterr().out == "clove: all 5 rounds are done\n"


def test_the_live_table_shows_the_newest_rounds():
    from rich.console import Console

    live = Live()
    live.start("clove", 20, 0)
    try:
        for number in range(1, 15):
            live.round({**LINE, "round": number})
    finally:
        live.end()
    text = io.StringIO()
    Console(file=text, width=120).print(live.table())
    assert "clove" in text.getvalue()
    assert "14/20" in text.getvalue()
    assert " 2/20" not in text.getvalue()  # twelve rounds are in view


def test_progress_is_lines_outside_a_terminal_and_silent_if_unwanted():
    mine = Plain()
    assert choose_progress(mine) is mine
    assert type(choose_progress(False)) is Silent
    assert type(choose_progress(True)) is Plain


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e12, "2000.0 GB")]
)
def test_bytes_for_people(amount, text):
    assert megabytes(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min")]
)
def test_seconds_for_people(seconds, text):
    assert duration(seconds) == text


def test_time_left_is_that_of_everything(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("coterie.running.progress.time.monotonic", lambda: now[0])
    clock = Clock()
    clock.expect(30)  # three trainings of ten rounds
    left = []
    for _ in range(3):
        clock.begin(10, 0)
        for number in range(1, 11):
            now[0] += 2
            left.append(clock.pass_round(number))
        clock.finish()
    assert left == [2.0 * (29 - i) for i in range(30)]


def test_time_left_after_an_early_stop_and_a_resume(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("coterie.running.progress.time.monotonic", lambda: now[0])
    clock = Clock()
    clock.expect(20)
    clock.begin(10, 6)  # six rounds were run before
    now[0] += 1
    assert clock.pass_round(7) == 13
    clock.finish()  # three rounds were not needed
    clock.begin(10, 0)
    now[0] += 1
    assert clock.pass_round(1) == 9


def test_fit_shows_one_line_per_training_and_where_it_is_kept(tmp_path, capsys):
    data = blobs(n_groups=2, clients_per_group=2, n=20)
    coterie.fit(data, "ifca", n_groups=2, rounds=2)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["ifca", "local_only", "fedavg"]
    assert lines[-1] == "Not saved; fit.save(FOLDER) keeps it."
    coterie.fit(data, "fedavg", rounds=1, out=tmp_path / "run")
    assert capsys.readouterr().err.splitlines()[-1] == f"Saved to {tmp_path / 'run'}."
    coterie.fit(data, "fedavg", rounds=1, quiet=True)
    assert capsys.readouterr() == ("", "")
