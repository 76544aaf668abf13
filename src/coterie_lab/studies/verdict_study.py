"""The verdict on partitions of MNIST: how often it is right, and how far from the best choice.

    python -m coterie_lab.studies.verdict_study --json verdict.json
    python -m coterie_lab.studies.verdict_study --only "LS4" --seeds 3 --json verdict.json

Clients have 500 rows, of which a fifth is held out. Three ways train for 40 rounds: one model for
all, groups of `census` with a given number (four if there are none, three if each client numbers
the classes in a different order), and each client alone. After 10, 20 and 40 rounds, the verdict by
held-out losses is compared with the accuracy on test data, which the verdict does not use. A
verdict is right if it names the way with the best test accuracy; otherwise the difference in
accuracy counts. Figures are written at once. Seeds start at 21.
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
from coterie.running.verdict import judge
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
    """Held-out losses and test accuracy at the marks, and mean held-out losses near them."""
    fed, out, by_round = Simulation(data, seed=seed), {}, []
    for number, (state, _) in enumerate(run(algorithm, fed, rounds), start=1):
        if any(mark - 5 <= number <= mark for mark in MARKS):
            held = evaluate(algorithm, fed, state, data.task, split="validation").loss
            by_round.append([number, float(held.mean())])
            if number in MARKS:
                tested = evaluate(algorithm, fed, state, data.task).accuracy
                out[str(number)] = {
                    "clients": list(data.names),
                    "loss": held.tolist(),
                    "held": data.sizes("validation").tolist(),
                    "samples": (data.sizes("train") + data.sizes("validation")).tolist(),
                    "split": "validation",
                    "rounds": number,
                    "by_round": list(by_round),
                    "bytes": fed.traffic.total(),
                    "accuracy": 100 * float(tested.mean()),
                }
                if hasattr(state, "assignment") and data.truth is not None:
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
        "local": LocalOnly(model, LOCAL),
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
            if not all(f"{part}/{seed}/{name}" in store for name in ("one", "groups", "local")):
                continue
            for mark in map(str, MARKS):
                arms = {
                    n: store.figures[f"{part}/{seed}/{n}"].get(mark)
                    for n in ("one", "groups", "local")
                }
                if None in arms.values():
                    continue
                verdict = judge(arms)  # type: ignore[arg-type]
                right = {name: found["accuracy"] for name, found in arms.items()}
                best = max(right, key=lambda name: right[name])
                behind = right[best] - right[verdict["choice"]]
                hits, asked, worst = hits + (behind == 0), asked + 1, max(worst, behind)
                if mark == str(MARKS[-1]):
                    at_end.setdefault(part, []).append((verdict["choice"], behind))
                mean, low, high = verdict["intervals"]["groups over one"]
                shown = " / ".join(f"{value:.1f}" for value in right.values())
                gain = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
                flag = "provisional" if verdict["provisional"] else ""
                ari = arms["groups"].get("ari")
                lines.append(
                    [
                        part,
                        seed,
                        mark,
                        shown,
                        gain,
                        verdict["choice"],
                        flag,
                        f"{behind:.1f}",
                        f"{verdict['better_off']:.0%}",
                        ari,
                    ]
                )
    names = [
        "partition",
        "seed",
        "round",
        "one / groups / local",
        "groups over one",
        "verdict",
        "",
        "behind",
        "better off",
        "ARI",
    ]
    table("Verdict by held-out loss, and test accuracy", names, lines)
    print(f"\nBest way at {hits} of {asked} marks; at most {worst:.1f} points behind.")
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
