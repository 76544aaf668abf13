"""The examples in README, CONTRIBUTING and docs/ run, and print what the pages say they print.

Blocks of a page run in order, in one namespace and one temporary folder: `python` blocks as they
are, `$ coterie ...` lines of `console` blocks through the command line. A `text` block right after
a `python` block, and the lines below a command, are what must be printed: `...` stands for
anything, white space is not compared, and figures with decimals may differ by as much as `near`
allows. Blocks inside `<!-- hidden ... -->` run,
too; a block below `<!-- skip -->` does not.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import coterie
from coterie import algorithms  # noqa: F401 - lists the methods before a page adds its own
from coterie.cli import main
from coterie.core.algorithm import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DECIMAL = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")
RULE = re.compile(r"-{3,}")
GAP = "\0"  # instead of three dots
PIECES = re.compile(rf"({GAP}|-{{3,}}|{DECIMAL.pattern}|\s+)")
TIMES = re.compile(r"\s?(s|ms|min|seconds?|minutes?)\b")


class Block(NamedTuple):
    kind: str
    body: str
    line: int
    expected: str | None = None


def blocks(text: str) -> list[Block]:
    """The code of a page, each piece with what it is to print."""
    found: list[Block] = []
    end = 0
    for fence in FENCE.finditer(text):
        kind, body = fence.groups()
        between, end = text[end : fence.start()], fence.end()
        line = text.count("\n", 0, fence.start()) + 1
        if between.rstrip().endswith("<!-- skip -->"):
            continue
        if kind == "text" and not between.strip() and found and found[-1].kind == "python":
            found[-1] = found[-1]._replace(expected=body)
        elif kind == "python":
            found.append(Block(kind, body, line))
        elif kind == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                if command.startswith("coterie "):
                    found.append(Block(kind, command, line, expected.strip() or None))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    known, names = dict(REGISTRY), {"__name__": f"docs.{page.stem}"}
    try:
        for block in blocks(page.read_text()):
            where = f"{page.name}, line {block.line}"
            printed = io.StringIO()
            # What Python shows on stderr, such as progress, is not part of the page.
            aside = io.StringIO() if block.kind == "python" else printed
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(aside):
                if block.kind == "python":
                    code = "\n" * block.line + block.body  # tracebacks name the page's line
                    exec(compile(code, str(page), "exec"), names)
                else:
                    status = command(block.body, monkeypatch)
            if block.kind == "console":
                wanted = 2 if "Error:" in (block.expected or "") else 0
                assert status == wanted, f"{where}: {block.body}\n{printed.getvalue()}"
            if block.expected is not None and not agrees(block.expected, printed.getvalue()):
                pytest.fail(f"{where} shows\n{block.expected}\nbut it is\n{printed.getvalue()}")
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)


def agrees(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for the last digits of figures."""
    pattern, wanted = "", []
    for piece in PIECES.split(re.sub(r"\s*\.{3}\s*", GAP, leave_out_times(shown.strip()))):
        if DECIMAL.fullmatch(piece):
            wanted.append(piece)
            pattern += f"({DECIMAL.pattern})"
        elif piece.isspace():
            pattern += r"\s+"
        else:
            other = "-+" if RULE.fullmatch(piece) else re.escape(piece)
            pattern += ".*?" if piece == GAP else other
    found = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    if found is None:
        return False
    for place, figure in enumerate(wanted, start=1):
        after = printed.strip()[found.end(place) :]
        if not TIMES.match(after) and not near(figure, found[place], after.startswith("%")):
            return False
    return True


def leave_out_times(shown: str) -> str:
    """A page without the last column of tables in which that is a time."""
    timed, lines = False, []
    for line in shown.splitlines():
        timed = line.endswith("  seconds") or (timed and bool(line))
        lines.append(re.sub(r"\d+\.\d+$", "...", line) if timed else line)
    return "\n".join(lines)


def near(shown: str, printed: str, percent: bool = False) -> bool:
    """Whether a figure on a page is right: other processors round otherwise, and training adds up.

    Percentages may differ by 1.5 points, other figures by 5 % or two units of the last digit shown.
    """
    digits = len(shown.split("e")[0].partition(".")[2])
    power = int(shown.partition("e")[2] or 0)
    allowed = 1.5 if percent else max(0.05 * abs(float(shown)), 2.001 * 10.0 ** (power - digits))
    return abs(float(shown) - float(printed)) <= allowed


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("accuracy 96.3%, loss 0.120", "accuracy 95.0%,\nloss 0.122", True),
        ("accuracy 96.3%", "accuracy 94.7%", False),
        ("loss 0.120", "loss 0.127", False),
        ("loss 2.10", "loss 2.20", True),
        ("took 3.1 s for 4 clients", "took 99.9 s for 4 clients", True),
        ("took 3.1 s for 4 clients", "took 3.1 s for 5 clients", False),
        ("...\n0.5 of all\n...", "first\n0.51 of all\nlast", True),
        ("...\n0.5 of all\n...", "0.5 of all", True),
        (
            "run  seconds\n---  -------\na  1.0\nb  2.0\n\n0.5",
            "run  seconds\n-  -\na 9.1\nb 8.7\n0.5",
            True,
        ),
        ("accuracy is 98.6%.\n...", "accuracy is 98.6%.\n\nSaved", True),
        ("a  b\n---  ---\n1.0  x", "a    b\n-----  -\n1.0    x", True),
    ],
)
def test_figures_are_compared_with_a_tolerance(shown, printed, same):
    assert agrees(shown, printed) == same


def command(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line on a line; its exit code."""
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_reference_has_every_public_name_and_no_other():
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: coterie\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(coterie.__all__)


def test_the_reference_lists_members_that_exist():
    text = (ROOT / "docs" / "reference.md").read_text()
    found = re.findall(r"^\.\. autoclass:: (\S+)\n   :members: (.+)$", text, re.MULTILINE)
    assert found
    for place, members in found:
        module, _, name = place.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        for member in members.split(", "):
            known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
            assert member in known, f"{place} has no {member}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
