"""The command `coterie`. Commands import what they need when they run, so that help is instant."""

import sys
import warnings
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the command line: 0 if all went well, 1 if a check failed, 2 for a mistake."""
    from coterie.cli.app import app

    warnings.showwarning = _warn
    try:
        app(prog_name="coterie")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from coterie.core.errors import CoterieError

        if not isinstance(error, CoterieError):
            raise
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning as a sentence; where in the code it arose helps nobody at a prompt."""
    print(f"Warning: {message}", file=sys.stderr)
