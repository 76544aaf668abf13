"""The command `coterie`. Commands import what they need when they run, so that help is instant."""

import sys
import warnings
from contextlib import redirect_stdout
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the command line: 0 if all went well, 1 if a check failed, 2 for a mistake."""
    from coterie.cli.app import app

    warnings.showwarning = _warn
    try:
        with redirect_stdout(sys.stdout if _shows_help() else _Printable(sys.stdout)):
            app(prog_name="coterie")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.filename is None:
            raise
        from coterie.core.errors import printable

        said = f"{error.filename}: {error.strerror}. Check the path, and that you may use it."
        print(f"Error: {printable(said)}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        from coterie.cli.options import as_options
        from coterie.core.errors import CoterieError, printable

        if not isinstance(error, CoterieError):
            raise
        print(f"Error: {printable(as_options(str(error)))}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning as a sentence; where in the code it arose helps nobody at a prompt."""
    from coterie.core.errors import printable

    print(f"Warning: {printable(str(message))}", file=sys.stderr)


def _shows_help() -> bool:
    """Whether help is shown, whose colours are control characters, and no data."""
    return len(sys.argv) < 2 or "--help" in sys.argv or sys.argv[1:] == ["deploy"]


class _Printable:
    """An output on which names and values from files cannot steer the terminal."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text with control characters as escapes."""
        from coterie.core.errors import printable

        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
