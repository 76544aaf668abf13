"""Figures as text, picture and page."""

import json
import re

from coterie_lab.bench import goals, report
from coterie_lab.bench.page import page, summarise, write


def results():
    variant = {
        "seconds": 0.5,
        "ratio": 1.0,
        "gflops": 20.0,
        "peak_fraction": 0.2,
        "spread": 0.1,
        "samples": [0.5],
        "foreign": 0.01,
        "repeated": 0,
        "plan": None,
        "agreement": {"largest": 0.0, "relative": 0.0, "moved": 0.1, "tolerance": 1e-4},
    }
    fast = variant | {"seconds": 0.1, "ratio": 5.0, "foreign": 0.2, "memory": {"peak_mb": 500.0}}
    found = {
        "schema": 1,
        "machine": {
            "processor": "Some CPU",
            "cores": 2,
            "memory_gb": 8.0,
            "torch": "2",
            "python": "3",
        },
        "settings": {"repeats": 5, "threads": None, "scale": 1.0},
        "data": "digits",
        "foreign_limit": 0.08,
        "workloads": {
            "W1": {
                "title": "MLP",
                "threads": 2,
                "clients": 100,
                "clients_of_workload": 100,
                "gflop": 12.7,
                "peak_gflops": 100.0,
                "variants": {
                    "plain": variant,
                    "ours": fast,
                    "gram": {"absent": "no such kernel"},
                    "vmap": {"error": "differs"},
                },
            },
            "W9": {"error": "out of memory"},
        },
        "extras": {
            "scale100k": {"error": "no time"},
            "server": {
                "mean": {"clients": 9, "variants": {"ours": {"seconds": 1.0, "ratio": 3.0}}},
                "cluster": {"seconds": 1.0, "peak_mb": 1.0},
                "choice": {"seconds": 2.0, "peak_mb": 1.0, "clients": 100_000, "rows": 5_000},
                "matching": {"error": "did not end within 900 s"},
            },
        },
        "growth": {
            "clients": {
                "what": "clients",
                "sizes": [100, 200],
                "seconds": [1.0, 2.0],
                "start": 0.0,
                "slope": 0.01,
                "deviation": 0.0,
            }
        },
        "peers": {
            "flower": {
                "package": "flwr 1.41",
                "W1": {"seconds": 3.0, "first_seconds": 9.0, "ours_seconds": 0.1, "ratio": 30.0},
            },
            "pfl": {"error": "cannot be installed"},
        },
    }
    found["goals"] = goals.of_results(found)
    return json.loads(json.dumps(found))  # what is written can be read


def test_the_tables_say_what_was_found_and_what_failed():
    text = report.markdown(results())
    for words in (
        "| ours | 100 ms | x5.00 | 20 % | 10 % | 20 % *disturbed* | 0e+00 | 500 MB |",
        "no such kernel",
        "**W9** could not be measured: out of memory",
        "failed: did not end within 900 s",
        "sample of 5,000",
        "x30.0",
        "not measured: cannot be installed",
        "| W1 | general | speed-up over the plain loop | x4.00 | not measured | twins | **no** |",
        "| W1 | special | speed-up over the plain loop | x5.50 | x5.00 | ours | nearly |",
    ):
        assert words in text


def test_a_trial_is_called_one():
    found = results()
    found["settings"]["scale"] = 0.1
    assert "not comparable" in report.markdown(found)
    assert "not comparable" in page(found)


def test_the_page_is_written_from_the_figures(tmp_path):
    path = tmp_path / "performance.md"
    write(results(), path)
    text = path.read_text()
    assert "| workload | content | loop, 2 threads | Coterie | speed-up | best |" in text
    assert "| W1 | MLP | 500 ms | 100 ms | x5.0 | - |" in text
    assert "| W9 |  | - | - | - | - |" in text  # could not be measured
    assert "Not measured in this run: W2" in text
    assert "(performance.png)" in text
    assert (tmp_path / "performance.png").stat().st_size > 5000
    assert not re.search(r"\{\w*\}", text)  # nothing is left to fill in


def test_numbers_of_threads_stand_side_by_side():
    work = results()["workloads"]["W1"]
    slow = work["variants"]["plain"] | {"seconds": 0.4}
    single = work | {"threads": 1, "variants": work["variants"] | {"plain": slow}}
    text = summarise({"W1": work, "W1@1": single})
    # The fastest loop takes 0.4 s, the fastest round of Coterie 0.1 s.
    assert "| W1 | MLP | 400 ms | 100 ms | x5.0 | 500 ms | 100 ms | x5.0 | x4.0 |" in text


def test_nothing_measured_is_a_page_too():
    empty = results() | {"workloads": {}, "extras": {}, "growth": {}, "peers": {}, "goals": []}
    assert "Not measured in this run" in page(empty)
    assert not report.picture(empty, None)
