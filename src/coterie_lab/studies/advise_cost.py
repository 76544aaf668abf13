"""What `advise` costs: exchanges, bytes and CPU time.

    python -m coterie_lab.studies.advise_cost

Rows of eight columns in four classes; half of the clients have exchanged two labels. With them the
survey finds two groups and asks about inputs and columns, too, so that every exchange is counted.
"""

import time

import numpy as np

import coterie
from coterie_lab.studies.common import options, table

SIZES = ((50, 500), (1000, 50))  # clients, rows of each


def measure(m: int, n: int, seed: int) -> list[object]:
    """Clients, rows, exchanges, kB sent to and from each client, groups found, and CPU seconds."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, (m, n))
    x = draw.normal(size=(4, 8))[y] + draw.normal(size=(m, n, 8))
    y[::2] = np.array([1, 0, 2, 3])[y[::2]]
    data = coterie.from_arrays(list(x.astype(np.float32)), list(y), test_fraction=0.0)
    start = time.process_time()
    advice = coterie.advise(data, seed=seed)
    seconds = time.process_time() - start
    found = advice.evidence
    kilobytes = [round(found[way] / 1000, 2) for way in ("bytes_down", "bytes_up")]
    return [m, n, found["exchanges"], *kilobytes, advice.n_groups, round(seconds, 1)]


def main() -> None:
    given = options(__doc__.split("\n")[0], seeds=1).parse_args()
    heads = ["clients", "rows", "exchanges", "kB to each", "kB from each", "groups", "CPU seconds"]
    rows = [measure(m, n, seed) for m, n in SIZES for seed in range(given.seeds)]
    table("What advise costs", heads, rows)


if __name__ == "__main__":
    main()
