"""FedGEM's recipes: every cell can be built, and a run gives both scores for every method."""

import pytest

from coterie.running.build import build
from coterie.running.loop import run
from coterie_lab import recipes  # noqa: F401 - lists them
from coterie_lab.recipe import find
from coterie_lab.recipes.fedgem import METHODS, describe, scores

SMALL = {"name": "mixture_tight", "n_clients": 4, "n_clusters": 3, "d": 3, "n": 40, "most": 3}


def test_every_cell_is_described():
    for name in ("fedgem-synthetic", "fedgem-real"):
        studies = find(name).studies()
        assert len({study.name for study in studies}) == len(studies)
        for study in studies:
            assert study.describe(700, "paper")["data"]["seed"] == 700


@pytest.mark.parametrize("row", METHODS)
def test_a_cell_gives_both_scores(row):
    ready = build(describe(row, 3, {**SMALL, "separation": 9.0}, 1, "paper"))
    result = run(ready.algorithm, ready.data, ready.settings)
    figures = scores(result, 3 if row == "mosaic" else None)
    assert 0.3 < figures["global_ari"] <= 1
    assert 0.3 < figures["client_ari"] <= 1
    assert figures["components"] >= 2
    assert (figures.get("central_gmm_components") == 3) == (row == "mosaic")
