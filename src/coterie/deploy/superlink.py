"""Run Flower's SuperLink with a control interface that is closed to strangers."""

import sys
from pathlib import Path


def main() -> None:
    """Run it: python -m coterie.deploy.superlink TOKEN-FILE ARGUMENTS OF flower-superlink."""
    from coterie.engines.flower_private import run_superlink

    run_superlink(Path(sys.argv[1]).read_text(), sys.argv[2:])


if __name__ == "__main__":
    main()
