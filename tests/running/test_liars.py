"""Whole runs in which one client sends what cannot be, or is asked no more."""

import pytest
import torch

from coterie.checks import tiny
from coterie.core.algorithm import REGISTRY, find
from coterie.core.tree import tree_map
from coterie.running import loop
from coterie.running.build import Settings
from small_runs import ready

LIAR = "client-1"
pytestmark = pytest.mark.filterwarnings("ignore")


def play(monkeypatch, lie=None, struck=None):
    """Let one client lie about the parts of a reply, or be asked no more from some round on."""

    class Lying(loop.Simulation):
        def begin(self, round):
            super().begin(round)
            if struck is not None and round >= struck:
                self.record.counts[LIAR] = self.policy.strikes

        def exchange(self, call):
            for position, reply in super().exchange(call):
                own = call.ids[position] == self.names.index(LIAR)
                if lie is not None and bool(own.any()):
                    reply = tree_map(torch.clone, reply)
                    for name in lie.keys() & reply.keys():
                        reply[name][own] = lie[name]
                yield position, reply

    monkeypatch.setattr(loop, "Simulation", Lying)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_run_ends_without_a_client_that_is_asked_no_more(name, monkeypatch):
    play(monkeypatch, struck=-1)
    problem = tiny()
    result = loop.run(find(name).example(problem), problem.data, Settings(2, why="nothing"))
    assert [line["client"] for line in result.clients] == list(problem.data.names)
    score = "accuracy" if "accuracy" in result.clients[0] else "surprise"
    assert result.clients[problem.data.names.index(LIAR)][score] is None


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"accuracy": 50.0}, "sent 50 in 'accuracy', which is between 0 and 1"),
        ({"accuracy": -1e30}, "sent -1e+30 in 'accuracy', which is between 0 and 1"),
        ({"loss": -1e30}, "sent -1e+30 in 'loss', which is 0 or more"),
        ({"rows": -1.0}, "sent -1 in 'rows', which is 0 or more"),
    ],
)
def test_scores_that_nobody_can_have_do_not_count(lie, why, monkeypatch):
    one = ready("clove", 2)
    play(monkeypatch, lie)
    result = loop.run(one.algorithm, one.data, one.settings)
    assert {fault["why"] for line in result.rounds for fault in line["faults"]} == {why}
    assert {fault["client"] for line in result.rounds for fault in line["faults"]} == {LIAR}
    assert 0 <= result.summary["accuracy"]["mean"] <= 1
    assert result.summary["loss"] >= 0


@pytest.mark.parametrize("part", ["scatter", "mean", "count"])
def test_a_survey_with_values_that_are_no_numbers_does_not_end_the_run(part, monkeypatch):
    one = ready("census", 2)
    play(monkeypatch, {part: torch.nan})
    result = loop.run(one.algorithm, one.data, one.settings)
    assert result.summary["rounds"] == 2
