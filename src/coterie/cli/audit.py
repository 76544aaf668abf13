"""coterie audit"""

from typing import Annotated

import typer

from coterie.cli.options import Folder, Json, print_json


def audit(
    folder: Folder,
    expect: Annotated[
        str | None,
        typer.Option(help="Last hash of an earlier audit, which the record must contain."),
    ] = None,
    json: Json = False,
) -> None:
    """Verify that nobody changed a run: its record, rounds, groups, checkpoints and results.

    Each line of the record holds a hash of the line before it. The audit verifies these hashes,
    replays the groups of every round, and compares the other files with the record. The exit code
    is 1 if something was changed. A person who can change the folder can also write a new record.
    To notice that, keep the last hash elsewhere and pass it later as --expect.

    Examples:

      coterie audit runs/a

      coterie audit runs/a --expect 3f9a...
    """
    from coterie.report.audit import audit as audit_run

    found = audit_run(folder, expect)
    if json:
        print_json(found.to_json())
    else:
        print(found)
        print("\nNothing was changed." if found.passed else "\nThe folder was changed.")
    if not found.passed:
        raise typer.Exit(1)
