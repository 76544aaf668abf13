"""How often IFCA finds all four rotations of rotated MNIST, with different starts.

The study uses the recipe of IFCA's Table 1 (200 images per client, ten full-batch steps of 0.1)
with fewer clients, because the first rounds decide whether a start succeeds. A start succeeds if,
after the last round, the groups are exactly the rotations. In the paper, the four initial models
are drawn independently.
"""

import numpy as np

from coterie.running.build import build
from coterie.running.loop import run
from coterie_lab.recipes.ifca import rotated_mnist
from coterie_lab.studies.common import options, table, write

STARTS = {
    "independent draws": {},
    "drawn again until each is preferred by 10 %": {"redraw": 0.1},
    "groups of the survey": {"first": "survey"},
}


def identities(seed: int, clients: int, rounds: int, **options: object) -> list[float]:
    """The share of clients in the right group after each round."""
    tables = rotated_mnist("IFCA", 1200, seed, "paper")
    tables["algorithm"] |= options
    tables["data"]["keep"] = clients // 4
    tables["run"] |= {"rounds": rounds, "evaluate_every": rounds}
    ready = build(tables)
    result = run(ready.algorithm, ready.data, ready.settings)
    return [line["identity"] for line in result.rounds]


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=20)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    figures, lines = {}, []
    for name, chosen in STARTS.items():
        found = [
            identities(seed, args.clients, args.rounds, **chosen) for seed in range(args.seeds)
        ]
        last = [by_round[-1] for by_round in found]
        right = [seed for seed, value in enumerate(last) if value == 1]
        first = [found[seed].index(1) + 1 for seed in right]
        figures[name] = found
        lines.append([name, len(right), right, max(first, default=0), float(np.mean(last))])
        print(name, len(right), "of", args.seeds, right, flush=True)
    heads = ["start", f"successes of {args.seeds}", "seeds", "latest round", "mean share"]
    table(f"{args.clients} clients, {args.rounds} rounds", heads, lines)
    write(args.json, {"clients": args.clients, "rounds": args.rounds, "identity": figures})


if __name__ == "__main__":
    main()
