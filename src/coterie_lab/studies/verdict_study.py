"""The verdict on partitions of MNIST: how often it is right, and how far from the best choice.

    python -m coterie_lab.studies.verdict_study --json verdict.json
    python -m coterie_lab.studies.verdict_study --only "LS4" --seeds 3 --json verdict.json

Clients have 500 rows, of which a fifth is held out. Three ways train for 40 rounds: one model for
all, groups of `census` with a given number (four if there are none, three if each client numbers
the classes in a different order), and each client alone. After 10, 20 and 40 rounds, the verdict by
held-out losses is compared with the accuracy on test data, which the verdict does not use. Each way
is judged at its best round so far; its accuracy is that of the last. A verdict is right if the way
that it recommends to most clients has the best test accuracy; otherwise the difference in accuracy
counts. An undecided verdict is neither. Figures are written at once. Seeds start at 21.
"""

from typing import Any

import numpy as np
import torch

from coterie import metrics
from coterie.algorithms import Census, FedAvg, LocalOnly
from coterie.core.algorithm import Algorithm
from coterie.data import FederatedData
from coterie.engines import Simulation
from coterie.running.evaluation import evaluate
from coterie.running.held_out import HeldOut, rank_units
from coterie.running.verdict import Trained, judge
from coterie_lab.studies.common import (
    LOCAL,
    PARTITIONS,
    Store,
    options,
    partition,
    run,
    small_net,
    table,
)

FIRST_SEED = 21
MARKS = (10, 20, 40)
FORCED = {"IID": 4, "own labels": 3}
CLIENTS = {"IID": 16, "rot 4": 4, "concept 4": 4, "LS1": 4, "LS3": 4, "LS4": 3}  # of a group
PARTS = ("rot 4", "concept 4", "LS1", "IID", "LS3", "LS4", "own labels")


def arm(algorithm: Algorithm, data: FederatedData, seed: int, rounds: int) -> dict[str, Any]:
    """Held-out losses and test accuracy at the marks, and mean held-out losses by round."""
    fed, out, by_round = Simulation(data, seed=seed), {}, []
    held = HeldOut(rank_units(data, "validation"))
    length = held.rank.shape[1]
    for number, (state, _) in enumerate(run(algorithm, fed, rounds), start=1):
        scores = evaluate(algorithm, fed, state, data.task, split="validation", rows=length)
        assert scores.rows is not None
        held.see(number, scores.ids, scores.rows)
        by_round.append([number, float(scores.loss.mean())])
        if number in MARKS:
            tested = evaluate(algorithm, fed, state, data.task).accuracy
            out[str(number)] = {
                "clients": list(data.names),
                "trained_on": data.sizes("train").tolist(),
                "losses": held.losses.tolist(),
                "split": "validation",
                "stop": "rounds",
                "rounds": number,
                "best_round": held.best,
                "by_round": list(by_round),
                "bytes": fed.traffic.total(),
                "accuracy": 100 * float(tested.mean()),
            }
            if hasattr(state, "assignment") and data.truth is not None:
                out[str(number)]["groups"] = len(state.assignment.unique())
                out[str(number)]["ari"] = metrics.adjusted_rand(state.assignment, data.truth)
    return out


def figures(part: str, seed: int, rounds: int, store: Store) -> None:
    """Run all three ways on one partition."""
    data = partition(part, seed, per_group=CLIENTS.get(part)).hold_out(0.2, seed=seed)
    model = small_net(data)
    k = FORCED.get(part) or PARTITIONS[part][3]
    arms: dict[str, Algorithm] = {
        "one": FedAvg(model, LOCAL),
        "groups": Census(model, LOCAL, n_groups=k),
        "alone": LocalOnly(model, LOCAL),
    }
    for name, algorithm in arms.items():
        if f"{part}/{seed}/{name}" not in store:
            store.put(f"{part}/{seed}/{name}", arm(algorithm, data, seed, rounds))
            print(part, seed, name, flush=True)


def report(store: Store) -> None:
    """Print the table of verdicts."""
    lines, hits, asked, worst = [], 0, 0, 0.0
    at_end: dict[str, list[tuple[str, float]]] = {}
    for part in PARTS:
        seeds = sorted(
            {name.split("/")[1] for name in store.figures if name.startswith(f"{part}/")}
        )
        for seed in seeds:
            if not all(f"{part}/{seed}/{name}" in store for name in ("one", "groups", "alone")):
                continue
            for mark in map(str, MARKS):
                arms = {
                    n: store.figures[f"{part}/{seed}/{n}"].get(mark)
                    for n in ("one", "groups", "alone")
                }
                if None in arms.values():
                    continue
                trained = {n: [Trained(f, torch.tensor(f["losses"]))] for n, f in arms.items()}
                verdict = judge(trained, {}, arms["groups"]["groups"])
                right = {name: found["accuracy"] for name, found in arms.items()}
                best = max(right, key=lambda name: right[name])
                choice = verdict["recommendation"]
                behind = None
                if verdict["most"] is not None:
                    behind = right[best] - right[verdict["most"]]
                    hits, asked, worst = hits + (behind == 0), asked + 1, max(worst, behind)
                if mark == str(MARKS[-1]):
                    at_end.setdefault(part, []).append((choice, behind or 0.0))
                mean, low, high = verdict["per_client"].get("groups over one", [np.nan] * 3)
                lines.append(
                    [
                        part,
                        seed,
                        mark,
                        " / ".join(f"{value:.1f}" for value in right.values()),
                        f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]",
                        choice,
                        "provisional" if verdict["falls"] else "",
                        "" if behind is None else f"{behind:.1f}",
                        len(verdict["exceptions"]),
                        arms["groups"].get("ari"),
                    ]
                )
    names = [
        "partition",
        "seed",
        "round",
        "one / groups / alone",
        "groups over one",
        "verdict",
        "",
        "behind",
        "better otherwise",
        "ARI",
    ]
    table("Verdict by held-out loss, and test accuracy", names, lines)
    print(f"\nBest way in {hits} of {asked} decided cases; at most {worst:.1f} points behind.")
    for part, found in at_end.items():
        counts = {choice: sum(c == choice for c, _ in found) for choice, _ in found}
        behind = np.max([b for _, b in found])
        print(f"{part}, round {MARKS[-1]}: {counts}, behind by {behind:.1f} at most")


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=1)
    parser.add_argument("--only", help="one partition", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(given.json)
    for seed in range(FIRST_SEED, FIRST_SEED + given.seeds):
        for part in PARTS if given.only is None else (given.only,):
            figures(part, seed, given.rounds, store)
    report(store)


if __name__ == "__main__":
    main()
