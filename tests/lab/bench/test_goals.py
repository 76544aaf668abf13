"""A goal is nearly met from 85 % on; the floor is met or not."""

from coterie_lab.bench import goals


def found(threads, **ratios):
    variants = {
        n: {"seconds": 1 / r, "ratio": r, "peak_fraction": r / 10} for n, r in ratios.items()
    }
    return {"threads": threads, "variants": variants}


def test_the_best_of_the_variants_a_goal_names_counts():
    lines = goals.of_workload("W1", found(2, plain=1.0, ours=3.0, twins=3.5, gram=6.0))
    general, special, peak, floor = lines
    assert (general["kind"], general["by"]) == ("general", "twins")
    assert (general["met"], general["close"]) == (False, True)  # 3.5 of 4
    assert (special["kind"], special["by"], special["met"]) == ("special", "gram", True)
    assert (peak["measure"], peak["reached"], peak["met"]) == ("peak_fraction", 0.6, True)
    assert (floor["kind"], floor["reached"], floor["met"]) == ("floor", 3.0, True)


def test_a_goal_is_not_even_close_below_85_per_cent():
    lines = goals.of_workload("W1", found(2, plain=1.0, ours=3.3, twins=3.39, gram=4.6))
    assert [line["close"] for line in lines] == [False, False, False, True]
    assert [line["met"] for line in lines] == [False, False, False, True]


def test_goals_are_those_of_the_number_of_threads():
    lines = goals.of_workload("W1@1", found(1, plain=1.0, ours=2.5, twins=2.5, gram=3.5))
    assert [line["goal"] for line in lines] == [2.5, 0.45, 3.5, 0.95]


def test_slower_than_the_floor_is_a_failure_without_allowance():
    lines = goals.of_workload("usernet", found(2, plain=1.0, ours=0.94))
    assert [(line["kind"], line["met"], line["close"]) for line in lines] == [
        ("floor", False, False)
    ]


def test_what_was_not_measured_is_not_met():
    missing = found(2, plain=1.0)
    missing["variants"]["ours"] = {"error": "differs"}
    lines = goals.of_workload("W9", missing | {"threads": 1})
    assert all(line["reached"] is None and not line["met"] for line in lines)


def test_memory_peers_and_growth_have_goals():
    lines = goals.of_results(
        {
            "workloads": {},
            "extras": {"ifca4800": {"memory": {"at_rest_mb": 50.0, "peak_mb": 701.0}}},
            "growth": {"clients": {"deviation": 0.21}},
            "peers": {"flower": {"W1": {"ratio": 16.0}}, "pfl": {"error": "absent"}},
        }
    )
    assert [(line["where"], line["met"]) for line in lines] == [
        ("ifca4800", True),
        ("ifca4800", False),
        ("growth clients", False),
        ("W1 against flower", True),
    ]
