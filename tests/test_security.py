"""The threat model names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
TABLE = [line for line in TEXT.splitlines() if line.startswith("|")]


def test_every_threat_has_a_test():
    assert len(TABLE) > 20
    for row in TABLE[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert re.search(r"`(test_|tests/)", cells[3]), row


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT))))
def test_a_named_test_exists(name):
    found = [p for p in (ROOT / "tests").rglob("*.py") if f"def {name}(" in p.read_text()]
    assert len(found) == 1, name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/\S+\.py)`", TEXT))))
def test_a_named_file_of_tests_exists(name):
    assert (ROOT / name).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"the stud(?:y|ies) `(\w+)`", TEXT))))
def test_a_named_study_exists(name):
    assert (ROOT / "src" / "coterie_lab" / "studies" / f"{name}.py").exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((docs/\S+?\.md)\)", TEXT))))
def test_a_linked_page_exists(path):
    assert (ROOT / path).exists()
