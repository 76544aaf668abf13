"""How much the accuracy in CLoVE's label skews 2 and 3 depends on the draw of classes and shares.

The published tables draw them once, so the standard deviations over seeds do not include this draw.
They also draw the shares of the test rows separately from those of the training rows. This study
runs a few rounds with several draws (draw 0 is that of the recipes) and both kinds of test shares.
"""

import numpy as np

from coterie.running.build import build
from coterie.running.loop import run
from coterie_lab.partitions.pools import TEST_SHARES
from coterie_lab.recipes.clove_images import description
from coterie_lab.studies.common import options, table, write


def accuracy(mixing: str, column: str, method: str, rounds: int, draw: int, shares: str) -> float:
    """The test accuracy in % after some rounds, as the mean over clients."""
    cut = {"partition_seed": draw, "test_shares": shares}
    tables = description(mixing, column, method, 1, "paper", data=cut, run={"rounds": rounds})
    ready = build(tables)
    result = run(ready.algorithm, ready.data, ready.settings)
    return 100 * float(result.summary["accuracy"]["mean"])


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mixings", nargs="+", default=["Label skew 2", "Label skew 3"])
    parser.add_argument("--sources", nargs="+", default=["MNIST", "FMNIST"])
    parser.add_argument("--methods", nargs="+", default=["Local-only", "CLoVE"])
    args = parser.parse_args()
    figures, lines = [], []
    for cell in [(m, c, row) for m in args.mixings for c in args.sources for row in args.methods]:
        for shares in TEST_SHARES:
            found = [accuracy(*cell, args.rounds, draw, shares) for draw in range(args.seeds)]
            figures.append({"cell": cell, "test_shares": shares, "accuracy": found})
            lines.append([*cell, shares, found, float(np.mean(found)), float(np.std(found))])
    heads = [
        "",
        "data",
        "method",
        "test shares",
        "accuracy in % by draw",
        "mean",
        "standard deviation",
    ]
    table(f"{args.rounds} rounds, seed 1", heads, lines)
    write(args.json, {"rounds": args.rounds, "figures": figures})


if __name__ == "__main__":
    main()
