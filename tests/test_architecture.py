"""Imports point one way: a line of code knows its room."""

import ast
from pathlib import Path

import pytest

import coterie

PACKAGE = Path(coterie.__file__).parent

# Who may import whom; every part may import itself.
ARROWS = {
    "core": set(),
    "metrics": set(),
    "clustering": {"core"},
    "models": {"core"},
    "algorithms": {"core", "clustering", "models"},
    "engines": {"core"},
    "data": {"core"},
    "running": {"core", "metrics", "algorithms", "models", "data", "engines"},
    "report": {"core", "running"},
    "deploy": {"core", "algorithms", "data", "engines", "running"},
    "checks": {"core", "models", "data", "engines", "running", "algorithms"},
    "estimator": {"core", "clustering", "algorithms", "data", "engines"},
    "advice": {"core", "clustering", "algorithms", "data", "engines", "report", "running"},
    "fitted": {"advice", "core", "data", "engines", "report", "running"},
    "experiments": {
        "core",
        "metrics",
        "clustering",
        "algorithms",
        "data",
        "models",
        "report",
        "running",
    },
    "bench": {"core", "algorithms", "clustering", "data", "engines", "models"},
    "cli": {
        "core",
        "advice",
        "algorithms",
        "bench",
        "checks",
        "data",
        "deploy",
        "experiments",
        "fitted",
        "report",
        "running",
    },
}
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ARROWS
)


def imported(path: Path) -> set[str]:
    """Parts of the package that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "coterie":
            names += [f"coterie.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    parts = [name.split(".") for name in names]
    return {
        part[1] for part in parts if part[0] == "coterie" and len(part) > 1 and part[1] in ARROWS
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert imported(path) <= ARROWS[part] | {part}


def test_an_arrow_that_points_back_is_seen(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("from coterie.engines import Simulation\nfrom coterie import data\n")
    assert imported(path) == {"engines", "data"}


def test_methods_stay_short():
    limits = {"fedavg": 60, "ifca": 160, "clove": 160, "survey": 175}
    # These have stages and thirty options; what they share with no other is beside them.
    limits |= {"fedgem": 385, "fedgmi": 540}
    for name, limit in limits.items():
        lines = (PACKAGE / "algorithms" / f"{name}.py").read_text().splitlines()
        assert len(lines) <= limit, name


def test_there_are_at_most_thirty_public_names():
    assert len(coterie.__all__) <= 30
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None
