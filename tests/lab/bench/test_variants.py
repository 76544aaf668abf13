"""All variants of a workload give the same models, and one that does not is found out."""

from dataclasses import replace

import pytest
import torch

from coterie.core.training import LocalSGD
from coterie_lab.bench import block, variants
from coterie_lab.bench.workloads import NAMES


def small(name, clients=4):
    """A workload with few clients, and little work where its network is large."""
    work = NAMES[name]
    local = LocalSGD(learning_rate=0.1, steps=2) if name == "W4" else work.local
    return variants.prepare(replace(work, clients=clients, timed=None, local=local, samples=40))


@pytest.mark.parametrize("name", ["W1", "W1-custom", "W4", "W5", "W7-vae", "W9", "usernet"])
def test_our_engine_takes_the_plain_loops_steps(name):
    problem = small(name)
    plain = variants.make("plain", problem).run()
    for variant in ("ours", "loop"):
        found = variants.agreement(problem, variants.make(variant, problem).run(), plain)
        assert found.holds, variant
        assert found.largest < 1e-5
        assert found.moved > 1e-4


def test_other_batches_are_noticed():
    problem = small("W9")
    plain = variants.make("plain", problem).run()
    wrong = variants.make("plain", replace(problem, steps=problem.steps.flip(2).flip(1))).run()
    assert not variants.agreement(problem, wrong, plain).holds


def test_a_model_that_is_not_a_number_is_noticed():
    problem = small("W9")
    plain = variants.make("plain", problem).run()
    broken = {leaf: value * torch.nan for leaf, value in plain.items()}
    assert not variants.agreement(problem, broken, plain).holds


def test_a_model_that_did_not_move_is_noticed():
    problem = small("W9")
    plain = variants.make("plain", problem).run()
    start = {leaf: value[None] for leaf, value in problem.state.params.items()}
    found = variants.agreement(problem, start, plain)
    assert found.relative == pytest.approx(1.0)
    assert not found.holds


def test_the_plain_loop_is_the_mean_of_the_clients():
    # One client alone, twice, then both: the mean of two rounds of one.
    problem = small("W9", clients=2)
    both = variants.make("plain", problem).run()
    parts = []
    for i in (0, 1):
        one = problem.data.subset(torch.tensor([i]))
        batch = one.gather("train", torch.tensor([0]))
        alone = replace(problem, data=one, batch=batch, steps=problem.steps[i : i + 1])
        parts.append(variants.make("plain", alone).run())
    for leaf, value in both.items():
        assert torch.allclose(value, (parts[0][leaf] + parts[1][leaf]) / 2, atol=1e-6)


def test_a_variant_that_fails_does_not_take_the_others_along(monkeypatch):
    original = variants.make

    def make(name, problem, exact=False):
        if name == "vmap":
            raise RuntimeError("broken")
        if name == "twins":
            raise variants.Unavailable("not here")
        if name == "loop":
            found = original("plain", problem, exact)
            return found._replace(run=lambda: {k: v + 1 for k, v in found.run().items()})
        return original(name, problem, exact)

    monkeypatch.setattr(variants, "make", make)
    monkeypatch.setattr(block.measure, "gemm_peak", lambda: 1.0)
    found = block.times({"name": "W9", "scale": 0.004, "repeats": 1})["variants"]
    assert "broken" in found["vmap"]["error"]
    assert found["twins"] == {"absent": "not here"}
    assert "differs" in found["loop"]["error"]
    assert "seconds" not in found["loop"]
    assert found["plain"]["ratio"] == 1.0
    assert found["ours"]["ratio"] > 0


def test_layouts_are_tried_where_there_are_convolutions():
    assert "channels_last" in variants.names_of(NAMES["W3"])
    assert "channels_last" not in variants.names_of(NAMES["W1"])
