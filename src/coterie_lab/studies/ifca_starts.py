"""How often does IFCA find all four turns of rotated MNIST, and what do better starts change?

The recipe of its Table 1 (200 images a client, ten full-batch steps of 0.1) with fewer clients:
what a start is worth shows in the first rounds, and losses of few clients show it as well. A start
counts if after the last round every client shares its group with all of its turn and with nobody
else. The published start is four independent draws.
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
    """Share of clients in the right group, by round."""
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
    heads = ["start", f"right, of {args.seeds}", "seeds", "by round", "mean share"]
    table(f"{args.clients} clients, {args.rounds} rounds", heads, lines)
    write(args.json, {"clients": args.clients, "rounds": args.rounds, "identity": figures})


if __name__ == "__main__":
    main()
