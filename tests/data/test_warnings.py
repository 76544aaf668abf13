"""Each warning on data that deserve it, and silence on data that do not."""

import numpy as np
import pytest

import coterie
from coterie.data import from_table
from coterie.data.warnings import warn_of_loss

N = 80


def table(task="classification", **more):
    """Four ordinary clients; `more` adds or replaces columns, by a function of client and rng."""
    rng = np.random.default_rng(0)
    columns = {}
    for i in range(4):
        x = rng.normal(size=N)
        score = x + rng.normal(size=N)
        own = {
            "site": np.full(N, f"site-{i}"),
            "age": rng.integers(20, 90, N),
            "pressure": rng.normal(120, 15, N),
            "ward": rng.choice(["a", "b", "c"], N),
            "x": x,
            "y": score if task == "regression" else np.where(score > 0, "ill", "well"),
        }
        own |= {name: make(i, rng, own) for name, make in more.items()}
        for name, values in own.items():
            columns.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def warned(columns, **options):
    data = from_table(columns, client="site", label="y", **options)
    return [(warning.kind, warning.column) for warning in data.warnings]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_ordinary_table_is_silent(task):
    assert warned(table(task)) == []


def noisy(i, rng, own):
    return own["y"] + 0.3 * rng.normal(size=N)


def code(i, rng, own):
    wrong = rng.random(N) < 0.005
    return np.where((own["y"] == "ill") ^ wrong, 7.0, 3.0)


CASES = {
    "copy of a number": ("regression", "c", noisy, "copy"),
    "copy of a label": ("classification", "c", code, "copy"),
    "counter": ("classification", "c", lambda i, rng, own: np.arange(N) + 1, "identifier"),
    "names": (
        "classification",
        "c",
        lambda i, rng, own: np.array([f"p{i}{j}" for j in range(N)]),
        "identifier",
    ),
    "numbers of patients": (
        "classification",
        "c",
        lambda i, rng, own: rng.permutation(10**6)[:N] + i * 10**6,
        "identifier",
    ),
    "station": ("classification", "c", lambda i, rng, own: np.full(N, f"s{i}"), "constant"),
    "height": ("classification", "c", lambda i, rng, own: np.full(N, 40.0 + i), "constant"),
    "grams": (
        "classification",
        "c",
        lambda i, rng, own: rng.normal(75, 12, N) * (1000 if i == 2 else 1),
        "units",
    ),
    "mmol": (
        "classification",
        "c",
        lambda i, rng, own: rng.lognormal(np.log(200), 0.2, N) / (38.67 if i < 1 else 1),
        "units",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_column_that_deserves_it(case):
    task, name, make, kind = CASES[case]
    columns = table(task, **{name: make})
    assert warned(columns) == [(kind, name)]
    assert warned(columns, drop=[name]) == []


SILENT = {
    "strong input": ("regression", lambda i, rng, own: own["y"] + rng.normal(size=N)),
    "good test": ("classification", lambda i, rng, own: (own["y"] == "ill") + rng.normal(size=N)),
    "whole numbers": ("classification", lambda i, rng, own: rng.integers(0, 400, N)),
    "same everywhere": ("classification", lambda i, rng, own: np.full(N, 1.0)),
    "constant in one": (
        "classification",
        lambda i, rng, own: np.full(N, 3.0) if i == 0 else rng.integers(0, 4, N),
    ),
    "richer clients": (
        "classification",
        lambda i, rng, own: rng.lognormal(10 + i, 1.0, N),
    ),
    "remarks": (
        "classification",
        lambda i, rng, own: np.array([f"case {rng.integers(10**9)} seen" for _ in range(N)]),
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_a_column_that_does_not(case):
    task, make = SILENT[case]
    assert warned(table(task, c=make)) == []


def walk(i, rng, own):
    return np.cumsum(rng.normal(size=N))


def test_ordered_rows_and_a_random_split():
    columns = table("regression", y=walk, hour=lambda i, rng, own: rng.permutation(N) % 24)
    assert warned(columns) == [("order", "y")]
    columns["day"] = np.tile(np.arange(N), 4)
    assert warned(columns, time="day") == []
    assert warned(columns, unit="day", drop=["hour"]) == []
    blocks = table(y=lambda i, rng, own: np.repeat(rng.permutation(16) % 3, 5))
    assert warned(blocks) == [("order", "y")]
    assert warned(table(y=lambda i, rng, own: np.sort(own["y"]))) == []  # sorted by the label


def test_classes_of_one_client():
    rare = table(y=lambda i, rng, own: np.where((np.arange(N) < 5) & (i == 1), "odd", own["y"]))
    data = from_table(rare, client="site", label="y")
    assert [str(warning) for warning in data.warnings] == [
        "1 class of 'y' occurs in one client only: 'odd' (client 'site-1'). No other client can "
        "learn or test it: merge classes, or leave these rows out."
    ]


def test_a_warning_is_one_line_with_column_figure_and_remedy():
    data = from_table(table("regression", c=noisy), client="site", label="y")
    (warning,) = data.warnings
    assert warning.text == (
        "Column 'c' is almost the target 'y' (correlation 0.98). If it is known only together "
        "with 'y', leave it out: drop=['c']."
    )


def test_loss_that_rises():
    rising = {r: 0.4 + 0.02 * abs(r - 3) for r in range(1, 31)}
    assert "rises from 0.4 in round 3 to 0.94 in round 30" in str(warn_of_loss(rising))
    assert warn_of_loss({r: 1 / r for r in range(1, 31)}) is None
    assert warn_of_loss(dict.fromkeys(range(1, 31), 0.4)) is None
    assert warn_of_loss({**dict.fromkeys(range(1, 30), 0.4), 30: 0.9}) is None  # one bad round


def test_rising_loss_of_a_run_is_in_its_summary(tmp_path):
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=(24, 12)) for _ in range(3)]
    ys = [rng.integers(0, 2, 24) for _ in range(3)]  # nothing to learn
    data = coterie.from_arrays(xs, ys)
    fit = coterie.fit(data, "fedavg", rounds=25, quiet=True, out=tmp_path / "run")
    assert [warning.kind for warning in fit.warnings] == ["loss"]
    assert str(fit.warnings[0]).startswith("The held-out loss of one model for all rises")
    assert [w.text for w in coterie.load(tmp_path / "run").warnings] == [
        w.text for w in fit.warnings
    ]


def test_large_tables_of_which_evenly_spaced_rows_are_looked_at(monkeypatch):
    monkeypatch.setattr("coterie.data.warnings.MOST", 90)
    assert warned(table()) == []
    for case, (task, name, make, kind) in CASES.items():
        assert warned(table(task, **{name: make})) == [(kind, name)], case
