"""Times are medians of samples taken in turn, and disturbed ones are taken again."""

import pytest

from coterie_lab.bench import measure
from coterie_lab.bench.measure import RETRIES, Sample, Timing, time_in_turn


def test_a_timing_is_the_median_and_its_spread():
    # 1, 2, 6: median 2, (6 - 1) / 2 = 2.5.
    timing = Timing([Sample(6.0, 0.0), Sample(1.0, 0.05), Sample(2.0, None)], 0)
    assert timing.seconds == 2.0
    assert timing.spread == 2.5
    assert timing.foreign == 0.05


def test_variants_take_turns_after_one_call_that_is_not_timed():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}

    def take(run, calls):
        run()
        return Sample(1.0, 0.0)

    timings = time_in_turn(runs, repeats=2, take=take)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]  # warm-up, trial, then in turn
    assert [len(timing.samples) for timing in timings.values()] == [2, 2]


def test_short_calls_are_timed_in_a_row():
    asked = []

    def take(run, calls):
        asked.append(calls)
        return Sample(0.01, 0.0)

    time_in_turn({"a": lambda: None}, repeats=1, take=take)
    assert asked[0] == 1
    assert asked[1] * 0.01 >= measure.SHORTEST


def test_a_disturbed_sample_is_taken_again_and_the_quietest_counts():
    shares = iter([0.0, 0.5, 0.3, 0.01, 0.0])

    def take(run, calls):
        share = next(shares)
        return Sample(1.0 + share, share)

    timing = time_in_turn({"a": lambda: None}, repeats=2, take=take)["a"]
    assert timing.samples == [Sample(1.01, 0.01), Sample(1.0, 0.0)]
    assert timing.repeated == 2


def test_repeats_are_bounded():
    count = 0

    def take(run, calls):
        nonlocal count
        count += 1
        return Sample(1.0, 0.9)

    timing = time_in_turn({"a": lambda: None}, repeats=5, take=take)["a"]
    assert count == 1 + 5 + 5  # trial, samples, and as many again
    assert timing.repeated == 5
    count = 0
    time_in_turn({"a": lambda: None}, repeats=1, take=take)
    assert count == 1 + 1 + min(RETRIES, 1)
    assert timing.foreign == 0.9


def test_own_work_is_not_foreign():
    def work():
        return sum(i * i for i in range(300_000))

    before = measure.own_seconds()
    found = measure.sample(work, 5)
    assert measure.own_seconds() > before
    assert found.seconds > 0
    assert found.foreign is None or 0 <= found.foreign <= 1


def test_without_counters_the_share_of_others_is_unknown(monkeypatch):
    monkeypatch.setattr(measure, "busy_seconds", lambda: None)
    assert measure.sample(lambda: None).foreign is None


def test_the_peak_and_memory_are_positive():
    assert measure.gemm_peak(repeats=1, size=64) > 0
    assert measure.peak_memory() >= measure.memory_now() * 0.5 > 0


def test_the_machine_is_named_by_its_class_alone():
    import socket

    found = measure.machine()
    assert found["cores"] >= 1
    assert socket.gethostname() not in str(found) or len(socket.gethostname()) < 4
    assert pytest.approx(found["memory_gb"], abs=1e6) == found["memory_gb"]
