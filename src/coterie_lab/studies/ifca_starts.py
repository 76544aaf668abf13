"""How often IFCA finds all four rotations of rotated MNIST, with different starts.

The study uses the recipe of IFCA's Table 1 (200 images per client, ten full-batch steps of 0.1)
with fewer clients, because the first rounds decide whether a start succeeds. A start succeeds if,
after the last round, the groups are exactly the rotations. In the paper, the four initial models
are drawn independently.
"""

import numpy as np
import torch

from coterie import metrics
from coterie.algorithms import Survey, common
from coterie.algorithms.survey import seeded
from coterie.core.federation import Federation
from coterie.engines import Simulation
from coterie.running.build import build
from coterie_lab.recipes.ifca import rotated_mnist
from coterie_lab.studies.common import options, run, table, write

DRAWS = 100
STARTS = (
    "independent draws",
    "drawn again until each is preferred by 10 %",
    "groups of the survey",
)


def draw_again(algorithm, fed: Federation, share: float):
    """The first of up to 100 draws in which each model is best for this share of the clients."""
    for attempt in range(DRAWS):
        key = fed.key("models", attempt)
        shared, models = common.draw_models(algorithm.model, key, algorithm.n_groups)
        _, reply = fed.map(algorithm.losses, shared, models, to=fed.cohort())
        best = torch.bincount(reply["losses"].argmin(1), minlength=algorithm.n_groups)
        if int(best.min()) >= share * len(reply["losses"]):
            break
    return shared, models


def identities(seed: int, clients: int, rounds: int, start: str) -> list[float]:
    """The share of clients in the right group after each round."""
    tables = rotated_mnist("IFCA", 1200, seed, "paper")
    tables["data"]["keep"] = clients // 4
    ready = build(tables)
    algorithm, fed = ready.algorithm, Simulation(ready.data, seed)
    fed.begin(-1)
    state = algorithm.init(fed)
    if start == STARTS[1]:
        shared, models = draw_again(algorithm, fed, 0.1)
        state = state._replace(shared=shared, models=models)
    if start == STARTS[2]:
        method = Survey(algorithm.model, algorithm.local)
        ids, seen = seeded.look(
            method, fed, fed.everyone(), fed.key("survey"), 4, algorithm.n_groups
        )
        fed.start = fed.per_client(-1).index_copy(0, ids, seen.labels.masked_fill(seen.odd, -1))
    fed.commit()
    return [
        metrics.identity_accuracy(after.assignment, ready.data.truth)
        for after, _ in run(algorithm, fed, rounds, state)
    ]


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=20)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    figures, lines = {}, []
    for name in STARTS:
        found = [identities(seed, args.clients, args.rounds, name) for seed in range(args.seeds)]
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
