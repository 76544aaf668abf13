"""The page of what leaves a client says what clients send."""

from pathlib import Path

import pytest

from coterie_lab.leaving import PAGE, known_methods, list_parts, write_page

ROOT = Path(__file__).parents[2]


def test_parts_are_told_apart():
    kinds = {part.name: part.kind for part in list_parts("fedproto") if part.phase != "evaluation"}
    assert kinds == {"prototypes": "per class", "counts": "per class"}
    kinds = {part.name: part.kind for part in list_parts("fedavg") if part.phase != "evaluation"}
    assert kinds == {"params": "model", "n": "count"}


def test_the_page_has_every_method():
    text = (ROOT / PAGE).read_text()
    for method in known_methods():
        assert f"| `{method}` |" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_the_methods_send():
    assert (ROOT / PAGE).read_text() == write_page(known_methods())
