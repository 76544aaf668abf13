"""Imports point one way: a line of code knows its room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

PACKAGE = Path(coterie.__file__).parent

# Who may import whom; every part may import itself.
ARROWS = {
    "core": set(),
    "metrics": set(),
    "measured": set(),
    "clustering": {"core"},
    "evidence": {"core"},
    "models": {"core"},
    "algorithms": {"core", "clustering", "evidence", "models"},
    "engines": {"core"},
    "data": {"core"},
    "running": {
        "core",
        "metrics",
        "clustering",
        "evidence",
        "algorithms",
        "models",
        "data",
        "engines",
    },
    "report": {"core", "evidence", "running"},
    "deploy": {"core", "data", "engines", "running"},
    "checks": {"core", "models", "data", "engines", "running", "algorithms"},
    "estimator": {"core", "clustering", "algorithms", "data", "engines"},
    "advice": {
        "core",
        "measured",
        "clustering",
        "evidence",
        "algorithms",
        "data",
        "engines",
        "report",
        "running",
    },
    "export": {"algorithms", "core", "evidence", "fitted", "running"},
    "fitted": {"advice", "core", "evidence", "data", "engines", "export", "report", "running"},
    "catalogue": {"core", "algorithms", "data", "measured", "models"},
    "quickstart": {"catalogue", "core", "report", "running"},
    "cli": {
        "core",
        "advice",
        "algorithms",
        "catalogue",
        "checks",
        "data",
        "deploy",
        "export",
        "fitted",
        "quickstart",
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


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_the_library_does_not_know_the_laboratory(path):
    modules = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]
    ]
    assert not [name for name in modules if name.split(".")[0] == "coterie_lab"]


def test_the_library_works_without_the_laboratory():
    code = (
        "import sys; sys.modules['coterie_lab'] = None\n"
        "import importlib.metadata as m; m.entry_points = lambda **_: ()\n"
        "import coterie, coterie.cli.app\n"
        "from coterie.catalogue import catalogue\n"
        "print(sorted(catalogue()['recipes']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['quickstart']"


def test_an_arrow_that_points_back_is_seen(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("from coterie.engines import Simulation\nfrom coterie import data\n")
    assert imported(path) == {"engines", "data"}


def test_there_are_at_most_thirty_public_names():
    assert len(coterie.__all__) <= 30
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None


def test_the_loop_asks_no_federation_what_kind_it_is():
    tree = ast.parse((PACKAGE / "running" / "loop.py").read_text())
    asked = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr")
    ]
    assert not [text for text in asked if "(fed" in text]


def test_nobody_pretends_to_be_a_method():
    names = ("__self__ = ", "__task__ = ", "__name__ = ", "__self__, ")
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "core" / "client.py":
            text = path.read_text()
            assert not any(name in text for name in names), path
