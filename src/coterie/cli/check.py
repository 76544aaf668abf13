"""coterie check"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, print_json


def check(
    name: Annotated[
        str, typer.Argument(help="Name of a method, or a Python file that defines one.")
    ],
    json: Json = False,
) -> None:
    """Check that a method keeps the contract of all methods.

    The checks cover every engine, resuming, lost replies, new clients and more. The exit code is 1
    if a check fails.

    Examples:

      coterie check clove

      coterie check ./mine.py
    """
    from coterie.catalogue import load_file
    from coterie.checks import check_algorithm
    from coterie.core.algorithm import find

    cls = load_file(Path(name)) if name.endswith(".py") else find(name, {name})
    report = check_algorithm(cls, on_result=None if json else _say)
    if json:
        print_json([result._asdict() for result in report])
    else:
        print(report)
    if not report.passed:
        raise typer.Exit(1)


def _say(result: Any) -> None:
    mark = "ok  " if result.passed else "FAIL"
    print(f"{mark}  {result.check.replace('_', ' ')}", flush=True)
