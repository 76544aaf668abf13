"""Compare four methods on a SuperLink and four SuperNodes with the simulation, bit for bit.

The connection uses TLS and node keys, and both sides use one thread. The state of the server after
the last round is compared.
"""

import argparse
import tempfile
import time
from pathlib import Path

from common import describe_run, federation, note, quiet, simulate_run, state_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["census", "ifca", "blend", "mosaic"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--insecure", action="store_true", help="without TLS and node keys")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    options = parser.parse_args()
    figures = {}
    for method in options.methods:
        tables = describe_run(method, options.rounds)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            expected = simulate_run(tables, folder / "simulated")
            began = time.monotonic()
            with federation(folder / "real", tables, insecure=options.insecure) as local:
                whole = local.run({}, attempts=1, seconds=1500.0, say=quiet)
                found = state_of(local.out) if whole else (0, "none")
            figures[method] = {
                "finished": whole,
                "rounds": found[0],
                "equal": found == expected,
                "sha256": found[1][:16],
                "simulated": expected[1][:16],
                "seconds": round(time.monotonic() - began),
            }
        print(method, figures[method], flush=True)
        note(options.json, figures)


if __name__ == "__main__":
    main()
