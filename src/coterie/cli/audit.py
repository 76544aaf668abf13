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

    The record of a run is a log chained by hashes. The audit verifies the chain, replays who was
    in which group when, and compares the other files with it. The exit code is 1 if something was
    changed. Keep the last hash elsewhere and pass it later as --expect: who can change the folder
    can also write a new chain, but not one that contains this hash.

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
