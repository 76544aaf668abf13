"""Mixed linear regression of CLoVE's Fig. 3: the first round with the right groups.

Five groups of five clients, d = 20, noise 1e-4, 900 samples each. Adam with 1e-3, batches of 100,
25 epochs per round. Round 1 clusters the losses of the initial models. IFCA runs on the same data
with the same kind of initial models.
"""

from coterie import metrics, models
from coterie.algorithms import IFCA, Census, CLoVE
from coterie.core import LocalSGD, Model
from coterie.data import linear_groups
from coterie.engines import Simulation
from coterie_lab.studies.common import options, run, stays, table, write

LOCAL = LocalSGD(learning_rate=1e-3, optimizer="adam", batch_size=100, epochs=25)


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--separations", type=float, nargs="+", default=[1, 0.1, 0.01, 0.001])
    args = parser.parse_args()
    figures, lines = [], []
    for separation in args.separations:
        found: dict[str, list[list[float | None]]] = {}
        for seed in range(args.seeds):
            data = linear_groups(separation=separation, seed=seed)
            model = Model(models.make("linear_regressor", data), "squared_error")
            methods = {
                "clove": CLoVE(model, LOCAL, n_groups=5),
                "clove sqrt": CLoVE(model, LOCAL, n_groups=5, embedding="sqrt"),
                "census": Census(model, LOCAL, n_groups=5, first="evaluation"),
                "ifca": IFCA(model, LOCAL, n_groups=5),
            }
            for name, method in methods.items():
                curve = []
                for state, _ in run(method, Simulation(data, seed=seed), args.rounds):
                    curve.append(metrics.adjusted_rand(state.assignment, data.truth))
                distance = metrics.parameter_distance(state.models["weight"], data.extra["targets"])
                found.setdefault(name, []).append(curve)
                figures.append(
                    {
                        "separation": separation,
                        "seed": seed,
                        "method": name,
                        "ari": curve,
                        "first_round_kept": stays(curve),
                        "distance": distance,
                    }
                )
        for name, curves in found.items():
            ends = [curve[-1] for curve in curves]
            firsts = [stays(curve) for curve in curves]
            lines.append([f"{separation:g}", name, firsts, ends])
            print(*lines[-1], flush=True)
    table(
        f"First of {args.rounds} rounds after which the ARI stays 1, seeds 0 to {args.seeds - 1}",
        ["separation", "method", "first round", "ARI at the end"],
        lines,
    )
    write(args.json, figures)


if __name__ == "__main__":
    main()
